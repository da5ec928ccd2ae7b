"""A tiny COCONUT with random weights, a slow oracle of it, and transformers' GPT-2 with the same weights.

The oracle runs one row at a time, without padding, cache or batching: every step is a fresh full forward. It shares
nothing with the package but the keys of the positions and the map from a key to a mask (test_dropout.py tests both);
where noise is on is said here again.
"""

import functools
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from plain_gpt2 import dropout_factors, plain_hidden
from slpo_jax.architectures.coconut import Coconut
from slpo_jax.models.gate import stopping_gate
from slpo_jax.models.gpt2 import GPT2Config
from slpo_jax.models.layers import Dropout
from slpo_jax.policy import noise
from slpo_jax.policy.latent_policies import LATENT_POLICIES
from slpo_jax.policy.policy import Policy, Prompts, RolloutConfig
from slpo_jax.policy.rollout import sample
from slpo_jax.rewards.reward import Verdicts

END, EOS, PAD = 58, 59, 60
CONFIG = GPT2Config(vocab_size=61, n_positions=48, n_embd=16, n_layer=2, n_head=2)
REASONER = Coconut().on(CONFIG)
GATE = stopping_gate(CONFIG.n_embd)
ROLLOUT = RolloutConfig(max_latents=5, answer_slots=6, closing_ids=(END,), eos_ids=(EOS,), pad_id=PAD)

MOST = 32  # positions of a prompt, latents or answer slots of a row

# Programs of the tests run for milliseconds; half of the time that XLA takes to optimise them is saved.
FAST = {"xla_backend_optimization_level": 0}
# XLA's defaults on a CPU. Its older generators (conftest.py) round one expression in two ways in two programs.
USUAL = {"xla_backend_optimization_level": 3}
if version("jaxlib").startswith("0.10."):  # later ones have no older generators to choose
    USUAL["xla_cpu_use_fusion_emitters"] = True


def compiled(function, *bound, static=(), options=FAST):
    """`function` with its first arguments bound, jitted."""
    return jax.jit(functools.partial(function, *bound), static_argnames=static, compiler_options=options)


def policy_of(config: RolloutConfig = ROLLOUT, reasoner=REASONER, latent_policy="latent", **settings) -> Policy:
    """A policy of the tiny reasoner, or of another one with latents as wide."""
    reasoner = reasoner.in_tree()
    return Policy(reasoner, LATENT_POLICIES[latent_policy](**settings)(reasoner, GATE.in_tree()), config)


def rollout(params, prompts, keys, config: RolloutConfig = ROLLOUT, stop_rule=None):
    return sample(policy_of(config), params, prompts, keys, stop_rule)


run_rollout = compiled(rollout, static=("config",))


def random_tree(reasoner, seed: int = 0, embeddings: float = 0.6):
    """Parameters of any reasoner in which everything matters: norms and biases too, and no logits near zero."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name, values = path[-1].key, rng.normal(size=leaf.shape)
        if name == "kernel":
            values *= 1.4 / np.sqrt(leaf.shape[0])
        elif name in ("wte", "embed_tokens", "lm_head"):
            values *= embeddings
        else:
            values = (name == "scale") + 0.1 * values
        return jnp.asarray(values, jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(reasoner.init, jax.random.key(0)))


@functools.cache
def random_params(seed: int = 3):
    """Parameters of the reasoner in which everything matters: biases and norms too, and no near-zero kernel.

    The default seed's rollouts have answers that end early and answers that don't.
    """
    params = random_tree(REASONER, seed, 0.4)
    table = params["backbone"]["wte"]
    params["backbone"]["wte"] = table.at[EOS].set(1.02 * table[42])  # a likely token, so that some answers end early
    return params


@functools.cache
def random_gate(seed: int = 0, bias: float = 0.0):
    """The gate's parameters, with stop probabilities spread over (0, 1)."""
    kernel = 0.5 * np.random.default_rng(seed).normal(size=(CONFIG.n_embd, 1))
    return {"out": {"kernel": jnp.asarray(kernel, jnp.float32), "bias": jnp.full(1, bias)}}


def both_params(seed: int = 3, bias: float = 0.0):
    return {"reasoner": random_params(seed), "gate": random_gate(seed, bias)}


