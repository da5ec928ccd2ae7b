"""Stop strings: the tables by which a device finds them in tokens, and the same on the host in words.

Texts are matched by their bytes: a stop string may begin and end inside tokens, and span many.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from slpo_jax.errors import UserError
from slpo_jax.rewards.ending import NO_STOP, StopStrings


def stop_strings(stop: Sequence[str], token_bytes: Sequence[bytes]) -> tuple[StopStrings, list[bytes]]:
    """Build the automaton that finds stop strings.

    Args:
        stop: the texts, each of at least one character.
        token_bytes: the bytes of each of the V token ids; the last is b"" where -1 stands for no token.
    Returns:
        it, and the bytes of the ids V, V + 1, .. that it writes for tokens that are cut.
    Raises:
        UserError: no tokens of this vocabulary write one of the texts.
    """
    texts, lengths = [text.encode() for text in stop], np.array(list(map(len, token_bytes)), np.int32)
    bytes_VL = np.zeros((len(token_bytes), max(1, lengths.max())), np.uint8)
    for index, piece in enumerate(token_bytes):
        bytes_VL[index, : len(piece)] = np.frombuffer(piece, np.uint8)
    for text in texts:
        if not _is_reached(*_over_tokens([text], bytes_VL, lengths)):
            raise UserError(
                f"{text.decode()!r} is never written by the tokenizer's tokens (special ones write nothing); leave it "
                "out, or write it as the tokenizer does"
            )
    after_SV, begins_SV = _over_tokens(texts, bytes_VL, lengths)
    # Most tokens are alike: they hold no part of a stop string.
    columns, classes_V = np.unique(np.concatenate([after_SV, begins_SV]), axis=1, return_inverse=True)
    after_SC, begins_SC = np.split(columns, 2)
    cuts = [(index, kept) for index, piece in enumerate(token_bytes) for kept in _cuts(piece, texts)]
    width = bytes_VL.shape[1] + 1
    at = np.array([index * width + kept for index, kept in cuts], np.int32)
    stops = StopStrings(classes_V.reshape(-1).astype(np.int32), after_SC, begins_SC, lengths, at, width)
    return stops, [token_bytes[index][:kept] for index, kept in cuts]


def _cuts(piece: bytes, texts: list[bytes]) -> list[int]:
    """The bytes before each place inside a token where a text, or as much of it as there is room for, begins."""
    return [kept for kept in range(1, len(piece))
            if any(piece[kept : kept + len(text)] == text[: len(piece) - kept] for text in texts)]  # fmt: skip


def _over_bytes(texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """The automaton of Aho and Corasick (1975), states in the order of their lengths.

    Returns:
        the next state [S, 256], and the length of the longest text that a state ends with [S].
    """
    prefixes = sorted({text[:length] for text in texts for length in range(len(text) + 1)}, key=len)
    number = {prefix: index for index, prefix in enumerate(prefixes)}

    def longest_known(seen: bytes) -> int:
        return next(number[seen[first:]] for first in range(len(seen) + 1) if seen[first:] in number)

    next_S256 = np.zeros((len(prefixes), 256), np.int16)
    for prefix, byte in itertools.product(prefixes, sorted(set(b"".join(texts)))):
        next_S256[number[prefix], byte] = longest_known(prefix + bytes([byte]))
    ends = [max((len(text) for text in texts if prefix.endswith(text)), default=0) for prefix in prefixes]
    return next_S256, np.array(ends)


def _over_tokens(texts: list[bytes], bytes_VL: np.ndarray, lengths_V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`after_SC` and `begins_SC` of `ending.StopStrings` before tokens are put into classes, [S, V]."""
    next_S256, ends_S = _over_bytes(texts)
    unfinished = np.flatnonzero(ends_S == 0)
    states = np.repeat(unfinished[:, None], len(lengths_V), axis=1)
    begins = np.full(states.shape, NO_STOP, np.int16)
    for place in range(bytes_VL.shape[1]):
        there = np.flatnonzero(lengths_V > place)
        states[:, there] = next_S256[states[:, there], bytes_VL[there, place]]
        ends = ends_S[states[:, there]]
        begins[:, there] = np.minimum(begins[:, there], np.where(ends > 0, place + 1 - ends, NO_STOP))
    after = np.where(begins == NO_STOP, np.searchsorted(unfinished, states), 0)
    return after.astype(np.int16), begins


def _is_reached(after_SV: np.ndarray, begins_SV: np.ndarray) -> bool:
    """Whether some tokens complete a text."""
    reached, new = {0}, [0]
    while new:
        state = new.pop()
        if (begins_SV[state] != NO_STOP).any():
            return True
        found = set(np.unique(after_SV[state]).tolist()) - reached
        reached |= found
        new += found
    return False
