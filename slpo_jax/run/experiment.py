"""A run in the making: what its config describes, its workdir and its stages."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from absl import logging

from slpo_jax.checkpoints.identity import Identity, identify
from slpo_jax.checkpoints.saved_config import differences, say_differences
from slpo_jax.config.config import Config, own_latents, rl_of
from slpo_jax.config.keys import flat_values, rollout_settings
from slpo_jax.config.overrides import merge_settings, values
from slpo_jax.errors import UserError
from slpo_jax.evaluation.report_rows import BEST_FIXED, Row
from slpo_jax.io.files import as_json, check_utf8, flatten
from slpo_jax.io.workdir import StageFolder, Workdir
from slpo_jax.run.setup import Setup, assemble
from slpo_jax.runtime import hosts
from slpo_jax.stages import (
    ABOUT,
    CONTROL,
    EVALUATE,
    IMITATE,
    IMITATE_SCRATCH,
    LATENT_RM,
    NO_THOUGHT,
    RL,
    Section,
    section_of,
    wanted_stages,
)
from slpo_jax.training.metrics import MetricsLog
from slpo_jax.training.objectives import OBJECTIVES
from slpo_jax.training.objectives.pathwise import Pathwise
from slpo_jax.training.recipes import RECIPES, ImitateSettings


@dataclasses.dataclass(kw_only=True)
class Experiment(Setup):
    """A run in the making: a setup, its workdir and its log, and its stages."""

    workdir: Workdir
    log: MetricsLog

    @functools.cached_property
    def stage(self) -> Callable[[str], "Stage"]:
        """Name -> what leaves its checkpoint; "" stands for `config.init`."""
        return functools.cache(functools.partial(Stage, self))

    @property
    def wanted(self) -> list["Stage"]:
        """The stages that the config asks for, in the order in which they are trained."""
        return [self.stage(name) for name in wanted_stages(self.config)]

    @property
    def left(self) -> list["Stage"]:
        """The stages that the config asks for and that are not finished."""
        return [stage for stage in self.wanted if not stage.is_done]

    @property
    def finished(self) -> list["Stage"]:
        """The stages that the workdir holds finished, by name."""
        return [self.stage(name) for name in self.workdir.finished_stages()]


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """A stage that leaves one checkpoint of a run; the one without a name is `config.init`, where others start.

    Attributes:
        experiment: whose models, data and workdir it uses.
        name: of the checkpoint; the section rl leaves one for each objective, under the objective's name.
    """

    experiment: Experiment
    name: str

    @property
    def section(self) -> Section:
        """The config's section that it is trained by."""
        return section_of(self.name)

    @functools.cached_property
    def is_wanted(self) -> bool:
        """Whether the config asks for it."""
        return self in self.experiment.wanted

    @property
    def folder(self) -> StageFolder:
        """The folder of its checkpoints."""
        return self.experiment.workdir.stage_folder(self.name)

    @property
    def is_done(self) -> bool:
        """Whether it was run to its end, and the config asks for no further steps."""
        return self.folder.is_finished and not self.needs_more_steps

    @property
    def needs_more_steps(self) -> bool:
        """Whether the steps of the stage rl were raised since it was trained, so that it goes on.

        Not where the learning rate falls to the last step, nor where adapters are merged already.
        """
        config = self.experiment.config
        if self.section == RL:
            steps = self.settings.steps
            schedule = self.settings.optimizer.schedule
        elif self.name == CONTROL:
            steps = config.rl.steps
            schedule = config.imitate.optimizer.schedule
        else:
            return False
        has_begun = self.folder.config.is_file()
        if (
            not has_begun
            or schedule != "constant"
            or (self.section == RL and config.rl.lora.rank)
        ):
            return False
        return self.folder.read_config()["rl"]["steps"] < steps

    @functools.cached_property
    def settings(self) -> Any:
        """The stage's section of the config, with what an objective has of its own instead."""
        config = self.experiment.config
        section = getattr(config, self.section)
        if self.section == RL:
            return rl_of(section, config.objective[self.name])
        return section

    @functools.cached_property
    def validated_every(self) -> int:
        """Steps between validations, the best of which leaves its parameters; 0: none, and the last step's stay."""
        can_validate = ABOUT[self.section].validates
        if self.section == LATENT_RM and not self.experiment.config.data.valid:
            can_validate = False
        return self.settings.evaluate_every if can_validate else 0

    @functools.cached_property
    def start(self) -> "Stage":
        """The stage that it starts from, of those that are finished or about to be; `config.init` where none is.

        Where a section may start is in `stages.ABOUT`. Further imitation starts from imitation, and an objective with
        `after` from the objective named there.

        Raises:
            UserError: that one is neither there nor about to be.
        """
        config = self.experiment.config
        after = ""
        # A workdir may hold an objective that today's config doesn't know.
        if self.section == RL and self.name in config.objective:
            after = config.objective[self.name].after
        candidates: tuple[str, ...] = ABOUT[self.section].starts_from
        if after:
            candidates = (after,)
        elif self.name in (CONTROL, IMITATE_SCRATCH[CONTROL]):
            candidates = (IMITATE,)
        for name in candidates:
            stage = self.experiment.stage(name)
            if stage.folder.is_finished or stage.is_wanted:
                return stage
        if after:
            raise UserError(
                f"config.objective.{self.name}.after: {after} is not in {self.experiment.workdir}; run that before "
                f"{self.name}"
            )
        return self.experiment.stage("")


