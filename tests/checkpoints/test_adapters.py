"""PEFT's folders, against W + s B A by hand and against peft itself where it is installed."""

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest

from slpo_jax.architectures.tensors import Stored
from slpo_jax.checkpoints.adapters import Lora, add_adapters, merge_lora
from slpo_jax.checkpoints.checkpoint import find_checkpoint
from slpo_jax.errors import UserError
from slpo_jax.run.provenance import initial_files
from tiny_folder import WIDTH, config_for, draw, lora_pair, peft_folder, tiny_folder

RANK = 2
ALPHA = 3.0
PLACE = "transformer.h.1.attn.c_proj"  # square: its shape doesn't tell that Conv1D's are [in, out]


def _read(folder, base):
    return find_checkpoint(config_for(folder, "text_gpt2", base=str(base))).read()[
        "reasoner"
    ]["backbone"]


def test_adapters_of_a_model_without_a_head(tmp_path):
    """Their names lack the prefix."""
    weights = tiny_folder(tmp_path / "base")
    pair = lora_pair(PLACE.removeprefix("transformer."), WIDTH, WIDTH)
    peft_folder(tmp_path / "peft", pair)
    a, b = pair.values()
    tree = _read(tmp_path / "peft", tmp_path / "base")
    np.testing.assert_allclose(
        tree["h_1"]["attn"]["c_proj"]["kernel"],
        weights[f"{PLACE}.weight"] + ALPHA / RANK * (b @ a).T,
        rtol=1e-6,
    )


def test_another_base_than_the_adapters_name_is_said(tmp_path, caplog):
    tiny_folder(tmp_path / "base")
    pair = lora_pair(PLACE, WIDTH, WIDTH)
    said = "base, and the adapters of .*/peft were trained on other/large"
    for named, is_said in (
        ("some/base", False),
        ("", False),
        ("/gone/cold_start", False),
        ("other/large", True),
    ):
        peft_folder(tmp_path / "peft", pair, base_model_name_or_path=named)
        _read(tmp_path / "peft", tmp_path / "base")
        assert bool(re.search(said, caplog.text)) == is_said == bool(caplog.messages)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"alpha_pattern": {"c_proj": 2}}, "alpha_pattern="),
        ({"peft_type": "IA3"}, "peft_type=IA3"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
        ({"something_of_next_year": 1}, "something_of_next_year=1"),
    ],
)
def test_what_a_peft_folder_says_and_is_not_understood(tmp_path, changes, part):
    """It is not the base's fault."""
    tiny_folder(tmp_path / "base")
    peft_folder(tmp_path / "peft", lora_pair(PLACE, WIDTH, WIDTH), **changes)
    with pytest.raises(
        UserError, match=rf"^{tmp_path}/peft/adapter_config\.json: {part}"
    ):
        _read(tmp_path / "peft", tmp_path / "base")


@pytest.mark.parametrize("tied_again", [False, True])
def test_an_embedding_that_peft_trained_apart_from_its_head(tmp_path, tied_again):
    """PEFT's head stays the base's; where PEFT ties it again, both are the new table."""
    table = tiny_folder(tmp_path / "base")["transformer.wte.weight"] + 1
    saved = {"base_model.model.transformer.wte.weight": table}
    peft_folder(
        tmp_path / "peft",
        saved,
        modules_to_save=["wte"],
        ensure_weight_tying=tied_again,
    )
    if tied_again:
        np.testing.assert_array_equal(
            _read(tmp_path / "peft", tmp_path / "base")["wte"][: len(table)], table
        )
        return
    with pytest.raises(UserError, match=r"peft: .*wte\.weight .*_tying=True"):
        _read(tmp_path / "peft", tmp_path / "base")


def test_a_vocabulary_that_grew_under_peft(tmp_path):
    """PEFT saves embedding and head, which are one, as they are."""
    old = tiny_folder(tmp_path / "base")["transformer.wte.weight"]
    table = np.concatenate([old, np.ones((2, WIDTH), np.float32)])
    names = ("transformer.wte", "lm_head")
    peft_folder(
        tmp_path / "peft",
        {f"base_model.model.{name}.weight": table.copy() for name in names},
    )
    np.testing.assert_array_equal(
        _read(tmp_path / "peft", tmp_path / "base")["wte"], table
    )


