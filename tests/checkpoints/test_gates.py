"""What lies beside a language model: a gate under somebody else's names, an export's own; files by numpy alone."""

import dataclasses
import json
import math

import numpy as np
import pytest
from safetensors.numpy import save_file

import slpo_jax
from asked import edit
from slpo_jax.api.conversion import import_checkpoint
from slpo_jax.checkpoints.checkpoint import find_checkpoint
from slpo_jax.checkpoints.identity import identify
from slpo_jax.checkpoints.saved_config import config_of, stated_settings, stopping_of
from slpo_jax.errors import UserError
from tiny_folder import WIDTH, config_for, draw, tiny_folder

RNG = np.random.default_rng(3)
LINEAR = {"weight": draw(RNG, 1, WIDTH), "bias": draw(RNG, 1)}
HIDDEN = {"weight": draw(RNG, 6, WIDTH), "bias": draw(RNG, 6)}
OUT = {"weight": draw(RNG, 1, 6), "bias": draw(RNG, 1)}
PROJECTOR = {
    f"projector.{name}.{part}": draw(RNG, *shape)
    for name, weight in {"1": (5, WIDTH), "3": (WIDTH, 5), "4": (WIDTH,)}.items()
    for part, shape in (("weight", weight), ("bias", weight[:1]))
}
CONFIG = {"architectures": ["LatentCOCONUTGPT2"], "auto_map": {"AutoModel": "own.Own"}, "gate_threshold": 0.6}


def _named(**modules) -> dict[str, np.ndarray]:
    return {
        f"{name.replace('__', '.')}.{part}": array for name, parts in modules.items() for part, array in parts.items()
    }


@pytest.mark.parametrize("name", ["gate", "transformer__halting__linear"])
def test_a_published_gate_is_taken_by_word_and_shape(tmp_path, caplog, name):
    tiny_folder(tmp_path / "x", **_named(**{name: LINEAR}))
    edit(tmp_path / "x" / "config.json", **CONFIG)
    identity = identify(str(tmp_path / "x"))
    assert (identity.gate_hidden, identity.gate_trained) == (0, True)
    checkpoint = find_checkpoint(config_for(tmp_path / "x", "coconut_gpt2"), identity)
    assert (checkpoint.description.gate, checkpoint.description.gate_trained) == (0, True)
    (out,) = checkpoint.read()["gate"].values()
    np.testing.assert_array_equal(out["kernel"], LINEAR["weight"].T)
    np.testing.assert_array_equal(out["bias"], LINEAR["bias"])
    name = name.replace("__", ".")
    lines = [record.getMessage() for record in caplog.records]
    assert f"{tmp_path / 'x'}: {name}.bias, {name}.weight are taken as the stopping gate" in lines[0]
    assert "config.json: gate_threshold=0.6 is taken as its gate's threshold; --threshold is another" in lines[1]
    assert "config.json: its own code (auto_map) is not run; the model is taken as a plain gpt2" in lines[2]
    assert len(lines) == 3


CARD = "---\nlicense: mit\n---\n# COCONUT+SLPO (GPT-2); "


@pytest.mark.parametrize(
    ("config", "card", "threshold", "line"),
    [
        ({}, "gate thr=0.6", 0.6, "README.md: gate thr=0.6 is taken as"),
        ({"stop_threshold": 0.7}, "gate thr=0.6", None, "stop_threshold=0.7, README.md: gate thr=0.6 is no one"),
        ({"gate_threshold": "high"}, "", None, "config.json: gate_threshold=high is no one threshold"),
        ({}, "a gate, and 0.6 of it", None, ""),
    ],
)
def test_its_threshold_is_what_its_files_say(tmp_path, caplog, config, card, threshold, line):
    tiny_folder(tmp_path, **_named(gate=LINEAR))
    edit(tmp_path / "config.json", **config)
    (tmp_path / "README.md").write_text(CARD + card)
    identity = identify(str(tmp_path))
    said = [record.getMessage() for record in caplog.records][1:]
    assert line in " ".join(said)
    assert len(said) == bool(line)
    assert stated_settings(identity, config_of(identity)) == {"max_latents": 12}
    assert stopping_of(config_of(identity), identity) == ("threshold", threshold)
    import_checkpoint(tmp_path, tmp_path / "imported")
    imported = identify(str(tmp_path / "imported"))
    assert stopping_of(config_of(imported), imported) == ("threshold", threshold)
    assert config_of(imported).max_latents == 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "gate"), [("coconut", {"gate": LINEAR}), ("codi", {"stop_head__0": HIDDEN, "stop_head__2": OUT})]
)
def test_it_thinks_as_our_own_export_of_it(tmp_path, architecture, gate):
    more = PROJECTOR if architecture == "codi" else {}
    tiny_folder(tmp_path / "published", **_named(**gate), **more)
    records = [{"question": f"Tom has {n} pens .", "answer": "3"} for n in range(4)]
    questions = [record["question"] for record in records]
    whole = slpo_jax.load(tmp_path / "published", threshold=1.0).solve(questions[0])
    second = sorted(latent.stop_probability for latent in whole.latents)[-2]
    (tmp_path / "published" / "README.md").write_text(f"{CARD}gate thr={math.floor(1e4 * second) / 1e4:.4f}")
    published = slpo_jax.load(tmp_path / "published")
    ours = slpo_jax.load(published.export(tmp_path / "export"))
    thoughts = [each.solve(questions) for each in (published, ours)]
    assert thoughts[0] == thoughts[1]
    assert len(thoughts[0][0].latents) < len(whole.latents) == 12
    one, other = (each.evaluate(records, samples=3).records for each in (published, ours))
    assert one == other


