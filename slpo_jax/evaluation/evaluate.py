"""Batched evaluation of one checkpoint on one problem set: greedy accuracy, samples under noise."""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from slpo_jax.data.batches import EncodedProblems
from slpo_jax.errors import UserError, in_a_line
from slpo_jax.evaluation.rollout_cache import Batch, RolloutCache
from slpo_jax.evaluation.schedule import RolloutBatch, rollout_batches
from slpo_jax.io import hosts
from slpo_jax.io.mesh import EVERYWHERE, ROWS, over_rows, shard_rows
from slpo_jax.io.progress import Progress
from slpo_jax.policy import noise
from slpo_jax.policy.beam import beam_search
from slpo_jax.policy.explain import Reads, explain, reads_of
from slpo_jax.policy.policy import Policy, Stopping
from slpo_jax.policy.probe import probe
from slpo_jax.policy.prompted import Prompts
from slpo_jax.policy.rollout import Trajectories, sample
from slpo_jax.policy.scorers import SCORERS
from slpo_jax.rewards.answers import in_one_form
from slpo_jax.rewards.reward import Reading, Reward


@dataclasses.dataclass(frozen=True)
class Completions:
    """Rollouts of a problem set, in its order.

    Attributes:
        values: arrays [N, ..] of what is known of a rollout, by name: tokens, int32 [N, A], or [N, T + A] where
            thoughts are written down, see `Trajectories.completions`; latent_steps, int32 [N]; and if asked for,
            latents, float32 [N, T, D], and float32 [N] under each scorer's name; and of what is probed, `probe`'s
            stop, [N, T], nearest_probability and nearest_token, [N, T, K], and where thoughts can be said in words,
            those (`policy.explain`).
    """

    values: dict[str, np.ndarray]

    @property
    def tokens(self) -> np.ndarray:
        return self.values["tokens"]

    @property
    def latent_steps(self) -> np.ndarray:
        return self.values["latent_steps"]


