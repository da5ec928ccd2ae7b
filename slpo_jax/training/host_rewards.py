"""A step whose verdicts the host gives: one program that samples, the verifier, and one that improves.

Both draw as the one program of a verifier on the device does.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from slpo_jax.io.mesh import EVERYWHERE, ROWS
from slpo_jax.policy import noise
from slpo_jax.training.sharding import Layout, gathered
from slpo_jax.training.state import LossFn, TrainState, by_parts, make_train_step

HostRewardFn = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(completions int [N, A], `PromptedBatch.index` of their prompts [N]) -> float32 [N], in numpy."""


def make_sampling(sample: Callable[..., tuple], layout: Layout, stream: str, micro_batches: int):
    """The half of a step before the verdicts, jitted: (state, batch, others) -> (batch, what is sampled of its rows).

    Args:
        sample: (parameters, others, part of the batch, the step's key) -> a tuple of arrays, whose rows are the part's.
            The others are laid out as parameters.
        layout, stream, micro_batches: see `make_train_step`.
    """

    def sampled(state: TrainState, batch, others):
        specs = layout.specs(state.params), layout.specs(others)

        def local(params, others, batch, key):
            params, others = gathered((params, others), specs)
            return by_parts(lambda part: sample(params, others, part, key), batch, micro_batches)

        key = noise.stream_key(state.key, stream, state.step)
        everywhere = jax.shard_map(
            local, mesh=layout.mesh, in_specs=(*specs, ROWS, EVERYWHERE), out_specs=ROWS, check_vma=False
        )
        return batch, *everywhere(state.params, others, batch, key)

    return jax.jit(sampled)


def make_host_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    trained: tuple[str, ...],
    layout: Layout,
    stream: str,
    micro_batches: int = 1,
    *,
    sample: Callable[..., tuple[Any, jax.Array]],
    host_reward: HostRewardFn,
    schedule: optax.Schedule | None = None,
):
    """`make_train_step` of a loss of (batch, what is sampled, rewards float32 [B, N / B]).

    Args:
        sample: (parameters, batch, the step's key) -> (anything, completions int [.., A], a prompt's in a row).
        host_reward: each process asks for its own rows.
    """
    draw = make_sampling(lambda params, _, batch, key: sample(params, batch, key), layout, stream, micro_batches)
    improve = make_train_step(loss_fn, optimizer, trained, layout, stream, micro_batches, schedule=schedule)

    def step(state: TrainState, batch):
        batch, *sampled = draw(state, batch, {})
        rewards = rewards_from_host(host_reward, sampled[1], batch.index, layout.mesh)
        return improve(state, (batch, tuple(sampled), rewards))

    return step


def rewards_from_host(host_reward: HostRewardFn, tokens: jax.Array, index_B: jax.Array, mesh: Mesh) -> jax.Array:
    """float32 [B, N / B] where the rows are: each process verifies what its own devices have sampled.

    Args:
        tokens: int [.., A], of N completions, a prompt's in a row.
    """
    own = {shard.device: jax.device_get(shard.data) for shard in index_B.addressable_shards}
    parts = []
    for shard in tokens.addressable_shards:
        index, tokens_NA = own[shard.device], jax.device_get(shard.data).reshape(-1, tokens.shape[-1])
        with jax.transfer_guard("allow"):  # of a step's own; a verifier may compute with jax
            rewards = host_reward(tokens_NA, np.repeat(index, len(tokens_NA) // len(index)))
        parts.append(jax.device_put(rewards.reshape(len(index), -1).astype(np.float32), shard.device))
    shape = (len(index_B), *parts[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, ROWS), parts)
