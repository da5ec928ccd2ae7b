"""Records of graphs as their edges, in the layout of `prosqa_*_graph_4_coconut.json` (Zhu et al., 2025).

A text is `0 2 | 1 3 | 1 9 [Q] 21 25 [R] 1`: the edges, the two nodes of which one can be reached, and where from. The
file's edges lie in an order that tells of the answer, so they are shuffled, and so are the two nodes.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from slpo_jax.errors import UserError, in_a_line

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

    try:
        told = [f"{int(begin)} {int(end)}" for begin, end in record[EDGES]]
        target, other, root = (str(int(record[field])) for field in _NODES)
        layers: Any = record[_LAYERS]
        far = [layers[str(k)] for k in range(1, len(layers) + 1) if layers.get(str(k))]  # 0 may be there, root itself
        steps = tuple(" ".join(str(int(node)) for node in layer) for layer in far)
        if not told or target not in steps[-1].split():
            raise ValueError("target is in no layer")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{where}: is no graph ({in_a_line(error)}); write edges [[0, 2], ..], target, neg_target and root, and "
            'neighbor_k {"1": [9, 5], .., "4": [TARGET]}, or leave out config.data.fields'
        ) from None
    rng = np.random.default_rng(zlib.crc32(" ".join([*told, target, other, root]).encode()))
    told = [told[place] for place in rng.permutation(len(told))]
    first, second = (target, other) if rng.random() < 0.5 else (other, target)
    question = f"{f' {BAR} '.join(told)} {ASKED} {first} {second} {ROOT} {root}"
    return question, steps, target
