"""Whose samples the stage best_of_n imitates."""

import contextlib

import jax
import numpy as np

from slpo_jax.config import read_config
from slpo_jax.io.orbax import save_params
from slpo_jax.run import best_of_n
from slpo_jax.run.experiment import build
from small_run import load_config


def test_a_gate_that_imitation_has_taught_is_a_trained_one(tmp_path):
    config = load_config()
    own = {
        "data.train": "synthetic:train",
        "stages": ("imitate", "best_of_n"),
        "gate.enabled": True,
        "imitate.gate_weight": 1.0,
        "imitate.final_latents": "steps",
    }
    config.update_from_flattened_dict(own)
    stage = build(read_config(config), tmp_path).stage("best_of_n")
    assert best_of_n.prepare(stage) is stage


def test_every_step_draws_from_the_start_at_the_stage_s_temperature(
    tmp_path, monkeypatch
):
    """Not from `config.init`, nor from what the steps have made of it."""
    config = load_config()
    own = {
        "data.train": "synthetic:train",
        "data.valid": "synthetic:valid",
        "best_of_n.temperature": 0.7,
    }
    own |= {
        "stages": ("imitate", "best_of_n"),
        "gate.enabled": False,
        "rl.temperature": 0.3,
    }
    config.update_from_flattened_dict(own)
    experiment = build(read_config(config), tmp_path)
    stage = experiment.stage("best_of_n")
    shapes = experiment.abstract_params()
    imitated = jax.tree.map(lambda x: np.full(x.shape, 7, x.dtype), shapes)
    save_params(stage.start.folder.path, imitated)
    stage.start.folder.finished.touch()
    temperatures = []
    drawn = []
    begun = []

    def make_choice(policy, *_):
        temperatures.append(policy.config.temperature)
        return lambda params, batch, key: drawn.append(params)

    class TwoSteps(contextlib.nullcontext):
        def advance(self, state, step_fn, batch_at, steps):
            begun.append(state)
            for step in range(2):
                state, _ = step_fn(state, batch_at(step))

    def state_and_step(stage, params, *_):
        return params, lambda state, chosen: (jax.tree.map(lambda x: x + 1, state), {})

    for each in (make_choice, state_and_step):
        monkeypatch.setattr(best_of_n, each.__name__, each)
    monkeypatch.setattr(
        best_of_n, "open_stage", lambda stage, state, steps: (TwoSteps(), state, {})
    )
    monkeypatch.setattr(best_of_n, "close_stage", lambda *_: None)
    best_of_n.train(stage)
    assert (temperatures, len(drawn)) == ([0.7], 2)
    for found in (*begun, *drawn):
        jax.tree.map(np.testing.assert_array_equal, found, imitated)
