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
`probe`'s stop, [N, T], likeliest_probability and likeliest_token, [N, T, K], and where thoughts can be said in words,
those (`policy.explain`).
"""


def accuracy(
    reward: Reward, problems: EncodedProblems, completions: Completions
) -> float:
    """Return the share of problems (one completion each, from the first on) whose completion is right."""
    count = len(completions["tokens"])
    readings = [_read(reward, completions, row) for row in range(count)]
    right = reward.right(readings, problems.problems[:count])
    return float(np.mean(right))


def _read(reward: Reward, completions: Completions, row: int) -> Reading:
    tokens = completions["tokens"][row]
    steps = completions["latent_steps"][row]
    return reward.read(tokens, steps)


def scale_scores(completions: Completions, samples: int) -> Completions:
    """Make scores weights of votes: e to those that are logarithms, as shares of the largest of a problem's.

    Raises:
        UserError: one is no finite number of 0 or more.
    """
    values = dict(completions)
    for name in values.keys() & SCORERS.keys():
        scores = values[name].astype(np.float64)
        # Of logarithms only the differences within a problem count.
        if SCORERS[name].log:
            scores_PM = scores.reshape(-1, samples)
            largest_P1 = scores_PM.max(axis=1, keepdims=True)
            shares_PM = np.exp(scores_PM - largest_P1)
            scores = shares_PM.reshape(-1)
        is_weight = np.isfinite(scores) & (scores >= 0)
        wrong = scores[~is_weight].tolist()
        if wrong:
            raise UserError(
                f"config.evaluate.scorers: {name} gives {wrong[0]}; return a finite number of 0 or more each"
            )
        values[name] = scores
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
    scaled: dict[int, Completions] = {}
    for seed, rollouts in sampled.items():
        scaled[seed] = scale_scores(rollouts, samples)
    searched = searched or {}

    def samples_of(index: int) -> list[tuple[int, Completions, int]]:
        """List a problem's samples: seed, the rollouts of that seed, and the row among them."""
        places = []
        for seed, rollouts in scaled.items():
            for m in range(samples):
                row = index * samples + m
                places.append((seed, rollouts, row))
        return places

    def readings_of(index: int) -> list[Reading]:
        readings = [_read(reward, greedy, index)]
        for _, rollouts, row in samples_of(index):
            readings.append(_read(reward, rollouts, row))
        for rollouts in searched.values():
            readings.append(_read(reward, rollouts, index))
        return readings

    judged = _judge(
        reward,
        problems.problems,
        readings_of,
        len(greedy["tokens"]),
    )
    for index, (readings, right) in enumerate(judged):
        problem = problems.problems[index]
        places = samples_of(index)
        last = 1 + len(places)
        first = readings[0]
        steps = int(greedy["latent_steps"][index])
        line: dict[str, Any] = {
            "index": index,
            "question": problem.question,
            "reference": problem.answer,
            "completion": first.text,
            "completion_tokens": first.ids,
            "answer": first.answer,
            "latent_steps": steps,
        }
        if "written_steps" in greedy:
            line["written_steps"] = steps
        line |= {
            "cut": first.cut,
            "correct": right[0],
            "problem_steps": len(problem.steps) or None,
        }

        # Equal answers of samples have one vote.
        tries = readings[1:last]
        answers = [reading.answer for reading in tries]
        votes = in_one_form(answers, reward.style, [problem.answer])
        line["samples"] = []
        for place, reading, vote, hit in zip(
            places, tries, votes, right[1:last], strict=True
        ):
            sample = _sample(*place, reading, hit)
            if vote != reading.answer:
                sample["vote"] = vote
            line["samples"].append(sample)

        # What was searched for, one rollout a seed.
        chosen = []
        for seed, reading, hit in zip(
            searched, readings[last:], right[last:], strict=True
        ):
            chosen.append({"seed": seed, "answer": reading.answer, "correct": hit})
        if chosen:
            line["searched"] = chosen
        yield line


def _sample(
    seed: int, rollouts: Completions, row: int, reading: Reading, correct: bool
) -> dict[str, Any]:
    sample: dict[str, Any] = {
        "seed": seed,
        "completion": reading.text,
        "answer": reading.answer,
        "latent_steps": int(rollouts["latent_steps"][row]),
        "cut": reading.cut,
        "correct": correct,
    }
    scores = {}
    for name, values in rollouts.items():
        if name in SCORERS:
            scores[name] = float(values[row])
    if scores:
        sample["scores"] = scores
    return sample


def _judge(
    reward: Reward,
    problems: Sequence[Problem],
    readings_of: Callable[[int], list[Reading]],
    count: int,
) -> Iterator[tuple[list[Reading], list[bool]]]:
    """Yield each problem's readings, and which are right; of many at once, as several processes may be asked."""
    for start in range(0, count, _AT_ONCE):
        # The readings of many problems in one list, beside the problem of each.
        groups = []
        readings = []
        asked = []
        end = min(start + _AT_ONCE, count)
        for index in range(start, end):
            group = readings_of(index)
            groups.append(group)
            readings += group
            asked += [problems[index]] * len(group)
        # Their verdicts, handed back problem by problem.
        right = iter(reward.right(readings, asked))
        for group in groups:
            verdicts = itertools.islice(right, len(group))
            yield group, list(verdicts)


def in_words(
    reward: Reward, words_SL: np.ndarray, step: int, reads: Reads
) -> str | None:
    """Decode the thought that ends with the latent of this step, counted from 0; None where none does."""
    thought, remainder = divmod(step + 1, reads[0])
    if remainder:
        return None
    reading = reward.read(words_SL[thought - 1])
    text = reading.text.strip()
    if reading.cut:
        text += " ..."
    return text


def thought_rows(
    reward: Reward,
    texts: Sequence[str],
    probed: Completions,
    gated: bool,
    reads: Reads | None = None,
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
            latent: dict[str, Any] = {"stop": None, "likeliest": []}
            if gated:
                stop = float(probed["stop"][index, t])
                latent["stop"] = round(stop, 4)
            tokens = probed["likeliest_token"][index, t]
            probabilities = probed["likeliest_probability"][index, t]
            for token, p in zip(tokens, probabilities, strict=True):
                text = texts[token]
                probability = float(p)
                latent["likeliest"].append([text, round(probability, 4)])
            if reads:
                words_SL = probed["words"][index]
                latent["words"] = in_words(reward, words_SL, t, reads)
            latents.append(latent)
        reading = _read(reward, probed, index)
        yield {"text": reading.text, "latents": latents}
