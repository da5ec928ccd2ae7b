"""Logged metrics: where they are written, trackers beside metrics.jsonl, and means between two rows.

A tracker is started once a run, in the first process, and gets each row once: what was logged before an interruption is
not logged again by the command that goes on, except for the last row, which may not have reached it. Projects, servers
and accounts are set as each package has it, by its environment variables. What tells a tracker's own run again, and
what of the evaluation has been logged, is kept in the workdir's `trackers.json`.
"""

import functools
import importlib.util
import json
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from absl import logging

from slpo_jax.errors import UserError, in_a_line
from slpo_jax.io.files import digest, read_json, to_json, write_text
from slpo_jax.io.workdir import Workdir
from slpo_jax.runtime import hosts
from slpo_jax.stages import EVALUATE

CLOCK = ("seconds", "tokens_per_second", "verifier_seconds", "verifier_share")
"""What differs between two runs that are the same."""


class Tracker(Protocol):
    """A tracker that `config.trackers` names, once it is started."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log one row.

        Args:
            step: of its stage.
            scalars: finite numbers by STAGE/NAME, all of one stage; of the evaluation, at step 0, by
                evaluate/SET/ROW/FIGURE.
        """

    def log_completions(self, completions: Sequence[Mapping[str, str]]) -> None:
        """Log some answers of the evaluation; a tracker without this method is not given them.

        Args:
            completions: texts by column, the same of each: set, row, question, completion, reference, correct.
        """

    def finish(self) -> None:
        """Write what is left, as the run is over."""


StartFn = Callable[[Path, dict[str, Any]], Tracker]
"""(the workdir, the run's config as nested dicts) -> a tracker, which goes on where one of this workdir was."""


class _TensorBoard:
    """Events in `tensorboard/`, on the disk as soon as they are logged."""

    def __init__(self, workdir: Path, config: dict[str, Any]):
        self._folder = Workdir(workdir).tensorboard

    @functools.cached_property
    def _events(self) -> Any:
        """The file of events, made for the first row: its package takes a second to import.

        Written to by the thread that logs. tensorboardX's own thread dies of a full disk without a word to the others,
        which then wait for it.
        """
        from tensorboardX.event_file_writer import EventsWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        return EventsWriter(str(self._folder / "events"))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import Summary

        values = []
        for name, value in scalars.items():
            values.append(Summary.Value(tag=name, simple_value=value))
        summary = Summary(value=values)
        self._events.write_event(
            Event(wall_time=time.time(), step=step, summary=summary)
        )
        self._events.flush()

    def log_completions(self, completions: Sequence[Mapping[str, str]]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import text

        # A table in Markdown.
        names = list(completions[0])
        header = " | ".join(names)
        rule = " | ".join("---" for _ in names)
        lines = [header, rule]
        for row in completions:
            cells = map(_in_a_cell, row.values())
            lines.append(" | ".join(cells))
        summary = text("evaluate/completions", "\n".join(lines))
        event = Event(wall_time=time.time(), step=0, summary=summary)
        self._events.write_event(event)
        self._events.flush()

    def finish(self) -> None:
        if "_events" in self.__dict__:
            self._events.close()


def _in_a_cell(text: str) -> str:
    """Write a text in a cell of a Markdown table."""
    words = text.replace("|", "\\|").split()
    return " ".join(words)


def _own_id(workdir: Path, tracker: str) -> str:
    """Return the name by which a tracker knows a workdir's run, a new one the first time."""
    path = Workdir(workdir).trackers
    known = read_json(path, default={})
    if tracker not in known:
        known[tracker] = secrets.token_hex(4)
        text = json.dumps(known, indent=1)
        write_text(path, f"{text}\n")
    return known[tracker]


class _Wandb:
    """A run of Weights & Biases with the workdir's name; a stage's values are over its own steps."""

    def __init__(self, workdir: Path, config: dict[str, Any]):
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "slpo_jax"),
            id=_own_id(workdir, "wandb"),
            name=workdir.resolve().name,
            dir=str(workdir),
            config=config,
            resume="allow",
        )
        self._stages: set[str] = set()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        first, *_ = scalars
        stage, _, _ = first.partition("/")
        step_name = f"{stage}/step"
        if stage not in self._stages:
            self._run.define_metric(f"{stage}/*", step_metric=step_name)
            self._stages.add(stage)
        self._run.log({**scalars, step_name: step})

    def log_completions(self, completions: Sequence[Mapping[str, str]]) -> None:
        import wandb

        rows = [list(row.values()) for row in completions]
        table = wandb.Table(columns=list(completions[0]), data=rows)
        self._run.log({"evaluate/completions": table})

    def finish(self) -> None:
        self._run.finish()


