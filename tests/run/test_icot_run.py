"""The imitate stage with iCoT: when the optimizer is reset, how it goes on, and what its rows are called."""

import shutil

import jax.numpy as jnp
import pytest
from imitation import Crash, fake_steps, run_imitation
from same_run import assert_same, checkpoint_of, rows_of
from small_run import load_config

from slpo_jax.config import read_config, validate
from slpo_jax.run.experiment import build
from slpo_jax.run.rows import rows

# 136 problems are 17 steps of 8, and a chain is six tokens: "1 + 2 = 3" and a line break.
COT, RISE, TOTAL = 4, 3, 30
RISES = [COT + RISE * s for s in range(1, 7)]


def _config(**changes):
    config = load_config()
    config.max_latents, config.gate.enabled, config.stages = 0, False, ("imitate",)
    config.checkpoint_every = 4
    config.imitate.update(recipe="icot", c_thought=0, cot_steps=COT, final_steps=TOTAL - COT, control=False)
    config.imitate.icot.update(tokens_per_epoch=6, offset_decay=0.5)
    config.imitate.optimizer.warmup_steps = 0
    config.imitate.update(changes)
    return config


@pytest.fixture
def fake(monkeypatch):
    tiny = {"reasoner": {"w": jnp.arange(3.0)}, "gate": {"w": jnp.ones(2)}}
    return fake_steps(monkeypatch, tiny, lambda batch: batch.suffix.tokens * batch.suffix.weights)


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_devices")
def test_each_rise_has_a_fresh_optimizer_wherever_the_run_was_cut(fake, tmp_path):
    """One program, for batches with texts and without; killed at a rise, within one, and in the answer alone."""
    config = _config()
    config.data.train = shutil.copy(config.data.train, tmp_path)
    run_imitation(config, tmp_path / "whole")
    assert fake["steps"] == list(range(TOTAL))
    assert fake["fresh"] == [0, COT, *RISES]
    assert list(map(len, fake["slots"].values())) == [2]
    whole = checkpoint_of(tmp_path / "whole", "imitate")
    assert whole["step"] == TOTAL
    fake["fresh"].clear()
    # At 4 checkpoints apart, they go on from steps 4, 8, 16 and 28: where the rises begin, within one, and at one.
    for at in (RISES[0], RISES[2] - 2, RISES[4], TOTAL - 1):
        fake["at"] = at
        with pytest.raises(Crash):
            run_imitation(config, tmp_path / "cut")
    run_imitation(config, tmp_path / "cut")
    assert set(fake["fresh"]) == {0, COT, *RISES}
    assert_same(checkpoint_of(tmp_path / "cut", "imitate"), whole)
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")
    fake["steps"].clear()
    (tmp_path / "train.jsonl").unlink()  # what is finished needs no data to know its phases by
    run_imitation(config, tmp_path / "whole")
    assert fake["steps"] == []


@pytest.mark.parametrize(
    ("label", "changes"),
    {
        "CoT-SFT": {"recipe": "", "final_steps": 0, "stage_steps": 9, "max_latent_stage": 0},
        "no thought": {"recipe": ""},
        "iCoT": {},
        "imitation, last steps written": {"recipe": "", "final_steps": 0, "stage_steps": 9, "max_latent_stage": 1},
    }.items(),
)
@pytest.mark.parametrize("reasoner", ["coconut_gpt2", "text_gpt2"])
def test_rows_say_what_is_imitated(tmp_path, reasoner, label, changes):
    config = _config(**changes)
    config.reasoner = reasoner
    validate.check(config)
    found = rows(build(read_config(config), tmp_path), planned=True)
    assert [(row.name, row.label) for row in found] == [("imitate", label)]
