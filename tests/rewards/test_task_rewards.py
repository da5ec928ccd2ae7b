"""Countdown's verifier: by hand, against Python's own evaluation, and the device's against the host's."""

import itertools
import random
import re
from fractions import Fraction

import jax
import numpy as np
import pytest

from slpo_jax.rewards.task_rewards import countdown, encode_countdown, reaches_goal
from slpo_jax.rewards.verifier import completed_text, padded_table, text_table

EOS = 256
BYTES = [*(bytes([value]) for value in range(256)), b""]
BIG = 999_999_999

# Numbers, goal, completion, whether it is right; with all operations
BY_HAND = [
    ([3, 4, 6], 42, "3 + 4 * 6", 1), ([3, 4, 6], 42, "### 3 + 4 * 6", 1), ([3, 4, 6], 42, "3+4*6", 1),
    ([3, 4, 6], 42, " \n4  +3\t*6 . ", 1), ([3, 4, 6], 42, "The answer is: 4 + 3 * 6.", 1),
    ([3, 4, 6], 42, "7 # 4 + 3 * 6", 1), ([3, 4, 6], 42, "4 + 3 * 6 # 7", 0), ([3, 4, 6], 42, "4 + 3 * 6 #", 0),
    # From left to right.
    ([3, 4, 6], 27, "3 + 4 * 6", 0), ([3, 4, 6], 27, "4 * 6 + 3", 1),
    ([3, 4, 6], 42, "03 + 4 * 6", 0), ([3, 4, 6], 42, "+3 + 4 * 6", 0), ([3, 4, 6], 42, "3 + + 4 * 6", 0),
    ([3, 4, 6], 42, "3 + 4 * 6 =", 0), ([3, 4, 6], 42, "3 + 4 * 6 = 42", 0), ([3, 4, 6], 42, "(3 + 4) * 6", 0),
    ([3, 4, 6], 42, "6 * 7", 0), ([3, 4, 6], 42, "3 + 4 * 6 + 0", 0), ([3, 4, 6, 0], 42, "3 + 4 * 6 + 0", 1),
    ([3, 4, 6], 42, "3 + 3 + 6 * 4", 0), ([4, 4, 2], 6, "4 + 4 - 2", 1), ([4, 2, 2], 6, "4 + 4 - 2", 0),
    ([3, 4, 6], 42, "3 +4 * 6 7", 0), ([3, 46], 49, "3 + 4 6", 0), ([3, 46], 49, "3 + 46", 1), ([5], 5, "5", 1),
    ([5], 5, "-5", 0), ([5], -5, "-5", 0), ([5], 5, "", 0), ([], 0, "", 0), ([], 0, "0", 0), ([0], 0, "0", 1),
    ([0], 0, "00", 0), ([3, 9, 2], 4, "3 - 9 + 2", 0), ([3, 9, 2], -4, "3 - 9 + 2", 1), ([3, 9], -6, "3-9", 1),
    ([6, 4, 2], 1, "6 / 4 / 2", 0), ([6, 3], 2, "6 / 3", 1), ([6, 0], 6, "6 / 0", 0), ([0, 6], 0, "0/6", 1),
    ([3, 9, 2], -3, "3 - 9 / 2", 1), ([BIG, BIG], 0, f"{BIG} - {BIG}", 1), ([BIG, 1], 10**9, f"{BIG} + 1", 1),
    ([BIG, 2, 1], 10**9, f"{BIG} + 2 - 1", 0), ([BIG, BIG, BIG], BIG, f"{BIG} * {BIG} / {BIG}", 0),
    ([40_000, 50_000, 50_000], 40_000, "40000 * 50000 / 50000", 0), ([65536, 65536, 0], 0, "65536 * 65536 * 0", 0),
    ([10**9, 1], 10**9, "1000000000 * 1", 0), ([4294967299, 4], 7, "4294967299 + 4", 0),
    ([3, 4], 7, "3 \u2212 4", 0), ([3, 4], 7, "3\u00a0+ 4", 0), ([3, 4], 7, "3 +\0 4", 1), ([3, 4], 7, "\x003 + 4", 1),
    ([3, 4], 7, "３ + 4", 0), ([3, 4], 7, "3 + 4 #x", 0), ([3, 4], 7, "answer:** 3 + 4", 1), ([3, 4], 7, "3 . + 4", 0),
]  # fmt: skip


def on_device(cases, slots, operations):
    """Verdicts on completions that are given byte by byte and followed by eos, padding first."""
    encoded = []
    for (numbers, goal, *_), given in zip(cases, operations, strict=True):
        encoded.append(encode_countdown(numbers, goal, *given))
    references = padded_table([b"", *encoded], max(4, *map(len, encoded)))
    tokens = np.full((len(cases) + 1, slots), EOS, np.int32)
    for row, case in zip(tokens[1:], cases, strict=True):
        text = case[2].encode(errors="replace")
        row[: len(text)] = [*text]

    def judge(tokens_A, reference_R):
        bytes_N, _ = completed_text(text_table(BYTES), tokens_A, EOS)
        return reaches_goal(bytes_N, reference_R)

    padding, *found = jax.jit(jax.vmap(judge))(tokens, references).tolist()
    assert not padding
    return found


