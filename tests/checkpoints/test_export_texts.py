"""Exports that think in plain PyTorch: against our own rollouts, and what they refuse."""

import contextlib
import copy
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file
from tokenizers import models, processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    dynamic_module_utils,
    pipeline,
)

from asked import ANSWER, QUESTION, T, checkpoint, run_config, workdir
from slpo_jax.api.conversion import export_checkpoint
from slpo_jax.api.solver import load_solver, solve
from slpo_jax.architectures.coconut import Coconut
from slpo_jax.architectures.codi import Codi
from slpo_jax.architectures.colar import Colar
from slpo_jax.checkpoints.export import write_chat_template
from slpo_jax.data.batches import pad_prompts
from slpo_jax.data.chat import PromptConfig
from slpo_jax.data.tokenizer import (
    byte_tokenizer,
    task_tokenizer,
    words_of,
    words_tokenizer,
)
from slpo_jax.errors import UserError
from slpo_jax.io.files import write_text
from slpo_jax.policy import noise
from slpo_jax.policy.policy import Policy, Prompts
from slpo_jax.policy.rollout import sample
from tiny import compiled

QUESTIONS = [
    QUESTION,
    "How many ?",
    "Tom has 5 apples . He buys 3 . How many now ?",
    "Tom has 20 pens .",
]
ASKED = " asked in another way"
REASONERS = (
    "coconut_gpt2",
    "coconut_llama",
    "codi_gpt2",
    "codi_llama",
    f"coconut_gpt2{ASKED}",
)


@pytest.fixture(scope="module", params=REASONERS)
def work(request, tmp_path_factory):
    """A run's workdir, with the exports `cold_start`, which has a gate, and `imitate` beside it."""
    folder = tmp_path_factory.mktemp(request.param)
    own = (
        {"prompt": {"format": "Tom ? {question} How many", "closing": "He buys"}}
        if ASKED in request.param
        else {}
    )
    work = workdir(request.param.removesuffix(ASKED), folder / "work", **own)
    for stage in ("cold_start", "imitate"):
        export_checkpoint(work / "checkpoints" / stage, folder / stage)
    return work


@pytest.fixture(autouse=True)
def _code_is_kept_here(tmp_path, monkeypatch):
    monkeypatch.setattr(
        dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setattr(sys, "path", sys.path[:])


def _chats(questions):
    return [[{"role": "user", "content": question}] for question in questions]


def _asked(tokenizer, questions=QUESTIONS):
    return tokenizer.apply_chat_template(
        _chats(questions), padding=True, return_tensors="pt", return_dict=True
    )


def _open(folder):
    pytest.importorskip("torch")
    return AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True
    ), AutoTokenizer.from_pretrained(folder)


def _ours(policy: Policy, params, prompts: Prompts, rule_B):
    out = sample(
        policy,
        params,
        prompts,
        noise.row_keys(jax.random.key(0), jnp.zeros(len(rule_B), int)),
        rule_B,
    )
    return out, jax.nn.sigmoid(policy.latent_policy.stop_logits(params, out.actions))


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["cold_start", "imitate"])
def test_latents_stops_and_answers_are_ours(work, stage):
    solver = load_solver(str(work / "checkpoints" / stage))
    policy = solver.setup.evaluator.policy.without_noise().with_config(
        stopping=solver.stopping
    )
    ids = solver.setup.template.prompts(QUESTIONS)
    prompts = Prompts(
        *pad_prompts(ids, [max(map(len, ids))], solver.setup.template.pad_id)
    )
    rule_B = np.full(
        len(ids),
        solver.rule,
        np.float32 if solver.stopping == "threshold" else np.int32,
    )
    ours, rho_BT = compiled(_ours, policy)(solver.params, prompts, rule_B)

    model, tokenizer = _open(work.parent / stage)
    asked = _asked(tokenizer)
    np.testing.assert_array_equal(asked["input_ids"], prompts.tokens)
    np.testing.assert_array_equal(asked["attention_mask"], prompts.valid)
    never_said = [*policy.config.banned_ids]
    if tokenizer.unk_token_id != tokenizer.eos_token_id:
        never_said.append(tokenizer.unk_token_id)
    assert model.generation_config.suppress_tokens == (never_said or None)
    thought = model.generate(**asked, return_dict_in_generate=True)
    np.testing.assert_array_equal(thought.lengths, ours.lengths)
    steps = thought.latents.shape[1]
    assert steps == ours.lengths.max()
    np.testing.assert_allclose(
        thought.latents, ours.actions[:, :steps], rtol=1e-4, atol=1e-4
    )
    new = thought.sequences[:, asked["input_ids"].shape[1] :].numpy()
    padded = np.pad(
        new,
        ((0, 0), (0, ANSWER - new.shape[1])),
        constant_values=tokenizer.pad_token_id,
    )
    np.testing.assert_array_equal(padded, ours.tokens)
    if stage == "imitate":
        assert thought.stop_probabilities is None
        return
    assert len(set(ours.lengths.tolist())) > 1, (
        "rows must stop at different times in this test"
    )
    thinking_BT = np.arange(steps) < np.asarray(ours.lengths)[:, None]
    expected = np.where(thinking_BT, rho_BT[:, :steps], np.nan)
    np.testing.assert_allclose(thought.stop_probabilities, expected, rtol=0, atol=1e-5)


def test_solve_says_the_same_and_so_does_a_pipeline(work):
    pytest.importorskip("torch")
    folder = work.parent / "cold_start"
    ask = pipeline("text-generation", str(folder), trust_remote_code=True)
    # Before transformers 5.20 a pipeline samples if it isn't told otherwise, and has its own number of tokens.
    said = ask(_chats([QUESTION]), do_sample=False, max_new_tokens=ANSWER)[0][0][
        "generated_text"
    ]
    solution = solve(load_solver(str(folder)), QUESTION)
    assert (said[-1]["role"], said[-1]["content"].split()) == (
        "assistant",
        solution.text.split(),
    )


