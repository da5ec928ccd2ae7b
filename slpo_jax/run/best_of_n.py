"""The stage best_of_n: imitation of the best right one among N samples of the checkpoint that it starts from."""

from slpo_jax.errors import UserError
from slpo_jax.models.parts import REASONER
from slpo_jax.policy import noise
from slpo_jax.policy.scorers import SCORERS
from slpo_jax.run.experiment import Stage
from slpo_jax.run.train_stage import host_rightness, prompted_batches, stage_params, state_and_step, train_stage
from slpo_jax.runtime.mesh import replicate
from slpo_jax.stages import IMITATE
from slpo_jax.training.host_rewards import HostVerdicts
from slpo_jax.training.rejection_sampling import make_choice, make_loss


def check(stage: Stage) -> None:
    """Fail before the first stage on what it could not use."""
    experiment, scorer, start = stage.experiment, stage.settings.scorer, stage.start.name
    config = experiment.config
    experiment.optimizer_config(stage.section, stage.settings.steps)
    if config.max_latents and experiment.policy.latent_policy.says is not None:
        raise UserError(
            f"config.stages: {stage.name} is for thoughts in vectors, and those of config.latent_policy.name are "
            "sampled tokens; take it out, or use another latent policy"
        )
    if SCORERS[scorer].needs_gate and not config.gate.enabled:
        raise UserError(
            f"config.best_of_n.scorer: {scorer} asks the gate, and config.gate.enabled is False; use another scorer"
        )
    if config.gate.enabled and (start == IMITATE or (not start and not experiment.checkpoint.description.gate_trained)):
        raise UserError(
            f"config.stages: {stage.name} stops by the gate, which is not trained where it starts; put cold_start "
            "before it, or set config.gate.enabled to False"
        )


def train(stage: Stage) -> None:
    """Train the reasoner on what its start's samples chose, which are drawn in the step before each update."""
    experiment, config = stage.experiment, stage.settings
    stopping = "threshold" if experiment.config.gate.enabled else "length"
    policy = experiment.policy.having(stopping=stopping, temperature=config.temperature)
    start = stage_params(stage.start)
    state, improve = state_and_step(stage, start, (REASONER,), make_loss(policy))
    on_device, mesh = experiment.reward.on_device, experiment.mesh
    host_verdicts = None if on_device else HostVerdicts(host_rightness(experiment), mesh)
    choose = make_choice(policy, on_device, config, mesh, host_verdicts)
    key = replicate(noise.stream_key(experiment.key, stage.name, 0), experiment.mesh)

    def step_fn(state, batch):
        return improve(state, choose(start, batch, key))

    step_fn = host_verdicts.with_metrics(step_fn) if host_verdicts else step_fn
    train_stage(stage, state, step_fn, prompted_batches(stage))
