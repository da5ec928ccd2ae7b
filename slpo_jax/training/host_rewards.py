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
from slpo_jax.runtime.mesh import EVERYWHERE, ROWS, Layout, all_gather_params
from slpo_jax.training.state import (
    LossFn,
    TrainState,
    make_train_step,
    map_micro_batches,
)

HostRewardFn = Callable[[np.ndarray, np.ndarray, np.ndarray], Verdicts]
"""(completions int [N, A], `PromptedBatch.noise_ids` of their prompts [N], latents of their thoughts int [N]) -> what
they earn, in numpy."""

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
        self._ask = host_reward
        self._rows = NamedSharding(mesh, ROWS)

        # Of one step, which may roll out several batches.
        self._names: tuple[str, ...] = ()
        self._values: list[jax.Array] = []  # [B, G, _FACTS + rewards] of each batch
        self._seconds = 0.0

        everywhere = NamedSharding(mesh, EVERYWHERE)

        def settle(values_BGV):
            rewards_BG = values_BGV[..., 0]
            unjudged_BG = values_BGV[..., 1] > 0
            if rule.overrides_truncated:
                unjudged_BG |= values_BGV[..., 2] > 0
            return rule.settle(rewards_BG, unjudged_BG)

        def sums(values_BGV):
            facts_BGV = values_BGV[..., :_FACTS]
            _, unjudged_BG, _, failed_BG, right_BG = jnp.moveaxis(facts_BGV, -1, 0)
            is_solved_B = right_BG.max(axis=1) > 0
            by_name_BGV = values_BGV[..., _FACTS:]
            is_given_BGV = ~jnp.isnan(by_name_BGV)
            return {
                "unjudged": unjudged_BG.sum(),
                "reward_failed": failed_BG.sum(),
                "solved": is_solved_B.sum(),
                "values": jnp.sum(by_name_BGV, axis=(0, 1), where=is_given_BGV),
                "given": is_given_BGV.sum(axis=(0, 1)),
            }

        self._settle = jax.jit(settle, out_shardings=self._rows)
        self._sums = jax.jit(sums, out_shardings=everywhere)

    def rewards(
        self, tokens: jax.Array, index_B: jax.Array, latents: jax.Array
    ) -> jax.Array:
        """Ask for the rewards of completions, float32 [B, N / B], where the rows are.

        Args:
            tokens: int [.., A], of N completions, a prompt's consecutive.
            latents: int [..], how many each one's thought took.
        """
        # A process asks once for all of its devices.
        indices = _on_host(index_B)
        *_, slots = tokens.shape
        tokens_NA = [part.reshape(-1, slots) for part in _on_host(tokens)]
        latents_N = [part.reshape(-1) for part in _on_host(latents)]
        index_N: list[np.ndarray] = []
        for rows, index in zip(tokens_NA, indices, strict=True):
            copies = len(rows) // len(index)
            index_N.append(np.repeat(index, copies))

        # A verifier may compute with jax, which a step is otherwise not to do with what the host has.
        start = _now()
        with jax.transfer_guard("allow"):
            verdict = self._ask(
                np.concatenate(tokens_NA),
                np.concatenate(index_N),
                np.concatenate(latents_N),
            )
        self._seconds += _now() - start
        self._names = tuple(verdict.by_name)

        # The columns of `values_BGV`: facts first, then the value of each reward.
        columns = [
            verdict.total,
            verdict.unjudged,
            verdict.cut,
            verdict.failed,
            verdict.right,
            *verdict.by_name.values(),
        ]
        values_NV = np.stack(columns, axis=1).astype(np.float32)

        # Each device gets its rows back.
        ends = np.cumsum([len(rows) for rows in tokens_NA])
        parts = np.split(values_NV, ends[:-1])
        shards = index_B.addressable_shards
        placed: list[jax.Array] = []
        for part, index, shard in zip(parts, indices, shards, strict=True):
            groups = part.reshape(len(index), -1, len(columns))
            placed.append(jax.device_put(groups, shard.device))
        _, *shape_of_prompt = placed[0].shape
        shape = (len(index_B), *shape_of_prompt)
        values_BGV = jax.make_array_from_single_device_arrays(shape, self._rows, placed)
        self._values.append(values_BGV)
        return self._settle(values_BGV)

    def with_metrics(self, step: Callable) -> Callable:
        """Return the step with the verdicts' metrics, of all batches that it has rolled out."""

        def judge_step(state: TrainState, batch):
            self._values = []
            self._seconds = 0.0
            state, metrics = step(state, batch)

            # (sum, count) over all batches of the step.
            sums: list[dict[str, np.ndarray]] = []
            num_prompts = 0
            num_rollouts = 0
            for values_BGV in self._values:
                sums.append(jax.device_get(self._sums(values_BGV)))
                batch_size, group, _ = values_BGV.shape
                num_prompts += batch_size
                num_rollouts += batch_size * group
            total = jax.tree.map(lambda *parts: np.sum(parts, axis=0), *sums)
            totals = {
                "unjudged": (total["unjudged"], num_rollouts),
                "reward_failed": (total["reward_failed"], num_rollouts),
            }
            if "solved" in metrics:
                totals["solved"] = (total["solved"], num_prompts)
            if len(self._names) > 1:
                for place, name in enumerate(self._names):
                    value = total["values"][place]
                    given = total["given"][place]
                    totals[f"reward/{name}"] = (value, given)

            # They stand beside the step's own metrics, or in their place.
            for name, (value, count) in totals.items():
                metrics[name] = float(value) / max(float(count), 1.0)
                metrics["counts"][name] = float(count)
            metrics["verifier_seconds"] = self._seconds
            return state, metrics

        return judge_step