class Evaluator:
    """Jitted rollouts over whole problem sets; one compiled program a shape of `rollout_batches` and mode.

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
        self.scorers, self.search = tuple(scorers), search
        self.policy, self.mesh = policy, mesh
        self.batch_size = -(-batch_size // mesh.size) * mesh.size
        self.prompt_slots, self.key = tuple(sorted(prompt_slots)), key
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
        """(params, prompts, index_N, sample_N, real_N, key, rule_N) -> `Completions.values`."""
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
        """`rollout_batches` of this evaluator's sizes."""
        return rollout_batches(problems, count, samples, self.batch_size, self.mesh.size, self.prompt_slots)

    def run(
        self,
        params: Any,
        problems: EncodedProblems,
        stopping: Stopping,
        rule: float | int | Sequence[int],
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
        results = cache.batches() if cache else []
        known = np.isin(np.arange(count * samples), [row for batch in results for row in batch.rows])
        hosts.barrier("evaluation")  # all have read what there is before the first adds to it
        progress, pending = Progress(label, count * samples, unit="rollout", keep=False), None
        for number, batch in enumerate(self.batches(problems, count, samples)):
            rows_N = batch.index_N.astype(np.int64) * samples + batch.sample_N
            if hosts.decided(bool(known[rows_N[batch.real_N]].all())):
                continue
            rows = shard_rows((batch.prompts, batch.index_N, batch.sample_N, batch.real_N), self.mesh)
            out = program(params, *rows, key, shard_rows(rules[batch.index_N], self.mesh))
            if pending is not None:  # wait for the batch before, so that one is always under way
                results.append(_finished(*pending, cache))
                known[results[-1].rows] = True
                progress.update(int(known.sum()))
            pending = number, rows_N, batch.real_N, out
        if pending is not None:
            results.append(_finished(*pending, cache))
        progress.close()
        return _in_order(results, count * samples)


def _finished(number: int, rows_N: np.ndarray, real_N: np.ndarray, out: Any, cache: RolloutCache | None) -> Batch:
    """A batch's rollouts on the host, without what filled it up."""
    batch = Batch(rows_N[real_N], {name: hosts.whole(values)[real_N] for name, values in out.items()})
    if cache:
        cache.add(number, batch)
    return batch


def _in_order(results: list[Batch], rows: int) -> Completions:
    def merged(parts: list[Any]) -> np.ndarray:
        whole = np.zeros((rows, *parts[0].shape[1:]), parts[0].dtype)
        for batch, part in zip(results, parts, strict=True):
            whole[batch.rows] = part
        return whole

    return Completions({name: merged([batch.values[name] for batch in results]) for name in results[0].values})


def _scored(name: str, policy: Policy, params: Any, prompts: Prompts, out: Trajectories) -> jax.Array:
    """What a scorer says of each rollout.

    Raises:
        UserError: it fails, or says something else than a number of each.
    """
    try:
        score_N = jnp.asarray(SCORERS[name].score(policy, params, prompts, out), jnp.float32)
    except Exception as error:  # it may be the user's code, and can raise anything
        raise UserError(f"config.evaluate.scorers: {name}: {in_a_line(error)}; mend it") from error
    if score_N.shape != out.lengths.shape:
        raise UserError(
            f"config.evaluate.scorers: {name} gives the shape {score_N.shape} and not {out.lengths.shape}; return a "
            "number of each rollout"
        )
    return score_N


def _scores(values: dict[str, Any]) -> dict[str, dict[str, float]]:
    """What a sample's record says of its scores.

    Raises:
        UserError: one is no finite number of 0 or more.
    """
    found = {name: np.asarray(score, np.float64) for name, score in values.items() if name in SCORERS}
    for name, score in found.items():
        if not (np.isfinite(score) and score >= 0):
            raise UserError(f"config.evaluate.scorers: {name} gives {score}; return a finite number of 0 or more each")
    return {"scores": {name: float(score) for name, score in found.items()}} if found else {}


def _weighted(completions: Completions, samples: int) -> Completions:
    """With e to the scores that are logarithms, as shares of the largest one of a problem's."""
    values = dict(completions.values)
    for name in values.keys() & SCORERS.keys():
        if SCORERS[name].log:
            score_PM = values[name].astype(np.float64).reshape(-1, samples)
            values[name] = np.exp(score_PM - score_PM.max(axis=1, keepdims=True)).reshape(-1)
    return Completions(values)


def accuracy(reward: Reward, problems: EncodedProblems, completions: Completions) -> float:
    """Share of problems (one completion each, from the first on) whose completion is right."""
    asked = problems.problems[: len(completions.tokens)]
    return float(np.mean(reward.right([reward.read(tokens) for tokens in completions.tokens], asked)))


def record_rows(
    reward: Reward,
    problems: EncodedProblems,
    greedy: Completions,
    sampled: dict[int, Completions],
    samples: int,
    searched: dict[int, Completions] | None = None,
) -> Iterator[dict[str, Any]]:
    """The JSON lines of `eval/ROW/SET.jsonl`, one a problem.

    A sample whose answer is another's in other words, such as 1/2 for 0.5, has the first of these as its `vote`.

    Args:
        greedy: the deterministic rollouts.
        sampled: by dropout seed, `samples` rollouts a problem.
        searched: by dropout seed, one of each problem.
    """
    sampled = {seed: _weighted(completions, samples) for seed, completions in sampled.items()}
    for index, (tokens, steps) in enumerate(zip(greedy.tokens, greedy.latent_steps, strict=True)):
        problem, first = problems.problems[index], reward.read(tokens)
        drawn: list[tuple[int, Reading, dict[str, Any]]] = [
            (seed, reward.read(completions.tokens[row]), {name: of[row] for name, of in completions.values.items()})
            for seed, completions in sampled.items()
            for row in range(index * samples, (index + 1) * samples)
        ]
        found = [(seed, reward.read(completions.tokens[index])) for seed, completions in (searched or {}).items()]
        readings = [first, *(reading for _, reading, _ in drawn), *(reading for _, reading in found)]
        correct, *right = reward.right(readings, [problem] * len(readings))
        votes = in_one_form([reading.answer for _, reading, _ in drawn], reward.style, [problem.answer])
        chosen = [
            {"seed": seed, "answer": reading.answer, "correct": hit}
            for (seed, reading), hit in zip(found, right[len(drawn) :], strict=True)
        ]
        yield {
            "index": index,
            "question": problem.question,
            "reference": problem.answer,
            "completion": first.text,
            "completion_tokens": first.ids,
            "answer": first.answer,
            "latent_steps": int(steps),
            "cut": first.cut,
            "correct": correct,
            "problem_steps": len(problem.steps) or None,
            "samples": [
                {
                    "seed": seed,
                    "completion": reading.text,
                    "answer": reading.answer,
                    "latent_steps": int(values["latent_steps"]),
                    "cut": reading.cut,
                    "correct": hit,
                    **({} if vote == reading.answer else {"vote": vote}),
                    **_scores(values),
                }
                for (seed, reading, values), vote, hit in zip(drawn, votes, right[: len(drawn)], strict=True)
            ],
        } | ({"searched": chosen} if chosen else {})


def in_words(reward: Reward, words_SL: np.ndarray, step: int, reads: Reads) -> str | None:
    """What the thought says that ends with the latent of this step, counted from 0; None where none does."""
    thought, rest = divmod(step + 1, reads[0])
    if rest:
        return None
    reading = reward.read(words_SL[thought - 1])
    return reading.text.strip() + (" ..." if reading.cut else "")


def thought_rows(
    reward: Reward, texts: Sequence[str], seen: Completions, gated: bool, reads: Reads | None = None
) -> Iterator[dict[str, Any]]:
    """What `SET.thoughts.json` says of rollouts that were probed, one a problem.

    Args:
        texts: of each token.
        seen: the deterministic rollouts of a set's first problems, probed.
        gated: whether a trained gate chooses the number of latents; otherwise its probabilities mean nothing.
        reads: how thoughts were said in words, if they were.
    """
    values = seen.values
    for index, steps in enumerate(seen.latent_steps):
        latents = []
        for t in range(steps):
            nearest = zip(values["nearest_token"][index, t], values["nearest_probability"][index, t], strict=True)
            stop = round(float(values["stop"][index, t]), 4) if gated else None
            words = {"words": in_words(reward, values["words"][index], t, reads)} if reads else {}
            near = [[texts[token], round(float(p), 4)] for token, p in nearest]
            latents.append({"stop": stop, "nearest": near, **words})
        yield {"text": reward.read(seen.tokens[index]).text, "latents": latents}
