"""Figures of an evaluation and how sure they are (paper, "Inference and Evaluation" and the difficulty section).

Pure functions of numpy arrays. Axes: S dropout seeds, N problems, M samples a seed.
All rates are fractions. Two errors are kept apart:

* `_se`, over problems: how far another draw of N problems would move the figure. It is the one to compare rows by.
* `_seed_se`, over the S dropout seeds on these very problems: the spread of the paper's protocol (R = 3 there).
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from slpo_jax.evaluation.records import EvalRecords
from slpo_jax.evaluation.selection import best_of, weighted_vote
from slpo_jax.policy.subsets import solved_share

FEWEST_VOTES = 4  # of a majority


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [1 << place for place in range(most.bit_length())]


def pass_ks(samples: int) -> list[int]:
    """The k of Pass@k that samples allow: the powers of two, and their very number."""
    return sorted({*powers_of_two(samples), samples} - {0})


class Correlation(NamedTuple):
    """Pearson's r, its two-sided p, and the number of pairs; r and p None where they are undefined."""

    r: float | None
    p: float | None
    n: int


def most_k(records: EvalRecords) -> int:
    """The largest k of Pass@k: the samples of a seed, or the seeds where each has one; 0 without samples."""
    seeds, _, per_seed = records.sample_correct.shape
    return per_seed if per_seed > 1 else seeds * per_seed


def proportion_se(rate: float, n: int) -> float:
    """Standard error of a proportion, sqrt(p (1 - p) / n). It is 0 at p = 0 and 1, where it means nothing."""
    return math.sqrt(rate * (1.0 - rate) / n)


def mean_se(values: np.ndarray) -> float | None:
    """Standard error of a mean, s / sqrt(n) with Bessel's correction, of values [n]; None for n < 2."""
    return float(np.std(values, ddof=1) / math.sqrt(values.size)) if values.size > 1 else None


