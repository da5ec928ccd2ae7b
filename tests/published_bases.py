"""Tiny language models that are no reasoners yet, as they are published, and ours made of published files."""

import atexit
import copy
import dataclasses
import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

import tiny_gguf
from published import (
    BUDGET,
    LATENTS,
    QUESTIONS,
    Published,
    enliven,
    line,
    random_model,
    safetensors,
    tokenizer,
    torch,
)
from slpo_jax.config import default_config, read_config
from slpo_jax.run.experiment import build

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def _reasoner(settings, model, texts) -> Published:
    """What a base model becomes: three more rows, all as that of "<<" or, without such a token, the mean of all."""
    plain = len(model.get_input_embeddings().weight)
    opening = texts("<<", add_special_tokens=False)["input_ids"]
    wider = copy.deepcopy(model)
    wider.resize_token_embeddings(plain + 3, mean_resizing=False)
    with torch.no_grad():
        for table in (
            wider.get_input_embeddings().weight,
            wider.get_output_embeddings().weight,
        ):
            table[plain:] = (
                table[opening[0]] if len(opening) == 1 else table[:plain].mean(dim=0)
            )
    # A base model has to be imitated with before it is worth evaluating.
    settings |= {"stages": ("imitate", "evaluate")}
    return Published(settings, wider, texts, plain, plain + 1, line)


def base_gpt2(folder: Path, hub: bool = False) -> Published:
    """What transformers saves, or what the hub has: no prefix, no head, causal masks, GPT-2's own tokenizer files."""
    texts = tokenizer("gpt2")
    model = random_model("gpt2", len(texts), seed=11, layer_norm_epsilon=1e-3)
    case = enliven(
        _reasoner({"init": str(folder), "reasoner": "coconut_gpt2"}, model, texts),
        model,
        end=False,
    )
    if not hub:
        model.save_pretrained(folder)
        texts.save_pretrained(folder)
        return case
    model.config.save_pretrained(folder)
    state = {
        name.removeprefix("transformer."): tensor
        for name, tensor in model.state_dict().items()
    }
    del state["lm_head.weight"]
    for layer in range(model.config.n_layer):
        state[f"h.{layer}.attn.bias"] = torch.ones(
            96, 96, dtype=(torch.float32, torch.bool)[layer]
        ).tril()[None, None]
        state[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    safetensors.torch.save_file(
        state, folder / "model.safetensors", metadata={"format": "pt"}
    )
    backend = texts.backend_tokenizer
    backend.model.save(str(folder))
    vocabulary = json.loads((folder / "vocab.json").read_text()) | {
        "<|endoftext|>": len(texts) - 1
    }
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    return case


def base_llama(folder: Path, family: str = "llama") -> Published:
    """Shards of 8 KB, a head of its own, scaled rotary frequencies; or a Qwen2 or Qwen3 with a tied head."""
    texts = tokenizer("llama")
    own = (
        {"tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE}
        if family == "llama"
        else {}
    )
    model = random_model(family, len(texts), seed=12, **own)
    case = enliven(
        _reasoner({"init": str(folder), "reasoner": f"coconut_{family}"}, model, texts),
        model,
        end=False,
    )
    model.save_pretrained(folder, max_shard_size="8KB")
    texts.save_pretrained(folder)
    return case


def base_gguf(folder: Path) -> Published:
    """A Llama file of llama.cpp's, in whose vocabulary "<<" is not one token."""
    config = tiny_gguf.llama_config(max_position_embeddings=160)
    path = folder / "tiny.gguf"
    tiny_gguf.write_gguf(
        path, tiny_gguf.fields_of(config), tiny_gguf.tensors_of(config)
    )
    texts = tiny_gguf.open_gguf(path).tokenizer()
    settings = {
        "init": str(path),
        "reasoner": "coconut_llama",
        "prompt_slots": (32, 120),
    }
    return _reasoner(settings, tiny_gguf.llama_model(config), texts)


@functools.cache
def written(write: Callable[..., Published], *options) -> Published:
    """What a writer makes, once, in a folder of its own; read it, don't touch it."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return write(folder, *options)


def copied(folder: Path, write: Callable[..., Published], *options) -> Published:
    """The same in a folder where it can be changed."""
    case = written(write, *options)
    paths = {
        key: Path(case.settings[key])
        for key in ("init", "base")
        if key in case.settings
    }
    source = paths["init"] if paths["init"].is_dir() else paths["init"].parent
    shutil.copytree(source, folder, dirs_exist_ok=True)
    moved = {key: str(folder / path.relative_to(source)) for key, path in paths.items()}
    return dataclasses.replace(case, settings=case.settings | moved)


FIXED = {
    "stages": ("evaluate",), "gate.enabled": False, "max_latents": LATENTS, "evaluate.max_answer_tokens": BUDGET,
    "evaluate.samples": 0, "evaluate.save_latents": True, "evaluate.batch_size": 3, "prompt_slots": (24, 64),
    "model.dtype": "float32",  # also where bfloat16 is what a device is given
}  # fmt: skip
CONFIG = """
from slpo_jax.config import default_config


def get_config():
    config = default_config()
    config.data.eval.questions = "questions.jsonl"
    return config
"""


def write_config(folder: Path) -> None:
    """`config.py` and the questions that it evaluates on."""
    (folder / "config.py").write_text(CONFIG)
    rows = [{"question": question, "answer": "7"} for question in QUESTIONS]
    (folder / "questions.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )


def config_of(settings: dict, folder: Path):
    """The same config in this process."""
    config = default_config()
    config.data.eval.questions = str(folder / "questions.jsonl")
    config.update_from_flattened_dict(FIXED | settings)
    return config


def decode_here(settings: dict, folder: Path) -> tuple[list[list[int]], np.ndarray]:
    """(tokens up to and including eos, latents [N, T, D]) of all questions, by `build` and the evaluator."""
    write_config(folder)
    experiment = build(read_config(config_of(settings, folder)), folder / "work")
    done = experiment.evaluator.run(
        experiment.initial_params(),
        experiment.test_set("questions"),
        "length",
        LATENTS,
        keep_latents=True,
    )
    experiment.log.close()
    assert (done["latent_steps"] == LATENTS).all()
    return [experiment.reward.read(row).ids for row in done["tokens"]], done["latents"]
