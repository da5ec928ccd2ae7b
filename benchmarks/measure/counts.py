"""FLOPs and bytes of an SLPO step, counted by hand from shapes and from the trajectories that were rolled out.

Two counts: `useful` has real positions only (prompt tokens, tau latents, the end marker and the answer tokens that are
fed, decode steps of rows that are active), `slots` has what static shapes make the program do.
"""

import dataclasses
import math
import operator
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROLLOUT = ("prefill", "latent steps", "answer steps")
SURROGATE = ("score prompts", "score trajectories", "score logits")


@dataclasses.dataclass(frozen=True)
class Counts:
    """How often a part does what costs.

    Attributes:
        positions: that go through the blocks; their keys and values are written.
        pairs: of a query and a key that it sees.
        logits: positions with logits.
        transitions: latents that are made from a hidden state.
        gates: stop decisions.
        passes: times that the blocks' weights are read.
        heads: times that the head is read.
        keys: positions whose keys and values are read from memory.
    """

    positions: float = 0
    pairs: float = 0
    logits: float = 0
    transitions: float = 0
    gates: float = 0
    passes: float = 0
    heads: float = 0
    keys: float = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))

    def __mul__(self, factor: float) -> "Counts":
        return Counts(*(factor * value for value in dataclasses.astuple(self)))


@dataclasses.dataclass(frozen=True)
class Layout:
    """Slots and copies of a step.

    Attributes:
        prompt_slots, latent_slots, answer_slots: P, T, A.
        group, passes: G, K.
        shards: devices that share the prompts; each runs its own loops.
        noisy_prompts: dropout reaches the prompts, so that no rollouts or passes share their encoding.
        remat: the backward pass computes the forward again.
        capacities: `Policy.capacities`.
        prompt_capacity: `Prompts.capacity`.
    """

    prompt_slots: int
    latent_slots: int
    answer_slots: int
    group: int
    passes: int
    shards: int = 1
    noisy_prompts: bool = True
    remat: bool = False
    capacities: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    prompt_capacity: int = 0

    def prompt_positions(self, rows: int) -> int:
        """Positions of the prompts of so many rows of a shard."""
        return self.prompt_capacity or rows * self.prompt_slots


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a position costs.

    Attributes:
        layers, width, vocabulary: L, D, V.
        heads_width, keys_width: of all query heads and of all key heads of a layer, H*Dh and G*Dh.
        blocks, transition, gate: numbers in their kernels.
        itemsize: bytes of an activation; weights are taken to be read at this width too.
        trained: bytes of what the optimizer changes.
        moments: bytes of its state.
    """

    layers: int
    width: int
    vocabulary: int
    heads_width: int
    keys_width: int
    blocks: int
    transition: int
    gate: int
    itemsize: int
    trained: int
    moments: int

    def flops(self, counts: Counts) -> float:
        """2 a weight and position, 4 H Dh a layer, query and key; norms, GELU, softmax and dropout are left out."""
        return (
            2 * self.blocks * counts.positions
            + 4 * self.layers * self.heads_width * counts.pairs
            + 2 * self.width * self.vocabulary * counts.logits
            + 2 * self.transition * counts.transitions
            + 2 * self.gate * counts.gates
        )

    def bytes(self, counts: Counts) -> float:
        """Weights, and keys and values read and written; all other activations, logits too, are left out."""
        weights = (self.blocks + self.transition) * counts.passes + self.width * self.vocabulary * counts.heads
        cache = 2 * self.layers * self.keys_width * (counts.keys + counts.positions)
        return self.itemsize * (weights + cache)

    @property
    def optimizer_bytes(self) -> int:
        """Gradients read for their norm and for the update; parameters and moments read and written."""
        return 4 * self.trained + 2 * self.moments


def sizes_of(config, params, opt_state=(), trained: tuple[str, ...] = ("reasoner", "gate")) -> Sizes:
    """`Sizes` of a backbone's config and {"reasoner": ..., "gate": ...}."""
    reasoner = params["reasoner"]
    rest = {name: tree for name, tree in reasoner.items() if name != "backbone"}
    return Sizes(
        layers=config.n_layer,
        width=config.n_embd,
        vocabulary=config.vocab_size,
        heads_width=config.n_head * config.head_dim,
        keys_width=config.n_kv_head * config.head_dim,
        blocks=_kernel_size(reasoner["backbone"]),
        transition=_kernel_size(rest),
        gate=_kernel_size(params["gate"]),
        itemsize=jnp.dtype(config.dtype).itemsize,
        trained=_bytes({name: params[name] for name in trained}),
        moments=_bytes(opt_state),
    )


