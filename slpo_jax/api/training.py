"""A run in Python: what `slpo train` does, and the reasoners that it leaves."""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from slpo_jax.api.trained_reasoner import TrainedReasoner, load
from slpo_jax.config.config_checks import check
from slpo_jax.config.registry import register_reward
from slpo_jax.errors import UserError
from slpo_jax.io.files import read_json
from slpo_jax.io.workdir import Workdir
from slpo_jax.rewards.functions import name_of
from slpo_jax.run.own_data_settings import requested
from slpo_jax.runtime.backend import set_up_jax


@dataclasses.dataclass(frozen=True)
class Run:
    """A workdir: `run["slpo"]` is the reasoner of a stage or objective, `list(run)` names them.

    Attributes:
        workdir: its folder.
    """

    workdir: Path

    def __iter__(self) -> Iterator[str]:
        return iter(Workdir(self.workdir).finished_stages())

    def __getitem__(self, stage: str) -> TrainedReasoner:
        if stage not in (there := list(self)):
            raise UserError(f"{self.workdir}: has no finished stage {stage!r}; use one of {', '.join(there) or 'none'}")
        return load(Workdir(self.workdir).stage(stage).path)

    @functools.cached_property
    def report(self) -> dict[str, Any]:
        """What report.json holds: figures by row and set, differences with intervals.

        Raises:
            UserError: the run was not evaluated.
        """
        return read_json(Workdir(self.workdir).report_json, "run the evaluate stage")


def train(
    start: str | os.PathLike[str] | ConfigDict = "",
    /,
    *,
    train: str | os.PathLike[str] = "",
    valid: str | os.PathLike[str] = "",
    eval: Mapping[str, str | os.PathLike[str]] | None = None,
    base: str | os.PathLike[str] = "",
    workdir: str | os.PathLike[str] = "",
    config: Mapping[str, Any] | None = None,
    reward: str | Callable[..., Any] = "",
) -> Run:
    """Run the stages of a config, as `slpo train` does; called again, it goes on where it was.

    Args:
        start: the name of a shipped config (`slpo configs`), a config file, or a ConfigDict made by one; "" has the
            settings chosen from the problems of `train`, and shown.
        train, valid: sources of problems, as `config.data.train` takes them; "" is the config's.
        eval: sets to evaluate on, NAME = source, instead of the config's.
        base: where `start` is "": the model to begin with, a directory, hub id or file; "" is a small one.
        workdir: where checkpoints and reports go; "" is runs/NAME of the config.
        config: further keys by dotted name, such as {"rl.steps": 100}, or nested.
        reward: a registered name, or a function, see `register_reward`, which goes by its name; "" is the config's.
    Returns:
        the run: its reasoners by stage, its report.
    Raises:
        UserError: a key, a file or a value can't be used; nothing has been done then.
        KeyboardInterrupt: after Ctrl-C, once the stage is saved.
    """
    for key, value in {"eval": eval, "config": config}.items():
        if not isinstance(value, Mapping | None) or not all(isinstance(name, str) for name in value or ()):
            raise UserError(f"{key}: {value!r} is not valid; give a dict by names")
    sources, tests = {"train": train, "valid": valid, "base": base}, dict(eval or {})
    for key, source in {"start": start, "workdir": workdir, **sources, **tests}.items():
        if not isinstance(source, str | os.PathLike | ConfigDict):
            raise UserError(f"{key}: {source!r} is not valid; give a text or a path")
    if reward:
        if {"reward", "rewards"} & {key.removeprefix("config.") for key in config or {}}:
            raise UserError("reward: config has a reward too; leave one of the two out")
        if callable(reward):
            register_reward(name_of(reward), reward)
            reward = name_of(reward)
        config = {**(config or {}), "reward": reward}
    start = start if isinstance(start, ConfigDict) else os.fspath(start)
    given, named = ({key: os.fspath(path) for key, path in paths.items()} for paths in (sources, tests))
    checked = check(requested(start, given, named, config or {}, set_up_jax))
    name = "run" if isinstance(start, ConfigDict) else Path(start.partition(":")[0]).stem or "own"
    folder = Path(workdir or f"runs/{name}").expanduser()
    from slpo_jax.run.plan import run_stages  # once jax is set up

    try:
        run_stages(checked, folder)
    except SystemExit as end:  # which is a command's
        raise KeyboardInterrupt from end
    return Run(folder)
