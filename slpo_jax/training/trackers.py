"""Trackers: where logged values go beside metrics.jsonl.

A tracker is started once a run, in the first process, and gets each row once: what was logged before an interruption is
not logged again by the command that goes on. Projects, servers and accounts are set as each package has it, by its
environment variables. What tells a tracker's own run again is kept in the workdir's `trackers.json`.
"""

import contextlib
import functools
import importlib.util
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from slpo_jax.errors import UserError
from slpo_jax.io.files import flatten, read_json, write_text
from slpo_jax.io.workdir import Workdir

_PROJECT = "slpo_jax"  # where the environment names none


class Tracker(Protocol):
    """What `config.trackers` names, once it is started."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """One row.

        Args:
            step: of its stage.
            scalars: finite numbers by STAGE/NAME, all of one stage.
        """

    def finish(self) -> None:
        """The run is over: write what is left."""


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

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._events.write_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._events.flush()

    def finish(self) -> None:
        if "_events" in self.__dict__:
            self._events.close()


class _Wandb:
    """A run of Weights & Biases with the workdir's name; a stage's values are over its own steps."""

    def __init__(self, workdir: Path, config: dict[str, Any]):
        import wandb

        project = os.environ.get("WANDB_PROJECT", _PROJECT)
        known = _known_run(workdir, "wandb") or _keep_run(workdir, "wandb", secrets.token_hex(4))
        self._run = wandb.init(
            project=project, id=known, name=_name(workdir), dir=str(workdir), config=config, resume="allow"
        )
        self._stages: set[str] = set()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        stage = next(iter(scalars)).partition("/")[0]
        if stage not in self._stages:
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
            self._stages.add(stage)
        self._run.log({**scalars, f"{stage}/step": step})

    def finish(self) -> None:
        self._run.finish()


class _Trackio:
    """A run of trackio, called as the workdir is and a number."""

    def __init__(self, workdir: Path, config: dict[str, Any]):
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", _PROJECT)
        known = _known_run(workdir, "trackio")
        known = known or _keep_run(workdir, "trackio", f"{_name(workdir)}-{secrets.token_hex(4)}")
        with _printed_to_stderr():
            self._run = trackio.init(project, name=known, config=flatten(config), resume="allow", embed=False)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def finish(self) -> None:
        with _printed_to_stderr():
            self._run.finish()


class _Mlflow:
    """A run of MLflow with the workdir's name, its parameters the config's keys."""

    def __init__(self, workdir: Path, config: dict[str, Any]):
        import mlflow
        from mlflow.entities import Param

        self._client = mlflow.MlflowClient()
        known = _known_run(workdir, "mlflow")
        if known:
            self._client.update_run(known, status="RUNNING")
        else:
            experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT))
            run = self._client.create_run(experiment.experiment_id, run_name=_name(workdir))
            known = _keep_run(workdir, "mlflow", run.info.run_id)
            params = [Param(key, str(value)) for key, value in flatten(config).items()]
            for first in range(0, len(params), 100):  # as many as it takes at once
                self._client.log_batch(known, params=params[first : first + 100])
        self._id = known

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self._id, [Metric(name, value, now, step) for name, value in scalars.items()])

    def finish(self) -> None:
        self._client.set_terminated(self._id)


TRACKERS: dict[str, StartFn] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "trackio": _Trackio,
    "mlflow": _Mlflow,
}
_NEEDED = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}


def check_trackers(names: Collection[str]) -> None:
    """Fail before any work on a tracker that isn't there.

    Raises:
        UserError: unknown, twice, or its package is missing.
    """
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"config.trackers: {name!r} is unknown; use {', '.join(TRACKERS)}, or register it")
        package = _NEEDED.get(name)
        if package and not _is_installed(package):
            install = "tensorboardX" if name == "tensorboard" else f"'slpo_jax[{name}]'"
            raise UserError(f"config.trackers: {name} needs the package {package}; pip install {install}")
    if len(set(names)) < len(names):
        raise UserError(f"config.trackers: {tuple(names)}: give each name once")


def _is_installed(package: str) -> bool:
    """A mere folder of the name, as wandb leaves one where it runs, is no package."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def _name(workdir: Path) -> str:
    return workdir.resolve().name


def _known_run(workdir: Path, tracker: str) -> str:
    """What the tracker calls this workdir's run; "" where it had none yet."""
    return str(read_json(Workdir(workdir).trackers, default={}).get(tracker, ""))


def _keep_run(workdir: Path, tracker: str, run: str) -> str:
    path = Workdir(workdir).trackers
    write_text(path, json.dumps(read_json(path, default={}) | {tracker: run}, indent=1) + "\n")
    return run


@contextlib.contextmanager
def _printed_to_stderr() -> Iterator[None]:
    """Standard output is for the command's result."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
