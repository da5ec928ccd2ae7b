"""The parts of a run's parameters: {name: tree}. The owner of a part says how it starts and which stages train it.

Policy, objectives and recipes take the whole tree; only the owner of a part knows its name.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

Params = dict[str, Any]

REASONER = "reasoner"
GATE = "gate"
LATENT_POLICY = "latent_policy"
ADAPTER = "adapter"
DECODER = "decoder"
OF_A_REASONER = (REASONER, GATE, LATENT_POLICY, DECODER)
"""Parts that a reasoner's checkpoint may have; that of a reward model (`latent_rm`) has others."""
CARRIED = (DECODER,)
"""Optional parts, which a stage passes on from its start as they are, and computes nothing with."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the parameters.

    Attributes:
        name: its key in the tree.
        key: the random key of its start.
        init: key -> the part; {} without parameters, and then the tree doesn't have it.
        trained_by: the sections of the stages whose optimizer changes it.
    """

    name: str
    key: jax.Array
    init: Callable[[jax.Array], Any]
    trained_by: frozenset[str]


def init_parts(parts: Iterable[Part]) -> Params:
    """Initialise the parts at random; the same keys give the same parts."""
    params = {}
    for part in parts:
        # A part without parameters has no place in the tree.
        tree = part.init(part.key)
        if tree or part.name == REASONER:
            params[part.name] = tree
    return params


def find_missing(params: Mapping[str, Any], complete: Params) -> Params:
    """Return the parts of `complete` that `params` lacks, and missing modules of its parts (a reasoner's projector)."""
    missing = {}
    for name, part in complete.items():
        # A part that is there may still lack modules.
        found = params.get(name, {})
        modules = {}
        for key, tree in part.items():
            if key not in found:
                modules[key] = tree
        if modules or name not in params:
            missing[name] = modules
    return missing


def carried_parts(params: Mapping[str, Any]) -> Params:
    """Return the parts that a stage passes on as they are."""
    return {name: params[name] for name in CARRIED if name in params}


def merge_parts(params: Mapping[str, Any], rest: Params) -> Params:
    """Merge `params` over `rest`, part by part and module by module."""
    merged = dict(rest)
    for name, part in params.items():
        modules = dict(rest.get(name, {}))
        modules.update(part)
        merged[name] = modules
    return merged


def reads(name: str, function: Callable) -> Callable:
    """Turn a function of one part's parameters into one of the whole tree."""

    def of_tree(params, *args, **kwargs):
        return function(params[name], *args, **kwargs)

    return of_tree


def writes(name: str, function: Callable) -> Callable:
    """Turn a function that changes one part's parameters into one of the whole tree."""

    def of_tree(params):
        return {**params, name: function(params[name])}

    return of_tree


def detach(params: Params, name: str) -> Params:
    """Return the parameters such that no gradient reaches those of one part."""
    return {**params, name: jax.lax.stop_gradient(params[name])}
