"""CoLaR in Hugging Face's layout: a Llama and `lt_head.*`, the folder written by numpy and safetensors alone."""

import dataclasses
import json
import math
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
)
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    dynamic_module_utils,
)

from slpo_jax import load
from slpo_jax.api.conversion import export_checkpoint, import_checkpoint
from slpo_jax.api.solver import load_solver
from slpo_jax.checkpoints.checkpoint import find_checkpoint
from slpo_jax.checkpoints.identity import identify
from slpo_jax.checkpoints.saved_config import config_of, stated_settings
from slpo_jax.data.batches import pad_prompts
from slpo_jax.data.tokenizer_files import save_tokenizer
from slpo_jax.errors import UserError
from slpo_jax.policy import noise
from slpo_jax.policy.policy import Prompts
from slpo_jax.policy.rollout import sample
from tiny_folder import config_for, draw
from tiny_gguf import llama_config, llama_state

WIDTH = 8
HIDDEN = 12
INNER = 10
LATENTS = 3
SCALE = 0.4
QUESTION = "Tom has 3 pens. How many?"
CONFIG = dict(
    architectures=["ColarLlama"], model_type="llama", hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=160, rms_norm_eps=1e-5,
    head_dim=4, tie_word_embeddings=True, latent_intermediate_size=HIDDEN, latent_embedding_std=SCALE,
)  # fmt: skip
MARK = 256  # "###", after the bytes


def _tokenizer() -> PreTrainedTokenizerFast:
    """A byte each, one token for "###", and a begin-of-text that is put before every text unless told otherwise."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(
        models.BPE({each: i for i, each in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_tokens([AddedToken("###", normalized=False)])
    special = ["<|begin_of_text|>", "<|eot_id|>", "[PAD]", "<|latent|>"]
    backend.add_special_tokens([AddedToken(each, special=True) for each in special])
    backend.decoder = decoders.ByteLevel()
    bos = [(special[0], backend.token_to_id(special[0]))]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{special[0]} $A", special_tokens=bos
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=special[0],
        eos_token=special[1],
        pad_token=special[2],
    )


def _head(rng, prefix="lt_head", lasts=("mean",)) -> dict[str, np.ndarray]:
    shapes = {
        "fc.0.weight": (HIDDEN, WIDTH),
        "fc.0.bias": (HIDDEN,),
        "fc.2.weight": (HIDDEN, HIDDEN),
    }
    shapes |= {"fc.2.bias": (HIDDEN,), "fc.3.weight": (HIDDEN,), "fc.3.bias": (HIDDEN,)}
    for last in lasts:
        shapes |= {f"{last}.weight": (WIDTH, HIDDEN), f"{last}.bias": (WIDTH,)}
    return {f"{prefix}.{name}": draw(rng, *shape) for name, shape in shapes.items()}


def published(folder, config=CONFIG, without="", **more) -> dict[str, np.ndarray]:
    """Write it; its tensors are returned."""
    folder.mkdir()
    texts = _tokenizer()
    rng = np.random.default_rng(2)
    save_tokenizer(texts, folder)
    ids = dict(
        latent_id=texts.convert_tokens_to_ids("<|latent|>"),
        latent_start_id=-1,
        latent_end_id=MARK,
    )
    sizes = llama_config(**config | ids | {"vocab_size": len(texts)})
    sizes.save_pretrained(folder)
    tensors = {
        name: 5 * array if array.ndim == 2 else array
        for name, array in llama_state(sizes).items()
    }
    tensors |= (
        {"lm_head.weight": tensors["model.embed_tokens.weight"]} | _head(rng) | more
    )
    tensors.pop(without, None)
    save_file(tensors, folder / "model.safetensors")
    return tensors


def _latent(head: dict[str, np.ndarray], hidden_D: np.ndarray) -> np.ndarray:
    """CoLaR's deterministic latent of one hidden state, in float64."""
    w = {
        name.removeprefix("lt_head."): array.astype(np.float64)
        for name, array in head.items()
    }
    x = w["fc.0.weight"] @ hidden_D.astype(np.float64) + w["fc.0.bias"]
    x = np.array([value * 0.5 * (1 + math.erf(value / math.sqrt(2))) for value in x])
    x = w["fc.2.weight"] @ x + w["fc.2.bias"]
    x = (x - x.mean()) / np.sqrt(x.var() + 1e-5) * w["fc.3.weight"] + w["fc.3.bias"]
    return SCALE * (w["mean.weight"] @ x + w["mean.bias"])