def build(config: Config, workdir: Path) -> Experiment:
    """Build everything that a config describes, except data sets, which are read when a stage asks for them.

    Raises:
        UserError: a key's value can't be used.
    """
    check_utf8(workdir, "--workdir=")
    paths = Workdir(workdir)
    identity = None
    if config.init:
        identity = identify(config.init, config.base, config.lora_alpha)
        config = merge_settings(config, {"init": identity.source})
    lines = _used_otherwise(config, identity, paths)
    if config.base and not (identity and identity.base):
        why = (
            f"{config.init} has a config and a tokenizer of its own"
            if config.init
            else "config.init is not set"
        )
        lines.append(f"config.base: {config.base} is not used, {why}")
    setup = assemble(config, paths, identity)
    for line in lines if hosts.is_first() else ():
        logging.warning("%s", line)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--workdir={workdir}: is no directory to write to ({error.strerror}); give another"
        ) from None
    return Experiment(**vars(setup), workdir=paths, log=MetricsLog(paths))


def _used_otherwise(
    config: Config, identity: Identity | None, workdir: Workdir
) -> list[str]:
    """Say where a run uses checkpoints in another way than they were made for: what it starts from, or evaluates.

    Args:
        identity: of `config.init`.
        workdir: whose finished stages a run evaluates that trains none.
    """
    stages = workdir.finished_stages()
    lines = [differences(config, identity)] if identity else []
    if stages and {*config.stages} == {EVALUATE}:
        now = {
            key: value
            for key, value in rollout_settings(config).items()
            if not key.startswith("evaluate.")
        }
        lines = [
            say_differences(
                stage, now, flatten(workdir.stage_folder(stage).read_config())
            )
            for stage in stages
        ]
    return list(filter(None, lines))


_FIRST_OBJECTIVE = 10  # in the report's order, after the rows of the other stages


def rows(experiment: Experiment) -> list[Row]:
    """List the rows that a workdir's finished stages and the run's own allow, in the report's order.

    Where there are none it is `config.init`'s.

    Raises:
        UserError: there is nothing to evaluate.
    """
    config, gated = experiment.config, experiment.config.gate.enabled
    stages = {stage.name for stage in (*experiment.wanted, *experiment.finished)}
    default_stop: dict[str, Any] = {
        "stopping": "length",
        "rules": (config.max_latents,),
    }
    if gated:
        default_stop = {
            "stopping": "threshold",
            "rules": tuple(config.evaluate.thresholds),
            "gated": True,
        }
    report_rows = _of_imitation(config, stages, default_stop)
    # Without a cold start of the gate, imitation itself is what an objective starts from.
    imitation_baseline: tuple[str, ...] = ()
    if not gated or config.imitate.gate_weight:
        imitation_baseline = (IMITATE,)
    earlier: tuple[str, ...] = ()
    for section, (label, about) in {
        section: entry.row for section, entry in ABOUT.items() if entry.row
    }.items():
        if section in stages:
            baselines = (*earlier, *imitation_baseline, BEST_FIXED)
            report_rows.append(
                _row(section, label, 3 + len(earlier), about, baselines, **default_stop)
            )
        earlier = (section, *earlier)
    # In config's order, then any others by name.
    trained = {stage.name for stage in experiment.wanted if stage.section == RL} | {
        *experiment.workdir.finished_objectives()
    }
    objectives = [name for name in config.rl.objectives if name in trained]
    objectives += sorted(trained.difference(objectives))
    for place, name in enumerate(objectives):
        baselines = (
            *objectives[:place],
            *earlier,
            CONTROL,
            NO_THOUGHT,
            *imitation_baseline,
            BEST_FIXED,
        )
        label = _label_objective(config, name)
        about = f"What the objective {name} trained."
        report_rows.append(
            _row(
                name, label, _FIRST_OBJECTIVE + place, about, baselines, **default_stop
            )
        )
    if report_rows:
        return report_rows
    if not config.init:
        raise UserError(
            f"config.init: {experiment.workdir} holds no finished stage to evaluate; give a checkpoint"
        )
    # The end of a path tells checkpoints apart; a hub id is short enough as it is.
    parts = config.init.rstrip("/").split("/")
    shown = parts[-2:]
    if "checkpoints" in parts[-3:]:
        shown = parts[-3:]
    label = "checkpoint " + "/".join(shown)
    about = "The checkpoint that config.init names."
    return [
        _row(
            "checkpoint",
            label,
            _FIRST_OBJECTIVE,
            about,
            imitation_baseline,
            stage="",
            **default_stop,
        )
    ]


