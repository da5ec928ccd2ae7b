"""Logged metrics: where they are written, and their means between two rows."""

import functools
import json
import math
import time
from typing import Any

from absl import logging

from slpo_jax.errors import UserError
from slpo_jax.io import hosts
from slpo_jax.io.files import write_text
from slpo_jax.io.workdir import Workdir

_FLUSH_SECONDS = 120.0


class MetricsLog:
    """`metrics.jsonl` and TensorBoard events of a workdir.

    Args:
        workdir: where they go.
    """

    def __init__(self, workdir: Workdir):
        self.workdir, self.path, self._flush_at = workdir, workdir.metrics, 0.0

    @functools.cached_property
    def _events(self) -> Any:
        """The file of events, made for the first row: its package takes seconds to import.

        Written to by the thread that logs. tensorboardX's own thread dies of a full disk without a word to the others,
        which then wait for it.
        """
        from tensorboardX.event_file_writer import EventsWriter

        self.workdir.tensorboard.mkdir(parents=True, exist_ok=True)
        return EventsWriter(str(self.workdir.tensorboard / "events"))

    def rewind(self, stage: str, step: int, scalar: str = "step") -> None:
        """Forget a stage's rows after `step`, those with a certain scalar: they are about to be written again.

        Raises:
            UserError: the file holds something else than rows.
        """
        if self.path.exists():
            kept = [row for row in self._rows() if row["stage"] != stage or row["step"] <= step or scalar not in row]
            write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def _rows(self) -> list[dict[str, Any]]:
        """All rows; a last line that an interruption tore is none."""
        lines = self.path.read_bytes().splitlines()
        found = [_parsed(line) for line in lines]
        for number, row in enumerate(found, start=1):
            if row is None and number < len(lines):
                raise UserError(f"{self.path}: line {number} is no row of metrics; mend it or move the file away")
        return [row for row in found if row is not None]

    def write(self, stage: str, step: int, scalars: dict[str, float]) -> None:
        """One row, of several processes the first's."""
        if not hosts.is_first():
            return
        try:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, "stage": stage, **scalars}) + "\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None  # what it says of a full disk has none
        self._add_event(step, {f"{stage}/{name}": value for name, value in scalars.items() if math.isfinite(value)})

    def _add_event(self, step: int, scalars: dict[str, float]) -> None:
        """For TensorBoard, on the disk within some minutes."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._events.write_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        if time.monotonic() >= self._flush_at:
            self._events.flush()
            self._flush_at = time.monotonic() + _FLUSH_SECONDS

    def flush(self) -> None:
        if "_events" in self.__dict__:
            self._events.flush()

    def close(self) -> None:
        """Write the last events."""
        if "_events" in self.__dict__:
            self._events.close()


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A row, or None for what is none."""
    try:
        row = json.loads(line)
        return row if isinstance(row["stage"], str) and isinstance(row["step"], int) else None
    except (ValueError, TypeError, KeyError):
        return None


class Means:
    """Means of metrics over the steps since the last row, in float64, which add up the same wherever a run was cut.

    Attributes:
        sums: [sum, count] by name, JSON-able, so that a checkpoint between two rows can keep them.
    """

    def __init__(self, sums: dict[str, list[float]]):
        self.sums = sums

    def add(self, metrics: dict[str, Any]) -> None:
        """A step's metrics, each a mean over `metrics["counts"]` of its name, or a single value."""
        for name, value in metrics.items():
            if name not in ("counts", "skipped_steps", "skipped_in_a_row"):
                count = float(metrics.get("counts", {}).get(name, 1))
                before = self.sums.get(name, [0.0, 0.0])
                self.sums[name] = [before[0] + float(value) * count, before[1] + count]

    def take(self) -> dict[str, float]:
        """The means, 0 over nothing; then begin anew."""
        sums, self.sums = self.sums, {}
        return {name: total / count if count else 0.0 for name, (total, count) in sums.items()}


def warn_of_cuts(label: str, share: float, key: str) -> bool:
    """Say so, and return True, where most answers have no end within the budget of answer tokens, so earn nothing.

    Args:
        label: of what was rolled out.
        share: of its answers that are cut.
        key: of the config, that sets the budget.
    """
    if share <= 0.5 or not hosts.is_first():
        return False
    text = "%s: %.0f%% of the answers are cut at the limit, and wrong whatever they say; raise config.%s"
    logging.warning(text, label, 100 * share, key)
    return True