def wilson(rate: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion of n, which has a width at 0 and 1 too (1927, JASA 22)."""
    z2 = 1.959964**2
    middle, half = rate + z2 / (2 * n), math.sqrt(z2 * (rate * (1 - rate) + z2 / (4 * n)) / n)
    return max(0.0, (middle - half) / (1 + z2 / n)), min(1.0, (middle + half) / (1 + z2 / n))


def pass_at_k_unbiased(n_correct: np.ndarray, n: int, k: int) -> np.ndarray:
    """Unbiased Pass@k from n samples: the share of k-subsets that hold a right one (`policy.subsets.solved_share`).

    Args:
        n_correct: [...] int, right samples c of each problem.
        n: samples drawn.
        k: subset size, 1 <= k <= n.

    Returns:
        [...] float, one estimate a problem.
    """
    if not 1 <= k <= n:
        raise ValueError(f"k={k} needs 1 <= k <= n={n}")
    return solved_share(n, np.asarray(n_correct), k)


def distinct_answers(sample_answers: np.ndarray) -> np.ndarray:
    """How many different answers the samples of a problem and seed have; all that have none count as one: int [S, N].

    Args:
        sample_answers: [S, N, M], equal ones in one form (`answers.in_one_form`).
    """
    return np.array([[len(set(answers)) for answers in of_seed] for of_seed in sample_answers])


def difficulty(records: EvalRecords) -> np.ndarray | None:
    """d_i = 1 - mean correctness of all samples of problem i (paper, difficulty section): [N], None without samples."""
    return 1.0 - records.sample_correct.mean(axis=(0, 2)) if records.sample_correct.size else None


def pearson(x: np.ndarray, y: np.ndarray) -> Correlation:
    """Pearson's r with its two-sided p over the pairs [N] where both are finite.

    Fewer than three pairs, or a side that doesn't vary, have no correlation: r = p = None.
    """
    keep = np.isfinite(x) & np.isfinite(y)
    x, y = np.asarray(x, np.float64)[keep], np.asarray(y, np.float64)[keep]
    if x.size < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return Correlation(None, None, int(x.size))
    from scipy import stats  # a second's import, which only reports need

    r, p = stats.pearsonr(x, y)
    return Correlation(float(r), float(p), int(x.size))


Values = dict[str, np.ndarray]


@dataclass(frozen=True)
class Metric:
    """A figure, or one for each k and scorer.

    Attributes:
        title: on the report's page; {0} and {1} are what the pattern of the name has in parentheses.
        about: its meaning, likewise.
        values: records -> by name, a value a problem [N], whose mean is the figure; of samples only where there are
            some. None: `summarise` has the figure itself.
        sampled: whether it is of the rollouts with noise.
        count: a mean of numbers; all others are shares.
    """

    title: str
    about: str
    values: Callable[[EvalRecords], Values] | None = None
    sampled: bool = False
    count: bool = False


def _of_subsets(name: str, share: Callable[[np.ndarray, int, int], np.ndarray], least: int = 1):
    """Metrics of subsets of k of all S*M samples, k of `pass_ks(most_k)` from `least` on.

    Args:
        share: (right samples c [N], n, k) -> [N].
    """

    def values(records: EvalRecords) -> Values:
        right, n = records.sample_correct.sum(axis=(0, 2)), records.sample_correct[:, 0].size
        return {f"{name}@{k}": share(right, n, k) for k in pass_ks(most_k(records)) if k >= least}

    return values


def _majorities(records: EvalRecords) -> Values:
    answers, correct = records.sample_answers, records.sample_correct
    ks = [k for k in pass_ks(correct.shape[2]) if k >= FEWEST_VOTES]
    return {f"maj@{k}": weighted_vote(answers, correct, k).mean(axis=0) for k in ks}


def _by_scores(name: str, choose: Callable[[EvalRecords, np.ndarray, int], np.ndarray]):
    """Metrics of the first k of a seed's samples, by every scorer; mean over seeds.

    Args:
        choose: (records, scores [S, N, M], k) -> [S, N].
    """

    def values(records: EvalRecords) -> Values:
        each = [(k, *scored) for scored in records.sample_scores.items() for k in pass_ks(scored[1].shape[2])]
        return {f"{name}@{k}_{scorer}": choose(records, scores, k).mean(axis=0) for k, scorer, scores in each}

    return values


METRICS = {
    "acc": Metric(
        "Acc",
        "Share of problems that the greedy rollout, without noise, gets right.",
        lambda records: {"acc": records.correct.astype(np.float64)},
    ),
    "latent_steps": Metric(
        "#L",
        "Mean number of latents of the greedy rollout.",
        lambda records: {"latent_steps": records.latent_steps.astype(np.float64)},
        count=True,
    ),
    "searched": Metric(
        "beam search",
        "Share of problems that the rollout whose latents were searched for is right on; mean over the noise's seeds.",
        lambda records: {"searched": records.searched_correct.mean(axis=1)} if records.searched_correct.size else {},
    ),
    r"pass@(\d+)": Metric(
        "P@{0}",
        """Share of problems that at least one of {0} rollouts with noise (dropout's, the latent policy's, sampled
        answers') gets right: the mean of 1 - C(n-c, {0}) / C(n, {0}), of all n rollouts of a problem c right. In
        parentheses the standard error over the noise's seeds.""",
        _of_subsets("pass", pass_at_k_unbiased),
        sampled=True,
    ),
    r"all@(\d+)": Metric(
        "all {0}",
        """Share of problems that {0} rollouts with noise all get right (pass^k of tau-bench): the mean of
        C(c, {0}) / C(n, {0}), of all n rollouts of a problem c right.""",
        _of_subsets("all", lambda right, n, k: 1.0 - pass_at_k_unbiased(n - right, n, k), least=2),
        sampled=True,
    ),
    r"maj@(\d+)": Metric(
        "maj@{0}",
        """Share of problems whose commonest answer among {0} rollouts with noise is right; equal ones (1/2, 0.5)
        are one. Of a tie the first seen counts; rollouts without an answer don't vote.""",
        _majorities,
        sampled=True,
    ),
    r"best@(\d+)_(\w+)": Metric(
        "best@{0} by {1}",
        "Share of problems whose rollout of {0} with the best {1} is right.",
        _by_scores("best", lambda records, scores, k: best_of(records.sample_correct, scores, k)),
        sampled=True,
    ),
    r"vote@(\d+)_(\w+)": Metric(
        "vote@{0} by {1}",
        "Share of problems whose answer with the largest sum of the score {1} among {0} rollouts is right.",
        _by_scores("vote", lambda rec, scores, k: weighted_vote(rec.sample_answers, rec.sample_correct, k, scores)),
        sampled=True,
    ),
    "distinct_answers": Metric(
        "answers",
        "Different answers among a problem's rollouts of a seed; none counts as one.",
        lambda records: {"distinct_answers": distinct_answers(records.sample_answers).mean(axis=0)},
        sampled=True,
        count=True,
    ),
    "sample_latent_steps": Metric(
        "#L, with noise",
        "Mean number of latents of the rollouts with noise.",
        lambda records: {"sample_latent_steps": records.sample_latent_steps.mean(axis=(0, 2))},
        sampled=True,
        count=True,
    ),
    "answer_tokens": Metric("tokens", "Mean number of tokens that the greedy rollout writes.", count=True),
    "cut": Metric("cut", "Share of greedy rollouts without an end within the budget of answer tokens: always wrong."),
    "sample_cut": Metric("cut, with noise", "The same share of the rollouts with noise."),
    "pearson_steps_r": Metric(
        "r, steps",
        "Pearson's correlation of a problem's latents with the steps of its written solution; p is two-sided.",
    ),
    "pearson_difficulty_r": Metric(
        "r, difficulty",
        """Pearson's correlation of a problem's latents with its difficulty, 1 - the share of its rollouts with noise
        that are right; p is two-sided.""",
    ),
}
"""By the pattern of the name; one here is all that a metric needs."""
COUNTS = [name for name, metric in METRICS.items() if metric.count]
_SCORED = re.compile(r"(best|vote)@\d+_\w+_se")


