"""The benchmark of the SLPO step at tiny shapes: its parts are the train step's work, and its figures add up."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is not installed

from benchmarks import slpo_step
from benchmarks.workload import SHAPES, Shapes, half_way_bias, load_config, make_workload, random_prompts
from slpo_jax.errors import UserError
from slpo_jax.experiment import build
from slpo_jax.models.gate import first_stop_log_probs

PROMPTS, STEPS, WARMUP, ANSWER = 4, 3, 1, 3
TINY = Shapes(
    "quickstart.py",
    {
        "model.n_layer": 1,
        "model.n_embd": 16,
        "max_latents": 4,
        "max_answer_tokens": 5,
        "imitate.max_latent_stage": 3,
        "prompt_slots": (24,),
        "data.synthetic.train_size": 50,
        "data.synthetic.valid_size": 10,
        "data.synthetic.test_size": 10,
        "slpo.optimizer.warmup_steps": 0,
    },
    prompts=PROMPTS,
    answer_tokens=ANSWER,
    prompt_tokens=(5, 9),
)


@pytest.fixture(scope="module")
def workload(tmp_path_factory, cpu_devices):
    return make_workload(TINY, load_config(TINY), PROMPTS, tmp_path_factory.mktemp("work"))


@pytest.fixture(scope="module")
def result(cpu_devices):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slpo_step, "CONFIGURATIONS", ((1, 2), (2, 2)))
        patch.setattr(slpo_step, "BASE", (2, 2))
        return slpo_step.benchmark("gpt2", TINY, load_config(TINY), PROMPTS, WARMUP, STEPS)


def test_parts_are_the_train_steps_own_work(workload):
    candidate, step = slpo_step.Candidate(workload, 2, 2, {}), 5
    batch, key, params = workload.batch(step), slpo_step.step_key(workload, step), workload.state.params
    trajectories, rewards = candidate.rollout(params, batch, key)
    assert rewards.shape == (PROMPTS, 2)
    assert (rewards[:, 0] == 1).all()  # whatever the answers are
    answers = np.asarray(trajectories.tokens)
    eos = workload.parts.rollout_config.eos_id
    assert (np.argmax(answers == eos, axis=1) == ANSWER - 1).all()  # where eos is forced, and nowhere before

    loss = candidate.surrogate(params, batch, trajectories, rewards, key)
    value, grads = candidate.gradient(params, batch, trajectories, rewards, key)
    norm = float(optax.tree.norm(grads)) / PROMPTS
    state = workload.state.replace(step=slpo_step.replicate(jnp.int32(step), workload.mesh))
    workload.state, metrics = candidate.step(state, batch)
    np.testing.assert_allclose(loss, value, rtol=1e-5)
    np.testing.assert_allclose(value / PROMPTS, metrics["loss"], rtol=1e-4)
    np.testing.assert_allclose(norm, metrics["grad_norm"], rtol=1e-3)
    np.testing.assert_allclose(trajectories.lengths.mean(), metrics["latent_steps"])
    assert metrics["grad_norm"] > 0


def test_figures_add_up(result):
    assert [(row["passes"], row["group"]) for row in result["rows"]] == [(1, 2), (2, 2)]
    for row in result["rows"]:
        assert row["implementation"] == "slpo_jax"
        parts = np.array([row[name]["values"] for name in ("rollout", "surrogate", "backward", "other")])
        step = np.array(row["step"]["values"])
        assert step.shape == (STEPS,)  # without warm-up
        np.testing.assert_allclose(parts.sum(axis=0), step)
        assert row["step"]["min"] <= row["step"]["median"] <= row["step"]["max"]
        np.testing.assert_allclose(row["surrogate_share"], np.median(parts[1]) / np.median(step))
        trajectories = PROMPTS * row["group"]
        np.testing.assert_allclose(row["trajectories_per_second"]["values"], trajectories / step)
        tokens = trajectories * (np.array(row["mean_latents"]["values"]) + ANSWER) * (1 + row["passes"])
        np.testing.assert_allclose(row["tokens_per_second"]["values"], tokens / step)
        assert min(row["compile_seconds"][name] for name in slpo_step.PROGRAMS) > 0
    # The same keys and weights: K does not change what was rolled out.
    first, second = (row["mean_latents"]["values"] for row in result["rows"])
    assert first == second
    base = result["rows"][1]["step"]["median"]
    assert [row["relative"] for row in result["rows"]] == [result["rows"][0]["step"]["median"] / base, 1.0]


def test_report_has_every_row_and_the_json_every_number(result):
    text = slpo_step.markdown(result)
    assert json.loads(json.dumps(result)) == result
    for table in text.split("\n\n")[1:]:
        lines = table.splitlines()
        assert len(lines) == 4
        assert len({line.count("|") for line in lines}) == 1
    assert jax.__version__ in text
    assert "1.130" in text  # GPT-2's shapes are set beside the paper's figures
    row = result["rows"][0]
    assert f"| 1 | 2 | {row['step']['median']:.3f} (" in text
    assert f"| {row['relative']:.2f}x |" in text


def test_row_leaves_warm_up_out_and_takes_medians():
    class Fake:
        implementation, passes, group, compile_seconds = "other", 4, 8, {}

    row = slpo_step._row(Fake(), [{"step": s, "surrogate": s / 4} for s in (1.0, 9.0, 2.0)])
    assert row["step"] == {"median": 2.0, "min": 1.0, "max": 9.0, "values": [1.0, 9.0, 2.0]}
    assert row["surrogate_share"] == 0.25
    slow = row | {"passes": 8, "step": {"median": 3.0}}
    witness = row | {"implementation": "witness", "step": {"median": 8.0}}
    rows = [slow, row, witness]
    slpo_step.add_relative(rows)
    assert [each["relative"] for each in rows] == [1.5, 1.0, 1.0]


@pytest.mark.parametrize("steps", [3, 6, 12])
def test_gate_bias_makes_half_of_the_latents_the_mean(steps):
    bias = half_way_bias(steps)
    law = np.exp(first_stop_log_probs(jnp.full(steps, bias), forced=True))
    np.testing.assert_allclose((law * np.arange(1, steps + 1)).sum(), steps / 2, rtol=1e-5)


def test_random_prompts_are_left_padded():
    prompts = random_prompts(3, 10, (5, 9), vocabulary=4, seed=(0, 1))
    assert prompts.lengths.tolist() == [5, 7, 9]
    assert (np.diff(prompts.valid.astype(int), axis=1) >= 0).all()
    assert set(np.unique(prompts.tokens)) == {0, 1, 2, 3}


def test_gpt2_shapes_are_gpt2_small(tmp_path):
    config = load_config(SHAPES["gpt2"])
    experiment = build(config, tmp_path)
    shapes = jax.eval_shape(experiment.reasoner.init, jax.random.key(0))
    # 124,439,808 of GPT-2 and three more tokens.
    assert sum(x.size for x in jax.tree.leaves(shapes)) == 124_439_808 + 3 * 768
    assert (config.max_latents, config.prompt_slots, config.max_answer_tokens) == (12, (72,), 16)


def test_prompts_must_fit_the_devices(tmp_path, cpu_devices):
    with pytest.raises(UserError, match=r"--prompts: 3 is not a multiple of 4 devices"):
        make_workload(TINY, load_config(TINY), 3, tmp_path)


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (["--shapes", "llama"], "--shapes"),
        (["--steps", "0"], "--steps: 0"),
        (["--warmup", "-1"], "--warmup: -1"),
        (["--prompts", "0"], "--prompts: 0"),
        (["--prompts", "some"], "--prompts"),
        (["--json", "no/such/folder/out.json"], "--json: no/such/folder"),
        (["--json", "."], "--json: ."),
        (["--step", "3"], "--step"),
    ],
)
def test_bad_flags_end_with_one_line_and_status_2(flags, fault, capsys):
    with pytest.raises(SystemExit) as stop:
        slpo_step.main(flags)
    assert stop.value.code == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: ")
    assert fault in error
    assert error.count("\n") == 1
