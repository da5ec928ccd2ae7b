"""What the training stages share: where they start, their batches, their loop's beginning and end, validations."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from slpo_jax.errors import UserError
from slpo_jax.evaluation.completions import Completions, accuracy
from slpo_jax.evaluation.curves import read_metrics
from slpo_jax.evaluation.records import RolloutCache
from slpo_jax.io.files import write_text
from slpo_jax.io.orbax import load_params, stored_params
from slpo_jax.io.workdir import StageFolder
from slpo_jax.models.parts import Params
from slpo_jax.policy.policy import Stopping
from slpo_jax.rewards.reward import Verdicts
from slpo_jax.run.experiment import Experiment, Stage
from slpo_jax.run.setup import Setup
from slpo_jax.runtime import hosts
from slpo_jax.runtime.mesh import shard_rows
from slpo_jax.stages import COLD_START, IMITATE
from slpo_jax.training.host_rewards import HostRewardFn
from slpo_jax.training.loop import SUMS, StageLoop, StepFn
from slpo_jax.training.metrics import warn_of_cuts
from slpo_jax.training.optimizer import make_optimizer, make_schedule
from slpo_jax.training.rollouts import make_batch
from slpo_jax.training.stage_checkpoints import StageCheckpoints
from slpo_jax.training.state import LossFn, TrainState, init_state, make_train_step


def read_stage_params(stage: Stage) -> Params:
    """Return the parameters that a finished stage left; without a name those of `config.init`, else random ones."""
    if not stage.name:
        return stage.experiment.initial_params()
    stored = stored_params(stage.folder.path)
    return stored.read(stage.experiment.abstract_params(stored.shapes))


class ParamsReader:
    """Reads stages' parameters when they are asked for, and holds those of one stage at a time: two may not fit."""

    def __init__(self, experiment: Experiment):
        self.experiment = experiment
        self.stage: str | None = None
        self.params: Params = {}

    def read(self, stage: str) -> Params:
        """Return a stage's parameters; without a name, those of `config.init`."""
        if stage != self.stage:
            self.params = {}  # the other's, whose memory is needed
            self.params = read_stage_params(self.experiment.stage(stage))
            self.stage = stage
        return self.params


def check_gate_is_trained(stage: Stage) -> None:
    """Refuse a stage that samples thoughts which a random gate would stop.

    Raises:
        UserError: the gate is used, and not trained where the stage starts.
    """
    experiment = stage.experiment
    config = experiment.config
    if not config.gate.enabled:
        return
    start = stage.start.name
    is_trained = True
    if not start:
        is_trained = experiment.checkpoint.description.gate_trained
    elif start == IMITATE:
        is_trained = config.imitate.gate_weight > 0
    if not is_trained:
        raise UserError(
            f"config.stages: {stage.name} stops by the gate, which is not trained where it starts; put {COLD_START} "
            "before it, or set config.gate.enabled to False"
        )


def make_batch_reader(stage: Stage, answers: bool = False) -> Callable[..., Any]:
    """Return step -> the sharded batch of prompts and references, None after the last step; see `host_batches`."""
    steps = stage.settings.steps
    host_batch_at = host_batches(stage.experiment, stage.settings, steps, answers)

    def batch_at(step: int, number: int = 0):
        if step >= steps:
            return None
        return shard_rows(host_batch_at(step, number), stage.experiment.mesh)

    return batch_at


def host_batches(
    setup: Setup, settings: Any, steps: int, answers: bool = False
) -> Callable[..., Any]:
    """Return step -> the batch of prompts and references, of numpy.

    Args:
        settings: the stage's section.
        steps: that will be taken.
        answers: also the reference answers' tokens.
    Returns:
        it takes a second number, of the batch among those of its step: 0 is the step's own, and dynamic sampling asks
        for 1, 2, … to replace problems that taught nothing.
    """
    seed = setup.config.seed
    size = settings.batch_size
    shards = setup.mesh.size * settings.micro_batches
    max_tokens = setup.train.most_tokens(seed, steps, size, shards)
    answer_slots = setup.policy.config.answer_slots if answers else 0

    def batch(step: int, number: int = 0):
        # A step's further batches come from places past the last step, so that they repeat none of the other steps'
        # draws. A problem that comes again has other noise than in the step's batches before, whose places are
        # `earlier_steps`. Prompts of further batches are padded, so that all of them have one shape.
        place = step + number * steps
        earlier_steps = list(range(step, place, steps))
        return make_batch(
            setup.train,
            place,
            seed,
            size,
            setup.prompt_slots,
            setup.references,
            0 if number else max_tokens,
            shards,
            answer_slots=answer_slots,
            earlier_steps=earlier_steps,
        )

    return batch