def test_the_card_s_lines_run_as_they_are_printed(work, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(work.parent)
    (lines,) = re.findall(
        r"```python\n(.*?)```",
        Path("cold_start/README.md").read_text(),
        flags=re.DOTALL,
    )
    assert '"content": "QUESTION"' in lines
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(lines.replace('"QUESTION"', repr(QUESTION)), {})
    solution = solve(load_solver("cold_start"), QUESTION)
    said, stops = printed.getvalue().rsplit("tensor", 1)
    assert (
        said.split("?")[-1].removeprefix(" How many").split() == solution.text.split()
    )
    stop_B = [float(number) for number in re.findall(r"[\d.e+-]+", stops)]
    assert stop_B == pytest.approx(
        [latent.stop_probability for latent in solution.latents], abs=1e-3
    )


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusing")
    export_checkpoint(
        workdir("coconut_gpt2", folder / "work") / "checkpoints" / "cold_start",
        folder / "exported",
    )
    return folder / "exported"


def test_arguments_change_what_the_export_says(exported):
    model, tokenizer = _open(exported)
    asked = _asked(tokenizer)
    prompts = asked["input_ids"].shape[1]
    given = GenerationConfig(max_new_tokens=1)
    short = model.generate(
        asked["input_ids"], generation_config=given
    )  # what is padding is found out
    np.testing.assert_array_equal(short, model.generate(**asked)[:, : prompts + 1])
    fixed = model.generate(
        **asked, stop_threshold=None, max_latents=2, return_dict_in_generate=True
    )
    assert fixed.lengths.tolist() == [2] * len(QUESTIONS)
    silent = model.generate(**asked, max_latents=0, return_dict_in_generate=True)
    assert silent.latents.shape == (len(QUESTIONS), 0, 16)
    eager = model.generate(
        **asked, stop_threshold=0.0, num_beams=1, return_dict_in_generate=True
    )
    assert eager.lengths.tolist() == [1] * len(QUESTIONS)
    np.testing.assert_allclose(eager.latents[:, 0], fixed.latents[:, 0])
    equal = model.generate(
        **asked,
        stop_threshold=fixed.stop_probabilities[0, 0].item(),
        return_dict_in_generate=True,
    )
    assert equal.lengths[0] == 1
    spoken = set(fixed.sequences[:, prompts:].flatten().tolist())
    model.generation_config.suppress_tokens = list(spoken)
    other = model.generate(**asked, stop_threshold=None, max_latents=2)
    assert not spoken & set(other[:, prompts:].flatten().tolist())
    half = model.half().generate(**asked, return_dict_in_generate=True)
    np.testing.assert_allclose(
        half.latents[:, 0].float(), fixed.latents[:, 0], atol=0.02
    )


def _after_a_thought(model, asked, row, latents_TD):
    """transformers' own logits [V] of an answer's first token, float64."""
    import torch

    embed = model.get_input_embeddings()
    ids = asked["input_ids"][row][asked["attention_mask"][row].bool()]
    end = torch.tensor([model.config.latent_end_id])
    inputs_LD = torch.cat([embed(ids), latents_TD, embed(end)])
    logits_V = (
        model(inputs_embeds=inputs_LD[None]).logits[0, -1].detach().double().numpy()
    )
    logits_V[model.generation_config.suppress_tokens or []] = -np.inf
    return logits_V


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(None, None), (0.5, 1.0), (2.0, 0.6)]
)
def test_sampled_answers_have_the_law_of_the_model_after_the_same_thought(
    exported, temperature, top_p
):
    torch = pytest.importorskip("torch")
    model, tokenizer = _open(exported)
    asked = _asked(tokenizer, QUESTIONS[:2])
    draws = 2000
    greedy = model.generate(**asked, return_dict_in_generate=True)
    torch.manual_seed(3)
    how = {
        "temperature": temperature,
        "top_p": top_p,
        "num_return_sequences": draws,
        "max_new_tokens": 1,
    }
    drawn = model.generate(**asked, do_sample=True, **how, return_dict_in_generate=True)
    for row in range(2):
        own = slice(row * draws, (row + 1) * draws)
        np.testing.assert_array_equal(
            drawn.lengths[own], greedy.lengths[row].expand(draws)
        )
        thought_TD = greedy.latents[row, : greedy.lengths[row]]
        np.testing.assert_allclose(
            drawn.latents[own.start, : len(thought_TD)], thought_TD, atol=1e-5
        )
        np.testing.assert_array_equal(
            drawn.sequences[own, :-1], asked["input_ids"][row].expand(draws, -1)
        )
        logits_V = _after_a_thought(model, asked, row, thought_TD) / (
            temperature or 1.0
        )
        law_V = (
            np.exp(logits_V - logits_V.max()) / np.exp(logits_V - logits_V.max()).sum()
        )
        order = np.argsort(-law_V)
        kept = order[
            : np.searchsorted(np.cumsum(law_V[order]), top_p or 1.0) + 1
        ]  # the fewest that reach top_p
        law_V = (
            np.where(np.isin(np.arange(len(law_V)), kept), law_V, 0) / law_V[kept].sum()
        )
        found_V = (
            np.bincount(drawn.sequences[own, -1].numpy(), minlength=len(law_V)) / draws
        )
        assert found_V[law_V == 0].sum() == 0
        assert (found_V > 0).sum() > 1, "a law that has several answers"
        assert (
            np.abs(found_V - law_V) < 5 * np.sqrt(law_V / draws) + 1e-3
        ).all()  # standard errors


def test_a_sampled_answer_goes_on_from_its_own_tokens(exported):
    """At a temperature near 0, or of the likeliest alone, all rows are the greedy answer, with its end."""
    model, tokenizer = _open(exported)
    asked = _asked(tokenizer)
    greedy = model.generate(**asked)
    for how in ({"temperature": 1e-4}, {"top_k": 1}):
        cold = model.generate(**asked, do_sample=True, **how, num_return_sequences=2)
        np.testing.assert_array_equal(cold, greedy.repeat_interleave(2, dim=0))


def test_settings_of_the_opened_model_are_taken_as_arguments_are(exported):
    model, tokenizer = _open(exported)
    asked = _asked(tokenizer)
    greedy = model.generate(**asked)
    model.generation_config.update(do_sample=True, temperature=5.0, top_k=1)
    np.testing.assert_array_equal(model.generate(**asked), greedy)
    other = model.generate(**asked, top_k=0, num_return_sequences=50)
    assert (other != greedy.repeat_interleave(50, dim=0)).any()