class _Mlflow:
    """A run of MLflow with the workdir's name; its place is the server or folder of MLFLOW_TRACKING_URI."""

    def __init__(self, workdir: Path, config: dict[str, Any]):
        import mlflow

        client = mlflow.MlflowClient()
        self._client = client

        # The project, a new one the first time.
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME", "slpo_jax")
        known = client.get_experiment_by_name(project)
        experiment = known.experiment_id if known else client.create_experiment(project)

        # The workdir's run, likewise.
        own = _own_id(workdir, "mlflow")
        runs = client.search_runs([experiment], f"tags.workdir_id = '{own}'")
        if runs:
            run = runs[0]
        else:
            name = workdir.resolve().name
            tags = {"workdir_id": own}
            run = client.create_run(experiment, tags=tags, run_name=name)
        self._run = run.info.run_id
        self._client.update_run(self._run, status="RUNNING")
        self._client.log_dict(self._run, config, "config.json")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = []
        for name, value in scalars.items():
            # It takes no "@", which Pass@k has.
            key = re.sub(r"[^\w./ -]", "_", name)
            metrics.append(Metric(key, value, now, step))
        self._client.log_batch(self._run, metrics=metrics)

    def log_completions(self, completions: Sequence[Mapping[str, str]]) -> None:
        columns: dict[str, list[str]] = {}
        for name in completions[0]:
            columns[name] = [row[name] for row in completions]
        self._client.log_table(self._run, columns, "completions.json")

    def finish(self) -> None:
        self._client.set_terminated(self._run)


class _Trackio:
    """A run of Trackio with the workdir's name and an id, since two runs of one name are one there."""

    def __init__(self, workdir: Path, config: dict[str, Any]):
        import trackio

        name = workdir.resolve().name
        own = _own_id(workdir, "trackio")
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "slpo_jax"),
            name=f"{name}-{own}",
            config=config,
            resume="allow",
        )

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def log_completions(self, completions: Sequence[Mapping[str, str]]) -> None:
        import pandas as pd
        import trackio

        frame = pd.DataFrame(completions)
        table = trackio.Table(dataframe=frame)
        self._run.log({"evaluate/completions": table}, step=0)

    def finish(self) -> None:
        self._run.finish()


TRACKERS: dict[str, StartFn] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": _Mlflow,
    "trackio": _Trackio,
}
_EXTRAS = ("wandb", "mlflow", "trackio")
"""Trackers whose package, of the same name, is an extra of the same name."""


def check_trackers(names: Collection[str]) -> None:
    """Refuse, before any work, a tracker that isn't there.

    Raises:
        UserError: unknown, or twice.
    """
    for name in names:
        if name not in TRACKERS:
            raise UserError(
                f"config.trackers: {name!r} is unknown; use {', '.join(TRACKERS)}, or register it"
            )
        if name in _EXTRAS and importlib.util.find_spec(name) is None:
            raise UserError(
                f"config.trackers: {name} is not installed; pip install 'slpo_jax[{name}]'"
            )
    if len(set(names)) < len(names):
        raise UserError(f"config.trackers: {tuple(names)}: give each name once")


