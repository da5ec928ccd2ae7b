"""SLPO in JAX: reinforcement learning with verifiable rewards for latent reasoners.

An array's name ends with its axes, one letter each, and docstrings give shapes in the same letters:

    B   prompts of a batch; rows of any batch         S   slots of one row in which several sequences lie end to end,
    G   rollouts a prompt; in attention, groups           or of a cache
        of key-value heads                            L   positions of one sequence
    N   rollouts, B * G; rows of any rollout          X   slots of one sequence that may be packed;
    K   noisy passes of the surrogate; tokens shown       M = G * X those of a row's sequences
        of a vocabulary                               V   vocabulary
    C   candidate lengths of a thought                D   width of the hidden states; of one head, Dh
    P   prompt slots                                  H   heads; in a schedule, shards
    T   latent slots                                  E   rollouts a row of a schedule's batch
    A   answer slots                                  R   rows a shard; bytes of an encoded reference
    M   levels of hidden states (embedding, blocks);  I   items of a schedule
        samples of an evaluation's seed

A sequence has the slots `[ prompt, left-padded: P | latents: T | end marker + answer: A ]`. A digit is an axis of that
size (`hidden_N1D`).
"""

import os
from typing import Any

# transformers is here for tokenizers and configs alone, and need not advise on installing PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def __getattr__(name: str) -> Any:
    """`register_objective` and its like, of `slpo_jax.registration`: nothing is imported before it is used."""
    if not name.startswith("register_"):
        raise AttributeError(f"module 'slpo_jax' has no attribute {name!r}")
    from slpo_jax import registration

    return getattr(registration, name)
