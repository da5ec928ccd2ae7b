"""Rewards that are asked on the host, between a program that rolls out and one that improves."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from slpo_jax.rewards.reward import Verdicts
from slpo_jax.rewards.unjudged import LOWEST, Unjudged
from slpo_jax.runtime import backend
from slpo_jax.runtime.mesh import EVERYWHERE, ROWS
from slpo_jax.training.state import (
    TrainState,
)

HostRewardFn = Callable[[np.ndarray, np.ndarray, np.ndarray], Verdicts]
"""(completions int [N, A], `PromptedBatch.draw_ids` of their prompts [N], latents of their thoughts int [N]) -> what
they earn, in numpy."""


@dataclasses.dataclass
class _Account:
    """What the verdicts of one step were, which may roll out several batches.

    Attributes:
        sums: over the verdicts of each batch, on the devices.
        names: of the rewards.
        seconds: that judging took.
    """

    sums: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    num_prompts: int = 0
    num_rollouts: int = 0
    names: tuple[str, ...] = ()
    seconds: float = 0.0


class HostVerdicts:
    """Asks the host, each process for what its own devices have rolled out, and says what a step's verdicts were.

    What unjudged completions earn is decided over the batch of all processes.

    Metrics: `unjudged` (completions that were not judged), of these `reward_failed` (a reward failed on);
    `verifier_seconds`, which judging took in the first process, without compilation; of several rewards `reward/NAME`
    of each, over the completions that it judged; and where the step has one, `solved` by what counts as right.
    """

    def __init__(self, host_reward: HostRewardFn, mesh: Mesh, rule: Unjudged = LOWEST):
        self._host_reward = host_reward
        self._rows = NamedSharding(mesh, ROWS)

        self._account: _Account | None = None  # of the step that is under way

        everywhere = NamedSharding(mesh, EVERYWHERE)

        def fill_unjudged(verdicts: Verdicts):
            unjudged_BG = jnp.asarray(verdicts.unjudged)
            if rule.overrides_truncated:
                unjudged_BG |= verdicts.cut
            total_BG = jnp.asarray(verdicts.total)
            return rule.fill(total_BG, unjudged_BG)

        def sum_verdicts(verdicts: Verdicts):
            # Of each reward, over the completions that it judged: (sum, count).
            by_name = {}
            for name, values_BG in verdicts.by_name.items():
                is_given_BG = ~jnp.isnan(values_BG)
                total = jnp.sum(values_BG, where=is_given_BG)
                count = is_given_BG.sum()
                by_name[name] = (total, count)
            return {
                "unjudged": verdicts.unjudged.sum(),
                "reward_failed": verdicts.failed.sum(),
                "solved": verdicts.right.any(axis=1).sum(),
                "by_name": by_name,
            }

        self._fill_unjudged = jax.jit(fill_unjudged, out_shardings=self._rows)
        self._sum_verdicts = jax.jit(sum_verdicts, out_shardings=everywhere)

    def ask(
        self, tokens: jax.Array, draw_ids_B: jax.Array, latents: jax.Array
    ) -> jax.Array:
        """Return the rewards of completions, float32 [B, N / B], each where its row is.

        In a step of `with_metrics` the verdicts are added to its account.

        Args:
            tokens: int [.., A], of N completions, a prompt's consecutive.
            draw_ids_B: see `PromptedBatch.draw_ids`.
            latents: int [..], how many each one's thought took.
        """
        # A process asks once for all of its devices.
        ids_of_devices = _on_host(draw_ids_B)
        *_, slots = tokens.shape
        tokens_of_devices = [part.reshape(-1, slots) for part in _on_host(tokens)]
        latents_of_devices = [part.reshape(-1) for part in _on_host(latents)]
        repeated_ids: list[np.ndarray] = []
        sizes: list[int] = []
        for part, ids in zip(tokens_of_devices, ids_of_devices, strict=True):
            size = len(part)
            copies = size // len(ids)
            repeated_ids.append(np.repeat(ids, copies))
            sizes.append(size)
        tokens_NA = np.concatenate(tokens_of_devices)
        ids_N = np.concatenate(repeated_ids)
        latents_N = np.concatenate(latents_of_devices)

        # A verifier may compute with jax, which a step is otherwise not to do with what the host has.
        start = _now()
        with jax.transfer_guard("allow"):
            verdicts = self._host_reward(tokens_NA, ids_N, latents_N)
        seconds = _now() - start

        # Each device gets its rows back.
        ends = np.cumsum(sizes)
        shards = draw_ids_B.addressable_shards

        def place(values_N: np.ndarray) -> jax.Array:
            if np.issubdtype(values_N.dtype, np.floating):
                values_N = values_N.astype(np.float32)
            placed: list[jax.Array] = []
            parts = np.split(values_N, ends[:-1])
            for part, ids, shard in zip(parts, ids_of_devices, shards, strict=True):
                groups = part.reshape(len(ids), -1)
                placed.append(jax.device_put(groups, shard.device))
            _, group = placed[0].shape
            shape = (len(draw_ids_B), group)
            return jax.make_array_from_single_device_arrays(shape, self._rows, placed)

        placed_verdicts = jax.tree.map(place, verdicts)
        account = self._account
        if account is not None:
            # Sums are asked for before the update, which a device computes afterwards: who reads them needn't wait.
            account.sums.append(self._sum_verdicts(placed_verdicts))
            batch_size, group = placed_verdicts.total.shape
            account.num_prompts += batch_size
            account.num_rollouts += batch_size * group
            account.seconds += seconds
            account.names = tuple(verdicts.by_name)  # in order, which jax does not keep
        return self._fill_unjudged(placed_verdicts)

    def with_metrics(self, step: Callable) -> Callable:
        """Return the step with the verdicts' metrics, of all batches that it has rolled out."""

        def add_up(*parts):
            return np.sum(parts, axis=0)

        def step_with_metrics(state: TrainState, batch):
            account = _Account()
            self._account = account
            state, metrics = step(state, batch)

            # (sum, count) over all batches of the step.
            sums = jax.device_get(account.sums)
            total = jax.tree.map(add_up, *sums)
            totals = {
                "unjudged": (total["unjudged"], account.num_rollouts),
                "reward_failed": (total["reward_failed"], account.num_rollouts),
            }
            if "solved" in metrics:
                totals["solved"] = (total["solved"], account.num_prompts)
            if len(account.names) > 1:
                for name in account.names:
                    totals[f"reward/{name}"] = total["by_name"][name]

            # They stand beside the step's own metrics, or in their place.
            for name, (value, count) in totals.items():
                number = float(count)
                metrics[name] = float(value) / max(number, 1.0)
                metrics["counts"][name] = number
            metrics["verifier_seconds"] = account.seconds
            return state, metrics

        return step_with_metrics


def _now() -> float:
    """Return the time in seconds, which stands still while something is compiled."""
    compiling = backend.seconds()
    return time.perf_counter() - compiling


def _on_host(rows: jax.Array) -> list[np.ndarray]:
    """Return what each device of this process has of an array, in the order of `addressable_shards`."""
    return [jax.device_get(shard.data) for shard in rows.addressable_shards]
