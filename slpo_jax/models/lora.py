"""LoRA (Hu et al., 2022): low-rank updates of Dense kernels, merged into the weights before they are used."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from slpo_jax.errors import UserError
from slpo_jax.models.backbone import Backbone
from slpo_jax.models.parts import ADAPTER, REASONER
from slpo_jax.models.reasoner import Reasoner
from slpo_jax.settings import Checked, setting

Tree = dict[str, Any]
_ROWS = "rows"
_TABLES = ("wte", "embed_tokens", "lm_head")


@dataclasses.dataclass(frozen=True)
class LoraConfig(Checked):
    """The sections `config.imitate.lora` and `config.rl.lora`.

    Attributes:
        rank: rank of the updates; above 0 adapters of the blocks' kernels, and a projector, are trained instead of the
            whole reasoner, and merged in the stage's checkpoint.
        alpha: the updates' scale times the rank.
        kernels: names of the kernels that are adapted in each block, such as q_proj (Llama) or c_attn (GPT-2); () is
            all.
    """

    rank: int = setting(0, least=0, note="0 trains all parameters")
    alpha: float = setting(32.0, above=0)
    kernels: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        """The factor of the updates."""
        return self.alpha / self.rank


def init(key: jax.Array, tree: Tree, rank: int, kernels: tuple[str, ...] = ()) -> Tree:
    """Make adapters of Dense kernels in a tree; they change nothing yet.

    As peft begins: A is uniform within +-1/sqrt(in), B zero.

    Args:
        key: of the whole tree; each kernel's is folded in by its place.
        tree: parameters, kernels [in, out] under the name "kernel".
        rank: r, the inner width of the update.
        kernels: names of their modules; () is all.
    Returns:
        float32 {"A": [in, r], "B": [r, out]} in the place of each module that has a kernel.
    """
    adapters: Tree = {}
    for number, (name, part) in enumerate(sorted(tree.items())):
        if not isinstance(part, dict):
            continue
        kernel_key = jax.random.fold_in(key, number)
        if "kernel" in part:
            if kernels and name not in kernels:
                continue
            rows, columns = part["kernel"].shape
            bound = rows**-0.5
            a = jax.random.uniform(kernel_key, (rows, rank), jnp.float32, -bound, bound)
            adapters[name] = {"A": a, "B": jnp.zeros((rank, columns), jnp.float32)}
        elif below := init(kernel_key, part, rank, kernels):
            adapters[name] = below
    return adapters


def merge(tree: Tree, adapters: Tree, scale: float, apart: bool = False) -> Tree:
    """Merge: `kernel + scale * A @ B` for each kernel that has an adapter; differentiable in both.

    Args:
        scale: alpha / r.
        apart: `scale * A` and B stay beside the kernels, for `models.layers.updated` to merge.
    """
    merged = dict(tree)
    for name, part in adapters.items():
        if "A" in part:
            a, b = scale * part["A"], part["B"]
            merged[name] = tree[name] | ({"A": a, "B": b} if apart else {"kernel": tree[name]["kernel"] + a @ b})
        else:
            merged[name] = merge(tree[name], part, scale, apart)
    return merged


def adapter(
    key: jax.Array,
    params: Tree,
    rank: int,
    kernels: tuple[str, ...] = (),
    section: str = "config.imitate.lora",
    tokens: tuple[int, ...] = (),
) -> Tree:
    """Make the part ADAPTER: adapters of the reasoner's blocks, and a copy of all else of it but the backbone.

    Args:
        params: all parts.
        rank, kernels: see `LoraConfig`.
        section: that these are from, for messages.
        tokens: ids whose rows of the vocabulary are copied too, in the token embedding and in the head.
    Raises:
        UserError: a kernel that the blocks don't have, or a rank that no kernel has itself.
    """
    every = [([entry.key for entry in path], x) for path, x in jax.tree.leaves_with_path(params[REASONER]["backbone"])]
    most = {path[-2]: min(x.shape) for path, x in every if path[-1] == "kernel"}
    for name in kernels:
        if name not in most:
            raise UserError(f"{section}.kernels: {name!r} is no kernel of this model; it has {', '.join(sorted(most))}")
    if rank > (width := max(most[name] for name in kernels or most)):
        raise UserError(f"{section}.rank: {rank} is above {width}, the most that a kernel of this model has; lower it")
    rest = {name: part for name, part in params[REASONER].items() if name != "backbone"}
    copies = jax.tree.map(lambda x: jnp.array(x, copy=True), rest)
    adapters = {"lora": init(key, params[REASONER]["backbone"], rank, kernels), **copies}
    if not tokens:
        return adapters
    tables = {name: table for name, table in params[REASONER]["backbone"].items() if name in _TABLES}
    return adapters | {_ROWS: {name: table[jnp.array(tokens)] for name, table in tables.items()}}


def without_adapter(params: Tree, scale: float, apart: bool = False, tokens: tuple[int, ...] = ()) -> Tree:
    """Merge the part ADAPTER into the reasoner, differentiably.

    Args:
        scale: alpha / rank.
        apart: layers are a loop, which merges those of one after the other: all merged at once, and their cotangents,
            would take as much as the backbone each.
        tokens: of `adapter`.
    """
    parts = {name: part for name, part in params.items() if name != ADAPTER}
    reasoner, adapter = params[REASONER], params[ADAPTER]
    trained = {name: part for name, part in adapter.items() if name not in ("lora", _ROWS)}
    looped = Backbone.stacked if apart else dict
    backbone = merge(looped(reasoner["backbone"]), looped(adapter["lora"]), scale, apart)
    for name, rows in adapter.get(_ROWS, {}).items():
        backbone[name] = backbone[name].at[jnp.array(tokens)].set(rows)
    return {**parts, REASONER: {**reasoner, **trained, "backbone": backbone}}


def merging(reasoner: Reasoner, scale: float) -> Reasoner:
    """Return the reasoner `in_tree`, whose programs read ADAPTER, where the parameters have that part, merged.

    Args:
        scale: alpha / rank.
    """

    def stacked(params: Tree) -> Tree:
        if ADAPTER in params:
            params = without_adapter(params, scale, reasoner.config.scan_layers)
        return reasoner.stacked(params)

    return dataclasses.replace(reasoner, stacked=stacked)
