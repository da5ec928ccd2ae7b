"""`config.rl.lora` in a run: what is left, resumed, opened and exported."""

import contextlib
import functools
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import slpo_jax
from data_sets import write_jsonl
from imitation import Crash, crash, crash_at
from same_run import assert_same_run, checkpoint_of, rows_of
from slpo_jax.config import read_config
from slpo_jax.errors import UserError
from slpo_jax.models import lora
from slpo_jax.run import rl_adapters, train_rl, train_stage
from slpo_jax.run.experiment import build
from small_run import load_config, train
from tiny_folder import tiny_folder

pytestmark = pytest.mark.usefixtures("cpu_devices")
STEPS = 4
RANK = 2
# A latent policy with parameters of its own, several updates a step, and the start as a reference.
CHANGES = {
    "reasoner": "text_gpt2", "gate.enabled": False, "latent_policy.name": "hybrid", "dropout.rate": 0.0,
    "stages": ("rl",), "latent_policy.hybrid.end_text": "", "tokenizer": "", "rl.objectives": ("grpo",),
    "rl.steps": STEPS, "rl.batch_size": 8, "checkpoint_every": 1, "rl.capacities": ((1.0, 1.0),),
    "objective.grpo.kl_weight": 0.5,
    "objective.grpo.minibatches": 2, "rl.optimizer.name": "adamw", "rl.optimizer.learning_rate": 3e-2,
    "rl.lora.rank": RANK, "rl.lora.alpha": 5.0, "sharding.fsdp": 2,
}  # fmt: skip
KERNEL = "['params']['reasoner']['backbone']['h_1']['attn']['c_proj']['kernel']"


PROBLEMS = [
    {"question": f"{name} has {a} {thing} . He buys {b} . How many now ?", "answer": str(a + b)}
    for name in ("Tom", "Ben") for thing in ("apples", "pens") for a, b in ((1, 2), (2, 1), (1, 1))
]  # fmt: skip


def _built(workdir, base, **changes):
    problems = write_jsonl(base.parent / "train.jsonl", PROBLEMS)
    config = load_config()
    config.update_from_flattened_dict(
        CHANGES | {"init": str(base), "data.train": problems} | changes
    )
    experiment = build(read_config(config), workdir)
    # Mixed, whatever so small a model says.
    experiment.reward.on_device = lambda tokens_NA, references_NR: (
        tokens_NA.sum(axis=1) % 2 == 0
    )
    return experiment