def make_host_reward(setup: Setup, with_truncated: bool = False) -> HostRewardFn:
    """Make the function that tells on the host what completions of the training set's problems earn.

    Args:
        with_truncated: see `Reward.judge`.
    """
    problems = setup.train.problems
    reward = setup.reward

    def earned(
        tokens_NA: np.ndarray, index_N: np.ndarray, latents_N: np.ndarray
    ) -> Verdicts:
        readings = [
            reward.read(tokens, latents)
            for tokens, latents in zip(tokens_NA, latents_N, strict=True)
        ]
        asked = [problems[index % len(problems)] for index in index_N.tolist()]
        return reward.judge(readings, asked, with_truncated)

    return earned


def make_host_rightness(setup: Setup) -> HostRewardFn:
    """As `make_host_reward`, but 1 for a completion that counts as right, and 0 for others, whatever they earn."""
    judge = make_host_reward(setup)

    def earned(
        tokens_NA: np.ndarray, index_N: np.ndarray, latents_N: np.ndarray
    ) -> Verdicts:
        verdicts = judge(tokens_NA, index_N, latents_N)
        return verdicts._replace(
            total=verdicts.right.astype(np.float32),
            unjudged=np.zeros_like(verdicts.unjudged),
        )

    return earned


def state_and_step(
    stage: Stage,
    params: Params,
    trained: tuple[str, ...],
    loss_fn: LossFn,
    make_step: Callable | None = None,
) -> tuple[TrainState, StepFn]:
    """Return the state before a stage's first step, and its step, by the optimizer of its section.

    Args:
        params: where it starts; copied.
        trained: the parameters that it changes, by their top-level names.
        make_step: makes the step of the loss, called as `make_train_step` is, which is the default.
    """
    experiment = stage.experiment
    optimizer_config = experiment.optimizer_config(stage.section, stage.settings.steps)
    optimizer = make_optimizer(optimizer_config)
    state = init_state(params, trained, optimizer, experiment.key, experiment.layout)
    make_step = make_step or make_train_step
    step_fn = make_step(
        loss_fn,
        optimizer,
        trained,
        experiment.layout,
        stage.section,
        stage.settings.micro_batches,
        schedule=make_schedule(optimizer_config),
    )
    return state, step_fn


def open_stage(
    stage: Stage, state: TrainState, total: int, folder: StageFolder | None = None
) -> tuple[StageLoop, TrainState, dict[str, Any]]:
    """Open a stage's loop, and go on from its newest checkpoint if there is one.

    Args:
        state: before the first step.
        total: steps of the whole stage.
        folder: of the checkpoints, if not the stage's own.
    Returns:
        the loop; the state to go on from; and what was saved beside that state.
    """
    experiment = stage.experiment
    checkpoints = StageCheckpoints((folder or stage.folder).path)

    # All processes go on from the same checkpoint, or begin together.
    saved: dict[str, Any] = {}
    latest = checkpoints.latest_step
    none = -1
    common = hosts.all_processes_agree(
        none if latest is None else latest, checkpoints.directory
    )
    if common != none:
        state, saved = checkpoints.restore(state)
    experiment.log.rewind(stage.name, int(state.step))

    # Thoughts that are written down are among the answer's tokens.
    writes_thoughts = experiment.policy.latent_policy.says is not None
    tokens = (
        ("answer_tokens",) if writes_thoughts else ("latent_steps", "answer_tokens")
    )
    loop = StageLoop(
        stage.name,
        total,
        int(state.step),
        experiment.log,
        checkpoints,
        log_every=experiment.config.log_every,
        checkpoint_every=experiment.config.checkpoint_every,
        max_skipped=experiment.config.max_skipped_steps,
        sums=saved.pop(SUMS, None),
        tokens=tokens,
    )
    return loop, state, saved


def close_stage(
    stage: Stage,
    loop: StageLoop,
    state: TrainState,
    extra: Mapping[str, Any] | None = None,
    finalize: Callable[[Stage, TrainState], None] | None = None,
) -> None:
    """Save the last state, and note that the stage is finished.

    Args:
        extra: what is saved beside it.
        finalize: turns that checkpoint into the one that later stages read.
    """
    loop.finish(state, extra)
    _warn_of_equal_rewards(stage)
    if finalize:
        finalize(stage, state)
    note_finished(stage, int(state.step))


def _warn_of_equal_rewards(stage: Stage) -> None:
    """Warn where no step of the stage had rewards that differ."""
    rows, _ = read_metrics(stage.experiment.workdir.metrics)
    own_rows = [row for row in rows if row["stage"] == stage.name and "solved" in row]
    if not own_rows or not hosts.is_first():
        return
    if any(row["solved"] or row.get("mixed") for row in own_rows):
        return
    why = "no rollout was right"
    remedy = "start from what is right now and then"
    if any(row.get("reward") for row in own_rows):
        why = "all rollouts of a problem earned the same"
        remedy = "give a reward that tells them apart"
    logging.warning(
        "%s: %s in any step, so rewards taught nothing; %s", stage.name, why, remedy
    )


