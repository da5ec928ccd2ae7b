"""Checkpoints there and back: Orbax to Hugging Face, opened by transformers, and home again bit for bit."""

import json
import re
import resource
from importlib.metadata import version

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from asked import run_config, write_config
from slpo_jax.api.conversion import export_checkpoint, import_checkpoint
from slpo_jax.architectures import REASONERS
from slpo_jax.checkpoints.checkpoint import find_checkpoint
from slpo_jax.cli.reasoner_commands import import_
from slpo_jax.config import read_config
from slpo_jax.errors import UserError
from slpo_jax.io.orbax import load_params, save_params
from slpo_jax.models.gate import stopping_gate
from slpo_jax.run.experiment import build
from small_run import finished_run
from tiny import random_tree
from tiny_folder import tiny_folder


def _config(reasoner: str, **changes):
    config = run_config(reasoner)
    config.model.update(n_head=4, n_kv_head=2, n_inner=24)
    if reasoner.startswith("text"):
        config.max_latents = 0
    if reasoner.startswith(("text", "adalr")):
        config.gate.enabled = False
    config.update(changes)
    return config


def _name(opened) -> str:
    return (
        f"{opened.description.architecture.name}_{opened.description.model.model_type}"
    )


@pytest.fixture(scope="module", params=list(REASONERS))
def there(request, tmp_path_factory):
    """(checkpoint, functions, parameters, Orbax checkpoint, its export) of a reasoner with random weights."""
    folder = tmp_path_factory.mktemp(request.param)
    config = _config(request.param)
    config.model.tied = (
        request.param != "coconut_llama"
    )  # one of them has a head of its own
    opened = find_checkpoint(read_config(config))
    reasoner = opened.description.architecture.on(opened.description.model)
    gate = stopping_gate(reasoner.width, config.gate.hidden)
    gate_params = jax.tree.map(lambda x: x + 0.1, gate.init(jax.random.key(1)))
    params = {"reasoner": random_tree(reasoner, 3), "gate": gate_params}
    checkpoint = folder / "checkpoints" / "slpo"
    save_params(checkpoint, params)
    opened.write(checkpoint.parent / "reasoner")
    write_config(checkpoint, read_config(config))
    if not config.gate.enabled:  # a run's parameters have a gate all the same
        params = {"reasoner": params["reasoner"]}
    export_checkpoint(checkpoint, folder / "exported")
    return opened, reasoner, params, checkpoint, folder / "exported"


@pytest.mark.slow
def test_transformers_opens_and_decodes_the_same(there):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    opened, reasoner, params, _, exported = there
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        exported, output_loading_info=True
    )
    assert not any(
        info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
    )
    is_qwen = "qwen" in _name(opened)  # AutoTokenizer would cut it as Qwen2's own
    opens = (
        transformers.PreTrainedTokenizerFast if is_qwen else transformers.AutoTokenizer
    )
    tokenizer = opens.from_pretrained(exported)
    text = "Tom has 5 apples . He buys 3 . How many now ?"
    ids = tokenizer(text)["input_ids"]
    assert ids == opened.template.tokenizer(text)["input_ids"]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits.numpy()
    tokens = np.array([ids], np.int32)
    hidden, _ = reasoner.forward(
        params["reasoner"],
        reasoner.embed(params["reasoner"], tokens),
        np.arange(len(ids))[None],
        tokens >= 0,
    )
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(
        reasoner.logits(params["reasoner"], hidden), expected, rtol=0, atol=1e-4
    )
    config = json.loads((exported / "config.json").read_text())
    markers = config.get("latent_start_id"), config.get("latent_end_id")
    assert markers == (
        opened.template.start_id,
        next(iter(opened.template.closing_ids), None),
    )
    assert config["eos_token_id"] == opened.template.eos_id == model.config.eos_token_id


def test_there_and_back_bit_for_bit(there, tmp_path):
    opened, _, params, _, exported = there
    back = import_checkpoint(exported, tmp_path / "back")
    assert _name(back) == _name(opened)
    kept = load_params(tmp_path / "back")
    jax.tree.map(np.testing.assert_array_equal, kept, params)
    assert back.description.gate_trained == ("gate" in params)
    assert (
        back.template.start_id,
        back.template.closing_ids,
        back.template.banned_ids,
    ) == (
        opened.template.start_id,
        opened.template.closing_ids,
        opened.template.banned_ids,
    )
    export_checkpoint(tmp_path / "back", tmp_path / "again")
    card = (tmp_path / "again" / "README.md").read_text()
    assert "converted by slpo_jax from `exported`" in card
    assert str(exported.parent) not in card
    for file in (path.name for path in exported.glob("*.safetensors")):
        first = load_file(exported / file)
        second = load_file(tmp_path / "again" / file)
        assert first.keys() == second.keys()
        assert all(np.array_equal(first[tensor], second[tensor]) for tensor in first)


@pytest.mark.slow
def test_a_run_starts_from_the_export(there, tmp_path):
    opened, _, params, checkpoint, exported = there
    for init in (exported, checkpoint):
        config = _config(_name(opened), init=str(init), tokenizer="")
        config.model.update(n_layer=7, n_embd=4)  # the checkpoint's shapes hold
        config.stages = ("evaluate",)
        config.data.eval.made = "synthetic:test"
        experiment = build(read_config(config), tmp_path / "work")
        found = experiment.initial_params()
        jax.tree.map(
            np.testing.assert_array_equal,
            {name: found[name] for name in params},
            params,
        )
        assert (experiment.config.model.n_layer, experiment.config.model.n_embd) == (
            2,
            16,
        )
        experiment.log.close()