def test_a_peft_folder_of_another_base(tmp_path):
    tiny_folder(tmp_path / "base")
    for tensors, part in (
        (
            lora_pair("transformer.h.7.attn.c_proj", WIDTH, WIDTH),
            r"h\.7\.attn\.c_proj\.lora_A\.weight is of no weight",
        ),
        (lora_pair(PLACE, 8, 8), "don't fit"),
        (
            {"base_model.model.transformer.ln_f.weight": np.ones((2, 3), np.float32)},
            "is of no|has shape",
        ),
        (
            {
                "base_model.model.transformer.wte.lora_embedding_A": np.ones(
                    (2, 3), np.float32
                )
            },
            "lora_embedding_A",
        ),
    ):
        peft_folder(tmp_path / "peft", tensors)
        with pytest.raises(
            UserError, match=rf"^config\.base: {tmp_path}/base .*{part}"
        ):
            _read(tmp_path / "peft", tmp_path / "base")
    with pytest.raises(UserError, match=r"^config\.base: "):
        _read(tmp_path / "peft", "")
    tiny_folder(tmp_path / "peft")
    with pytest.raises(
        UserError, match=r"model\.safetensors .*adapter_model\.safetensors"
    ):
        _read(tmp_path / "peft", tmp_path / "base")


def test_an_adapter_goes_on_the_weight_that_is_saved_with_it():
    """As PEFT saves a head that has grown with the vocabulary and has an adapter."""

    def stored(name, value):
        return Stored(name, value.shape, lambda: value)

    rng = np.random.default_rng(1)
    old = draw(rng, 5, WIDTH)
    new = draw(rng, 6, WIDTH)
    a = draw(rng, 1, WIDTH)
    b = draw(rng, 6, 1)
    saved = {"base_layer.weight": new, "lora_A.weight": a, "lora_B.weight": b}
    adapter = {}
    for part, value in saved.items():
        name = f"base_model.model.lm_head.{part}"
        adapter[name] = stored(name, value)
    beside = add_adapters(
        {"lm_head.weight": stored("lm_head.weight", old)}, adapter, Lora(3.0), "x"
    )
    head = merge_lora(beside, Lora(3.0), "x")["lm_head.weight"]
    assert head.shape == (6, WIDTH)
    np.testing.assert_allclose(head.read(), new + 3 * b @ a, rtol=1e-6)


def test_a_run_from_a_peft_folder_is_bound_to_its_base(tmp_path):
    """The digest of what a stage began from."""
    tiny_folder(tmp_path / "base")
    peft_folder(tmp_path / "peft", lora_pair(PLACE, WIDTH, WIDTH))
    config = config_for(tmp_path / "peft", "text_gpt2", base=str(tmp_path / "base"))
    alone = dataclasses.replace(config, init=str(tmp_path / "base"))
    files = [
        initial_files(SimpleNamespace(checkpoint=find_checkpoint(each)))
        for each in (config, alone)
    ]
    assert files == [[tmp_path / "peft", tmp_path / "base"], [tmp_path / "base"]]


@pytest.mark.parametrize("rslora", [False, True])
def test_a_peft_folder_is_what_peft_makes_of_it(tmp_path, rslora):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    import transformers

    tiny_folder(tmp_path / "base")
    base = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(
        r=RANK, lora_alpha=5, use_rslora=rslora, target_modules=["c_attn", "c_proj"], modules_to_save=["ln_f"],
        rank_pattern={"c_attn": 3}, fan_in_fan_out=True, task_type="CAUSAL_LM",
    )  # fmt: skip
    model = peft.get_peft_model(base, settings)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                weight.copy_(
                    torch.tensor(draw(np.random.default_rng(len(name)), *weight.shape))
                )
    model.save_pretrained(tmp_path / "peft")
    merged = model.merge_and_unload().state_dict()
    tree = _read(tmp_path / "peft", tmp_path / "base")
    for layer in range(2):
        for part, name in (
            ("attn", "c_attn"),
            ("attn", "c_proj"),
            ("mlp", "c_fc"),
            ("mlp", "c_proj"),
        ):
            wanted = merged[f"transformer.h.{layer}.{part}.{name}.weight"].numpy()
            np.testing.assert_allclose(
                tree[f"h_{layer}"][part][name]["kernel"], wanted, rtol=1e-5, atol=1e-6
            )
    np.testing.assert_array_equal(
        tree["ln_f"]["scale"], merged["transformer.ln_f.weight"].numpy()
    )
