"""Evaluation statistics against numbers derived by hand, enumeration over subsets, scipy and exact resampling laws."""

import itertools
import math
import warnings

import numpy as np
import pytest
from scipy import stats

from eval_files import ROWS
from slpo_jax.evaluation import cells, comparisons, statistics
from slpo_jax.evaluation.records import EvalRecords
from slpo_jax.evaluation.statistics import best_of, solved_share, weighted_vote


def make_records(
    correct,
    latent_steps,
    problem_steps,
    sample_correct,
    sample_answers=None,
    sample_latent_steps=None,
):
    sample_correct = np.array(sample_correct, bool)
    n = len(correct)
    if sample_answers is None:
        sample_answers = np.where(sample_correct, "1", "2").astype(object)
    if sample_latent_steps is None:
        sample_latent_steps = np.full(sample_correct.shape, 2)
    return EvalRecords(
        references=("1",) * n,
        answers=("1",) * n,
        correct=np.array(correct, bool),
        latent_steps=np.array(latent_steps),
        problem_steps=np.array(problem_steps, float),
        answer_tokens=np.arange(n),
        sequential_steps=np.array(latent_steps) + np.arange(n),
        cut=np.arange(n) % 2 == 1,
        questions=("q",) * n,
        sample_scores={},
        searched_correct=np.zeros((0, 0), bool),
        seeds=np.arange(sample_correct.shape[0]),
        sample_correct=sample_correct,
        sample_latent_steps=np.array(sample_latent_steps),
        sample_answers=np.array(sample_answers, object),
        sample_cut=~sample_correct,
    )


@pytest.mark.parametrize(
    ("rate", "n"),
    [
        (0.0, 10),
        (1.0, 10),
        (0.0, 1),
        (0.3, 50),
        (1.0, 1000),
    ],
)
def test_wilson_s_interval_is_scipy_s(rate, n):
    expected = stats.binomtest(round(rate * n), n).proportion_ci(0.95, method="wilson")
    assert statistics.wilson(rate, n) == pytest.approx(tuple(expected), abs=1e-6)


@pytest.mark.parametrize(
    ("right", "interval"), [(0, (0.0, 0.4899)), (1, (0.5101, 1.0))]
)
def test_shares_of_none_and_all_have_wilson_s_interval_and_no_error_of_0(
    right, interval
):
    """Of 4 problems; numbers are Wilson's z^2 / (n + z^2) by hand. Means of numbers, and other shares, have none."""
    records = make_records(
        [right] * 4,
        [3] * 4,
        [2] * 4,
        np.full((2, 4, 4), right),
    )
    out = statistics.summarise(records)
    for key in ("acc", "pass@1", "pass@4", "maj@4"):
        assert out["intervals"][key] == pytest.approx(interval, abs=1e-4)
        assert cells.percent(out, key) == (
            "0.0 [0.0, 49.0]" if right == 0 else "100.0 [51.0, 100.0]"
        )
        assert cells.format_figure(out, key) == cells.percent(out, key)
    assert not set(statistics.COUNTS) & out["intervals"].keys()
    assert out["distinct_answers"] == 1
    mixed = statistics.summarise(
        make_records(
            [1, 0, 0, 0],
            [3] * 4,
            [2] * 4,
            np.full((2, 4, 4), right),
        )
    )
    assert "acc" not in mixed["intervals"]
    assert cells.percent(mixed, "acc") == "25.0 ± 21.7"


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_unbiased_pass_at_k_is_the_share_of_subsets(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations(range(n), k))
        share = sum(any(member < c for member in subset) for subset in subsets) / len(
            subsets
        )
        assert solved_share(n, np.array([c]), k)[0] == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize(
    ("seeds", "per_seed"),
    [
        (1, 6),
        (2, 3),
        (4, 1),
    ],
)
def test_all_at_k_is_the_share_of_subsets_that_are_all_right(seeds, per_seed):
    n = seeds * per_seed
    right = np.array(
        [[m < c for m in range(n)] for c in range(n + 1)]
    )  # a problem with each number of right ones
    correct = right.reshape(n + 1, seeds, per_seed).swapaxes(0, 1)
    found = statistics.problem_values(
        make_records(
            [1] * (n + 1),
            [1] * (n + 1),
            [1] * (n + 1),
            correct,
        )
    )
    ks = [k for k in (1, 2, 3, 4, 6) if f"all@{k}" in found]
    assert ks == [k for k in (1, 2, 3, 4, 6) if f"pass@{k}" in found and k > 1] != []
    for k in ks:
        shares = [
            np.mean([all(subset) for subset in itertools.combinations(row, k)])
            for row in right
        ]
        assert found[f"all@{k}"] == pytest.approx(shares, abs=1e-12)


