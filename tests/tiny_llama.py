"""Tiny Llamas with random weights, and transformers' model with the same ones."""

import dataclasses

import jax
import numpy as np
import pytest

from slpo_jax.models.llama import LlamaConfig, Qwen2Config, Qwen3Config, RopeScaling

# Heads that share keys, wider than their part of the model.
LLAMA = LlamaConfig(
    vocab_size=61, n_positions=1 << 16, n_embd=16, n_layer=2, n_head=4, n_kv_head=2, head_dim=8, n_inner=24,
    norm_epsilon=1e-3, rope_theta=100.0, rope_scaling=None,
)  # fmt: skip
QWEN2 = Qwen2Config(**vars(LLAMA))
QWEN3 = Qwen3Config(**vars(LLAMA))
# Of the four frequencies one is kept, one interpolated and two are slowed down.
SCALED = dataclasses.replace(
    LLAMA,
    tied=False,
    rope_scaling=RopeScaling(factor=8.0, original_max_position_embeddings=32),
)


def hf_llama_config(config: LlamaConfig):
    """transformers' config of the same model."""
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {"rope_type": "llama3", **dataclasses.asdict(config.rope_scaling)}
    return getattr(transformers, f"{config.title}Config")(
        vocab_size=config.vocab_size,
        hidden_size=config.n_embd,
        intermediate_size=config.n_inner,
        num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head,
        num_key_value_heads=config.n_kv_head,
        head_dim=config.head_dim,
        max_position_embeddings=config.n_positions,
        rms_norm_eps=config.norm_epsilon,
        rope_parameters=rope,
        tie_word_embeddings=config.tied,
        use_cache=False,
        attn_implementation="eager",
    )


def load_hf_llama(params, config: LlamaConfig = LLAMA):
    """transformers' Llama, Qwen2 or Qwen3 with our parameters, copied by hand (its Linear has [out, in])."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    ours = jax.tree.map(np.asarray, params["backbone"])
    state = {
        "model.embed_tokens.weight": ours["embed_tokens"],
        "model.norm.weight": ours["norm"]["scale"],
    }
    state["lm_head.weight"] = ours["embed_tokens"] if config.tied else ours["lm_head"]
    for layer in range(config.n_layer):
        block = ours[f"layers_{layer}"]
        name = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            state[f"{name}.{norm}.weight"] = block[norm]["scale"]
        for part in ("self_attn", "mlp"):
            for child, module in block[part].items():
                state[f"{name}.{part}.{child}.weight"] = module[
                    "kernel" if "kernel" in module else "scale"
                ].T.copy()
                if "bias" in module:
                    state[f"{name}.{part}.{child}.bias"] = module["bias"]
    model = getattr(transformers, f"{config.title}ForCausalLM")(
        hf_llama_config(config)
    ).eval()
    missing, unexpected = model.load_state_dict(
        {k: torch.tensor(v) for k, v in state.items()}, strict=False
    )
    assert not unexpected
    assert not missing
    return model