def test_a_sampled_answer_has_no_unknown_word_so_that_forward_takes_it(exported):
    pytest.importorskip("torch")
    model = AutoModelForCausalLM.from_pretrained(
        exported, trust_remote_code=True, think_in_forward=True
    )
    _, tokenizer = _open(exported)

    def prefer_unknown_words(_, __, logits):
        logits = logits.clone()
        logits[..., tokenizer.unk_token_id] += 100
        return logits

    hook = model.get_output_embeddings().register_forward_hook(prefer_unknown_words)
    asked = _asked(tokenizer)
    said = model.generate(**asked, do_sample=True, num_return_sequences=4)
    hook.remove()
    assert (said != tokenizer.unk_token_id).all()
    mask = said != tokenizer.pad_token_id
    assert model(said, attention_mask=mask).logits.isfinite().all()


def test_a_pipeline_s_own_sampling_and_budget_are_taken(exported, recwarn):
    """As transformers before 5.20 passes them, a whole generation_config."""
    model, tokenizer = _open(exported)
    asked = _asked(tokenizer, QUESTIONS[:1])
    given = GenerationConfig(
        **model.generation_config.to_diff_dict()
        | {"do_sample": True, "temperature": 0.7}
    )
    given.max_new_tokens = 256
    said = model.generate(**asked, generation_config=given)
    assert asked["input_ids"].shape[1] < said.shape[1] <= 40
    room = 40 - asked["input_ids"].shape[1] - T
    assert f"max_new_tokens is {room}, for which the model has positions" in "".join(
        str(w.message) for w in recwarn
    )
    cold = model.generate(
        **asked, generation_config=given, do_sample=False, max_new_tokens=ANSWER
    )
    np.testing.assert_array_equal(cold, model.generate(**asked))


def test_a_copy_by_save_pretrained_says_what_it_lacks(exported, tmp_path):
    model, tokenizer = _open(exported)
    asked = _asked(tokenizer)
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "copy")
    copied = AutoModelForCausalLM.from_pretrained(
        tmp_path / "copy", trust_remote_code=True
    )
    lacks = (
        r"a copy without custom_generate/generate\.py and reasoner\.safetensors and "
        r"reasoner\.json, which save_pretrain"
    )
    with pytest.raises(ValueError, match=lacks):
        copied.generate(**asked)
    with pytest.raises(UserError, match=r"config\.json: .* reasoner\.json, which"):
        load_solver(str(tmp_path / "copy"))
    card = (exported / "README.md").read_text()
    for name in (
        "custom_generate/generate.py",
        "reasoner.safetensors",
        "reasoner.json",
    ):
        assert f"- `{name}`" in card
        write = tmp_path / "copy" / name
        write.parent.mkdir(exist_ok=True)
        shutil.copy(exported / name, write)
    copied = AutoModelForCausalLM.from_pretrained(
        tmp_path / "copy", trust_remote_code=True
    )
    np.testing.assert_array_equal(copied.generate(**asked), model.generate(**asked))
    assert (
        solve(load_solver(str(tmp_path / "copy")), QUESTION).text
        == solve(load_solver(str(exported)), QUESTION).text
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"max_latents": -1}, "max_latents is at least 0"),
        ({"max_latents": 1.5}, "a whole number"),
        ({"stop_threshold": "half"}, "stop_threshold from 0 to 1"),
        ({"stop_threshold": 1.5}, "stop_threshold from 0 to 1"),
        ({"no_such_word": 1}, "no_such_word"),
        ({"stop_strings": ["pens"]}, "leave them out"),
        (
            {"max_latents": 35},
            "positions, the model has 40 with the answer's; shorten the prompt",
        ),
    ],
)
def test_what_it_cannot_do_is_an_error(exported, arguments, words):
    model, tokenizer = _open(exported)
    with pytest.raises(ValueError, match=words):
        model.generate(**_asked(tokenizer), **arguments)


def test_what_a_cache_has_is_no_part_of_the_prompt(exported):
    model, tokenizer = _open(exported)
    asked = _asked(tokenizer)
    cache = DynamicCache(config=model.config)
    model(**asked, past_key_values=cache, allow_plain_forward=True)
    for name in ("past_key_values", "cache"):
        with pytest.raises(ValueError, match="takes no past_key_values or cache"):
            model.generate(**asked, **{name: cache})
    with pytest.raises(ValueError, match=r"generate\(\*\*prompts\)"):
        model.generate(asked)


def test_a_call_from_another_thread_waits(exported):
    """One that begins while another writes has its own settings, and leaves the model's as they were."""
    model, tokenizer = _open(exported)
    asked = _asked(tokenizer)
    expected = model.generate(**asked)
    settings = model.generation_config
    writes, may_end = threading.Event(), threading.Event()

    def hold(ids, scores):
        writes.set()
        may_end.wait(60)
        return scores

    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(
            model.generate, **asked, max_latents=1, return_dict_in_generate=True,
            logits_processor=LogitsProcessorList([hold]),
        )  # fmt: skip
        assert writes.wait(60)
        ours = pool.submit(model.generate, **asked)
        with pytest.raises(TimeoutError):
            ours.result(timeout=0.5)
        may_end.set()
        assert other.result(60).lengths.max() == 1
        np.testing.assert_array_equal(ours.result(60), expected)
    assert model.generation_config is settings


def test_another_folder_after_it_was_opened_changes_nothing(
    exported, tmp_path, monkeypatch
):
    """Though the weights of the gate are read with the first prompt."""
    expected, tokenizer = _open(exported)
    monkeypatch.chdir(exported.parent)
    model, _ = _open(Path(exported.name))
    monkeypatch.chdir(tmp_path)
    asked = _asked(tokenizer)
    np.testing.assert_array_equal(model.generate(**asked), expected.generate(**asked))


def test_settings_in_the_place_of_the_export_s_are_a_line(exported):
    model, tokenizer = _open(exported)
    model.generation_config = GenerationConfig(max_new_tokens=3)
    with pytest.raises(ValueError, match=r"keep the export's, and give yours to"):
        model.generate(**_asked(tokenizer))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("file", "tensor"),
    [("model.safetensors", "wte.weight"), ("reasoner.safetensors", "gate.")],
)
def test_weights_that_are_no_numbers_are_an_error(
    exported, tmp_path, file, tensor, value
):
    folder = shutil.copytree(exported, tmp_path / "damaged")
    tensors = load_file(folder / file)
    name = next(name for name in tensors if tensor in name)
    save_file(
        tensors | {name: np.full_like(tensors[name], value)},
        folder / file,
        metadata={"format": "pt"},
    )
    model, tokenizer = _open(folder)
    with pytest.raises(ValueError, match=r"generate: .*finite"):
        model.generate(**_asked(tokenizer))


