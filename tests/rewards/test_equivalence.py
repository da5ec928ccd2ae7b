"""LaTeX answers: a table of pairs decided by hand; what is bad costs little, and what happens to a worker nothing."""

import threading
import time

import pytest

from read_answers import is_correct
from refused import one_line
from slpo_jax.rewards import answers, equivalence
from slpo_jax.rewards.answers import (
    are_readable,
    are_right,
    canonical_number,
    in_one_form,
    last_boxed,
    parse_completion,
)
from slpo_jax.rewards.equivalence import are_equivalent
from slpo_jax.rewards.processes import Limits

# (answer, reference)
RIGHT = [
    (r"\frac{1}{2}", "0.5"), (r"\dfrac12", r"\frac{1}{2}"), ("1/2", r"\tfrac{1}{2}"),
    (r"\frac{-3}{4}", r"-\frac{3}{4}"),
    (r"2\sqrt{3}", r"\sqrt{12}"), (r"\sqrt3", r"\sqrt{3}"), (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
    (r"\left(0,1\right]", "(0,1]"), (r"[0,+\infty)", r"[0,\infty)"),
    (r"(-\infty,2)\cup(3,\infty)", r"(3,\infty)\cup(-\infty,2)"),
    (r"1 \le x \le 2", r"1\leq x\leq 2"), ("[1,2]", r"1 \le x \le 2"),
    ("5", r"5\text{ cm}"), (r"5\text{ cm}", "5"), (r"336^\circ", "336"), ("336", r"336^\circ"), (r"\$18", "18"),
    (r"\text{Evelyn}", "Evelyn"), ("C", r"\text{(C)}"), (r"\text{even}", r"\text{ even}"),
    ("10,000", "10000"), ("10{,}000", "10000"), ("1,450.50", "1450.5"), (r"50\%", "50"), ("0.5", r"50\%"),
    (r"\{2,1\}", r"\{1,2\}"), ("2,1", "1,2"), (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
    ("1024", "2^{10}"), ("(x+1)^2", "x^2+2x+1"), ("q+p", "p+q"), ("-5i+6", "6-5i"), ("11.5", r"11\frac{1}{2}"),
    ("x=5", "5"), ("y = 2x + 3", "y=2x+3"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("27", "27.0"), ("072", "72"), ("-0", "0"), ("+5", "5"), ("2.01e-06", "0.00000201"), ("0.333333", r"\frac{1}{3}"),
    ("1e3", "1000"), ("9" * 400, "9" * 400), ("0.1234568", "0.1234567"), ("5e-1", r"\frac{1}{2}"),
    (r"1\,000", "1000"), ("1 000", "1000"), (r"1\ 000\,000.5", "1000000.5"), ("1{,}000", "1000"), ("1000", r"1\;000"),
    (r"-12~345", "-12345"), (r"1\,000 \text{ km}", "1000"), (r"x = 1\,000", "x=1000"), ("1000.", "1000"),
    ("B.", "B"), (r"\text{B.}", "B"), (r"\textbf{(B)}", "B"), ("(B).", r"\text{(B)}"), (r"\frac12.", r"\frac{1}{2}"),
    ("x.", "x"), ("(1, 2).", "(1,2)"), (r"2516_{8}", "2516_8"), ("2516", "2516_8"), (r"2516_{(8)}.", "2516_8"),
    (r"1AF_{16}", r"1AF_{16}"), ("10_2, 21_3", "21_3, 10_2"),
]  # fmt: skip
WRONG = [
    (r"\frac{1}{2}", r"\frac{2}{3}"), ("-5", "5"), (r"\sqrt{3}", r"\sqrt{2}"), ("[0,1]", "(0,1]"), ("(2,1)", "(1,2)"),
    (r"1 \le x \le 2", "[1,2]"),  # of an interval, an inequality is no answer
    (r"\text{Bob}", r"\text{Evelyn}"), (r"\text{(B)}", "C"), ("(x+2)^2", "x^2+2x+1"), ("3.14", r"\pi"),
    ("1,2,3", "1,2"),
    (r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"), ("27.5", "27"),
    ("y=2x+4", "y=2x+3"),
    ("45", "1,45"), ("0.33", r"\frac{1}{3}"), ("5.5e1", "5"), ("9" * 400, "9" * 399 + "8"), ("12", "21"), ("٧", "7"),
    ("0.12346", "0.12345"), ("", "5"), (r"\frac{1", "1"), (r"\undefined{1}", "1"), ("9" * 600 + ".5", r"\frac{1}{2}"),
    ("2516_7", "2516_8"), (r"2516_{16}", "2516_8"), (r"1A_{16}", r"1A_{12}"), ("2517_8", "2516_8"),
    ("10_2, 21_3", "10_3, 21_4"), ("1 0000", "10000"), (r"1\,000", "1"), ("A.", "B"), (r"\text{(A)}", r"\text{B.}"),
]  # fmt: skip


@pytest.fixture
def fresh(monkeypatch):
    """Workers of the test's own, and nothing known."""
    equivalence._processes.cache_clear()
    monkeypatch.setattr(equivalence, "_known", {})
    yield
    equivalence._processes.cache_clear()


def mistaken(right, wrong):
    """The pairs that are not judged so."""
    found = are_right(*zip(*right, *wrong, strict=True), "boxed")
    return [
        pair for pair, told in zip(right, found[: len(right)], strict=True) if not told
    ] + [pair for pair, told in zip(wrong, found[len(right) :], strict=True) if told]


@pytest.mark.slow
def test_pairs_by_hand():
    assert not mistaken(RIGHT, WRONG)
    assert are_right([None, "1"], ["1", "1"], "boxed") == [False, True]
    assert is_correct(r"so \boxed{ \frac{4}{8} }.", "0.5", "boxed")
    assert not is_correct(r"so \frac{4}{8}.", "0.5", "boxed")
    assert not is_correct(None, "0.5", "boxed")


@pytest.mark.parametrize("style", ["after_mark", "last_number"])
def test_numbers_are_never_a_matter_of_latex(style, monkeypatch):
    """Nor are whole numbers, which all agree on, in a box."""
    monkeypatch.setattr(
        answers, "are_equivalent", lambda pairs: [pytest.fail("asked") for _ in pairs]
    )
    assert are_right(["1", "0.5", None, "1"], ["1", "0.50", "1", "2"], style) == [
        True,
        False,
        False,
        False,
    ]
    wholes = ["1,000", "-7", "1e2", "+3", "007", "12345678901234567890123"]
    decimals = ["1.50", "0.10"]
    for text in [*wholes, *decimals]:
        assert are_right([text], [canonical_number(text)], "boxed") == [True]
    assert (
        are_right(
            wholes, ["1001", "7", "200", "4", "8", "12345678901234567890124"], "boxed"
        )
        == [False] * 6
    )


BOXED = {
    r"\boxed{72}": "72",
    r"$\boxed{ \frac{1}{2} }$, as $\frac{2}{4}$": r"\frac{1}{2}",
    r"\boxed {7}": "7",
    "\\boxed\n{7\n}": "7",
    r"\boxed{1} or \boxed{2}.": "2",
    r"\boxed{\boxed{5}}": "5",
    r"\boxed{\text{a}^{2^{3}}} {}": r"\text{a}^{2^{3}}",
    r"\boxed{\{1,2\}}": r"\{1,2\}",
    r"\boxed{\left\{ x \right.}": r"\left\{ x \right.",
    r"\boxed{1\}": None,
    r"\boxed{1} and \boxed{2": None,
    r"\boxed{}": None,
    r"\boxed{ }": None,
    r"\boxed 5": "5",
    r"so $\boxed 12.5$.": "12.5",
    r"\boxed6, then": "6",
    r"\boxed{5}, no: \fbox{6}": "6",
    r"\boxed": None,
    r"\boxedx{5}": None,
    "72": None,
    "": None,
    "\\boxed{" + "{" * 10_000: None,
    "\\boxed{" + "{" * 10_000 + "}" * 10_001: "{" * 10_000 + "}" * 10_000,
    "\\boxed{" * 10_000: None,
}


@pytest.mark.parametrize("text", BOXED, ids=lambda text: text[:20])
def test_the_last_box_by_hand(text):
    # Of this thread: others may compile.
    begun = time.thread_time()
    assert parse_completion(text, "boxed") == BOXED[text]
    assert last_boxed(text) == (BOXED[text] or "")
    assert time.thread_time() - begun < 0.5


def test_references_that_no_box_can_hold_or_nobody_can_read():
    bad = [
        "",
        " ",
        "5}",
        "}{",
        r"\frac{1",
        "\\",
        "a}b{c",
        "x" * 501,
        r"\boxed{5}",
        r"\frac{\frac{1}{2}}{",
    ]
    good = [
        r"\frac{1}{2}",
        "27.0",
        r"\{1,2\}",
        r"\text{Evelyn}",
        "1e9",
        "9" * 501,
        r"336^\circ",
        r"(-\infty,2)",
    ]
    assert are_readable(bad) == [False] * len(bad)
    assert are_readable(good) == [True] * len(good)


SAME = {
    "5": ["5 km/h", r"5 \Omega", r"5\ \text{km/h}", r"5 \mathrm{N\cdot m}", "5 miles per hour", "5 N", r"5\,\mu m",
          "5 m^{2}"],
    "45": ["45 m^3", "45 cm^2", "45.0 kg m/s^2", "45 square units"], "9.8": ["9.8 m/s^2"], "1000": ["1,000 km/h"],
    "0.5": [r"\frac{1}{2} km/h", "1/2 mph"], "yes": ["Yes.", "YES", r"\text{Yes.}"], "No.": ["no"], "even": ["Even."],
    "5 km/h": [r"5\text{ km/h}", "5"],
}  # fmt: skip
OTHER = {"5": ["6 km/h", "5x/y", "5N", "5n", "5 sin x", "5 abc"], "yes": ["no", "yesno"], "5 km/h": ["5 m/s", "6"],
         "m^3": ["m^2"], "AB": ["AC"]}  # fmt: skip


@pytest.mark.parametrize(("given", "right"), [(SAME, True), (OTHER, False)])
def test_units_are_left_out_and_words_are_read_as_words(given, right):
    pairs = [(text, reference) for reference, texts in given.items() for text in texts]
    told = are_right(
        [text for text, _ in pairs], [reference for _, reference in pairs], "boxed"
    )
    assert [
        pair
        for pair, is_right in zip(pairs, told, strict=True)
        if is_right is not right
    ] == []


def test_answers_in_one_form_are_the_first_of_their_equals():
    given = [
        r"\frac12",
        "3",
        "0.5",
        None,
        "3.0",
        r"\dfrac{1}{2}",
        "}{",
        "(x+1)^2",
        "x^2+2x+1",
        "}{",
    ]
    form = [
        r"\frac12",
        "3",
        r"\frac12",
        None,
        "3",
        r"\frac12",
        "}{",
        "(x+1)^2",
        "(x+1)^2",
        "}{",
    ]
    for known in ((), ("0.5",), ("}{", "7")):
        assert in_one_form(given, "boxed", known) == form
    assert in_one_form(["2", None, "2", "3"], "after_mark", ["3"]) == [
        "2",
        None,
        "2",
        "3",
    ]
    assert in_one_form([], "boxed", ["3"]) == []


@pytest.mark.slow
def test_what_takes_too_long_or_too_much_is_wrong_and_the_next_is_judged(
    fresh, monkeypatch
):
    """Also in a thread, and in C, where no exception ends it."""
    monkeypatch.setattr(equivalence, "_LIMITS", Limits(processor=0.4))
    hard = [r"10^{10^{10}}"]
    told: list[bool] = []
    thread = threading.Thread(
        target=lambda: told.extend(are_equivalent([(text, "5") for text in hard]))
    )
    begun = time.monotonic()
    thread.start()
    thread.join(60)
    assert told == [False]
    assert time.monotonic() - begun < 30
    odd = ["\ud800", "\0", "\n", "５", '"', "\\" * 99, "\u202e5", "0x5", "?!", "{{5}}"]
    assert are_equivalent([(text, "5") for text in odd]) == [
        text == "{{5}}" for text in odd
    ]
    assert are_equivalent([("10/2", "5")]) == [True]


def test_without_the_package_it_is_one_line(fresh, monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('gone')")
    monkeypatch.syspath_prepend(str(tmp_path))
    one_line(
        lambda: are_equivalent([("x", "y")]),
        match=r"ImportError: gone.*slpo_jax\[latex\]",
    )
