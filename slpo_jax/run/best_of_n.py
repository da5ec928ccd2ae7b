"""The stage best_of_n: imitation of the best right one among N samples of the checkpoint that it starts from."""

from slpo_jax.errors import UserError
from slpo_jax.models.parts import REASONER
from slpo_jax.policy import noise
from slpo_jax.policy.scorers import SCORERS
from slpo_jax.run.experiment import Stage
from slpo_jax.run.run_checks import check_batch
from slpo_jax.run.train_stage import (
    check_gate_is_trained,
    close_stage,
    make_batch_reader,
    make_host_rightness,
    open_stage,
    read_stage_params,
    state_and_step,
)
from slpo_jax.runtime.mesh import replicate
from slpo_jax.training.host_rewards import HostVerdicts
from slpo_jax.training.rejection_sampling import make_choice, make_loss


def prepare(stage: Stage) -> Stage:
    """Return what the loop needs, which is the stage alone.

    Raises:
        UserError: a setting can't be used, or where the stage starts.
    """
    experiment = stage.experiment
    config = experiment.config
    scorer = stage.settings.scorer
    writes_thoughts = experiment.policy.latent_policy.says is not None
    check_batch(config, stage.section, experiment.mesh.size)
    experiment.optimizer_config(stage.section, stage.settings.steps)
    if config.max_latents and writes_thoughts:
        raise UserError(
            f"config.stages: {stage.name} is for thoughts in vectors, and those of config.latent_policy.name are "
            "sampled tokens; take it out, or use another latent policy"
        )
    if SCORERS[scorer].needs_gate and not config.gate.enabled:
        raise UserError(
            f"config.best_of_n.scorer: {scorer} asks the gate, and config.gate.enabled is False; use another scorer"
        )
    check_gate_is_trained(stage)
    return stage


def train(stage: Stage) -> None:
    """Train the reasoner on what its start's samples chose, which are drawn in the step before each update."""
    experiment = stage.experiment
    settings = stage.settings
    mesh = experiment.mesh
    # A gate stops at the middle, 0.5, since its threshold is chosen by the evaluation, which comes later.
    stopping = "threshold" if experiment.config.gate.enabled else "length"
    policy = experiment.policy.with_config(
        stopping=stopping, temperature=settings.temperature
    )

    # The start draws and chooses, with the same noise whenever a problem comes; the state learns what was chosen.
    start = read_stage_params(stage.start)
    state, improve = state_and_step(stage, start, (REASONER,), make_loss(policy))
    # Right answers are told on the device where that is possible, and else on the host.
    device_reward = experiment.reward.on_device
    host_verdicts = None
    if device_reward is None:
        host_verdicts = HostVerdicts(make_host_rightness(experiment), mesh)
    choose = make_choice(policy, device_reward, settings, mesh, host_verdicts)
    fixed_key = noise.stream_key(experiment.key, stage.name, 0)
    key = replicate(fixed_key, mesh)

    def step_fn(state, batch):
        return improve(state, choose(start, batch, key))

    if host_verdicts:
        step_fn = host_verdicts.with_metrics(step_fn)

    # It has no validations: the last step's parameters are what it leaves.
    loop, state, _ = open_stage(stage, state, settings.steps)
    with loop:
        state = loop.advance(state, step_fn, make_batch_reader(stage), settings.steps)
        close_stage(stage, loop, state)
