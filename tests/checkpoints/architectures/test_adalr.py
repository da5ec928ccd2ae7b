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
    published,
    texts,
)
from slpo_jax import load
from slpo_jax.api.conversion import export_checkpoint, import_checkpoint
from slpo_jax.api.solver import load_solver
from slpo_jax.checkpoints.identity import identify
from slpo_jax.checkpoints.saved_config import config_of
from slpo_jax.data.batches import pad_prompts
from slpo_jax.errors import UserError
from slpo_jax.policy import noise
from slpo_jax.policy.policy import Prompts
from slpo_jax.policy.rollout import sample

QUICK = (CASES[0], CASES[3])
by_case = pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, marks=() if case in QUICK else pytest.mark.slow, id=case.name
        )
        for case in CASES
    ],
)


def _asked(solver, questions=QUESTIONS):
    """Rollouts without noise, of prompts that are padded together."""
    policy = solver.setup.policy.without_noise().with_config(
        stopping="length", answer_slots=BUDGET
    )
    template = solver.setup.template
    prompts = template.prompts(questions)
    padded = Prompts(
        *pad_prompts(prompts, [max(map(len, prompts)) + 2], template.pad_id)
    )
    keys = noise.row_keys(jax.random.key(0), jnp.zeros(len(prompts), jnp.int32))
    return padded, sample(
        policy, solver.params, padded, keys, jnp.full(len(prompts), MOST)
    )


@pytest.mark.slow
@by_case
def test_latents_and_answers_are_its_program_s(tmp_path, case):
    published(tmp_path / "adalr", case)
    solver = load_solver(
        str(tmp_path / "adalr"), latents=MOST, max_answer_tokens=BUDGET
    )
    template = solver.setup.template
    oracle = np.load(ORACLE)
    assert template.prompt("2 + 3") == [*texts()("2 + 3")["input_ids"], START]
    answer = texts()(" The answer is: 72")["input_ids"]
    assert template.suffix((), "72") == [END, *answer, EOS]
    _, out = _asked(solver)
    expected = oracle[f"{case.name}.latents"]
    assert len(set(expected.tolist())) >= 4
    assert out.lengths.tolist() == expected.tolist()
    np.testing.assert_array_equal(out.tokens, oracle[f"{case.name}.answers"])


@pytest.mark.slow
@by_case
def test_logits_are_its_program_s(tmp_path, case):
    """At every position of a text with latents, of which the two choices' are read as a difference."""
    published(tmp_path / "adalr", case)
    solver = load_solver(str(tmp_path / "adalr"), latents=MOST)
    policy = solver.setup.policy
    params = solver.params
    expected_LV = np.load(ORACLE)[f"{case.name}.logits"]
    first = GIVEN.index(START)
    inputs_LD = [
        np.asarray(policy.reasoner.embed(params, jnp.array([[token]])))[0, 0]
        for token in GIVEN[: first + 1]
    ]

    def hidden():
        row = jnp.asarray(np.array(inputs_LD))[None]
        at = jnp.arange(len(inputs_LD))[None]
        return policy.reasoner.forward(params, row, at, at >= 0)[0]

    choices = []
    for token in GIVEN[first + 1 :]:
        if token in (CONTINUE, STOP):
            action = policy.latent_policy.draw(params, hidden()[:, -1:])
            choices.append(float(action["stop"][0, 0]))
        if token == CONTINUE:
            inputs_LD.append(
                np.asarray(policy.latent_policy.feed(params, action))[0, 0]
            )
        else:
            fed = END if token == STOP else token
            inputs_LD.append(
                np.asarray(policy.reasoner.embed(params, jnp.array([[fed]])))[0, 0]
            )
    is_choice_L = np.isin(GIVEN, [START, CONTINUE])
    gap_L = expected_LV[is_choice_L, STOP] - expected_LV[is_choice_L, CONTINUE]
    np.testing.assert_allclose(choices, gap_L, atol=2e-4)
    ours_LV = np.asarray(policy.reasoner.logits(params, hidden()))[0]
    np.testing.assert_allclose(
        ours_LV[~is_choice_L], expected_LV[~is_choice_L], atol=2e-4, rtol=1e-4
    )
    # Likelihoods are those of the same logits.
    tokens_L = np.array([*GIVEN[1:], EOS])
    ours_L = policy.reasoner.log_probs(params, hidden(), jnp.array([tokens_L]))[0][0]
    expected_L = jax.nn.log_softmax(expected_LV, axis=-1)[
        np.arange(len(GIVEN)), tokens_L
    ]
    said_L = ~is_choice_L & (tokens_L != STOP)
    np.testing.assert_allclose(
        np.asarray(ours_L)[said_L], np.asarray(expected_L)[said_L], atol=3e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=lambda case: case.name)
