"""The benchmarks of levers and of growth at tiny shapes: what is switched, and that figures add up."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flag_errors import check_one_line
from test_benchmarks import PROMPTS, TINY
from tiny import REASONER, random_params

from benchmarks import growth, levers
from benchmarks.workload import SHAPES, load_config
from slpo_jax.models.attention import attend
from slpo_jax.policy import score


def test_library_attention_is_ours():
    """Two prefixes of which the second is shorter, each of two rows; a mask that is not only causal."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(4, heads, 3, 8)), jnp.float32) for heads in (4, 2, 2))
    keys, values = (jnp.asarray(rng.normal(size=(2, 2, 5, 8)), jnp.float32) for _ in range(2))
    mask = jnp.asarray(np.tril(np.ones((3, 3), bool)) & (rng.random((4, 1, 3)) < 0.7)) | jnp.eye(3, dtype=bool)
    prefix = (keys, values, jnp.arange(5) < jnp.array([[5], [3]]))
    for before in (None, prefix):
        ours, library = (each(q, k, v, mask, before) for each in (attend, levers.library_attention))
        np.testing.assert_allclose(library, ours, atol=1e-6)


def test_chunked_log_probs_are_ours():
    """Values and gradients; 61 tokens in 5 parts of 12 or 13, a token of each."""
    params, rng = random_params(), np.random.default_rng(1)
    hidden = jnp.asarray(rng.normal(size=(2, 3, REASONER.width)), jnp.float32)
    tokens = jnp.array([[0, 15, 30], [40, REASONER.config.vocab_size - 1, 12]])
    weights = jnp.asarray(rng.normal(size=tokens.shape), jnp.float32)

    def graded(function):
        def loss(params, hidden):
            log_probs = function(REASONER, params, hidden, tokens)
            return (log_probs * weights).sum(), log_probs

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, hidden)

    ours, chunked = graded(score.answer_log_probs), graded(functools.partial(levers.chunked_log_probs, chunks=5))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), chunked, ours)


@pytest.fixture(scope="module")
def result(cpu_devices):
    names = (
        "rooms",
        "shared_prompts",
        "shared_prefill",
        "library_attention",
        "vocabulary_chunks",
        "end_to_end",
        "end_to_end_rollout",
        "gather_gradient",
        "last_position",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(levers, "BASE", (2, 2))
        flags = levers.parse(["--runs", "2", "--prompts", str(PROMPTS), "--only", *names])
        return levers.benchmark(TINY, load_config(TINY), flags)


def test_levers_change_no_result(result):
    for name in ("rooms", "library_attention", "vocabulary_chunks", "end_to_end", "gather_gradient"):
        assert result["rows"][name]["difference"] < 1e-5
    assert result["rows"]["shared_prompts"]["difference"] is None
    assert result["rows"]["shared_prefill"]["tokens_equal"]
    assert result["rows"]["end_to_end_rollout"]["tokens_equal"]
    assert result["rows"]["last_position"]["tokens_equal"]


def test_difference_is_of_losses_and_gradients():
    one = (2.0, {"a": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])})
    assert levers.difference(one, one) == 0
    np.testing.assert_allclose(levers.difference(one, (2.2, one[1])), 0.1, rtol=1e-5)
    np.testing.assert_allclose(levers.difference(one, (2.0, one[1] | {"b": jnp.array([3.0])})), 0.2, rtol=1e-5)


def test_levers_figures_add_up(result):
    assert json.loads(json.dumps(result)) == result
    for row in result["rows"].values():
        np.testing.assert_allclose(row["gain"], row["without"]["median"] / row["with"]["median"])
        assert len(row["with"]["values"]) == 2
        assert min(row["temp_bytes"]["with"], *row["compile_seconds"].values()) > 0
    # Whole prompts for each trajectory take more room.
    assert (
        result["rows"]["shared_prompts"]["temp_bytes"]["without"]
        > result["rows"]["shared_prompts"]["temp_bytes"]["with"]
    )
    assert len(levers.markdown(result).splitlines()[-len(result["rows"]) :]) == len(result["rows"])


def test_every_levers_default_is_what_training_has(cpu_devices, tmp_path):
    """A lever that is on is measured against the step as it is: nothing is changed "with" it."""
    untouched = levers.Lever("", "", "")
    for name, lever in levers.LEVERS.items():
        if lever.standing == "on" and name != "shared_prefill":
            assert (lever.having, lever.patch_having) == (untouched.having, untouched.patch_having)
        else:
            assert (lever.having, lever.patch_having) != (untouched.having, untouched.patch_having)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_every_axis_of_growth_has_the_shapes_own_value(name):
    for axis, value in growth.base_sizes(SHAPES[name], load_config(SHAPES[name])).items():
        assert value in growth.AXES[name][axis]


def test_growth(cpu_devices, monkeypatch):
    monkeypatch.setattr(growth, "BASE", (2, 2))
    monkeypatch.setitem(growth.AXES, "quickstart", {"K": (2, 6), "prompts": (4,)})
    flags = growth.parse(["--shapes", "quickstart", "--runs", "1", "--axes", "k", "prompts"])
    found = growth.benchmark(TINY, load_config(TINY), flags)
    assert json.loads(json.dumps(found)) == found
    assert [(row["axis"], row["value"]) for row in found["rows"]] == [("K", 2), ("K", 6), ("prompts", 4)]
    two, six, same = found["rows"]
    assert (two["relative"], same["seconds"]) == (1.0, two["seconds"])
    assert six["relative_temp"] == six["temp_bytes"] / two["temp_bytes"] > 1.5
    assert "| K | 6 | " in growth.markdown(found)
    assert all(len(row["page_faults"]["values"]) == 1 for row in found["rows"])


@pytest.mark.parametrize(
    ("main", "flags", "fault"),
    [
        (levers.main, ["--only", "luck"], "--only"),
        (levers.main, ["--runs", "0"], "--runs: 0"),
        (growth.main, ["--axes", "width"], "--axes"),
        (growth.main, ["--json", "no/such/folder/out.json"], "--json: no/such/folder"),
    ],
)
def test_bad_flags_end_with_one_line_and_status_2(main, flags, fault, capsys):
    check_one_line(main, flags, fault, capsys)
