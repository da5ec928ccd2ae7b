"""AdaLR's checkpoints, against what its program says with them (see adalr_files.py for how that was made)."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils

from adalr_files import (
    BUDGET,
    CASES,
    CONTINUE,
    END,
    EOS,
    GIVEN,
    MOST,
    ORACLE,
    QUESTIONS,
    START,
    STOP,
    WIDTH,
    published,
    texts,
)
from slpo_jax import load
from slpo_jax.api.conversion import export_checkpoint, import_checkpoint
from slpo_jax.api.solver import load_solver
from slpo_jax.checkpoints.checkpoint import find_checkpoint
from slpo_jax.checkpoints.decode_settings import config_of
from slpo_jax.checkpoints.identity import identify
from slpo_jax.data.batches import pad_prompts
from slpo_jax.errors import UserError
from slpo_jax.policy import noise
from slpo_jax.policy.policy import Prompts
from slpo_jax.policy.rollout import sample
from tiny_folder import config_for

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def _asked(solver, questions=QUESTIONS):
    """Rollouts without noise, of prompts that are padded together."""
    policy, template = solver.setup.policy.without_noise().having(stopping="length"), solver.setup.template
    prompts = template.prompts(questions)
    padded = Prompts(*pad_prompts(prompts, [max(map(len, prompts)) + 2], template.pad_id))
    keys = noise.row_keys(jax.random.key(0), jnp.zeros(len(prompts), jnp.int32))
    return padded, sample(policy, solver.params, padded, keys, jnp.full(len(prompts), MOST))


@by_case
def test_latents_and_answers_are_its_program_s(tmp_path, case):
    published(tmp_path / "adalr", case)
    solver = load_solver(str(tmp_path / "adalr"), latents=MOST, max_answer_tokens=BUDGET)
    template, oracle = solver.setup.template, np.load(ORACLE)
    assert template.prompt("2 + 3") == [*texts()("2 + 3")["input_ids"], START]
    answer = texts()(" The answer is: 72")["input_ids"]
    assert template.suffix((), "72") == [END, *answer, EOS]
    _, out = _asked(solver)
    expected = oracle[f"{case.name}.latents"]
    assert len(set(expected.tolist())) >= 4
    assert out.lengths.tolist() == expected.tolist()
    np.testing.assert_array_equal(out.tokens, oracle[f"{case.name}.answers"])


@by_case
def test_logits_are_its_program_s(tmp_path, case):
    """At every position of a text with latents, of which the two choices' are read as a difference."""
    published(tmp_path / "adalr", case)
    solver = load_solver(str(tmp_path / "adalr"), latents=MOST)
    policy, params = solver.setup.policy, solver.params
    expected_LV = np.load(ORACLE)[f"{case.name}.logits"]
    first = GIVEN.index(START)
    inputs_LD = [np.asarray(policy.reasoner.embed(params, jnp.array([[token]])))[0, 0] for token in GIVEN[: first + 1]]

    def hidden():
        row, at = jnp.asarray(np.array(inputs_LD))[None], jnp.arange(len(inputs_LD))[None]
        return policy.reasoner.forward(params, row, at, at >= 0)[0]

    choices = []
    for token in GIVEN[first + 1 :]:
        if token in (CONTINUE, STOP):
            action = policy.latent_policy.draw(params, hidden()[:, -1:])
            choices.append(float(action["stop"][0, 0]))
        if token == CONTINUE:
            inputs_LD.append(np.asarray(policy.latent_policy.feed(params, action))[0, 0])
        else:
            fed = END if token == STOP else token
            inputs_LD.append(np.asarray(policy.reasoner.embed(params, jnp.array([[fed]])))[0, 0])
    is_choice_L = np.isin(GIVEN, [START, CONTINUE])
    gap_L = expected_LV[is_choice_L, STOP] - expected_LV[is_choice_L, CONTINUE]
    np.testing.assert_allclose(choices, gap_L, atol=2e-4)
    ours_LV = np.asarray(policy.reasoner.logits(params, hidden()))[0]
    np.testing.assert_allclose(ours_LV[~is_choice_L], expected_LV[~is_choice_L], atol=2e-4, rtol=1e-4)
    # Likelihoods are those of the same logits.
    tokens_L = np.array([*GIVEN[1:], EOS])
    ours_L = policy.reasoner.log_probs(params, hidden(), jnp.array([tokens_L]))[0][0]
    expected_L = jax.nn.log_softmax(expected_LV, axis=-1)[np.arange(len(GIVEN)), tokens_L]
    said_L = ~is_choice_L & (tokens_L != STOP)
    np.testing.assert_allclose(np.asarray(ours_L)[said_L], np.asarray(expected_L)[said_L], atol=3e-4)
