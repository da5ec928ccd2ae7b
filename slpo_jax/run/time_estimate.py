"""How long a run is going to take, said once the first steps of a stage were measured, where that is over an hour."""

import jax
from absl import logging

from slpo_jax.config.config import Config, rl_of
from slpo_jax.io import hosts
from slpo_jax.run.experiment import Experiment
from slpo_jax.stages import CONTROL, IMITATE, NO_THOUGHT, RL, Stage, stage_of, wanted

_HOUR, _DAY = 3600.0, 86400.0


def say_hours(experiment: Experiment, stage: str, left: int, seconds: float) -> None:
    """A line, if what is left takes more than an hour, and what makes that shorter.

    Args:
        stage: that is trained.
        left: steps that it has left, at most.
        seconds: that a step of it takes.
    """
    config = experiment.config
    names = [each.name for each in wanted(config)]
    to_come = names[names.index(stage) + 1 :] if stage in names else []
    later = {name: _steps(config, stage_of(config, name)) for name in to_come}
    total = (left + sum(later.values())) * seconds
    if total <= _HOUR or not hosts.is_first():
        return
    much = f"{total / _HOUR:.1f} hours" if total < 2 * _DAY else f"{total / _DAY:.1f} days"
    after = f" and the {sum(later.values()):,} of {', '.join(later)}, if they take as long" if later else ""
    logging.warning(
        "%s: about %s are left, for %s steps of %.2g s each%s; shorter: %s",
        stage, much, f"{left:,}", seconds, after, ", ".join(_ways(config, stage)),
    )  # fmt: skip


def _steps(config: Config, stage: Stage) -> int:
    """Of a stage after the first, at most."""
    if stage.name == CONTROL:
        return config.rl.steps
    if stage.name == NO_THOUGHT:
        imitate = config.imitate
        return imitate.cot_steps + imitate.max_latent_stage * imitate.stage_steps + imitate.final_steps
    own = rl_of(config.rl, config.objective[stage.name]) if stage.section == RL else getattr(config, stage.section)
    return int(own.steps)


def _ways(config: Config, stage: str) -> list[str]:
    """What makes a stage's steps fewer or quicker."""
    section = stage_of(config, stage).section
    key = f"config.{section}"
    fewer = f"{key}.cot_steps, .stage_steps and .final_steps" if section == IMITATE else f"{key}.steps"
    bytewise = ["a tokenizer with fewer tokens than bytes (config.tokenizer)"] * (config.tokenizer == "bytes")
    device = ["a GPU or TPU"] * (jax.default_backend() == "cpu")
    return [f"fewer steps ({fewer})", f"a smaller {key}.batch_size", *bytewise, *device]
