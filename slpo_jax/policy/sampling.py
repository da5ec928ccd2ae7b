"""Sampling of tokens: temperature, then top-k, then top-p, each renormalised, as transformers' `generate` does."""

import jax
import jax.numpy as jnp

BLOCK = 256  # tokens that are drawn from together: about the root of real vocabularies
LARGE = 4 * BLOCK  # tokens of a vocabulary that is drawn from in blocks


def most_likely(logits_NV: jax.Array, top_k: int, top_p: float, least: int = 1) -> tuple[jax.Array, jax.Array | None]:
    """Truncate a law (top-p: Holtzman et al., 2020).

    Args:
        logits_NV: float32, divided by the temperature; finite or -inf.
        top_k: keep so many of the likeliest; 0 keeps all.
        top_p: then keep the fewest of the likeliest that have this probability together; 1 keeps all.
        least: but so many of them at least.
    Returns:
        logits [N, M], -inf where cut, and the token ids [N, M] that they belong to, the likeliest first; with nothing
        to cut the logits themselves, and None.
    """
    vocabulary = logits_NV.shape[-1]
    if top_k in range(1, vocabulary) or top_p < 1.0:
        logits_NM, ids_NM = jax.lax.top_k(logits_NV, min(top_k or vocabulary, vocabulary))
        if top_p < 1.0:
            probabilities_NM = jax.nn.softmax(logits_NM, axis=-1)
            before_NM = jnp.cumsum(probabilities_NM, axis=-1) - probabilities_NM
            first_NM = jnp.broadcast_to(jnp.arange(logits_NM.shape[-1]) < least, logits_NM.shape)
            logits_NM = jnp.where((before_NM < top_p) | first_NM, logits_NM, -jnp.inf)
        return logits_NM, ids_NM
    return logits_NV, None


def draw_from_blocks(key: jax.Array, logits_V: jax.Array) -> jax.Array:
    """Draw as `jax.random.categorical`, with other numbers: first a block of tokens, then one in it.

    The law is the same, with as many random numbers as there are blocks and tokens in a block, not one for each token.
    """
    logits_KB = jnp.pad(logits_V, (0, -logits_V.size % BLOCK), constant_values=-jnp.inf).reshape(-1, BLOCK)
    block_key, token_key = jax.random.split(key)
    block = jax.random.categorical(block_key, jax.nn.logsumexp(logits_KB, axis=1))
    return block * BLOCK + jax.random.categorical(token_key, logits_KB[block])


def draw_tokens(
    keys_N: jax.Array,
    logits_NV: jax.Array,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
) -> jax.Array:
    """Draw a token a row, int32 [N]; of a large vocabulary with nothing to cut as `draw_from_blocks` does.

    Args:
        keys_N: typed keys, used once.
        temperature: 0 is greedy, whatever the others are.
        top_k, top_p: see `most_likely`.
    """
    if temperature == 0.0:
        return jnp.argmax(logits_NV, axis=-1).astype(jnp.int32)
    logits_NM, ids_NM = most_likely(logits_NV / temperature, top_k, top_p)
    in_blocks = ids_NM is None and logits_NM.shape[-1] >= LARGE
    draw = draw_from_blocks if in_blocks else jax.random.categorical
    tokens_N = jax.vmap(draw)(keys_N, logits_NM)
    if ids_NM is not None:
        tokens_N = jnp.take_along_axis(ids_NM, tokens_N[:, None], axis=1)[:, 0]
    return tokens_N.astype(jnp.int32)
