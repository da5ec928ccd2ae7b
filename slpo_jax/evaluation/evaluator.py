"""Batched evaluation of one checkpoint on one problem set: greedy accuracy, samples under noise."""

import contextlib
import dataclasses
import functools
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from slpo_jax.data.batches import EncodedProblems, end_to_end, pad_prompts
from slpo_jax.evaluation.completions import Completions
from slpo_jax.evaluation.records import PLACES, RolloutCache, in_order
from slpo_jax.policy import noise
from slpo_jax.policy.explain import Reads, explain, probe, reads_of
from slpo_jax.policy.policy import Policy, Prompts, Stopping
from slpo_jax.policy.rollout import sample
from slpo_jax.policy.scorers import beam_search, score_rollouts
from slpo_jax.runtime import hosts
from slpo_jax.runtime.mesh import EVERYWHERE, ROWS, over_rows, shard_rows
from slpo_jax.runtime.progress import Progress
from slpo_jax.settings import FieldError, check_fields, setting

T = TypeVar("T")
_TIMED = 3  # passes over a batch, of which the fastest counts


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """What is evaluated, and how.

    Attributes:
        datasets: names under config.data.eval; None is all.
        limit: problems a set; 0 is all.
        batch_size: rollouts at a time; no figure depends on it.
        prompt_multiple: problems whose prompts fit the same multiple of this (or config.prompt_slots) share batches;
            each is compiled.
        samples: k of Pass@k, rollouts under noise for each problem and seed; 0 is Acc alone.
        seeds: seeds of the noise, for Pass@k and its standard error.
        dropout: dropout rate of these rollouts; None is config.dropout.rate.
        temperature: temperature of the answers in these rollouts, which are greedy in Acc; 0 is greedy here too.
        top_k: likeliest tokens that they are sampled from; 0 is all.
        top_p: then the likeliest of these that have this probability together; 1 is all.
        max_answer_tokens: A, the maximum number of new tokens; None is config.max_answer_tokens.
        scorers: the report has best-of-k and score-weighted votes by each.
        reward_model: model of the scorer latent_rm: WORKDIR/checkpoints/latent_rm of another run, or one in its
            authors' layout, a directory, file or hub id; "" is this run's.
        beams: beams of a search over latents by latent_rm, see `policy.scorers.beam_search`; 0 is none.
        candidates: candidates for each beam's next latent.
        by_steps: without a gate, a problem's thought has as many latents as the problem has steps, T at most: it is
            told how far to think, as in the published evaluation of recipe frontier.
        thresholds: the gate's thresholds that are tried on the validation split.
        probed: problems a set whose latents' stop probabilities and likeliest tokens are kept.
        save_latents: also write eval/ROW/NAME.latents.npz.
    """

    datasets: tuple[str, ...] | None = None
    limit: int = setting(0, least=0, note="0 is all problems")
    batch_size: int = setting(512, least=1)
    prompt_multiple: int = setting(32, least=1)
    samples: int = setting(16, least=0, note="0 is Acc alone")
    seeds: int = setting(3, least=1)
    dropout: float | None = setting(
        None, least=0, below=1, note="None is config.dropout.rate"
    )
    temperature: float = setting(0.0, least=0)
    top_k: int = setting(
        0,
        least=0,
        note="0 is all",
    )
    top_p: float = setting(
        1.0,
        above=0,
        most=1,
    )
    max_answer_tokens: int | None = setting(
        None, least=1, note="None is config.max_answer_tokens"
    )
    scorers: tuple[str, ...] = ()
    reward_model: str = ""
    beams: int = setting(0, least=0, note="0 is none")
    candidates: int = setting(8, least=1)
    by_steps: bool = setting(False)
    thresholds: tuple[float, ...] = setting(
        (0.5, 0.6, 0.7, 0.8, 0.9), least=0, most=1, fewest=1
    )
    probed: int = setting(
        20,
        least=0,
        note="0 is none",
    )
    save_latents: bool = False

    @property
    def used_seeds(self) -> int:
        """The seeds of Pass@k, 0 without samples."""
        return self.seeds if self.samples else 0

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("thresholds", "datasets", "scorers"):
            values = getattr(self, name) or ()
            if len(set(values)) < len(values):
                raise FieldError(self, name, "give each once")


class RolloutBatch(NamedTuple):
    """Rollouts of one call: prompts of B rows, and for N rollouts, N/B consecutive ones of each prompt, which they are.

    Attributes:
        index_N, sample_N: int32, problem and number of the sample.
        real_N: bool, False for what fills the batch up.
    """

    prompts: Prompts
    index_N: np.ndarray
    sample_N: np.ndarray
    real_N: np.ndarray


def classes(
    lengths_I: np.ndarray, slots: Sequence[int], together: int
) -> list[np.ndarray]:
    """List items whose prompts fit the same bucket, in whole batches; the others go with the next bucket's.

    Args:
        lengths_I: ascending.
        slots: ascending.
        together: items of a batch.
    Returns:
        int arrays, the indices of each class's items; only the last may have a part of a batch.
    """
    count = len(lengths_I)
    ends = np.searchsorted(lengths_I, slots, side="right")
    # What is left over in the longest prompts' own bucket stays with them.
    cuts = []
    for end in ends:
        if end < count:
            whole_batches = end // together
            cuts.append(whole_batches * together)
    parts = np.split(np.arange(count), cuts)
    return [part for part in parts if len(part)]