def test_a_prompt_without_its_marker_is_an_error(exported):
    model, tokenizer = _open(exported)
    tokenizer.padding_side = "right"
    for asked in (tokenizer(QUESTION, return_tensors="pt"), _asked(tokenizer)):
        with pytest.raises(ValueError, match=r"tokenizer\.apply_chat_template"):
            model.generate(**asked)
    with pytest.raises(ValueError, match="a word that the tokenizer doesn't know"):
        model.generate(
            **AutoTokenizer.from_pretrained(exported).apply_chat_template(
                _chats(["How many aardvarks ?"]), return_tensors="pt", return_dict=True
            )
        )


@pytest.mark.parametrize("others", [[], QUESTIONS[:1]])
def test_a_chat_without_a_question_is_an_error_of_the_request(work, others):
    """Of `generate`, which a server answers with status 400, and not of the template: that is a 500."""
    model, tokenizer = _open(work.parent / "imitate")
    chats = [[{"role": "system", "content": QUESTION}], *_chats(others)]
    asked = tokenizer.apply_chat_template(
        chats, padding=True, return_tensors="pt", return_dict=True
    )
    with pytest.raises(ValueError, match=r"generate: .*a message from the user"):
        model.generate(**asked)


def test_a_prompt_of_its_marker_alone_is_an_error(exported):
    """As a tokenizer writes one that drops the words of a question."""
    model, tokenizer = _open(exported)
    asked = _asked(tokenizer)
    asked["attention_mask"][1, :-1] = 0
    with pytest.raises(ValueError, match=r"alone, without a question.* README\.md"):
        model.generate(**asked)


def test_the_last_message_of_the_user_is_the_question(exported):
    """As clients send chats: with a system's message, in several turns, and a text in parts."""
    tokenizer = AutoTokenizer.from_pretrained(exported)
    (alone,) = _chats([QUESTION])
    before = [{"role": "system", "content": "Be brief ."}, *_chats(["How many ?"])[0]]
    before.append({"role": "assistant", "content": "5"})
    parts = [
        {"type": "text", "text": QUESTION[:4]},
        {"type": "image"},
        {"type": "text", "text": QUESTION[4:]},
    ]
    for chat in ([*before, *alone], [*before, {"role": "user", "content": parts}]):
        assert (
            tokenizer.apply_chat_template(chat)["input_ids"]
            == tokenizer.apply_chat_template(alone)["input_ids"]
        )


def test_what_a_server_s_client_did_wrong_is_its_error(exported, monkeypatch):
    """Where transformers serves, with FastAPI: an HTTPException of 400, which is a ValueError too."""

    class HTTPException(Exception):
        def __init__(self, status_code, detail):
            self.status_code = status_code
            self.detail = detail

    monkeypatch.setitem(
        sys.modules,
        "starlette.exceptions",
        SimpleNamespace(HTTPException=HTTPException),
    )
    model, tokenizer = _open(exported)
    asked = tokenizer.apply_chat_template(
        _chats(["How many aardvarks ?"]), return_tensors="pt", return_dict=True
    )
    with pytest.raises(HTTPException) as refused:
        model.generate(**asked)
    assert isinstance(refused.value, ValueError)
    assert refused.value.status_code == 400
    assert "a word that the tokenizer doesn't know" in str(refused.value)


@pytest.mark.parametrize("beams", [1, 2])
def test_a_thought_has_the_answer_s_scores_as_transformers_returns_them(
    exported, beams
):
    torch = pytest.importorskip("torch")
    model, tokenizer = _open(exported)
    asked = _asked(tokenizer, QUESTIONS[:2])
    wanted = {
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
        "num_beams": beams,
    }
    thought = model.generate(**asked, return_dict_in_generate=True, **wanted)
    new = thought.sequences[:, asked["input_ids"].shape[1] :]
    assert (
        len(thought.scores)
        == len(thought.logits)
        == len(thought.hidden_states)
        == new.shape[1]
    )
    plain = model.generate(**asked, return_dict_in_generate=True)
    assert (
        plain.scores is plain.logits is plain.hidden_states is plain.attentions is None
    )
    beam_indices = thought.beam_indices
    scores = model.compute_transition_scores(
        thought.sequences, thought.scores, beam_indices, normalize_logits=beams == 1
    )
    for row in range(2):
        thought_TD = thought.latents[row, : thought.lengths[row]]
        logits_V = torch.tensor(_after_a_thought(model, asked, row, thought_TD))
        assert scores[row, 0].item() == pytest.approx(
            logits_V.log_softmax(-1)[new[row, 0]].item(), abs=1e-4
        )


@pytest.mark.slow
@pytest.mark.parametrize("reasoner", ["coconut_qwen2", "coconut_qwen3"])
def test_a_qwen_thinks_as_itself(reasoner, tmp_path):
    export_checkpoint(
        workdir(reasoner, tmp_path / "work") / "checkpoints" / "cold_start",
        tmp_path / "exported",
    )
    model, tokenizer = _open(tmp_path / "exported")
    assert (
        type(model).__name__
        == type(AutoModelForCausalLM.from_pretrained(tmp_path / "exported")).__name__
    )
    asked = _asked(tokenizer, [QUESTION])
    thought = model.generate(**asked, return_dict_in_generate=True, output_logits=True)
    expected = model.compute_transition_scores(
        thought.sequences, thought.logits, normalize_logits=True
    )
    found = _log_probabilities(
        model,
        thought.sequences,
        None,
        asked["input_ids"].shape[1],
        latents=thought.latents,
    )
    np.testing.assert_allclose(found.detach(), expected, atol=2e-4)


@pytest.mark.slow
def test_adapters_of_peft_are_put_on_it(exported):
    peft = pytest.importorskip("peft")
    model, tokenizer = _open(exported)
    asked = _asked(tokenizer)
    before = model.generate(**asked)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=True)
    )
    np.testing.assert_array_equal(adapted.generate(**asked), before)
    with pytest.raises(ValueError, match="has no thought"):
        adapted.train()(**asked, labels=asked["input_ids"])
    model.config.think_in_forward = True
    adapted(
        input_ids=asked["input_ids"],
        attention_mask=asked["attention_mask"],
        labels=asked["input_ids"],
    ).loss.backward()
    gradients = [p.grad.abs().sum() for p in adapted.parameters() if p.grad is not None]
    assert max(gradients) > 0