def random_prompts(lengths, slots: int, seed: int = 0) -> Prompts:
    """Left-padded prompts of these lengths; the pads hold random tokens, which must not matter."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, END, size=length) for length in lengths]
    return pad_left(rows, slots, rng)


def pad_left(rows, slots: int, rng=None) -> Prompts:
    rng = rng or np.random.default_rng(99)
    tokens = rng.integers(0, END, size=(len(rows), slots))
    valid = np.zeros((len(rows), slots), bool)
    for i, row in enumerate(rows):
        tokens[i, slots - len(row) :] = row
        valid[i, slots - len(row) :] = True
    return Prompts(jnp.asarray(tokens, jnp.int32), jnp.asarray(valid))


def real_tokens(prompts: Prompts, row: int) -> np.ndarray:
    return np.asarray(prompts.tokens[row])[np.asarray(prompts.valid[row])]


def take_rows(prompts: Prompts, rows) -> Prompts:
    return jax.tree.map(lambda x: x[jnp.asarray(rows)], prompts)


def padded(tokens: list[int], slots: int = ROLLOUT.answer_slots) -> list[int]:
    return tokens + [PAD] * (slots - len(tokens))


def assert_close(ours, theirs, **tolerances) -> None:
    """Two trees, leaf by leaf."""
    for one, other in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(one, other, **tolerances)


def keys_of(rows: int, seed: int = 0) -> jax.Array:
    return noise.row_keys(jax.random.key(seed), jnp.arange(rows))


def load_hf(params, config: GPT2Config = CONFIG):
    """transformers' GPT2LMHeadModel with our parameters, copied by hand (its Conv1D has Dense's [in, out])."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    names = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
    hf_config = transformers.GPT2Config(
        **{name: getattr(config, name) for name in names},
        n_inner=config.n_inner or None,
        layer_norm_epsilon=config.norm_epsilon,
        tie_word_embeddings=config.tied,
        use_cache=False,
    )
    hf_config._attn_implementation = "eager"
    ours = jax.tree.map(np.asarray, params["backbone"])
    state = {"transformer.wte.weight": ours["wte"], "transformer.wpe.weight": ours["wpe"]}

    def copy(name, module):
        state[f"transformer.{name}.weight"] = module.get("kernel", module.get("scale"))
        state[f"transformer.{name}.bias"] = module["bias"]

    for layer in range(config.n_layer):
        block = ours[f"h_{layer}"]
        for name in ("ln_1", "ln_2"):
            copy(f"h.{layer}.{name}", block[name])
        for name, child in (("attn", "c_attn"), ("attn", "c_proj"), ("mlp", "c_fc"), ("mlp", "c_proj")):
            copy(f"h.{layer}.{name}.{child}", block[name][child])
    copy("ln_f", ours["ln_f"])
    state["lm_head.weight"] = ours["wte"] if config.tied else ours["lm_head"]
    model = transformers.GPT2LMHeadModel(hf_config).eval()
    missing, unexpected = model.load_state_dict({k: torch.tensor(v) for k, v in state.items()}, strict=False)
    assert not unexpected
    assert not missing
    return model


def load_projector(params):
    """CODI's projector in torch with our parameters."""
    torch = pytest.importorskip("torch")
    nn, ours = torch.nn, jax.tree.map(np.asarray, params["projector"])
    width, hidden = ours["fc_in"]["kernel"].shape
    projector = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width), nn.LayerNorm(width))
    state = {"3.weight": ours["norm"]["scale"], "3.bias": ours["norm"]["bias"]}
    for place, name in ((0, "fc_in"), (2, "fc_out")):
        state |= {f"{place}.weight": ours[name]["kernel"].T.copy(), f"{place}.bias": ours[name]["bias"]}
    projector.load_state_dict({name: torch.tensor(value) for name, value in state.items()})
    return projector