def _train(workdir, base, cut=None, **changes):
    """The stage; with `cut`, an (object, name), up to where that is called, as if it were killed there."""
    experiment = _built(workdir, base, **changes)
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(experiment.log):
        if cut:
            patch.setattr(*cut, crash)
        train(experiment)
    return experiment


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(experiment, its workdir, the base)."""
    folder = tmp_path_factory.mktemp("lora")
    tiny_folder(folder / "base")
    return _train(folder / "work", folder / "base"), folder / "work", folder / "base"


@pytest.mark.slow
def test_what_is_left_is_the_base_but_for_a_low_rank_and_what_is_trained_whole(run):
    experiment, workdir, _ = run
    start = experiment.initial_params()
    left = checkpoint_of(workdir, "grpo")
    tensors = load_file(workdir / "checkpoints/grpo/adapters/adapter_model.safetensors")
    before = {
        jax.tree_util.keystr(path): x
        for path, x in jax.tree_util.tree_leaves_with_path({"params": start})
    }
    assert {path for path in left if "params" in path} == before.keys()
    for path, old in before.items():
        if "latent_policy" in path:
            assert (left[path] != old).any(), path
        elif "kernel" in path and "reasoner" in path:
            found = np.linalg.svd(left[path] - np.asarray(old), compute_uv=False)
            assert found[0] > 1e-3, path
            assert found[RANK] < 1e-5, path
        else:
            np.testing.assert_array_equal(left[path], old, err_msg=path)
    a, b = (
        tensors[f"base_model.model.transformer.h.1.attn.c_proj.lora_{part}.weight"]
        for part in "AB"
    )
    np.testing.assert_allclose(
        left[KERNEL] - np.asarray(before[KERNEL]),
        5.0 / RANK * (b @ a).T,
        rtol=0,
        atol=1e-5,
    )
    kl = [row["kl"] for row in rows_of(workdir)]
    assert len(kl) == STEPS
    assert all(value > 1e-5 for value in kl[1:])


@pytest.mark.slow
def test_it_goes_on_from_a_kill_at_any_moment_bit_for_bit(run, tmp_path):
    """In its steps, before they are merged, with one checkpoint or more, and before that is noted."""
    _, whole, base = run
    with pytest.MonkeyPatch.context() as patch:
        crash_at(patch, train_rl, 2)
        with pytest.raises(Crash):
            _train(tmp_path, base)
    for cut in (
        (train_rl, "save_merged"),
        (rl_adapters, "merge_adapter"),
        (train_stage, "note_finished"),
    ):
        with pytest.raises(Crash):
            _train(tmp_path, base, cut)
    with pytest.raises(UserError, match=r"config\.rl\.lora\.rank: .*3.* 2 .*grpo"):
        _train(tmp_path, base, **{"rl.lora.rank": 3})
    _train(
        tmp_path, base, (train_rl, "make_batch_reader")
    )  # there is nothing left to train
    assert (tmp_path / "checkpoints/grpo/finished").read_text().strip() == str(STEPS)
    assert_same_run(tmp_path, whole, "grpo")


@pytest.mark.slow
def test_it_is_opened_merged_and_exported_apart(run, tmp_path, warnings):
    _, workdir, base = run
    reasoner = slpo_jax.load(workdir)
    assert len(reasoner.solve("1 + 1", samples=1).votes.counts) >= 1
    with pytest.raises(UserError, match=r"^\S+/grpo/3: .*adapter"):
        slpo_jax.load(workdir / "checkpoints/grpo/3")
    target = reasoner.export(tmp_path / "apart", adapters=True)
    assert [line for line in warnings if "adapters alone" in line] == [
        f"{target}: holds adapters alone, without the latent policy"
    ]
    # No export of it thinks in PyTorch, which therefore takes no settings.
    assert not any("give generate" in line for line in warnings)
    with pytest.raises(UserError, match=r"^adapters: .*config\.rl\.lora\.rank"):
        slpo_jax.load(base).export(tmp_path / "none", adapters=True)
    assert not (tmp_path / "none").exists()
    again = slpo_jax.load(target, base=str(base), reasoner="text_gpt2").solver.params[
        "reasoner"
    ]
    ours = reasoner.solver.params["reasoner"]
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5), again, ours
    )
    # tests/models/test_lora.py has that PEFT opens it too.
    assert json.loads((target / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(base)


@pytest.mark.slow
def test_a_validation_is_of_merged_parameters(tmp_path, monkeypatch):
    """And of those as they are where there are no adapters."""
    tiny_folder(tmp_path / "base")
    experiment = _built(tmp_path / "work", tmp_path / "base")
    experiment.log.close()
    params = experiment.initial_params()
    own = jax.tree.map(lambda x: x + 0.5, rl_adapters.init_adapters(experiment, params))
    monkeypatch.setattr(
        train_stage, "validation_accuracy", lambda experiment, params, *_: params
    )
    given = []

    def validation(stage, loop, saved, accuracy):
        given.append(accuracy)
        raise Crash

    monkeypatch.setattr(train_rl, "Validation", validation)
    with pytest.raises(Crash):
        train_rl.train(train_rl.prepare(experiment.stage("grpo")))
    (accuracy,) = given
    assert accuracy(params) is params
    found = accuracy(params | own)
    wanted = lora.without_adapter(params | own, 5.0 / RANK)
    assert found.keys() == params.keys()
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6), found, wanted
    )


@pytest.mark.slow
def test_adapters_of_latents_say_how_a_thought_ends(tmp_path, warnings):
    """As the export of the whole says it."""
    tiny_folder(tmp_path / "base")
    own = {
        "reasoner": "coconut_gpt2",
        "latent_policy.name": "latent",
        "rl.steps": 1,
        "max_latents": 3,
        "max_answer_tokens": 5,
    }
    _train(tmp_path / "work", tmp_path / "base", **own)
    reasoner = slpo_jax.load(tmp_path / "work")
    reasoner.export(tmp_path / "apart", adapters=True)
    told = [line for line in warnings if "give generate" in line]
    assert len(told) == 1
    assert told[0].endswith("max_latents=3, max_new_tokens=5")
    reasoner.export(tmp_path / "whole")
    text = (tmp_path / "whole" / "generation_config.json").read_text()
    settings = json.loads(text)
    assert (settings["max_latents"], settings["max_new_tokens"]) == (3, 5)
