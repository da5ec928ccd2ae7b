"""SIM-CoT's published checkpoints, laid out as its two programs write them, and what their decoder says."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import slpo_jax
from published import (
    QUESTIONS,
    coconut_hugging_face,
    coconut_original,
    codi_original,
    random_model,
    tokenizer,
    torch,
)
from published_bases import copied, written
from slpo_jax.api.conversion import export_checkpoint, import_checkpoint
from slpo_jax.checkpoints.identity import identify
from slpo_jax.checkpoints.saved_config import config_of
from slpo_jax.errors import UserError
from slpo_jax.io.orbax import load_params
from slpo_jax.models.parts import DECODER
from slpo_jax.models.reasoner import vocabulary_rows
from slpo_jax.policy.explain import MOST, READS, explain
from tiny import load_hf
from tiny_llama import load_hf_llama


def _coconut(folder: Path) -> SimpleNamespace:
    """`checkpoint_28`: GPT-2 with three rows more, and another without."""
    case = copied(folder, coconut_original, "gpt2")
    second = random_model("gpt2", len(tokenizer("gpt2")), seed=41)
    old = Path(case.settings["init"])
    state = torch.load(old) | {
        f"expainable_llm.{name}": tensor for name, tensor in second.state_dict().items()
    }
    old.unlink()
    init = folder / "checkpoint_28"
    known = dict(reads=(2, 1), more=3, alpha=None, latents=10)
    torch.save(state, init)
    return SimpleNamespace(case=case, second=second, init=init, **known)


def _codi(folder: Path) -> SimpleNamespace:
    """A folder with an empty config.json and shards: five rows more, LoRA, and another Llama without."""
    case = copied(folder, codi_original, "llama")
    plain = len(tokenizer("llama"))
    second = random_model("llama", plain, seed=42)
    old = Path(case.settings["init"])
    state = torch.load(old)
    for name in [
        name
        for name in state
        if name.endswith(("embed_tokens.weight", "lm_head.weight"))
    ]:
        state[name] = torch.cat([state[name], state[name][:2]])
    state |= {f"decoder.{name}": tensor for name, tensor in second.state_dict().items()}
    old.unlink()
    _shards(folder, state)
    (folder / "config.json").touch()
    return SimpleNamespace(
        case=case,
        second=second,
        init=folder,
        reads=(1, 0),
        more=5,
        alpha=16.0,
        latents=6,
    )


def _shards(folder: Path, state) -> None:
    names = {
        name: f"pytorch_model-{1 + (place % 2):05}-of-00002.bin"
        for place, name in enumerate(state)
    }
    for shard in set(names.values()):
        torch.save(
            {name: tensor for name, tensor in state.items() if names[name] == shard},
            folder / shard,
        )
    (folder / "pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": names})
    )


@pytest.fixture(scope="module", params=[_coconut, _codi], ids=["coconut", "codi"])
def simcot(request, tmp_path_factory):
    made = request.param(tmp_path_factory.mktemp("published"))
    made.identity = identify(str(made.init), made.case.settings["base"], made.alpha)
    made.imported = tmp_path_factory.mktemp("ours") / "imported"
    given = {"base": made.case.settings["base"], "lora_alpha": made.alpha}
    made.checkpoint = import_checkpoint(made.init, made.imported, **given, explain=True)
    return made


def test_everything_arrives(simcot):
    """The reasoner as without a decoder, its markers after the base's rows, and the decoder on request."""
    case = simcot.case
    plain = len(tokenizer(simcot.identity.backbone))
    found = simcot.checkpoint.read(explain=True)
    alone = simcot.checkpoint.read()
    assert set(found) - set(alone) == {DECODER}
    template = simcot.checkpoint.template
    assert (template.start_id, template.closing_ids) == (case.start, (case.end,))
    config = simcot.checkpoint.description.model
    rows = plain + simcot.more
    assert vocabulary_rows(found["reasoner"]["backbone"]) == config.vocab_size == rows
    load = load_hf if simcot.identity.backbone == "gpt2" else load_hf_llama
    for tree, model, size in (
        (found["reasoner"], case.model, rows),
        (found[DECODER], simcot.second, plain),
    ):
        state = load(tree, dataclasses.replace(config, vocab_size=size)).state_dict()
        for name, tensor in model.state_dict().items():
            np.testing.assert_allclose(
                state[name][: len(tensor)], tensor, atol=1e-6, err_msg=name
            )
    assert tuple(found[DECODER][READS]) == simcot.reads
    for identity in (
        simcot.identity,
        identify(str(simcot.imported)),
    ):  # COCONUT's is of five thoughts
        assert config_of(identity).max_latents == simcot.latents


