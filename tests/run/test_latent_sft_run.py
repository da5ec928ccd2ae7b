"""The imitate stage with Latent-SFT: its phases train other parts, and it goes on wherever it was interrupted."""

import numpy as np
import pytest
from imitation import Crash, run_imitation
from same_run import assert_same, checkpoint_of
from small_run import load_config

from slpo_jax.run import imitate

pytestmark = [pytest.mark.usefixtures("cpu_devices"), pytest.mark.slow]


def _run(workdir, rank: int):
    config = load_config()
    config.reasoner, config.gate.enabled, config.stages = "text_gpt2", False, ("imitate",)
    config.latent_policy.name, config.max_answer_tokens, config.checkpoint_every = "soft", 6, 3
    config.prompt.update(format="{question}\n<think>", closing="</ think>")
    config.imitate.update(recipe="latent_sft", c_thought=0, cot_steps=2, stage_steps=2, final_steps=3, control=False)
    config.imitate.optimizer.update(warmup_steps=0, weight_decay=0.1)
    config.imitate.lora.rank = rank
    run_imitation(config, workdir)


@pytest.mark.parametrize("rank", [0, 2])
def test_interrupted_it_goes_on_bit_for_bit(tmp_path, monkeypatch, rank):
    """In a phase, and between two of them; the encoder's frozen parts stay what they are."""
    _run(tmp_path / "whole", rank)
    make, at, seen = imitate.make_train_step, [4, 7], []

    def crashing(*arguments, **settings):
        step_fn = make(*arguments, **settings)

        def step(state, batch):
            if at and int(state.step) == at[0]:
                at.pop(0)
                raise Crash
            before = np.asarray(state.params["compress"]["embedding"])
            state, metrics = step_fn(state, batch)
            seen.append((int(state.step) - 1, np.array_equal(before, state.params["compress"]["embedding"])))
            return state, metrics

        return step

    monkeypatch.setattr(imitate, "make_train_step", crashing)
    for _ in range(2):
        with pytest.raises(Crash):
            _run(tmp_path / "parts", rank)
    _run(tmp_path / "parts", rank)
    whole, parts = (checkpoint_of(tmp_path / name, "imitate") for name in ("whole", "parts"))
    assert_same(whole, parts)
    moving = {step for step, same in seen if not same}
    assert moving == {2, 3, 6, 7}  # of the encoder's phases: alone, and with the reasoner
    assert {step for step, same in seen if same} == {0, 1, 4, 5, 8, 9, 10}
