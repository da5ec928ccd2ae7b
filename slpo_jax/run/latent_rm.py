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
from slpo_jax.policy.scorers import begun, latent_scores
from slpo_jax.run.experiment import Stage
from slpo_jax.run.provenance import checkpoint_digest, first_difference, problems_facts
from slpo_jax.run.setup import Setup
from slpo_jax.run.train_stage import stage_params, state_and_step, train_stage
from slpo_jax.runtime import hosts
from slpo_jax.runtime.mesh import EVERYWHERE, ROWS, over_rows, shard_rows
from slpo_jax.runtime.progress import Progress, begin
from slpo_jax.training.latent_rm_loss import LabelledBatch, complete, draw_thoughts, make_loss

_SETTINGS = ("problems", "thoughts", "completions", "dropout", "threshold")  # of config.latent_rm


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
    config, settings = setup.config, setup.config.latent_rm
    policy = setup.policy if settings.dropout is None else setup.policy.having(dropout_rate=settings.dropout)
    if config.gate.enabled:
        return policy.having(stopping="threshold"), settings.threshold
    return policy.having(stopping="length"), config.max_latents


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
    experiment, config, folder = stage.experiment, stage.experiment.config, stage.experiment.workdir.labels
    facts = {f"latent_rm.{name}": getattr(stage.settings, name) for name in _SETTINGS}
    facts |= model_settings(config) | rollout_settings(config)
    facts |= {"seed": config.seed, "gate.enabled": config.gate.enabled} | config.reward_facts
    facts["checkpoint"] = checkpoint_digest(stage.start, load)
    facts["problems"] = list(problems_facts(experiment.train, stage.settings.problems).values())
    anew = f"delete {folder} to make them anew"
    then = artifact.read(manifest_of(folder), anew)
    if then and (differs := first_difference(facts, then.facts)):
        key, now, was = differs
        name = key if key in ("checkpoint", "problems") else f"config.{key}"
        raise UserError(f"{name}: is {now}, and the labels in {folder} were made with {was}; set it back, or {anew}")
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
    experiment, folder, settings = stage.experiment, stage.experiment.workdir.labels, stage.settings
    facts = check_labels(stage, lambda: params)
    artifact.write(manifest_of(folder), facts)
    begin("latent_rm: labels")
    hosts.barrier("labels")  # nobody still looks for the manifest
    problems = experiment.train
    count, make = min(settings.problems or len(problems), len(problems)), _Maker(experiment, params, problems, 0)

    def labels_for(number: int, indices: np.ndarray, real: np.ndarray) -> dict[str, np.ndarray]:
        path = folder / f"{number}.npz"
        arrays = artifact.read_arrays(path, facts)
        if path.exists() and arrays is None:
            logging.warning("%s: is damaged; its labels are made again", path)
        if not hosts.agreed(arrays is not None, path):
            arrays = make(indices, real)
            artifact.write_arrays(path, facts, arrays)
        return arrays or {}

    labels = _concatenated("labels", count, make.size, labels_for)
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
    valid, make = setup.valid, _Maker(setup, params, setup.valid, 1)

    def judged(_: int, indices: np.ndarray, real: np.ndarray) -> dict[str, np.ndarray]:
        thoughts, right_BN = make.judged(indices)
        shares = np.broadcast_to(right_BN[..., None], thoughts["latents"].shape[:3]).astype(np.float32)
        arrays = {name: thoughts[name] for name in ("latents", "lengths")} | {"problems": indices, "shares": shares}
        return {name: array[real] for name, array in arrays.items()}

    return _concatenated("validation", min(setup.config.evaluate.limit or len(valid), len(valid)), make.size, judged)