def test_a_published_gate_of_two_layers(tmp_path, caplog):
    """It becomes `config.gate.hidden`, and the import and its threshold go on from there."""
    tiny_folder(tmp_path / "x", **_named(stop_head__0=HIDDEN, stop_head__2=OUT))
    identity = identify(str(tmp_path / "x"))
    config = config_of(identity)
    assert (config.gate.enabled, config.gate.hidden, stopping_of(config, identity)) == (True, 6, ("threshold", None))
    assert "two layers with a GELU between them" in caplog.text
    import_checkpoint(tmp_path / "x", tmp_path / "y")
    found = identify(str(tmp_path / "y"))
    assert (found.gate_hidden, found.gate_trained, found.reasoner) == (6, True, "coconut_gpt2")
    gate = find_checkpoint(config_for(tmp_path / "x", "coconut_gpt2", **{"gate.hidden": 6}), identity).read()["gate"]
    np.testing.assert_array_equal(gate["hidden"]["kernel"], HIDDEN["weight"].T)
    np.testing.assert_array_equal(gate["out"]["kernel"], OUT["weight"].T)
    with pytest.raises(UserError, match=r"config\.gate\.hidden: .*0.*6"):
        find_checkpoint(config_for(tmp_path / "x", "coconut_gpt2"), identity)
    with pytest.raises(UserError, match=r"stop_head\."):
        find_checkpoint(config_for(tmp_path / "x", "text_gpt2", **{"gate.hidden": 6}), identity)


@pytest.mark.parametrize(
    ("modules", "named"),
    [
        ({"gate": {"weight": LINEAR["weight"]}}, "gate.weight"),  # as a marker's embedding would be
        ({"gate": LINEAR, "gate_norm": {"weight": np.ones(WIDTH, np.float32)}}, "gate"),
        ({"value_head": LINEAR}, "value_head"),
    ],
)
def test_a_gate_that_is_not_known_is_refused_by_name(tmp_path, modules, named):
    tiny_folder(tmp_path, **_named(**modules))
    with pytest.raises(UserError, match=named):
        find_checkpoint(config_for(tmp_path, "coconut_gpt2"))


# What an export has beside its language model, by what its reasoner.json says of it.
GATE = _named(gate__out=LINEAR)


def _export(folder, side, architecture="coconut", **facts):
    tiny_folder(folder)
    known = {"format": 1, "architecture": architecture, "projector": 5 if architecture == "codi" else 0, "tidy": True,
             "gate": 0, "source": "", "config": {}, "rule": None}  # fmt: skip
    (folder / "reasoner.json").write_text(json.dumps(known | facts))
    if side:
        save_file(side, folder / "reasoner.safetensors")
    return config_for(folder, f"{architecture}_gpt2")


def test_an_export_has_the_gate_and_projector_of_its_side_file(tmp_path):
    params = find_checkpoint(_export(tmp_path / "codi", GATE | PROJECTOR, "codi")).read()
    np.testing.assert_array_equal(params["gate"]["out"]["kernel"], LINEAR["weight"].T)
    np.testing.assert_array_equal(params["reasoner"]["projector"]["norm"]["bias"], PROJECTOR["projector.4.bias"])


@pytest.mark.parametrize(
    ("side", "architecture", "missing"),
    [
        ({}, "coconut", "gate.out.weight"),
        ({"gate.out.weight": LINEAR["weight"]}, "coconut", "gate.out.bias"),
        (PROJECTOR, "codi", "gate.out.weight"),
        (GATE, "codi", "projector.1.weight"),
    ],
)
def test_an_export_without_a_part_that_it_says_it_has(tmp_path, side, architecture, missing):
    with pytest.raises(UserError, match=rf"^{tmp_path}/ex/reasoner\.safetensors: .*{missing}"):
        find_checkpoint(_export(tmp_path / "ex", side, architecture))


def test_a_value_that_its_kind_can_t_have(tmp_path):
    config = _export(tmp_path, GATE | PROJECTOR, "codi", projector=0)
    message = rf"^{tmp_path}/reasoner\.json: key projector: 0 is not valid; give a whole number, 1 or more"
    with pytest.raises(UserError, match=message):
        find_checkpoint(config)


def test_a_side_file_without_its_description(tmp_path):
    config = _export(tmp_path / "ex", GATE)
    (tmp_path / "ex" / "reasoner.json").unlink()
    for init, base in (("ex", ""), ("ex/model.safetensors", str(tmp_path / "ex"))):
        with pytest.raises(UserError, match=r"ex/reasoner\.safetensors: .*reasoner\.json"):
            find_checkpoint(dataclasses.replace(config, init=str(tmp_path / init), base=base))
