"""The stage latent_rm: a reward model of latents, trained on labels that are made first."""

from collections.abc import Callable

import numpy as np
from absl import logging

from slpo_jax.data.batches import EncodedProblems, batch_indices, padded_chunks
from slpo_jax.errors import UserError
from slpo_jax.io import hosts
from slpo_jax.io.mesh import EVERYWHERE, ROWS, over_rows, shard_rows
from slpo_jax.models.parts import Params
from slpo_jax.policy.prompted import Prompts
from slpo_jax.policy.scorers.latent_rm import begun, latent_scores
from slpo_jax.run.experiment import Setup
from slpo_jax.run.labels import Labels, check_labels, judged_thoughts, labelling, labels_of
from slpo_jax.run.stage import Stage, stage_params, state_and_step, train_stage
from slpo_jax.training.latent_rm import LabelledBatch, make_loss


def check(stage: Stage) -> None:
    """Fail before the first stage on what it could not use."""
    most, (policy, _) = stage.run.config.max_latents, labelling(stage.run)
    if policy.config.max_latents > most:
        raise UserError(
            f"config.latent_rm.latents: {stage.settings.latents} are more than config.max_latents ({most}); lower it "
            "or raise that"
        )
    if policy.config.dropout_rate == 0.0 and policy.latent_policy.log_prob is None:
        raise UserError(
            "config.latent_rm.dropout: without noise all thoughts of a problem are the same; set it, or "
            "config.dropout.rate, above 0"
        )
    stage.run.optimizer_config(stage.section, stage.steps)
    start = stage.start
    if not stage.folder.is_finished and (not start.name or start.folder.is_finished):
        check_labels(stage, lambda: stage_params(start))


def _accuracy(setup: Setup, thoughts: Labels) -> Callable[[Params], float]:
    """Reward model -> the share of validation problems that the thought with the largest score is right on."""
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
    """Rows of labels, with the prompts of the problems that they are of."""
    prompts = Prompts(*problems.prompt_batch(labels.problems[rows], setup.prompt_slots))
    made = LabelledBatch(prompts, *(np.asarray(x[rows]) for x in (labels.latents, labels.lengths, labels.shares)))
    return shard_rows(made, setup.mesh)


def train(stage: Stage) -> None:
    """Make the labels, train backbone and classifier on them, and keep the model that is best on validation."""
    run, config, start = stage.run, stage.settings, stage_params(stage.start)
    labels, (policy, _) = labels_of(stage, start), labelling(run)
    accuracy = _accuracy(run, judged_thoughts(run, start)) if stage.validated_every else None
    params = begun(start, run.reasoner.width)
    state, step_fn = state_and_step(stage, params, tuple(params), make_loss(policy, config.loss))
    del start, params  # the state has its own

    def batch(step: int):
        rows = batch_indices(run.config.seed, step, len(labels.problems), config.batch_size)
        return _batch(run, run.train, labels, rows)

    if config.evaluate_every and not stage.validated_every:
        logging.warning("%s: config.data.valid is not set, so the last step's model is kept, not the best", stage.name)
    train_stage(stage, state, step_fn, batch, accuracy)
