"""The backbones against transformers' models with the same random weights: everything that they share."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slpo_jax.architectures.coconut import Coconut
from slpo_jax.models.layers import Dropout, drop, site_number
from slpo_jax.models.packing import pack
from tiny import (
    CONFIG,
    assert_close,
    compiled,
    load_hf,
    random_prompts,
    random_tree,
    real_tokens,
)
from tiny_llama import QWEN2, QWEN3, SCALED, load_hf_llama

LENGTHS = (7, 10, 3)
SLOTS = 10
D = CONFIG.n_embd
TIGHT = {"rtol": 0, "atol": 1e-4}
UNTIED = dataclasses.replace(CONFIG, tied=False, n_inner=24)
CASES = {
    "gpt2": (CONFIG, load_hf, 0),
    "gpt2 untied": (UNTIED, load_hf, 0),
    "qwen2": (QWEN2, load_hf_llama, 0),
    "qwen3": (QWEN3, load_hf_llama, 0),
    "llama3": (SCALED, load_hf_llama, 60_000),
    "gpt2 in a loop": (dataclasses.replace(CONFIG, scan_layers=True), load_hf, 0),
    "qwen3 untied in a loop": (
        dataclasses.replace(QWEN3, tied=False, scan_layers=True),
        load_hf_llama,
        0,
    ),
    "llama3 in a loop": (
        dataclasses.replace(SCALED, scan_layers=True, remat=True),
        load_hf_llama,
        60_000,
    ),
}
FAST = ("gpt2", "qwen3", "llama3", "llama3 in a loop")


class Case:
    """A model, the same one in transformers, and the first position that its tests use.

    GPT-2 has learned positions alone, and a table of 48: the gaps of positions far out are for angles.
    """

    def __init__(self, config, load, first):
        self.config = config
        self.load = load
        self.first = first
        self.reasoner = Coconut().on(config)
        self.params, self.forward = (
            random_tree(self.reasoner),
            compiled(self.reasoner.forward),
        )

    @functools.cached_property
    def model(self):
        """Loaded when a test compares with it; the others do without torch."""
        return self.load(self.params, self.config)

    def embed(self, tokens):
        return self.reasoner.embed(self.params, tokens)

    def run(self, inputs, positions, valid, *args, **kwargs):
        """Hidden states and the own slots."""
        return self.forward(
            self.params,
            inputs,
            positions,
            valid,
            *args,
            **kwargs,
        )

    def logits(self, hidden):
        return np.asarray(self.reasoner.logits(self.params, hidden))

    def count(self, inputs):
        """Positions and validity of rows without padding; a test far out leaves gaps, which a model has to see."""
        steps = np.arange(inputs.shape[1])
        positions = self.first + (3 * steps if self.first else steps)
        return np.broadcast_to(positions, inputs.shape[:2]), np.ones(
            inputs.shape[:2], bool
        )

    def outputs(self, tokens, positions):
        """transformers' outputs for tokens [B, L]."""
        torch = pytest.importorskip("torch")
        ids, places = (torch.tensor(np.asarray(x)).long() for x in (tokens, positions))
        mask = torch.ones_like(
            ids
        )  # without one, transformers takes gaps in the positions for borders of packed texts
        with torch.no_grad():
            return self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=places,
                output_hidden_states=True,
            )

    def expected(self, tokens, positions):
        return self.outputs(tokens, positions).logits.numpy()


@pytest.fixture(
    scope="module",
    params=[
        name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
        for name in CASES
    ],
)
def case(request):
    return Case(*CASES[request.param])


def _tokens(rows=3, length=SLOTS, seed=1):
    return jnp.asarray(
        np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (rows, length)),
        jnp.int32,
    )


def test_prefill(case):
    tokens = _tokens()
    hidden, _ = case.run(
        case.embed(tokens),
        *case.count(tokens),
    )
    expected = case.expected(tokens, case.count(tokens)[0])
    assert np.abs(expected).max() > 2, "a test on logits near zero shows nothing"
    np.testing.assert_allclose(
        case.logits(hidden), expected, rtol=1e-5, atol=2e-5
    )  # some processors sum otherwise


