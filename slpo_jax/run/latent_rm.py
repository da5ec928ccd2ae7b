"""The stage latent_rm: a reward model of latents, trained on labels that are made first.

Labels are kept in `WORKDIR/labels`: a file for some problems each, and what all depend on. What is edited, damaged or
of others is made again. Whoever goes on after an interruption makes those that are missing, the same to the bit: noise
is drawn by problem, thought, step and completion.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from slpo_jax.config.keys import model_settings, rollout_settings
from slpo_jax.data.batches import EncodedProblems, batch_indices, padded_chunks
from slpo_jax.errors import UserError
from slpo_jax.io import artifact
from slpo_jax.models.parts import Params
from slpo_jax.policy import noise
from slpo_jax.policy.policy import Policy, PromptedBatch, Prompts
from slpo_jax.policy.scorers import init_reward_model, latent_scores
from slpo_jax.run.experiment import Stage
from slpo_jax.run.provenance import checkpoint_digest, first_difference, problems_facts
from slpo_jax.run.run_checks import check_batch
from slpo_jax.run.setup import Setup
from slpo_jax.run.train_stage import (
    Validation,
    close_stage,
    open_stage,
    read_stage_params,
    state_and_step,
)
from slpo_jax.runtime import hosts
from slpo_jax.runtime.mesh import EVERYWHERE, ROWS, over_rows, shard_rows
from slpo_jax.runtime.progress import Progress, begin
from slpo_jax.training.latent_rm_loss import (
    LabelledBatch,
    complete,
    draw_thoughts,
    make_loss,
)

# The settings of config.latent_rm that labels depend on.
_SETTINGS = ("problems", "thoughts", "completions", "dropout", "threshold")


@dataclass(frozen=True)
class Labels:
    """The labels of M problems that have right and wrong thoughts, n of each.

    Attributes:
        problems: int [M], places in the training set.
        latents: float32 [M, n, T, D], as they were fed.
        lengths: int [M, n].
        shares: float32 [M, n, T], of completions from a thought's first t latents that are right.
    """

    problems: np.ndarray
    latents: np.ndarray
    lengths: np.ndarray
    shares: np.ndarray


def labelling(setup: Setup) -> tuple[Policy, float | int]:
    """Return the policy of thoughts, and its rule."""
    config = setup.config
    settings = config.latent_rm
    policy = setup.policy
    if settings.dropout is not None:
        policy = policy.with_config(dropout_rate=settings.dropout)
    if config.gate.enabled:
        return policy.with_config(stopping="threshold"), settings.threshold
    return policy.with_config(stopping="length"), config.max_latents


def check_labels(stage: Stage, load: Callable[[], Params]) -> dict[str, Any]:
    """Make sure that labels which are there already are those that would be made now.

    Args:
        stage: latent_rm.
        load: gives the parameters that it starts from.
    Returns:
        what labels depend on: settings by key of the config, and digests of checkpoint and problems.
    Raises:
        UserError: they are of another checkpoint, of other problems, or made with other settings.
    """
    experiment = stage.experiment
    config = experiment.config
    folder = experiment.workdir.labels

    # Settings by their keys, and digests of what they are used on.
    facts = {f"latent_rm.{name}": getattr(stage.settings, name) for name in _SETTINGS}
    facts |= model_settings(config) | rollout_settings(config)
    facts["seed"] = config.seed
    facts["gate.enabled"] = config.gate.enabled
    facts |= config.reward_facts
    facts["checkpoint"] = checkpoint_digest(stage.start, load)
    problems = problems_facts(experiment.train, stage.settings.problems)
    facts["problems"] = list(problems.values())

    # Those that are there say the same of themselves.
    anew = f"delete {folder} to make them anew"
    then = artifact.read(manifest_of(folder), anew)
    difference = first_difference(facts, then.facts) if then else None
    if difference:
        key, now, was = difference
        name = key if key in ("checkpoint", "problems") else f"config.{key}"
        raise UserError(
            f"{name}: is {now}, and the labels in {folder} were made with {was}; set it back, or {anew}"
        )
    return facts


def manifest_of(labels: Path) -> Path:
    """Return the path of the artifact that says what the labels of a folder depend on."""
    return labels / "manifest.json"


def labels_of(stage: Stage, params: Params) -> Labels:
    """Return the workdir's labels, making those that aren't there.

    Args:
        stage: latent_rm.
        params: all parts, of the checkpoint that it starts from, whose thoughts are judged.
    Raises:
        UserError: see `check_labels`; or no problem has right and wrong thoughts.
    """
    experiment = stage.experiment
    folder = experiment.workdir.labels
    settings = stage.settings
    facts = check_labels(stage, lambda: params)
    artifact.write(manifest_of(folder), facts)
    begin("latent_rm: labels")
    hosts.barrier("labels")  # nobody still looks for the manifest

    # Some problems a file, so that a run that goes on makes the missing ones alone.
    problems = experiment.train
    count = min(settings.problems or len(problems), len(problems))
    make = _Maker(experiment, params, problems, 0)

    def labels_for(
        number: int, indices: np.ndarray, real: np.ndarray
    ) -> dict[str, np.ndarray]:
        path = folder / f"{number}.npz"
        arrays = artifact.read_arrays(path, facts)
        if path.exists() and arrays is None:
            logging.warning("%s: is damaged; its labels are made again", path)
        if not hosts.all_processes_agree(arrays is not None, path):
            arrays = make(indices, real)
            artifact.write_arrays(path, facts, arrays)
        return arrays or {}

    labels = _concatenate("labels", count, make.size, labels_for)
    if not len(labels.problems):
        raise UserError(
            f"config.latent_rm.problems: of {count} none has right and wrong thoughts among {settings.thoughts}; "
            f"delete {folder}, and give more or raise config.latent_rm.dropout"
        )
    return labels


def judged_thoughts(setup: Setup, params: Params) -> Labels:
    """Draw thoughts of every validation problem; each has its own answer's rightness, 0 or 1, as its share at every t.

    They are drawn anew, the same to the bit, where a run goes on.

    Args:
        params: see `labels_of`.
    """
    valid = setup.valid
    make = _Maker(setup, params, valid, 1)

    def judged(_: int, indices: np.ndarray, real: np.ndarray) -> dict[str, np.ndarray]:
        thoughts, right_BN = make.judge(indices)
        shape_BNT = thoughts["latents"].shape[:3]
        shares_BNT = np.broadcast_to(right_BN[..., None], shape_BNT)
        return {
            "latents": thoughts["latents"][real],
            "lengths": thoughts["lengths"][real],
            "problems": indices[real],
            "shares": shares_BNT.astype(np.float32)[real],
        }

    count = min(setup.config.evaluate.limit or len(valid), len(valid))
    return _concatenate("validation", count, make.size, judged)


def _concatenate(
    what: str, count: int, size: int, labels_for: Callable[..., dict[str, np.ndarray]]
) -> Labels:
    """Join the labels of so many problems, made `size` at a time: (number, indices, which are real) -> arrays."""
    progress = Progress(f"latent_rm: {what}", count, unit="problem", keep=False)
    parts = []
    with contextlib.closing(progress):
        for number, (indices, real) in enumerate(padded_chunks(count, size)):
            parts.append(labels_for(number, indices, real))
            progress.update(int(indices[-1]) + 1)
    arrays = {}
    for name in parts[0]:
        arrays[name] = np.concatenate([part[name] for part in parts])
    return Labels(**arrays)


class _Maker:
    """A maker of some problems' labels: their thoughts, and where these are right and wrong, completions.

    Args:
        stream: of noise, a number for each set of problems.
    """

    def __init__(
        self, setup: Setup, params: Params, problems: EncodedProblems, stream: int
    ):
        self.setup = setup
        self.params = params
        self.problems = problems
        policy, rule = labelling(setup)
        settings = setup.config.latent_rm
        key = noise.stream_key(setup.key, "latent_rm", stream)

        # Problems whose thoughts, or all completions of whose thoughts, are rolled out together.
        self.size = _problems_a_batch(setup, settings.thoughts)
        self.group = _problems_a_batch(setup, settings.thoughts * settings.completions)

        # As published completions' answers have noise too.
        everywhere = policy.with_config(dropout_where="all")

        def think(params, batch):
            drawn = draw_thoughts(policy, params, batch, rule, key, settings.thoughts)
            latents = policy.latent_policy.feed(params, drawn.actions)
            return {
                "actions": drawn.actions,
                "lengths": drawn.lengths,
                "said": drawn.completions,
                "latents": latents.astype(jnp.float32),
            }

        def go_on(params, inputs):
            batch, actions, lengths = inputs
            return complete(
                everywhere,
                params,
                batch,
                actions,
                lengths,
                rule,
                key,
                settings.completions,
            )

        self.think = self._shard(think)
        self.complete = self._shard(go_on)

    def _shard(self, function: Callable) -> Callable:
        """Spread a function of (parameters, inputs) over the devices, from and to the host."""
        mesh = self.setup.mesh
        program = over_rows(function, mesh, (EVERYWHERE, ROWS))

        def run(inputs):
            results = program(self.params, shard_rows(inputs, mesh))
            return jax.tree.map(hosts.gather_to_host, results)

        return run

    def judge(self, indices: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
        """Return what was thought of each problem, arrays [B, n, ..], and whether its answers are right, [B, n]."""
        thoughts = self.think(self._batch(indices))
        by_problem = jax.tree.map(
            lambda x: x.reshape(len(indices), -1, *x.shape[1:]), thoughts
        )
        right_BN = self._right(indices, by_problem["said"], by_problem["lengths"])
        return by_problem, right_BN

    def __call__(self, indices: np.ndarray, real: np.ndarray) -> dict[str, np.ndarray]:
        # Labels tell a problem's thoughts apart, so that it has to have right and wrong ones.
        by_problem, right_BN = self.judge(indices)
        mixed = np.flatnonzero(real & right_BN.any(axis=1) & ~right_BN.all(axis=1))

        # The share of right completions from each beginning of each thought.
        thoughts = right_BN.shape[1]
        shares = [np.zeros((0, *by_problem["latents"].shape[1:3]), np.float32)]
        for places, is_real in padded_chunks(len(mixed), self.group):
            rows = mixed[places]
            begun = jax.tree.map(
                lambda x, rows=rows: x[rows].reshape(-1, *x.shape[2:]),
                (by_problem["actions"], by_problem["lengths"]),
            )
            completed = self.complete((self._batch(indices[rows]), *begun))
            completions, latents = jax.tree.map(
                lambda x: x.reshape(-1, thoughts, *x.shape[1:]), completed
            )
            right = self._right(indices[rows], completions, latents)
            shares.append(right.mean(axis=-1).astype(np.float32)[is_real])
        return {
            "problems": indices[mixed],
            "shares": np.concatenate(shares),
            "latents": by_problem["latents"][mixed],
            "lengths": by_problem["lengths"][mixed],
        }

    def _batch(self, indices: np.ndarray) -> PromptedBatch:
        prompts = Prompts(*self.problems.prompt_batch(indices, self.setup.prompt_slots))
        references = np.zeros((len(indices), 0), np.uint8)
        return PromptedBatch(prompts, references, indices.astype(np.int32))

    def _right(
        self, indices: np.ndarray, completions: np.ndarray, latents: np.ndarray
    ) -> np.ndarray:
        """Tell whether completions [B, .., A] of B problems, after so many latents [B, ..], are right.

        Of a problem's equal ones the first is asked.
        """
        # A row is a problem's index, the number of latents, and the completion's tokens.
        ones = [1] * (completions.ndim - 1)
        index_column = np.broadcast_to(
            indices.reshape(-1, *ones), (*completions.shape[:-1], 1)
        )
        facts = np.concatenate([index_column, latents[..., None], completions], axis=-1)
        rows = facts.reshape(-1, facts.shape[-1])
        distinct, places = np.unique(rows, axis=0, return_inverse=True)

        reward = self.setup.reward
        readings = [reward.read(row[2:], row[1]) for row in distinct]
        asked = [self.problems.problems[index] for index in distinct[:, 0]]
        right = np.array(reward.right(readings, asked))
        return right[places.reshape(completions.shape[:-1])]


def prepare(stage: Stage) -> Stage:
    """Return what the loop needs, which is the stage alone.

    Raises:
        UserError: a setting can't be used, or the workdir's labels are others than would be made now.
    """
    experiment = stage.experiment
    check_batch(experiment.config, stage.section, experiment.mesh.size)
    policy, _ = labelling(experiment)
    if policy.config.dropout_rate == 0.0 and policy.latent_policy.log_prob is None:
        raise UserError(
            "config.latent_rm.dropout: without noise all thoughts of a problem are the same; set it, or "
            "config.dropout.rate, above 0"
        )
    experiment.optimizer_config(stage.section, stage.settings.steps)
    start = stage.start
    start_is_there = not start.name or start.folder.is_finished
    if start_is_there and not stage.folder.is_finished:
        check_labels(stage, lambda: read_stage_params(start))
    return stage


def _accuracy(setup: Setup, thoughts: Labels) -> Callable[[Params], float]:
    """Return reward model -> the share of validation problems that the thought with the largest score is right on."""
    count, thoughts_a_problem = thoughts.lengths.shape
    size = _problems_a_batch(setup, thoughts_a_problem)
    policy, _ = labelling(setup)

    def score(params, batch: LabelledBatch):
        latents_NTD = batch.latents.reshape(-1, *batch.latents.shape[2:])
        lengths_N = batch.lengths.reshape(-1)
        scores_NT = latent_scores(policy, params, batch.prompts, latents_NTD, lengths_N)
        return scores_NT.reshape(batch.shares.shape).sum(axis=2)

    scores_of = over_rows(score, setup.mesh, (EVERYWHERE, ROWS))

    def accuracy(params: Params) -> float:
        right = []
        for rows, real in padded_chunks(count, size):
            batch = _batch(setup, setup.valid, thoughts, rows)
            best_B = hosts.gather_to_host(scores_of(params, batch)).argmax(axis=1)
            right.append(thoughts.shares[rows, best_B, -1][real])
        return float(np.concatenate(right).mean())

    return accuracy


def _problems_a_batch(setup: Setup, rollouts: int) -> int:
    """Return how many problems of so many rollouts each are one batch of evaluation, a multiple of the devices."""
    problems = max(1, setup.config.evaluate.batch_size // rollouts)
    devices = setup.mesh.size
    return -(-problems // devices) * devices


def _batch(
    setup: Setup, problems: EncodedProblems, labels: Labels, rows: np.ndarray
) -> LabelledBatch:
    """Make a batch of rows of labels, with the prompts of the problems that they are of."""
    prompts = Prompts(*problems.prompt_batch(labels.problems[rows], setup.prompt_slots))
    batch = LabelledBatch(
        prompts,
        np.asarray(labels.latents[rows]),
        np.asarray(labels.lengths[rows]),
        np.asarray(labels.shares[rows]),
    )
    return shard_rows(batch, setup.mesh)


def train(stage: Stage) -> None:
    """Make the labels, train backbone and classifier on them, and keep the model that is best on validation."""
    experiment = stage.experiment
    config = stage.settings
    policy, _ = labelling(experiment)

    # Labels are made by the checkpoint that the stage starts from, as are the thoughts that it is validated on.
    start = read_stage_params(stage.start)
    labels = labels_of(stage, start)
    accuracy = None
    if stage.validated_every:
        accuracy = _accuracy(experiment, judged_thoughts(experiment, start))
    elif config.evaluate_every:
        logging.warning(
            "%s: config.data.valid is not set, so the last step's model is kept, not the best",
            stage.name,
        )

    # The whole model is trained: a backbone that begins as the reasoner's, and a classifier.
    params = init_reward_model(start, experiment.reasoner.width)
    state, step_fn = state_and_step(stage, params, tuple(params), make_loss(policy))
    del start, params  # the state has its own

    def batch_at(step: int) -> LabelledBatch | None:
        if step >= config.steps:
            return None
        rows = batch_indices(
            experiment.config.seed, step, len(labels.problems), config.batch_size
        )
        return _batch(experiment, experiment.train, labels, rows)

    # The same command goes on from the newest checkpoint, and computes the same to the bit.
    loop, state, saved = open_stage(stage, state, config.steps)
    with loop:
        validation = Validation(stage, loop, saved, accuracy)
        step = int(state.step)
        batch = batch_at(step)
        while True:
            if validation.is_due(step):
                validation.run(state)
            if step >= config.steps:
                break

            # Everything that a step reads is on the devices already.
            with jax.transfer_guard("disallow"):
                state, metrics = step_fn(state, batch)
            step += 1

            # While the devices compute, the host makes the next batch and logs the step before.
            last_batch = batch
            batch = batch_at(step)
            loop.log(step, metrics, last_batch)
            if loop.should_save(step):
                loop.save(state, validation.facts)
        state = validation.choose_best(state)
        close_stage(stage, loop, state, validation.facts)
