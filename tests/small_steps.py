"""Train steps of the tiny reasoner, compiled once for all tests."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tiny
from slpo_jax.data.batches import pad_suffixes
from slpo_jax.policy.policy import PromptedBatch
from slpo_jax.runtime.mesh import Layout, device_mesh, shard_rows
from slpo_jax.training import gate_training, rl_loss
from slpo_jax.training.objectives import OBJECTIVES
from slpo_jax.training.recipes import ImitateSettings, curriculum
from slpo_jax.training.state import init_state, make_train_step
from tiny import END, FAST, random_prompts

PROMPTS = (4, 7, 2, 6)  # lengths
BATCH = len(PROMPTS)
GROUP = 3
PASSES = 2
MIN_LATENTS = 2
ALWAYS = 255
NEVER = 254
SECOND = 253  # references that rig the reward
# Two layers: in one, noise on the prompt or on the last latent reaches no other position.
CONFIG = tiny.CONFIG
REASONER = tiny.REASONER
ROLLOUT = dataclasses.replace(tiny.ROLLOUT, temperature=1.0)  # so that answers differ
# Its state shows the gradient. Not Adam: a normalising optimizer makes steps of the rounding errors of zeros.
OPTIMIZER = optax.chain(
    optax.trace(0.0), optax.clip_by_global_norm(1.0), optax.sgd(0.3)
)


def small_params():
    """The tiny parameters, with a gate that thinks for some steps."""
    return jax.tree.map(
        lambda leaf: leaf, tiny.both_params(bias=-2.5)
    )  # dicts of its own, that a test may change


def rigged_reward(tokens, references):
    """Right or not by the parity of the answer, so that rewards are mixed; or as the reference says.

    SECOND is right for every second candidate length T_min + 1 of the cold start, which asks for all lengths of a
    trajectory in a row.
    """
    rule = references[:, 0]
    lengths = ROLLOUT.max_latents - MIN_LATENTS + 1
    right = (tokens.sum(axis=1) + rule) % 2 == 0
    right = jnp.where(rule == SECOND, jnp.arange(len(rule)) % lengths == 1, right)
    return (right | (rule == ALWAYS)) & (rule != NEVER)


def host_reward_of(batch):
    """`rigged_reward` of a batch's problems without SECOND, on the host."""
    rules = dict(
        zip(batch.draw_ids.tolist(), batch.references[:, 0].tolist(), strict=True)
    )

    def host_reward(tokens_NA, index_N, latents_N):
        asked = jnp.arange(3)[
            1:
        ]  # a function may compute with jax, too, though a step is not to
        rule = np.array([rules[index] for index in index_N.tolist()])
        right_N = (
            ((tokens_NA.sum(axis=1) + rule) % 2 == 0)
            & (rule != NEVER)
            & bool(asked.all())
        )
        return tiny.verdicts(right_N)

    return host_reward


# A floor of the variance that float32 has no trouble with.
OBJECTIVE = OBJECTIVES["slpo"](passes=PASSES, epsilon=1e-2)
POLICY = dataclasses.replace(
    tiny.policy_of(ROLLOUT, REASONER), capacities=((0.75, 0.5), (1.0, 1.0))
)
COLD = gate_training.ColdStartConfig(
    trajectories=2, min_latents=MIN_LATENTS, gate_dropout=0.2
)
IMITATION = POLICY.with_config(max_latents=3, dropout_rate=0.2)
# stage -> loss, what it trains
STAGES = {
    "rl": (
        lambda: rl_loss.make_rollout_and_loss(POLICY, OBJECTIVE, rigged_reward, GROUP),
        ("reasoner", "gate"),
    ),
    "cold_start": (
        lambda: gate_training.make_loss(POLICY, rigged_reward, COLD),
        ("gate",),
    ),
    "imitate": (
        lambda: curriculum.Curriculum()(ImitateSettings()).loss_of(IMITATION),
        ("reasoner",),
    ),
}


def prompted_batch(references=(0, 0, 0, 1), index=(5, 11, 2, 30)) -> PromptedBatch:
    prompts = jax.tree.map(np.asarray, random_prompts(PROMPTS, max(PROMPTS)))
    return PromptedBatch(
        prompts, np.array(references, np.uint8)[:, None], np.array(index, np.int32)
    )


def imitation_batch() -> curriculum.ImitationBatch:
    """Thoughts of 2, 0, 3 and 1 latents, and suffixes of 2 to 5 tokens."""
    rng = np.random.default_rng(3)
    suffixes = [[END, *rng.integers(0, END, size=n)] for n in (3, 5, 2, 4)]
    suffix = pad_suffixes(suffixes, 5)
    prompted = prompted_batch()
    latents = np.array([2, 1, 3, 1], np.int32)
    stops = np.ones(BATCH, np.float32)
    return curriculum.ImitationBatch(
        prompted.prompts, latents, suffix, prompted.draw_ids, stops
    )


def batch_of(stage: str):
    return imitation_batch() if stage == "imitate" else prompted_batch()


def layout_of(devices: int = 1, fsdp: int = 1) -> Layout:
    return Layout(device_mesh(jax.devices("cpu")[:devices], fsdp))


def step_of(
    loss,
    params,
    trained,
    batch,
    stream="rl",
    optimizer=OPTIMIZER,
    layout=None,
    micro_batches=1,
):
    """(the step, its arguments): a state of these parameters, and the batch by rows."""
    layout = layout or layout_of()
    step = make_train_step(loss, optimizer, trained, layout, stream, micro_batches)
    return step, (
        init_state(params, trained, optimizer, jax.random.key(0), layout),
        shard_rows(batch, layout.mesh),
    )


@functools.cache
def sharded_step(stage: str, devices: int, micro_batches: int, fsdp: int):
    """(layout, the compiled step)."""
    (loss, trained), layout = STAGES[stage], layout_of(devices, fsdp)
    step, arguments = step_of(
        loss(),
        small_params(),
        trained,
        batch_of(stage),
        stage,
        OPTIMIZER,
        layout,
        micro_batches,
    )
    return layout, step.lower(*arguments).compile(compiler_options=FAST)


@dataclasses.dataclass
class Taken:
    """The last parameters, the last step's gradient and the metrics of each step."""

    params: Any
    gradient: Any
    metrics: list[dict[str, float]]


def take_steps(
    stage: str, batches, devices: int = 1, micro_batches: int = 1, fsdp: int = 1
) -> Taken:
    """Steps from the small parameters."""
    layout, step = sharded_step(stage, devices, micro_batches, fsdp)
    state = init_state(
        small_params(), STAGES[stage][1], OPTIMIZER, jax.random.key(0), layout
    )
    metrics = []
    for batch in batches:
        state, row = step(state, shard_rows(batch, layout.mesh))
        assert not row.pop("skipped_steps") + row.pop("skipped_in_a_row")
        assert row.pop("counts").keys() == row.keys() - {"grad_norm"}
        metrics.append({name: float(value) for name, value in row.items()})
    params, gradient = jax.tree.map(np.array, (state.params, state.opt_state[0].trace))
    return Taken(params, gradient, metrics)


def difference(new, old):
    """The largest absolute difference of two trees."""
    return max(
        float(np.abs(np.asarray(a) - np.asarray(b)).max())
        for a, b in zip(*map(jax.tree.leaves, (new, old)), strict=True)
    )
