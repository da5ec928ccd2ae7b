"""Figures of an evaluation and how sure they are (paper, "Inference and Evaluation" and the difficulty section).

Pure functions of numpy arrays. Axes: S dropout seeds, N problems, M samples a seed, R training runs, Q metrics.
All rates are fractions. Two errors are kept apart:

* `_se`, over problems: how far another draw of N problems would move the figure. It is the one to compare rows by.
* `_seed_se`, over the S dropout seeds on these very problems: the spread of the paper's protocol (R = 3 there).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from slpo_jax.evaluation.records import EvalRecords, Evals

PASS_KS = (1, 2, 4, 8, 16)
MAJ_KS = (8, 16)
BEST_FIXED = "imitate_best_fixed"
"""Stands for the better of the two ungated imitation rows, by the metric and on the set in question. That choice is
made on the test set itself, so it is a harder baseline than one chosen on the validation split."""
FIXED_ROWS = ("imitate", "imitate_fixed_tmax")
COMPARISONS = (
    ("slpo", "cold_start"),
    ("slpo", "imitate_control"),
    ("slpo", BEST_FIXED),
    ("cold_start", BEST_FIXED),
    ("imitate_control", "imitate"),
)
AVERAGE = "average"
N_BOOT = 10_000


class PassAtK(NamedTuple):
    """A Pass@k: its mean, standard error over problems and over seeds (None where one observation gives none)."""

    mean: float
    se: float | None
    seed_se: float | None


class Difference(NamedTuple):
    """A mean difference with its percentile interval."""

    mean: float
    low: float
    high: float


class Correlation(NamedTuple):
    """Pearson's r, its two-sided p, and the number of pairs; r and p None where they are undefined."""

    r: float | None
    p: float | None
    n: int


def proportion_se(rate: float, n: int) -> float:
    """Standard error of a proportion, sqrt(p (1 - p) / n). It is 0 at p = 0 and 1, where it means nothing."""
    return math.sqrt(rate * (1.0 - rate) / n)


def mean_se(values: np.ndarray) -> float | None:
    """Standard error of a mean, s / sqrt(n) with Bessel's correction, of values [n]; None for n < 2."""
    return float(np.std(values, ddof=1) / math.sqrt(values.size)) if values.size > 1 else None


def solved_within(sample_correct: np.ndarray, k: int) -> np.ndarray:
    """Whether any of the first k samples is right: [S, N, M] bool -> [S, N] bool.

    Raises:
        ValueError: k is not in 1..M.
    """
    if not 1 <= k <= sample_correct.shape[2]:
        raise ValueError(f"k={k} needs between 1 and {sample_correct.shape[2]} samples a seed")
    return np.any(sample_correct[:, :, :k], axis=2)


def pass_at_k_direct(sample_correct: np.ndarray, k: int) -> PassAtK:
    """Pass@k as the paper evaluates it: k rollouts, solved if any is right, mean over seeds and problems.

    Args:
        sample_correct: [S, N, M] bool; the first k samples of each seed are used.
        k: number of rollouts.

    Returns:
        The mean; the standard error over problems of the per-problem mean over seeds; the standard error over seeds.
    """
    solved = solved_within(sample_correct, k)
    return PassAtK(float(solved.mean()), mean_se(solved.mean(axis=0)), mean_se(solved.mean(axis=1)))


def pass_at_k_unbiased(n_correct: np.ndarray, n: int, k: int) -> np.ndarray:
    """Unbiased Pass@k from n samples: the share of k-subsets that hold a right one, 1 - C(n-c, k) / C(n, k).

    Computed as 1 - prod_{j<k} (n-c-j) / (n-j), which stays in [0, 1] where binomials would overflow.

    Args:
        n_correct: [...] int, right samples c of each problem.
        n: samples drawn.
        k: subset size, 1 <= k <= n.

    Returns:
        [...] float, one estimate a problem.
    """
    if not 1 <= k <= n:
        raise ValueError(f"k={k} needs 1 <= k <= n={n}")
    wrong = n - np.asarray(n_correct)
    miss = np.ones(wrong.shape)
    for j in range(k):
        miss = miss * np.maximum(wrong - j, 0) / (n - j)
    return 1.0 - miss


def majority_correct(sample_answers: np.ndarray, sample_correct: np.ndarray, k: int) -> np.ndarray:
    """Majority vote of the first k samples: the commonest answer, the one seen first on a tie.

    Samples without an answer (None) don't vote; if none votes, the problem counts as not solved. Whether the winner
    is right is read off the first sample that gave it, so references need no canonical form here.

    Args:
        sample_answers: [S, N, M] canonical decimals or None.
        sample_correct: [S, N, M] bool.
        k: votes a problem and seed.

    Returns:
        [S, N] bool.
    """
    if not 1 <= k <= sample_answers.shape[2]:
        raise ValueError(f"k={k} needs between 1 and {sample_answers.shape[2]} samples a seed")
    out = np.zeros(sample_answers.shape[:2], bool)
    for s, i in np.ndindex(*out.shape):
        votes: dict[str, list[int]] = {}  # in the order first seen, which max() keeps on ties
        for m, answer in enumerate(sample_answers[s, i, :k]):
            if answer is not None:
                votes.setdefault(answer, []).append(m)
        if votes:
            out[s, i] = sample_correct[s, i, max(votes.values(), key=len)[0]]
    return out


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
    r, p = stats.pearsonr(x, y)
    return Correlation(float(r), float(p), int(x.size))


