"""The stage latent_rm: a reward model of latents, trained on labels that are made first."""

from collections.abc import Callable

import numpy as np
from absl import logging

from slpo_jax.config.config import Config
from slpo_jax.data.batches import EncodedProblems, batch_indices, padded_chunks
from slpo_jax.errors import UserError
from slpo_jax.io import hosts
from slpo_jax.io.mesh import EVERYWHERE, ROWS, over_rows, shard_rows
from slpo_jax.policy.policy import Policy
from slpo_jax.policy.prompted import Prompts
from slpo_jax.policy.scorers.latent_rm import begun, latent_scores
from slpo_jax.run.experiment import Experiment
from slpo_jax.run.labels import Labels, check_labels, judged_thoughts, labelling, labels_of
from slpo_jax.run.provenance import starting_stage
from slpo_jax.run.stage import Params, starting_params, state_and_step
from slpo_jax.run.validation import Validation, train_stage
from slpo_jax.training.latent_rm import LabelledBatch, make_loss


def validates(config: Config) -> bool:
    """Whether validation problems are asked for."""
    return bool(config.latent_rm.evaluate_every and config.data.valid)


def check(experiment: Experiment, stage: str) -> None:
    """Fail before the first stage on what it could not use."""
    config, (policy, _) = experiment.config, labelling(experiment)
    if policy.config.max_latents > config.max_latents:
        raise UserError(
            f"config.latent_rm.latents: {config.latent_rm.latents} are more than config.max_latents "
            f"({config.max_latents}); lower it or raise that"
        )
    if policy.config.dropout_rate == 0.0 and policy.latent_policy.log_prob is None:
        raise UserError(
            "config.latent_rm.dropout: without noise all thoughts of a problem are the same; set it, or "
            "config.dropout.rate, above 0"
        )
    experiment.optimizer_config(stage, config.latent_rm.steps)
    before, folder = starting_stage(experiment, stage), experiment.workdir.stage(stage)
    known = not folder.is_finished and (not before or experiment.workdir.stage(before).is_finished)
    if known:
        check_labels(experiment, before)


def _accuracy(experiment: Experiment, policy: Policy, thoughts: Labels) -> Callable[[Params], float]:
    """Reward model -> the share of validation problems that the thought with the largest score is right on."""
    count, devices = len(thoughts.problems), experiment.mesh.size
    size = -(-max(1, experiment.config.evaluate.batch_size // thoughts.lengths.shape[1]) // devices) * devices

    def score(params, batch: LabelledBatch):
        latents_NTD, lengths_N = (x.reshape(-1, *x.shape[2:]) for x in (batch.latents, batch.lengths))
        scores_NT = latent_scores(policy, params, batch.prompts, latents_NTD, lengths_N)
        return scores_NT.reshape(batch.shares.shape).sum(axis=2)

    scores_of = over_rows(score, experiment.mesh, (EVERYWHERE, ROWS))

    def accuracy(params: Params) -> float:
        right = []
        for rows, real in padded_chunks(count, size):
            batch = _batch(experiment, experiment.valid, thoughts, rows)
            best_B = hosts.whole(scores_of(params, batch)).argmax(axis=1)
            right.append(thoughts.shares[rows, best_B, -1][real])
        return float(np.concatenate(right).mean())

    return accuracy


def _batch(experiment: Experiment, problems: EncodedProblems, labels: Labels, rows: np.ndarray) -> LabelledBatch:
    """Rows of labels, with the prompts of the problems that they are of."""
    prompts = Prompts(*problems.prompt_batch(labels.problems[rows], experiment.prompt_slots))
    made = LabelledBatch(prompts, *(np.asarray(x[rows]) for x in (labels.latents, labels.lengths, labels.shares)))
    return shard_rows(made, experiment.mesh)


def train(experiment: Experiment, stage: str) -> None:
    """Make the labels, train backbone and classifier on them, and keep the model that is best on validation."""
    config, start = experiment.config.latent_rm, starting_params(experiment, stage)
    labels = labels_of(experiment, start, starting_stage(experiment, stage))
    policy, _ = labelling(experiment)
    every = config.evaluate_every if experiment.config.data.valid else 0
    accuracy = _accuracy(experiment, policy, judged_thoughts(experiment, start)) if every else None
    params = begun(start, experiment.reasoner.width)
    state, step_fn = state_and_step(experiment, stage, params, tuple(params), make_loss(policy))
    del start, params  # the state has its own

    def batch(step: int):
        rows = batch_indices(experiment.config.seed, step, len(labels.problems), config.batch_size)
        return _batch(experiment, experiment.train, labels, rows)

    if config.evaluate_every and not every:
        logging.warning("%s: config.data.valid is not set, so the last step's model is kept, not the best", stage)
    train_stage(experiment, stage, state, step_fn, batch, Validation(config.steps, every, accuracy=accuracy))
