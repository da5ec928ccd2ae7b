"""Which rows a run's report has: one a finished stage, at each way of stopping that it is asked about."""

from collections.abc import Mapping
from typing import Any

from slpo_jax.config.config import Config, ends_at, own_latents
from slpo_jax.config.sections import values
from slpo_jax.errors import UserError
from slpo_jax.evaluation.rows import BEST_FIXED, Row
from slpo_jax.io.files import as_json, flatten
from slpo_jax.io.workdir import StageFolder
from slpo_jax.run.experiment import Experiment
from slpo_jax.stages import ABOUT, NO_THOUGHT, wanted
from slpo_jax.training.objectives import OBJECTIVES
from slpo_jax.training.recipes import RECIPES

_FIRST_OBJECTIVE = 10  # in the report's order, after the rows of the other stages


def rows(experiment: Experiment, planned: bool = False) -> list[Row]:
    """The rows that the finished stages of a workdir allow, in the report's order; without any, `config.init`'s.

    Args:
        experiment: the run.
        planned: also those of the stages that are still to be run.

    Raises:
        UserError: there is nothing to evaluate.
    """
    config, workdir = experiment.config, experiment.workdir
    planned_stages: set[str] = set(config.stages) if planned else set()
    if "imitate" in planned_stages:
        planned_stages.update(stage.name for stage in wanted(config) if stage.section == "imitate")
    stages = planned_stages.union(workdir.finished_stages())
    own, total, gated = own_latents(config), config.max_latents, bool(config.gate.enabled)
    by_steps = config.imitate.final_latents == "steps"  # no number is right for all problems
    lengths = tuple(range(1, total + 1)) if by_steps else (own,)
    by_gate: dict[str, Any] = {"stopping": "length", "rules": (total,)}
    if gated:
        by_gate = {"stopping": "threshold", "rules": tuple(config.evaluate.thresholds), "gated": True}
    found = list[Row]()

    def add(name: str, label: str, place: int, about: str, **more: Any) -> None:
        found.append(Row(name, label, place, about=about, **{"stage": name} | more))

    if NO_THOUGHT in stages:
        add(NO_THOUGHT, "no thought", -1, "Imitation in as many stages and steps, without latents.", rules=(0,))
    if "imitate" in stages:
        imitated: dict[str, Any] = {"stage": "imitate", "fixed": True, "baselines": (NO_THOUGHT,)}
        add("imitate", _imitation(config), 0, "Imitation, as it ended.", rules=lengths, **imitated)
        if total and not by_steps and not (own == total and ends_at(config)):  # or the two would be one
            about = "Imitation, with as many latents as there may be at most."
            add("imitate_fixed_tmax", "imitation, fixed T_max", 1, about, rules=(total,), **imitated)
    if "imitate_control" in stages:
        about = "Imitation for as many further steps as an objective takes: more training without rewards."
        rules = tuple(sorted({*lengths, total}))
        add("imitate_control", "imitation control", 2, about, rules=rules, baselines=("imitate",))
    # Without a gate there is no cold start, and imitation itself is what an objective starts from.
    before = () if gated else ("imitate",)
    earlier: tuple[str, ...] = ()
    for section, (label, about) in {section: each.row for section, each in ABOUT.items() if each.row}.items():
        if section in stages:
            add(section, label, 3 + len(earlier), about, baselines=(*earlier, *before, BEST_FIXED), **by_gate)
        earlier = (section, *earlier)
    objectives = _objectives(experiment, planned)
    for place, name in enumerate(objectives, start=_FIRST_OBJECTIVE):
        controls = (*earlier, "imitate_control", *before, BEST_FIXED)
        baselines = (*objectives[: place - _FIRST_OBJECTIVE], *controls)
        label = (OBJECTIVES[name].label if name in OBJECTIVES else "") or name.replace("_", " ")
        add(name, label, place, f"What the objective {name} trained.", baselines=baselines, **by_gate)
    if not found:
        if not config.init:
            raise UserError(f"config.init: {workdir} holds no finished stage to evaluate; give a checkpoint")
        about, by_gate = "The checkpoint that config.init names.", by_gate | {"stage": "", "baselines": before}
        add("checkpoint", f"checkpoint {_short(config.init)}", _FIRST_OBJECTIVE, about, **by_gate)
    return found


def trained_with(experiment: Experiment, stage: str) -> dict[str, Any]:
    """What a stage's checkpoint, or `config.init` for "", was trained with, as it stands beside the checkpoint."""
    if stage:
        return experiment.workdir.stage(stage).said()
    orbax, init = experiment.checkpoint.orbax, {"init": experiment.config.init}
    return init if orbax is None else init | StageFolder.of(orbax).said()


def reported_settings(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Of what a checkpoint was trained with, by key: the seed, and what is not at its default."""
    said, default = flatten(facts), flatten(as_json(values(Config())))
    for name, own in facts.get("objective", {}).items():
        kind = OBJECTIVES.get(own.get("kind") or name)
        default |= flatten({"objective": {name: as_json(values(kind()))}}) if kind else {}
    return {key: value for key, value in said.items() if key == "seed" or value != default.get(key, value)}


def _objectives(experiment: Experiment, planned: bool) -> list[str]:
    """The checkpoints that the stage rl left (or will leave), in config's order, then any others by name."""
    named, found = list(experiment.config.rl.objectives), set(experiment.workdir.finished_objectives())
    if planned and "rl" in experiment.config.stages:
        found.update(named)
    return [name for name in named if name in found] + sorted(found.difference(named))


def _imitation(config: Config) -> str:
    """What tables call imitation at its own number of latents; without any, by what is still written in the end."""
    if own_latents(config):
        by_steps = config.imitate.final_latents == "steps"
        return "imitation, best fixed length" if by_steps else "imitation, own length"
    if config.imitate.recipe and (label := RECIPES[config.imitate.recipe].label):
        return label
    if config.imitate.final_steps:
        return "no thought"
    dropped = config.imitate.stage_steps * config.imitate.max_latent_stage
    return "imitation, last steps written" if dropped else "CoT-SFT"


def _short(init: str) -> str:
    """The end of a path that tells checkpoints apart, or a hub id as it is."""
    parts = init.rstrip("/").split("/")
    return "/".join(parts[-3:] if "checkpoints" in parts[-3:] else parts[-2:])
