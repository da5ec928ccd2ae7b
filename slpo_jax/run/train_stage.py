"""A stage of a run: what is known of it before it begins, where it starts, its steps, and going on where it was."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import logging

from slpo_jax.evaluation.completions import Completions, accuracy
from slpo_jax.evaluation.curves import read_metrics
from slpo_jax.evaluation.records import RolloutCache
from slpo_jax.io.files import write_text
from slpo_jax.io.orbax import load_params, stored_params
from slpo_jax.io.workdir import StageFolder
from slpo_jax.models.parts import Params
from slpo_jax.policy.policy import Stopping
from slpo_jax.rewards.reward import Verdicts
from slpo_jax.run.experiment import Stage
from slpo_jax.run.setup import Setup
from slpo_jax.runtime import hosts
from slpo_jax.runtime.mesh import shard_rows
from slpo_jax.training.host_rewards import HostRewardFn
from slpo_jax.training.loop import SUMS, StageLoop, StepFn
from slpo_jax.training.metrics import warn_of_cuts
from slpo_jax.training.optimizer import make_optimizer, make_schedule
from slpo_jax.training.rl_loss import make_batch
from slpo_jax.training.stage_checkpoints import StageCheckpoints
from slpo_jax.training.state import LossFn, TrainState, init_state, make_train_step


def stage_params(stage: Stage) -> Params:
    """Return the parameters that a finished stage left; without a name those of `config.init`, else random ones."""
    if not stage.name:
        return stage.experiment.initial_params()
    stored = stored_params(stage.folder.path)
    return stored.read(stage.experiment.abstract_params(stored.shapes))


def prompted_batches(stage: Stage, answers: bool = False) -> Callable[..., Any]:
    """Return step -> the sharded batch of prompts and references; see `host_batches`."""
    batch_at = host_batches(stage.experiment, stage.settings, stage.settings.steps, answers)
    return lambda step, number=0: shard_rows(batch_at(step, number), stage.experiment.mesh)


def host_batches(setup: Setup, settings: Any, steps: int, answers: bool = False) -> Callable[..., Any]:
    """Return step -> the batch of prompts and references, of numpy.

    Args:
        settings: the stage's section.
        steps: that will be taken.
        answers: also the reference answers' tokens.
    Returns:
        it takes a second number, of the batch among those of its step; the first, 0, is the one that it has by itself.
    """
    seed, size, parts = setup.config.seed, settings.batch_size, setup.mesh.size * settings.micro_batches
    most, answer_slots = setup.train.most_tokens(seed, steps, size, parts), setup.policy.config.answer_slots * answers

    def batch(step: int, number: int = 0):
        # Later ones come from beyond the batches of all steps; what is left of them is not encoded end to end.
        *before, place = range(step, step + (number + 1) * steps, steps)
        return make_batch(
            setup.train, place, seed, size, setup.prompt_slots, setup.references, 0 if number else most, parts,
            answer_slots=answer_slots, before=before,
        )  # fmt: skip

    return batch


def host_reward(setup: Setup, with_truncated: bool = False) -> HostRewardFn:
    """Return the function that tells on the host what completions of the training set's problems earn.

    Args:
        with_truncated: see `Reward.judged`.
    """
    problems, reward = setup.train.problems, setup.reward

    def earned(tokens_NA: np.ndarray, index_N: np.ndarray, latents_N: np.ndarray) -> Verdicts:
        readings = [reward.read(tokens, latents) for tokens, latents in zip(tokens_NA, latents_N, strict=True)]
        asked = [problems[index % len(problems)] for index in index_N.tolist()]
        return reward.judged(readings, asked, with_truncated)

    return earned


def host_rightness(setup: Setup) -> HostRewardFn:
    """Return the same with 1 for a completion that counts as right, and 0 for others, whatever they earn."""
    judge = host_reward(setup)

    def earned(tokens_NA: np.ndarray, index_N: np.ndarray, latents_N: np.ndarray) -> Verdicts:
        verdicts = judge(tokens_NA, index_N, latents_N)
        return verdicts._replace(total=verdicts.right.astype(np.float32), unjudged=np.zeros_like(verdicts.unjudged))

    return earned


def state_and_step(
    stage: Stage, params: Params, trained: tuple[str, ...], loss_fn: LossFn, make: Callable | None = None
) -> tuple[TrainState, StepFn]:
    """Return the state before a stage's first step, and its step, by the optimizer of its section.

    Args:
        params: where it starts; copied.
        trained: the parameters that it changes, by their top-level names.
        make: the step of the loss, called as `make_train_step` is, which is the default.
    """
    experiment, section = stage.experiment, stage.section
    optimizer_config = experiment.optimizer_config(section, stage.settings.steps)
    optimizer = make_optimizer(optimizer_config)
    state = init_state(params, trained, optimizer, experiment.key, experiment.layout)
    arguments = (optimizer, trained, experiment.layout, section, stage.settings.micro_batches)
    return state, (make or make_train_step)(loss_fn, *arguments, schedule=make_schedule(optimizer_config))


def open_stage(
    stage: Stage, state: TrainState, total: int, folder: StageFolder | None = None
) -> tuple[StageLoop, TrainState, dict]:
    """Open the stage's run, at its newest checkpoint (in `folder` if not the stage's own) if there is one."""
    config, log = stage.experiment.config, stage.experiment.log
    checkpoints = StageCheckpoints((folder or stage.folder).path)
    extra: dict[str, Any] = {}
    latest = checkpoints.latest_step
    if hosts.agreed(-1 if latest is None else latest, checkpoints.directory) >= 0:
        state, extra = checkpoints.restore(state)
    log.rewind(stage.name, int(state.step))
    # Thoughts that are written down are among the answer's tokens.
    writes = stage.experiment.policy.latent_policy.says is not None
    tokens = ("answer_tokens",) if writes else ("latent_steps", "answer_tokens")
    sums = extra.pop(SUMS, None)
    loop = StageLoop(
        stage.name, total, int(state.step), log, checkpoints, log_every=config.log_every,
        checkpoint_every=config.checkpoint_every, max_skipped=config.max_skipped_steps, sums=sums, tokens=tokens,
    )  # fmt: skip
    return loop, state, extra


def close_stage(
    stage: Stage,
    loop: StageLoop,
    state: TrainState,
    extra: dict[str, Any] | None = None,
    leave: Callable[[Stage, TrainState], None] | None = None,
) -> None:
    """Save the last state, and note that the stage is finished.

    Args:
        extra: what is saved beside it.
        leave: makes of that checkpoint what others are to find.
    """
    loop.finish(state, extra)
    rows, _ = read_metrics(stage.experiment.workdir.metrics)
    own_rows = [row for row in rows if row["stage"] == stage.name and "solved" in row]
    if own_rows and not any(row["solved"] or row.get("mixed") for row in own_rows) and hosts.is_first():
        why, then = "no rollout was right", "start from what is right now and then"
        if any(row.get("reward") for row in own_rows):
            why, then = "all rollouts of a problem earned the same", "give a reward that tells them apart"
        logging.warning("%s: %s in any step, so rewards taught nothing; %s", stage.name, why, then)
    if leave:
        leave(stage, state)
    note_finished(stage, int(state.step))


def note_finished(stage: Stage, step: int) -> None:
    """Write down that the stage's last checkpoint is there."""
    write_text(stage.folder.finished, f"{step}\n")
    hosts.barrier(f"{stage.name} is finished")