def _log_probabilities(model, ids, mask, prompts, **given):
    """transformers' and TRL's: of each token after the prompts, at the position before it."""
    new = ids[:, prompts:]
    logits = model(
        input_ids=ids, attention_mask=mask, logits_to_keep=new.shape[1] + 1, **given
    ).logits[:, :-1]
    return logits.log_softmax(dim=-1).gather(2, new[..., None])[..., 0]


def test_a_forward_that_thinks_has_the_probabilities_of_the_answers(work):
    """Against the logits that `generate` chose by; of rows padded on the left, as TRL has them, and on the right."""
    torch = pytest.importorskip("torch")
    folder = work.parent / "cold_start"
    model, tokenizer = _open(folder)
    asked = _asked(tokenizer)
    prompts = asked["input_ids"].shape[1]
    thought = model.generate(**asked, return_dict_in_generate=True, output_logits=True)
    expected = model.compute_transition_scores(
        thought.sequences, thought.logits, normalize_logits=True
    )
    new = thought.sequences[:, prompts:]
    real = (new == tokenizer.eos_token_id).cumsum(dim=1) - (
        new == tokenizer.eos_token_id
    ).long() == 0
    mask = torch.cat([asked["attention_mask"], real], dim=1)
    thinking = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, think_in_forward=True
    )
    if getattr(model.config, "latent_start_id", None) is None:
        with pytest.raises(
            ValueError, match="no token marks the end of this model's prompts"
        ):
            thinking(**asked)
        return
    for training in (False, True):
        thinking.train(training)
        found = _log_probabilities(thinking, thought.sequences, mask, prompts)
        np.testing.assert_allclose(found[real].detach(), expected[real], atol=2e-4)
    given = {"latents": thought.latents, "latent_lengths": thought.lengths}
    found = _log_probabilities(model, thought.sequences, mask, prompts, **given)
    np.testing.assert_allclose(found[real].detach(), expected[real], atol=2e-4)

    rows = [thought.sequences[row][mask[row].bool()] for row in range(len(QUESTIONS))]
    ids = torch.nn.utils.rnn.pad_sequence(
        rows, batch_first=True, padding_value=tokenizer.pad_token_id
    )
    right = torch.nn.utils.rnn.pad_sequence(
        [torch.ones_like(row) for row in rows], batch_first=True
    )
    labels = ids.masked_fill(right == 0, -100)
    for row, length in enumerate(asked["attention_mask"].sum(dim=1)):
        labels[row, :length] = -100
    loss = thinking(input_ids=ids, attention_mask=right, labels=labels).loss
    assert loss.item() == pytest.approx(-expected[real].mean().item(), abs=2e-4)
    loss.backward()
    assert thinking.get_input_embeddings().weight.grad.abs().sum() > 0


@pytest.mark.parametrize("opened_by", ["auto", "class", "copy", "pickle"])
def test_a_body_that_is_called_by_itself_thinks(exported, opened_by):
    """As TRL does, for a loss of its own; from a path it opens transformers' class, and generates first."""
    torch = pytest.importorskip("torch")
    kinds = {"class": transformers.GPT2LMHeadModel}
    kind = kinds.get(opened_by, AutoModelForCausalLM)
    thinking = kind.from_pretrained(
        exported, trust_remote_code=True, think_in_forward=True
    )
    if opened_by == "copy":
        thinking = copy.deepcopy(thinking)
    if opened_by == "pickle":
        thinking = pickle.loads(pickle.dumps(thinking))
    asked = _asked(AutoTokenizer.from_pretrained(exported))
    prompts = asked["input_ids"].shape[1]
    thought = thinking.generate(
        **asked, return_dict_in_generate=True, output_logits=True
    )
    new = torch.ones_like(thought.sequences[:, prompts:])
    mask = torch.cat([asked["attention_mask"], new], dim=1)
    body = thinking.base_model(input_ids=thought.sequences, attention_mask=mask)
    logits = thinking.get_output_embeddings()(body.last_hidden_state)[:, prompts - 1]
    np.testing.assert_allclose(logits.detach(), thought.logits[0], atol=2e-4)
    thinking.config.think_in_forward = False
    with pytest.raises(ValueError, match="has no thought"):
        thinking.train().base_model(**asked)


def test_a_forward_pass_without_a_thought_is_said_once_and_in_training_an_error(work):
    torch = pytest.importorskip("torch")
    model, tokenizer = _open(work.parent / "cold_start")
    asked = _asked(tokenizer)
    with pytest.warns(UserWarning, match="has no thought"):
        plain = model(**asked).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**asked)
        model.generate(**asked)
    model.train()
    model.generate(**asked)
    text = tokenizer(QUESTION, return_tensors="pt")
    embedded = {"inputs_embeds": model.get_input_embeddings()(asked["input_ids"])}
    begun = DynamicCache(config=model.config)
    model(**text, past_key_values=begun, allow_plain_forward=True)
    continued = {"input_ids": text["input_ids"], "past_key_values": begun}
    for inputs in (asked, text, embedded, continued):
        with pytest.raises(ValueError, match="has no thought"):
            model(**inputs, labels=asked["input_ids"])
    assert model(**asked, labels=asked["input_ids"], allow_plain_forward=True).loss > 0
    model.config.think_in_forward = True
    longest = asked["attention_mask"].sum(dim=1).argmax()
    ids_1L = asked["input_ids"][longest][None]
    end_11 = torch.tensor([[tokenizer.eos_token_id]])
    positions_1L = torch.arange(ids_1L.shape[1])[None]
    ended = {"input_ids": torch.cat([ids_1L, end_11, ids_1L], dim=1)}
    numbered = {
        "input_ids": torch.cat([ids_1L, ids_1L], dim=1),
        "position_ids": torch.cat([positions_1L, positions_1L], dim=1),
    }
    none, several = "apply the chat template", "packing"
    has_marker = hasattr(model.config, "latent_start_id")
    if not has_marker:
        none = several = "no token marks the end"
    for inputs, said in ((text, none), (ended, several), (numbered, several)):
        with pytest.raises(ValueError, match=f"forward with a thought: .*{said}"):
            model(**inputs)

    # A marker that an answer has is one of its tokens.
    if has_marker:
        marker_11 = torch.full((1, 1), model.config.latent_start_id)
        answered = torch.cat([ids_1L, ids_1L[:, :2], marker_11, ids_1L[:, :1]], dim=1)
        logits_1L = model.eval()(input_ids=answered).logits
        before_1L = model(input_ids=answered[:, :-2]).logits
        assert logits_1L.shape[1] == answered.shape[1]

        # Padding on the right, whose positions begin again, is no second prompt.
        mask = torch.tensor([[1] * answered.shape[1] + [0]])
        padded = {
            "input_ids": torch.cat([answered, end_11], dim=1),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(dim=1) - 1).masked_fill(mask == 0, 1),
        }
        np.testing.assert_allclose(
            model(**padded).logits[:, :-1].detach(), logits_1L.detach(), atol=1e-5
        )
        np.testing.assert_allclose(
            logits_1L[:, :-2].detach(), before_1L.detach(), atol=1e-5
        )
        model.train()
    untouched = AutoModelForCausalLM.from_pretrained(work.parent / "cold_start")
    assert type(untouched).__module__.startswith("transformers.")
    assert type(model).__name__ == type(untouched).__name__
    np.testing.assert_array_equal(plain.detach(), untouched(**asked).logits.detach())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("tuning", ["prompt", "prefix"])
