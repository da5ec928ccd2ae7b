"""A policy (reasoner, law of its thought, and how rollouts think, stop and answer), and prompts for it."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from slpo_jax.models.attention import KVCache
from slpo_jax.models.packing import pack
from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy import noise
from slpo_jax.policy.latent_policies import LatentPolicy
from slpo_jax.policy.noise import DropoutWhere

Stopping = Literal["sample", "threshold", "length"]


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How to think and to answer.

    Attributes:
        max_latents: T; 0 is explicit text alone.
        answer_slots: A; at most A tokens are generated, the end-of-sequence token included.
        closing_ids: of the marker between thought and answer, all of which are fed; () is none, and the thought's last
            position predicts the first answer token.
        eos_ids: of the tokens that end an answer, each of them; the first stands for all where texts are read.
        pad_id: of the token that fills the slots after the end.
        dropout_rate: p; 0 is without dropout.
        dropout_where: see `noise.DropoutConfig`.
        latent_policy_noise: whether the latent policy draws with its own noise, where it has any.
        stopping: "sample" (Bernoulli(rho_t), the law of training), "threshold" (first rho_t >= threshold, Alg. 1) or
            "length" (a given number of latents a row).
        temperature: of the answer tokens; 0 is greedy.
        top_k, top_p: truncation of the sampled law, see `noise.most_likely`.
        banned_ids: tokens that are never generated.
    """

    max_latents: int
    answer_slots: int
    closing_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    pad_id: int
    dropout_rate: float = 0.1
    dropout_where: DropoutWhere = "thought"
    latent_policy_noise: bool = True
    stopping: Stopping = "sample"
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    banned_ids: tuple[int, ...] = ()

    @property
    def suffix_slots(self) -> int:
        """Slots after the thought: of the marker and of the answer, whose last token is not fed after a marker."""
        return self.answer_slots + self.closing_slots

    @property
    def closing_slots(self) -> int:
        """The number of these that no answer token comes out of: all slots of the marker but its last."""
        return max(len(self.closing_ids) - 1, 0)


@dataclasses.dataclass(frozen=True)
class Policy:
    """A model, the law of its thought and its rollouts; static, known when a program is traced.

    Attributes:
        reasoner: the model.
        latent_policy: the law of a step of thought.
        config: of rollouts, which scoring mirrors.
        capacities: (share of a prompt's G*T latent slots, share of its G*A answer slots) that a scoring pass has room
            for, ascending to (1, 1). Each pair is a program of its own; no result depends on them.
        layout: of a scoring pass: a prompt's G trajectories side by side in one row ("packed"), or a row each ("rows"),
            for long ones: a position then attends to its own trajectory's slots alone.
    """

    reasoner: Reasoner
    latent_policy: LatentPolicy
    config: RolloutConfig
    capacities: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    layout: Literal["packed", "rows"] = "packed"

    @property
    def stops_itself(self) -> bool:
        """Whether the gate decides on the length, which then has a likelihood."""
        return self.config.stopping != "length"

    def row_of(self, group: int) -> int:
        """Count the trajectories in a row of a scoring pass, of a prompt's G."""
        return group if self.layout == "packed" else 1

    def with_config(self, **changes) -> "Policy":
        """Return the policy with changes of its `RolloutConfig`."""
        config = dataclasses.replace(self.config, **changes)
        return dataclasses.replace(self, config=config)

    def without_noise(self) -> "Policy":
        """Return the deterministic policy: no dropout, no noise of the latent policy's, and greedy answers."""
        return self.with_config(
            dropout_rate=0.0,
            latent_policy_noise=False,
            temperature=0.0,
        )


@struct.dataclass
class Prompts:
    """Left-padded prompts: tokens int [N, P], valid bool [N, P]; of numpy on the host, of jax inside jit.

    Attributes:
        packed_slots: if not 0, the prompts of one device's batch (or micro-batch) are encoded end to end, in one row of
            this number of slots, enough for all their tokens: see `data.batches.end_to_end`.
    """

    tokens: Any
    valid: Any
    packed_slots: int = struct.field(pytree_node=False, default=0)

    @property
    def lengths(self) -> jax.Array:
        """Real tokens of each row, int [N]."""
        return self.valid.sum(axis=1)


