"""Rewards that are asked on the host: a program that samples, the verifiers, and a program that improves.

Both programs draw as the one of a verifier on the device does.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from slpo_jax.policy import noise
from slpo_jax.rewards.reward import Verdicts
from slpo_jax.runtime.mesh import EVERYWHERE, ROWS, Layout, gathered
from slpo_jax.training.state import LossFn, TrainState, by_slices, make_train_step

HostRewardFn = Callable[[np.ndarray, np.ndarray], Verdicts]
"""(completions int [N, A], `PromptedBatch.draws` of their prompts [N]) -> what they earn, in numpy."""


class HostVerdicts:
    """Asks the host, each process for what its own devices have rolled out, and says what a step's verdicts were.

    Metrics: `reward_failed` (completions without a verdict), `verifier_seconds`, which judging took in the first
    process; of several rewards `reward/NAME` of each; and where the step has one `solved`, by the first reward.
    """

    def __init__(self, host_reward: HostRewardFn, mesh: Mesh):
        self._ask, self._rows = host_reward, NamedSharding(mesh, ROWS)
        self._names, self._step, self._seconds = tuple[str, ...](), list[jax.Array](), 0.0
        everywhere = NamedSharding(mesh, EVERYWHERE)
        self._totals = jax.jit(lambda values_BGV: values_BGV[..., 0], out_shardings=self._rows)
        self._sums = jax.jit(
            lambda values_BGV: (values_BGV.sum(axis=(0, 1)), (values_BGV[..., 2].max(axis=1) >= 1).sum()),
            out_shardings=everywhere,
        )

    def rewards(self, tokens: jax.Array, index_B: jax.Array) -> jax.Array:
        """Ask for the rewards of completions, float32 [B, N / B], where the rows are.

        Args:
            tokens: int [.., A], of N completions, a prompt's in a row.
        """
        indices, parts = {shard.device: jax.device_get(shard.data) for shard in index_B.addressable_shards}, []
        for shard in tokens.addressable_shards:
            index, tokens_NA = indices[shard.device], jax.device_get(shard.data).reshape(-1, tokens.shape[-1])
            with jax.transfer_guard("allow"):  # of a step's own; a verifier may compute with jax
                verdict = self._ask(tokens_NA, np.repeat(index, len(tokens_NA) // len(index)))
            self._names, self._seconds = tuple(verdict.by_name), self._seconds + verdict.seconds
            values_NV = np.stack([verdict.total, verdict.failed, *verdict.by_name.values()], axis=1).astype(np.float32)
            parts.append(jax.device_put(values_NV.reshape(len(index), -1, values_NV.shape[1]), shard.device))
        shape = (len(index_B), *parts[0].shape[1:])
        self._step.append(jax.make_array_from_single_device_arrays(shape, self._rows, parts))
        return self._totals(self._step[-1])

    def with_metrics(self, step: Callable) -> Callable:
        """Return the step with the verdicts' metrics, of all batches that it has rolled out."""

        def judged(state: TrainState, batch):
            self._step, self._seconds = [], 0.0
            state, metrics = step(state, batch)
            sums = [jax.device_get(self._sums(values_BGV)) for values_BGV in self._step]
            (_, failed, *values), solved = (np.sum(sum_V, axis=0) for sum_V in zip(*sums, strict=True))
            prompts = sum(values_BGV.shape[0] for values_BGV in self._step)
            rollouts = prompts * self._step[0].shape[1]
            totals = {"reward_failed": (failed, rollouts)}
            if "solved" in metrics:
                totals["solved"] = solved, prompts
            if len(values) > 1:
                totals |= {f"reward/{name}": (x, rollouts) for name, x in zip(self._names, values, strict=True)}
            means = {name: float(total) / count for name, (total, count) in totals.items()}
            counts = metrics["counts"] | {name: float(count) for name, (_, count) in totals.items()}
            return state, metrics | means | {"verifier_seconds": self._seconds, "counts": counts}

        return judged


def make_sampling(sample: Callable[..., tuple], layout: Layout, stream: str, micro_batches: int):
    """Make a step's half before the verdicts, jitted: (state, batch, others) -> (batch, what is sampled of its rows).

    Args:
        sample: (parameters, others, part of the batch, the step's key) -> a tuple of arrays, whose rows are the part's.
            The others are laid out as parameters.
        layout, stream, micro_batches: see `make_train_step`.
    """

    def sampled(state: TrainState, batch, extra):
        specs = layout.specs(state.params), layout.specs(extra)

        def local(params, extra, batch, key):
            params, extra = gathered((params, extra), specs)
            return by_slices(lambda part: sample(params, extra, part, key), batch, micro_batches)

        key = noise.stream_key(state.key, stream, state.step)
        everywhere = jax.shard_map(
            local, mesh=layout.mesh, in_specs=(*specs, ROWS, EVERYWHERE), out_specs=ROWS, check_vma=False
        )
        return batch, *everywhere(state.params, extra, batch, key)

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
    """Make a train step of a loss of (batch, what is sampled, rewards float32 [B, N / B]).

    Args:
        sample: (parameters, batch, the step's key) -> (anything, completions int [.., A], a prompt's in a row).
        host_reward: each process asks for its own rows.
    """
    draw = make_sampling(lambda params, _, batch, key: sample(params, batch, key), layout, stream, micro_batches)
    improve = make_train_step(loss_fn, optimizer, trained, layout, stream, micro_batches, schedule=schedule)

    verdicts = HostVerdicts(host_reward, layout.mesh)

    def step(state: TrainState, batch):
        batch, *sampled = draw(state, batch, {})
        return improve(state, (batch, tuple(sampled), verdicts.rewards(sampled[1], batch.draws)))

    return verdicts.with_metrics(step)
