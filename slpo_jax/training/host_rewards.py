"""Rewards that are asked on the host between the two halves of a step, and what a step's metrics say of them."""

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import NamedSharding

from slpo_jax.io.mesh import EVERYWHERE, ROWS
from slpo_jax.rewards.reward import Verdicts
from slpo_jax.training.sharding import Layout
from slpo_jax.training.state import TrainState

HostRewardFn = Callable[[np.ndarray, np.ndarray], Verdicts]
"""(`Trajectories.completions` int [N, A], `PromptedBatch.index` of their prompts [N]) -> what they earn, in numpy."""


class HostVerdicts:
    """Asks the host, each process for what its own devices have rolled out, and says what a step's verdicts were.

    Metrics: `solved` by the first reward, several ones as `reward/NAME`, `reward_failed` (rollouts without a verdict),
    and `verifier_seconds`, which judging took in the first process.
    """

    def __init__(self, host_reward: HostRewardFn, layout: Layout):
        self._ask, self._rows = host_reward, NamedSharding(layout.mesh, ROWS)
        self._names, self._step, self._seconds = tuple[str, ...](), list[jax.Array](), 0.0
        everywhere = NamedSharding(layout.mesh, EVERYWHERE)
        self._totals = jax.jit(lambda found_BGV: found_BGV[..., 0], out_shardings=self._rows)
        self._sums = jax.jit(
            lambda found_BGV: (found_BGV.sum(axis=(0, 1)), (found_BGV[..., 2].max(axis=1) >= 1).sum()),
            out_shardings=everywhere,
        )

    def rewards(self, tokens_NA: jax.Array, index_B: jax.Array) -> jax.Array:
        """float32 [B, G] where the rows are."""
        own, parts = {shard.device: jax.device_get(shard.data) for shard in index_B.addressable_shards}, []
        for shard in tokens_NA.addressable_shards:
            index, tokens = own[shard.device], jax.device_get(shard.data)
            found = self._ask(tokens, np.repeat(index, len(tokens) // len(index)))
            self._names, self._seconds = tuple(found.by_name), self._seconds + found.seconds
            values_NV = np.stack([found.total, found.failed, *found.by_name.values()], axis=1).astype(np.float32)
            parts.append(jax.device_put(values_NV.reshape(len(index), -1, values_NV.shape[1]), shard.device))
        shape = (len(index_B), len(tokens_NA) // len(index_B), 2 + len(self._names))
        self._step.append(jax.make_array_from_single_device_arrays(shape, self._rows, parts))
        return self._totals(self._step[-1])

    def with_metrics(self, step: Callable) -> Callable:
        """A step whose metrics have the verdicts', of all batches that it has rolled out."""

        def judged(state: TrainState, batch):
            self._step, self._seconds = [], 0.0
            state, metrics = step(state, batch)
            sums = [jax.device_get(self._sums(found)) for found in self._step]
            (_, failed, *values), solved = (np.sum(each, axis=0) for each in zip(*sums, strict=True))
            prompts = sum(found.shape[0] for found in self._step)
            rollouts = prompts * self._step[0].shape[1]
            totals = {"reward_failed": (failed, rollouts), "solved": (solved, prompts)}
            if len(values) > 1:
                totals |= {f"reward/{name}": (x, rollouts) for name, x in zip(self._names, values, strict=True)}
            own = {name: float(total) / count for name, (total, count) in totals.items()}
            counts = metrics["counts"] | {name: float(count) for name, (_, count) in totals.items()}
            return state, metrics | own | {"verifier_seconds": self._seconds, "counts": counts}

        return judged
