"""The imitate stage with CODI and with adapters: what it leaves, what it leaves out, and how it goes on."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codi_run import QUESTION, SUMS, small_config
from imitation import Crash, fake_steps, run_imitation
from same_run import assert_same, checkpoint_of, rows_of

from slpo_jax.run import imitate as run_imitate_stage
from slpo_jax.run.evaluate import run_evaluate
from slpo_jax.run.stage import stage_params
from slpo_jax.training.recipes.distil import Distillation

RANK = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("codi")
    small_config(folder)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    long = QUESTION.format(1, 2) + " " + QUESTION.format(1, 2)
    rows[3] |= {"question": long[:70], "steps": ["<<1+2=3>>"] * 6}
    rows[5]["answer"] = "-4"
    (folder / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _config(folder, rank: int = RANK, **changes):
    config = small_config(folder)
    config.imitate.lora.rank = rank
    config.imitate.update(changes)
    return config


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_devices")
def test_codi_with_adapters_end_to_end(folder, tmp_path, caplog):
    """Real steps: the loss falls, and what is left is plain parameters that differ by a low rank."""
    config = _config(folder, cot_steps=0, final_steps=14, max_tokens=40)
    config.data.train = str(folder / "mixed.jsonl")
    config.model.n_embd = 8  # four times the rank
    config.imitate.optimizer.learning_rate = 1e-2
    experiment = run_imitation(config, tmp_path)
    assert "imitate: left out 2 of 36 problems" in caplog.text
    losses = [row["loss"] for row in rows_of(tmp_path)]
    assert len(losses) == 14
    assert np.median(losses[-7:]) < losses[0] - 1.0  # at this rate it has spikes
    assert [path.name for path in (tmp_path / "checkpoints").glob("imitate*")] == ["imitate"]
    before = jax.tree.map(np.asarray, experiment.initial_params())
    after = jax.tree.map(np.asarray, stage_params(experiment, "imitate"))
    assert jax.tree.structure(before) == jax.tree.structure(after)
    kernels = 0
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True):
        name, change = jax.tree_util.keystr(path), new - old
        if "projector" in name:
            assert np.abs(change).max() > 1e-3, name
        elif "kernel" in name and "backbone" in name:
            kernels += 1
            spread = np.linalg.svd(change, compute_uv=False)
            assert spread[RANK - 1] > 1e-4 > 100 * spread[RANK], name
        else:
            assert (change == 0).all(), name
    assert kernels == 4
    run_evaluate(experiment)
    assert set(json.loads((tmp_path / "report.json").read_text())["eval"]) == {"imitate", "imitate_fixed_tmax"}
    records = [json.loads(line) for line in (tmp_path / "eval" / "imitate" / "sums.jsonl").read_text().splitlines()]
    assert [record["question"] for record in records] == [QUESTION.format(a, b) for a, b in SUMS[40:43]]
    assert {record["latent_steps"] for record in records} == {2}


@pytest.fixture
def fake(monkeypatch):
    kernel = {"h_0": {"kernel": jnp.ones((4, 3)), "bias": jnp.zeros(3)}, "wte": jnp.ones(5)}
    tiny = {"reasoner": {"backbone": kernel, "projector": {"w": jnp.arange(3.0)}}, "gate": {"w": jnp.ones(2)}}
    return fake_steps(monkeypatch, tiny, lambda batch: batch.index)


@pytest.mark.slow
def test_adapters_go_on_wherever_they_were_cut(fake, folder, tmp_path, monkeypatch):
    """In a step, between two phases, before the adapters are merged, and before and after the end is written down."""
    config = _config(folder, cot_steps=4, final_steps=5)
    run_imitation(config, tmp_path / "whole")
    assert fake["steps"] == list(range(9))
    assert fake["trained"] == ("adapter",)
    whole = checkpoint_of(tmp_path / "whole", "imitate")
    assert whole["step"] == 9
    assert (whole["['params']['reasoner']['backbone']['h_0']['kernel']"] != 1).any()
    assert (whole["['params']['reasoner']['backbone']['wte']"] == 1).all()
    assert not any("adapter" in path for path in whole)
    for at in (0, 3, 4, 8):
        fake["at"] = at
        with pytest.raises(Crash):
            run_imitation(config, tmp_path / "cut")
    left, note, remove = tmp_path / "cut" / "checkpoints" / "imitate_adapter", "note_finished", shutil.rmtree

    def cut(path, *_, **settings):
        if not isinstance(path, Path) or path == left:
            raise Crash
        remove(path, **settings)

    for place, name in ((run_imitate_stage, "_save_finished"), (run_imitate_stage, note), (shutil, "rmtree")):
        assert not (left.parent / "imitate" / "finished").exists()
        with monkeypatch.context() as patch:
            patch.setattr(place, name, cut)
            with pytest.raises(Crash):
                run_imitation(config, tmp_path / "cut")
    assert left.is_dir()
    run_imitation(config, tmp_path / "cut")
    assert not left.exists()
    cut_up = checkpoint_of(tmp_path / "cut", "imitate")
    assert_same(cut_up, whole)
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")


def test_updates_are_scaled_by_alpha_over_the_rank(fake, folder, tmp_path, monkeypatch):
    """In the loss, which stands for what it is given here, and in what the stage leaves."""
    monkeypatch.setattr(Distillation, "loss", lambda self, policy, params, batch, key: (params["reasoner"], None))
    config = _config(folder, cot_steps=0, final_steps=2)
    config.imitate.lora.alpha = 5.0
    run_imitation(config, tmp_path)
    params = fake["params"]
    pair = params["adapter"]["lora"]["h_0"]
    expected = params["reasoner"]["backbone"]["h_0"]["kernel"] + 5.0 / RANK * pair["A"] @ pair["B"]
    assert np.abs(expected - 1).max() > 1e-3
    seen = fake["loss_fn"](params, None, None)[0]["backbone"]["h_0"]["kernel"]
    left = checkpoint_of(tmp_path, "imitate")["['params']['reasoner']['backbone']['h_0']['kernel']"]
    for kernel in (seen, left):
        np.testing.assert_allclose(kernel, expected, rtol=1e-6)
