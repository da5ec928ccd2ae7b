"""What is checked before the first stage."""

from slpo_jax.run.claims import claim
from slpo_jax.run.evaluate import check_evaluation
from slpo_jax.run.experiment import Experiment
from slpo_jax.run.rl import make_objective, optimizer_config
from slpo_jax.run.stage import check_batch


def check_stages(experiment: Experiment) -> None:
    """Fail before the first stage, not hours later, on what a later one could not use.

    Raises:
        UserError: a setting of a stage can't be used, or the workdir holds the stage of another config.
    """
    config = experiment.config
    for stage in config.stages:
        if stage == "evaluate":
            check_evaluation(experiment)
            continue
        check_batch(experiment, stage)
        if stage != "rl":
            claim(experiment, stage, write=False)
        if stage == "imitate" and config.imitate.control:
            claim(experiment, "imitate_control", write=False)
        if stage != "imitate":  # whose schedules are its phases'
            experiment.optimizer_config(stage, config[stage].steps)
        if stage == "rl":
            for name in config.rl.objectives:
                claim(experiment, name, write=False)
                optimizer_config(experiment, make_objective(experiment, name))
