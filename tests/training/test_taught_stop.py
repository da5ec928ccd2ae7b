"""The gate's likelihood in imitation, by hand; what it is counted in; and that it is learned where steps are shown."""

import dataclasses

import jax
import numpy as np
import pytest

import tiny
from slpo_jax.architectures.coconut import Coconut
from slpo_jax.config import config_checks, default_config
from slpo_jax.data.batches import encode_problems
from slpo_jax.data.problem import Problem
from slpo_jax.data.tokenizer import task_tokenizer
from slpo_jax.errors import UserError
from slpo_jax.models.gate import stopping_gate
from slpo_jax.policy.latent_policies import LATENT_POLICIES
from slpo_jax.policy.policy import Policy, RolloutConfig
from slpo_jax.runtime.mesh import shard_rows
from slpo_jax.training.optimizer import OptimizerConfig, make_optimizer
from slpo_jax.training.recipes import curriculum, imitate_config, recipe_of
from slpo_jax.training.state import init_state, make_train_step
from small_steps import POLICY, imitation_batch, layout_of, small_params
from tiny import SlowReasoner, compiled, real_tokens

KEY = jax.random.key(0)
CLEAN = POLICY.with_config(max_latents=3, dropout_rate=0.0)
STEPS = (
    ("2 + 3 = 5",),
    ("4 - 1 = 3", "3 x 2 = 6"),
    ("1 + 1 = 2", "2 + 5 = 7", "7 - 4 = 3"),
)
PROBLEMS = encode_problems(
    Coconut().template(task_tokenizer("synthetic", 20)),
    [
        Problem(f"Tom has {n} pens .", steps, steps[-1].split()[-1])
        for n, steps in enumerate(STEPS)
    ],
)


def _stops_by_hand(batch, params):
    """Of each row, the probabilities rho_1 .. rho_tau of the slow reasoner's latents."""
    slow = SlowReasoner(params["reasoner"], tiny.CONFIG)
    out = params["gate"]["out"]
    kernel = np.float64(out["kernel"][:, 0])
    bias = float(out["bias"][0])
    rows = []
    for row, latents in enumerate(batch.latents):
        thought = slow.think(real_tokens(batch.prompts, row), int(latents))
        rows.append(1 / (1 + np.exp(-(thought @ kernel + bias))))
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_the_likelihood_is_the_one_by_hand(weight):
    """The product over the latents before the last, and the last one's rho, even at the most that there may be."""
    params = small_params()
    batch = imitation_batch().replace(stops=np.array([1, 1, 1, 0], np.float32))
    without, _ = compiled(curriculum.Curriculum()(imitate_config()).loss_of(CLEAN))(
        params, batch, KEY
    )
    settings = dataclasses.replace(imitate_config(), gate_weight=weight)
    total, sums = compiled(curriculum.Curriculum()(settings).loss_of(CLEAN))(
        params, batch, KEY
    )
    expected = 0.0
    for rho in _stops_by_hand(batch, params)[:3]:
        expected += np.log(rho[-1]) + np.log(1 - rho[:-1]).sum()
    found, count = map(float, sums["stop_log_likelihood"])
    assert count == 3
    assert found == pytest.approx(expected, rel=1e-4)
    assert float(total) == pytest.approx(float(without) - weight * expected, rel=1e-5)
    assert float(sums["loss"][0]) == float(total)


@pytest.mark.slow
def test_a_row_is_right_only_with_its_stop():
    """Of rows whose tokens are all right, those count whose gate fires at the last latent, and not before."""
    params = small_params()
    batch = imitation_batch()
    for bias, first in ((-50.0, False), (50.0, True)):
        shifted = params | {
            "gate": {
                "out": params["gate"]["out"] | {"bias": np.full(1, bias, np.float32)}
            }
        }
        _, thought = curriculum.after_latents(CLEAN, shifted, batch, tiny.keys_of(4))
        _, right, _ = curriculum.stop_term(CLEAN, shifted, batch, thought, 1.0)
        # A gate that never fires is right nowhere; one that always fires is where one latent is right.
        assert right.tolist() == [first and latents == 1 for latents in batch.latents]
    unasked = batch.replace(stops=np.zeros(4, np.float32))
    assert curriculum.stop_term(CLEAN, params, unasked, thought, 1.0)[1].all()