def test_it_is_asked_at_a_speed_that_is_given(tmp_path):
    published(tmp_path / "colar")
    prompt = load(tmp_path / "colar", speed=3).solver.setup.template.prompt("?")
    assert _tokenizer().decode(prompt).endswith("(Thinking speed: 3)###")
    with pytest.raises(UserError, match=r"speed: 2\.5"):
        load(tmp_path / "colar", speed=2.5)


@pytest.mark.slow
def test_latents_are_the_head_s_of_each_hidden_state(tmp_path):
    """Asked as published, without a begin-of-text; every step of the oracle is a fresh pass over one unpadded row."""
    tensors = published(tmp_path / "colar")
    solver = load_solver(str(tmp_path / "colar"), latents=LATENTS, max_answer_tokens=4)
    policy = solver.setup.policy.without_noise().with_config(stopping="length")
    template = solver.setup.template
    prompt = template.prompt(QUESTION)
    texts = _tokenizer()
    asked = f"Question: {QUESTION} Let's think step by step:(Thinking speed: 2)###"
    assert prompt == texts(asked, add_special_tokens=False)["input_ids"]
    assert (prompt[-1], template.closing_ids, template.banned_ids) == (
        MARK,
        (MARK,),
        (),
    )
    assert template.suffix((), "7") == [
        MARK,
        *texts("Answer:7", add_special_tokens=False)["input_ids"],
        MARK + 2,
    ]

    padded = Prompts(*pad_prompts([prompt], [len(prompt) + 3], template.pad_id))
    keys = noise.row_keys(jax.random.key(0), jnp.zeros(1, jnp.int32))
    out = sample(policy, solver.params, padded, keys, jnp.array([LATENTS]))

    def hidden(inputs):
        row = jnp.asarray(np.array(inputs, np.float32))[None]
        at = jnp.arange(len(inputs))[None]
        return np.asarray(
            policy.reasoner.forward(solver.params, row, at, at >= 0)[0][0, -1]
        )

    inputs = [tensors["model.embed_tokens.weight"][token] for token in prompt]
    for _ in range(LATENTS):
        inputs.append(_latent(tensors, hidden(inputs)))
    expected = np.array(inputs[-LATENTS:])
    assert int(out.lengths[0]) == LATENTS
    np.testing.assert_allclose(
        out.actions["of"][0, :LATENTS], expected, rtol=1e-4, atol=1e-5
    )
    inputs.append(tensors["model.embed_tokens.weight"][MARK])
    logits = tensors["lm_head.weight"] @ hidden(inputs)
    assert int(out.completions[0, 0]) == int(np.argmax(logits))


@pytest.mark.parametrize("least", [0, 1])
def test_its_export_thinks_the_same_in_pytorch(tmp_path, monkeypatch, least):
    """Latents, the steps that the likeliest token ends thoughts at, and answers, of prompts padded together."""
    pytest.importorskip("torch")
    monkeypatch.setattr(
        dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setattr(sys, "path", sys.path[:])
    head = draw(np.random.default_rng(100), len(_tokenizer()), WIDTH)
    head[MARK] *= 4  # some thoughts end by themselves
    published(
        tmp_path / "colar",
        CONFIG | {"tie_word_embeddings": False},
        **{"lm_head.weight": head},
    )
    load(tmp_path / "colar", latents=5, max_answer_tokens=4, speed=3).export(
        tmp_path / "first"
    )
    facts = json.loads((tmp_path / "first" / "reasoner.json").read_text())
    facts["config"]["latent_policy"]["colar"]["least"] = least
    (tmp_path / "first" / "reasoner.json").write_text(json.dumps(facts))
    reasoner = load(tmp_path / "first")
    reasoner.export(tmp_path / "exported")

    questions = [
        QUESTION,
        "Why?",
        "A",
        "How many pens has Ben now?",
        "2 + 3",
        "Sum",
        "x",
    ]
    policy = reasoner.solver.setup.evaluator.policy.without_noise()
    template = reasoner.solver.setup.template
    prompts = template.prompts(questions)
    padded = Prompts(*pad_prompts(prompts, [max(map(len, prompts))], template.pad_id))
    keys = noise.row_keys(jax.random.key(0), jnp.zeros(len(prompts), jnp.int32))
    rule_B = jnp.full(len(prompts), 5)
    ours = sample(
        policy.with_config(stopping="length"),
        reasoner.solver.params,
        padded,
        keys,
        rule_B,
    )
    assert [length in ours.lengths.tolist() for length in (0, 1, 4, 5)] == [
        not least,
        True,
        True,
        True,
    ]

    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", trust_remote_code=True
    )
    chats = [[{"role": "user", "content": question}] for question in questions]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    asked = tokenizer.apply_chat_template(
        chats, padding=True, return_tensors="pt", return_dict=True
    )
    np.testing.assert_array_equal(asked["input_ids"], padded.tokens)
    thought = model.generate(**asked, return_dict_in_generate=True)
    assert thought.lengths.tolist() == ours.lengths.tolist()
    np.testing.assert_allclose(
        thought.latents, ours.actions["of"], atol=0.01
    )  # PyTorch in float64: 0.002 apart
    new = thought.sequences[:, asked["input_ids"].shape[1] :].numpy()
    filled = np.pad(
        new, ((0, 0), (0, 4 - new.shape[1])), constant_values=template.pad_id
    )
    np.testing.assert_array_equal(filled, ours.tokens)


