"""What an export has beside its language model, by what its reasoner.json says of it."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from slpo_jax.checkpoints.checkpoint import find_checkpoint
from slpo_jax.errors import UserError
from tiny_folder import WIDTH, config_for, draw, tiny_folder

HIDDEN = 3


def _gate(prefix="gate.out"):
    return {f"{prefix}.weight": draw(np.random.default_rng(3), 1, WIDTH), f"{prefix}.bias": np.ones(1, np.float32)}


def _projector():
    shapes = {"1.weight": (HIDDEN, WIDTH), "1.bias": (HIDDEN,), "3.weight": (WIDTH, HIDDEN), "3.bias": (WIDTH,)}
    shapes |= {"4.weight": (WIDTH,), "4.bias": (WIDTH,)}
    return {f"projector.{name}": draw(np.random.default_rng(4), *shape) for name, shape in shapes.items()}


def _export(folder, side, architecture="coconut", more=None, described=True):
    tiny_folder(folder, **more or {})
    facts = {
        "format": 1,
        "architecture": architecture,
        "projector": HIDDEN if architecture == "codi" else 0,
        "tidy": True,
        "gate": 0,
    }
    if described:
        (folder / "reasoner.json").write_text(json.dumps(facts | {"gate_trained": True, "source": "", "settings": {}}))
    if side:
        save_file(side, folder / "reasoner.safetensors")
    return config_for(folder, f"{architecture}_gpt2")


def test_an_export_has_the_gate_and_projector_of_its_side_file(tmp_path):
    gate, projector = _gate(), _projector()
    params = find_checkpoint(_export(tmp_path / "codi", gate | projector, "codi")).read()
    np.testing.assert_array_equal(params["gate"]["out"]["kernel"], gate["gate.out.weight"].T)
    np.testing.assert_array_equal(params["reasoner"]["projector"]["norm"]["bias"], projector["projector.4.bias"])


@pytest.mark.parametrize(
    ("side", "architecture", "missing"),
    [
        ({}, "coconut", "gate.out.weight"),
        ({"gate.out.weight": _gate()["gate.out.weight"]}, "coconut", "gate.out.bias"),
        (_projector(), "codi", "gate.out.weight"),
        (_gate(), "codi", "projector.1.weight"),
    ],
)
def test_an_export_without_a_part_that_it_says_it_has(tmp_path, side, architecture, missing):
    with pytest.raises(UserError, match=rf"^{tmp_path}/ex/reasoner\.safetensors: tensor {missing} is missing; "):
        find_checkpoint(_export(tmp_path / "ex", side, architecture))


def test_a_value_that_its_kind_can_t_have(tmp_path):
    config = _export(tmp_path / "ex", _gate() | _projector(), "codi")
    file = tmp_path / "ex" / "reasoner.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"projector": 0}))
    with pytest.raises(UserError, match=rf"^{file}: key projector: 0 is not valid; give a whole number, 1 or more"):
        find_checkpoint(config)


def test_a_side_file_without_its_description(tmp_path):
    config = _export(tmp_path / "ex", _gate(), described=False)
    for init, base in (("ex", ""), ("ex/model.safetensors", str(tmp_path / "ex"))):
        with pytest.raises(
            UserError, match=r"ex/reasoner\.safetensors: is read only with the reasoner\.json beside it; give"
        ):
            find_checkpoint(dataclasses.replace(config, init=str(tmp_path / init), base=base))