def test_what_prompt_tuning_puts_before_a_prompt_leaves_no_place_for_a_thought(
    work, tuning, training
):
    """Of a model that thinks in `forward` it is an error, of another a warning or, in training, an error too."""
    peft = pytest.importorskip("peft")
    kinds = {"prompt": peft.PromptTuningConfig, "prefix": peft.PrefixTuningConfig}
    model, tokenizer = _open(work.parent / "cold_start")
    asked = _asked(tokenizer)
    tuned = peft.get_peft_model(
        model, kinds[tuning](num_virtual_tokens=2, task_type="CAUSAL_LM")
    )
    tuned.train(training)
    if training:
        with pytest.raises(ValueError, match="has no thought"):
            tuned(**asked)
    elif tuning == "prompt" or hasattr(model.config, "latent_start_id"):
        with pytest.warns(UserWarning, match="has no thought"):
            tuned(**asked)
    else:
        pytest.skip("without a marker a prompt after a prefix looks like any next word")
    model.config.think_in_forward = True
    with pytest.raises(ValueError, match="takes input_ids, and no cache or inputs_em"):
        tuned(**asked)


@pytest.mark.parametrize("trusted", [True, False])
def test_continuous_batching_is_a_line(exported, trusted):
    """And where transformers serves with it, a model that hasn't it is asked one by one."""
    pytest.importorskip("torch")
    model = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=trusted)
    ids = AutoTokenizer.from_pretrained(exported).apply_chat_template(
        _chats([QUESTION])
    )["input_ids"]
    with pytest.raises(
        ValueError, match="thought" if trusted else "thinks before it answers"
    ):
        model.generate_batch(ids)
    assert hasattr(model, "init_continuous_batching") != trusted


def test_training_mode_thinks_as_evaluation_does(exported):
    """Gradient checkpointing leaves a model in training mode no cache, and dropout is noise."""
    model, tokenizer = _open(exported)
    asked = _asked(tokenizer)
    before = model.generate(**asked, return_dict_in_generate=True)
    model.train()
    model.gradient_checkpointing_enable()
    model.get_input_embeddings().eval()
    after = model.generate(**asked, return_dict_in_generate=True)
    np.testing.assert_array_equal(after.lengths, before.lengths)
    np.testing.assert_allclose(after.latents, before.latents, atol=1e-5)
    np.testing.assert_array_equal(after.sequences, before.sequences)
    assert model.training
    assert not model.get_input_embeddings().training


def test_forward_takes_the_longest_that_generate_returns(exported):
    """Which a trainer feeds it whole, the last token too."""
    pytest.importorskip("torch")
    model = AutoModelForCausalLM.from_pretrained(
        exported, trust_remote_code=True, think_in_forward=True
    )
    _, tokenizer = _open(exported)
    asked = _asked(tokenizer, ["How many ?"])
    endless = {"max_new_tokens": 999, "eos_token_id": -1, "stop_threshold": None}
    for name, value in endless.items():
        setattr(model.generation_config, name, value)
    with pytest.warns(UserWarning, match="max_new_tokens is"):
        sequences = model.generate(**asked)
    assert model(input_ids=sequences).logits.shape[:2] == sequences.shape
    longer = sequences[:, [*range(sequences.shape[1]), -1]]
    with pytest.raises(ValueError, match="more tokens and latents than"):
        model(input_ids=longer)


def test_forward_refuses_a_word_that_is_none(exported):
    """In an answer too, which would be trained on or scored as any other unknown word."""
    pytest.importorskip("torch")
    model = AutoModelForCausalLM.from_pretrained(
        exported, trust_remote_code=True, think_in_forward=True
    )
    _, tokenizer = _open(exported)
    chat = [*_chats(["How many ?"])[0], {"role": "assistant", "content": "nosuchword"}]
    answered = tokenizer.apply_chat_template(
        chat, return_tensors="pt", return_dict=True
    )
    assert tokenizer.unk_token_id in answered["input_ids"]
    with pytest.raises(ValueError, match="a word that the tokenizer doesn't know"):
        model(**answered)


def test_copies_for_several_devices_of_one_process_are_refused(exported):
    model, _ = _open(exported)
    with pytest.raises(ValueError, match="DataParallel"):
        model._replicate_for_data_parallel()


def test_a_generate_that_thinks_otherwise_than_forward_says_so(exported, recwarn):
    """Its own arguments do not reach `forward`; those of the model's generation_config do."""
    torch = pytest.importorskip("torch")
    model = AutoModelForCausalLM.from_pretrained(
        exported, trust_remote_code=True, think_in_forward=True
    )
    _, tokenizer = _open(exported)
    asked = _asked(tokenizer)
    recwarn.clear()
    model.generate(**asked)
    assert not [warning for warning in recwarn if "forward" in str(warning.message)]
    with pytest.warns(UserWarning, match="max_latents is 1 here"):
        model.generate(**asked, max_latents=1)
    with pytest.warns(UserWarning, match=r"stop_threshold is 0\.25 here"):
        model.generate(**asked, stop_threshold=0.25)

    # A trainer would take the first of two markers for the prompt's end.
    ids = asked["input_ids"]
    mask = torch.ones_like(ids)
    twice = {"input_ids": ids.repeat(1, 2), "attention_mask": mask.repeat(1, 2)}
    with pytest.raises(ValueError, match="several times"):
        model.generate(**twice)


