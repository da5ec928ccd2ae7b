"""What the stages share: where one starts, its batches, and going on where it was."""

import functools
from typing import Any

from absl import logging

from slpo_jax.errors import UserError
from slpo_jax.evaluation.curves import read_metrics
from slpo_jax.io import hosts
from slpo_jax.io.files import write_text
from slpo_jax.io.mesh import shard_rows
from slpo_jax.io.orbax import load_params, stored_params
from slpo_jax.models.parts import ADAPTER
from slpo_jax.run.adapters import leave_merged
from slpo_jax.run.experiment import Experiment, Setup
from slpo_jax.run.provenance import starting_stage
from slpo_jax.run.time_estimate import say_hours
from slpo_jax.training.batches import make_batch
from slpo_jax.training.checkpoint import StageCheckpoints
from slpo_jax.training.loop import SUMS, StageRun, StepFn
from slpo_jax.training.optimizer import make_optimizer, make_schedule
from slpo_jax.training.state import LossFn, TrainState, init_state, make_train_step

Params = dict[str, Any]


def stage_params(experiment: Experiment, stage: str) -> Params:
    """The parameters that a finished stage left; of "" those of `config.init`, else random ones."""
    if not stage:
        return experiment.initial_params()
    path = experiment.workdir.stage(stage).path
    return load_params(path, experiment.abstract_params(stored_params(path)))


def starting_params(experiment: Experiment, stage: str) -> Params:
    """Where a stage starts: what the stage before it left, else `config.init`, else random."""
    return stage_params(experiment, starting_stage(experiment, stage))


def state_and_step(
    experiment: Experiment, stage: str, params: Params, trained: tuple[str, ...], loss_fn: LossFn
) -> tuple[TrainState, StepFn]:
    """The state before a stage's first step, and its step, by the optimizer of the config's section of its name.

    Args:
        params: where it starts; copied.
        trained: the parameters that it changes, by their top-level names.
    """
    config = getattr(experiment.config, stage)
    optimizer_config = experiment.optimizer_config(stage, config.steps)
    optimizer = make_optimizer(optimizer_config)
    state = init_state(params, trained, optimizer, experiment.key, experiment.layout)
    how = (optimizer, trained, experiment.layout, stage, config.micro_batches)
    return state, make_train_step(loss_fn, *how, schedule=make_schedule(optimizer_config))


def open_stage(
    experiment: Experiment, stage: str, state: TrainState, total: int, folder: str = ""
) -> tuple[StageRun, TrainState, dict]:
    """The stage's run, at its newest checkpoint (in `folder` if not the stage's own) if there is one."""
    config = experiment.config
    checkpoints = StageCheckpoints(experiment.workdir.stage(folder or stage).path)
    extra: dict[str, Any] = {}
    if checkpoints.latest_step is not None:
        state, extra = checkpoints.restore(state)
    experiment.log.rewind(stage, int(state.step))
    every = (config.log_every, config.checkpoint_every, config.max_skipped_steps)
    sums = extra.pop(SUMS, None)
    # Thoughts that are written down are among the answer's tokens.
    tokens = ("latent_steps", "answer_tokens") if experiment.policy.latent_policy.says is None else ("answer_tokens",)
    measured = functools.partial(say_hours, experiment, stage)
    run = StageRun(stage, total, int(state.step), experiment.log, checkpoints, *every, sums, tokens, measured)
    return run, state, extra


def close_stage(
    experiment: Experiment, stage: str, run: StageRun, state: TrainState, extra: dict[str, Any] | None = None
) -> None:
    """Save the last state, adapters merged, and note that the stage is finished."""
    run.finish(state, extra)
    rows, _ = read_metrics(experiment.workdir.metrics)
    solved = [row["solved"] for row in rows if row["stage"] == stage and "solved" in row]
    if solved and not any(solved) and hosts.is_first():
        logging.warning(
            "%s: no rollout was right in any step, so rewards taught nothing; start from what is right now and then",
            stage,
        )
    if ADAPTER in state.params:
        leave_merged(experiment, stage, state)
    note_finished(experiment, stage, int(state.step))


def note_finished(experiment: Experiment, stage: str, step: int) -> None:
    """Write down that the stage's last checkpoint is there."""
    write_text(experiment.workdir.stage(stage).finished, f"{step}\n")
    hosts.barrier(f"{stage} is finished")


def prompted_batches(experiment: Experiment, config, steps: int, answers: bool = False):
    """step -> the sharded batch of prompts and references; see `host_batches`."""
    made = host_batches(experiment, config, steps, answers)
    return lambda step, number=0: shard_rows(made(step, number), experiment.mesh)


def host_batches(experiment: Setup, config, steps: int, answers: bool = False):
    """step -> the batch of prompts and references, of numpy.

    Args:
        config: the stage's section.
        steps: that will be taken.
        answers: also the reference answers' tokens.
    Returns:
        it takes a second number, of the batch among those of its step; the first, 0, is the one that it has by itself.
    """
    seed, parts = experiment.config.seed, experiment.mesh.size * config.micro_batches
    most = experiment.train.most_tokens(seed, steps, config.batch_size, parts)

    def batch(step: int, number: int = 0):
        # Later ones come from beyond the batches of all steps; what is left of them is not encoded end to end.
        *before, own = range(step, step + (number + 1) * steps, steps)
        return make_batch(
            experiment.train,
            own,
            seed,
            config.batch_size,
            experiment.prompt_slots,
            experiment.reference_width,
            0 if number else most,
            parts,
            experiment.policy.config.answer_slots if answers else 0,
            before,
        )

    return batch


def check_batch(experiment: Setup, stage: str) -> None:
    """A stage's batch must have equal parts for all devices and micro-batches."""
    config, devices = getattr(experiment.config, stage), experiment.mesh.size
    if config.batch_size % (devices * config.micro_batches):
        raise UserError(
            f"config.{stage}.batch_size: {config.batch_size} is not a multiple of {devices} devices x "
            f"{config.micro_batches} micro-batches; change one of them"
        )