def test_it_comes_back_to_the_bit_and_is_left_out_unasked(simcot, tmp_path):
    kept = load_params(simcot.imported)
    jax.tree.map(
        np.testing.assert_array_equal, kept, simcot.checkpoint.read(explain=True)
    )
    for asked in (True, False):
        export = tmp_path / f"export_{asked}"
        back = tmp_path / f"back_{asked}"
        export_checkpoint(simcot.imported, export, asked)
        assert ("`decoder.safetensors`" in (export / "README.md").read_text()) == asked
        made = import_checkpoint(export, back, explain=asked)
        assert (
            made.description.architecture == simcot.checkpoint.description.architecture
        )
        left = {name: part for name, part in kept.items() if asked or name != DECODER}
        jax.tree.map(np.testing.assert_array_equal, load_params(back), left)


def _slow_words(simcot, latents_TD: np.ndarray) -> list[list[int]]:
    """Of each thought, by transformers: every token by a whole pass over the latents and the words before it."""
    count, first = simcot.reads
    embed = simcot.case.model.get_input_embeddings()
    said = []
    for start in range(0, len(latents_TD) - count + 1, count):
        inputs = torch.tensor(latents_TD[start : start + count])
        tokens = []
        while len(tokens) < MOST and simcot.case.eos not in tokens:
            places = torch.arange(first, first + len(inputs))[None]
            logits = simcot.second(
                inputs_embeds=inputs[None], position_ids=places
            ).logits[0, -1]
            tokens.append(int(logits.argmax()))
            inputs = torch.cat([inputs, embed(torch.tensor(tokens[-1:]))])
        said.append(tokens)
    return said


@pytest.mark.slow
@torch.no_grad()
def test_thoughts_in_words_are_transformers_own(simcot):
    settings = dict(
        base=simcot.case.settings["base"],
        lora_alpha=simcot.alpha,
        latents=5,
        explain=True,
    )
    reasoner = slpo_jax.load(simcot.init, **settings)
    count = simcot.reads[0]
    for solution in reasoner.solve(QUESTIONS[:3]):
        latents = np.stack([latent.vector for latent in solution.latents])
        slow = _slow_words(simcot, latents)
        words = explain(
            reasoner.solver.setup.policy,
            reasoner.solver.params,
            latents[None],
            simcot.reads,
        )
        assert [
            row[: len(own)]
            for row, own in zip(np.asarray(words[0]).tolist(), slow, strict=True)
        ] == slow
        texts = [
            reasoner.solver.setup.reward.read(np.array(row))
            for row in np.asarray(words[0])
        ]
        said = [latent.words for latent in solution.latents]
        expected = []
        for each in texts:
            end = " ..." if each.cut else ""
            expected.append(each.text.strip() + end)
        assert said[count - 1 :: count] == expected
        assert all(
            (text is None) == bool((place + 1) % count)
            for place, text in enumerate(said)
        )
        assert solution.shown.count("\n        says  ") == len(texts)


@pytest.mark.slow
def test_fewer_latents_than_the_decoder_reads_say_nothing(simcot):
    count = simcot.reads[0]
    for latents in range(count):
        settings = dict(
            base=simcot.case.settings["base"],
            lora_alpha=simcot.alpha,
            latents=latents,
        )
        reasoner = slpo_jax.load(simcot.init, explain=True, **settings)
        solution = reasoner.solve(QUESTIONS[0])
        assert [latent.words for latent in solution.latents] == [None] * latents
        without = slpo_jax.load(simcot.init, **settings).solve(QUESTIONS[0])
        assert solution.text == without.text


def test_what_can_not_say_it(simcot, tmp_path, caplog):
    """Without a decoder, or with one of other shapes."""
    with pytest.raises(UserError, match=r"^explain: .*config\.imitate\."):
        slpo_jax.load(written(coconut_hugging_face).settings["init"], explain=True)
    if simcot.alpha:
        one, other = map(torch.load, simcot.init.glob("*-of-00002.bin"))
        apart = {
            name: torch.zeros(8, 16)
            for name in ("pj_in.weight", "pj_out.U", "pj_out.V")
        }
        torch.save(one | other | apart, tmp_path / "pytorch_model.bin")
        found = identify(
            str(tmp_path / "pytorch_model.bin"),
            simcot.case.settings["base"],
            simcot.alpha,
        )
        assert found.tensors.decoder is None
        assert (
            "decoder.* is a model with projections (pj_in, pj_out), and is left out"
            in caplog.text
        )
        with pytest.raises(UserError, match=r"config\.base: .*config\.json"):
            identify(str(simcot.init), lora_alpha=simcot.alpha)
