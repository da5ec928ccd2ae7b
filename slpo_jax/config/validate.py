"""What spans several sections of a config, before anything is loaded; `run.validate` knows the checkpoint too."""

import re
from collections.abc import Collection
from typing import Any

from absl import logging
from ml_collections import ConfigDict

from slpo_jax.checkpoints.architectures import REASONERS, architecture_of
from slpo_jax.config.config import Config, objective_of, read_config, rl_of
from slpo_jax.config.sections import changed
from slpo_jax.errors import UserError
from slpo_jax.evaluation.comparisons import AVERAGE
from slpo_jax.io.workdir import BEST
from slpo_jax.models.llama import LlamaConfig
from slpo_jax.models.reasoner import BACKBONES
from slpo_jax.policy.scorers import SCORERS
from slpo_jax.rewards.reward import CORRECT
from slpo_jax.stages import CONTROL, EVALUATE, IMITATE, NO_THOUGHT, RL, SECTIONS, UNFINISHED
from slpo_jax.training.metrics import check_trackers
from slpo_jax.training.recipes import RECIPES

# Of stages, checkpoints/ and rows, beside those of the objectives.
_TAKEN = {*SECTIONS, CONTROL, NO_THOUGHT, UNFINISHED, "reasoner", "imitate_fixed_tmax",
          "checkpoint", "best_fixed"}  # fmt: skip

_LENGTHS = ("steps", ".schedule")  # what keys of lengths end with


def check(node: ConfigDict, given: Collection[str] = ()) -> Config:
    """Fail early on values that no stage could use: each section's own, then what spans several.

    Args:
        node: the config.
        given: keys that the user has set beside the config's file: what the file has chosen gives way to them.
    Returns:
        the config that a run goes by.
    Raises:
        UserError: one line with the key and the remedy.
    """
    if "max_latents" in given and "min_latents" not in given and node.max_latents < node.min_latents:
        logging.warning(
            "config.min_latents: %d and not %d, with max_latents", max(node.max_latents, 1), node.min_latents
        )
        node.min_latents = max(node.max_latents, 1)
    settings = _with_room(read_config(node), given)

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


def _with_room(settings: Config, given: Collection[str]) -> Config:
    """The config with a tenth of the steps as warm-up where it was longer than what is given leaves room for."""
    cut = dict[str, int]()
    for stage in settings.stages:
        key, most = f"{stage}.optimizer.warmup_steps", 0
        shorter = [name for name in given if name.startswith((f"{stage}.", "objective.")) and name.endswith(_LENGTHS)]
        if shorter and stage != EVALUATE and key not in given:
            most, warmup = _fewest_steps(settings, stage), getattr(settings, stage).optimizer.warmup_steps
            if warmup > most:
                cut[key] = most // 10
                logging.warning("config.%s: %d and not %d, with %s", key, cut[key], warmup, ", ".join(sorted(shorter)))
    return changed(settings, cut)


def _fewest_steps(settings: Config, stage: str) -> int:
    """Of what an optimizer of a stage takes, as far as the config says, the most that can be warm-up."""
    own, runs = getattr(settings, stage), []
    if stage == IMITATE:
        phases = [count for count in (own.cot_steps, own.stage_steps, own.final_steps) if count]
        whole = own.optimizer.schedule == "constant" and not own.reset_optimizer
        runs = [(sum(phases) if whole else min(phases, default=1), own.optimizer.schedule)]
    elif stage == RL:
        for objective in [objective_of(settings, name) for name in own.objectives]:
            rl = rl_of(own, objective)
            runs.append((rl.steps * objective.updates_per_step, rl.optimizer.schedule))
    else:
        runs = [(own.steps, own.optimizer.schedule)]
    return min(steps - (schedule != "constant") for steps, schedule in runs)


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
