"""Parameters that scorers have beside the policy's."""

import functools
from pathlib import Path
from typing import Any

import jax
from absl import logging
from jax.sharding import NamedSharding

from slpo_jax.checkpoints.reward_model import read_reward_model
from slpo_jax.errors import UserError
from slpo_jax.evaluation.settings import EvaluateConfig
from slpo_jax.io import artifact
from slpo_jax.io.mesh import EVERYWHERE, replicate
from slpo_jax.io.orbax import params_digest
from slpo_jax.io.workdir import Workdir
from slpo_jax.policy.scorers import SCORERS
from slpo_jax.policy.scorers.latent_rm import PART, begun
from slpo_jax.run.experiment import Experiment
from slpo_jax.run.labels import manifest_of
from slpo_jax.run.provenance import checkpoint_digest
from slpo_jax.run.stage import Params, stage_params
from slpo_jax.stages import stage_of


def _asking(experiment: Experiment) -> dict[str, str]:
    """Part -> the key and the scorer that ask for it."""
    config = experiment.config.evaluate
    search = {PART: f"config.evaluate.beams: {config.beams}, and {PART}"} if config.beams else {}
    names = [name for name in config.scorers if SCORERS[name].part]
    return search | {SCORERS[name].part: f"config.evaluate.scorers: {name}" for name in names}


def check_scorers(experiment: Experiment) -> None:
    """Fail before the first stage on a scorer whose parameters will not be there, or are of another reasoner.

    Raises:
        UserError: one line with the key and the remedy.
    """
    for part, asking in _asking(experiment).items():
        if experiment.config.evaluate.reward_model:
            scorers_params(experiment)
            _say_of_others(experiment)
        elif not (experiment.workdir.stage(part).is_finished or stage_of(experiment.config, part).wanted):
            raise UserError(
                f"{asking} has parameters of its own, and {experiment.workdir} has none; put "
                f"{part} into config.stages, or give config.evaluate.reward_model"
            )


def _say_of_others(experiment: Experiment) -> None:
    """Say that a reward model of another run judged none of the checkpoints that are here.

    It may all the same be of use, to what was trained further from what it judged.
    """
    source = experiment.config.evaluate.reward_model
    labels = artifact.read(manifest_of(Workdir(Path(source).parent.parent).labels))
    judged = labels and labels.facts["checkpoint"]
    stages = [stage for stage in experiment.workdir.finished_stages() if stage != PART]
    loads: dict[str, Any] = {stage: functools.partial(stage_params, experiment, stage) for stage in stages}
    if experiment.config.init:
        loads[""] = experiment.initial_params
    if judged and loads and judged not in [checkpoint_digest(experiment, *each) for each in loads.items()]:
        logging.warning(
            "config.evaluate.reward_model: %s judged thoughts of another checkpoint than this run's; what it says of "
            "these may mean nothing", source,
        )  # fmt: skip


def scorers_params(experiment: Experiment) -> Params:
    """The parts that the scorers ask for.

    Raises:
        UserError: one is not there, or of another reasoner.
    """
    found, everywhere = {}, NamedSharding(experiment.mesh, EVERYWHERE)
    for part in _asking(experiment):
        source = experiment.config.evaluate.reward_model or str(experiment.workdir.stage(part).path)
        shapes = jax.eval_shape(lambda params: begun(params, experiment.reasoner.width), experiment.abstract_params())
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), shapes)
        model = read_reward_model(source, experiment.checkpoint.description, like)
        found[part] = replicate(model, experiment.mesh)
    return found


def scorers_digests(config: EvaluateConfig, scoring: Params) -> list[str]:
    """What stands for scorers and search where an evaluation says what it depends on: with digests of parameters."""
    search = [f"{config.beams} x {config.candidates}"] if config.beams else []
    return [*config.scorers, *search, *(f"{part} {params_digest(params)}" for part, params in scoring.items())]