@pytest.mark.parametrize("gaussian", [False, True])
def test_there_and_back(tmp_path, gaussian):
    """Imported, exported and opened again it is the same, with the scale of its latents and how it thinks."""
    more = _head(np.random.default_rng(4), lasts=("log_std",)) if gaussian else {}
    tensors = published(
        tmp_path / "colar", **{name: t for name, t in more.items() if "log_std" in name}
    )
    identity = identify(str(tmp_path / "colar"))
    assert identity.reasoner == "colar_llama"
    import_checkpoint(tmp_path / "colar", tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "exported")
    side = load_file(tmp_path / "exported" / "reasoner.safetensors")
    assert side.keys() == {name for name in tensors if name.startswith("lt_head.")}
    assert all(np.array_equal(side[name], tensors[name]) for name in side)
    back = find_checkpoint(config_for(tmp_path / "exported", "colar_llama")).description
    assert dataclasses.asdict(back.architecture) == {
        "projector": HIDDEN,
        "scale": SCALE,
        "gaussian": gaussian,
    }
    for place in map(
        str, (tmp_path / "colar", tmp_path / "ours", tmp_path / "exported")
    ):
        config = config_of(identify(place))
        made = stated_settings(identify(place), config)
        assert (
            config.latent_policy.name,
            config.latent_policy.colar.least,
            config.max_latents,
        ) == ("colar", 0, 64)
        assert (
            made["latent_policy.name"],
            made["latent_policy.colar.least"],
            made["max_latents"],
        ) == ("colar", 0, 64)
    said = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert (said["latent_start_id"], said["latent_end_id"], said["latent_id"]) == (
        MARK,
        MARK,
        MARK + 4,
    )
    assert "`lt_head.*`: Linear" in (tmp_path / "exported" / "README.md").read_text()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"without": "lt_head.fc.0.weight"},
            "tensor lt_head.fc.0.weight is missing; give",
        ),
        ({"without": "lt_head.mean.bias"}, "tensor lt_head.mean.bias is missing; give"),
        (
            {"lt_head.log_std.bias": np.zeros(WIDTH, np.float32)},
            "tensor lt_head.log_std.bias is unexpected; give a",
        ),
        (
            {"lt_head.fc.3.bias": np.zeros(7, np.float32)},
            "tensor lt_head.fc.3.bias has shape [7]",
        ),
        (
            {"config": CONFIG | {"latent_embedding_std": None}},
            "latent_embedding_std in its config.json is None, but",
        ),
    ],
)
def test_what_is_no_colar(tmp_path, changes, words):
    published(tmp_path / "colar", **changes)
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        find_checkpoint(config_for(tmp_path / "colar", "colar_llama"))
    assert str(caught.value).startswith(f"{tmp_path}/colar: ")


RANK = 2
ALPHA = 3.0