def _label_objective(config: Config, name: str) -> str:
    """Name an objective in tables: the control that learns from the answers' keys alone is fine-tuning on them."""
    objective = config.objective.get(name)
    if (
        isinstance(objective, Pathwise)
        and objective.estimator == "mixture"
        and objective.mixture_weight == 0
    ):
        return "SFT on keys" if name == "keys" else f"SFT on keys ({name})"
    label = OBJECTIVES[name].label if name in OBJECTIVES else ""
    return label or name


def _row(
    name: str,
    label: str,
    order: int,
    about: str,
    baselines: tuple[str, ...] = (),
    **more: Any,
) -> Row:
    return Row(
        name, label, order, about=about, baselines=baselines, **{"stage": name} | more
    )


def _of_imitation(
    config: Config, stages: Collection[str], default_stop: dict[str, Any]
) -> list[Row]:
    """List the rows of the stage imitate, which stop by numbers of latents, or by the gate where they have taught it.

    Args:
        default_stop: how rows with a trained gate stop.
    """
    own_number = own_latents(config)
    total = config.max_latents
    # No number is right for all problems then; without latents there is nothing to choose.
    by_steps = config.imitate.final_latents == "steps" and total > 0
    lengths = tuple(range(1, total + 1)) if by_steps else (own_number,)
    report_rows = list[Row]()
    if NO_THOUGHT in stages:
        about = "Imitation in as many stages and steps, without latents."
        report_rows.append(_row(NO_THOUGHT, "no latents", -1, about, rules=(0,)))
    if config.imitate.gate_weight:
        return report_rows + _of_taught_stop(config, stages, default_stop)
    if IMITATE in stages:
        options: dict[str, Any] = {
            "stage": IMITATE,
            "fixed": True,
            "baselines": (NO_THOUGHT,),
        }
        label = _imitation(config.imitate, own_number)
        about = "Imitation, as it ended."
        if by_steps:
            about = "Imitation, with the number of latents that is best on the validation problems."
        report_rows.append(_row(IMITATE, label, 0, about, rules=lengths, **options))
        if not by_steps and own_number < total:
            about = "Imitation, with as many latents as there may be at most."
            label = "SFT, T_max latents"
            report_rows.append(
                _row("imitate_fixed_tmax", label, 1, about, rules=(total,), **options)
            )
    if CONTROL in stages:
        about = "Imitation for as many further steps as an objective takes: more training without rewards."
        rules = tuple(sorted({*lengths, total}))
        report_rows.append(
            _row(CONTROL, "SFT, as many steps more", 2, about, (IMITATE,), rules=rules)
        )
    return report_rows


def _of_taught_stop(
    config: Config, stages: Collection[str], default_stop: dict[str, Any]
) -> list[Row]:
    """List the rows of imitation that has taught the gate too: by that gate, and at the right number of latents."""
    report_rows = list[Row]()
    total = config.max_latents
    if IMITATE in stages:
        about = "Imitation, which has taught the gate too."
        report_rows.append(
            _row(
                IMITATE,
                "SFT",
                0,
                about,
                ("imitate_by_steps", NO_THOUGHT),
                **default_stop,
            )
        )
        right = {
            "stage": IMITATE,
            "rules": (total,),
            "latents_a_step": config.imitate.c_thought,
        }
        about = "Imitation, told how many steps a problem has."
        report_rows.append(
            _row(
                "imitate_by_steps",
                "SFT, right length",
                1,
                about,
                (NO_THOUGHT,),
                **right,
            )
        )
    if CONTROL in stages:
        about = "Imitation for as many further steps as an objective takes: more training without rewards."
        report_rows.append(
            _row(
                CONTROL, "SFT, as many steps more", 2, about, (IMITATE,), **default_stop
            )
        )
    return report_rows


def _imitation(config: ImitateSettings, latents: int) -> str:
    """Name imitation at its own number of latents in tables; without any, by what is still written in the end."""
    if latents:
        return "SFT"
    if config.recipe and (label := RECIPES[config.recipe].label):
        return label
    if config.final_steps:
        return "no latents"
    return (
        "SFT, last steps written"
        if config.stage_steps * config.max_latent_stage
        else "CoT-SFT"
    )


def reported_settings(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Pick from what a checkpoint was trained with, by key, the seed and what is not at its default."""
    settings = flatten(facts)
    default = flat_values(Config())
    for key in [
        key
        for key in settings
        if key.startswith("objective.") and key.endswith(".kind")
    ]:
        name = key.split(".")[1]
        kind = OBJECTIVES.get(settings[key] or name)
        if kind:
            default |= flatten({"objective": {name: as_json(values(kind()))}})
    return {
        key: value
        for key, value in settings.items()
        if key == "seed" or value != default.get(key, value)
    }