def test_side_file_is_as_documented(there):
    opened, _, params, _, exported = there
    file = exported / "reasoner.safetensors"
    side = load_file(file) if file.exists() else {}
    expected = {}
    if "gate" in params:
        expected = {
            "gate.out.weight": (1, 5 if "hidden" in params["gate"] else 16),
            "gate.out.bias": (1,),
        }
    if "hidden" in params.get("gate", ()):
        expected |= {"gate.hidden.weight": (5, 16), "gate.hidden.bias": (5,)}
    expected |= {
        "adalr": {"recurrent_filter.input_layer.weight": (16, 16), "recurrent_filter.input_layer.bias": (16,),
                  "recurrent_filter.output_layer.weight": (16, 16), "recurrent_filter.output_layer.bias": (16,),
                  "recurrent_filter.norm.weight": (16,), "recurrent_filter.norm.bias": (16,)},
        "codi": {"projector.1.weight": (12, 16), "projector.1.bias": (12,), "projector.3.weight": (16, 12),
                 "projector.3.bias": (16,), "projector.4.weight": (16,), "projector.4.bias": (16,)},
        "colar": {"lt_head.fc.0.weight": (12, 16), "lt_head.fc.0.bias": (12,), "lt_head.fc.2.weight": (12, 12),
                  "lt_head.fc.2.bias": (12,), "lt_head.fc.3.weight": (12,), "lt_head.fc.3.bias": (12,),
                  "lt_head.mean.weight": (16, 12), "lt_head.mean.bias": (16,), "lt_head.log_std.weight": (16, 12),
                  "lt_head.log_std.bias": (16,)},
        "dart": {"silent.embedding": (16,), "silent.fc_in.weight": (12, 16), "silent.fc_in.bias": (12,),
                 "silent.fc_out.weight": (16, 12), "silent.fc_out.bias": (16,)},
    }.get(opened.description.architecture.name, {})  # fmt: skip
    assert {name: tensor.shape for name, tensor in side.items()} == expected


@pytest.mark.slow
def test_the_card_tells_what_was_trained(tmp_path):
    work = finished_run() / "work"
    for stage in ("slpo", "imitate"):
        export_checkpoint(work / "checkpoints" / stage, tmp_path / stage)
        card = (tmp_path / stage / "README.md").read_text()
        assert (
            f"Trained by slpo_jax from random weights, to the end of the stage `{stage}`."
            in card
        )
        assert not re.search(r"(^|\s)/\w+/", card), "a machine's path"
    described = json.loads((tmp_path / "imitate" / "reasoner.json").read_text())
    assert described["gate"] is None, "imitation trains none"
    assert "the stopping gate" not in card


def test_a_full_disk_is_one_line_and_leaves_nothing(there, tmp_path):
    """The system writes no more than some bytes of a file."""
    _, _, _, checkpoint, _ = there
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, before[1]))
    try:
        with pytest.raises(UserError, match="there: "):
            export_checkpoint(checkpoint, tmp_path / "there")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_that_transformers_opens_as_another_is_named(
    there, tmp_path, warnings
):
    if int(version("transformers").partition(".")[0]) < 5:
        pytest.skip("earlier ones take a tokenizer.json as it is")
    opened, _, _, checkpoint, _ = there
    export_checkpoint(checkpoint, tmp_path / "exported")
    said = [
        line for line in warnings if "AutoTokenizer cuts texts in another way" in line
    ]
    is_other = "qwen2" in _name(opened)
    assert len(said) == is_other
    expected = "PreTrainedTokenizerFast" if is_other else "AutoTokenizer"
    card = (tmp_path / "exported" / "README.md").read_text()
    classes = re.findall(r"= (\w*Tokenizer\w*)\.from_pretrained", card)
    assert set(classes) <= {expected}


def test_a_file_alone_is_imported_with_its_base(tmp_path, capsys):
    """As its folder is by itself: shapes and tokenizer are the base's, parameters the file's."""
    base = tmp_path / "base"
    alone = tmp_path / "alone" / "model.safetensors"
    tiny_folder(base)
    alone.parent.mkdir()
    alone.write_bytes((base / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match="alone"):
        import_([str(alone), str(tmp_path / "refused"), "--reasoner=coconut_gpt2"])
    save_file(
        {name: x + 1 for name, x in load_file(alone).items()},
        base / "model.safetensors",
    )
    import_(
        [
            str(alone),
            str(tmp_path / "with"),
            "--reasoner=coconut_gpt2",
            f"--base={base}",
        ]
    )
    save_file(load_file(alone), base / "model.safetensors")
    import_([str(base), str(tmp_path / "whole"), "--reasoner=coconut_gpt2"])
    assert "imported" in capsys.readouterr().out
    found, whole = (
        load_params(path) for path in (tmp_path / "with", tmp_path / "whole")
    )
    jax.tree.map(np.testing.assert_array_equal, found, whole)