def _now() -> float:
    """Return the time in seconds, which stands still while something is compiled."""
    compiling = backend.seconds()
    return time.perf_counter() - compiling


def _on_host(rows: jax.Array) -> list[np.ndarray]:
    """Return what each device of this process has of an array, in the order of `addressable_shards`."""
    return [jax.device_get(shard.data) for shard in rows.addressable_shards]


def make_sampling(
    sample: Callable[..., tuple], layout: Layout, stream: str, micro_batches: int
):
    """Make a step's half before the verdicts, jitted: (state, batch, others) -> (batch, what is sampled of its rows).

    Args:
        sample: (parameters, others, part of the batch, the step's key) -> a tuple of arrays, whose rows are the part's.
            The others are laid out as parameters.
        layout, stream, micro_batches: see `make_train_step`.
    """

    def draw(state: TrainState, batch, extra):
        specs = (layout.specs(state.params), layout.specs(extra))

        def local(params, extra, batch, key):
            params, extra = all_gather_params((params, extra), specs)

            def of_part(part):
                return sample(params, extra, part, key)

            return map_micro_batches(of_part, batch, micro_batches)

        key = noise.stream_key(state.key, stream, state.step)
        everywhere = jax.shard_map(
            local,
            mesh=layout.mesh,
            in_specs=(*specs, ROWS, EVERYWHERE),
            out_specs=ROWS,
            check_vma=False,
        )
        sampled = everywhere(state.params, extra, batch, key)
        return batch, *sampled

    return jax.jit(draw)


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
    """Make a train step that asks the host between its two programs.

    The loss is of (batch, what is sampled, rewards float32 [B, N / B]).

    Args:
        sample: (parameters, batch, the step's key) -> (anything, completions int [.., A], a prompt's consecutive, and the
            latents of each one's thought, int [..]).
        host_reward: each process asks for its own rows.
    """

    def sample_without(params, _, batch, key):
        return sample(params, batch, key)

    draw = make_sampling(sample_without, layout, stream, micro_batches)
    improve = make_train_step(
        loss_fn, optimizer, trained, layout, stream, micro_batches, schedule=schedule
    )
    verdicts = HostVerdicts(host_reward, layout.mesh)

    def step(state: TrainState, batch):
        batch, kept, tokens, latents = draw(state, batch, {})
        rewards_BG = verdicts.rewards(tokens, batch.noise_ids, latents)
        judged = (batch, (kept, tokens), rewards_BG)
        return improve(state, judged)

    return verdicts.with_metrics(step)
