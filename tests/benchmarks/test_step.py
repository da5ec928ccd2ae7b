"""The benchmark of the SLPO step at tiny shapes: its parts are the train step's work, and its figures add up."""

import json
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import step as benchmark
from benchmarks.measure import ours as own
from benchmarks.measure import theirs
from benchmarks.measure.workload import (
    Shapes,
    half_way_bias,
    load_config,
    make_workload,
)
from slpo_jax.errors import UserError
from slpo_jax.models.gate import first_stop_log_probs
from slpo_jax.runtime.mesh import replicate

PROMPTS = 4
STEPS = 3
WARMUP = 1
ANSWER = 3
# One program for the scoring passes: what compiles is what the tests wait for.
TINY = Shapes(
    "graph.py",
    {"model.n_layer": 1, "model.n_embd": 16, "max_latents": 4, "max_answer_tokens": 5, "imitate.max_latent_stage": 3,
     "prompt_slots": (24,), "data.synthetic.train_size": 50, "data.synthetic.valid_size": 10,
     "data.synthetic.test_size": 10, "rl.optimizer.warmup_steps": 0, "rl.capacities": ((1.0, 1.0),)},
    prompts=PROMPTS, answer_tokens=ANSWER, prompt_tokens=(5, 9),
)  # fmt: skip


@pytest.fixture(scope="module")
def workload(tmp_path_factory, cpu_devices):
    return make_workload(
        TINY, load_config(TINY), PROMPTS, tmp_path_factory.mktemp("work")
    )


@pytest.fixture(scope="module")
def result(cpu_devices):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "BASE", (2, 2))
        torch = "eager" if find_spec("torch") else "none"
        flags = [
            "--only",
            "1,2",
            "2,2",
            "--torch",
            torch,
            "--steps",
            str(STEPS),
            "--warmup",
            str(WARMUP),
        ]
        parsed = benchmark.parse([*flags, "--prompts", str(PROMPTS)])
        return benchmark.benchmark(TINY, load_config(TINY), parsed)


@pytest.fixture(scope="module")
def ours(result):
    return [row for row in result["rows"] if row["implementation"] == "slpo_jax"]


@pytest.mark.nightly
def test_parts_are_the_train_steps_own_work(tmp_path, cpu_devices):
    workload = make_workload(TINY, load_config(TINY), PROMPTS, tmp_path)
    candidate = own.Ours(workload, 2, 2, {})
    step = 5
    batch = workload.batch(step)
    key = own.step_key(workload, step)
    params = workload.state.params
    trajectories, rewards = candidate.rollout(params, batch, key)
    assert rewards.shape == (PROMPTS, 2)
    assert (rewards[:, 0] == 1).all()  # whatever the answers are
    answers = np.asarray(trajectories.tokens)
    eos = workload.parts.policy.config.eos_ids[0]
    assert (
        np.argmax(answers == eos, axis=1) == ANSWER - 1
    ).all()  # where eos is forced, and nowhere before

    loss = candidate.surrogate(params, batch, trajectories, rewards, key)
    value, grads = candidate.gradient(params, batch, trajectories, rewards, key)
    norm = float(optax.tree.norm(grads)) / PROMPTS
    state = workload.state.replace(step=replicate(jnp.int32(step), workload.mesh))
    workload.state, metrics = candidate.step(state, batch)
    np.testing.assert_allclose(loss, value, rtol=1e-5)
    np.testing.assert_allclose(value / PROMPTS, metrics["loss"], rtol=1e-4)
    np.testing.assert_allclose(norm, metrics["grad_norm"], rtol=1e-3)
    np.testing.assert_allclose(trajectories.lengths.mean(), metrics["latent_steps"])
    assert metrics["grad_norm"] > 0


