"""Searches of a graph: `n4>n2 n7>n1 n2>n5 n1>n3 ends n3 n5 from n4` asks which of two ends is reached from n4.

Two chains of edges have as many hops, and as many dead ends each, so that neither an end's edges nor its depth say
which it is: the edges have to be followed, a hop a step.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from slpo_jax.data.depths import DepthConfig, sets_apart
from slpo_jax.data.problem import Problem
from slpo_jax.settings import FieldError, setting


@dataclass(frozen=True)
class GraphConfig(DepthConfig):
    """What the graphs look like: the section `config.data.graph`. A hop towards the end is a step.

    Attributes:
        dead_ends: further edges at each of the two chains, that lead to no end.
        nodes: names that there are, n0, n1, ..; a problem has 2 (hops + 1 + dead_ends).
    """

    dead_ends: int = setting(0, least=0)
    nodes: int = setting(10, least=4, most=200)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most_depth < self.depth:
            needed = 2 * (self.depth + 1 + self.dead_ends)
            raise FieldError(self, "nodes", f"{self.depth} hops and {self.dead_ends} dead ends need {needed}: raise "
                             "it, or lower config.data.graph.depth or dead_ends")  # fmt: skip

    @property
    def most_depth(self) -> int:
        """Of `graph:DEPTH`: as many hops as there are nodes for."""
        return self.nodes // 2 - 1 - self.dead_ends


def _make(config: GraphConfig, depth: int, rng: np.random.Generator) -> tuple[Problem, str]:
    names = [f"n{number}" for number in rng.permutation(config.nodes)[: 2 * (depth + 1 + config.dead_ends)]]
    chains, spare = (names[: depth + 1], names[depth + 1 : 2 * depth + 2]), names[2 * depth + 2 :]
    edges = [pair for chain in chains for pair in pairwise(chain)]
    for chain in chains:
        inner = chain[:-1]
        for draw in rng.random(config.dead_ends):
            edges.append((inner[int(draw * len(inner))], spare.pop()))
            inner.append(edges[-1][1])  # a dead end may be several edges long
    ends = sorted(chain[-1] for chain in chains)
    told = [f"{edges[place][0]}>{edges[place][1]}" for place in rng.permutation(len(edges))]
    first, second = ends if rng.random() < 0.5 else ends[::-1]
    begin, *steps = chains[0]
    question = f"{' '.join(told)} ends {first} {second} from {begin}"
    return Problem(question, tuple(steps), steps[-1]), " ".join([*sorted(told), *ends, begin])


def graph_words(nodes: int) -> tuple[str, ...]:
    """Every word of problems with so many nodes: an edge is one."""
    names = [f"n{number}" for number in range(GraphConfig(depth=1, nodes=nodes).nodes)]
    return ("ends", "from", *names, *(f"{one}>{other}" for one in names for other in names if one != other))


graph_problems = sets_apart("graph", _make, "nodes")