def lightning(path, width=WIDTH, with_head=True, **more) -> dict[str, np.ndarray]:
    """A checkpoint as CoLaR's own program leaves it: what it trains, with hyper-parameters that are objects."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(6)
    tensors = _head(rng, "latent_policy", ("mean", "log_std")) if with_head else {}
    for layer in (0, 1):
        for name, rows in (("q_proj", WIDTH), ("v_proj", WIDTH // 2)):
            place = f"llm.base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors |= {f"{place}.lora_A.default.weight": draw(rng, RANK, width)}
            tensors |= {f"{place}.lora_B.default.weight": draw(rng, rows, RANK)}
    tensors |= more
    module = types.ModuleType("not_installed")
    module.Settings = type("Settings", (dict,), {"__module__": "not_installed"})
    sys.modules["not_installed"] = module
    torch.save(
        {
            "epoch": 3, "pytorch-lightning_version": "2.5.1",
            "state_dict": {name: torch.tensor(array) for name, array in tensors.items()},
            "hyper_parameters": module.Settings(model_kwargs=module.Settings(sft_method="colar")),
        },
        path,
    )  # fmt: skip
    del sys.modules["not_installed"]
    return tensors


def test_its_own_program_s_file_opens_with_its_base(tmp_path):
    """Adapters merged; the head's tensors under its names here; no code of the hyper-parameters' classes is needed."""
    base = published(tmp_path / "base")
    for name in list(base):
        if name.startswith("lt_head."):
            del base[name]
    save_file(base, tmp_path / "base" / "model.safetensors")
    tensors = lightning(tmp_path / "epoch7.ckpt")
    changes = dict(base=str(tmp_path / "base"), lora_alpha=ALPHA)
    assert identify(str(tmp_path / "epoch7.ckpt"), **changes).reasoner == "colar_llama"
    checkpoint = find_checkpoint(
        config_for(tmp_path / "epoch7.ckpt", "colar_llama", **changes)
    )
    found = dataclasses.asdict(checkpoint.description.architecture)
    assert found == {"projector": HIDDEN, "scale": SCALE, "gaussian": True}
    identity = identify(str(tmp_path / "epoch7.ckpt"), **changes)
    import_checkpoint(tmp_path / "epoch7.ckpt", tmp_path / "ours", **changes)
    export_checkpoint(
        tmp_path / "ours", tmp_path / "exported"
    )  # in the other layout, whose program has no least
    for config in map(
        config_of,
        (
            identity,
            *map(identify, (str(tmp_path / "ours"), str(tmp_path / "exported"))),
        ),
    ):
        assert (config.latent_policy.name, config.latent_policy.colar.least) == (
            "colar",
            1,
        )
    tree = checkpoint.read()["reasoner"]
    place = "model.layers.1.self_attn.v_proj"
    a, b = (
        tensors[f"llm.base_model.model.{place}.lora_{x}.default.weight"] for x in "AB"
    )
    expected = base[f"{place}.weight"] + ALPHA / RANK * b @ a
    np.testing.assert_allclose(
        tree["backbone"]["layers_1"]["self_attn"]["v_proj"]["kernel"],
        expected.T,
        rtol=1e-5,
    )
    np.testing.assert_array_equal(
        tree["head"]["log_std"]["kernel"], tensors["latent_policy.log_std.weight"].T
    )
    # The CoT model that it is trained from has no head yet.
    lightning(tmp_path / "cot.ckpt", with_head=False)
    cot = find_checkpoint(config_for(tmp_path / "cot.ckpt", "colar_llama", **changes))
    assert cot.lacks == "head"
    assert not np.array_equal(cot.read()["reasoner"]["backbone"]["layers_1"]["self_attn"]["v_proj"]["kernel"].T,
                              base[f"{place}.weight"])  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "more", "words"),
    [
        ({"base": ""}, {}, "config.base: not set, and .*epoch7.ckpt holds LoRA adapters alone"),
        ({"lora_alpha": None}, {}, r"adapters whose scale is not in the file; give their alpha \(config.lora_alpha"),
        ({}, {"width": 7}, "config.base: .*base doesn't fit: .*don't fit model.layers"),
        ({}, {"latent_policy.fc.0.weight": np.zeros((HIDDEN, 9), np.float32)}, r"fc.0.weight has shape \[12, 9\]"),
        ({}, {"critic.weight": np.zeros(3, np.float32)}, "critic.weight is unexpected; give a checkpoint in CoLaR's"),
    ],
)  # fmt: skip
def test_its_own_program_s_file_that_doesn_t_fit(tmp_path, changes, more, words):
    published(tmp_path / "base")
    lightning(tmp_path / "epoch7.ckpt", **more)
    known = dict(base=str(tmp_path / "base"), lora_alpha=ALPHA) | changes
    with pytest.raises(UserError, match=words):
        find_checkpoint(config_for(tmp_path / "epoch7.ckpt", "colar_llama", **known))
