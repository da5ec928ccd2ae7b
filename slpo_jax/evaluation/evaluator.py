"""Batched evaluation of one checkpoint on one problem set: greedy accuracy, samples under noise."""

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from slpo_jax.data.batches import EncodedProblems, end_to_end, pad_prompts
from slpo_jax.errors import UserError, in_a_line
from slpo_jax.evaluation.beam import beam_search
from slpo_jax.evaluation.completions import Completions
from slpo_jax.evaluation.records import PLACES, RolloutCache
from slpo_jax.policy import noise
from slpo_jax.policy.explain import Reads, explain, probe, reads_of
from slpo_jax.policy.policy import Policy, Stopping
from slpo_jax.policy.prompts import Prompts
from slpo_jax.policy.rollout import Trajectories, sample
from slpo_jax.policy.scorers import SCORERS
from slpo_jax.runtime import hosts
from slpo_jax.runtime.mesh import EVERYWHERE, ROWS, over_rows, shard_rows
from slpo_jax.runtime.progress import Progress


class RolloutBatch(NamedTuple):
    """Rollouts of one call: prompts of B rows, and for N rollouts, N/B of each prompt in a row, which they are.

    Attributes:
        index_N, sample_N: int32, problem and number of the sample.
        real_N: bool, False for what fills the batch up.
    """

    prompts: Prompts
    index_N: np.ndarray
    sample_N: np.ndarray
    real_N: np.ndarray