def position_counts(lengths, answers, prompts, layout: Layout) -> dict[str, dict[str, Counts]]:
    """Counts of every forward part of a step, answers scored in the K passes.

    Args:
        lengths: int [B*G], tau of each trajectory, a prompt's G in a row.
        answers: int [B*G], its answer tokens, eos included.
        prompts: int [B], real tokens of each prompt.
        layout: see `Layout`.
    Returns:
        "useful" and "slots" -> part in `ROLLOUT` and `SURROGATE` -> `Counts`, summed over devices.
    """
    lengths, answers, prompts = (np.asarray(x, np.int64) for x in (lengths, answers, prompts))
    useful = _useful_rollout(lengths, answers, prompts, layout) | _useful_scores(lengths, answers, prompts, layout)
    slots = _slots_rollout(lengths, answers, len(prompts), layout) | _slots_scores(lengths, answers, layout)
    return {"useful": useful, "slots": slots}


def rollout_flops(config, params, lengths, answers, prompts, noisy_prompts: bool) -> float:
    """Useful FLOPs of rollouts alone; the arguments are those of `sizes_of` and `position_counts`."""
    layout = Layout(0, 0, 0, len(lengths) // len(prompts), passes=1, noisy_prompts=noisy_prompts)
    lengths, answers, prompts = (np.asarray(x, np.int64) for x in (lengths, answers, prompts))
    return sizes_of(config, params).flops(total(_useful_rollout(lengths, answers, prompts, layout), ROLLOUT))


def total(counts: dict[str, Counts], parts) -> Counts:
    """The sum over some parts."""
    return reduce(operator.add, (counts[part] for part in parts))


def backward(counts: dict[str, Counts], layout: Layout | None = None) -> Counts:
    """Of the surrogate: twice its forward, and once more if `layout` has it computed again."""
    return total(counts, SURROGATE) * (3 if layout is not None and layout.remat else 2)


def _triangle(n):
    """1 + 2 + .. + n."""
    return n * (n + 1) // 2


def _decoded(before, steps, layout: Layout) -> Counts:
    """Rows that take `steps` steps, of which the first sees `before` positions and itself."""
    pairs = int((before * steps + _triangle(steps)).sum())
    done = int(steps.sum())
    passes = int(_longest(steps, layout).sum())
    return Counts(positions=done, pairs=pairs, keys=pairs - done, passes=passes)


def _useful_rollout(lengths, answers, prompts, layout: Layout) -> dict[str, Counts]:
    before = np.repeat(prompts, layout.group)
    encoded = before if layout.noisy_prompts else prompts
    thoughts, spoken = int(lengths.sum()), int(answers.sum())
    answering = _decoded(before + lengths, answers, layout)
    return {
        "prefill": Counts(
            positions=int(encoded.sum()), pairs=int(_triangle(encoded).sum()), transitions=len(encoded),
            passes=layout.shards,
        ),
        # The last latent's own successor is not needed.
        "latent steps": _decoded(before, lengths, layout)
        + Counts(transitions=thoughts - len(lengths), gates=thoughts),
        "answer steps": answering + Counts(logits=spoken, heads=answering.passes),
    }  # fmt: skip


def _slots_rollout(lengths, answers, prompts: int, layout: Layout) -> dict[str, Counts]:
    rows = prompts * layout.group
    keys = layout.prompt_slots + layout.latent_slots + layout.answer_slots
    copies = layout.group if layout.noisy_prompts else 1

    def steps(longest) -> Counts:
        turns = int(longest.sum())
        done = turns * rows // layout.shards
        return Counts(positions=done, pairs=done * keys, keys=done * keys, passes=turns)

    thinking, answering = steps(_longest(lengths, layout)), steps(_longest(answers, layout))
    return {
        "prefill": Counts(
            positions=layout.prompt_positions(prompts // layout.shards) * layout.shards * copies,
            pairs=prompts * copies * layout.prompt_slots**2, transitions=prompts * copies, passes=layout.shards,
        ),
        "latent steps": thinking + Counts(transitions=thinking.positions, gates=thinking.positions),
        "answer steps": answering + Counts(logits=answering.positions, heads=answering.passes),
    }  # fmt: skip


def _useful_scores(lengths, answers, prompts, layout: Layout) -> dict[str, Counts]:
    copies = layout.passes if layout.noisy_prompts else 1
    before, fed = np.repeat(prompts, layout.group), lengths + answers
    thoughts = int(lengths.sum())
    return {
        "score prompts": Counts(int(prompts.sum()), int(_triangle(prompts).sum()), transitions=len(prompts)) * copies
        + Counts(passes=layout.shards),
        "score trajectories": Counts(
            int(fed.sum()), int((before * fed + _triangle(fed)).sum()), transitions=thoughts - len(lengths)
        ) * layout.passes
        + Counts(gates=thoughts, passes=layout.shards, keys=int(prompts.sum()) * copies),
        "score logits": Counts(logits=int(answers.sum()) * layout.passes, heads=layout.shards),
    }  # fmt: skip


def _slots_scores(lengths, answers, layout: Layout) -> dict[str, Counts]:
    prompts, slots = len(lengths) // layout.group // layout.shards, layout.prompt_slots
    shards = zip(lengths.reshape(layout.shards, -1), answers.reshape(layout.shards, -1), strict=True)
    parts = {name: Counts() for name in SURROGATE}
    for latents, spoken in (_capacity(*shard, layout) for shard in shards):
        packed = latents + spoken
        encoded = Counts(layout.prompt_positions(prompts), prompts * slots**2, transitions=prompts)
        parts["score prompts"] += encoded * (layout.passes if layout.noisy_prompts else 1)
        parts["score prompts"] += Counts(passes=1)
        parts["score trajectories"] += Counts(
            prompts * packed, prompts * packed * (slots + packed), transitions=prompts * latents, keys=prompts * slots
        ) * layout.passes + Counts(gates=prompts * layout.group * layout.latent_slots, passes=1)
        parts["score logits"] += Counts(logits=prompts * spoken * layout.passes, heads=1)
    return parts


def _capacity(lengths, answers, layout: Layout) -> tuple[int, int]:
    """Packed slots a prompt for latents and answers in a shard's scoring passes: the first capacity that fits all."""
    most = [int(used.reshape(-1, layout.group).sum(axis=1).max()) for used in (lengths, answers)]
    full = [layout.group * layout.latent_slots, layout.group * layout.answer_slots]
    for shares in layout.capacities:
        latents, spoken = (math.ceil(share * slots) for share, slots in zip(shares, full, strict=True))
        if most[0] <= latents and most[1] <= spoken:
            break
    return latents, spoken


def _longest(steps, layout: Layout) -> np.ndarray:
    """Turns of each shard's loop, int [shards]."""
    return np.asarray(steps).reshape(layout.shards, -1).max(axis=1)


def _kernel_size(tree) -> int:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return sum(leaf.size for path, leaf in leaves if path[-1].key == "kernel")


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
