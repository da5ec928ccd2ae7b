"""The tasks of which problems are generated. A new one is a file here and a line in `GENERATED`.

`NAME:SET` is a source of its problems, `config.data.NAME` says what they are like, and `NAME:NUMBER` is a tokenizer of
its words.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from slpo_jax.data import synthetic
from slpo_jax.data.chain import ChainConfig, chain_problems, chain_words
from slpo_jax.data.countdown import CountdownConfig, countdown_problems, countdown_words
from slpo_jax.data.depths import Generated
from slpo_jax.data.graph import GraphConfig, graph_problems, graph_words
from slpo_jax.data.gym import is_gym
from slpo_jax.data.synthetic import SyntheticConfig, synthetic_problems
from slpo_jax.rewards.countdown_verifier import COUNTDOWN
from slpo_jax.rewards.gym_tasks import GYM
from slpo_jax.rewards.reward import CORRECT


class Task(NamedTuple):
    """A task of which problems are generated.

    Attributes:
        settings: dataclass of the section `config.data.NAME`.
        problems: (name of a set, settings) -> `Generated`.
        words: (the number in `config.tokenizer`: the largest one, the modulus, or that of nodes) -> the words of its
            questions, steps and answers.
        reward: what judges its answers unless another is named, see `config.reward`.
    """

    settings: Any
    problems: Callable[[str, Any], Generated]
    words: Callable[[int], Iterable[str]]
    reward: str = CORRECT


GENERATED: dict[str, Task] = {
    "synthetic": Task(SyntheticConfig, lambda *asked: (synthetic_problems(*asked), ""), synthetic.words),
    "chain": Task(ChainConfig, chain_problems, chain_words),
    "graph": Task(GraphConfig, graph_problems, graph_words),
    "countdown": Task(CountdownConfig, countdown_problems, countdown_words, COUNTDOWN),
}


def task_of(source: Any) -> str:
    """The task of a source (or a tokenizer) "NAME:..", "" where it is none's."""
    name, colon, _ = source.partition(":") if isinstance(source, str) else ("", "", "")
    return name if colon and name in GENERATED else ""


def task_reward(source: Any) -> str:
    """The reward of a source's problems where no other is named (`config.reward`)."""
    if is_gym(source):
        return GYM
    return GENERATED[task].reward if (task := task_of(source)) else CORRECT
