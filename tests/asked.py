"""Workdirs of reasoners with random weights, to be asked questions without training any."""

import functools
import json
from pathlib import Path

import jax
import numpy as np

from slpo_jax.config import default_config, read_config
from slpo_jax.config.config import stage_config
from slpo_jax.config.overrides import values
from slpo_jax.evaluation.report_rows import Row, write_row, write_rule
from slpo_jax.io.orbax import save_params
from slpo_jax.run.experiment import build
from slpo_jax.run.provenance import ensure_manifest
from slpo_jax.run.setup import assemble
from tiny import random_tree

QUESTION = "Tom has 3 pens . He buys 2 . How many now ?"
T, ANSWER = 4, 3
RUN = {"coconut_gpt2": 0.92, "codi_gpt2": 0.6}  # reasoner: the threshold that its run has chosen


def run_config(reasoner: str):
    config = default_config()
    config.reasoner, config.tokenizer = reasoner, "synthetic:20"
    config.model.update(n_layer=2, n_head=2, n_embd=16, n_positions=40, projector=12)
    config.update(max_latents=T, min_latents=1, prompt_slots=(16, 20), max_answer_tokens=ANSWER, seed=7)
    config.dropout.update(rate=0.3, where="all")
    config.imitate.update(c_thought=1, max_latent_stage=2)
    config.gate.hidden = 5 if reasoner == "codi_llama" else 0
    return config


@functools.cache
def run_params(reasoner: str):
    """Random weights, and a gate that hesitates."""
    parts = assembled(reasoner)
    tree, tokenizer = jax.tree.map(np.array, random_tree(parts.reasoner, 5)), parts.template.tokenizer
    numbers = tokenizer.convert_tokens_to_ids([str(n) for n in range(21)])
    # Many answers are to be a number, and some to end.
    table = tree["backbone"]["wte" if "gpt2" in reasoner else "embed_tokens"]
    table[numbers] *= 2.5
    table[tokenizer.eos_token_id] = 6.0 * np.random.default_rng(2).normal(size=16)
    kernel = np.random.default_rng(26).normal(size=(16, 1)).astype(np.float32)
    gate = {"out": {"kernel": 0.5 * kernel, "bias": np.full(1, -0.3, np.float32)}}
    if hidden := parts.config.gate.hidden:
        gate["hidden"] = {"kernel": 0.5 * kernel @ kernel[:hidden].T, "bias": kernel[-hidden:, 0]}
        gate["out"]["kernel"] = kernel[5 : 5 + hidden]
    return {"reasoner": tree, "gate": gate}


@functools.cache
def assembled(reasoner: str):
    return assemble(read_config(run_config(reasoner)))


def workdir(reasoner: str, folder: Path, **changes) -> Path:
    """`folder` with imitation and cold start, as a run leaves it, but with random weights."""
    config = run_config(reasoner)
    config.update(changes)
    experiment = build(read_config(config), folder)
    for stage in ("imitate", "cold_start"):
        ensure_manifest(experiment.stage(stage))
        save_params(experiment.workdir.stage_folder(stage).path, run_params(reasoner))
    experiment.log.close()
    (folder / "config.json").write_text(json.dumps(values(experiment.config)))
    row = Row("cold_start", "cold gate", stage="cold_start", stopping="threshold", rule=RUN.get(reasoner, 0.75))
    write_row(folder, row)
    write_rule(experiment.workdir.stage_folder("cold_start"), row, alike=True)
    return folder


def checkpoint(config, folder: Path) -> Path:
    """`folder` as the run of a reasoner with weights of 0, as this config describes it, and its last checkpoint."""
    setup = assemble(read_config(config))
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), setup.abstract_params())
    save_params(folder / "checkpoints" / "grpo", params)
    setup.checkpoint.write(folder / "checkpoints" / "reasoner")
    (folder / "config.json").write_text(json.dumps(values(setup.config)))
    write_config(folder / "checkpoints" / "grpo", setup.config)
    return folder / "checkpoints" / "grpo"


def write_config(place: Path, config, stage: str = "grpo") -> None:
    """The config that a stage ran by, beside its parameters in a folder."""
    (place / "config.json").write_text(json.dumps(values(stage_config(config, stage))))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit(path: Path, **changes) -> None:
    """Change keys of a JSON file, which may lack; None takes one out."""
    found = (json.loads(path.read_text()) if path.exists() else {}) | changes
    path.write_text(json.dumps({key: value for key, value in found.items() if changes.get(key, 0) is not None}))