class SlowReasoner:
    """COCONUT on a plain GPT-2 in numpy's float64, one unpadded row at a time."""

    def __init__(self, params=None, config: GPT2Config = CONFIG):
        assert config.tied
        self.config = config
        self.params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params or random_params())
        self.factors = {}  # of the positions of one row (0, 1, 2, .. from the first real token), by site

    def embed(self, tokens) -> np.ndarray:
        return self.params["backbone"]["wte"][np.asarray(tokens, int)]

    def prompt(self, prompts: Prompts, row: int) -> np.ndarray:
        """Inputs [L, D] of one prompt."""
        return self.embed(real_tokens(prompts, row))

    def hidden(self, inputs_LD) -> np.ndarray:
        """Hidden states [L, D] after the final norm of a fresh full forward."""
        return plain_hidden(self.params, inputs_LD, self.factors, self.config.n_head)

    def logits(self, hidden_LD) -> np.ndarray:
        return hidden_LD @ self.params["backbone"]["wte"].T

    def think(self, prompt, length: int) -> np.ndarray:
        """h_1 .. h_tau [tau, D] under the noise that was set."""
        inputs = self.embed(prompt)
        for _ in range(length):
            inputs = np.concatenate([inputs, self.hidden(inputs)[-1:]])
        return inputs[len(prompt) :]

    def says(self, before_LD, most: int = ROLLOUT.answer_slots, ends=(EOS,), choose=np.argmax) -> list[int]:
        """The tokens that come after these inputs, up to and including an end; `choose` takes one by its logits [V]."""
        tokens: list[int] = []
        while len(tokens) < most and not {*tokens} & {*ends}:
            tokens.append(int(choose(self.logits(self.hidden(np.concatenate([before_LD, self.embed(tokens)]))[-1]))))
        return tokens

    def log_probs(self, before_LD, tokens, temperature=1.0) -> np.ndarray:
        """Of each of these tokens after the inputs and the tokens before it."""
        hidden = self.hidden(np.concatenate([before_LD, self.embed(tokens[:-1])]))[len(before_LD) - 1 :]
        return special.log_softmax(self.logits(hidden) / temperature, axis=-1)[np.arange(len(tokens)), tokens]


def _all_factors(prompt_key, key, rate):
    parts = (
        noise.prompt_dropout(prompt_key[None], jnp.ones((1, MOST), bool), rate, "thought"),
        noise.latent_dropout(key[None], jnp.arange(1, MOST + 1), jnp.ones((1, MOST), bool), rate, "all"),
        noise.answer_dropout(key[None], jnp.arange(MOST), rate, "all"),
    )
    keys = jnp.concatenate([part.keys_BL for part in parts], axis=1)
    return dropout_factors(Dropout(keys, jnp.ones(keys.shape, bool), rate), CONFIG.n_embd, CONFIG.n_layer)


_every_factor = compiled(_all_factors, static=("rate",))


def slow_factors(prompt_key, key, prompt: int, length: int, config: RolloutConfig) -> dict[int, np.ndarray]:
    """What each site multiplies the positions of one unpadded row with, [L, D] by site: the noise of the row.

    `prompt` positions, tau latents, end marker and answer. Where dropout is on is decided here, apart from the package.
    """
    rate, where, slots = config.dropout_rate, config.dropout_where, config.answer_slots
    if rate == 0.0:
        return {}
    assert max(prompt, length, slots) <= MOST
    on = {
        "thought": [1] * (prompt + length) + [0] * slots,
        "latents": [0] * prompt + [1] * length + [0] * slots,
        "rollout": [0] * prompt + [1] * length + [0] * slots,
        "all": [1] * (prompt + length + slots),
    }[where]
    if length and where != "all":
        on[prompt + length - 1] = 0  # of the last latent
    latents = MOST + (np.zeros(length, int) if where == "rollout" else np.arange(length))
    kept = np.r_[MOST - prompt : MOST, latents, 2 * MOST : 2 * MOST + slots]
    factors = jax.tree.map(np.asarray, _every_factor(prompt_key, key, rate=rate))
    return {site: np.where(np.array(on, bool)[:, None], each[kept], 1) for site, each in factors.items()}


def verdicts(values) -> Verdicts:
    """What a host's reward says, of one that never fails."""
    values = np.asarray(values, np.float32)
    none = np.zeros(len(values), bool)
    return Verdicts(values, {"mine": values}, values >= 1, none, none, none)
