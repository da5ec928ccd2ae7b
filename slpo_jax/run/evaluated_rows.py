"""Which rows a run's report has: one a finished stage, at each way of stopping that it is asked about."""

from collections.abc import Collection, Mapping
from typing import Any

from slpo_jax.config.config import Config, own_latents
from slpo_jax.config.sections import values
from slpo_jax.errors import UserError
from slpo_jax.evaluation.report_rows import BEST_FIXED, Row
from slpo_jax.io.files import as_json, flatten
from slpo_jax.run.experiment import Experiment, Stage
from slpo_jax.stages import ABOUT, CONTROL, IMITATE, NO_THOUGHT, RL
from slpo_jax.training.objectives import OBJECTIVES
from slpo_jax.training.recipes import RECIPES, ImitateSettings

_FIRST_OBJECTIVE = 10  # in the report's order, after the rows of the other stages


def rows(experiment: Experiment, planned: bool = False) -> list[Row]:
    """The rows that the finished stages of a workdir allow, in the report's order; without any, `config.init`'s.

    Args:
        experiment: the run.
        planned: also those of the stages that are still to be run.

    Raises:
        UserError: there is nothing to evaluate.
    """
    config, gated = experiment.config, experiment.config.gate.enabled
    to_come = [stage for stage in experiment.wanted if planned]
    stages = {stage.name for stage in (*to_come, *experiment.finished)}
    by_gate: dict[str, Any] = {"stopping": "length", "rules": (config.max_latents,)}
    if gated:
        by_gate = {"stopping": "threshold", "rules": tuple(config.evaluate.thresholds), "gated": True}
    found = _of_imitation(config, stages)
    # Without a gate there is no cold start, and imitation itself is what an objective starts from.
    before = () if gated else (IMITATE,)
    earlier: tuple[str, ...] = ()
    for section, (label, about) in {section: each.row for section, each in ABOUT.items() if each.row}.items():
        if section in stages:
            found.append(_row(section, label, 3 + len(earlier), about, (*earlier, *before, BEST_FIXED), **by_gate))
        earlier = (section, *earlier)
    # In config's order, then any others by name.
    trained = {stage.name for stage in to_come if stage.section == RL} | {*experiment.workdir.finished_objectives()}
    objectives = [name for name in config.rl.objectives if name in trained]
    objectives += sorted(trained.difference(objectives))
    for place, name in enumerate(objectives):
        baselines = (*objectives[:place], *earlier, CONTROL, NO_THOUGHT, *before, BEST_FIXED)
        label = (OBJECTIVES[name].label if name in OBJECTIVES else "") or name
        about = f"What the objective {name} trained."
        found.append(_row(name, label, _FIRST_OBJECTIVE + place, about, baselines, **by_gate))
    if found:
        return found
    if not config.init:
        raise UserError(f"config.init: {experiment.workdir} holds no finished stage to evaluate; give a checkpoint")
    parts = config.init.rstrip("/").split("/")  # the end of a path tells checkpoints apart; a hub id is as it is
    label = "checkpoint " + "/".join(parts[-3:] if "checkpoints" in parts[-3:] else parts[-2:])
    about = "The checkpoint that config.init names."
    return [_row("checkpoint", label, _FIRST_OBJECTIVE, about, before, stage="", **by_gate)]


def _row(name: str, label: str, order: int, about: str, baselines: tuple[str, ...] = (), **more: Any) -> Row:
    return Row(name, label, order, about=about, baselines=baselines, **{"stage": name} | more)


def _of_imitation(config: Config, stages: Collection[str]) -> list[Row]:
    """Those of the stage imitate, which stop by numbers of latents."""
    own, total = own_latents(config), config.max_latents
    by_steps = config.imitate.final_latents == "steps"  # no number is right for all problems
    lengths, found = tuple(range(1, total + 1)) if by_steps else (own,), list[Row]()
    if NO_THOUGHT in stages:
        about = "Imitation in as many stages and steps, without latents."
        found.append(_row(NO_THOUGHT, "no latents", -1, about, rules=(0,)))
    if IMITATE in stages:
        how: dict[str, Any] = {"stage": IMITATE, "fixed": True, "baselines": (NO_THOUGHT,)}
        label = _imitation(config.imitate, own)
        found.append(_row(IMITATE, label, 0, "Imitation, as it ended.", rules=lengths, **how))
        if not by_steps and own < total:
            about = "Imitation, with as many latents as there may be at most."
            found.append(_row("imitate_fixed_tmax", "imitation, fixed T_max", 1, about, rules=(total,), **how))
    if CONTROL in stages:
        about = "Imitation for as many further steps as an objective takes: more training without rewards."
        rules = tuple(sorted({*lengths, total}))
        found.append(_row(CONTROL, "further imitation", 2, about, (IMITATE,), rules=rules))
    return found


def _imitation(config: ImitateSettings, latents: int) -> str:
    """What tables call imitation at its own number of latents; without any, by what is still written in the end."""
    if latents:
        return "imitation, best fixed length" if config.final_latents == "steps" else "imitation, own length"
    if config.recipe and (label := RECIPES[config.recipe].label):
        return label
    if config.final_steps:
        return "no latents"
    return "imitation, last steps written" if config.stage_steps * config.max_latent_stage else "CoT-SFT"


def trained_with(stage: Stage) -> dict[str, Any]:
    """What a stage's checkpoint, or without a name `config.init`, was trained with, as it stands beside it."""
    if stage.name:
        return stage.folder.said()
    opened, init = stage.run.checkpoint.opened, {"init": stage.run.config.init}
    return init | opened.stage.said() if opened and opened.stage else init


def reported_settings(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Of what a checkpoint was trained with, by key: the seed, and what is not at its default."""
    said, default = flatten(facts), flatten(as_json(values(Config())))
    for name, own in facts.get("objective", {}).items():
        kind = OBJECTIVES.get(own.get("kind") or name)
        default |= flatten({"objective": {name: as_json(values(kind()))}}) if kind else {}
    return {key: value for key, value in said.items() if key == "seed" or value != default.get(key, value)}
