"""Figures of an evaluation and how sure they are (paper, "Inference and Evaluation" and the difficulty section).

Axes: S dropout seeds, N problems, M samples a seed. All rates are fractions. Two errors are kept apart:

* `_se`, over problems: how far another draw of N problems would move the figure. It is the one to compare rows by.
* `_seed_se`, over the S dropout seeds on these very problems: the spread of the paper's protocol (R = 3 there).
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from slpo_jax.evaluation.records import EvalRecords


def solved_share(n: int, right: Any, k: int) -> Any:
    """Return rho(n, c, k) = 1 - C(n - c, k) / C(n, k): the share of subsets of k of n that hold one of the c right.

    A product of k factors, which stays in [0, 1] where binomials would overflow.

    Args:
        n, k: 0 <= k <= n; an empty subset holds none.
        right: c, [..], of jax or numpy, in whose precision it is computed.
    """
    missed: Any = 1.0
    for j in range(k):
        wrong = n - right - j
        wrong = wrong * (wrong > 0)  # not below 0
        missed = missed * wrong / (n - j)
    return 1.0 - missed


def powers_of_two(most: int) -> list[int]:
    """List 1, 2, 4, ... up to `most`."""
    return [1 << place for place in range(most.bit_length())]


def pass_ks(samples: int) -> list[int]:
    """Return the k of Pass@k that samples allow: the powers of two, and their very number."""
    ks = {*powers_of_two(samples), samples}
    return sorted(ks - {0})


def most_k(records: EvalRecords) -> int:
    """Return the largest k of Pass@k: the samples of a seed, or the seeds where each has one; 0 without samples."""
    seeds, _, per_seed = records.sample_correct.shape
    return per_seed if per_seed > 1 else seeds * per_seed


def mean_se(values: np.ndarray) -> float | None:
    """Return the standard error of a mean, s / sqrt(n) with Bessel's correction, of values [n]; None for n < 2."""
    if values.size < 2:
        return None
    deviation = np.std(values, ddof=1)
    return float(deviation / math.sqrt(values.size))


