"""Searches of a graph: `n4>n2 n7>n1 n2>n5 n1>n3 ends n3 n5 from n4` asks which of two ends is reached from n4.

Two chains of edges have as many hops, so that neither an end's edges nor its depth say which it is: the edges have to
be followed, a hop a step.
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
        nodes: names that there are, n0, n1, ..; a problem has 2 (hops + 1).
    """

    nodes: int = setting(10, least=4, most=200)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most_depth < self.depth:
            needed = 2 * (self.depth + 1)
            raise FieldError(self, "nodes", f"{self.depth} hops need {needed}: raise it, or lower data.graph.depth")

    @property
    def most_depth(self) -> int:
        """Of `graph:DEPTH`: as many hops as there are nodes for."""
        return self.nodes // 2 - 1


def _make(config: GraphConfig, depth: int, rng: np.random.Generator) -> tuple[Problem, str]:
    names = [f"n{number}" for number in rng.permutation(config.nodes)[: 2 * (depth + 1)]]
    chains = names[: depth + 1], names[depth + 1 :]
    edges = [pair for chain in chains for pair in pairwise(chain)]
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