@struct.dataclass
class PromptedBatch:
    """Problems to roll out.

    Attributes:
        prompts: of B rows.
        references: encoded for the verifier, uint8 [B, R].
        draw_ids: int [B], the numbers that keys are folded from, see `data.batches.draw_numbers`; the remainder by the
            number of problems is the problem.
        answers: int [B, A], the reference answers' tokens up to and including eos, then pad; None where no objective
            asks for them.
    """

    prompts: Prompts
    references: Any
    draw_ids: Any
    answers: Any = None


def repeat_rows(tree, copies: int):
    """Repeat each row `copies` times; copies are consecutive."""
    return jax.tree.map(
        lambda x: jnp.repeat(x, copies, axis=0),
        tree,
    )


def encode_prompts(
    reasoner: Reasoner, params, prompts: Prompts, dropout
) -> tuple[jax.Array, KVCache]:
    """Prefill: return the hidden states [N, D] of the last prompt positions and the prompts' cache.

    Args:
        params: all parts.
    """
    tokens = prompts.tokens
    positions = jnp.cumsum(prompts.valid, axis=1) - 1

    # Packed, all prompts are one row.
    packing = None
    if prompts.packed_slots:
        rows = prompts.valid.shape[0]
        packing = pack(prompts.valid, rows, prompts.packed_slots)
        tokens = packing.pack(tokens)
        positions = packing.pack(positions)
        dropout = jax.tree.map(packing.pack, dropout)
    hidden_N1D, prefix = reasoner.forward(
        params,
        reasoner.embed(params, tokens),
        positions,
        prompts.valid,
        dropout=dropout,
        last=1,
        packing=packing,
    )
    return hidden_N1D[:, 0], prefix


def encode_for_rollouts(
    reasoner, params, prompts: Prompts, keys_N, config: RolloutConfig
) -> tuple[jax.Array, KVCache]:
    """Encode prompts for N/B rollouts each, a prompt's consecutive: hidden states of N rows, a prefix of B or N.

    Prompts without noise are encoded once for all their rollouts; else each rollout has masks of its own, and vmap lets
    them share the arrays that no noise has reached yet: embeddings and the first attention.
    """
    rows = prompts.tokens.shape[0]
    rollouts = keys_N.shape[0]

    def encode(keys_B):
        dropout = noise.prompt_dropout(
            keys_B, prompts.valid, config.dropout_rate, config.dropout_where
        )
        return encode_prompts(reasoner, params, prompts, dropout)

    # Without noise one encoding of a prompt serves all of its rollouts.
    if not noise.reaches_prompts(config.dropout_rate, config.dropout_where):
        hidden_BD, prefix = encode(keys_N[:rows])
        return repeat_to(hidden_BD, rollouts), prefix

    # Encode the prompts of each rollout, with the axis of rollouts behind that of prompts.
    row_axes = (0, reasoner.empty_cache(1, 1).rows_axes)
    rollout_axes = jax.tree.map(lambda axis: axis + 1, row_axes)
    encode_all = jax.vmap(encode, in_axes=1, out_axes=rollout_axes)
    encoded = encode_all(keys_N.reshape(rows, -1))

    # Make one axis of the two.
    def join_axes(x, axis):
        return x.reshape(*x.shape[:axis], rollouts, *x.shape[axis + 2 :])

    row_axes = jax.tree.broadcast(row_axes, encoded)
    return jax.tree.map(join_axes, encoded, row_axes)


def repeat_to(x_B: jax.Array, rollouts: int) -> jax.Array:
    """Repeat rows, [B, ..] -> [N, ..], each N/B consecutive times."""
    return jnp.repeat(
        x_B,
        rollouts // x_B.shape[0],
        axis=0,
    )
