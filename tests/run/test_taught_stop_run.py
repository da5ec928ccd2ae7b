"""A run whose demonstrations teach the gate: its rows, what its checkpoint stops by, and what its answers cost."""

import json

import pytest

import slpo_jax
from slpo_jax.config import default_config

pytestmark = pytest.mark.usefixtures("cpu_devices")


def _config():
    config = default_config()
    config.stages = ("imitate", "evaluate")
    config.tokenizer = "chain:10"
    config.model.update(n_layer=1, n_head=2, n_embd=16, n_positions=48)
    config.gate.detached = False
    config.max_latents = 3
    config.min_latents = 1
    config.prompt.answers = "texts"
    config.prompt_slots = (16,)
    config.max_answer_tokens = 3
    config.data.chain.update(
        depth=2, modulus=10, train_size=64, valid_size=16, test_size=16
    )
    config.data.train = "chain:train"
    config.data.valid = "chain:valid"
    config.data.eval.mixed = "chain:test"
    config.imitate.update(
        recipe="simcot", batch_size=8, c_thought=1, max_latent_stage=2, cot_steps=0, stage_steps=0, final_steps=3,
        final_latents="steps", gate_weight=1.0,
    )  # fmt: skip
    config.evaluate.update(batch_size=16, samples=0, thresholds=(0.4, 0.5), probed=0)
    return config


@pytest.mark.slow
def test_a_run_with_a_taught_gate(tmp_path):
    workdir = tmp_path / "run"
    run = slpo_jax.train(_config(), workdir=workdir)
    report = json.loads((workdir / "report.json").read_text())
    assert list(report["eval"]) == ["imitate", "imitate_by_steps"]
    rows = report["rows"]
    assert (rows["imitate"]["stopping"], rows["imitate"]["gated"]) == (
        "threshold",
        True,
    )
    lines = (
        (workdir / "eval" / "imitate_by_steps" / "mixed.jsonl").read_text().splitlines()
    )
    records = [json.loads(line) for line in lines]
    assert {record["latent_steps"] for record in records} == {1, 2}
    assert all(record["latent_steps"] == record["problem_steps"] for record in records)
    for sets in report["eval"].values():
        figures = sets["mixed"]
        assert figures["milliseconds"] > 0
        assert figures["sequential_steps"] == pytest.approx(
            figures["latent_steps"] + figures["answer_tokens"]
        )
    # The checkpoint by itself stops by the gate that it was left with.
    loaded = slpo_jax.load(workdir / "checkpoints" / "imitate")
    found = loaded.evaluate("mixed", samples=0)
    assert loaded.solver.stopping == "threshold"
    assert (
        found.summary["latent_steps"]
        == report["eval"]["imitate"]["mixed"]["latent_steps"]
    )
    assert found.summary["milliseconds"] > 0
    assert run["imitate"].solver.rule == rows["imitate"]["rule"]
