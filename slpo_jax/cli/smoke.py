"""`slpo train .. --smoke`: every stage of a run for a few steps, to see within a minute that all of it works."""

import os
from collections.abc import Collection
from typing import Any

from ml_collections import ConfigDict

from slpo_jax.data.generated import GENERATED
from slpo_jax.io.files import flatten
from slpo_jax.stages import LATENT_RM, REASONERS, RL

STEPS, ROWS = 2, 8  # steps of a phase or an objective, and problems of a batch and of an evaluated set
_QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def compile_quickly() -> None:
    """Have XLA make slow programs in half the time, which is most of a smoke test's; before jax asks for a device."""
    os.environ["XLA_FLAGS"] = f"{_QUICK} {os.environ.get('XLA_FLAGS', '')}".rstrip()


def smoke(config: ConfigDict, given: Collection[str] = ()) -> str:
    """Cut all lengths of a config, in place, those that flags set as well; compiling takes the most time then.

    Args:
        given: keys that flags set.
    Returns:
        a line that says so, and which of these are cut.
    """
    every = flatten(config.to_dict())
    imitate, rl, evaluate = config.imitate, config.rl, config.evaluate
    _lower(imitate, cot_steps=STEPS, stage_steps=STEPS, final_steps=STEPS, max_latent_stage=1)
    imitate.icot.update(all_from=1, tokens_per_epoch=2**20)  # a step for the one token that is dropped
    _lower(config.cold_start, trajectories=2)
    _lower(rl, dynamic_batches=1)
    for objective in config.objective.values():
        _lower(objective, steps=STEPS)
    parts = max([1, *(each.get("minibatches", 1) for each in config.objective.values())])
    for section in REASONERS:
        stage = config[section]
        _lower(stage, **{key: STEPS for key in ("steps", "evaluate_every") if key in stage})
        stage.batch_size = min(ROWS * parts if section == RL else ROWS, stage.batch_size // stage.micro_batches)
        stage.micro_batches, stage.optimizer.warmup_steps = 1, 0
    # A program for each of several shapes is what a whole run gains from.
    imitate.suffix_slots, rl.capacities, config.prompt_slots = (), ((1.0, 1.0),), (max(config.prompt_slots),)
    evaluate.limit = min(evaluate.limit or ROWS, ROWS)
    for task in GENERATED:
        _lower(config.data[task], train_size=64 * ROWS)
    _lower(evaluate, samples=2, seeds=1, batch_size=4 * ROWS, probed=STEPS)
    evaluate.prompt_multiple, config.log_every = max(config.prompt_slots), 1
    said = f"--smoke: {STEPS} steps of each phase and objective, {ROWS} problems of each set; nothing is learned by it"
    now = flatten(config.to_dict())
    cut = [f"{key}={now[key]} and not {every[key]}" for key in sorted(given) if now.get(key) != every.get(key)]
    said += f"; it goes before what was given: config.{', config.'.join(cut)}" * bool(cut)
    if LATENT_RM not in config.stages:
        return said
    config.stages = tuple(stage for stage in config.stages if stage != LATENT_RM)
    if not evaluate.reward_model:
        evaluate.scorers, evaluate.beams = tuple(name for name in evaluate.scorers if name != LATENT_RM), 0
    return f"{said}; {LATENT_RM} is left out, which needs right answers"


def _lower(section: ConfigDict, **most: Any) -> None:
    """Nothing is raised; what is None stays."""
    for key, value in most.items():
        if section[key] is not None:
            section[key] = min(section[key], value)