def note_finished(stage: Stage, step: int) -> None:
    """Write down that the stage's last checkpoint is there."""
    write_text(stage.folder.finished, f"{step}\n")
    hosts.barrier(f"{stage.name} is finished")


class Validation:
    """The validations of a stage, which leaves the parameters of the best one, the earlier ones on a tie.

    Args:
        stage: of which `validated_every` says how often; 0 is never.
        loop: of the stage.
        saved: `facts` of the checkpoint that is gone on from; {} at a beginning.
        accuracy: parameters -> the share of validation problems that they are right on; None is the reasoner's.

    Attributes:
        facts: what a checkpoint keeps: the best `accuracy`, its `step`, and the last step that was `evaluated`; {} of
            a stage without validations.
    """

    def __init__(
        self,
        stage: Stage,
        loop: StageLoop,
        saved: Mapping[str, Any],
        accuracy: Callable[[Params], float] | None = None,
    ):
        self.stage = stage
        self.loop = loop
        self.accuracy = accuracy or functools.partial(
            evaluate_reasoner, stage.experiment
        )
        self.facts: dict[str, Any] = {}
        if stage.validated_every:
            self.facts = {"accuracy": -1.0, "step": 0, "evaluated": 0} | dict(saved)
            loop.checkpoints.keep(self.facts["step"])
            stage.experiment.log.rewind(
                stage.name, self.facts["evaluated"], "valid_accuracy"
            )

    def is_due(self, step: int) -> bool:
        """Tell whether the parameters after this step are still to be validated; those of the last step always are."""
        if not self.facts or step <= self.facts["evaluated"]:
            return False
        return (
            step % self.stage.validated_every == 0 or step == self.stage.settings.steps
        )

    def run(self, state: TrainState) -> None:
        """Log the accuracy, and save the state if no earlier one was as accurate."""
        with self.loop.pause():
            step = int(state.step)
            accuracy = self.accuracy(state.params)
            self.stage.experiment.log.write(
                self.stage.name, step, {"valid_accuracy": accuracy}
            )
            self.facts["evaluated"] = step
            if accuracy > self.facts["accuracy"]:
                self.facts["accuracy"] = accuracy
                self.facts["step"] = step
                self.loop.checkpoints.keep(step)
                self.loop.save(state, self.facts, replace=True)

    def choose_best(self, state: TrainState) -> TrainState:
        """Return the last state with the parameters of the best validation, and save it in the last one's place."""
        if not self.facts or self.facts["step"] == int(state.step):
            return state
        self.loop.checkpoints.wait()
        params = load_params(
            self.stage.folder.path / str(self.facts["step"]), state.params
        )
        state = dataclasses.replace(state, params=params)
        # The last step's checkpoint may be there already, with the last parameters.
        self.loop.checkpoints.save(state, self.facts, replace=True)
        return state


def evaluate_reasoner(setup: Setup, params: Params) -> float:
    """Return Acc on the validation split; with a gate at the threshold 0.5, else with all latents."""
    if setup.config.gate.enabled:
        return validation_accuracy(setup, params, "threshold", 0.5)
    return validation_accuracy(setup, params, "length", setup.config.max_latents)


def validation_accuracy(
    setup: Setup,
    params: Params,
    stopping: Stopping,
    rule: float | int,
    cache: RolloutCache | None = None,
    says_cuts: bool = True,
) -> float:
    """Return Acc on the validation split, where all choices are made.

    Args:
        cache: see `Evaluator.run`.
        says_cuts: warn where most answers have no end.
    """
    valid = setup.valid
    limit = setup.config.evaluate.limit
    rollouts = setup.evaluator.run(
        params, valid, stopping, rule, limit=limit, label="validation", cache=cache
    )

    # Cuts are said once, not at every step.
    is_new = says_cuts and "validation" not in setup.noted
    if is_new and note_cuts(setup, "validation", [rollouts]):
        setup.noted.add("validation")
    return accuracy(setup.reward, valid, rollouts)


def note_cuts(setup: Setup, label: str, evaluations: Sequence[Completions]) -> bool:
    """Warn of cuts in an evaluation's completions, see `warn_of_cuts`."""
    cuts = []
    for completions in evaluations:
        cuts += [setup.reward.read(tokens).cut for tokens in completions["tokens"]]
    return warn_of_cuts(label, float(np.mean(cuts)), setup.evaluated_answers[0])
