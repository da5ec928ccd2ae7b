"""GPT-2 as its paper has it: one unpadded row through dense matrices, the oracle of what is faster.

It takes numpy's arrays, or jax.numpy's so that jax.grad goes through it. It shares with the package the keys of the
positions and the map from a key to a mask, which other tests establish.
"""

import jax
import jax.numpy as jnp
import numpy as np

from slpo_jax.models.layers import Dropout, drop, site_number


def dropout_factors(
    dropout: Dropout | None, width: int, layers: int
) -> dict[int, jax.Array]:
    """What each site multiplies the positions of one row with, [L, D] by site."""
    if dropout is None:
        return {}
    ones = jnp.ones((*dropout.keys_BL.shape, width))
    return {site: drop(ones, dropout, site)[0] for site in range(3 * layers)}


def _norm(params, x_LD):
    centred = x_LD - x_LD.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    unit = centred / (variance + 1e-5) ** 0.5
    return unit * params["scale"][None] + params["bias"][None]


def _dense(params, x):
    return x @ params["kernel"] + params["bias"][None]


def _attention(params, x_LD, heads: int, sees_LL):
    xp = x_LD.__array_namespace__()
    q, k, v = xp.split(_dense(params["c_attn"], x_LD), 3, axis=-1)
    out = []
    queries = xp.split(q, heads, axis=-1)
    keys = xp.split(k, heads, axis=-1)
    values = xp.split(v, heads, axis=-1)
    for q_, k_, v_ in zip(queries, keys, values, strict=True):
        scores = xp.where(sees_LL, q_ @ k_.T / q_.shape[-1] ** 0.5, -np.inf)
        weights = xp.exp(scores - scores.max(axis=-1, keepdims=True))
        shares = weights / weights.sum(axis=-1, keepdims=True)
        out.append(shares @ v_)
    return _dense(params["c_proj"], xp.concatenate(out, axis=-1))


def _gelu(x):
    xp = x.__array_namespace__()
    return 0.5 * x * (1 + xp.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def plain_hidden(
    params, inputs_LD, factors, heads: int = 2, positions_L=None, sees_LL=None
):
    """Hidden states [L, D] of one row after the final norm, with the factors multiplied in at its sites.

    Positions are 0, 1, 2, .. and each sees itself and those before it, unless others are given.
    """
    backbone = params["backbone"]
    length = len(inputs_LD)
    positions_L = np.arange(length) if positions_L is None else positions_L
    sees_LL = np.tri(length, dtype=bool) if sees_LL is None else sees_LL

    def noise(layer, site):
        return factors[site_number(layer, site)][:length] if factors else 1.0

    x = inputs_LD + backbone["wpe"][positions_L]
    layer = 0
    while f"h_{layer}" in backbone:
        block = backbone[f"h_{layer}"]
        # Attention, and what it adds.
        before = _norm(block["ln_1"], x)
        attended = _attention(block["attn"], before, heads, sees_LL)
        x = x + noise(layer, "attention") * attended
        # The MLP, and what it adds.
        mlp = block["mlp"]
        hidden = _gelu(_dense(mlp["c_fc"], _norm(block["ln_2"], x)))
        x = x + noise(layer, "mlp") * _dense(mlp["c_proj"], hidden)
        layer += 1
    return _norm(backbone["ln_f"], x)
