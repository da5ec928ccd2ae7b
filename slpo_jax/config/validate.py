"""What spans several sections of a config, before anything is loaded; `run.validate` knows the checkpoint too."""

import re
from typing import Any

from ml_collections import ConfigDict

from slpo_jax.checkpoints.architectures import REASONERS, architecture_of
from slpo_jax.config.config import Config, objective_of, read_config
from slpo_jax.errors import UserError
from slpo_jax.evaluation.comparisons import AVERAGE
from slpo_jax.io.workdir import BEST
from slpo_jax.models.llama import LlamaConfig
from slpo_jax.models.reasoner import BACKBONES
from slpo_jax.policy.scorers import SCORERS
from slpo_jax.rewards.reward import CORRECT
from slpo_jax.stages import CONTROL, NO_THOUGHT, SECTIONS, UNFINISHED
from slpo_jax.training.recipes import RECIPES
from slpo_jax.training.trackers import check_trackers

# Of stages, checkpoints/ and rows, beside those of the objectives.
_TAKEN = {*SECTIONS, CONTROL, NO_THOUGHT, UNFINISHED, "reasoner", "imitate_fixed_tmax",
          "checkpoint", "best_fixed"}  # fmt: skip


def check(node: ConfigDict) -> Config:
    """Fail early on values that no stage could use: each section's own, then what spans several.

    Args:
        node: the config.
    Returns:
        the config that a run goes by.
    Raises:
        UserError: one line with the key and the remedy.
    """
    settings = read_config(node)

    def need(ok, message):
        if not ok:
            raise UserError(f"config.{message}")

    need(
        settings.stages == tuple(stage for stage in SECTIONS if stage in settings.stages),
        f"stages: {settings.stages} is not valid; give each at most once, in the order {', '.join(SECTIONS)}",
    )
    check_trackers(settings.trackers)
    _check_model(settings, need)
    _check_objectives(settings, need)
    need(
        settings.max_latents > 0 or not settings.gate.enabled,
        "gate.enabled: with max_latents=0 there is nothing to stop; set it to False",
    )
    if "imitate" in settings.stages:
        _check_imitation(settings, need)
    need(
        settings.gate.enabled or "cold_start" not in settings.stages,
        "gate.enabled: False leaves the cold_start stage nothing to train; take it out of config.stages",
    )
    need(
        settings.reward == CORRECT or "cold_start" not in settings.stages,
        f"reward: {settings.reward} is asked on the host, and cold_start asks inside its step; use {CORRECT}, or take "
        "the stage out of config.stages",
    )
    need(
        not (settings.cold_start.train_backbone and settings.gate.detached),
        "cold_start.train_backbone: the gate's gradient reaches the backbone only with config.gate.detached=False",
    )
    need(
        settings.max_latents or "latent_rm" not in settings.stages,
        "max_latents: 0, and latent_rm judges latents; set it, or take the stage out of config.stages",
    )
    need(
        not (settings.evaluate.by_steps and settings.gate.enabled),
        "evaluate.by_steps: True, but the gate says when a thought ends; set it or config.gate.enabled to False",
    )
    sets = settings.data.eval
    need(AVERAGE not in sets, f"data.eval.{AVERAGE}: the report calls the mean of the sets so; use another name")
    need("evaluate" not in settings.stages or sets, "data.eval: no sets; add NAME = source to it")
    for name in settings.evaluate.scorers:
        need(name in SCORERS, f"evaluate.scorers: {name!r} is unknown; use {', '.join(SCORERS)}")
        need(
            settings.gate.enabled or not SCORERS[name].needs_gate,
            f"evaluate.scorers: {name} asks the gate, and config.gate.enabled is False; leave it out",
        )
    for name in settings.evaluate.datasets or ():
        need(name in sets, f"evaluate.datasets: {name!r} is not under config.data.eval; it has {', '.join(sets)}")
    return settings


def _check_model(settings: Config, need: Any) -> None:
    """What only random weights need: a checkpoint brings shapes of its own."""
    if settings.init:
        return
    architecture_of(settings.reasoner)
    model, backbone = settings.model, BACKBONES[REASONERS[settings.reasoner][1]]
    llama = issubclass(backbone, LlamaConfig)
    need(
        model.n_embd % model.n_head == 0,
        f"model.n_embd: {model.n_embd} is not a multiple of model.n_head ({model.n_head}); change one of them",
    )
    need(
        not llama or model.n_head % (model.n_kv_head or model.n_head) == 0,
        f"model.n_kv_head: {model.n_kv_head} does not divide model.n_head ({model.n_head}); use one that does",
    )
    need(
        not llama or model.n_embd // model.n_head % 2 == 0,
        f"model.n_embd: heads of {model.n_embd // model.n_head} have no pairs to rotate; use an even multiple of "
        f"model.n_head ({model.n_head})",
    )


def _check_imitation(config: Config, need: Any) -> None:
    imitate, architecture = config.imitate, architecture_of(config.reasoner)
    name = imitate.recipe or architecture.default_recipe
    need(
        imitate.c_thought == 0 or architecture.has_latents,
        f"imitate.c_thought: {imitate.c_thought} latents a step, but {config.reasoner} writes its steps; set it to 0",
    )
    if name in RECIPES:  # else `recipe_of` says so
        getattr(imitate, name).check(name, config)


def _check_objectives(config: Config, need: Any) -> None:
    for name in config.objective:
        need(
            re.fullmatch(r"[^\W\d]\w*", name),
            f"objective.{name}: its name is that of a key and of files, a letter and then letters, digits and _; use "
            "another",
        )
        need(
            name not in _TAKEN and not name.endswith(BEST),
            f"objective.{name}: a stage or a row of the report has this name; use another",
        )
    if "rl" in config.stages:
        for place, name in enumerate(config.rl.objectives):
            after = objective_of(config, name).after
            need(
                after in ("", *config.objective),
                f"objective.{name}.after: {after!r} is no objective; use one of {', '.join(config.objective)}",
            )
            need(
                after not in config.rl.objectives[place:],
                f"objective.{name}.after: {after} is not trained before it; put it before {name} into "
                "config.rl.objectives",
            )