def train_stage(
    stage: Stage,
    state: TrainState,
    step_fn: StepFn,
    batch: Callable[[int], Any],
    accuracy: Callable[[Params], float] | None = None,
    leave: Callable[[Stage, TrainState], None] | None = None,
    patience: int | None = None,
) -> None:
    """Train a stage, and leave it with the parameters of its best validation, if any, the earlier ones on a tie.

    Args:
        state: before its first step.
        batch: step -> batch.
        accuracy: parameters -> the share of validation problems that they are right on; None is the reasoner's.
        leave: see `close_stage`.
        patience: validations without a better one before it stops; None goes on to the last step.
    """
    interval, steps, log = stage.validated_every, stage.settings.steps, stage.experiment.log
    loop, state, best = open_stage(stage, state, steps)
    with loop:
        if not interval:
            close_stage(stage, loop, loop.advance(state, step_fn, batch, steps), leave=leave)
            return
        best = best or {"accuracy": -1.0, "step": 0, "evaluated": 0}
        loop.checkpoints.keep(best["step"])
        log.rewind(stage.name, best["evaluated"], "valid_accuracy")
        longest = steps if patience is None else patience * interval

        def progress() -> dict:
            return best

        while True:
            step = int(state.step)
            if best["evaluated"] < step and (step % interval == 0 or step == steps):
                new_accuracy = (accuracy or functools.partial(reasoner_accuracy, stage.experiment))(state.params)
                log.write(stage.name, step, {"valid_accuracy": new_accuracy})
                best = best | {"evaluated": step}
                if new_accuracy > best["accuracy"]:
                    best |= {"accuracy": new_accuracy, "step": step}
                    loop.checkpoints.keep(step)
                    loop.save(state, best, replace=True)
            if step >= steps or step - best["step"] >= longest:
                if step < steps and hosts.is_first():
                    line = "%s: ends after step %d of %d: no validation was better than at step %d (config.%s.patience)"
                    logging.warning(line, stage.name, step, steps, best["step"], stage.section)
                loop.end_at(step)
                break
            state = loop.advance(state, step_fn, batch, min(steps, (step // interval + 1) * interval), progress)
        if best["step"] < step:
            loop.checkpoints.wait()
            params = load_params(stage.folder.path / str(best["step"]), state.params)
            state = dataclasses.replace(state, params=params)
            # The last step's may be there already, with the last parameters.
            loop.checkpoints.save(state, best, replace=True)
        close_stage(stage, loop, state, best, leave)


def reasoner_accuracy(setup: Setup, params: Params) -> float:
    """Return Acc on the validation split; with a gate at the threshold 0.5, else with all latents."""
    if setup.config.gate.enabled:
        return validation_accuracy(setup, params, "threshold", 0.5)
    return validation_accuracy(setup, params, "length", setup.config.max_latents)


def validation_accuracy(
    setup: Setup, params: Params, stopping: Stopping, rule: float | int, cache: RolloutCache | None = None
) -> float:
    """Return Acc on the validation split, where all choices are made.

    Args:
        cache: see `Evaluator.run`.
    """
    valid, limit = setup.valid, setup.config.evaluate.limit
    rollouts = setup.evaluator.run(params, valid, stopping, rule, limit=limit, label="validation", cache=cache)
    if "validation" not in setup.noted and note_cuts(setup, "validation", [rollouts]):  # not once a step and threshold
        setup.noted.add("validation")
    return accuracy(setup.reward, valid, rollouts)


def note_cuts(setup: Setup, label: str, evaluations: Sequence[Completions]) -> bool:
    """Warn of cuts in an evaluation's completions, see `warn_of_cuts`."""
    cuts = [setup.reward.read(tokens).cut for completions in evaluations for tokens in completions["tokens"]]
    return warn_of_cuts(label, float(np.mean(cuts)), setup.evaluated_answers[0])
