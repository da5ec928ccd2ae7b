"""The reward model of an evaluation: which settings ask for its parameters, and where they are read."""

import functools
from pathlib import Path

import jax
from absl import logging
from jax.sharding import NamedSharding

from slpo_jax.checkpoints.identity import read_reward_model
from slpo_jax.errors import UserError
from slpo_jax.evaluation.evaluator import EvaluateConfig
from slpo_jax.io import artifact
from slpo_jax.io.workdir import Workdir
from slpo_jax.models.parts import Params
from slpo_jax.policy.scorers import PART, SCORERS, init_reward_model
from slpo_jax.run.experiment import Experiment
from slpo_jax.run.latent_rm import manifest_of
from slpo_jax.run.provenance import checkpoint_digest
from slpo_jax.run.setup import Setup
from slpo_jax.run.train_stage import read_stage_params
from slpo_jax.runtime.mesh import EVERYWHERE, replicate


def check_judge(experiment: Experiment) -> None:
    """Refuse scorers and beams whose reward model is not there, and warn of one that knows other checkpoints.

    Raises:
        UserError: the reward model will not be there, or is of another reasoner.
    """
    config = experiment.config.evaluate
    asking = name_what_judges(config)
    if not asking:
        return

    # It is this run's, or that of another workdir.
    own = experiment.stage(PART)
    if not config.reward_model:
        if not (own.folder.is_finished or own.is_wanted):
            raise UserError(
                f"{asking} has parameters of its own, and {experiment.workdir} has none; put {PART} into "
                "config.stages, or give config.evaluate.reward_model"
            )
        return
    read_judge(experiment, config.reward_model)

    # Another workdir's was trained on thoughts of a checkpoint; what it says of others' may be of use all the same.
    folder = Workdir(Path(config.reward_model).parent.parent)
    labels = artifact.read(manifest_of(folder.labels))
    if not labels:
        return
    judged = [stage for stage in experiment.finished if stage is not own]
    if experiment.config.init:
        judged.append(experiment.stage(""))
    digests = []
    for stage in judged:
        digests.append(
            checkpoint_digest(stage, functools.partial(read_stage_params, stage))
        )
    if digests and labels.facts["checkpoint"] not in digests:
        logging.warning(
            "config.evaluate.reward_model: %s judged thoughts of another checkpoint than this run's; what it says of "
            "these may mean nothing",
            config.reward_model,
        )


def name_what_judges(config: EvaluateConfig) -> str:
    """Return the key and the name that ask for a reward model's parameters; "" where none does."""
    for name in config.scorers:
        if SCORERS[name].part:
            return f"config.evaluate.scorers: {name}"
    if config.beams:
        return f"config.evaluate.beams: {config.beams}, and {PART}"
    return ""


def read_judge(setup: Setup, source: str) -> Params:
    """Read the parameters of the reward model that judges this reasoner.

    Raises:
        UserError: there are none, or they are of another reasoner.
    """
    everywhere = NamedSharding(setup.mesh, EVERYWHERE)
    shapes = jax.eval_shape(
        lambda params: init_reward_model(params, setup.reasoner.width),
        setup.abstract_params(),
    )
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), shapes
    )
    params = read_reward_model(source, setup.checkpoint.description, like)
    return replicate(params, setup.mesh)


def load_judge(experiment: Experiment) -> Params:
    """Return the reward model that an evaluation asks for, as the part `PART` of all parameters; {} for none.

    Raises:
        UserError: as `read_judge`.
    """
    config = experiment.config.evaluate
    if not name_what_judges(config):
        return {}
    own = str(experiment.stage(PART).folder.path)
    return {PART: read_judge(experiment, config.reward_model or own)}
