"""What spans several sections of a config, before anything is loaded; `run.run_checks` knows the checkpoint too."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from slpo_jax.architectures import REASONERS, architecture_of
from slpo_jax.config.config import Config, read_config
from slpo_jax.errors import UserError
from slpo_jax.evaluation.comparisons import AVERAGE
from slpo_jax.models.llama import LlamaConfig
from slpo_jax.models.reasoner import BACKBONES, ModelConfig
from slpo_jax.policy.scorers import SCORERS
from slpo_jax.stages import CONTROL, IMITATE_SCRATCH, NO_THOUGHT, SECTIONS
from slpo_jax.training.metrics import check_trackers
from slpo_jax.training.objectives import Objective
from slpo_jax.training.recipes import RECIPES

# Of stages, checkpoints/ and rows, beside those of the objectives.
_TAKEN = {
    *SECTIONS,
    CONTROL,
    NO_THOUGHT,
    *IMITATE_SCRATCH.values(),
    "reasoner",
    "imitate_fixed_tmax",
    "imitate_by_steps",
    "checkpoint",
    "best_fixed",
}


def check(node: Config | ConfigDict) -> Config:
    """Fail early on values that no stage could use: first each section's own, then relations between sections.

    Args:
        node: the config, or the ConfigDict of a config file.
    Returns:
        the config that a run goes by.
    Raises:
        UserError: one line with the key and the remedy.
    """
    settings = node if isinstance(node, Config) else read_config(node)
    stages = settings.stages
    gate = settings.gate
    evaluate = settings.evaluate
    sets = settings.data.eval
    need(
        stages == tuple(stage for stage in SECTIONS if stage in stages),
        f"stages: {stages} is not valid; give each at most once, in the order {', '.join(SECTIONS)}",
    )
    check_trackers(settings.trackers)
    if not settings.init:  # whose shapes are its own
        _check_model(settings.reasoner, settings.model)
    _check_objectives(
        settings.objective, settings.rl.objectives if "rl" in stages else ()
    )
    # The gate is trained if there is one, and it needs latents to stop.
    trains_gate = "cold_start" in stages
    need(
        gate.enabled or not trains_gate,
        "gate.enabled: False leaves cold_start nothing to train; take that out",
    )
    need(
        settings.max_latents or not gate.enabled,
        "gate.enabled: nothing to stop with max_latents=0; set it to False",
    )
    if "imitate" in stages:
        _check_imitation(settings)
    need(
        settings.max_latents or "latent_rm" not in stages,
        "max_latents: 0, and the stage latent_rm judges latents",
    )
    need(
        not (settings.cold_start.train_backbone and gate.detached),
        "cold_start.train_backbone: the gate's gradient reaches the backbone only with config.gate.detached=False",
    )
    need(
        not (evaluate.by_steps and gate.enabled),
        "evaluate.by_steps: True, but the gate says when a thought ends; set it or config.gate.enabled to False",
    )
    need(
        # What is evaluated has to be named, in names that mean one thing.
        AVERAGE not in sets,
        f"data.eval.{AVERAGE}: the report calls the mean of the sets so; use another name",
    )
    need(
        "evaluate" not in stages or sets, "data.eval: no sets; add NAME = source to it"
    )
    for name in evaluate.scorers:
        need(
            name in SCORERS,
            f"evaluate.scorers: {name!r} is unknown; use {', '.join(SCORERS)}",
        )
        can = gate.enabled or not SCORERS[name].needs_gate
        need(
            can,
            f"evaluate.scorers: {name} asks the gate, and config.gate.enabled is False; leave it out",
        )
    for name in evaluate.datasets or ():
        need(
            name in sets,
            f"evaluate.datasets: {name!r} is not under config.data.eval; it has {', '.join(sets)}",
        )
    return settings


def need(ok: Any, message: str) -> None:
    """Raise a `UserError` unless something holds.

    Raises:
        UserError: the message, of a key of the config.
    """
    if not ok:
        raise UserError(f"config.{message}")


def _check_model(reasoner: str, model: ModelConfig) -> None:
    """Check shapes for random weights."""
    architecture_of(reasoner)
    heads = model.n_head
    llama = issubclass(BACKBONES[REASONERS[reasoner][1]], LlamaConfig)
    key_heads = model.n_kv_head or heads
    size = f"model.n_embd: {model.n_embd} is no"
    need(
        model.n_embd % heads == 0,
        f"{size} multiple of model.n_head ({heads}); change one of them",
    )
    need(
        not llama or heads % key_heads == 0,
        f"model.n_kv_head: {key_heads} does not divide model.n_head ({heads})",
    )
    # LLaMA rotates pairs of a head's dimensions.
    rotated = model.n_embd // heads % 2 == 0  # in pairs
    need(
        not llama or rotated,
        f"{size} even multiple of model.n_head ({heads}); change one of them",
    )


def _check_imitation(settings: Config) -> None:
    imitate = settings.imitate
    architecture = architecture_of(settings.reasoner)
    name = imitate.recipe or architecture.default_recipe
    need(
        imitate.c_thought == 0 or architecture.has_latents,
        f"imitate.c_thought: {imitate.c_thought} latents a step, but {settings.reasoner} writes its steps; set it to 0",
    )
    if imitate.gate_weight:
        _check_stop(settings, name)
    if name in RECIPES:  # else `recipe_of` says so
        getattr(imitate, name).check(name, settings)


def _check_stop(settings: Config, recipe: str) -> None:
    """Check that demonstrations say where a thought stops, and that there is a gate to learn it."""
    imitate = settings.imitate
    key = f"imitate.gate_weight: {imitate.gate_weight}"
    known = imitate.final_latents == "steps" and imitate.c_thought > 0
    need(
        known,
        f"{key}, but latents don't follow the steps; set imitate.final_latents to steps, or this to 0",
    )
    need(
        settings.gate.enabled,
        f"{key}, but there is no gate to teach; set config.gate.enabled to True, or this to 0",
    )
    teaches = recipe not in RECIPES or RECIPES[recipe].teaches_stop
    need(
        teaches,
        f"{key}, but the recipe {recipe} doesn't say where a thought stops; set it to 0, or use curriculum",
    )
    need(
        not imitate.lora.rank,
        f"{key}, but imitate.lora.rank trains adapters alone; set one of the two to 0",
    )


def _check_objectives(
    objectives: Mapping[str, Objective], trained: Sequence[str]
) -> None:
    names = ", ".join(objectives)
    for name in objectives:
        need(
            re.fullmatch(r"[^\W\d]\w*", name) and name not in _TAKEN,
            f"objective.{name}: a stage or a row of the report has this name, or it isn't of letters, digits and _; "
            "use another",
        )
    for place, name in enumerate(trained):
        need(
            name in objectives,
            f"rl.objectives: {name!r} is unknown; use one of {names}, or add config.objective.{name} with its kind",
        )
        after = objectives[name].after
        need(
            after in ("", *objectives) and after not in trained[place:],
            f"objective.{name}.after: {after!r} is not trained before it; use one of {names}, and put it before {name} "
            "into config.rl.objectives",
        )