def classes(lengths_I: np.ndarray, slots: Sequence[int], together: int) -> list[np.ndarray]:
    """Items whose prompts fit the same bucket, as many as make whole batches; the others go with the next bucket's.

    Args:
        lengths_I: ascending.
        slots: ascending.
        together: items of a batch.
    Returns:
        int arrays, the indices of each class's items; only the last may have a part of a batch.
    """
    ends = np.searchsorted(lengths_I, slots, side="right")
    # What is left over in the longest prompts' own bucket stays with them.
    cuts = [end // together * together for end in ends if end < len(lengths_I)]
    return [part for part in np.split(np.arange(len(lengths_I)), cuts) if len(part)]


def shard(items: np.ndarray, rows: int, devices: int) -> tuple[np.ndarray, np.ndarray]:
    """Items of ascending length in shards of `rows`, as many as whole batches take, of about equal lengths.

    Returns:
        int [shards, rows], and bool, whether it is not there only to fill up.
    """
    count = -(-len(items) // (rows * devices)) * devices
    shard_S, row_R = np.arange(count)[:, None], np.arange(rows)
    # To and fro: who gets the longest of one round gets the shortest of the next.
    items_SR = count * row_R + np.where(row_R % 2, count - 1 - shard_S, shard_S)
    return items[np.minimum(items_SR, len(items) - 1)], items_SR < len(items)


class Evaluator:
    """Jitted rollouts over whole problem sets; one compiled program a shape of `batches` and mode.

    Args:
        policy: of the sampled rollouts, with their noise; its stopping rule is not used.
        mesh: rows are spread over all its devices.
        batch_size: rollouts at a time, over all devices.
        prompt_slots: buckets.
        key: base key of the dropout noise.
        scorers: names in `SCORERS`, of the rollouts under noise.
        search: beams and candidates of a search over latents.
    """

    def __init__(
        self,
        policy: Policy,
        mesh: Mesh,
        batch_size: int,
        prompt_slots: Sequence[int],
        key: jax.Array,
        scorers: Sequence[str] = (),
        search: tuple[int, int] = (0, 1),
    ):
        self.policy, self.mesh, self.key, self.search, self.scorers = policy, mesh, key, search, scorers
        self.batch_size, self.prompt_slots = -(-batch_size // mesh.size) * mesh.size, tuple(sorted(prompt_slots))
        self.program = functools.cache(self._program)

    def _program(
        self,
        noisy: bool,
        stopping: Stopping,
        keep_latents: bool,
        probed: bool = False,
        reads: Reads | None = None,
        searched: bool = False,
        thinks: bool = True,
    ) -> Callable:
        """(params, prompts, index_N, sample_N, real_N, key, rule_N) -> `Completions`."""
        policy = (self.policy if noisy else self.policy.without_noise()).having(stopping=stopping)
        policy = policy if thinks else policy.having(max_latents=0)

        def local(params, prompts, index_N, sample_N, real_N, key, rule_N):
            if searched:
                out = beam_search(policy, params, prompts, key, index_N, rule_N, *self.search)
                return {"tokens": out.completions, "latent_steps": out.lengths}
            keys_N = noise.row_keys(key, index_N, sample_N)
            out = sample(policy, params, prompts, keys_N, rule_N, real_N)
            values = {"tokens": out.completions, "latent_steps": out.lengths}
            if keep_latents:
                values["latents"] = policy.latent_policy.feed(params, out.actions).astype(jnp.float32)
            if probed:
                seen = probe(policy, params, prompts, out.actions, out.lengths)
                values |= dict(zip(("stop", "nearest_probability", "nearest_token"), seen, strict=True))
            if reads:
                values["words"] = explain(policy, params, policy.latent_policy.feed(params, out.actions), reads)
            if noisy:
                values |= {name: _scored(name, policy, params, prompts, out) for name in self.scorers}
            return values

        return over_rows(local, self.mesh, (EVERYWHERE, ROWS, ROWS, ROWS, ROWS, EVERYWHERE, ROWS))

    def batches(self, problems: EncodedProblems, count: int, samples: int) -> Iterator[RolloutBatch]:
        """The rollouts of the first `count` problems, `samples` of each.

        Problems whose prompts fit the same bucket make up a class; a class is sharded so that every device has about as
        many tokens in every batch, and prompts that are padded a lot are encoded end to end. Batches are halved while a
        quarter would do, so that few problems cost little and few shapes compile.
        """
        devices, slots = self.mesh.size, self.prompt_slots
        lengths = np.array([len(prompt) for prompt in problems.prompts[:count]])
        fits = [n for n in range(1, samples + 1) if samples % n == 0 and (n == 1 or n * devices <= self.batch_size)]
        each = max(fits)  # rollouts of a prompt, of `rows` on a device
        rows = max(self.batch_size // (each * devices), 1)
        while rows > 1 and rows * devices >= 4 * count * (samples // each):
            rows //= 2
        # A problem's samples may be several items, of `each` rollouts.
        index_I = np.repeat(np.argsort(lengths, kind="stable"), samples // each)
        offset_I = np.tile(np.arange(0, samples, each), count)
        for items in classes(lengths[index_I], slots, rows * devices):
            longest = lengths[index_I[items[-1]]]
            width = min(size for size in slots if size >= longest)
            shards, real_SR = shard(items, rows, devices)
            index_SR = index_I[shards]
            kept_SR = np.where(real_SR, lengths[index_SR], 1)  # of what fills a batch up, one token
            capacity = end_to_end(int(kept_SR.sum(axis=1).max()), rows, width)
            for first in range(0, len(shards), devices):
                batch = slice(first, first + devices)
                index_B, kept_B, real_B = (x[batch].reshape(-1) for x in (index_SR, kept_SR, real_SR))
                prompts = [problems.prompts[i][-kept:] for i, kept in zip(index_B, kept_B, strict=True)]
                tokens, valid = pad_prompts(prompts, (width,), problems.template.pad_id)
                sample_BE = offset_I[shards[batch]].reshape(-1, 1) + np.arange(each)
                yield RolloutBatch(
                    Prompts(tokens, valid, capacity),
                    np.repeat(index_B, each).astype(np.int32),
                    sample_BE.reshape(-1).astype(np.int32),
                    np.repeat(real_B, each),
                )

    def run(
        self,
        params: Any,
        problems: EncodedProblems,
        stopping: Stopping,
        rule: float | int | Sequence[int],
        *,
        seed: int | None = None,
        samples: int = 1,
        limit: int = 0,
        keep_latents: bool = False,
        probed: bool = False,
        searched: bool = False,
        label: str = "",
        cache: RolloutCache | None = None,
        name: str = "",
    ) -> Completions:
        """Roll out every problem `samples` times.

        Args:
            params: all parts.
            stopping: "threshold" or "length".
            rule: the threshold, or the number of latents, or that of each problem.
            seed: dropout seed; None is the deterministic pass.
            limit: only the first problems of the set; 0 is all.
            probed: also what is seen of the thoughts, of a deterministic pass.
            searched: thoughts are searched for, one of each problem.
            label: of the progress bar.
            cache: where finished batches are, from an earlier run of this very evaluation too, and are put.
            name: of the set, by which noise is drawn: the i-th problems of two are independent. "" is `solve`'s.
        Returns:
            rows in the order problem 0 sample 0, problem 0 sample 1, ...
        """
        count = min(limit or len(problems), len(problems))
        reads = reads_of(params) if probed else None
        rules = np.broadcast_to(np.asarray(rule, np.float32 if stopping == "threshold" else np.int32), count)
        thinks = stopping == "threshold" or bool(rules.any())  # without a thought even where it ends with a marker
        program = self.program(seed is not None, stopping, keep_latents, probed, reads, searched, thinks)
        key = noise.stream_key(self.key, "evaluate", seed or 0)
        key = jax.random.fold_in(key, zlib.crc32(name.encode())) if name else key
        total, results = count * samples, cache.batches() if cache else []
        known = np.isin(np.arange(total), [row for batch in results for row in batch[PLACES]])
        hosts.barrier("evaluation")  # all have read what there is before the first adds to it
        progress, pending = Progress(label, total, unit="rollout", keep=False), None

        def finish(number: int, rows_N: np.ndarray, real_N: np.ndarray, out: Any) -> None:
            batch = {PLACES: rows_N[real_N]} | {name: hosts.whole(values)[real_N] for name, values in out.items()}
            if cache:
                cache.add(number, batch)
            results.append(batch)
            known[batch[PLACES]] = True
            progress.update(int(known.sum()))

        with contextlib.closing(progress):
            for number, batch in enumerate(self.batches(problems, count, samples)):
                rows_N = batch.index_N.astype(np.int64) * samples + batch.sample_N
                if hosts.agreed(bool(known[rows_N[batch.real_N]].all()), cache and cache.folder):
                    continue
                rows = shard_rows((batch.prompts, batch.index_N, batch.sample_N, batch.real_N), self.mesh)
                out = program(params, *rows, key, shard_rows(rules[batch.index_N], self.mesh))
                if pending is not None:  # wait for the batch before, so that one is always under way
                    finish(*pending)
                pending = number, rows_N, batch.real_N, out
            if pending is not None:
                finish(*pending)
        whole = {name: np.concatenate([batch[name] for batch in results]) for name in results[0]}
        _, order = np.unique(whole.pop(PLACES), return_index=True)
        return {name: values[order] for name, values in whole.items()}


def _scored(name: str, policy: Policy, params: Any, prompts: Prompts, out: Trajectories) -> jax.Array:
    """What a scorer says of each rollout.

    Raises:
        UserError: it fails, or says something else than a number of each.
    """
    try:
        score_N = jnp.asarray(SCORERS[name].score(policy, params, prompts, out), jnp.float32)
        return score_N.reshape(out.lengths.shape)
    except Exception as error:  # it may be the user's code, and can raise anything
        raise UserError(
            f"config.evaluate.scorers: {name}: {in_a_line(error)}; mend it: it returns a number of each rollout"
        ) from error
