"""SLPO in JAX: reinforcement learning with verifiable rewards for latent reasoners.

    import slpo_jax as slpo

    print(slpo.read("my_problems.csv"))     # how a file is understood
    run = slpo.train("quickstart")          # what `slpo train` does
    r = slpo.load("runs/quickstart")        # a reasoner with its own T, stopping rule and threshold
    print(r.solve("7 * 3 + 9 * 7 + 2", samples=16))
    e = r.evaluate("my_test.jsonl")         # e.summary, e.records, e.to_pandas(), e.plot(), e.compare(other)
    r.export("exported")                    # for transformers

`register_objective` and its like (reward, recipe, scorer, latent policy, tracker) have a config take methods of your
own.

An array's name ends with its axes, one letter each, and docstrings give shapes in the same letters:

    B   prompts of a batch; rows of any batch         S   slots of one row in which several sequences lie end to end,
    G   rollouts a prompt; in attention, groups           or of a cache
        of key-value heads                            L   positions of one sequence
    N   rollouts, B * G; rows of any rollout          X   slots of one sequence that may be packed;
    K   noisy passes of the surrogate; tokens shown       M = G * X those of a row's sequences
        of a vocabulary                               V   vocabulary
    C   candidate lengths of a thought                D   width of the hidden states; of one head, Dh
    P   prompt slots                                  H   heads; shards of an evaluation
    T   latent slots                                  E   rollouts a row of such a shard
    A   answer slots                                  R   rows a shard; bytes of an encoded reference
    M   levels of hidden states (embedding, blocks);  I   items of an evaluation
        samples of an evaluation's seed

A sequence has the slots `[ prompt, left-padded: P | latents: T | end marker + answer: A ]`. A digit is an axis of that
size (`hidden_N1D`).
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from slpo_jax.version import __version__ as __version__

if TYPE_CHECKING:  # of what `__getattr__` finds
    from slpo_jax.api.evaluation import Difference, Evaluation
    from slpo_jax.api.solver import Latent, Solution, Vote
    from slpo_jax.api.trained_reasoner import TrainedReasoner, load
    from slpo_jax.api.training import Run, read, train
    from slpo_jax.config.registry import (
        register_latent_policy,
        register_objective,
        register_recipe,
        register_reward,
        register_scorer,
        register_tracker,
    )
    from slpo_jax.errors import UserError

# transformers is here for tokenizers and configs alone, and need not advise on installing PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

_REGISTER = tuple(
    f"register_{what}"
    for what in ("objective", "recipe", "reward", "scorer", "latent_policy", "tracker")
)
_PLACES = {
    "api.evaluation": ("Difference", "Evaluation"),
    "api.trained_reasoner": ("TrainedReasoner", "load"),
    "api.training": ("Run", "read", "train"),
    "errors": ("UserError",),
    "config.registry": _REGISTER,
    "api.solver": ("Latent", "Solution", "Vote"),
}
_PLACE = {name: place for place, names in _PLACES.items() for name in names}

__all__ = [  # noqa: RUF022 - as `_PLACES`
    "Difference", "Evaluation", "read", "TrainedReasoner", "load", "Run", "train", "UserError", "register_objective",
    "register_recipe", "register_reward", "register_scorer", "register_latent_policy", "register_tracker", "Latent",
    "Solution", "Vote",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """What stands in `__all__`: nothing is imported before it is used."""
    if name not in _PLACE:
        raise AttributeError(f"module 'slpo_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"slpo_jax.{_PLACE[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