def bootstrap_draws(differences: np.ndarray, n_boot: int = N_BOOT, seed: int = 0, stream: int = 0) -> np.ndarray:
    """Bootstrap means of paired differences that share their problems.

    Problems are drawn with replacement, the same draw for every run and metric (so pairs stay pairs). With R > 1,
    runs are drawn with replacement too, independently of the problems: runs and problems are crossed, and the
    interval covers both another training seed and another test set. Beware of few runs: the bootstrap of R runs
    understates their variance by (R - 1) / R.

    Args:
        differences: [R, N, Q] float.
        n_boot: draws.
        seed: the result is a pure function of it and the arguments.
        stream: problems of different sets must not share their draw, runs must: give each set its own stream.

    Returns:
        [n_boot, Q] means.
    """
    runs, n, q = differences.shape
    run_rng, problem_rng = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1, stream])
    run_weights = run_rng.multinomial(runs, np.full(runs, 1.0 / runs), size=n_boot) / runs
    flat = differences.transpose(1, 0, 2).reshape(n, runs * q)
    out = np.empty((n_boot, q))
    chunk = max(1, 2_000_000 // n)  # bounds memory, not the result's law
    for start in range(0, n_boot, chunk):
        size = min(chunk, n_boot - start)
        picks = problem_rng.integers(n, size=(size, n)) + n * np.arange(size)[:, None]
        counts = np.bincount(picks.ravel(), minlength=size * n).reshape(size, n)
        means = (counts @ flat / n).reshape(size, runs, q)
        out[start : start + size] = np.einsum("br,brq->bq", run_weights[start : start + size], means)
    return out


def interval(draws: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """Percentile interval of draws [n_boot]."""
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def paired_bootstrap(
    a: np.ndarray, b: np.ndarray, n_boot: int = N_BOOT, seed: int = 0, level: float = 0.95
) -> Difference:
    """Mean of a - b over problems with a percentile interval, problems resampled in pairs.

    Args:
        a: [N] a value a problem, e.g. its mean over dropout seeds.
        b: [N] the same problems under the other row.
        n_boot: draws.
        seed: of the draws.
        level: of the interval.
    """
    return two_level_bootstrap(np.asarray(a)[None], np.asarray(b)[None], n_boot, seed, level)


def two_level_bootstrap(
    a: np.ndarray, b: np.ndarray, n_boot: int = N_BOOT, seed: int = 0, level: float = 0.95
) -> Difference:
    """As `paired_bootstrap` for R training runs: a, b are [R, N], paired in both; runs and problems are resampled."""
    differences = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    draws = bootstrap_draws(differences[:, :, None], n_boot, seed)[:, 0]
    return Difference(float(differences.mean()), *interval(draws, level))


def problem_values(records: EvalRecords) -> dict[str, np.ndarray]:
    """Every metric as a value a problem [N], whose mean is the metric: what pairing needs.

    Keys: acc, latent_steps, and as far as there are samples pass@k and maj@k (k at most M, mean over seeds),
    pass@k_unbiased (all S*M samples pooled, k smaller than S*M), sample_latent_steps.
    """
    correct, (seeds, _, per_seed) = records.sample_correct, records.sample_correct.shape
    out = {"acc": records.correct.astype(np.float64), "latent_steps": records.latent_steps.astype(np.float64)}
    if not correct.size:
        return out
    for k in PASS_KS:
        if k <= per_seed:
            out[f"pass@{k}"] = solved_within(correct, k).mean(axis=0)
        if k < seeds * per_seed:
            out[f"pass@{k}_unbiased"] = pass_at_k_unbiased(correct.sum(axis=(0, 2)), seeds * per_seed, k)
    for k in MAJ_KS:
        if k <= per_seed:
            out[f"maj@{k}"] = majority_correct(records.sample_answers, correct, k).mean(axis=0)
    out["sample_latent_steps"] = records.sample_latent_steps.mean(axis=(0, 2))
    return out


def summarise(records: EvalRecords) -> dict[str, Any]:
    """All figures of one row on one set, ready for JSON (no NaN: what is undefined is None).

    Returns:
        n, seeds, samples_per_seed; every metric of `problem_values` with its `_se` over problems; `_seed_se` for
        pass@k; pearson_{steps,difficulty}_{r,p,n}: the clean rollout's latent length against the problem's steps
        and against `difficulty`.
    """
    out: dict[str, Any] = {
        "n": len(records.references),
        "seeds": len(records.seeds),
        "samples_per_seed": records.sample_correct.shape[2],
    }
    for key, values in problem_values(records).items():
        out[key] = float(values.mean())
        out[f"{key}_se"] = proportion_se(out[key], out["n"]) if key == "acc" else mean_se(values)
        if key.startswith("pass@") and not key.endswith("_unbiased"):
            out[f"{key}_seed_se"] = pass_at_k_direct(records.sample_correct, int(key[5:])).seed_se
    hard = difficulty(records)
    unknown = np.full(out["n"], np.nan)
    for name, x in (("steps", records.problem_steps), ("difficulty", unknown if hard is None else hard)):
        r, p, n = pearson(x, records.latent_steps)
        out |= {f"pearson_{name}_r": r, f"pearson_{name}_p": p, f"pearson_{name}_n": n}
    return out


def compare_rows(runs: Sequence[Evals], n_boot: int = N_BOOT, seed: int = 0) -> tuple[list[dict[str, Any]], list[str]]:
    """Paired differences of `COMPARISONS` on every set, and on the mean of the sets where there are several.

    Args:
        runs: one entry a training run, all with the same rows and sets.
        n_boot: bootstrap draws.
        seed: of the bootstrap.

    Returns:
        Entries {set, a, b, b_row, metric, n, runs, difference, low, high, excludes_zero, per_run} with 95%
        intervals, and notes on pairs that can't be compared.
    """
    values = [{row: {s: problem_values(rec) for s, rec in sets.items()} for row, sets in run.items()} for run in runs]
    entries, notes = [], []
    names = list(dict.fromkeys(name for sets in runs[0].values() for name in sets))
    for a, b in COMPARISONS:
        over_sets: dict[str, list[tuple[dict[str, Any], np.ndarray]]] = {}
        for stream, name in enumerate(names):
            rows = [row for row in (a, *(FIXED_ROWS if b == BEST_FIXED else (b,))) if name in runs[0].get(row, {})]
            if len(rows) < 2 or rows[0] != a:
                continue
            first = runs[0][a][name]
            if not all(run[row][name].same_problems(first) for run in runs for row in rows):
                notes.append(f"{a} minus {b} on {name}: left out, the problems differ; evaluate both again.")
                continue
            for entry, draws in _differences(
                [{r: run[r][name] for r in rows} for run in values], b, n_boot, seed, stream
            ):
                entry = {"set": name, "a": a, "b": b, **entry, "n": len(first.references), "runs": len(runs)}
                entries.append(entry)
                over_sets.setdefault(entry["metric"], []).append((entry, draws))
        entries += [_average(parts) for parts in over_sets.values() if 1 < len(parts) == len(names)]
    return entries, notes


def _differences(
    values: list[dict[str, dict[str, np.ndarray]]], b: str, n_boot: int, seed: int, stream: int
) -> list[tuple[dict[str, Any], np.ndarray]]:
    """One set: row -> metric -> [N] for each run, the first row minus the others' best (by mean); entries and draws."""
    rows = list(values[0])
    metrics = [key for key in values[0][rows[0]] if all(key in run[row] for run in values for row in rows)]
    if b == BEST_FIXED:  # "best" has no meaning for a length
        metrics = [key for key in metrics if "latent_steps" not in key]
    best = {m: max(rows[1:], key=lambda row: np.mean([run[row][m] for run in values])) for m in metrics}
    diff = np.stack([np.stack([run[rows[0]][m] - run[best[m]][m] for run in values]) for m in metrics], axis=-1)
    draws = bootstrap_draws(diff, n_boot, seed, stream)
    return [
        (_entry(draws[:, q], diff[:, :, q].mean(axis=1), m) | {"b_row": best[m]}, draws[:, q])
        for q, m in enumerate(metrics)
    ]


def _entry(draws: np.ndarray, per_run: np.ndarray, metric: str) -> dict[str, Any]:
    low, high = interval(draws)
    return {
        "metric": metric,
        "difference": float(per_run.mean()),
        "low": low,
        "high": high,
        "excludes_zero": low > 0 or high < 0,
        "per_run": per_run.tolist(),
    }


def _average(parts: list[tuple[dict[str, Any], np.ndarray]]) -> dict[str, Any]:
    """Mean over sets of one metric's difference: sets are fixed, their problems (and the runs) resampled."""
    first = parts[0][0]
    per_run = np.mean([entry["per_run"] for entry, _ in parts], axis=0)
    rows = dict.fromkeys(entry["b_row"] for entry, _ in parts)
    return {
        **first,
        **_entry(np.mean([draws for _, draws in parts], axis=0), per_run, first["metric"]),
        "set": AVERAGE,
        "n": sum(entry["n"] for entry, _ in parts),
        "b_row": "/".join(rows),
    }
