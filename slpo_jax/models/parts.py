"""The parts of a run's parameters: {name: tree}. Each has an owner, who says how it is made and which stages train it.

Policy, objectives and recipes take the whole tree; only what owns a part knows its name.
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
"""Parts that no stage has to have: those of its start it leaves as they were, and computes nothing with."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the parameters.

    Attributes:
        name: its key in the tree.
        key: what its random start is drawn with.
        init: key -> the part; {} where it has no parameters, and then it isn't there.
        trained_by: the sections of the stages whose optimizer changes it.
    """

    name: str
    key: jax.Array
    init: Callable[[jax.Array], Any]
    trained_by: frozenset[str]


def drawn(parts: Iterable[Part]) -> Params:
    """Draw the parts at random, the same for the same keys."""
    params = {part.name: part.init(part.key) for part in parts}
    return {name: tree for name, tree in params.items() if name == REASONER or tree}


def lacking(params: Mapping[str, Any], rest: Params) -> Params:
    """Return what of `rest` is not found: whole parts, and modules of a part that is there (a reasoner's projector)."""
    return {
        name: {
            key: tree for key, tree in part.items() if key not in params.get(name, {})
        }
        for name, part in rest.items()
        if name not in params or part.keys() - params[name].keys()
    }


def carried(params: Mapping[str, Any]) -> Params:
    """Return the parts that are carried along."""
    return {name: params[name] for name in CARRIED if name in params}


def merged(params: Mapping[str, Any], rest: Params) -> Params:
    """Merge what is found, and `rest` where nothing is, part by part and module by module."""
    return {
        name: {**rest.get(name, {}), **params.get(name, {})}
        for name in {**rest, **params}
    }


def reads(name: str, function: Callable) -> Callable:
    """Turn a function of one part's parameters into one of the whole tree."""

    def of_tree(params, *args, **kwargs):
        return function(params[name], *args, **kwargs)

    return of_tree


def writes(name: str, function: Callable) -> Callable:
    """Turn a function that changes one part's parameters into one of the whole tree."""
    return lambda params: {**params, name: function(params[name])}


def detached(params: Params, name: str) -> Params:
    """Return the parameters, no gradient reaching those of one part."""
    return {**params, name: jax.lax.stop_gradient(params[name])}
