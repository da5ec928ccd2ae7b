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
            all of them.
    """

    rank: int = setting(0, least=0, note="0 trains all parameters")
    alpha: float = setting(32.0, above=0)
    kernels: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        """The factor of the updates."""
        return self.alpha / self.rank


def init(
    key: jax.Array,
    tree: Tree,
    rank: int,
    kernels: tuple[str, ...] = (),
) -> Tree:
    """Make adapters of the Dense kernels in a tree, which don't change the model yet.

    They start as peft's do: A is uniform within +-1/sqrt(in), B zero.

    Args:
        key: of the whole tree; the key of each module is folded from it by the module's place.
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
        part_key = jax.random.fold_in(key, number)
        # Adapters of the modules within this one, if it has no kernel itself.
        if "kernel" not in part:
            inner = init(part_key, part, rank, kernels)
            if inner:
                adapters[name] = inner
            continue
        if kernels and name not in kernels:
            continue
        rows, columns = part["kernel"].shape
        bound = rows**-0.5
        a = jax.random.uniform(
            part_key,
            (rows, rank),
            jnp.float32,
            -bound,
            bound,
        )
        b = jnp.zeros((rank, columns), jnp.float32)
        adapters[name] = {"A": a, "B": b}
    return adapters


def merge(
    tree: Tree,
    adapters: Tree,
    scale: float,
    apart: bool = False,
) -> Tree:
    """Return the tree with `kernel + scale * A @ B` for each kernel that has an adapter; differentiable in both.

    Args:
        scale: alpha / r.
        apart: `scale * A` and B stay beside the kernels, for `models.layers.add_low_rank` to merge.
    """
    merged = dict(tree)
    for name, part in adapters.items():
        if "A" not in part:
            merged[name] = merge(
                tree[name],
                part,
                scale,
                apart,
            )
            continue
        a = scale * part["A"]
        b = part["B"]
        module = dict(tree[name])
        if apart:
            module["A"] = a
            module["B"] = b
        else:
            module["kernel"] = module["kernel"] + a @ b
        merged[name] = module
    return merged


def adapter(
    key: jax.Array,
    params: Tree,
    rank: int,
    kernels: tuple[str, ...] = (),
    section: str = "config.imitate.lora",
    tokens: tuple[int, ...] = (),
) -> Tree:
    """Make the part ADAPTER: adapters of the reasoner's blocks, and a copy of its modules beside the backbone.

    Args:
        params: all parts.
        rank, kernels: see `LoraConfig`.
        section: the config section of these two, for messages.
        tokens: ids whose rows of the vocabulary are copied too, in the token embedding and in the head.
    Raises:
        UserError: a kernel that the blocks don't have, or a rank above that of every kernel.
    """
    reasoner = dict(params[REASONER])
    backbone = reasoner.pop("backbone")

    # The highest rank of an update of each kernel, by the name of its module.
    highest_rank = {}
    for path, x in jax.tree.leaves_with_path(backbone):
        if path[-1].key == "kernel":
            highest_rank[path[-2].key] = min(x.shape)

    # Refuse names that no module has, and a rank that would make no update of low rank.
    for name in kernels:
        if name not in highest_rank:
            known = ", ".join(sorted(highest_rank))
            raise UserError(
                f"{section}.kernels: {name!r} is not a kernel of this model; it has {known}"
            )
    highest = max(highest_rank[name] for name in kernels or highest_rank)
    if rank > highest:
        raise UserError(
            f"{section}.rank: {rank} is above {highest}, the most that a kernel of this model has; lower it"
        )
    copies = jax.tree.map(
        lambda x: jnp.array(x, copy=True),
        reasoner,
    )
    part = {"lora": init(key, backbone, rank, kernels), **copies}

    # Copy the rows of the trained tokens out of the vocabulary's tables.
    if tokens:
        part[_ROWS] = {}
        for name in _TABLES:
            if name in backbone:
                part[_ROWS][name] = backbone[name][jnp.array(tokens)]
    return part


def without_adapter(
    params: Tree,
    scale: float,
    apart: bool = False,
    tokens: tuple[int, ...] = (),
) -> Tree:
    """Merge the part ADAPTER into the reasoner, differentiably.

    Args:
        scale: alpha / rank.
        apart: layers are a loop, which merges those of one after the other: merged all at once, kernels and their
            cotangents would take as much memory as the backbone each.
        tokens: of `adapter`.
    """
    # Take the adapters, and what was trained whole, out of the part.
    parts = dict(params)
    trained = dict(parts.pop(ADAPTER))
    adapters = trained.pop("lora")
    rows_by_table = trained.pop(_ROWS, {})

    # Merge the adapters into the kernels that they belong to.
    reasoner = parts[REASONER]
    backbone = reasoner["backbone"]
    if apart:
        backbone = Backbone.stack(backbone)
        adapters = Backbone.stack(adapters)
    merged = merge(backbone, adapters, scale, apart)

    # Put the trained tokens' rows into the vocabulary's tables.
    for name, rows in rows_by_table.items():
        merged[name] = merged[name].at[jnp.array(tokens)].set(rows)
    parts[REASONER] = {**reasoner, **trained, "backbone": merged}
    return parts


def make_merging(reasoner: Reasoner, scale: float) -> Reasoner:
    """Return the reasoner `in_tree` whose programs merge the part ADAPTER, where the parameters have it.

    Args:
        scale: alpha / rank.
    """

    def stack(params: Tree) -> Tree:
        if ADAPTER in params:
            params = without_adapter(params, scale, reasoner.config.scan_layers)
        return reasoner.stack(params)

    return dataclasses.replace(reasoner, stack=stack)
