"""Records of graphs as their edges, in the layout of `prosqa_*_graph_4_coconut.json` (Zhu et al., 2025).

A text is `0 2 | 1 3 | 1 9 [Q] 21 25 [R] 1`: the edges, the two nodes of which one can be reached, and where from. The
file's edges lie in an order that tells of the answer, so they are shuffled, and so are the two nodes.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from slpo_jax.errors import UserError

EDGES = "edges"
"""The field, by which `config.data.fields.question` asks for this layout."""
BAR, ASKED, ROOT = "|", "[Q]", "[R]"
_NODES = ("target", "neg_target", "root")
_LAYERS = "neighbor_k"
ROLES = {"question": (EDGES, *_NODES), "answer": ("target",), "steps": (_LAYERS,)}
"""The fields by what is made of them."""


def read_graph(where: str, record: Mapping[str, Any]) -> tuple[str, tuple[str, ...], str]:
    """A record's question, steps and answer.

    Args:
        where: file and record, for messages.
        record: with edges, [[FROM, TO], ..]; target, neg_target and root, nodes; neighbor_k, by "1", "2", .. the nodes
            that are so many edges from root on a shortest way to target.
    Returns:
        the question; of each distance its nodes, in one text; the target.
    Raises:
        UserError: a field is missing or holds something else.
    """

    def need(field: str, ok: bool, example: str) -> None:
        if not ok:
            problem = "is missing" if field not in record else f"holds {str(record[field])[:40]!r}"
            raise UserError(f"{where}: field {field!r} {problem}; write {example}, or leave out config.data.fields")

    edges: Any = record.get(EDGES, [])
    layers: Any = record.get(_LAYERS)
    need(EDGES, isinstance(edges, list) and bool(edges) and all(map(_is_edge, edges)), "[[0, 2], [1, 3], ..]")
    for field in _NODES:
        need(field, _is_node(record.get(field)), "the number of a node")
    target, other, root = (str(record[field]) for field in _NODES)
    far: list[Any] = [layers.get(str(k)) for k in range(1, len(layers) + 1)] if isinstance(layers, Mapping) else []
    far = far[:-1] if far and far[-1] is None else far  # where there is a layer 0, root itself
    good = bool(far) and all(isinstance(layer, list) and layer and all(map(_is_node, layer)) for layer in far)
    need(_LAYERS, good and target in map(str, far[-1]), '{"1": [9, 5], .., "4": [TARGET]}')
    told = [f"{begin} {end}" for begin, end in edges]
    rng = np.random.default_rng(zlib.crc32(" ".join([*told, target, other, root]).encode()))
    told = [told[place] for place in rng.permutation(len(told))]
    first, second = (target, other) if rng.random() < 0.5 else (other, target)
    question = f"{f' {BAR} '.join(told)} {ASKED} {first} {second} {ROOT} {root}"
    return question, tuple(" ".join(map(str, layer)) for layer in far), target


def _is_node(value: Any) -> bool:
    return isinstance(value, int | str) and str(value).isdecimal()


def _is_edge(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_node, value))