def test_an_export_whose_weights_are_offloaded_thinks(exported, tmp_path):
    pytest.importorskip("accelerate")
    model, tokenizer = _open(exported)
    asked = _asked(tokenizer)
    places = {"device_map": {"": "disk"}, "offload_folder": str(tmp_path)}
    offloaded = AutoModelForCausalLM.from_pretrained(
        exported, trust_remote_code=True, **places
    )
    assert offloaded.device.type == "meta"
    np.testing.assert_array_equal(offloaded.generate(**asked), model.generate(**asked))


@pytest.mark.parametrize("given", ["argument", "config", "both"])
def test_the_caller_s_max_new_tokens_wins(exported, given):
    model, tokenizer = _open(exported)
    asked = _asked(tokenizer, ["How many ?"])
    arguments = {} if given == "config" else {"max_new_tokens": 1}
    if given != "argument":
        most = {"config": 1, "both": 2}[given]
        arguments["generation_config"] = GenerationConfig(
            max_new_tokens=most, eos_token_id=-1
        )
    assert (
        model.generate(**asked, **arguments).shape[1] == asked["input_ids"].shape[1] + 1
    )


@pytest.mark.parametrize("form", [dict, GenerationConfig])
def test_the_caller_s_max_length_is_of_prompt_and_answer(exported, form):
    """As lm-eval gives it; a number of new tokens goes before it, as in transformers."""
    model, tokenizer = _open(exported)
    asked = _asked(tokenizer)
    length = asked["input_ids"].shape[1] + 2

    def said(**settings):
        given = form(eos_token_id=-1, **settings)
        arguments = given if form is dict else {"generation_config": given}
        return model.generate(**asked, **arguments).shape[1]

    assert said(max_length=length) == length
    assert said(max_length=length, max_new_tokens=1) == length - 1
    with pytest.raises(ValueError, match=f"max_length={length - 2} leaves no room"):
        said(max_length=length - 2)


@pytest.mark.parametrize("form", [dict, GenerationConfig])
def test_the_caller_s_min_length_is_of_prompt_and_answer(exported, form):
    """The end token, which would be first, comes when there are as many."""
    model, tokenizer = _open(exported)
    asked = _asked(tokenizer)
    length = asked["input_ids"].shape[1] + 4
    first = model.generate(**asked, max_new_tokens=1)[0, -1].item()
    given = form(eos_token_id=first, min_length=length, max_length=length + 4)
    arguments = given if form is dict else {"generation_config": given}
    answers = model.generate(**asked, num_beams=1, **arguments)[:, length - 4 :]
    assert first not in answers[0, :4].tolist()
    assert answers[0, 0] != first


def test_a_caller_s_functions_see_prompt_and_answer(exported):
    """As in transformers: lm-eval's stop sequences look behind the prompt's length."""
    model, tokenizer = _open(exported)
    asked = _asked(tokenizer)
    whole = model.generate(**asked, num_beams=2, num_return_sequences=2)
    seen = []

    def process(ids, scores):
        seen.append(ids)
        return scores

    def stop(ids, scores):
        seen.append(ids)
        return ids[:, 0] < 0

    def allow(row, ids):
        assert (
            ids.tolist()[: asked["input_ids"].shape[1]]
            == asked["input_ids"][row].tolist()
        )
        return [*range(len(tokenizer))]

    functions = {
        "logits_processor": LogitsProcessorList([process]),
        "stopping_criteria": StoppingCriteriaList([stop]),
        "prefix_allowed_tokens_fn": allow,
    }
    again = model.generate(**asked, **functions, num_beams=2, num_return_sequences=2)
    np.testing.assert_array_equal(again, whole)
    prompts = asked["input_ids"]
    lengths = {ids.shape[1] - prompts.shape[1] for ids in seen}
    assert lengths == {*range(whole.shape[1] - prompts.shape[1] + 1)}
    for ids in seen:
        times = len(ids) // len(prompts)
        np.testing.assert_array_equal(
            ids[:, : prompts.shape[1]], prompts.repeat_interleave(times, dim=0)
        )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"input_ids": None}, "takes the tokens of prompts"),
        ({"input_ids": "flat"}, "takes the tokens of prompts"),
        ({"token_type_ids": [[0]]}, "takes no token_type_ids"),
        ({"guidance_scale": 2.0}, "takes no guidance_scale"),
        ({"prompt_lookup_num_tokens": 2}, "takes no prompt_lookup_num_tokens"),
    ],
)
def test_what_a_thought_can_not_be_made_of_is_a_line(exported, changes, says):
    model, tokenizer = _open(exported)
    asked = _asked(tokenizer, ["How many ?"])
    if changes.get("input_ids") == "flat":
        changes = {"input_ids": asked["input_ids"][0]}
    with pytest.raises(ValueError, match=says):
        model.generate(**asked | changes)


def test_files_have_the_permissions_that_the_umask_leaves(exported, tmp_path):
    run = exported.parent / "work" / "checkpoints" / "cold_start"
    before = os.umask(0o027)
    try:
        export_checkpoint(run, tmp_path / "exported")
    finally:
        os.umask(before)
    assert oct((tmp_path / "exported").stat().st_mode & 0o777) == "0o750"
    files = [path for path in (tmp_path / "exported").rglob("*") if path.is_file()]
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {"0o640"}


def test_untrusted_it_does_not_answer_without_a_thought(exported):
    pytest.importorskip("torch")
    model = AutoModelForCausalLM.from_pretrained(exported)
    asked = _asked(AutoTokenizer.from_pretrained(exported))
    for arguments in (
        {},
        {"max_new_tokens": 5},
        {"do_sample": True, "top_k": 0},
        {"num_beams": 2},
        {"sequence_bias": {(3,): 1.0}},
    ):
        with pytest.raises(
            ValueError, match=r"thinks before it answers.*trust_remote_code=True"
        ):
            model.generate(**asked, **arguments)
    thought = model.generate(
        **asked, custom_generate=str(exported), trust_remote_code=True
    )
    assert thought.shape[1] > asked["input_ids"].shape[1]


