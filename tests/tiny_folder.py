"""A tiny GPT-2 in Hugging Face's layout, written by numpy and safetensors alone."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from slpo_jax.config import Config, default_config, read_config
from slpo_jax.data.tokenizer import task_tokenizer
from slpo_jax.data.tokenizer_files import save_tokenizer

WIDTH = 4
LAYERS = 2
Tensors = dict[str, np.ndarray]


def tiny_folder(folder: Path, **more: np.ndarray) -> Tensors:
    """Write it, with its tokenizer, whose tokens are COCONUT's too, and more tensors; its own are returned."""
    folder.mkdir(exist_ok=True)
    texts = task_tokenizer("synthetic", 3)
    save_tokenizer(texts, folder)
    rows = len(texts)
    rng = np.random.default_rng(5)
    config = dict(
        model_type="gpt2",
        vocab_size=rows,
        n_positions=64,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=2,
    )
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"wte.weight": (rows, WIDTH), "wpe.weight": (64, WIDTH)}
    for layer in range(LAYERS):
        block = {
            "attn.c_attn": (WIDTH, 3 * WIDTH),
            "attn.c_proj": (WIDTH, WIDTH),
            "mlp.c_fc": (WIDTH, 4 * WIDTH),
        }
        for name, shape in (block | {"mlp.c_proj": (4 * WIDTH, WIDTH)}).items():
            shapes |= {
                f"h.{layer}.{name}.weight": shape,
                f"h.{layer}.{name}.bias": shape[1:],
            }
        shapes |= {
            f"h.{layer}.{norm}.{part}": (WIDTH,)
            for norm in ("ln_1", "ln_2")
            for part in ("weight", "bias")
        }
    shapes |= {"ln_f.weight": (WIDTH,), "ln_f.bias": (WIDTH,)}
    tensors = {
        f"transformer.{name}": draw(rng, *shape) for name, shape in shapes.items()
    }
    save_file(tensors | more, folder / "model.safetensors")
    return tensors


def draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def config_for(folder: Path, reasoner: str, **changes) -> Config:
    """The config to evaluate it with."""
    config = default_config()
    config.update(init=str(folder), reasoner=reasoner, stages=("evaluate",))
    config.update_from_flattened_dict(changes)
    return read_config(config)


def peft_folder(folder: Path, tensors: Tensors, **settings) -> Path:
    """PEFT's adapters of rank 2 and alpha 3, unless these settings say otherwise; the file of their tensors."""
    folder.mkdir(exist_ok=True)
    known = {
        "peft_type": "LORA", "r": 2, "lora_alpha": 3.0, "fan_in_fan_out": True, "lora_dropout": 0.1,
        "base_model_name_or_path": "some/base", "target_modules": ["c_proj"], "use_dora": False, "alpha_pattern": {},
        "bias": "none",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(known | settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder / "adapter_model.safetensors"


def lora_pair(place: str, inputs: int, outputs: int) -> Tensors:
    """A and B of one weight, as PEFT names them."""
    rng = np.random.default_rng(8)
    sides = {"A": (2, inputs), "B": (outputs, 2)}
    return {
        f"base_model.model.{place}.lora_{side}.weight": draw(rng, *shape)
        for side, shape in sides.items()
    }