def test_majority_vote_by_hand():
    answers = np.array(
        [
            [
                ["7", "3", "3", "7"],  # tie: 7 was seen first, and is right
                ["3", "7", "3", "7"],  # tie: 3 first, wrong
                [None, None, None, "7"],  # one vote beats three abstentions
                [None, None, None, None],  # nobody votes
                [
                    "3",
                    "7",
                    "7",
                    "3",
                ],  # first three samples: 7 wins 2 to 1; of all four a tie that 3 wins
            ]
        ],
        object,
    )
    correct = answers == "7"
    assert weighted_vote(answers, correct, 4).tolist() == [
        [True, False, True, False, False]
    ]
    assert weighted_vote(answers, correct, 3).tolist() == [
        [False, False, False, False, True]
    ]


def test_pearson_against_scipy_and_its_t_test():
    rng = np.random.default_rng(0)
    x = rng.normal(size=40)
    y = 0.4 * x + rng.normal(size=40)
    x[[3, 9]] = np.nan
    keep = np.isfinite(x)
    r, p, n = statistics.pearson(x, y)
    expected = stats.pearsonr(x[keep], y[keep])
    assert (r, p, n) == (
        pytest.approx(expected.statistic),
        pytest.approx(expected.pvalue),
        38,
    )
    assert r is not None
    t = r * math.sqrt((n - 2) / (1 - r * r))
    assert p == pytest.approx(2 * stats.t.sf(abs(t), n - 2))


@pytest.mark.parametrize(
    ("x", "y", "n"),
    [
        ([1.0, 1.0, 1.0], [1.0, 2.0, 3.0], 3),
        ([1.0, 2.0, 3.0], [4.0, 4.0, 4.0], 3),
        ([1.0, np.nan, 2.0], [1, 2, 3], 2),
    ],
)
def test_pearson_of_a_constant_or_too_few_is_none_without_warning(x, y, n):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert statistics.pearson(np.array(x), np.array(y)) == (None, None, n)


def _interval(differences, n_boot=500, seed=0):
    return comparisons.interval(
        comparisons.bootstrap_draws(np.asarray(differences)[:, :, None], n_boot, seed)[
            :, 0
        ]
    )


def test_bootstrap_against_the_exact_binomial_law():
    # 100 problems, a better on 30, equal on 70: a draw's mean is Binomial(100, .3) / 100
    found = _interval([[1] * 30 + [0] * 70], n_boot=20_000, seed=1)
    np.testing.assert_allclose(
        found,
        stats.binom(100, 0.3).ppf(
            [
                0.025,
                0.975,
            ]
        )
        / 100,
        atol=0.0101,
    )


def test_bootstrap_in_chunks_has_the_standard_error_of_the_mean():
    diff = np.random.default_rng(2).normal(
        size=(1, 4000, 2)
    )  # 2e6 // 4000 = 500 draws a chunk: several chunks
    draws = comparisons.bootstrap_draws(diff, n_boot=1999)
    assert draws.shape == (1999, 2)
    np.testing.assert_allclose(draws.mean(axis=0), diff[0].mean(axis=0), atol=0.002)
    np.testing.assert_allclose(
        draws.std(axis=0), diff[0].std(axis=0) / math.sqrt(4000), rtol=0.06
    )


