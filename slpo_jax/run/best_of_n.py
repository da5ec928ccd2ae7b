"""The stage best_of_n: imitation of the best right one among N samples of the checkpoint that it starts from."""

from slpo_jax.config.config import Config
from slpo_jax.errors import UserError
from slpo_jax.io.mesh import replicate
from slpo_jax.models.parts import REASONER
from slpo_jax.policy import noise
from slpo_jax.policy.scorers import SCORERS
from slpo_jax.run.experiment import Experiment
from slpo_jax.run.provenance import starting_stage
from slpo_jax.run.stage import prompted_batches, starting_params, state_and_step
from slpo_jax.run.validation import Validation, train_stage
from slpo_jax.stages import IMITATE
from slpo_jax.training.best_of_n import make_choice, make_loss


def validates(config: Config) -> bool:
    """Whether validation problems are asked for."""
    return False


def check(experiment: Experiment, stage: str) -> None:
    """Fail before the first stage on what it could not use."""
    config = experiment.config
    experiment.optimizer_config(stage, config.best_of_n.steps)
    if experiment.reward.on_device is None:
        raise UserError(
            f"config.stages: {stage} verifies on the device, which config.reward={config.reward} with "
            f"config.prompt.answers={config.prompt.answers} doesn't allow; take it out, or change these"
        )
    if config.max_latents and experiment.policy.latent_policy.says is not None:
        raise UserError(
            f"config.stages: {stage} is for thoughts in vectors, and those of config.latent_policy.name are sampled "
            "tokens; take it out, or use another latent policy"
        )
    if SCORERS[config.best_of_n.scorer].needs_gate and not config.gate.enabled:
        raise UserError(
            f"config.best_of_n.scorer: {config.best_of_n.scorer} asks the gate, and config.gate.enabled is False; use "
            "another scorer"
        )
    start = starting_stage(experiment, stage)
    if config.gate.enabled and (start == IMITATE or (not start and not experiment.checkpoint.description.gate_trained)):
        raise UserError(
            f"config.stages: {stage} stops by the gate, which is not trained where it starts; put cold_start before "
            "it, or set config.gate.enabled to False"
        )


def train(experiment: Experiment, stage: str) -> None:
    """Train the reasoner on what its start's samples chose, which are drawn in the step before each update."""
    config, mesh = experiment.config.best_of_n, experiment.mesh
    stopping = "threshold" if experiment.config.gate.enabled else "length"
    policy = experiment.policy.having(stopping=stopping, temperature=config.temperature)
    start = starting_params(experiment, stage)
    state, improve = state_and_step(experiment, stage, start, (REASONER,), make_loss(policy))
    assert experiment.reward.on_device is not None
    choose = make_choice(policy, experiment.reward.on_device, config, mesh)
    key = replicate(noise.stream_key(experiment.key, stage, 0), mesh)
    batch = prompted_batches(experiment, config, config.steps)

    def step_fn(state, batch):
        return improve(state, choose(start, batch, key))

    train_stage(experiment, stage, state, step_fn, batch, Validation(config.steps, 0))