def test_cached_decoding_token_by_token(case):
    """Prefill into the first slots of a cache, then one token at a time; the garbage in later slots must not count."""
    tokens = _tokens()
    embedded, (positions, valid) = case.embed(tokens), case.count(tokens)
    cache = case.reasoner.empty_cache(3, SLOTS + 4)
    cache = cache.replace(keys=jax.tree.map(lambda x: x + 3.0, cache.keys))
    parts = []
    for at in (slice(0, 4), *(slice(i, i + 1) for i in range(4, SLOTS))):
        hidden, cache = case.run(
            embedded[:, at], positions[:, at], valid[:, at], cache=cache, start=at.start
        )
        parts.append(case.logits(hidden))
    np.testing.assert_allclose(
        np.concatenate(parts, axis=1), case.expected(tokens, positions), **TIGHT
    )
    np.testing.assert_array_equal(
        cache.valid, np.arange(SLOTS + 4)[None] < np.full((3, 1), SLOTS)
    )
    assert cache.keys[0].shape == (
        3,
        case.config.n_kv_head,
        SLOTS + 4,
        case.config.head_dim,
    )


@pytest.mark.parametrize("cached", [False, True])
def test_rows_that_share_a_left_padded_prefix(case, cached):
    """2 prompts x 3 continuations, with and without a cache of their own, as if each row were alone."""
    prompts = random_prompts((5, 8), 8)
    own = _tokens(6, 4, seed=3)
    positions = np.cumsum(prompts.valid, axis=1) - 1
    _, prefix = case.run(
        case.embed(prompts.tokens),
        positions,
        prompts.valid,
    )
    before = np.repeat(prompts.lengths, 3)[:, None]
    inputs = case.embed(own)
    own_positions = before + np.arange(4)[None]
    valid = np.ones((6, 4), bool)
    if cached:
        cache = case.reasoner.empty_cache(6, 5)
        parts = []
        for i in range(4):
            at = slice(i, i + 1)
            rows = inputs[:, at], own_positions[:, at], valid[:, at]
            hidden, cache = case.run(
                *rows,
                prefix=prefix,
                cache=cache,
                start=i,
            )
            parts.append(hidden)
        hidden = jnp.concatenate(parts, axis=1)
    else:
        hidden, _ = case.run(inputs, own_positions, valid, prefix=prefix)
    logits = case.logits(hidden)
    for row in range(6):
        alone = np.concatenate([real_tokens(prompts, row // 3), own[row]])[None]
        expected = case.expected(
            alone,
            np.arange(alone.shape[1])[None],
        )[0, -4:]
        np.testing.assert_allclose(logits[row], expected, **TIGHT)


def test_bfloat16_is_close(case):
    half = Coconut().on(dataclasses.replace(case.config, dtype=jnp.bfloat16))
    tokens = _tokens()
    hidden, cache = compiled(half.forward)(
        case.params, half.embed(case.params, tokens), *case.count(tokens)
    )
    logits = half.logits(case.params, hidden)
    expected = case.expected(tokens, case.count(tokens)[0])
    assert hidden.dtype == cache.keys[0].dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32
    error = np.abs(logits - expected)
    assert 1e-4 < error.max() < 0.1 * np.abs(expected).max()
    assert error.mean() < 0.02 * np.abs(expected).mean() + 0.02


@pytest.mark.slow
@pytest.mark.parametrize(("noisy", "spare"), [(False, 0), (True, 3)])
def test_sequences_end_to_end(case, noisy, spare):
    """Last hidden states and caches of sequences laid end to end are those of a padded batch."""
    tokens = random_prompts(LENGTHS, SLOTS)
    positions = case.first + jnp.cumsum(tokens.valid, axis=1) - 1
    dropout = (
        Dropout(
            jax.random.split(jax.random.key(1), tokens.valid.shape), tokens.valid, 0.3
        )
        if noisy
        else None
    )
    whole, cache = case.run(
        case.embed(tokens.tokens), positions, tokens.valid, dropout=dropout
    )
    packing = pack(
        tokens.valid,
        len(LENGTHS),
        sum(LENGTHS) + spare,
    )
    places = jax.tree.map(
        packing.pack,
        (case.embed(tokens.tokens), positions),
    )
    noise = jax.tree.map(packing.pack, dropout)
    hidden, own = case.reasoner.forward(
        case.params, *places, tokens.valid, dropout=noise, last=1, packing=packing
    )
    np.testing.assert_allclose(
        hidden,
        whole[:, -1:],
        **TIGHT,
    )
    np.testing.assert_array_equal(own.valid, cache.valid)
    real = np.asarray(tokens.valid)
    for ours, padded in zip(
        *((*each.keys, *each.values) for each in (own, cache)), strict=True
    ):
        np.testing.assert_allclose(
            ours.swapaxes(1, 2)[real], padded.swapaxes(1, 2)[real], **TIGHT
        )


def _multiply_noise(case, dropout: Dropout):
    """Hooks that multiply the masks of the only row in where the sites are; returns what removes them."""
    torch = pytest.importorskip("torch")
    ones = jnp.ones((*dropout.keys_BL.shape, D))
    body = case.model.base_model
    if case.config.n_kv_head == case.config.n_head:
        outputs = {
            "attention": [block.attn.c_proj for block in body.h],
            "mlp": [block.mlp.c_proj for block in body.h],
        }
    else:
        outputs = {"mlp": [layer.mlp.down_proj for layer in body.layers]}

    def hook(site):
        mask = torch.tensor(np.asarray(drop(ones, dropout, site))[0])
        factor = torch.cat([mask, torch.ones(SLOTS - len(mask), D)])
        return lambda module, inputs, output: output * factor

    return [
        module.register_forward_hook(hook(site_number(layer, site)))
        for site in case.config.dropout_sites
        for layer, module in enumerate(outputs[site])
    ]


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_dropout_multiplies_masks_in_at_its_sites(name):
    """The noise covers the first 7 positions, and is on at most of them; levels carry it too."""
    case = Case(*CASES[name])
    assert case.config.dropout_sites == (
        ("attention", "mlp") if name == "gpt2" else ("mlp",)
    )
    tokens = _tokens(1)
    positions, valid = case.count(tokens)
    clean = case.expected(tokens, positions)
    keys = jax.random.split(jax.random.key(5), (1, 7))
    dropout = Dropout(
        keys, jnp.asarray([[True, True, False, True, True, True, True]]), 0.3
    )
    trace = compiled(case.reasoner.trace)
    hidden, _, levels = trace(
        case.params,
        case.embed(tokens),
        positions,
        valid,
        at_B=jnp.asarray([6]),
        dropout=dropout,
    )
    hooks = _multiply_noise(case, dropout)
    noisy = case.outputs(tokens, positions)
    for hook in hooks:
        hook.remove()
    np.testing.assert_allclose(
        case.logits(hidden),
        noisy.logits.numpy(),
        **TIGHT,
    )
    expected = np.stack([level[0, 6].numpy() for level in noisy.hidden_states])
    np.testing.assert_allclose(levels[0], expected, **TIGHT)
    assert np.abs(noisy.logits.numpy() - clean).max() > 0.3


def test_trace_is_every_level_of_the_row_alone(case):
    """transformers' output_hidden_states for rows without padding, here left-padded, at positions of their own."""
    prompts = random_prompts(LENGTHS, SLOTS)
    valid = np.asarray(prompts.valid)
    positions = case.first * valid + np.cumsum(valid, axis=1) - 1  # -1 at pads
    at = np.array([4, 9, 8])
    arguments = case.embed(prompts.tokens), positions, valid
    hidden, cache, levels = compiled(case.reasoner.trace)(
        case.params, *arguments, at_B=at
    )
    assert levels.shape == (3, case.config.n_layer + 1, D)
    assert np.isfinite(hidden).all(), "pads must not spread NaNs"
    for row, length in enumerate(LENGTHS):
        steps = case.first + np.arange(length)[None]
        states = case.outputs(real_tokens(prompts, row)[None], steps).hidden_states
        expected = np.stack(
            [state[0, at[row] - (SLOTS - length)].numpy() for state in states]
        )
        np.testing.assert_allclose(levels[row], expected, **TIGHT)
    assert_close(
        (hidden, cache),
        case.run(*arguments),
        rtol=0,
        atol=1e-5,
    )