_FROM_THE_HUB = """
from transformers import AutoModelForCausalLM, AutoTokenizer

for revision in ("old", "main"):
    tokenizer = AutoTokenizer.from_pretrained("me/thinks", revision=revision)
    model = AutoModelForCausalLM.from_pretrained("me/thinks", revision=revision, trust_remote_code=True)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "How many ?"}], return_tensors="pt")
    print(model.generate(**prompt, return_dict_in_generate=True).lengths.item())
"""


@pytest.mark.slow
def test_a_revision_of_the_hub_has_its_own_gate(exported, tmp_path):
    """Of the hub's cache, with two commits; the newer one's gate never stops."""
    pytest.importorskip("torch")
    repository = tmp_path / "models--me--thinks"
    for commit, revision in (("a" * 40, "old"), ("b" * 40, "main")):
        shutil.copytree(exported, repository / "snapshots" / commit)
        write_text(repository / "refs" / revision, commit)
    gate = repository / "snapshots" / ("b" * 40) / "reasoner.safetensors"
    save_file(
        {name: -100 + 0 * tensor for name, tensor in load_file(gate).items()}, gate
    )
    places = {
        "HF_HUB_CACHE": str(tmp_path),
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-c", _FROM_THE_HUB]
    done = subprocess.run(
        command, env=os.environ | places, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split() == ["1", str(T)], done.stderr[-2000:]


@pytest.mark.parametrize(
    ("reasoner", "latent_policy", "latents", "words"),
    [
        ("coconut_gpt2", "soft", 4, "thinks in slpo_jax alone"),
        ("text_gpt2", "soft", 4, "Its thought (`soft`) is slpo_jax's alone"),
        ("text_gpt2", "latent", 0, "`generate` is all that it needs"),
    ],
)
def test_an_export_that_cannot_think_says_so(
    tmp_path, reasoner, latent_policy, latents, words, warnings
):
    config = run_config(reasoner)
    config.latent_policy.name = latent_policy
    config.max_latents = latents
    config.gate.enabled = False
    exported = tmp_path / "exported"
    export_checkpoint(checkpoint(config, tmp_path / "run"), exported)
    said = [line for line in warnings if "thinks in slpo_jax alone" in line]
    assert len(said) == (latents > 0)
    card = (exported / "README.md").read_text()
    assert words in card
    assert "custom_generate" not in card
    assert not (exported / "custom_generate").exists()
    assert not (exported / "chat_template.jinja").exists()
    generation = exported / "generation_config.json"
    assert generation.exists() == reasoner.startswith("coconut")
    if generation.exists():
        assert "slpo_jax alone" in json.loads(generation.read_text())["sequence_bias"]
        assert "auto_map" not in json.loads((exported / "config.json").read_text())


def test_an_export_s_own_code_is_no_news_to_us(exported, caplog):
    load_solver(str(exported))
    assert "auto_map" not in caplog.text


def test_the_file_needs_neither_jax_nor_this_package(exported):
    text = (exported / "custom_generate" / "generate.py").read_text()
    found = {
        name.partition(".")[0]
        for name in re.findall(r"^ *(?:import|from) ([\w.]+)", text, re.MULTILINE)
    }
    assert found - sys.stdlib_module_names == {"torch", "transformers", "safetensors"}


def _with_a_beginning():
    """As Llama 3's: a token in front of every text."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    bos = [("<|begin|>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<|begin|> $A", special_tokens=bos
    )
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [lambda: task_tokenizer("synthetic", 20), byte_tokenizer, _with_a_beginning],
)
@pytest.mark.parametrize(
    "architecture", [Coconut(), Codi(projector=1), Codi(projector=1, tidy=False)]
)
def test_the_chat_template_writes_the_prompt(architecture, tokenizer):
    template = architecture.template(tokenizer())
    write_chat_template(template)
    questions = [QUESTION, f"  {QUESTION} "]
    if not isinstance(template.tokenizer.backend_tokenizer.model, models.WordLevel):
        questions += [
            "",
            "a  b   c",
            "\ttab\n",
            '"{{ question }}" {% if %}',
            "Zoë's 3 \\n",
            "<|start-latent|>",
        ]
    for question in questions:
        chat = [{"role": "user", "content": question}]
        ids = template.tokenizer.apply_chat_template(chat, return_dict=True)
        assert ids["input_ids"] == template.prompt(question)


def _words_for_colar():
    asked = "Question: How many ? Let's think step by step:(Thinking speed: 1)"
    return words_tokenizer(words_of([asked, QUESTION, "### Answer:5", "Answer:8"]))


@pytest.mark.parametrize(
    ("architecture", "tokenizer"),
    [
        (Coconut(), lambda: task_tokenizer("synthetic", 20)),
        (Coconut(), byte_tokenizer),
        (Colar(8), lambda: task_tokenizer("synthetic", 20)),
        (Colar(8), _words_for_colar),
    ],
)
def test_an_answer_at_a_chat_s_end_is_written_for_programs_that_train_on_chats(
    architecture, tokenizer
):
    """TRL cuts the prompt from the front of the whole, and has a loss on the assistant's tokens alone.

    CoLaR's marker is a word, into which the answer's first word must not run.
    """
    template = architecture.template(tokenizer(), prompt=PromptConfig(speed=1))
    write_chat_template(template)
    chat = [
        *_chats(["How many ?"])[0],
        {"role": "assistant", "content": "5"},
        *_chats([QUESTION])[0],
        {"role": "assistant", "content": template.answer_text("8")},
    ]
    answer = [*template.answer_ids(["8"])[0], template.eos_id]
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    whole = template.tokenizer.apply_chat_template(chat, **options)
    prompt = template.prompt(QUESTION)
    assert whole["input_ids"] == prompt + answer
    assert whole["assistant_masks"] == [0] * len(prompt) + [1] * len(answer)
    for chat_to_answer in (chat, chat[:-1]):
        asked = template.tokenizer.apply_chat_template(
            chat_to_answer, add_generation_prompt=True, return_dict=True
        )
        assert asked["input_ids"] == prompt
