"""Stop strings and end tokens in random tokens, on the device and on the host, against a loop over decoded texts."""

import jax.numpy as jnp
import numpy as np
import pytest

from slpo_jax.errors import UserError
from slpo_jax.rewards.answers import read_completion
from slpo_jax.rewards.ending import answer_mask, text_tokens
from slpo_jax.rewards.stopping import stop_strings

# Pieces of texts with many ways to be cut, an "é" in two tokens, and two special tokens.
PIECES = [*b"|a|b|ab|ba|aab|Q|:|Q:|b Q:a".split(b"|"), " é".encode(), b"\xc3", b"\xa9", b"bb", b""]
EOS_IDS = (14, 0)
STOPS = [("Q:",), ("aabab",), ("é", "Q:"), ("ab", "babb"), ("abba", "bb", "b"), ("aa", "aaba:", "\N{SNOWMAN}")]


def _oracle(tokens, stop):
    """Number of tokens up to the end, the text, and whether there is an end."""
    for count in range(1, len(tokens) + 1):
        if tokens[count - 1] in EOS_IDS:
            return count, _decoded(tokens[: count - 1]), True
        text = _decoded(tokens[:count])
        if any(each in text for each in stop):
            return count, text[: min(text.find(each) for each in stop if each in text)], True
    return len(tokens), _decoded(tokens), False


def _decoded(tokens):
    return b"".join(PIECES[token] for token in tokens if token >= 0).decode("utf-8", "replace")


@pytest.mark.parametrize("stop", STOPS[:-1])
def test_the_first_stop_string_or_end_token_ends_an_answer(stop):
    stops, cut_pieces = stop_strings(stop, PIECES)
    rng = np.random.default_rng(0)
    frequency = np.where(np.isin(np.arange(-1, len(PIECES)), EOS_IDS), 0.2, 1.0)
    tokens_NA = rng.choice(np.arange(-1, len(PIECES)), size=(400, 12), p=frequency / frequency.sum())
    mask_NA = np.asarray(answer_mask(jnp.asarray(tokens_NA), EOS_IDS, stops))
    read_NA = np.asarray(text_tokens(jnp.asarray(tokens_NA), EOS_IDS, stops)).tolist()
    ends = []
    for tokens, mask, read in zip(tokens_NA.tolist(), mask_NA, read_NA, strict=True):
        count, text, ended = _oracle(tokens, stop)
        assert mask.tolist() == [place < count for place in range(len(tokens))]
        found = read_completion(tokens, PIECES, EOS_IDS, stop)
        assert (found.tokens, found.written, found.ended) == (count, text, ended)
        # What a verifier makes of the device's tokens, which knows of one end token alone.
        assert read_completion(read, [*PIECES, *cut_pieces], EOS_IDS[:1]).text == (text if ended else None)
        ends.append((ended, ended and tokens[count - 1] in EOS_IDS))
    assert {(True, False), (True, True)} <= set(ends)


def test_padding_that_is_an_end_token_is_not_said_after_a_stop_string():
    stops = stop_strings(["Q:"], PIECES)[0]
    tokens = jnp.array([[1, 6, 7, 14, 14], [1, 14, 14, 14, 14], [1, 1, 1, 1, 6]])
    expected = np.array([[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]], bool)
    np.testing.assert_array_equal(answer_mask(tokens, (14,), stops), expected)
    assert text_tokens(tokens, (14,), stops).tolist() == [
        [1, 14, 14, 14, 14, 14],
        [1, *[14] * 4, -1],
        [1] * 4 + [6, -1],
    ]


def test_a_text_that_no_tokens_write():
    with pytest.raises(UserError, match="'☃' is never written by the tokenizer's tokens"):
        stop_strings(STOPS[-1], PIECES)
    with pytest.raises(UserError, match="'QQ' is never written"):
        stop_strings(["QQ"], [b" Q", b" A", b""])
