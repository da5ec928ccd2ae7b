"""The loop that every stage shares: steps, logs one step late, checkpoints, and going on after an interruption."""

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import jax
import numpy as np

from slpo_jax.errors import UserError
from slpo_jax.runtime import backend, hosts
from slpo_jax.runtime.progress import Progress
from slpo_jax.training.metrics import Means, MetricsLog, warn_of_cuts
from slpo_jax.training.stage_checkpoints import StageCheckpoints
from slpo_jax.training.state import TrainState

SUMS = "metric_sums"  # in what is saved beside a state
_SHOWN: tuple[str, ...] = ("loss", "accuracy", "reward", "latent_steps")  # beside the progress
WINDOW = 20  # steps by whose accuracy a stage of imitation is learned
_STOPS = (signal.SIGINT, signal.SIGTERM)

StepFn = Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]


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
        """Add a step's metrics; those without an accuracy, as of CODI's teacher alone, say nothing."""
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
        """Tell whether the stage ends with this step, of which nothing is known yet."""
        if step >= self.first and self.is_learned:
            self.end = step
        return self.end is not None


def _now() -> float:
    """Return the time in seconds, which stands still while something is compiled."""
    return time.perf_counter() - backend.seconds()


def _obey() -> None:
    """Have a forked process obey SIGTERM where this one only remembers it: a pool ends its processes by that.

    Ctrl-C in a terminal is for all; one that a reward has forked goes on, so that this one can finish its step.
    """
    if getattr(signal.getsignal(signal.SIGTERM), "__func__", None) is StageLoop._remember:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)  # which tells this one of a signal


os.register_at_fork(after_in_child=_obey)


