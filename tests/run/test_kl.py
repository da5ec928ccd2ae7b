"""The KL term of `grpo` in a run: nothing at the start, and to the same start after an interruption."""

import pytest
from same_run import assert_same, checkpoint_of, rows_of
from small_run import load_config

from slpo_jax.config import read_config
from slpo_jax.run import rl
from slpo_jax.run.experiment import build
from slpo_jax.run.provenance import ensure_manifest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cpu_devices")]
STEPS, CUT = 5, 3
CHANGES = {
    "reasoner": "text_gpt2", "gate.enabled": False, "max_latents": 0, "dropout.rate": 0.0, "stages": ("rl",),
    "data.train": "synthetic:train", "rl.objectives": ("grpo",), "rl.steps": STEPS, "checkpoint_every": 2,
    "objective.grpo.kl_weight": 0.5, "rl.optimizer.name": "adamw", "rl.optimizer.learning_rate": 1e-2,
    "rl.capacities": ((1.0, 1.0),), "model.n_layer": 1,
}  # fmt: skip


class Crash(Exception):
    pass


def _even(tokens_NA, references_NR):
    """Rewards that are mixed, whatever so small a model says."""
    return tokens_NA.sum(axis=1) % 2 == 0


def _train(workdir, crash_at=None):
    config = load_config()
    config.update_from_flattened_dict(CHANGES)
    experiment, batches = build(read_config(config), workdir), rl.prompted_batches
    experiment.reward.on_device = _even

    def failing(*arguments):
        batch = batches(*arguments)

        def make(step):
            if step == crash_at:
                raise Crash
            return batch(step)

        return make

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl, "prompted_batches", failing)
        try:
            ensure_manifest(experiment.stage("grpo"))
            rl.train(experiment.stage("grpo"))
        finally:
            experiment.log.close()


def test_a_run_that_was_cut_compares_with_the_same_start(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    _train(whole)
    with pytest.raises(Crash):
        _train(cut, crash_at=CUT)
    _train(cut)
    assert rows_of(cut) == rows_of(whole)
    ours, theirs = checkpoint_of(cut, "grpo"), checkpoint_of(whole, "grpo")
    assert_same(ours, theirs)
    kl = [row["kl"] for row in rows_of(whole)]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert all(value > 1e-4 for value in kl[1:])
