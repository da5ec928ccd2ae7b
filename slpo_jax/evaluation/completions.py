"""Completions of a problem set: whether they are right, and the lines that are kept of them."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from slpo_jax.data.batches import EncodedProblems
from slpo_jax.data.problem import Problem
from slpo_jax.errors import UserError
from slpo_jax.policy.explain import Reads
from slpo_jax.policy.scorers import SCORERS
from slpo_jax.rewards.answers import in_one_form
from slpo_jax.rewards.reward import Reading, Reward

_AT_ONCE = 64  # problems whose completions are judged together

Completions = dict[str, np.ndarray]
"""Rollouts of a problem set, in its order: arrays [N, ..] of what is known of a rollout, by name.

tokens, int32 [N, A], or [N, T + A] where thoughts are written down, see `Trajectories.completions`; latent_steps, int32
[N], and where thoughts are written down the same as written_steps; and if asked for, latents, float32 [N, T, D], and
float32 [N] under each scorer's name; and of what is probed,
`probe`'s stop, [N, T], nearest_probability and nearest_token, [N, T, K], and where thoughts can be said in words, those
(`policy.explain`).
"""


def accuracy(reward: Reward, problems: EncodedProblems, completions: Completions) -> float:
    """Return the share of problems (one completion each, from the first on) whose completion is right."""
    rows = zip(completions["tokens"], completions["latent_steps"], strict=True)
    readings = [reward.read(tokens, latents) for tokens, latents in rows]
    return float(np.mean(reward.right(readings, problems.problems[: len(readings)])))


def scored(completions: Completions, samples: int) -> Completions:
    """Make scores weights of votes: e to those that are logarithms, as shares of the largest of a problem's.

    Raises:
        UserError: one is no finite number of 0 or more.
    """
    values = dict(completions)
    for name in values.keys() & SCORERS.keys():
        values[name] = values[name].astype(np.float64)
        if SCORERS[name].log:
            score_PM = values[name].reshape(-1, samples)
            values[name] = np.exp(score_PM - score_PM.max(axis=1, keepdims=True)).reshape(-1)
        if wrong := values[name][~(np.isfinite(values[name]) & (values[name] >= 0))].tolist():
            raise UserError(
                f"config.evaluate.scorers: {name} gives {wrong[0]}; return a finite number of 0 or more each"
            )
    return values


def record_rows(
    reward: Reward,
    problems: EncodedProblems,
    greedy: Completions,
    sampled: dict[int, Completions],
    samples: int,
    searched: dict[int, Completions] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the JSON lines of `eval/ROW/SET.jsonl`, one a problem.

    A sample whose answer is another's in other words, such as 1/2 for 0.5, has the first of these as its `vote`.

    Args:
        greedy: the deterministic rollouts.
        sampled: by dropout seed, `samples` rollouts a problem.
        searched: by dropout seed, one of each problem.
    """
    sampled = {seed: scored(completions, samples) for seed, completions in sampled.items()}
    searched = searched or {}

    def rows_of(index: int) -> list[tuple[int, Completions, int]]:
        return [(seed, rollouts, index * samples + m) for seed, rollouts in sampled.items() for m in range(samples)]

    def readings_of(index: int) -> list[Reading]:
        places = [(greedy, index), *((rollouts, row) for _, rollouts, row in rows_of(index))]
        places += [(rollouts, index) for rollouts in searched.values()]
        return [reward.read(rollouts["tokens"][row], rollouts["latent_steps"][row]) for rollouts, row in places]

    judged = _judged(reward, problems.problems, readings_of, len(greedy["tokens"]))
    for index, ((first, *readings), (correct, *right)) in enumerate(judged):
        problem, steps, rows = problems.problems[index], greedy["latent_steps"][index], rows_of(index)
        tries, searches = readings[: len(rows)], readings[len(rows) :]
        votes = in_one_form([reading.answer for reading in tries], reward.style, [problem.answer])
        chosen = [
            {"seed": seed, "answer": reading.answer, "correct": hit}
            for seed, reading, hit in zip(searched, searches, right[len(tries) :], strict=True)
        ]
        written = {"written_steps": int(steps)} if "written_steps" in greedy else {}
        yield {
            "index": index,
            "question": problem.question,
            "reference": problem.answer,
            "completion": first.text,
            "completion_tokens": first.ids,
            "answer": first.answer,
            "latent_steps": int(steps),
            **written,
            "cut": first.cut,
            "correct": correct,
            "problem_steps": len(problem.steps) or None,
            "samples": [
                _sample(*place, reading, hit) | ({} if vote == reading.answer else {"vote": vote})
                for place, reading, vote, hit in zip(rows, tries, votes, right[: len(rows)], strict=True)
            ],
        } | ({"searched": chosen} if chosen else {})


def _sample(seed: int, rollouts: Completions, row: int, reading: Reading, correct: bool) -> dict[str, Any]:
    scores = {name: float(rollouts[name][row]) for name in rollouts if name in SCORERS}
    return {
        "seed": seed,
        "completion": reading.text,
        "answer": reading.answer,
        "latent_steps": int(rollouts["latent_steps"][row]),
        "cut": reading.cut,
        "correct": correct,
    } | ({"scores": scores} if scores else {})


def _judged(
    reward: Reward, problems: Sequence[Problem], readings_of: Callable[[int], list[Reading]], count: int
) -> Iterator[tuple[list[Reading], list[bool]]]:
    """Yield each problem's readings, and which are right; of many at once, as several processes may be asked."""
    for start in range(0, count, _AT_ONCE):
        places = range(start, min(start + _AT_ONCE, count))
        several = [readings_of(index) for index in places]
        problems_of = [problems[index] for index, group in zip(places, several, strict=True) for _ in group]
        right = iter(reward.right([reading for group in several for reading in group], problems_of))
        for group in several:
            yield group, list(itertools.islice(right, len(group)))


def in_words(reward: Reward, words_SL: np.ndarray, step: int, reads: Reads) -> str | None:
    """Decode the thought that ends with the latent of this step, counted from 0; None where none does."""
    thought, remainder = divmod(step + 1, reads[0])
    if remainder:
        return None
    reading = reward.read(words_SL[thought - 1])
    return reading.text.strip() + (" ..." if reading.cut else "")


def thought_rows(
    reward: Reward, texts: Sequence[str], probed: Completions, gated: bool, reads: Reads | None = None
) -> Iterator[dict[str, Any]]:
    """Yield what `SET.thoughts.json` says of rollouts that were probed, one a problem.

    Args:
        texts: of each token.
        probed: the deterministic rollouts of a set's first problems, probed.
        gated: whether a trained gate chooses the number of latents; otherwise its probabilities mean nothing.
        reads: how thoughts were said in words, if they were.
    """
    for index, steps in enumerate(probed["latent_steps"]):
        latents = []
        for t in range(steps):
            nearest = zip(probed["nearest_token"][index, t], probed["nearest_probability"][index, t], strict=True)
            stop = round(float(probed["stop"][index, t]), 4) if gated else None
            words = {"words": in_words(reward, probed["words"][index], t, reads)} if reads else {}
            near = [[texts[token], round(float(p), 4)] for token, p in nearest]
            latents.append({"stop": stop, "nearest": near, **words})
        yield {"text": reward.read(probed["tokens"][index]).text, "latents": latents}
