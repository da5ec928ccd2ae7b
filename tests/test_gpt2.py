"""GPT-2 against transformers' GPT2LMHeadModel on the same random weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, REASONER, compiled, load_hf, random_params, random_prompts

from slpo_jax.models.attention import join
from slpo_jax.models.reasoner import coconut

LENGTHS, SLOTS = (7, 10, 3), 10
TIGHT = {"rtol": 0, "atol": 1e-4}
forward = compiled(REASONER.forward)


@pytest.fixture(scope="module")
def params():
    return random_params()


@pytest.fixture(scope="module")
def hf_logits(params):
    """(tokens or inputs_embeds [B, L(, D)], valid, positions) -> logits [B, L, V]."""
    torch = pytest.importorskip("torch")
    model = load_hf(params)

    def run(inputs, valid=None, positions=None):
        inputs = torch.tensor(np.asarray(inputs))
        name = "input_ids" if inputs.ndim == 2 else "inputs_embeds"
        kwargs = {name: inputs.long() if inputs.ndim == 2 else inputs}
        if valid is not None:
            kwargs["attention_mask"] = torch.tensor(np.asarray(valid)).long()
        if positions is not None:
            kwargs["position_ids"] = torch.tensor(np.asarray(positions)).long()
        with torch.no_grad():
            return model(**kwargs).logits.numpy()

    return run


def _tokens(rows=3, length=SLOTS, seed=1):
    return jnp.asarray(np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (rows, length)), jnp.int32)


def _count(tokens):
    """Positions and validity of rows without padding."""
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape[:2]), jnp.ones(tokens.shape[:2], bool)


def _logits(params, hidden):
    return np.asarray(REASONER.logits(params, hidden))


def test_prefill(params, hf_logits):
    tokens = _tokens()
    hidden, _ = forward(params, REASONER.embed(params, tokens), *_count(tokens))
    expected = hf_logits(tokens)
    assert np.abs(expected).max() > 2, "a test on logits near zero shows nothing"
    np.testing.assert_allclose(_logits(params, hidden), expected, **TIGHT)


def test_inputs_embeds(params, hf_logits):
    inputs = np.random.default_rng(2).normal(size=(2, 6, CONFIG.n_embd)).astype(np.float32)
    hidden, _ = forward(params, inputs, *_count(inputs))
    np.testing.assert_allclose(_logits(params, hidden), hf_logits(inputs), **TIGHT)


def test_left_padding(params, hf_logits):
    prompts = random_prompts(LENGTHS, SLOTS)
    positions = np.cumsum(prompts.valid, axis=1) - 1
    hidden, _ = forward(params, REASONER.embed(params, prompts.tokens), positions, prompts.valid)
    expected = hf_logits(prompts.tokens, prompts.valid, np.maximum(positions, 0))
    real = np.asarray(prompts.valid)
    np.testing.assert_allclose(_logits(params, hidden)[real], expected[real], **TIGHT)
    assert np.isfinite(hidden).all(), "pads must not spread NaNs"


def test_cached_decoding_token_by_token(params, hf_logits):
    """Prefill into the first slots of a cache, then one token at a time; the garbage in later slots must not count."""
    tokens = _tokens()
    embedded, (positions, valid) = REASONER.embed(params, tokens), _count(tokens)
    cache = REASONER.empty_cache(3, SLOTS + 4)
    cache = cache.replace(keys=jax.tree.map(lambda x: x + 3.0, cache.keys))
    parts = []
    for at in (slice(0, 4), *(slice(i, i + 1) for i in range(4, SLOTS))):
        hidden, cache = forward(params, embedded[:, at], positions[:, at], valid[:, at], cache=cache, start=at.start)
        parts.append(_logits(params, hidden))
    np.testing.assert_allclose(np.concatenate(parts, axis=1), hf_logits(tokens), **TIGHT)
    np.testing.assert_array_equal(cache.valid, np.arange(SLOTS + 4)[None] < np.full((3, 1), SLOTS))


@pytest.mark.parametrize("cached", [False, True])
def test_rows_that_share_a_left_padded_prefix(params, hf_logits, cached):
    """2 prompts x 3 continuations, with and without a cache of their own, as if each row were alone."""
    prompts, own = random_prompts((5, 8), 8), _tokens(6, 4, seed=3)
    positions = np.cumsum(prompts.valid, axis=1) - 1
    _, prefix = forward(params, REASONER.embed(params, prompts.tokens), positions, prompts.valid)
    before = np.repeat(prompts.lengths, 3)[:, None]
    inputs, own_positions, valid = REASONER.embed(params, own), before + np.arange(4), jnp.ones((6, 4), bool)
    if cached:
        cache, parts = REASONER.empty_cache(6, 5), []
        for i in range(4):
            at = slice(i, i + 1)
            hidden, cache = forward(params, inputs[:, at], own_positions[:, at], valid[:, at], prefix, cache, i)
            parts.append(hidden)
        hidden = jnp.concatenate(parts, axis=1)
    else:
        hidden, _ = forward(params, inputs, own_positions, valid, prefix)
    logits = _logits(params, hidden)
    for row in range(6):
        prompt = np.asarray(prompts.tokens[row // 3])[np.asarray(prompts.valid[row // 3])]
        alone = hf_logits(np.concatenate([prompt, own[row]])[None])[0, len(prompt) :]
        np.testing.assert_allclose(logits[row], alone, **TIGHT)


def test_prefix_of_which_each_row_sees_its_own_part(params, hf_logits):
    """As the cold start's candidates do: two caches joined, and a row's view ends where its thought ended."""
    tokens, end = _tokens(1, 9, seed=4), _tokens(3, 1, seed=5)
    _, whole = forward(params, REASONER.embed(params, tokens), *_count(tokens))
    head = jax.tree.map(lambda x: x[..., :4, :], whole.replace(valid=whole.valid[..., None]))
    tail = jax.tree.map(lambda x: x[..., 4:, :], whole.replace(valid=whole.valid[..., None]))
    head, tail = (part.replace(valid=part.valid[..., 0]) for part in (head, tail))
    lengths = np.array([5, 9, 7])
    prefix = join(head, tail).replace(valid=jnp.asarray(np.arange(9)[None] < lengths[:, None]))
    hidden, _ = forward(params, REASONER.embed(params, end), lengths[:, None], jnp.ones((3, 1), bool), prefix)
    for row, length in enumerate(lengths):
        alone = np.concatenate([tokens[0, :length], end[row]])[None]
        np.testing.assert_allclose(_logits(params, hidden)[row, 0], hf_logits(alone)[0, -1], **TIGHT)


def test_invalid_positions_are_seen_by_nobody(params):
    tokens = _tokens()
    positions, valid = _count(tokens)
    valid = valid.at[:, 4].set(False)
    first = REASONER.embed(params, tokens)
    second = first.at[:, 4].multiply(-1.0)
    hidden = [forward(params, inputs, positions, valid)[0] for inputs in (first, second)]
    np.testing.assert_array_equal(hidden[0][:, 5:], hidden[1][:, 5:])
    assert np.abs(hidden[0][:, 4] - hidden[1][:, 4]).max() > 0.1


def test_bfloat16_is_close(params, hf_logits):
    half = coconut(dataclasses.replace(CONFIG, dtype=jnp.bfloat16))
    tokens = _tokens()
    hidden, cache = compiled(half.forward)(params, half.embed(params, tokens), *_count(tokens))
    logits, expected = half.logits(params, hidden), hf_logits(tokens)
    assert hidden.dtype == cache.keys[0].dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32
    error = np.abs(logits - expected)
    assert 1e-4 < error.max() < 0.1 * np.abs(expected).max()
    assert error.mean() < 0.02 * np.abs(expected).mean() + 0.02


def test_remat_changes_nothing(params):
    inputs = np.random.default_rng(2).normal(size=(2, 6, CONFIG.n_embd)).astype(np.float32)
    weights = np.random.default_rng(3).normal(size=inputs.shape)

    def loss(reasoner):
        return lambda params: jnp.sum(reasoner.forward(params, inputs, *_count(inputs))[0] * weights)

    plain, remat = (coconut(dataclasses.replace(CONFIG, n_layer=1, remat=remat)) for remat in (False, True))
    assert "remat" in str(jax.make_jaxpr(loss(remat))(params)), "the option must do something"
    plain, again = (compiled(jax.value_and_grad(loss(reasoner)))(params) for reasoner in (plain, remat))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), plain, again)
