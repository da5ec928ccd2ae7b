"""The loop that every stage shares: steps, logs one step late, checkpoints, and going on after an interruption."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
_SHOWN = ("loss", "accuracy", "reward", "latent_steps")  # beside the progress
WINDOW = 20  # steps by whose accuracy a stage of imitation is learned
_STOPS = (signal.SIGINT, signal.SIGTERM)

StepFn = Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]


class AccuracyWindow:
    """The accuracies of the last `WINDOW` steps, by which a stage of imitation is learned.

    Args:
        accuracies: of the checkpoint that a run goes on from.
    """

    def __init__(self, accuracies: Sequence[float] = ()):
        self.accuracies = list(accuracies)

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add a step's metrics; those without an accuracy, as of CODI's teacher alone, say nothing."""
        if "accuracy" in metrics:
            self.accuracies.append(float(metrics["accuracy"]))
            self.accuracies = self.accuracies[-WINDOW:]

    @property
    def mean(self) -> float:
        """The mean of the accuracies that there are."""
        count = len(self.accuracies)
        return sum(self.accuracies) / max(count, 1)

    def is_learned(self, until: float) -> bool:
        """Tell whether the window is full, and its mean at least `until`."""
        is_full = len(self.accuracies) == WINDOW
        return is_full and self.mean >= until


def _now() -> float:
    """Return the time in seconds, which stands still while something is compiled."""
    return time.perf_counter() - backend.seconds()


def _obey() -> None:
    """Restore the default SIGTERM in forked processes, which a pool ends by it; this process only remembers it.

    SIGINT stays ignored in them: a terminal sends Ctrl-C to all, and this process has to finish its step.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if getattr(handler, "__func__", None) is StageLoop._remember:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)  # which tells this one of a signal


_forking = threading.local()


def _hold_sigterm() -> None:
    """Have SIGTERM wait: what comes to a child before it obeys would be remembered and then forgotten by Python."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_sigterm_come() -> None:
    """Let SIGTERM come as before the fork."""
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


# In a child, hooks run in this order.
os.register_at_fork(after_in_child=_obey)
os.register_at_fork(
    before=_hold_sigterm,
    after_in_parent=_let_sigterm_come,
    after_in_child=_let_sigterm_come,
)