def test_its_export_thinks_the_same_in_pytorch(tmp_path, monkeypatch, case):
    """Latents, where thoughts end, and answers, of prompts padded together."""
    pytest.importorskip("torch")
    monkeypatch.setattr(
        dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setattr(sys, "path", sys.path[:])
    published(tmp_path / "adalr", case)
    reasoner = load(tmp_path / "adalr", latents=MOST, max_answer_tokens=BUDGET)
    reasoner.export(tmp_path / "exported")
    _, ours = _asked(reasoner.solver)

    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", trust_remote_code=True
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    asked = tokenizer.apply_chat_template(
        chats, padding=True, return_tensors="pt", return_dict=True
    )
    thought = model.generate(**asked, return_dict_in_generate=True)
    oracle = np.load(ORACLE)
    assert thought.lengths.tolist() == oracle[f"{case.name}.latents"].tolist()
    longest = thought.latents.shape[1]
    np.testing.assert_allclose(
        thought.latents, ours.actions["of"][:, :longest], atol=1e-3
    )
    new = thought.sequences[:, asked["input_ids"].shape[1] :].numpy()
    filled = np.pad(new, ((0, 0), (0, BUDGET - new.shape[1])), constant_values=EOS)
    np.testing.assert_array_equal(filled, oracle[f"{case.name}.answers"])


@pytest.mark.slow
@by_case
def test_there_and_back(tmp_path, case):
    """Imported, exported and opened again it is the same, with the rows of its tokens in the tables."""
    tensors = published(tmp_path / "adalr", case)
    assert identify(str(tmp_path / "adalr")).reasoner == f"adalr_{case.backbone}"
    import_checkpoint(tmp_path / "adalr", tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "exported")
    side = load_file(tmp_path / "exported" / "reasoner.safetensors")
    assert side.keys() == {
        name for name in tensors if name.startswith("recurrent_filter.")
    }
    assert all(np.array_equal(side[name], tensors[name]) for name in side)
    model = load_file(tmp_path / "exported" / "model.safetensors")
    expected = {}
    for name, tensor in tensors.items():
        if name.startswith("_base_model."):
            expected[name.removeprefix("_base_model.")] = tensor
    table = (
        "transformer.wte.weight"
        if case.backbone == "gpt2"
        else "model.embed_tokens.weight"
    )
    if case.lora:
        ids = {"start": START, "end": END, "continue": CONTINUE, "stop": STOP}
        for name, array in tensors.items():
            if (
                name.startswith("_")
                and "_embed" in name
                and not name.startswith("_base_model.")
            ):
                row = ids[name.removeprefix("_").split("_")[0]]
                expected["lm_head.weight" if "_out" in name else table][row] = array[0]
    assert model.keys() == expected.keys()
    assert all(np.array_equal(model[name], expected[name]) for name in expected)
    for place in ("adalr", "ours", "exported"):
        config = config_of(identify(str(tmp_path / place)))
        assert (config.latent_policy.name, config.gate.enabled, config.max_latents) == (
            "adalr",
            False,
            32,
        )
        assert config.latent_policy.adalr.temperature == (case.temperature or 1.0)
    import_checkpoint(tmp_path / "exported", tmp_path / "again")
    first, again = (
        load_solver(str(tmp_path / place)).params for place in ("ours", "again")
    )
    jax.tree.map(np.testing.assert_array_equal, first, again)


def _settings(**changes):
    return lambda folder: published(folder, CASES[0], **changes)


def _tensors(without="", **more):
    """Written with these tensors, or without one."""

    def write(folder):
        tensors = published(folder, CASES[0]) | more
        tensors.pop(without, None)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return write


def _without_settings(folder):
    published(folder, CASES[0])
    config = json.loads((folder / "config.json").read_text())
    del config["_inserted_LatentThinkingModelSettings"]
    (folder / "config.json").write_text(json.dumps(config))


def _row_left(folder):
    tensors = published(folder, CASES[0])
    tensors["_base_model.transformer.wte.weight"][END, 0] = 1.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "words"),
    [
        (
            _settings(recurrent_filter_mode="linear"),
            "recurrent_filter_mode = 'linear' in config.json is not supported",
        ),
        (
            _settings(recurrent_filter_mode=None),
            "recurrent_filter_mode = None in config.json is not supported",
        ),
        (
            _settings(add_latent_to_end=True),
            "add_latent_to_end = True in config.json is not supported",
        ),
        (_settings(binary_head_temp=-1.0), "binary_head_temp = -1.0 in config.json"),
        (_settings(news=1), "news in config.json is not known here"),
        (
            _settings(stop_token_id=259),
            "stop_token_id in config.json is 259, but the tokenizer's <|STOP|> is 260",
        ),
        (_settings(lora_mode=False), "_embed.weight is unexpected"),
        (_tensors("_stop_embed.weight"), "tensor _stop_embed.weight is missing"),
        (
            _tensors("recurrent_filter.norm.bias"),
            "tensor recurrent_filter.norm.bias is missing",
        ),
        (
            _tensors(**{"recurrent_filter.more": np.zeros(2, np.float32)}),
            "tensor recurrent_filter.more is unexpected",
        ),
        (_tensors(more=np.zeros(2, np.float32)), "tensor more is unexpected"),
        (
            _tensors(**{"_end_embed.weight": np.zeros((1, 3), np.float32)}),
            "_end_embed.weight has shape [1, 3]",
        ),
        (
            _tensors(**{"recurrent_filter.norm.bias": np.zeros(3, np.float32)}),
            "norm.bias has shape [3]",
        ),
        (_without_settings, "config.json has no _inserted_LatentThinkingModelSettings"),
        (
            _row_left,
            "row 258 (<END>) of tensor _base_model.transformer.wte.weight is not zero",
        ),
    ],
)
def test_others_are_refused_in_a_line(tmp_path, write, words):
    write(tmp_path / "adalr")
    with pytest.raises(UserError) as caught:
        load(tmp_path / "adalr")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
