"""The tokens that end what a text reasoner writes: from the checkpoint's files, through Orbax and back."""

import json

import pytest

from asked import checkpoint, edit, run_config
from slpo_jax.checkpoints import export
from slpo_jax.checkpoints.checkpoint import find_checkpoint
from slpo_jax.checkpoints.detect import identify
from slpo_jax.config import read_config
from slpo_jax.data.tokenizer import load_tokenizer
from slpo_jax.errors import UserError
from slpo_jax.run.setup import assemble

ROWS = len(load_tokenizer("synthetic:20")) + 1  # and ####


def _config(init="", **changes):
    config = run_config("text_llama")
    config.update(init=str(init), tokenizer="" if init else "synthetic:20", max_latents=0)
    config.gate.enabled = False
    config.update(changes)
    return config


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A model as others publish it: of our export only Hugging Face's files."""
    folder = tmp_path_factory.mktemp("end_tokens")
    export.export_checkpoint(checkpoint(_config(), folder / "ours"), folder / "published")
    for file in (folder / "published").glob("reasoner.*"):
        file.unlink()
    return folder / "published"


def _ends(folder):
    return find_checkpoint(read_config(_config(folder))).template.eos_ids


def test_end_tokens_go_there_and_back(published, tmp_path):
    eos = find_checkpoint(read_config(_config())).template.eos_id
    assert json.loads((published / "config.json").read_text())["eos_token_id"] == eos
    assert _ends(published) == (eos,)
    edit(published / "config.json", eos_token_id=[7, eos])
    assert _ends(published) == (eos, 7)
    edit(published / "generation_config.json", eos_token_id=[9, eos, 5, 9])
    assert _ends(published) == (eos, 9, 5), "generation's own words go first, and each counts once"
    # A latent reasoner's answers end with its eos alone, as before.
    latent = find_checkpoint(read_config(_config(published, reasoner="coconut_llama", max_latents=1))).template
    assert latent.eos_ids == (latent.eos_id,) == (eos,)

    export.import_checkpoint(identify(str(published)), tmp_path / "orbax", read_config(_config(published)))
    setup = assemble(read_config(_config(tmp_path / "orbax")))
    assert setup.policy.config.eos_ids == setup.template.eos_ids == (eos, 9, 5)
    export.export_checkpoint(tmp_path / "orbax", tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["eos_token_id"] == [eos, 9, 5]
    assert _ends(tmp_path / "again") == (eos, 9, 5)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("</s>", "its eos_token_id is '</s>', neither a token's id nor a list of ids"),
        ([2, -1], "neither a token's id"),
        ([2, ROWS], f"eos_token_id {ROWS} is beyond its {ROWS} tokens"),
    ],
)
def test_what_is_no_end_token_is_a_line(published, value, message):
    edit(published / "generation_config.json", eos_token_id=value)
    with pytest.raises(UserError, match=message):
        _ends(published)
