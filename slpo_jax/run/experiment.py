"""A run in the making: what its config describes, its workdir and its stages."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import logging

from slpo_jax.checkpoints.decode_settings import go_with
from slpo_jax.checkpoints.identity import identify
from slpo_jax.config.config import Config, rl_of
from slpo_jax.config.sections import changed
from slpo_jax.errors import UserError
from slpo_jax.io.workdir import StageFolder, Workdir
from slpo_jax.run.setup import Setup, assemble
from slpo_jax.runtime import hosts
from slpo_jax.stages import COLD_START, CONTROL, IMITATE, LATENT_RM, RL, USUAL_START, Section, section_of, wanted
from slpo_jax.training.metrics import MetricsLog


@dataclasses.dataclass(kw_only=True)
class Experiment(Setup):
    """A run in the making: a setup, its workdir and its log, and its stages."""

    workdir: Workdir
    log: MetricsLog
    plans: dict[str, Any] = dataclasses.field(default_factory=dict, init=False)  # of stages that were checked, by name

    @functools.cached_property
    def stage(self) -> Callable[[str], "Stage"]:
        """Name -> what leaves its checkpoint; "" stands for `config.init`."""
        return functools.cache(functools.partial(Stage, self))

    @property
    def wanted(self) -> list["Stage"]:
        """The stages that the config asks for, in the order in which they are trained."""
        return [self.stage(name) for name in wanted(self.config)]

    @property
    def left(self) -> list["Stage"]:
        """Those of them that are not finished."""
        return [stage for stage in self.wanted if not stage.folder.is_finished]

    @property
    def finished(self) -> list["Stage"]:
        """All that the workdir holds finished, by name."""
        return [self.stage(name) for name in self.workdir.finished_stages()]


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """What leaves one checkpoint of a run; the one without a name is `config.init`, where others start.

    Attributes:
        run: whose models, data and workdir it uses.
        name: of the checkpoint; the section rl leaves one for each objective, under the objective's name.
    """

    run: Experiment
    name: str

    @property
    def section(self) -> Section:
        """The config's section, and the file in `slpo_jax.run`, that it is trained by."""
        return section_of(self.name)

    @functools.cached_property
    def wanted(self) -> bool:
        """Whether the config asks for it."""
        return self in self.run.wanted

    @property
    def folder(self) -> StageFolder:
        """Where its checkpoints are."""
        return self.run.workdir.stage(self.name)

    @functools.cached_property
    def settings(self) -> Any:
        """Its section of the config, with what an objective has of its own instead."""
        section = getattr(self.run.config, self.section)
        return section if self.section != RL else rl_of(section, self.run.config.objective[self.name])

    @functools.cached_property
    def validated_every(self) -> int:
        """Steps between validations, of which the best leaves its parameters; 0: there are none, and the last do."""
        can = self.section in (COLD_START, RL) or (self.section == LATENT_RM and self.run.config.data.valid)
        return self.settings.evaluate_every if can else 0

    @functools.cached_property
    def start(self) -> "Stage":
        """The stage that it starts from: the last before it that is finished or about to be, else `config.init`.

        What is said to come after another one starts from that.

        Raises:
            UserError: that one is neither there nor about to be.
        """
        config, after = self.run.config, ""
        if self.section == RL and self.name in config.objective:  # else the config doesn't know what left it
            after = config.objective[self.name].after
        usual = {IMITATE: (IMITATE,) * (self.name == CONTROL), COLD_START: (IMITATE,)}.get(self.section, USUAL_START)
        for stage in map(self.run.stage, (after,) if after else usual):
            if stage.folder.is_finished or stage.wanted:
                return stage
        if after:
            raise UserError(
                f"config.objective.{self.name}.after: {after} is not in {self.run.workdir}; run that before {self.name}"
            )
        return self.run.stage("")


def build(config: Config, workdir: Path) -> Experiment:
    """Everything that a config describes, except data sets, which are read when a stage asks for them.

    Raises:
        UserError: a key's value can't be used.
    """
    paths, identity = Workdir(workdir), None
    if config.init:
        identity = identify(config.init, config.base, config.lora_alpha)
        config = changed(config, {"init": identity.source})
    config, lines = go_with(config, identity, paths)
    if config.base and not (identity and identity.base):
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
