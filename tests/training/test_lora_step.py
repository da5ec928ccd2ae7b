"""A step of the stage `rl` whose adapters alone are trained, against one by hand from the whole reasoner's gradient."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from frozen import ADDITIVE, BATCH
from slow_policy import as_float64
from slpo_jax.models import lora
from slpo_jax.models.parts import ADAPTER, GATE, REASONER
from slpo_jax.policy import noise
from slpo_jax.runtime.mesh import shard_rows
from slpo_jax.training import rl_loss
from slpo_jax.training.objectives import OBJECTIVES
from slpo_jax.training.optimizer import OptimizerConfig, make_optimizer
from slpo_jax.training.rl_step import make_rollout
from slpo_jax.training.state import init_state
from small_steps import GROUP, POLICY, layout_of, rigged_reward, small_params, step_of
from tiny import FAST, compiled

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cpu_devices")]
RANK = 3
SCALE = 2.5
RATE = 1e-2
DECAY = 0.1
CLIP = 0.01
OBJECTIVE = {
    "slpo": (POLICY, {"passes": 2, "epsilon": 1e-2}),
    "answer_only": (POLICY, {}),
    "exact": (ADDITIVE, {}),
    "pathwise": (POLICY, {"estimator": "mixture"}),
    "grpo": (ADDITIVE, {}),
}
KEY = jax.random.key(0)


def _params():
    """With adapters that do something."""
    params = small_params()
    rng = np.random.default_rng(4)
    fresh = lora.adapter(jax.random.key(1), params, RANK)
    return params | {
        ADAPTER: jax.tree.map(
            lambda x: jnp.asarray(0.2 * rng.normal(size=x.shape), jnp.float32), fresh
        )
    }


def _step(name):
    """The state before and after it."""
    policy, settings = OBJECTIVE[name]
    policy = dataclasses.replace(
        policy, reasoner=lora.make_merging(policy.reasoner, SCALE)
    )
    loss = rl_loss.make_rollout_and_loss(
        policy, OBJECTIVES[name](**settings), rigged_reward, GROUP
    )
    optimizer = make_optimizer(
        OptimizerConfig("adamw", RATE, weight_decay=DECAY, clip_norm=CLIP)
    )
    step, arguments = step_of(
        loss, _params(), (ADAPTER, GATE), BATCH, optimizer=optimizer
    )
    left, _ = step.lower(*arguments).compile(compiler_options=FAST)(*arguments)
    return _params(), left


def _whole_gradient(name, params):
    """Of the mean loss of the reasoner that has the kernels of these parameters itself."""
    policy, settings = OBJECTIVE[name]
    loss_of = rl_loss.make_rollout_and_loss(
        policy, OBJECTIVES[name](**settings), rigged_reward, GROUP
    )

    def loss(params, key):
        total, sums = loss_of(params, BATCH, key)
        return total / sums["loss"][1]

    return compiled(jax.grad(loss))(params, noise.stream_key(KEY, "rl", 0))


@functools.cache
def _by_hand(name):
    """(adapters, gate) after the step: the chain rule, one clip over all, and AdamW's first step."""
    start = as_float64(_params())
    adapters = flatten_dict(start[ADAPTER]["lora"])
    kernels = flatten_dict(start[REASONER]["backbone"])
    own = {}
    modules = {path[:-1] for path in adapters}
    for at in modules:
        kernels[*at, "kernel"] = (
            kernels[*at, "kernel"] + SCALE * adapters[*at, "A"] @ adapters[*at, "B"]
        )
    merged = start[REASONER] | {"backbone": unflatten_dict(kernels)}
    gradient = _whole_gradient(
        name, jax.tree.map(jnp.float32, {REASONER: merged, GATE: start[GATE]})
    )
    slopes = flatten_dict(as_float64(gradient[REASONER]["backbone"]))
    for at in modules:
        own[*at, "A"] = SCALE * slopes[*at, "kernel"] @ adapters[*at, "B"].T
        own[*at, "B"] = SCALE * adapters[*at, "A"].T @ slopes[*at, "kernel"]
    trained = (start[ADAPTER]["lora"], start[GATE])
    gradients = (unflatten_dict(own), as_float64(gradient[GATE]))
    norm = np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(gradients)))
    assert norm > CLIP  # or the clip would not be seen

    def after(x, g):
        g = g * CLIP / norm
        return x - RATE * (g / (np.abs(g) + 1e-8) + DECAY * x * (x.ndim > 1))

    return jax.tree.map(after, trained, gradients), gradients


@pytest.mark.parametrize("name", OBJECTIVE)
def test_a_step_of_adapters_is_that_by_hand_and_leaves_the_rest_to_the_bit(name):
    start, left = _step(name)
    wanted, gradients = _by_hand(name)
    found = left.params[ADAPTER]["lora"], left.params[GATE]
    # Adam's first step is the gradient's sign, which the rounding of what is nearly 0 may turn.
    largest = max(np.abs(g).max() for g in jax.tree.leaves(gradients[0]))
    sure = jax.tree.map(lambda g: np.abs(g) > 1e-3 * largest, gradients)
    assert np.mean(np.concatenate([x.ravel() for x in jax.tree.leaves(sure[0])])) > 0.5
    for ours, theirs, is_sure in zip(
        *map(jax.tree.leaves, (found, wanted, sure)), strict=True
    ):
        np.testing.assert_allclose(
            np.where(is_sure, ours, 0),
            np.where(is_sure, theirs, 0),
            rtol=1e-4,
            atol=1e-5,
        )
    frozen = zip(
        *map(jax.tree.leaves, (left.params[REASONER], start[REASONER])), strict=True
    )
    assert all(np.array_equal(ours, theirs) for ours, theirs in frozen)
    moments = [x.shape for x in jax.tree.leaves(left.opt_state) if x.ndim]
    assert sorted(moments) == sorted(
        2 * [x.shape for x in jax.tree.leaves((start[ADAPTER], start[GATE]))]
    )


def test_the_reference_is_the_reasoner_without_adapters_and_the_start_of_what_is_trained_whole():
    """Of the rollouts' own choices, where the state's adapters and gate are others."""
    objective = OBJECTIVES["grpo"](kl_weight=0.1, updates=2)
    layout = layout_of()
    policy = dataclasses.replace(
        ADDITIVE, reasoner=lora.make_merging(ADDITIVE.reasoner, SCALE)
    )
    now = _params()
    start = small_params()
    now[GATE] = jax.tree.map(lambda x: x + 0.1, now[GATE])
    state = init_state(
        now, (ADAPTER, GATE), make_optimizer(OptimizerConfig("adamw")), KEY, layout
    )
    arguments = state, shard_rows(BATCH, layout.mesh), {GATE: start[GATE]}
    roll = make_rollout(policy, objective, rigged_reward, GROUP, layout, "rl", 1)
    _, trajectories, _ = roll.lower(*arguments).compile(compiler_options=FAST)(
        *arguments
    )
    found = trajectories.ref_log_probs
    wanted = compiled(objective.compute_ref_log_probs, ADDITIVE)(
        start, BATCH, trajectories
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert (
        np.abs(np.asarray(trajectories.old_log_probs) - np.asarray(found)).max() > 0.1
    )
