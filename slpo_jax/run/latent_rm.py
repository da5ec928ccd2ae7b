"""The stage latent_rm: a reward model of latents, trained on labels that are made first."""

import numpy as np

from slpo_jax.io.mesh import shard_rows
from slpo_jax.policy.prompted import Prompts
from slpo_jax.policy.scorers.latent_rm import begun
from slpo_jax.run.experiment import Experiment
from slpo_jax.run.labels import check_labels, labelling, labels_of
from slpo_jax.run.provenance import starting_stage
from slpo_jax.run.stage import close_stage, open_stage, starting_params
from slpo_jax.text.batches import batch_indices
from slpo_jax.training.latent_rm import LabelledBatch, make_loss
from slpo_jax.training.optimizer import make_optimizer, make_schedule
from slpo_jax.training.state import init_state, make_train_step


def check(experiment: Experiment, stage: str) -> None:
    """Fail before the first stage on what it could not use."""
    experiment.optimizer_config(stage, experiment.config.latent_rm.steps)
    before, folder = starting_stage(experiment, stage), experiment.workdir.stage(stage)
    if not folder.is_finished and (not before or experiment.workdir.stage(before).is_finished):
        check_labels(experiment, before)


def train(experiment: Experiment, stage: str) -> None:
    """Make the labels, and train backbone and classifier on them."""
    config, start = experiment.config.latent_rm, starting_params(experiment, stage)
    labels = labels_of(experiment, start, starting_stage(experiment, stage))
    policy, _ = labelling(experiment)
    optimizer_config = experiment.optimizer_config(stage, config.steps)
    optimizer, params = make_optimizer(optimizer_config), begun(start, experiment.reasoner.width)
    state = init_state(params, tuple(params), optimizer, experiment.key, experiment.layout)
    how = (optimizer, tuple(params), experiment.layout, stage, config.micro_batches)
    del start, params  # the state has its own
    step_fn = make_train_step(make_loss(policy, config.loss), *how, schedule=make_schedule(optimizer_config))

    def batch(step: int):
        rows = batch_indices(experiment.config.seed, step, len(labels.problems), config.batch_size)
        prompts = Prompts(*experiment.train.prompt_batch(labels.problems[rows], experiment.prompt_slots))
        made = LabelledBatch(prompts, *(np.asarray(x[rows]) for x in (labels.latents, labels.lengths, labels.shares)))
        return shard_rows(made, experiment.mesh)

    run, state, _ = open_stage(experiment, stage, state, config.steps)
    state = run.advance(state, step_fn, batch, config.steps)
    close_stage(experiment, stage, run, state)
