"""One rollout at a time in numpy's float64: what the objectives' losses are sums of, and what their gradients are.

Nothing here is padded, batched, cached or differentiated. It shares with the package the keys of the positions and the
map from a key to a mask, which other tests establish; where noise is on is said here again.
"""

import dataclasses

import jax
import numpy as np
from scipy import special, stats

from slpo_jax.policy.policy import RolloutConfig
from tiny import END, EOS, SlowReasoner, real_tokens, slow_factors


@dataclasses.dataclass
class Rollout:
    """One trajectory without its padding.

    Attributes:
        prompt: token ids.
        latents: [tau, D], what was fed.
        spoken: token ids of the answer, eos included if it was reached.
        key: of its noise.
    """

    prompt: np.ndarray
    latents: np.ndarray
    spoken: list[int]
    key: jax.Array


def rollouts_of(prompts, trajectories) -> list[Rollout]:
    """The rows of `Trajectories`, of which each prompt has equally many."""
    group = len(trajectories.lengths) // len(prompts.tokens)
    found = []
    pairs = zip(trajectories.lengths, trajectories.tokens, strict=True)
    for row, (length, tokens) in enumerate(pairs):
        latents = trajectories.actions[row, : int(length)]
        rollout = Rollout(
            prompt=real_tokens(prompts, row // group),
            latents=np.asarray(latents, np.float64),
            spoken=spoken(tokens),
            key=trajectories.keys[row],
        )
        found.append(rollout)
    return found


def spoken(tokens) -> list[int]:
    """The answer up to and including eos."""
    tokens = np.asarray(tokens).tolist()
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


def factors_of(
    rollouts: list[Rollout], prompt_keys, keys, config: RolloutConfig
) -> list[dict[int, np.ndarray]]:
    """`slow_factors` of each row.

    Args:
        prompt_keys, keys: one a row each, of the prompts' noise and of the rest.
    """
    each = zip(rollouts, prompt_keys, keys, strict=True)
    return [
        slow_factors(own, key, len(row.prompt), len(row.latents), config)
        for row, own, key in each
    ]


def teacher_forced(
    reasoner: SlowReasoner, rollout: Rollout, latents, answer, factors
) -> tuple[np.ndarray, float]:
    """The latents [tau, D] that one pass would have drawn at each step, and the answer's log-probability.

    Args:
        latents: [tau, D], what is fed.
        answer: token ids.
    """
    drawn, log_probs = token_by_token(reasoner, rollout, latents, answer, factors)
    return drawn, sum(log_probs)


def token_by_token(
    reasoner: SlowReasoner, rollout: Rollout, latents, answer, factors, temperature=1.0
) -> tuple[np.ndarray, list[float]]:
    """`teacher_forced` with each answer token's own log-probability, at a temperature."""
    reasoner.factors = factors
    before = np.concatenate(
        [reasoner.embed(rollout.prompt), latents, reasoner.embed([END])]
    )
    first = len(rollout.prompt) - 1  # the position that produces h_1
    drawn = reasoner.hidden(before)[first : first + len(latents)]
    return drawn, list(reasoner.log_probs(before, answer, temperature))


def think(reasoner: SlowReasoner, rollout: Rollout, factors, added=0.0) -> np.ndarray:
    """The rollout's latents [tau, D] made again, step by step, with something `added` [tau, D] to each."""
    reasoner.factors = factors
    inputs = reasoner.embed(rollout.prompt)
    added = np.broadcast_to(added, rollout.latents.shape)
    for step in added:
        inputs = np.concatenate([inputs, reasoner.hidden(inputs)[-1:] + step])
    return inputs[len(rollout.prompt) :]


def stop_log_prob(gate, latents, most: int) -> float:
    """log P(tau) of Bernoulli stops, of which there is none at T."""
    out = gate["out"]
    rho = special.expit(latents @ out["kernel"][:, 0] + out["bias"][0])
    going_on = np.log1p(-rho[:-1]).sum()
    if len(latents) == most:
        return going_on
    return going_on + np.log(rho[-1])


def normal_log_prob(x_D, mean_D, variance: float) -> float:
    """log N(x; mean, variance I)."""
    return float(stats.norm(mean_D, np.sqrt(variance)).logpdf(x_D).sum())


def colar_law(params, hidden_D) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of CoLaR's head after a hidden state."""
    head = as_float64(params["reasoner"]["head"])
    dense = lambda name, x: x @ head[name]["kernel"] + head[name]["bias"]  # noqa: E731
    x = dense("fc_in", hidden_D)
    x = dense("fc_out", x * 0.5 * (1 + special.erf(x / np.sqrt(2))))
    unit = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
    x = unit * head["norm"]["scale"] + head["norm"]["bias"]
    return dense("mean", x), np.exp(dense("log_std", x))


def leave_one_out(rewards_BG) -> np.ndarray:
    """RLOO's advantages, [B * G]."""
    rewards_BG = np.asarray(rewards_BG, np.float64)
    others = rewards_BG.sum(axis=1, keepdims=True) - rewards_BG
    return (rewards_BG - others / (rewards_BG.shape[1] - 1)).reshape(-1)


def as_float64(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def assert_is_gradient(
    gradient, value, params, step: float = 1e-5, rel: float = 2e-3
) -> None:
    """`gradient` is that of `value` by central differences: of each array along itself, of all along random directions.

    Args:
        value: parameters in float64 -> float.
    """
    params = as_float64(params)
    gradient = as_float64(gradient)
    rng = np.random.default_rng(0)
    paths, tree = jax.tree_util.tree_flatten_with_path(gradient)
    slopes = [slope for _, slope in paths]
    scale = np.sqrt(sum(np.sum(slope**2) for slope in slopes))
    assert scale > 0.01
    directions = {}
    # Along itself: an array's own slope, and nothing of the others.
    for number, (path, slope) in enumerate(paths):
        if np.any(slope):
            direction = [np.zeros_like(other) for other in slopes]
            direction[number] = slope / np.linalg.norm(slope)
            directions[jax.tree_util.keystr(path)] = direction
    for n in range(4):
        random = [rng.normal(size=slope.shape) / 10 for slope in slopes]
        directions[f"direction {n}"] = random
    for name, direction in directions.items():
        by_tree = jax.tree.unflatten(tree, direction)
        up = value(jax.tree.map(lambda p, d: p + step * d, params, by_tree))
        down = value(jax.tree.map(lambda p, d: p - step * d, params, by_tree))
        expected = (up - down) / (2 * step)
        parts = [s * d for s, d in zip(slopes, direction, strict=True)]
        found = sum(np.sum(part) for part in parts)
        length = np.sqrt(sum(np.sum(part**2) for part in parts))
        tolerance = rel * max(abs(found), length) + 2e-5 * scale
        assert abs(found - expected) < tolerance, f"{name}: {found} is not {expected}"