class StageLoop:
    """A stage's steps, possibly in several stretches with different programs.

    It takes SIGINT and SIGTERM until it is left, as a context manager, however that is.

    Args:
        name: the stage.
        total: steps of the whole stage; the last has a row in the log, whatever `log_every` is.
        start: steps already done.
        log_every, checkpoint_every: in steps.
        max_skipped: steps in a row without a finite loss and gradient, after which the run ends.
        sums: `Means.sums` of the checkpoint that is gone on from; None at a beginning.
        tokens: names of the metrics that together count what is generated.
    """

    def __init__(
        self,
        name: str,
        total: int,
        start: int,
        log: MetricsLog,
        checkpoints: StageCheckpoints,
        *,
        log_every: int,
        checkpoint_every: int,
        max_skipped: int,
        sums: dict[str, list[float]] | None = None,
        tokens: tuple[str, ...] = (),
    ):
        self.name, self.total, self.log, self.checkpoints = name, total, log, checkpoints
        self.log_every, self.checkpoint_every, self.max_skipped = log_every, checkpoint_every, max_skipped
        self._progress, self._means = Progress(name, total, start), Means(sums or {})
        self._tokens = tokens
        self._seconds, self._clock_step, self._clock_tokens = 0.0, start, self._generated()
        self._verifier_seconds: float | None = None  # None: nothing is judged on the host
        self._learning: Learning | None = None
        self._signal: int | None = None
        self._warned = False
        self._held = contextlib.ExitStack()
        if threading.current_thread() is threading.main_thread():
            for number in _STOPS:
                self._held.callback(signal.signal, number, signal.signal(number, self._remember))
        self._held.callback(self._progress.close)
        self._held.callback(checkpoints.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of files and signals on every way out, once what is being saved is on the disk."""
        self._held.close()

    def end_at(self, total: int) -> None:
        """Take note that the stage has other steps in all than was thought."""
        self.total = total
        self._progress.end_at(total)

    def _remember(self, number: int, _frame: Any) -> None:
        self._signal = number

    def advance(
        self,
        state: TrainState,
        step_fn: StepFn,
        make_batch: Callable[[int], Any],
        until: int,
        extra: Callable[[], dict[str, Any]] = dict,
        learning: Learning | None = None,
    ) -> TrainState:
        """Take steps up to `until`, or until they are learned. The host reads a step's metrics while the next one runs.

        Args:
            state: donated to the first step.
            step_fn: see `make_train_step`.
            make_batch: step -> batch.
            extra: what to save beside the state, asked for at each checkpoint.
            learning: what ends these steps before `until`.
        Raises:
            SystemExit: after SIGINT or SIGTERM, once the state is saved.
            UserError: too many steps in a row without a finite loss and gradient.
        """
        self._learning = learning
        step, pending, self._clock = int(state.step), None, _now()
        batch = make_batch(step) if step < until else None
        while step < until:
            with jax.transfer_guard("disallow"):  # everything that a step reads is on the devices already
                state, metrics = step_fn(state, batch)
            step += 1
            # By the same clock as the step's own seconds, of which it is a part.
            judging = metrics.pop("verifier_seconds", None)
            if judging is not None:
                self._verifier_seconds = (self._verifier_seconds or 0.0) + judging
            last_batch = batch
            if step < until:
                batch = make_batch(step)
            if pending is not None:
                self._report(*pending)
            if self._learning is not None and step < until and self._learning.ends_after(step):
                self.end_at(self.total - (until - step))
                until = step
            pending = (step, metrics, last_batch)
            asked_to_stop = hosts.any_of(self._signal is not None)
            if step % self.checkpoint_every == 0 or asked_to_stop:
                # First the step's row: whoever goes on from here does not log this step again.
                self._report(*pending)
                pending = None
                self.save(state, extra())
            if asked_to_stop:
                self.finish(state, extra())
        if pending is not None:
            self._report(*pending)
        self._seconds += _now() - self._clock
        return state

    def save(self, state: TrainState, extra: dict[str, Any], replace: bool = False) -> None:
        """`StageCheckpoints.save` between two steps, with what is summed since the log's last row."""
        self.checkpoints.save(state, {**extra, SUMS: self._means.sums}, replace)

    def _generated(self) -> float:
        """Count tokens since the last row, as far as they are known."""
        return sum(self._means.sums.get(name, [0.0])[0] for name in self._tokens)

    def _timed(self, step: int) -> dict[str, float]:
        """Return the clock's part of a row, without compilation, validation and what was before this command."""
        now, tokens = _now(), self._generated() - self._clock_tokens
        seconds = max(self._seconds + now - self._clock, 1e-9)
        steps = step - self._clock_step
        metrics = {"seconds": seconds / steps}
        if self._verifier_seconds is not None:
            metrics["verifier_seconds"] = min(self._verifier_seconds, seconds) / steps
            metrics["verifier_share"] = metrics["verifier_seconds"] / metrics["seconds"]
            self._verifier_seconds = 0.0
        self._seconds, self._clock, self._clock_step, self._clock_tokens = 0.0, now, step, 0.0
        return metrics | ({"tokens_per_second": tokens / seconds} if tokens else {})

    def _report(self, step: int, metrics: dict[str, Any], batch: Any) -> None:
        metrics = jax.device_get(metrics)
        skipped = int(metrics.get("skipped_in_a_row", 0))
        if skipped >= self.max_skipped:
            self._give_up(step, batch)
        if not skipped:  # what changed nothing is counted, and no mean is of it
            self._means.add(metrics)
            if self._learning is not None:
                self._learning.add(metrics)
        if step % self.log_every and step < self.total:
            self._progress.update(step)
            return
        timed = self._timed(step)
        scalars = self._means.take() | timed
        if metrics.get("skipped_steps", 0):  # else a column of zeros in almost every run
            scalars["skipped_steps"] = float(metrics["skipped_steps"])
        self.log.write(self.name, step, scalars)
        if not self._warned:
            self._warned = warn_of_cuts(f"{self.name} at step {step}", scalars.get("cut", 0.0), "max_answer_tokens")
        shown = {name: f"{scalars[name]:.3g}" for name in _SHOWN if name in scalars}
        self._progress.update(step, shown)

    def _give_up(self, step: int, batch: Any) -> None:
        """Leave the batch where it can be looked at; the newest checkpoint stays the newest."""
        path = self.log.workdir.failed_batch(self.name, step)
        pairs = jax.tree_util.tree_leaves_with_path(batch)
        leaves: dict[str, Any] = {jax.tree_util.keystr(at): hosts.whole(x) for at, x in pairs}
        if hosts.is_first():
            np.savez_compressed(path, **leaves)
        raise UserError(
            f"{self.name}: loss or gradient was not finite in the last {self.max_skipped} steps, up to step {step}, "
            f"whose batch is in {path}; lower the stage's learning rate or mend the data, delete "
            f"{self.checkpoints.directory} and run again"
        )

    def finish(self, state: TrainState, extra: dict[str, Any] | None = None) -> None:
        """Save the last state and let go of files and signals.

        Raises:
            SystemExit: there was a SIGINT or SIGTERM that nobody has obeyed yet.
        """
        self.checkpoints.save(state, extra)
        self._held.close()
        if hosts.any_of(self._signal is not None):
            if hosts.is_first():
                print(f"{self.name}: interrupted at step {int(state.step)}; the same command goes on from there")
            raise SystemExit(128 + (self._signal or signal.SIGTERM))
