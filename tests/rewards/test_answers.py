"""The host parser against hand-derived verdicts and exact fractions."""

import re
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from read_answers import COMPLETIONS, LAST_NUMBERS, ended_text, is_correct
from slpo_jax.rewards.answers import canonical_number, parse_completion

CANONICAL = {
    "72": "72",
    " 72\n": "72",
    "072": "72",
    "72.0": "72",
    "72.": "72",
    "+72": "72",
    "-72.50": "-72.5",
    "-0": "0",
    "-0.000": "0",
    "000": "0",
    ".5": "0.5",
    "-.5": "-0.5",
    "1,450,000": "1450000",
    "1,450.250": "1450.25",
    "1E5": "100000",
    "$15.00": "15",
    "-€3": "-3",
    "1.5e1": "15",
    "1.25e1": "12.5",
    "12e-1": "1.2",
    "2.01e-06": "0.00000201",
    "-2.01E+2": "-201",
    "0e7": "0",
    "5e-324": "0." + "0" * 323 + "5",
    "3244047.0999999996": "3244047.0999999996",
    "3244047.1": "3244047.1",
    "9" * 6000: "9" * 6000,
}


@pytest.mark.parametrize("text", CANONICAL)
def test_canonical_number_by_hand(text):
    assert canonical_number(text) == CANONICAL[text]


NO_NUMBERS = ["", " ", ".", "-", "+", "e5", "1e", "1e1.5", "--1", "1,45", "1234,567", "1,2345", ",123", "72$", "72%",
              "7 2", "1.2.3", "nan", "inf", "0x10", "1_000", "٧٢", "−72", "72\u00a0", "72\x1f",
              "1e999999999", "1e-1001", "0e1001", "1e" + "9" * 5000, "1e-0001001"]  # fmt: skip


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_what_is_no_number_and_what_has_an_absurd_exponent_is_none(text):
    assert canonical_number(text) is None


_digits = st.text("0123456789", max_size=40)
_references = st.builds(
    lambda sign, whole, fraction, exponent: f"{sign}{whole}{fraction}{exponent}",
    st.sampled_from(["", "-", "+"]),
    st.text("0123456789", min_size=1, max_size=40),
    st.one_of(st.just(""), _digits.map(".{}".format)),
    st.one_of(st.just(""), st.integers(-50, 50).map("e{}".format)),
)


@given(_references, _references)
def test_canonical_number_is_exact_and_unique(left, right):
    canonical = canonical_number(left)
    assert Fraction(canonical) == Fraction(left)
    assert re.fullmatch(r"0|-?(0|[1-9][0-9]*)(\.[0-9]*[1-9])?", canonical)
    assert canonical != "-0"
    assert canonical_number(canonical) == canonical
    assert (canonical == canonical_number(right)) == (Fraction(left) == Fraction(right))


@pytest.mark.parametrize("text", COMPLETIONS)
def test_parse_completion_by_hand(text):
    assert (
        parse_completion(text, "after_mark"),
        parse_completion(text, "last_number"),
    ) == COMPLETIONS[text]


@pytest.mark.parametrize("text", LAST_NUMBERS)
def test_signs_are_read_and_nothing_is_half_read(text):
    assert (
        parse_completion(text, "last_number"),
        parse_completion(text, "after_mark"),
    ) == (LAST_NUMBERS[text], None)
    number = LAST_NUMBERS[text]
    assert is_correct(text, "3", "last_number") is (number == "3")


def test_long_texts_are_read_in_linear_time():
    begun = time.thread_time()
    for texture in (
        "-",
        "- ",
        "-*",
        "(",
        "^",
        "$ ",
        " ",
        ".",
        ",",
        "5-",
        "1,",
        "a*",
        ")$",
        "½^",
    ):
        parse_completion(texture * 30_000 + ",5", "last_number")
        parse_completion("5" + texture * 30_000 + "5", "last_number")
    assert time.thread_time() - begun < 3


@pytest.mark.parametrize("style", ["after_mark", "last_number"])
def test_is_correct_compares_decimals_not_texts_or_floats(style):
    assert is_correct("# 0072.00", "72", style)
    assert not is_correct("# 72.01", "72", style)
    assert not is_correct("# -72", "72", style)
    assert float("3244047.09999999961") == float("3244047.0999999996")
    assert not is_correct("# 3244047.09999999961", "3244047.0999999996", style)
    assert not is_correct("# 3244047.0999999996", "3244047.1", style)
    assert not is_correct("#", "0", style)
    assert not is_correct(None, "72", style)


@given(
    st.text("0123456789", min_size=1, max_size=60),
    _digits,
    st.booleans(),
    st.integers(0, 3),
)
def test_parse_completion_keeps_the_value(whole, fraction, negative, zeros):
    text = "-" * negative + whole + (f".{fraction}" if fraction else "")
    grouped = (
        "-" * negative
        + f"{int(whole):,}"
        + (f".{fraction}{'0' * zeros}" if fraction else "")
    )
    for written in (text, grouped):
        for style in ("after_mark", "last_number"):
            answer = parse_completion(f"so # {written}", style)
            assert Fraction(answer) == Fraction(text)
            assert answer == canonical_number(written)


def test_a_completion_stops_at_the_first_eos():
    token_bytes = [b"7", b"2", b"ignored", "é".encode()[:1], b""]
    assert ended_text([0, 4, 1, 2, 0, 2], token_bytes, 2) == "72"
    assert ended_text([2], token_bytes, 2) == ""
    assert ended_text([0, 3, 1, 2], token_bytes, 2) == "7\ufffd2"
    assert ended_text([-1, 0, 99, 2], token_bytes, 2) == "7"
    assert ended_text([0, 1], token_bytes, 2) is None
