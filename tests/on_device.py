"""Answers of a style judged inside jit: references of texts alone, without problems."""

import numpy as np

from slpo_jax.rewards.answers import STYLES
from slpo_jax.rewards.verifier import ON_DEVICE, judge_completions, padded_table


def verify(table_VL, tokens_BA, references_BR, eos_id, style):
    """bool [B]: which completions give their reference."""
    _, reads = ON_DEVICE[style]
    return judge_completions(table_VL, tokens_BA, references_BR, eos_id, reads)


def reference_width(references, style="after_mark") -> int:
    """Bytes of the longest, 1 at least."""
    compared = STYLES[style].compared
    return max((len(compared(each)) for each in references), default=1)


def encode_references(references, width: int, style="after_mark") -> np.ndarray:
    """uint8 [B, width]."""
    compared = STYLES[style].compared
    return padded_table([compared(each) for each in references], width)