def test_verdicts_by_hand_on_the_host_and_on_the_device():
    expected = [bool(right) for *_, right in BY_HAND]
    assert [countdown(*case[:3]) == 1.0 for case in BY_HAND] == expected
    assert on_device(BY_HAND, 40, [()] * len(BY_HAND)) == expected


def test_only_allowed_operations_count():
    answers = {
        "6 + 3 + 2": 11,
        "6 - 3 - 2": 1,
        "6 * 3 * 2": 36,
        "6 / 3 / 2": 1,
        "6 - 3 * 2": 6,
    }
    subsets = []
    for size in range(5):
        subsets += itertools.combinations("+-*/", size)

    cases = []
    operations = []
    expected = []
    for text, goal in answers.items():
        used = set(text) & set("+-*/")
        for allowed in subsets:
            cases.append(([6, 3, 2], goal, text))
            operations.append(("".join(allowed),))
            expected.append(used <= set(allowed))

    on_host = []
    for case, given in zip(cases, operations, strict=True):
        on_host.append(countdown(*case, *given) == 1.0)
    assert on_host == expected
    assert on_device(cases, 40, operations) == expected


STRANGE = [
    "+", "-", "*", "/", "=", "(", ")", "#", "# ", "### ", ".", ",", "x", "\n", "\0", "\t ", "é", "0", "00", "1",
    str(BIG), "4294967296", "", "answer:",
]  # fmt: skip
NUMBER = r"(?:0|[1-9]\d{0,8})"
WELL_FORMED = re.compile(rf"{NUMBER}( ?[-+*/] ?{NUMBER})*", re.ASCII)


def _completion(rng, numbers):
    """Well formed or nearly: a right order of signs and numbers, of which some are changed."""
    texts = [str(number) for number in rng.sample(numbers, len(numbers))]
    signs = [rng.choice("+-*/") for _ in texts]
    parts = []
    for text, sign in zip(texts, signs, strict=True):
        parts += [text, sign]
    parts.pop()
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        place = rng.randrange(len(parts))
        end = place + rng.randrange(2)
        with_zero = "0" + rng.choice(texts)
        with_minus = "-" + rng.choice(texts)
        changed = rng.choice([*STRANGE, *texts, with_zero, with_minus])
        parts[place:end] = [changed]
    before = rng.choice(["", "", "### ", "The answer is: ", "1 # ", "#"])
    return before + rng.choice(["", " "]).join(parts)


@pytest.mark.slow
def test_10_000_completions_have_the_same_verdict_on_host_and_device():
    """And, of those that are well formed, the one that Python's own evaluation of brackets gives."""
    rng = random.Random(0)
    cases = []
    operations = []
    for place in range(10_000):
        most = rng.choice([3, 13, 999, 99_999, BIG])
        numbers = [rng.randint(0, most) for _ in range(rng.randint(1, 6))]
        text = _completion(rng, numbers)
        if place % 5 == 0:
            signs = "0123456789+-*/ .#\n"
            text = "".join(rng.choice(signs) for _ in range(rng.randrange(12)))
            written = re.findall("[0-9]+", text)
            numbers = [int(each[:10]) for each in written] or numbers
        allowed = rng.choice(["+-*/", "+-*", "+-"])
        plain = re.sub(r".*# |.*: ", "", text, flags=re.DOTALL)
        value = None
        if WELL_FORMED.fullmatch(plain):
            value = _evaluated(plain)
            used = sorted(map(int, re.findall(r"\d+", plain)))
            signs = {*re.sub(r"[0-9 ]", "", plain)}
            right = value is not None and used == sorted(numbers)
            right &= signs <= {*allowed}
            goal = 0 if value is None else value
            assert countdown(numbers, goal, text, allowed) == right
        if value is None or rng.random() < 0.1:
            value = rng.randint(-9, 99)
        cases.append((numbers, value, text))
        operations.append((allowed,))
    expected = []
    for case, given in zip(cases, operations, strict=True):
        expected.append(countdown(*case, *given) == 1.0)
    assert 1500 < sum(expected) < 8500
    assert on_device(cases, 96, operations) == expected


def _evaluated(text):
    """By fractions; None where a step isn't whole or goes too far."""
    parts = re.findall(r"\d+|[-+*/]", text)
    value = Fraction(parts[0])
    for sign, number in zip(parts[1::2], parts[2::2], strict=True):
        if sign == "/" and number == "0":
            return None
        value = eval("value" + sign + "Fraction(number)")
        if value.denominator > 1 or abs(value) > 10**9:
            return None
    return int(value)


@pytest.mark.parametrize("numbers", [[10**9], [-1], [3, 2**40]])
def test_what_cannot_be_written_is_reached_by_nothing(numbers):
    assert encode_countdown(numbers, 3) == b""
    assert countdown(numbers, numbers[0], str(numbers[0])) == 0.0