def shard(
    items: np.ndarray,
    rows: int,
    devices: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Cut items of ascending length into shards of `rows`, as many as whole batches take, of about equal lengths.

    Returns:
        int [shards, rows], and bool, whether it is not there only to fill up.
    """
    batches = -(-len(items) // (rows * devices))  # rounded up
    count = batches * devices
    shard_H = np.arange(count)[:, None]
    row_R = np.arange(rows)
    # To and fro: who gets the longest of one round gets the shortest of the next.
    backwards_H = count - 1 - shard_H
    place_HR = np.where(row_R % 2, backwards_H, shard_H)
    items_HR = count * row_R + place_HR

    # The last item fills up what is left.
    real_HR = items_HR < len(items)
    filled_HR = np.minimum(items_HR, len(items) - 1)
    return items[filled_HR], real_HR


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
        self.policy = policy
        self.mesh = mesh
        self.key = key
        self.search = search
        self.scorers = scorers
        self.batch_size = -(-batch_size // mesh.size) * mesh.size  # a multiple
        self.prompt_slots = tuple(sorted(prompt_slots))
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
        """Make (params, prompts, index_N, sample_N, real_N, key, rule_N) -> `Completions`."""
        policy = self.policy
        if not noisy:
            policy = policy.without_noise()
        policy = policy.with_config(stopping=stopping)
        if not thinks:
            policy = policy.with_config(max_latents=0)

        def local(params, prompts, index_N, sample_N, real_N, key, rule_N):
            if searched:
                out = beam_search(
                    policy, params, prompts, key, index_N, rule_N, *self.search
                )
                return {"tokens": out.completions, "latent_steps": out.lengths}
            keys_N = noise.row_keys(key, index_N, sample_N)
            out = sample(policy, params, prompts, keys_N, rule_N, real_N)
            values = {"tokens": out.completions, "latent_steps": out.lengths}
            if out.said is not None:
                values["written_steps"] = out.lengths
            if keep_latents:
                latents = policy.latent_policy.feed(params, out.actions)
                values["latents"] = latents.astype(jnp.float32)
            if probed:
                probes = probe(
                    policy,
                    params,
                    prompts,
                    out.actions,
                    out.lengths,
                )
                stop, likeliest_probability, likeliest_token = probes
                values["stop"] = stop
                values["likeliest_probability"] = likeliest_probability
                values["likeliest_token"] = likeliest_token
            if reads:
                latents = policy.latent_policy.feed(params, out.actions)
                values["words"] = explain(policy, params, latents, reads)
            if noisy:
                for name in self.scorers:
                    values[name] = score_rollouts(name, policy, params, prompts, out)
            return values

        specs = (EVERYWHERE, ROWS, ROWS, ROWS, ROWS, EVERYWHERE, ROWS)
        return over_rows(local, self.mesh, specs)

    def batches(
        self, problems: EncodedProblems, count: int, samples: int
    ) -> Iterator[RolloutBatch]:
        """Yield the rollouts of the first `count` problems, `samples` of each.

        Problems whose prompts fit the same bucket make up a class; a class is sharded so that every device has about as
        many tokens in every batch, and prompts that are padded a lot are encoded end to end. Batches are halved while a
        quarter would do, so that few problems cost little and few shapes compile.
        """
        devices = self.mesh.size
        slots = self.prompt_slots
        lengths = np.array([len(prompt) for prompt in problems.prompts[:count]])

        # A prompt is encoded once for as many of its rollouts as divide its samples and fit a batch.
        copies = 1
        for n in range(2, samples + 1):
            if samples % n == 0 and n * devices <= self.batch_size:
                copies = n
        items_each = samples // copies  # of a problem
        # The rows of a device are prompts, and fewer where the problems are few.
        rows = max(self.batch_size // (copies * devices), 1)
        while rows > 1 and rows * devices >= 4 * count * items_each:
            rows //= 2

        # A problem's samples may be several items, of `copies` rollouts.
        by_length = np.argsort(lengths, kind="stable")
        index_I = np.repeat(by_length, items_each)
        offsets = np.arange(0, samples, copies)
        offset_I = np.tile(offsets, count)
        for items in classes(lengths[index_I], slots, rows * devices):
            # All batches of a class have the width of its longest prompt's bucket.
            longest = lengths[index_I[items[-1]]]
            width = min(size for size in slots if size >= longest)
            shards, real_SR = shard(items, rows, devices)
            index_SR = index_I[shards]
            # Of what fills a batch up, one token.
            lengths_SR = np.where(real_SR, lengths[index_SR], 1)
            longest_shard = int(lengths_SR.sum(axis=1).max())
            packed_slots = end_to_end(longest_shard, rows, width)
            # A batch has a shard for each device.
            for first in range(0, len(shards), devices):
                batch = slice(first, first + devices)
                index_B = index_SR[batch].reshape(-1)
                lengths_B = lengths_SR[batch].reshape(-1)
                real_B = real_SR[batch].reshape(-1)
                prompts = []
                for i, length in zip(index_B, lengths_B, strict=True):
                    prompt = problems.prompts[i]
                    prompts.append(prompt[-length:])
                pad_id = problems.template.pad_id
                tokens, valid = pad_prompts(prompts, (width,), pad_id)
                # The rollouts of a prompt stand together.
                index_N = np.repeat(index_B, copies)
                real_N = np.repeat(real_B, copies)
                offset_B = offset_I[shards[batch]].reshape(-1)
                sample_BE = offset_B[:, None] + np.arange(copies)
                sample_N = sample_BE.reshape(-1)
                yield RolloutBatch(
                    Prompts(tokens, valid, packed_slots),
                    index_N.astype(np.int32),
                    sample_N.astype(np.int32),
                    real_N,
                )

    def _noise_key(self, seed: int | None, name: str) -> jax.Array:
        key = noise.stream_key(self.key, "evaluate", seed or 0)
        if not name:
            return key
        checksum = zlib.crc32(name.encode())
        return jax.random.fold_in(key, checksum)

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
        rules, thinks = _rules_of(stopping, rule, count)
        program = self.program(
            seed is not None, stopping, keep_latents, probed, reads, searched, thinks
        )
        key = self._noise_key(seed, name)
        total = count * samples

        # What an earlier run left.
        results = cache.batches() if cache else []
        is_known = np.zeros(total, bool)
        for batch in results:
            is_known[batch[PLACES]] = True
        # All have read what there is before the first adds to it.
        hosts.barrier("evaluation")

        # Only batches with a rollout that is not known yet are begun.
        def begin_batches() -> Iterator[tuple[int, np.ndarray, np.ndarray, Any]]:
            for number, batch in enumerate(self.batches(problems, count, samples)):
                index_N = batch.index_N.astype(np.int64)
                rows_N = index_N * samples + batch.sample_N
                known = is_known[rows_N[batch.real_N]]
                is_finished = bool(known.all())
                folder = cache and cache.folder
                if not hosts.all_processes_agree(is_finished, folder):
                    out = program(params, *self._arguments(batch, key, rules))
                    yield number, rows_N, batch.real_N, out

        bar = Progress(label, total, unit="rollout", keep=False)
        with contextlib.closing(bar) as progress:
            # So that one is always under way.
            for number, rows_N, real_N, out in _prefetch_one(begin_batches()):
                batch = {PLACES: rows_N[real_N]}
                for name, values in out.items():
                    batch[name] = hosts.gather_to_host(values)[real_N]
                if cache:
                    cache.add(number, batch)
                results.append(batch)
                is_known[batch[PLACES]] = True
                progress.update(int(is_known.sum()))
        return in_order(results)

    def _arguments(
        self, batch: RolloutBatch, key: jax.Array, rules: np.ndarray
    ) -> tuple[Any, ...]:
        """Return what a program takes after the parameters, on the devices."""
        rows = shard_rows(
            (batch.prompts, batch.index_N, batch.sample_N, batch.real_N), self.mesh
        )
        rule_N = rules[batch.index_N]
        return *rows, key, shard_rows(rule_N, self.mesh)

    def milliseconds(
        self,
        params: Any,
        problems: EncodedProblems,
        stopping: Stopping,
        rule: float | int | Sequence[int],
        limit: int = 0,
    ) -> tuple[float, int]:
        """Time the first batch of a set's deterministic pass: once to compile it and warm up, then for the figure.

        Args:
            params, problems, stopping, rule, limit: as of `run`.
        Returns:
            milliseconds of the batch by its answers, and the number of these.
        """
        count = min(limit or len(problems), len(problems))
        rules, thinks = _rules_of(stopping, rule, count)
        program = self.program(
            False,
            stopping,
            False,
            False,
            None,
            False,
            thinks,
        )
        batch = next(self.batches(problems, count, 1))
        key = self._noise_key(None, "")
        arguments = self._arguments(batch, key, rules)
        seconds = list[float]()
        for _ in range(1 + _TIMED):
            start = time.perf_counter()
            jax.block_until_ready(program(params, *arguments))
            elapsed = time.perf_counter() - start
            seconds.append(elapsed)
        fastest = min(seconds[1:])
        answers = int(batch.real_N.sum())
        return 1000 * fastest / answers, answers


def _rules_of(
    stopping: Stopping, rule: float | int | Sequence[int], count: int
) -> tuple[np.ndarray, bool]:
    """Return the rule of each of so many problems, and whether any of them is thought about."""
    by_threshold = stopping == "threshold"
    dtype = np.float32 if by_threshold else np.int32
    given = np.asarray(rule, dtype)
    rules = np.broadcast_to(given, count)
    # A thought of no latents may end with a marker all the same.
    thinks = by_threshold or bool(rules.any())
    return rules, thinks


def _prefetch_one(items: Iterable[T]) -> Iterator[T]:
    """Yield each item once the next one is there."""
    queue = list[T]()
    for item in items:
        yield from queue
        queue = [item]
    yield from queue
