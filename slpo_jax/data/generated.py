"""The tasks of which problems are generated. A new one is a file here and a line in `GENERATED`.

`NAME:SET` is a source of its problems, `config.data.NAME` says what they are like, and `NAME:NUMBER` is a tokenizer of
its words.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from slpo_jax.data import synthetic
from slpo_jax.data.chain import ChainConfig, chain_problems, chain_words
from slpo_jax.data.depths import Generated
from slpo_jax.data.graph import GraphConfig, graph_problems, graph_words
from slpo_jax.data.synthetic import SyntheticConfig, synthetic_problems
from slpo_jax.rewards.reward import CORRECT


class Task(NamedTuple):
    """A task of which problems are generated.

    Attributes:
        settings: dataclass of the section `config.data.NAME`.
        problems: (name of a set, settings) -> `Generated`.
        words: (the number in `config.tokenizer`: the largest one, the modulus, or that of nodes) -> the words of its
            questions, steps and answers.
    """

    settings: Any
    problems: Callable[[str, Any], Generated]
    words: Callable[[int], Iterable[str]]


GENERATED: dict[str, Task] = {
    "synthetic": Task(SyntheticConfig, lambda *asked: (synthetic_problems(*asked), ""), synthetic.words),
    "chain": Task(ChainConfig, chain_problems, chain_words),
    "graph": Task(GraphConfig, graph_problems, graph_words),
}


def task_reward(source: Any) -> str:
    """The name in `REWARDS` of what judges a source's answers where nothing else is asked for."""
    return CORRECT


def task_of(source: Any) -> str:
    """The task of a source (or a tokenizer) "NAME:..", "" where it is none's."""
    name, colon, _ = source.partition(":") if isinstance(source, str) else ("", "", "")
    return name if colon and name in GENERATED else ""