def test_two_level_bootstrap_variance_is_the_crossed_sum():
    # difference = run effect + problem effect: variances of the two means add up
    rng = np.random.default_rng(5)
    run = rng.normal(size=5)
    problem = rng.normal(size=200)
    diff = run[:, None] + problem[None]
    draws = comparisons.bootstrap_draws(diff[:, :, None], n_boot=20_000)[:, 0]
    assert draws.var() == pytest.approx(run.var() / 5 + problem.var() / 200, rel=0.05)


def test_streams_share_runs_but_not_problems():
    rng = np.random.default_rng(0)
    by_run = np.repeat(rng.normal(size=(3, 1)), 40, axis=1)[:, :, None]
    by_problem = np.repeat(rng.normal(size=(1, 40)), 3, axis=0)[:, :, None]

    def corr(diff):
        draws = [
            comparisons.bootstrap_draws(diff, 4000, stream=s)[:, 0] for s in (0, 1)
        ]
        return np.corrcoef(*draws)[0, 1]

    assert corr(by_run) == pytest.approx(1.0)
    assert abs(corr(by_problem)) < 0.1


def test_distinct_answers_by_hand():
    answers = [
        [["1", "1", "2"], [None, None, "1"]],
        [["3", "3", "3"], ["1", "2", "3"]],
    ]
    records = make_records(
        [1, 1],
        [1, 2],
        [1, 2],
        np.zeros((2, 2, 3)),
        answers,
    )
    assert statistics.problem_values(records)["distinct_answers"].tolist() == [
        (2 + 1) / 2,
        (2 + 3) / 2,
    ]


def test_summarise_by_hand():
    sample_correct = [
        [[1, 0], [0, 0], [1, 1]],
        [[0, 0], [0, 1], [1, 1]],
    ]  # S=2, N=3, M=2
    lengths = [
        [[1, 2], [3, 3], [6, 6]],
        [[1, 4], [3, 5], [6, 6]],
    ]
    records = make_records(
        [
            1,
            0,
            1,
        ],
        [2, 3, 7],
        [1, 2, 4],
        sample_correct,
        sample_latent_steps=lengths,
    )
    out = statistics.summarise(records)
    assert (out["n"], out["seeds"], out["samples_per_seed"]) == (3, 2, 2)
    assert out["acc"] == pytest.approx(2 / 3)
    assert out["acc_se"] == pytest.approx(math.sqrt(2 / 9 / 3))
    # 4 samples a problem with 1, 1, 4 right: k=2 misses with C(3,2)/C(4,2) = 1/2, 1/2, 0
    assert out["pass@1"] == pytest.approx((1 / 4 + 1 / 4 + 1) / 3)
    assert out["pass@2"] == pytest.approx((1 / 2 + 1 / 2 + 1) / 3)
    # of a seed's 2 samples: 1, 0, 2 and 0, 1, 2 right
    assert out["pass@1_seed_se"] == out["pass@2_seed_se"] == 0.0
    assert "pass@4" not in out
    assert "maj@8" not in out
    assert out["latent_steps"] == pytest.approx(4)
    assert (out["answer_tokens"], out["answer_tokens_se"]) == (
        1,
        pytest.approx(1 / math.sqrt(3)),
    )  # 0, 1 and 2
    assert out["sample_latent_steps"] == pytest.approx((2 + 3.5 + 6) / 3)
    assert (out["cut"], out["cut_se"]) == (
        pytest.approx(1 / 3),
        pytest.approx(math.sqrt(2 / 9 / 3)),
    )  # of 0, 1, 0
    assert out["sample_cut"] == pytest.approx((3 / 4 + 3 / 4 + 0) / 3)
    assert out["sample_cut_se"] == pytest.approx(
        math.sqrt(3 / 16) / math.sqrt(3)
    )  # 3/4, 3/4, 0: variance 3/16
    assert out["pearson_steps_r"] == pytest.approx(
        stats.pearsonr([1, 2, 4], [2, 3, 7]).statistic
    )
    assert out["pearson_difficulty_r"] == pytest.approx(
        stats.pearsonr([0.75, 0.75, 0], [2, 3, 7]).statistic
    )