@pytest.mark.parametrize(
    ("dropped", "stops"),
    [(0, [0, 0, 0]), (1, [1, 0, 0]), (2, [1, 1, 0]), (3, [1, 1, 1]), (None, [1, 1, 1])],
)
def test_only_whole_thoughts_have_a_stop(dropped, stops):
    """While steps are still written after the latents, nobody says that thought ends there."""
    settings = dataclasses.replace(
        imitate_config(),
        c_thought=1,
        max_latent_stage=3,
        final_latents="steps",
        gate_weight=1.0,
    )
    recipe = recipe_of(settings, "curriculum")
    phase = next(each for each in recipe.phases(PROBLEMS, 3) if each.dropped == dropped)
    batch = recipe.batch(
        PROBLEMS, phase, phase.start, 1, 3, (24,), recipe.slots(PROBLEMS, phase)
    )
    order = np.argsort(batch.draw_ids % 3)
    assert batch.stops[order].tolist() == stops
    if dropped is None:
        assert batch.latents[order].tolist() == [1, 2, 3]


@pytest.mark.slow
def test_the_stop_is_learned_from_the_steps():
    """After a few steps the gate stops after one, two and three latents, as the problems have steps."""
    settings = dataclasses.replace(
        imitate_config(), c_thought=1, max_latent_stage=3, cot_steps=0, stage_steps=0, final_steps=120,
        final_latents="steps", gate_weight=1.0, batch_size=6,
    )  # fmt: skip
    template = PROBLEMS.template
    config = dataclasses.replace(
        tiny.CONFIG, vocab_size=len(template.tokenizer), n_positions=64
    )
    reasoner = Coconut().on(config)
    rollout = RolloutConfig(
        3, 4, template.closing_ids, template.eos_ids, template.pad_id, dropout_rate=0.0
    )
    gate = stopping_gate(
        config.n_embd, detached=False
    ).in_tree()  # so that latents learn to tell the last one
    in_tree = reasoner.in_tree()
    policy = Policy(in_tree, LATENT_POLICIES["latent"]()(in_tree, gate), rollout)
    params = {"reasoner": reasoner.init(KEY), "gate": tiny.random_gate()}
    recipe = recipe_of(settings, "curriculum")
    (phase,) = recipe.phases(PROBLEMS, 3)
    layout = layout_of()
    trained = ("reasoner", "gate")
    optimizer = make_optimizer(OptimizerConfig("adamw", 1e-2))
    step = make_train_step(
        recipe.loss_of(policy), optimizer, trained, layout, "imitate"
    )
    state = init_state(params, trained, optimizer, KEY, layout)
    for number in range(phase.end):
        batch = recipe.batch(
            PROBLEMS, phase, number, 1, 6, (24,), recipe.slots(PROBLEMS, phase)
        )
        state, metrics = step(state, shard_rows(batch, layout.mesh))
    assert float(metrics["accuracy"]) == 1.0
    assert float(metrics["stop_log_likelihood"]) > -0.3


@pytest.mark.parametrize(
    "changes",
    [
        {"final_latents": "published"},
        {"c_thought": 0},
        {"recipe": "colar", "final_latents": "steps"},
        {"lora.rank": 2},
    ],
)
def test_a_stop_that_nothing_says_is_refused(changes):
    config = default_config()
    config.stages = ("imitate",)
    config.imitate.update(c_thought=1, final_latents="steps", gate_weight=1.0)
    config_checks.check(config)
    with config.unlocked():
        config.imitate.update(
            {key: value for key, value in changes.items() if "." not in key}
        )
    if "lora.rank" in changes:
        config.imitate.lora.rank = changes["lora.rank"]
    with pytest.raises(UserError, match="gate_weight"):
        config_checks.check(config)


def test_a_stop_without_a_gate_is_refused():
    config = default_config()
    config.stages = ("imitate",)
    config.imitate.update(c_thought=1, final_latents="steps", gate_weight=1.0)
    config.gate.enabled = False
    with pytest.raises(UserError, match="gate_weight"):
        config_checks.check(config)