class StageLoop:
    """The log, the checkpoints and the clock of a stage's steps, which the stage itself takes.

    A stage's loop reads so:

        with loop:
            batch = make_batch(step)
            while step < steps:
                with jax.transfer_guard("disallow"):
                    state, metrics = step_fn(state, batch)
                step += 1
                last_batch = batch
                batch = make_batch(step)
                loop.log(step, metrics, last_batch)
                if loop.should_save(step):
                    loop.save(state)
            loop.finish(state)

    It takes SIGINT and SIGTERM until it is left, as a context manager, however that is.

    Args:
        name: the stage.
        total: steps of the whole stage; the last has a row in the log, whatever `log_every` is.
        start: steps already done.
        log_every, checkpoint_every: in steps.
        max_skipped: consecutive steps without a finite loss and gradient, after which the run ends.
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
        self.name = name
        self.total = total
        self.metrics_log = log
        self.checkpoints = checkpoints
        self.log_every = log_every
        self.checkpoint_every = checkpoint_every
        self.max_skipped = max_skipped

        # What is summed up since the log's last row.
        self._progress = Progress(name, total, start)
        self._means = Means(sums or {})
        self._tokens = tokens
        # The step whose metrics nobody has read yet: the arguments of `_report`.
        self._pending: tuple[int, dict[str, Any], Any, Any, Any] | None = None

        # The clock, which stands still in `pause`.
        self._clock = _now()
        self._seconds = 0.0
        self._clock_step = start
        self._clock_tokens = self._count_generated()
        # None: nothing is judged on the host.
        self._verifier_seconds: float | None = None

        # Signals are remembered, and obeyed between two steps.
        self._signal: int | None = None
        self._asked_to_stop = False
        self._warned = False
        self._held = contextlib.ExitStack()
        if threading.current_thread() is threading.main_thread():
            for number in _STOPS:
                handler = signal.signal(number, self._remember)
                self._held.callback(signal.signal, number, handler)
        self._held.callback(self._progress.close)
        self._held.callback(checkpoints.close)

    def __enter__(self) -> Self:
        self._clock = _now()
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

    def log(self, step: int, metrics: dict[str, Any], batch: Any) -> dict[str, Any]:
        """Take a step's metrics, which are read while the next step runs, and log those of the step before.

        Args:
            step: the number of steps taken.
            batch: the step's, which is left on the disk where too many consecutive steps are not finite.
        Returns:
            the metrics of the step before, on the host; {} where there is none, or it changed nothing.
        Raises:
            UserError: too many consecutive steps without a finite loss and gradient.
        """
        # A step in which the host judges is over now but for its update. Others are over when their metrics are read.
        judging = metrics.pop("verifier_seconds", None)
        end = _now() if judging is not None else None
        before = self.flush()
        self._pending = (step, metrics, batch, judging, end)
        return before

    def flush(self) -> dict[str, Any]:
        """Log the last step now, instead of while the next one runs; see `log`."""
        if self._pending is None:
            return {}
        pending = self._pending
        self._pending = None
        return self._report(*pending)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Log the last step, and leave what is done in here, as a validation, out of the steps' seconds."""
        self.flush()
        self._seconds += _now() - self._clock
        yield
        self._clock = _now()

    def should_save(self, step: int) -> bool:
        """Tell whether a checkpoint is due after this step, or the program was asked to stop. All processes ask."""
        self._asked_to_stop = hosts.any_of(self._signal is not None)
        is_due = step % self.checkpoint_every == 0
        return is_due or self._asked_to_stop

    def save(
        self,
        state: TrainState,
        extra: Mapping[str, Any] | None = None,
        replace: bool = False,
    ) -> None:
        """`StageCheckpoints.save` between two steps, with what is summed since the log's last row.

        Raises:
            SystemExit: after SIGINT or SIGTERM, once the state is saved.
        """
        self.flush()  # whoever goes on from here does not log this step again
        saved = dict(extra or {})
        saved[SUMS] = self._means.sums
        self.checkpoints.save(state, saved, replace)
        if self._asked_to_stop:
            self.finish(state)  # which keeps what is saved of this step

    def advance(
        self,
        state: TrainState,
        step_fn: StepFn,
        make_batch: Callable[[int], Any],
        until: int,
    ) -> TrainState:
        """Take all steps up to `until`, for a stage that does nothing else between them.

        Args:
            state: donated to the first step.
            step_fn: see `make_train_step`.
            make_batch: step -> batch.
        Raises:
            SystemExit, UserError: see `save` and `log`.
        """
        step = int(state.step)
        batch = make_batch(step) if step < until else None
        while step < until:
            # Everything that a step reads is on the devices already.
            with jax.transfer_guard("disallow"):
                state, metrics = step_fn(state, batch)
            step += 1

            # While the devices compute, the host makes the next batch and logs the step before.
            last_batch = batch
            if step < until:
                batch = make_batch(step)
            self.log(step, metrics, last_batch)
            if self.should_save(step):
                self.save(state)
        self.flush()
        return state

    def _count_generated(self) -> float:
        """Count tokens since the last row, as far as they are known."""
        totals: list[float] = []
        for name in self._tokens:
            total, *_ = self._means.sums.get(name, [0.0])
            totals.append(total)
        return sum(totals)

    def _row_of_clock(self, step: int, now: float) -> dict[str, float]:
        """Return the clock's part of a row, without compilation, validation and what was before this command.

        Args:
            now: when the step was over.
        """
        tokens = self._count_generated() - self._clock_tokens
        seconds = max(self._seconds + now - self._clock, 1e-9)
        steps = step - self._clock_step
        metrics = {"seconds": seconds / steps}
        if self._verifier_seconds is not None:
            judging = min(self._verifier_seconds, seconds)
            metrics["verifier_seconds"] = judging / steps
            metrics["verifier_share"] = metrics["verifier_seconds"] / metrics["seconds"]
            self._verifier_seconds = 0.0
        self._seconds = 0.0
        self._clock = now
        self._clock_step = step
        self._clock_tokens = 0.0
        if tokens:
            metrics["tokens_per_second"] = tokens / seconds
        return metrics

    def _report(
        self,
        step: int,
        metrics: dict[str, Any],
        batch: Any,
        judging: float | None,
        end: float | None,
    ) -> dict[str, Any]:
        """Read a step's metrics, and write a row where one is due; {} of a step that changed nothing.

        Args:
            judging: seconds that verifiers on the host took, by the same clock as the step's, of which they are a part.
            end: when the step was over; None: now.
        """
        metrics = jax.device_get(metrics)
        if judging is not None:
            self._verifier_seconds = (self._verifier_seconds or 0.0) + judging
        skipped = int(metrics.get("skipped_in_a_row", 0))
        if skipped >= self.max_skipped:
            self._give_up(step, batch)
        if not skipped:  # what changed nothing is counted, and no mean is of it
            self._means.add(metrics)
        valid_metrics = {} if skipped else metrics

        # Most steps have no row of their own.
        has_row = step % self.log_every == 0 or step >= self.total
        if not has_row:
            self._progress.update(step)
            return valid_metrics

        # A row has means over the steps since the last one.
        timed = self._row_of_clock(step, _now() if end is None else end)
        scalars = self._means.take() | timed
        if metrics.get("skipped_steps", 0):  # else a column of zeros in every run
            scalars["skipped_steps"] = float(metrics["skipped_steps"])
        self.metrics_log.write(self.name, step, scalars)
        if not self._warned:
            self._warned = warn_of_cuts(
                f"{self.name} at step {step}",
                scalars.get("cut", 0.0),
                "max_answer_tokens",
            )
        shown: dict[str, str] = {}
        for name in _SHOWN:
            if name in scalars:
                shown[name] = f"{scalars[name]:.3g}"
        self._progress.update(step, shown)
        return valid_metrics

    def _give_up(self, step: int, batch: Any) -> None:
        """Leave the batch where it can be looked at; the newest checkpoint stays the newest."""
        path = self.metrics_log.workdir.failed_batch(self.name, step)
        leaves: dict[str, Any] = {}
        for at, x in jax.tree_util.tree_leaves_with_path(batch):
            name = jax.tree_util.keystr(at)
            leaves[name] = hosts.gather_to_host(x)
        if hosts.is_first():
            np.savez_compressed(path, **leaves)
        raise UserError(
            f"{self.name}: loss or gradient was not finite in the last {self.max_skipped} steps, up to step {step}, "
            f"whose batch is in {path}; lower the stage's learning rate, mend the data or give "
            f"smaller rewards; then delete {self.checkpoints.directory} and run again"
        )

    def finish(self, state: TrainState, extra: Mapping[str, Any] | None = None) -> None:
        """Log the last step, save the last state, and let go of files and signals.

        Raises:
            SystemExit: there was a SIGINT or SIGTERM that nobody has obeyed yet.
        """
        self.flush()
        self.checkpoints.save(state, extra)
        self._held.close()
        if hosts.any_of(self._signal is not None):
            if hosts.is_first():
                print(
                    f"{self.name}: interrupted at step {int(state.step)}; the same command goes on from there"
                )
            raise SystemExit(128 + (self._signal or signal.SIGTERM))