def _concatenated(what: str, count: int, size: int, labels_for: Callable[..., dict[str, np.ndarray]]) -> Labels:
    """Join the labels of so many problems, made `size` at a time: (number, indices, which are real) -> arrays."""
    progress, parts = Progress(f"latent_rm: {what}", count, unit="problem", keep=False), []
    with contextlib.closing(progress):
        for number, (indices, real) in enumerate(padded_chunks(count, size)):
            parts.append(labels_for(number, indices, real))
            progress.update(int(indices[-1]) + 1)
    return Labels(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


class _Maker:
    """A maker of some problems' labels: their thoughts, and where these are right and wrong, completions.

    Args:
        stream: of noise, a number for each set of problems.
    """

    def __init__(self, setup: Setup, params: Params, problems: EncodedProblems, stream: int):
        self.setup, self.params, self.problems = setup, params, problems
        policy, rule = labelling(setup)
        settings, key = setup.config.latent_rm, noise.stream_key(setup.key, "latent_rm", stream)
        most, devices = setup.config.evaluate.batch_size, setup.mesh.size
        rollouts = (settings.thoughts, settings.thoughts * settings.completions)
        self.size, self.group = (-(-max(1, most // rows) // devices) * devices for rows in rollouts)
        everywhere = policy.having(dropout_where="all")  # as published: completions' answers have noise too

        def think(params, batch):
            drawn = draw_thoughts(policy, params, batch, rule, key, settings.thoughts)
            latents = policy.latent_policy.feed(params, drawn.actions).astype(jnp.float32)
            return {"actions": drawn.actions, "lengths": drawn.lengths, "said": drawn.completions, "latents": latents}

        def go_on(params, inputs):
            batch, actions, lengths = inputs
            return complete(everywhere, params, batch, actions, lengths, rule, key, settings.completions)

        self.think, self.complete = self._sharded(think), self._sharded(go_on)

    def _sharded(self, function):
        mesh = self.setup.mesh
        program = over_rows(function, mesh, (EVERYWHERE, ROWS))
        return lambda inputs: jax.tree.map(hosts.whole, program(self.params, shard_rows(inputs, mesh)))

    def judged(self, indices: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
        """Return what was thought of each problem, arrays [B, n, ..], and whether its answers are right, [B, n]."""
        thoughts = self.think(self._batch(indices))
        by_problem = {name: jax.tree.map(lambda x: x.reshape(len(indices), -1, *x.shape[1:]), x)
                      for name, x in thoughts.items()}  # fmt: skip
        return by_problem, self._right(indices, by_problem["said"], by_problem["lengths"])

    def __call__(self, indices: np.ndarray, real: np.ndarray) -> dict[str, np.ndarray]:
        by_problem, right_BN = self.judged(indices)
        mixed = np.flatnonzero(real & right_BN.any(axis=1) & ~right_BN.all(axis=1))
        shares = [np.zeros((0, *by_problem["latents"].shape[1:3]), np.float32)]
        for places, is_real in padded_chunks(len(mixed), self.group):
            rows = mixed[places]
            actions, lengths = jax.tree.map(
                lambda x, rows=rows: x[rows].reshape(-1, *x.shape[2:]), (by_problem["actions"], by_problem["lengths"])
            )
            completed = self.complete((self._batch(indices[rows]), actions, lengths))
            completions, latents = (x.reshape(len(rows), right_BN.shape[1], *x.shape[1:]) for x in completed)
            shares.append(self._right(indices[rows], completions, latents).mean(axis=-1).astype(np.float32)[is_real])
        labels = {"problems": indices[mixed], "shares": np.concatenate(shares)}
        return labels | {name: by_problem[name][mixed] for name in ("latents", "lengths")}

    def _batch(self, indices: np.ndarray) -> PromptedBatch:
        prompts = Prompts(*self.problems.prompt_batch(indices, self.setup.prompt_slots))
        return PromptedBatch(prompts, np.zeros((len(indices), 0), np.uint8), indices.astype(np.int32))

    def _right(self, indices: np.ndarray, completions: np.ndarray, latents: np.ndarray) -> np.ndarray:
        """Tell whether completions [B, .., A] of B problems, after so many latents [B, ..], are right.

        Of a problem's equal ones the first is asked.
        """
        indices_of = np.broadcast_to(indices.reshape(-1, *[1] * (completions.ndim - 1)), (*completions.shape[:-1], 1))
        facts = np.concatenate([indices_of, latents[..., None], completions], axis=-1)
        rows = facts.reshape(-1, facts.shape[-1])
        distinct, places = np.unique(rows, axis=0, return_inverse=True)
        readings = [self.setup.reward.read(row[2:], row[1]) for row in distinct]
        right = np.array(self.setup.reward.right(readings, [self.problems.problems[i] for i in distinct[:, 0]]))
        return right[places.reshape(completions.shape[:-1])]


def check(stage: Stage) -> None:
    """Fail before the first stage on what it could not use."""
    policy, _ = labelling(stage.experiment)
    if policy.config.dropout_rate == 0.0 and policy.latent_policy.log_prob is None:
        raise UserError(
            "config.latent_rm.dropout: without noise all thoughts of a problem are the same; set it, or "
            "config.dropout.rate, above 0"
        )
    stage.experiment.optimizer_config(stage.section, stage.settings.steps)
    start = stage.start
    if not stage.folder.is_finished and (not start.name or start.folder.is_finished):
        check_labels(stage, lambda: stage_params(start))


def _accuracy(setup: Setup, thoughts: Labels) -> Callable[[Params], float]:
    """Return reward model -> the share of validation problems that the thought with the largest score is right on."""
    count, devices, (policy, _) = len(thoughts.problems), setup.mesh.size, labelling(setup)
    size = -(-max(1, setup.config.evaluate.batch_size // thoughts.lengths.shape[1]) // devices) * devices

    def score(params, batch: LabelledBatch):
        latents_NTD, lengths_N = (x.reshape(-1, *x.shape[2:]) for x in (batch.latents, batch.lengths))
        scores_NT = latent_scores(policy, params, batch.prompts, latents_NTD, lengths_N)
        return scores_NT.reshape(batch.shares.shape).sum(axis=2)

    scores_of = over_rows(score, setup.mesh, (EVERYWHERE, ROWS))

    def accuracy(params: Params) -> float:
        right = []
        for rows, real in padded_chunks(count, size):
            batch = _batch(setup, setup.valid, thoughts, rows)
            best_B = hosts.whole(scores_of(params, batch)).argmax(axis=1)
            right.append(thoughts.shares[rows, best_B, -1][real])
        return float(np.concatenate(right).mean())

    return accuracy


def _batch(setup: Setup, problems: EncodedProblems, labels: Labels, rows: np.ndarray) -> LabelledBatch:
    """Make a batch of rows of labels, with the prompts of the problems that they are of."""
    prompts = Prompts(*problems.prompt_batch(labels.problems[rows], setup.prompt_slots))
    batch = LabelledBatch(prompts, *(np.asarray(x[rows]) for x in (labels.latents, labels.lengths, labels.shares)))
    return shard_rows(batch, setup.mesh)


def train(stage: Stage) -> None:
    """Make the labels, train backbone and classifier on them, and keep the model that is best on validation."""
    experiment, config, start = stage.experiment, stage.settings, stage_params(stage.start)
    labels, (policy, _) = labels_of(stage, start), labelling(experiment)
    accuracy = _accuracy(experiment, judged_thoughts(experiment, start)) if stage.validated_every else None
    params = begun(start, experiment.reasoner.width)
    state, step_fn = state_and_step(stage, params, tuple(params), make_loss(policy))
    del start, params  # the state has its own

    def batch(step: int):
        rows = batch_indices(experiment.config.seed, step, len(labels.problems), config.batch_size)
        return _batch(experiment, experiment.train, labels, rows)

    if config.evaluate_every and not stage.validated_every:
        logging.warning("%s: config.data.valid is not set, so the last step's model is kept, not the best", stage.name)
    train_stage(stage, state, step_fn, batch, accuracy)