def test_compare_rows_takes_the_better_fixed_row_by_metric():
    def run(imitate, fixed, slpo):
        def records(c):
            return {
                "s": make_records(
                    c,
                    [1] * 4,
                    [1] * 4,
                    np.array(c)[None, :, None],
                )
            }

        return {
            "imitate": records(imitate),
            "imitate_fixed_tmax": records(fixed),
            "slpo": records(slpo),
        }

    runs = [
        run(
            [
                1,
                0,
                0,
                0,
            ],
            [1, 1, 0, 0],
            [1, 1, 1, 0],
        )
    ]
    entries, notes = comparisons.compare_rows(
        runs, {name: ROWS[name] for name in runs[0]}
    )
    assert notes == []
    (acc,) = [e for e in entries if e["metric"] == "acc"]
    assert (acc["a"], acc["b"], acc["b_row"]) == (
        "slpo",
        "best_fixed",
        "imitate_fixed_tmax",
    )
    assert acc["difference"] == pytest.approx(0.25)
    assert not [
        e for e in entries if "latent" in e["metric"] or "distinct" in e["metric"]
    ]


def test_compare_rows_averages_over_sets_and_runs():
    def run(gain_x, gain_y):
        def records(right):
            return make_records(
                np.arange(100) < right, [1] * 100, [1] * 100, np.zeros((0, 100, 0))
            )

        return {
            "cold_start": {"x": records(20), "y": records(40)},
            "slpo": {"x": records(20 + gain_x), "y": records(40 + gain_y)},
        }

    rows = {name: ROWS[name] for name in ("cold_start", "slpo")}
    entries, _ = comparisons.compare_rows(
        [
            run(20, 10),
            run(40, 10),
        ],
        rows,
    )
    found = {e["set"]: e for e in entries if e["metric"] == "acc"}
    assert found["x"]["per_run"] == pytest.approx([0.2, 0.4])
    assert found["average"]["difference"] == pytest.approx((0.3 + 0.1) / 2)
    assert found["average"]["per_run"] == pytest.approx([0.15, 0.25])
    assert (found["average"]["n"], found["average"]["runs"]) == (200, 2)
    assert found["average"]["excludes_zero"]
    # independent problems: averaging two sets makes the interval narrower than the wider one's
    assert (
        found["average"]["high"] - found["average"]["low"]
        < found["x"]["high"] - found["x"]["low"]
    )
    # Of three sets, one of which only one of the rows has, there is no mean.
    partial = run(20, 10)
    partial["slpo"]["z"] = partial["slpo"]["x"]
    entries, _ = comparisons.compare_rows([partial], rows)
    assert {e["set"] for e in entries} == {"x", "y"}


SHAPE = (3, 40, 5)
K = (1, 2, 4, 5)
RNG = np.random.default_rng(0)
# Answer 0 is right, None is none; about a third of the problems have no right sample.
ANSWERS = RNG.choice(
    np.array(
        [
            "0",
            "1",
            "2",
            None,
        ]
    ),
    SHAPE,
    p=[0.2, 0.4, 0.3, 0.1],
)
CORRECT = ANSWERS == "0"
SCORES = RNG.random(SHAPE)


@pytest.mark.parametrize("k", K)
def test_both_are_a_slow_loop_s(k):
    best = best_of(CORRECT, SCORES, k)
    vote = weighted_vote(ANSWERS, CORRECT, k, SCORES)
    for s, i in np.ndindex(SHAPE[:2]):
        answers = ANSWERS[s, i, :k].tolist()
        scores = SCORES[s, i, :k].tolist()
        assert best[s, i] == (answers[scores.index(max(scores))] == "0")
        sums = {
            a: math.fsum(x for b, x in zip(answers, scores, strict=True) if b == a)
            for a in {*answers} - {None}
        }
        assert vote[s, i] == bool(sums and max(sums, key=sums.get) == "0")