def wilson(rate: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a proportion of n, which has a width at 0 and 1 too (1927, JASA 22)."""
    z2 = 1.959964**2
    middle = rate + z2 / (2 * n)
    variance = rate * (1 - rate) + z2 / (4 * n)
    half = math.sqrt(z2 * variance / n)
    denominator = 1 + z2 / n
    low = (middle - half) / denominator
    high = (middle + half) / denominator
    return max(0.0, low), min(1.0, high)


def best_of(
    sample_correct: np.ndarray, sample_scores: np.ndarray, k: int
) -> np.ndarray:
    """Return bool [S, N], best-of-k: whether the largest score's sample of the first k is right; the first on a tie.

    Args:
        sample_correct: [S, N, M] bool.
        sample_scores: [S, N, M] float.
    """
    scores_SNK = sample_scores[:, :, :k]
    chosen_SN = np.argmax(scores_SNK, axis=2)
    chosen_SN1 = chosen_SN[:, :, None]
    correct_SN1 = np.take_along_axis(sample_correct, chosen_SN1, axis=2)
    return correct_SN1[:, :, 0]


def weighted_vote(
    sample_answers: np.ndarray,
    sample_correct: np.ndarray,
    k: int,
    sample_scores: np.ndarray | None = None,
) -> np.ndarray:
    """Return the answer with the largest sum of scores over the first k samples, the one seen first on a tie.

    Samples without an answer (None) don't vote; if none votes, the problem counts as not solved. The first sample that
    gave the winner says whether it is right.

    Args:
        sample_answers: [S, N, M], equal ones in one form (`answers.in_one_form`), or None.
        sample_correct: [S, N, M] bool.
        k: votes a problem and seed.
        sample_scores: [S, N, M] float, 0 or more; None: each vote counts the same (the majority).
    Returns:
        [S, N] bool.
    """
    weights = sample_scores
    if weights is None:
        weights = np.ones(sample_answers.shape)
    out = np.zeros(sample_answers.shape[:2], bool)
    for s, i in np.ndindex(*out.shape):
        # Sum up each answer's weights, in the order first seen, which max() keeps on ties.
        first: dict[str, int] = {}  # sample that gave the answer
        total: dict[str, float] = {}
        for m, answer in enumerate(sample_answers[s, i, :k]):
            if answer is not None:
                first.setdefault(answer, m)
                before = total.get(answer, 0.0)
                total[answer] = before + float(weights[s, i, m])
        if total:
            winner = max(total, key=total.__getitem__)
            chosen = first[winner]
            out[s, i] = sample_correct[s, i, chosen]
    return out


def pearson(x: np.ndarray, y: np.ndarray) -> tuple[float | None, float | None, int]:
    """Return Pearson's r, its two-sided p, and n, over the pairs [N] where both are finite.

    Fewer than three pairs, or a side that doesn't vary, have no correlation: r = p = None.
    """
    keep = np.isfinite(x) & np.isfinite(y)
    x = np.asarray(x, np.float64)[keep]
    y = np.asarray(y, np.float64)[keep]
    n = int(x.size)
    if n < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None, None, n
    from scipy import stats  # a second's import, which only reports need

    r, p = stats.pearsonr(x, y)
    return float(r), float(p), n


Values = dict[str, np.ndarray]


@dataclass(frozen=True)
class Metric:
    """A figure, or one for each k and scorer.

    Attributes:
        title: on the report's page; {0} and {1} are what the pattern of the name has in parentheses.
        about: its meaning, likewise.
        values: records -> a value a problem [N], whose mean is the figure; or such by name. None: `summarise` has the
            figure itself.
        sampled: whether its values, one a problem, are there only where there are rollouts with noise.
        count: a mean of numbers; all others are shares.
        paired: whether rows are compared by it.
    """

    title: str
    about: str
    values: Callable[[EvalRecords], np.ndarray | Values] | None = None
    sampled: bool = False
    count: bool = False
    paired: bool = True


def _of_subsets(
    name: str,
    share: Callable[
        [
            np.ndarray,
            int,
            int,
        ],
        np.ndarray,
    ],
    least: int = 1,
):
    """Compute metrics of subsets of k of all S*M samples, k of `pass_ks(most_k)` from `least` on.

    Args:
        share: (right samples c [N], n, k) -> [N].
    """

    def values(records: EvalRecords) -> Values:
        right = records.sample_correct.sum(axis=(0, 2))
        n = records.sample_correct[:, 0].size
        out: Values = {}
        for k in pass_ks(most_k(records)):
            if k >= least:
                out[f"{name}@{k}"] = share(right, n, k)
        return out

    return values


def _majorities(records: EvalRecords) -> Values:
    answers = records.sample_answers
    correct = records.sample_correct
    out: Values = {}
    for k in pass_ks(correct.shape[2]):
        # Fewer are no majority.
        if k >= 4:
            right_SN = weighted_vote(answers, correct, k)
            out[f"maj@{k}"] = right_SN.mean(axis=0)
    return out


def _by_scores(name: str, choose: Callable[[EvalRecords, np.ndarray, int], np.ndarray]):
    """Compute metrics of the first k of a seed's samples, by every scorer; mean over seeds.

    Args:
        choose: (records, scores [S, N, M], k) -> [S, N].
    """

    def values(records: EvalRecords) -> Values:
        out: Values = {}
        for scorer, scores in records.sample_scores.items():
            for k in pass_ks(scores.shape[2]):
                chosen_SN = choose(records, scores, k)
                out[f"{name}@{k}_{scorer}"] = chosen_SN.mean(axis=0)
        return out

    return values


def _count_distinct(answers_SNM: np.ndarray) -> np.ndarray:
    """Count the different answers among a problem's samples of a seed, [N], mean over the seeds."""
    seeds, problems, _ = answers_SNM.shape
    counts_SN = np.empty((seeds, problems))
    for s, i in np.ndindex(seeds, problems):
        different = {*answers_SNM[s, i]}
        counts_SN[s, i] = len(different)
    return counts_SN.mean(axis=0)


METRICS = {
    "acc": Metric(
        "Acc",
        "Share of problems that the greedy rollout, without noise, gets right.",
        lambda records: records.correct,
    ),
    "latent_steps": Metric(
        "#L",
        "Mean number of latents of the greedy rollout.",
        lambda records: records.latent_steps,
        count=True,
    ),
    "sequential_steps": Metric(
        "steps",
        """Sequential steps: mean number of the model's passes, one after the other, that the greedy rollout takes after
        the prompt. Each latent is one, and each token that it writes.""",
        lambda records: records.sequential_steps,
        count=True,
    ),
    "milliseconds": Metric(
        "ms",
        """Milliseconds per answer: the time of a batch of greedy rollouts on one set, divided by its answers, without
        compilation. All rows are measured in the same run. The notes have the batch and the set.""",
        count=True,
    ),
    "searched": Metric(
        "beam search",
        "Share of problems that a rollout with searched latents gets right; mean over the noise's seeds.",
        lambda records: (
            records.searched_correct.mean(axis=1)
            if records.searched_correct.size
            else {}
        ),
    ),
    r"pass@(\d+)": Metric(
        "P@{0}",
        """Share of problems that at least one of {0} rollouts with noise (dropout's, the latent policy's, sampled
        answers') gets right: the mean of 1 - C(n-c, {0}) / C(n, {0}), where c of a problem's n rollouts are right. The
        standard error over the noise's seeds is in parentheses.""",
        _of_subsets("pass", lambda right, n, k: solved_share(n, right, k)),
    ),
    r"all@(\d+)": Metric(
        "all {0}",
        """Share of problems that {0} rollouts with noise all get right (pass^k of tau-bench): the mean of
        C(c, {0}) / C(n, {0}), where c of a problem's n rollouts are right.""",
        _of_subsets(
            "all", lambda right, n, k: 1.0 - solved_share(n, n - right, k), least=2
        ),
    ),
    r"maj@(\d+)": Metric(
        "maj@{0}",
        """Share of problems whose commonest answer among {0} rollouts with noise is right; equal ones (1/2, 0.5)
        count as one. Of a tie, the first seen counts; rollouts without an answer don't vote.""",
        _majorities,
    ),
    r"best@(\d+)_(\w+)(?<!_se)": Metric(
        "best@{0} by {1}",
        "Share of problems whose rollout with the best {1} among {0} is right.",
        _by_scores(
            "best",
            lambda records, scores, k: best_of(records.sample_correct, scores, k),
        ),
    ),
    r"vote@(\d+)_(\w+)(?<!_se)": Metric(
        "vote@{0} by {1}",
        "Share of problems whose answer with the largest sum of the score {1} among {0} rollouts is right.",
        _by_scores(
            "vote",
            lambda rec, scores, k: weighted_vote(
                rec.sample_answers, rec.sample_correct, k, scores
            ),
        ),
    ),
    "distinct_answers": Metric(
        "answers",
        "Number of different answers among a problem's rollouts of one seed; a missing answer counts as one.",
        lambda records: _count_distinct(records.sample_answers),
        sampled=True,
        count=True,
    ),
    "sample_latent_steps": Metric(
        "#L, with noise",
        "Mean number of latents of the rollouts with noise.",
        lambda records: records.sample_latent_steps.mean(axis=(0, 2)),
        sampled=True,
        count=True,
    ),
    "answer_tokens": Metric(
        "tokens",
        "Mean number of tokens that the greedy rollout writes.",
        lambda records: records.answer_tokens,
        count=True,
        paired=False,
    ),
    "cut": Metric(
        "truncated",
        "Share of greedy rollouts that do not end within the maximum number of new tokens, and are therefore wrong.",
        lambda records: records.cut,
        paired=False,
    ),
    "sample_cut": Metric(
        "truncated, with noise",
        "The same share of the rollouts with noise.",
        lambda records: records.sample_cut.mean(axis=(0, 2)),
        sampled=True,
        paired=False,
    ),
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


def explain_figure(figure: str) -> tuple[str, str] | None:
    """Return the title and meaning of a figure of `report.json`; None of what belongs to one, as its errors."""
    for pattern, metric in METRICS.items():
        if match := re.fullmatch(pattern, figure):
            title = metric.title.format(*match.groups())
            about = metric.about.format(*match.groups())
            return title, " ".join(about.split())
    return None


def problem_values(records: EvalRecords, paired: bool = True) -> Values:
    """Compute the metrics that rows are compared by, or all, each a value a problem [N], whose mean is the metric."""
    out: Values = {}
    for name, metric in METRICS.items():
        if metric.values is None:
            continue
        if paired and not metric.paired:
            continue
        if metric.sampled and not records.sample_correct.size:
            continue
        values = metric.values(records)
        if isinstance(values, dict):
            out |= values
        else:
            out[name] = values.astype(np.float64)
    return out


def summarise(records: EvalRecords) -> dict[str, Any]:
    """Compute all figures of one row on one set, ready for JSON (no NaN: what is undefined is None).

    Returns:
        n, seeds, samples_per_seed; every metric of `problem_values` with its `_se` over problems; `_seed_se` for pass@k
        up to the samples of a seed; intervals {metric: Wilson's} of shares that are 0 or 1; pearson_*, with difficulty
        1 - the mean correctness of a problem's samples (paper, difficulty section).
    """
    seeds, n, per_seed = records.sample_correct.shape
    out: dict[str, Any] = {"n": n, "seeds": seeds, "samples_per_seed": per_seed}

    # The figures with their errors over problems and, for Pass@k, over seeds.
    right_SN = records.sample_correct.sum(axis=2)
    intervals = {}
    for key, values in problem_values(records, paired=False).items():
        figure = float(values.mean())
        error = mean_se(values)
        if key in ("acc", "cut"):
            variance = figure * (1.0 - figure)
            error = math.sqrt(variance / n)
        out[key] = figure
        out[f"{key}_se"] = error
        # A proportion's error is 0 at 0 and 1, where it means nothing.
        if key not in COUNTS and figure in (0, 1):
            intervals[key] = [*wilson(figure, n)]
        if key.startswith("pass@"):
            k = int(key.removeprefix("pass@"))
            # A seed by itself has a Pass@k up to its own samples.
            if k <= per_seed:
                solved_SN = solved_share(per_seed, right_SN, k)
                solved_S = solved_SN.mean(axis=1)
                out[f"{key}_seed_se"] = mean_se(solved_S)
    if intervals:
        out["intervals"] = intervals

    # How the number of latents goes with the problem's steps and its difficulty.
    difficulty = np.full(n, np.nan)
    if records.sample_correct.size:
        right_share = records.sample_correct.mean(axis=(0, 2))
        difficulty = 1.0 - right_share
    traits = {
        "steps": records.problem_steps,
        "difficulty": difficulty,
    }
    for name, x in traits.items():
        r, p, pairs = pearson(x, records.latent_steps)
        out[f"pearson_{name}_r"] = r
        out[f"pearson_{name}_p"] = p
        out[f"pearson_{name}_n"] = pairs
    return out