def defined(figure: str) -> tuple[str, str] | None:
    """The title and the meaning of a figure of `report.json`; None of what only belongs to one, as its errors."""
    for pattern, metric in METRICS.items():
        match = None if _SCORED.fullmatch(figure) else re.fullmatch(pattern, figure)
        if match:
            return metric.title.format(*match.groups()), " ".join(metric.about.format(*match.groups()).split())
    return None


def problem_values(records: EvalRecords) -> Values:
    """Every metric that has one as a value a problem [N], whose mean is the metric: what pairing needs."""
    asked = [each for each in METRICS.values() if records.sample_correct.size or not each.sampled]
    return {name: values for each in asked if each.values for name, values in each.values(records).items()}


def summarise(records: EvalRecords) -> dict[str, Any]:
    """All figures of one row on one set, ready for JSON (no NaN: what is undefined is None).

    Returns:
        n, seeds, samples_per_seed; every metric of `problem_values` with its `_se` over problems; `_seed_se` for
        pass@k up to the samples of a seed; intervals {metric: Wilson's} of shares that are 0 or 1; answer_tokens,
        tokens of the clean rollout's completion, with its `_se`; cut, the share of clean rollouts without an end within
        their budget, and sample_cut, of the samples, each with its `_se`;
        pearson_{steps,difficulty}_{r,p,n}: the clean rollout's latent length against the problem's steps and against
        `difficulty`.
    """
    out: dict[str, Any] = {
        "n": len(records.references),
        "seeds": len(records.seeds),
        "samples_per_seed": records.sample_correct.shape[2],
    }
    for key, values in problem_values(records).items():
        out[key] = float(values.mean())
        out[f"{key}_se"] = proportion_se(out[key], out["n"]) if key == "acc" else mean_se(values)
        if key.startswith("pass@") and int(key[5:]) <= out["samples_per_seed"]:
            right_SN = records.sample_correct.sum(axis=2)
            of_seeds = pass_at_k_unbiased(right_SN, out["samples_per_seed"], int(key[5:]))
            out[f"{key}_seed_se"] = mean_se(of_seeds.mean(axis=1))
    out |= {"answer_tokens": float(records.answer_tokens.mean()), "answer_tokens_se": mean_se(records.answer_tokens)}
    out |= {"cut": float(records.cut.mean()), "cut_se": proportion_se(records.cut.mean(), out["n"])}
    if records.sample_cut.size:
        sample_cut = records.sample_cut.mean(axis=(0, 2))
        out |= {"sample_cut": float(sample_cut.mean()), "sample_cut_se": mean_se(sample_cut)}
    shares = [key for key in out if f"{key}_se" in out and key not in COUNTS]
    if intervals := {key: [*wilson(out[key], out["n"])] for key in shares if out[key] in (0, 1)}:
        out["intervals"] = intervals
    hard = difficulty(records)
    unknown = np.full(out["n"], np.nan)
    for name, x in (("steps", records.problem_steps), ("difficulty", unknown if hard is None else hard)):
        r, p, n = pearson(x, records.latent_steps)
        out |= {f"pearson_{name}_r": r, f"pearson_{name}_p": p, f"pearson_{name}_n": n}
    return out
