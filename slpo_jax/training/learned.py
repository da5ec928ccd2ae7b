"""When a stage of imitation is learned: by the accuracy of its last steps, which is all that it goes by."""

import dataclasses
from typing import Any

WINDOW = 20  # steps


@dataclasses.dataclass
class Learning:
    """A stage that ends when it is learned.

    What a step does is known while the next one runs, so a stage ends a step after its window is full of right rows.

    Attributes:
        until: the mean accuracy of the last `WINDOW` steps at which it is learned.
        first: the first step after which it may end.
        accuracies: of these steps, of a checkpoint that is gone on from.
        end: the step after which it ended before its time.
    """

    until: float
    first: int
    accuracies: list[float]
    end: int | None = None

    def add(self, metrics: dict[str, Any]) -> None:
        """A step's metrics; those without an accuracy, as of CODI's teacher alone, say nothing."""
        if "accuracy" in metrics:
            self.accuracies = [*self.accuracies, float(metrics["accuracy"])][-WINDOW:]

    @property
    def accuracy(self) -> float:
        """The mean of the window, as far as it is filled."""
        return sum(self.accuracies) / max(len(self.accuracies), 1)

    @property
    def is_learned(self) -> bool:
        """Whether the whole window says so."""
        return len(self.accuracies) == WINDOW and self.accuracy >= self.until

    def ends_after(self, step: int) -> bool:
        """Whether the stage ends with this step, of which nothing is known yet."""
        if step >= self.first and self.is_learned:
            self.end = step
        return self.end is not None
