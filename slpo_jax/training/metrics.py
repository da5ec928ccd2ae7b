"""Logged metrics: where they are written, and their means between two rows."""

import json
import math
from collections.abc import Collection
from typing import Any

from absl import logging

from slpo_jax.errors import UserError, in_a_line
from slpo_jax.io import hosts
from slpo_jax.io.files import to_json, write_text
from slpo_jax.io.workdir import Workdir
from slpo_jax.training.trackers import TRACKERS, Tracker

CLOCK = ("seconds", "tokens_per_second")
"""What differs between two runs that are the same."""


class MetricsLog:
    """`metrics.jsonl` of a workdir, and the run's trackers.

    Args:
        workdir: where it goes.
    """

    def __init__(self, workdir: Workdir):
        self.workdir, self.path = workdir, workdir.metrics
        self._trackers: dict[str, Tracker] = {}
        self._known: set[str] = set()  # rows that were taken back, which the trackers have

    def start(self, names: Collection[str], config: dict[str, Any]) -> None:
        """Start the trackers of these names, of several processes in the first.

        Args:
            config: the run's.
        Raises:
            UserError: one can't be started.
        """
        for name in names if hosts.is_first() else ():
            try:
                self._trackers[name] = TRACKERS[name](self.workdir.root, config)
            except Exception as error:  # of a library, or the user's code, either of which can raise anything
                reason = in_a_line(error)
                raise UserError(f"config.trackers: {name}: {reason}; mend that, or leave the tracker out") from error

    def rewind(self, stage: str, step: int, scalar: str = "step") -> None:
        """Forget a stage's rows after `step`, those with a certain scalar: they are about to be written again."""
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text("utf-8", "replace").splitlines(keepends=True):
            row = _parsed(line)
            if row is not None and row["stage"] == stage and row["step"] > step and scalar in row:
                self._known.add(_timeless(row))
            elif row is not None or line.endswith("\n"):  # else an interruption tore it
                kept.append(line.rstrip("\n") + "\n")
        write_text(self.path, "".join(kept))

    def write(self, stage: str, step: int, scalars: dict[str, float]) -> None:
        """One row, of several processes the first's."""
        if not hosts.is_first():
            return
        row = {"step": step, "stage": stage, **scalars}
        try:
            with self.path.open("a") as file:
                file.write(to_json(row) + "\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None  # what it says of a full disk has none
        key = _timeless(row)
        if key in self._known:
            self._known.discard(key)
        else:
            self._track(stage, step, {f"{stage}/{name}": x for name, x in scalars.items() if math.isfinite(x)})

    def _track(self, stage: str, step: int, scalars: dict[str, float]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(step, scalars)
            except Exception as error:
                del self._trackers[name]
                logging.warning(
                    "config.trackers: %s is off from step %d of %s on (%s); metrics.jsonl has all rows",
                    name, step, stage, in_a_line(error),
                )  # fmt: skip

    def close(self) -> None:
        """Let go of the trackers."""
        for name in list(self._trackers):
            try:
                self._trackers.pop(name).finish()
            except Exception as error:
                logging.warning("config.trackers: %s did not end well (%s)", name, in_a_line(error))


def _timeless(row: dict[str, Any]) -> str:
    """A row without what depends on the clock: a run that goes on writes the same again."""
    return to_json({name: value for name, value in row.items() if name not in CLOCK}, sort_keys=True)


def _parsed(line: str) -> dict[str, Any] | None:
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
