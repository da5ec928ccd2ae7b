"""A run in the making: what its config describes, its workdir and its stages."""

import dataclasses
import functools
from collections.abc import Callable, Collection
from pathlib import Path

from absl import logging

from slpo_jax.checkpoints.decode_settings import go_with
from slpo_jax.checkpoints.detect import identify, newest_checkpoint
from slpo_jax.config.config import Config
from slpo_jax.errors import UserError
from slpo_jax.io.workdir import Workdir
from slpo_jax.run.setup import Setup, assemble
from slpo_jax.run.stage import Stage
from slpo_jax.runtime import hosts
from slpo_jax.stages import wanted
from slpo_jax.training.metrics import MetricsLog


@dataclasses.dataclass(kw_only=True)
class Experiment(Setup):
    """A run in the making: a setup, its workdir and its log, and its stages."""

    workdir: Workdir
    log: MetricsLog

    @functools.cached_property
    def stage(self) -> Callable[[str], Stage]:
        """Name -> what leaves its checkpoint; "" stands for `config.init`."""
        return functools.cache(functools.partial(Stage, self))

    @property
    def wanted(self) -> list[Stage]:
        """The stages that the config asks for, in the order in which they are trained."""
        return [self.stage(name) for name in wanted(self.config)]

    @property
    def left(self) -> list[Stage]:
        """Those of them that are not finished."""
        return [stage for stage in self.wanted if not stage.folder.is_finished]

    @property
    def finished(self) -> list[Stage]:
        """All that the workdir holds finished, by name."""
        return [self.stage(name) for name in self.workdir.finished_stages()]


def build(config: Config, workdir: Path, given: Collection[str] = ()) -> Experiment:
    """Everything that a config describes, except data sets, which are read when a stage asks for them.

    Args:
        given: see `checkpoints.decode_settings.go_with`.
    Raises:
        UserError: a key's value can't be used.
    """
    paths, identity = Workdir(workdir), None
    if config.init:
        config = dataclasses.replace(config, init=newest_checkpoint(config.init))
        identity = identify(config.init, config.base, config.lora_alpha)
    config, lines = go_with(config, identity, paths, given)
    if config.base and not (identity and identity.from_base):
        why = f"{config.init} has a config and a tokenizer of its own" if config.init else "config.init is not set"
        lines.append(f"config.base: {config.base} is not used, {why}")
    setup = assemble(config, paths, identity)
    for line in lines if hosts.is_first() else ():
        logging.warning("%s", line)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--workdir={workdir}: is no directory to write to ({error.strerror}); give another") from None
    return Experiment(**vars(setup), workdir=paths, log=MetricsLog(paths))
