"""Trackers: where logged values go beside metrics.jsonl.

A tracker is started once a run, in the first process, and gets each row once: what was logged before an interruption is
not logged again by the command that goes on. Projects, servers and accounts are set as each package has it, by its
environment variables. What tells a tracker's own run again is kept in the workdir's `trackers.json`.
"""

import functools
import json
import os
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from slpo_jax.errors import UserError
from slpo_jax.io.files import read_json, write_text
from slpo_jax.io.workdir import Workdir


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

        project, path = os.environ.get("WANDB_PROJECT", "slpo_jax"), Workdir(workdir).trackers
        known = read_json(path, default={"wandb": secrets.token_hex(4)})
        write_text(path, json.dumps(known, indent=1) + "\n")
        self._run = wandb.init(
            project=project,
            id=known["wandb"],
            name=workdir.resolve().name,
            dir=str(workdir),
            config=config,
            resume="allow",
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


TRACKERS: dict[str, StartFn] = {"tensorboard": _TensorBoard, "wandb": _Wandb}


def check_trackers(names: Collection[str]) -> None:
    """Fail before any work on a tracker that isn't there.

    Raises:
        UserError: unknown, or twice.
    """
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"config.trackers: {name!r} is unknown; use {', '.join(TRACKERS)}, or register it")
    if len(set(names)) < len(names):
        raise UserError(f"config.trackers: {tuple(names)}: give each name once")
