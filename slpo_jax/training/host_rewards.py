"""Rewards that are asked on the host: a program that samples, the verifiers, and a program that improves.

Both programs draw as the one of a verifier on the device does.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from slpo_jax.policy import noise
from slpo_jax.rewards.reward import Verdicts
from slpo_jax.rewards.unjudged import Unjudged
from slpo_jax.runtime import backend
from slpo_jax.runtime.mesh import EVERYWHERE, ROWS, Layout, gathered
from slpo_jax.training.state import LossFn, TrainState, by_slices, make_train_step

HostRewardFn = Callable[[np.ndarray, np.ndarray, np.ndarray], Verdicts]
"""(completions int [N, A], `PromptedBatch.draws` of their prompts [N], latents of their thoughts int [N]) -> what they
earn, in numpy."""

LOWEST = Unjudged()
_FACTS = 5  # of each completion, before its values by reward


class HostVerdicts:
    """Asks the host, each process for what its own devices have rolled out, and says what a step's verdicts were.

    What unjudged completions earn is decided over the batch of all processes.

    Metrics: `unjudged` (completions that were not judged), of these `reward_failed` (a reward failed on);
    `verifier_seconds`, which judging took in the first process, without compilation; of several rewards `reward/NAME`
    of each, over the completions that it judged; and where the step has one, `solved` by what counts as right.
    """

    def __init__(self, host_reward: HostRewardFn, mesh: Mesh, rule: Unjudged = LOWEST):
        self._ask, self._rows = host_reward, NamedSharding(mesh, ROWS)
        self._names, self._step, self._seconds = tuple[str, ...](), list[jax.Array](), 0.0
        everywhere = NamedSharding(mesh, EVERYWHERE)

        def settled(values_BGV):
            unjudged_BG = values_BGV[..., 1] > 0
            if rule.is_of_all_truncated:
                unjudged_BG |= values_BGV[..., 2] > 0
            return rule.settled(values_BGV[..., 0], unjudged_BG)

        def sums(values_BGV):
            by_name_BGV = values_BGV[..., _FACTS:]
            is_given_BGV = ~jnp.isnan(by_name_BGV)
            return {
                "unjudged": values_BGV[..., 1].sum(),
                "reward_failed": values_BGV[..., 3].sum(),
                "solved": (values_BGV[..., 4].max(axis=1) > 0).sum(),
                "values": jnp.sum(by_name_BGV, axis=(0, 1), where=is_given_BGV),
                "given": is_given_BGV.sum(axis=(0, 1)),
            }

        self._settled = jax.jit(settled, out_shardings=self._rows)
        self._sums = jax.jit(sums, out_shardings=everywhere)

    def rewards(self, tokens: jax.Array, index_B: jax.Array, latents: jax.Array) -> jax.Array:
        """Ask for the rewards of completions, float32 [B, N / B], where the rows are.

        Args:
            tokens: int [.., A], of N completions, a prompt's in a row.
            latents: int [..], how many each one's thought took.
        """
        # A process asks once for all of its devices.
        indices, counts = _on_host(index_B), _on_host(latents)
        tokens_NA = [part.reshape(-1, tokens.shape[-1]) for part in _on_host(tokens)]
        copies = [len(rows) // len(index) for rows, index in zip(tokens_NA, indices, strict=True)]
        index_N = [np.repeat(index, count) for index, count in zip(indices, copies, strict=True)]
        asked = (
            np.concatenate(tokens_NA),
            np.concatenate(index_N),
            np.concatenate([part.reshape(-1) for part in counts]),
        )
        start = _now()
        with jax.transfer_guard("allow"):  # of a step's own; a verifier may compute with jax
            verdict = self._ask(*asked)
        self._seconds += _now() - start
        self._names = tuple(verdict.by_name)
        facts = (verdict.total, verdict.unjudged, verdict.cut, verdict.failed, verdict.right)
        values_NV = np.stack([*facts, *verdict.by_name.values()], axis=1).astype(np.float32)
        # Each device gets its rows back.
        parts = np.split(values_NV, np.cumsum([len(rows) for rows in tokens_NA])[:-1])
        placed = [
            jax.device_put(part.reshape(len(index), -1, part.shape[1]), shard.device)
            for part, index, shard in zip(parts, indices, index_B.addressable_shards, strict=True)
        ]
        shape = (len(index_B), *placed[0].shape[1:])
        self._step.append(jax.make_array_from_single_device_arrays(shape, self._rows, placed))
        return self._settled(self._step[-1])

    def with_metrics(self, step: Callable) -> Callable:
        """Return the step with the verdicts' metrics, of all batches that it has rolled out."""

        def judged(state: TrainState, batch):
            self._step, self._seconds = [], 0.0
            state, metrics = step(state, batch)
            sums = [jax.device_get(self._sums(values_BGV)) for values_BGV in self._step]
            total = jax.tree.map(lambda *parts: np.sum(parts, axis=0), *sums)
            prompts = sum(values_BGV.shape[0] for values_BGV in self._step)
            rollouts = prompts * self._step[0].shape[1]
            totals = {name: (total[name], rollouts) for name in ("unjudged", "reward_failed")}
            if "solved" in metrics:
                totals["solved"] = total["solved"], prompts
            if len(self._names) > 1:
                of_each = zip(self._names, total["values"], total["given"], strict=True)
                totals |= {f"reward/{name}": (value, given) for name, value, given in of_each}
            means = {name: float(value) / max(float(count), 1.0) for name, (value, count) in totals.items()}
            counts = metrics["counts"] | {name: float(count) for name, (_, count) in totals.items()}
            return state, metrics | means | {"verifier_seconds": self._seconds, "counts": counts}

        return judged


def _now() -> float:
    """Return the time in seconds, which stands still while something is compiled."""
    return time.perf_counter() - backend.seconds()


def _on_host(rows: jax.Array) -> list[np.ndarray]:
    """Return what each device of this process has of an array, in the order of `addressable_shards`."""
    return [jax.device_get(shard.data) for shard in rows.addressable_shards]


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
    sample: Callable[..., tuple[Any, jax.Array, jax.Array]],
    host_reward: HostRewardFn,
    schedule: optax.Schedule | None = None,
):
    """Make a train step of a loss of (batch, what is sampled, rewards float32 [B, N / B]).

    Args:
        sample: (parameters, batch, the step's key) -> (anything, completions int [.., A], a prompt's in a row, and the
            latents of each one's thought, int [..]).
        host_reward: each process asks for its own rows.
    """
    draw = make_sampling(lambda params, _, batch, key: sample(params, batch, key), layout, stream, micro_batches)
    improve = make_train_step(loss_fn, optimizer, trained, layout, stream, micro_batches, schedule=schedule)

    verdicts = HostVerdicts(host_reward, layout.mesh)

    def step(state: TrainState, batch):
        batch, *sampled = draw(state, batch, {})
        *kept, latents = sampled
        return improve(state, (batch, tuple(kept), verdicts.rewards(kept[1], batch.draws, latents)))

    return verdicts.with_metrics(step)