class MetricsLog:
    """`metrics.jsonl` of a workdir, and the run's trackers.

    Args:
        workdir: where it goes.
    """

    def __init__(self, workdir: Workdir):
        self.workdir = workdir
        self.path = workdir.metrics
        self._trackers: dict[str, Tracker] = {}
        self._started = False
        # Rows that were taken back, which the trackers have.
        self._known: set[str] = set()

    def start(self, names: Collection[str], config: dict[str, Any]) -> None:
        """Start the trackers of these names, of several processes in the first.

        Args:
            config: the run's.
        Raises:
            UserError: one can't be started.
        """
        self._started = True
        if not hosts.is_first():
            return
        for name in names:
            try:
                start = TRACKERS[name]
                self._trackers[name] = start(self.workdir.root, config)
            except Exception as error:  # of a library, or the user's code, either of which can raise anything
                reason = in_a_line(error)
                raise UserError(
                    f"config.trackers: {name}: {reason}; mend that, or leave the tracker out"
                ) from error

    def rewind(self, stage: str, step: int, scalar: str = "step") -> None:
        """Drop a stage's rows after `step`, those with a certain scalar: they are about to be written again."""
        if not self.path.exists():
            return
        kept: list[str] = []
        text = self.path.read_text("utf-8", "replace")
        lines = text.splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            row = _parse_row(line)
            if row is None:
                # The last line may have been torn by an interruption.
                if line.endswith("\n"):
                    kept.append(line)
                continue
            is_later = row["stage"] == stage and row["step"] > step
            if is_later and scalar in row:
                # The run may have been killed before the last row reached the trackers; they get that one again.
                if number < len(lines):
                    self._known.add(_timeless(row))
            else:
                line = line.rstrip("\n")
                kept.append(f"{line}\n")
        write_text(self.path, "".join(kept))

    def write(self, stage: str, step: int, scalars: dict[str, float]) -> None:
        """Write one row, of several processes the first's."""
        if not hosts.is_first():
            return
        row = {"step": step, "stage": stage, **scalars}
        line = to_json(row)
        try:
            with self.path.open("a") as file:
                file.write(f"{line}\n")
        except OSError as error:
            # The error of a full disk names no file.
            path = str(self.path)
            raise OSError(error.errno, error.strerror, path) from None

        # Trackers take each row once.
        key = _timeless(row)
        if key in self._known:
            self._known.discard(key)
            return
        finite: dict[str, float] = {}
        for name, value in scalars.items():
            if math.isfinite(value):
                finite[f"{stage}/{name}"] = value
        self._track(stage, step, finite)

    def report(
        self, names: Collection[str], config: dict[str, Any], figures: Mapping[str, float],
        completions: Sequence[Mapping[str, str]],
    ) -> None:  # fmt: skip
        """Give the trackers what the evaluation has found, once.

        Args:
            names: of the trackers, which are started if they are not.
            config: the run's.
            figures: finite numbers by SET/ROW/FIGURE.
            completions: see `Tracker.log_completions`.
        Raises:
            UserError: as `start`.
        """
        path = self.workdir.trackers
        what = digest([figures, completions])
        if not names or not hosts.is_first():
            return
        known = read_json(path, default={})
        if known.get("evaluated") == what:
            return

        # Figures are logged as one row, at step 0.
        if not self._started:
            self.start(names, config)
        scalars: dict[str, float] = {}
        for name, value in figures.items():
            scalars[f"{EVALUATE}/{name}"] = value
        self._track(EVALUATE, 0, scalars)

        # Some trackers take texts too.
        for name, tracker in list(self._trackers.items()):
            if completions and hasattr(tracker, "log_completions"):
                try:
                    tracker.log_completions(completions)
                except Exception as error:
                    logging.warning(
                        "config.trackers: %s has no completions (%s)",
                        name,
                        in_a_line(error),
                    )

        # A tracker that was started just now has written its id there.
        known = read_json(path, default={})
        known["evaluated"] = what
        text = json.dumps(known, indent=1)
        write_text(path, f"{text}\n")

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
                logging.warning(
                    "config.trackers: %s did not end well (%s)", name, in_a_line(error)
                )


def _timeless(row: dict[str, Any]) -> str:
    """Remove what depends on the clock: a run that goes on writes the same row again."""
    timeless = {name: value for name, value in row.items() if name not in CLOCK}
    return to_json(timeless, sort_keys=True)


def _parse_row(line: str) -> dict[str, Any] | None:
    """Parse a row; None for what is none."""
    try:
        row = json.loads(line)
        is_row = isinstance(row["stage"], str) and isinstance(row["step"], int)
    except (ValueError, TypeError, KeyError):
        return None
    return row if is_row else None


class Means:
    """Means of metrics over the steps since the last row, in float64, which add up the same wherever a run was cut.

    Attributes:
        sums: [sum, count] by name, JSON-able, so that a checkpoint between two rows can keep them.
    """

    def __init__(self, sums: dict[str, list[float]]):
        self.sums = sums

    def add(self, metrics: dict[str, Any]) -> None:
        """Add a step's metrics, each a mean over `metrics["counts"]` of its name, or a single value."""
        counts = metrics.get("counts", {})
        for name, value in metrics.items():
            if name in ("counts", "skipped_steps", "skipped_in_a_row"):
                continue
            count = float(counts.get(name, 1))
            total_before, count_before = self.sums.get(name, [0.0, 0.0])
            total = total_before + float(value) * count
            self.sums[name] = [total, count_before + count]

    def take(self) -> dict[str, float]:
        """Return the means, without those over nothing; then begin anew."""
        sums = self.sums
        self.sums = {}
        means: dict[str, float] = {}
        for name, (total, count) in sums.items():
            if count:
                means[name] = total / count
        return means


def warn_of_cuts(label: str, share: float, key: str) -> bool:
    """Say so, and return True, where most answers have no end within the budget of answer tokens, so earn nothing.

    Args:
        label: of what was rolled out.
        share: of its answers that are cut.
        key: of the config, that sets the budget.
    """
    if share <= 0.5 or not hosts.is_first():
        return False
    text = "%s: %.0f%% of the answers are truncated, and wrong whatever they say; raise config.%s"
    logging.warning(text, label, 100 * share, key)
    return True