@pytest.mark.nightly
def test_figures_add_up(ours):
    assert [(row["passes"], row["group"]) for row in ours] == [
        (1, 2),
        (2, 2),
    ]
    for row in ours:
        parts = np.array(
            [
                row[name]["values"]
                for name in ("rollout", "surrogate", "backward", "other")
            ]
        )
        step = np.array(row["step"]["values"])
        assert step.shape == (STEPS,)  # without warm-up
        np.testing.assert_allclose(parts.sum(axis=0), step)
        assert row["step"]["min"] <= row["step"]["median"] <= row["step"]["max"]
        np.testing.assert_allclose(
            row["surrogate_share"], np.median(parts[1]) / np.median(step)
        )
        trajectories = PROMPTS * row["group"]
        np.testing.assert_allclose(
            row["trajectories_per_second"]["values"], trajectories / step
        )
        tokens = (
            trajectories
            * (np.array(row["mean_latents"]["values"]) + ANSWER)
            * (1 + row["passes"])
        )
        np.testing.assert_allclose(row["tokens_per_second"]["values"], tokens / step)
        assert min(row["compile_seconds"][name] for name in own.PROGRAMS) > 0
    # The same keys and weights: K does not change what was rolled out.
    first, second = (row["mean_latents"]["values"] for row in ours)
    assert first == second
    base = ours[1]["step"]["median"]
    assert [row["relative"] for row in ours] == [
        ours[0]["step"]["median"] / base,
        1.0,
    ]


@pytest.mark.nightly
def test_torch_takes_turns_on_trajectories_of_the_same_lengths(result, ours, workload):
    pytest.importorskip("torch")
    assert [row["implementation"] for row in result["rows"]] == [
        "slpo_jax",
        "torch",
    ] * 2
    for row, torchs in zip(ours, result["rows"][1::2], strict=True):
        ratio = np.array(torchs["step"]["values"]) / row["step"]["values"]
        np.testing.assert_allclose(row["ratio_vs_torch"]["values"], ratio)
        parts = [
            np.array(torchs[name]["values"])
            for name in ("rollout", "surrogate", "backward", "other")
        ]
        np.testing.assert_allclose(sum(parts), torchs["step"]["values"])
    torch = theirs.Torch(theirs.make_witness(workload, False), workload, 2, 2)
    torch.lengths = np.array(
        [
            1,
            4,
            2,
            3,
            4,
            1,
            2,
            2,
        ]
    )
    torch.measure(workload, 0)
    sampled = torch.witness.sampled
    assert sampled.lengths.tolist() == torch.lengths.tolist()
    eos = workload.parts.policy.config.eos_ids[0]
    assert (sampled.tokens == eos).int().argmax(1).tolist() == [ANSWER - 1] * 8


@pytest.mark.nightly
def test_report_has_every_row_and_the_json_every_number(result):
    text = benchmark.markdown(result)
    assert json.loads(json.dumps(result["rows"])) == result["rows"]
    counts = (len(result["rows"]), 2)
    for table, rows in zip(text.split("\n\n")[1:], counts, strict=True):
        lines = table.splitlines()
        assert len(lines) == 2 + rows
        assert len({line.count("|") for line in lines}) == 1
    assert jax.__version__ in text
    row = result["rows"][0]
    assert f"| slpo_jax | 1 | 2 | {row['step']['median']:.3f} (" in text
    assert f"| {row['relative']:.2f}x |" in text


@pytest.mark.parametrize("steps", [3, 6, 12])
def test_gate_bias_makes_half_of_the_latents_the_mean(steps):
    bias = half_way_bias(steps)
    law = np.exp(first_stop_log_probs(jnp.full(steps, bias), forced=True))
    np.testing.assert_allclose(
        (law * np.arange(1, steps + 1)).sum(), steps / 2, rtol=1e-5
    )


def test_prompts_must_fit_the_devices(tmp_path, cpu_devices):
    with pytest.raises(UserError, match=r"--prompts: 3 .* 4 "):
        make_workload(TINY, load_config(TINY), 3, tmp_path)
