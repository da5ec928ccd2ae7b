"""Answers that are texts or letters: what is read and what is the same, by hand and on the device as on the host."""

import jax
import numpy as np
import pytest

from on_device import encode_references, reference_width, verify
from read_answers import ended_text, is_correct
from slpo_jax.rewards.answers import parse_completion
from slpo_jax.rewards.verifier import ON_DEVICE

# (completion, what is read, whether it is "Tom is a lempus.")
READ = [
    ("Every a is b.\n### Tom is a lempus.", "Tom is a lempus", True),
    ("### no\n###  tom is\n a  LEMPUS . ", "tom is a LEMPUS", True),
    ("The answer is: Tom is a lempus", "Tom is a lempus", True),
    ("Answer:Tom is a lempus", "Tom is a lempus", True),
    ("Tom is a lempus", "Tom is a lempus", True),
    ("**Answer:** Tom is a lempus", "Tom is a lempus", True),
    ("### Tom is a lempus. .", "Tom is a lempus", True),
    ("### Tomis a lempus", "Tomis a lempus", False),
    ("### Tom is a lempus. The answer is: no", "no", False),
    ("Tom is a lempus ### ", None, False),
    ("### .", None, False),
    ("Answer: **Tom is a lempus**", "Tom is a lempus", True),
    ("**Answer**: *Tom is a  lempus*.", "Tom is a lempus", True),
    ("Answer:** `Tom is a lempus.`", "Tom is a lempus", True),
    ("### **", None, False),
    ("### Tom is a lempusé", "Tom is a lempusé", False),
    ("The answer is Tom is a lempus.", "Tom is a lempus", True),
    ("The answer\nis\n**Tom is a lempus**.", "Tom is a lempus", True),
    ("The answer is", None, False),
    ("The answer isTom is a lempus", "The answer isTom is a lempus", False),
    ("So <answer> Tom is a lempus. </answer> I think", "Tom is a lempus", True),
    ("<Answer>The answer is Tom is a lempus</Answer>.", "Tom is a lempus", True),
    ("<answer>no</answer> <answer>Tom is a lempus", "Tom is a lempus", True),
    ("Tom is a lempus</answer>, no", "Tom is a lempus", True),
    ("<think>It is no.</think>\nTom is a lempus", "Tom is a lempus", True),
    (r"so $\boxed{Tom is a lempus}$, done", "Tom is a lempus", True),
    (r"The answer is \boxed{\text{Tom is a lempus.}}.", "Tom is a lempus", True),
    (r"<answer>\boxed{Tom is a lempus</answer>}", "Tom is a lempus", True),
    (r"\boxed{no} \boxed{\{{Tom} is\}} a lempus", r"\{{Tom} is\}", False),
    (r"\boxed{Tom is a lempus", "Tom is a lempus", True),
    (r"\boxed{}", None, False),
    (r"Tom } is { a lempus", "Tom } is { a lempus", False),
]


@pytest.mark.parametrize(("text", "answer", "right"), READ)
def test_the_text_after_the_last_mark_is_compared_word_by_word(text, answer, right):
    assert parse_completion(text, "texts") == answer
    assert is_correct(text, "Tom is a lempus.", "texts") is right
    assert not is_correct(None, "Tom is a lempus.", "texts")


# Completion, and the choice that is read.
CHOICES = [
    ("B", "B"), ("(B)", "B"), ("B.", "B"), ("Answer: B", "B"), ("**B**", "B"), ("A or B? C", "C"), ("#### J", "J"),
    ("A. It can't be B, so DAD", "B"), ("A's", None), ("I'm K", "K"), ("b", None), ("AB", None), ("B2 _A", None),
    ("\u7b54\u6848\u9009B\u3002", "B"), ("B\0", "B"), ("B\0A", None), ("", None),
    ("The answer is C because I computed", "C"), ("I don't know", None), ("I don\u2019t know. I\u2019m lost", None),
    ("The answer is A because A and B differ, not C.", "A"), ("The correct answer is option (B), as C is not.", "B"),
    ("Answer: B\nA. cat, C. dog", "B"), ("**Answer**: **B** (not A)", "B"), ("Answer = B. And C", "B"),
    ("The answer is A. No: the answer is B, for C", "B"), ("Answer: B. I am sure the answer is right.", "B"),
    ("C. A cat. I think", "C"), ("A is right", "A"), ("I AND you", "I"), ("A Tale", None), ("A B", "B"),
    ("answer island A, B", "B"), ("The answers are A, B", "B"), ("The answer is  B,\tA", "B"), ("A", "A"), ("(I)", "I"),
    ("Answer: N", "N"), ("A or Z", "Z"), (r"so \boxed{M}", "M"), ("<answer>Q</answer>", "Q"),
    ("A. Tale", "A"), ("Answer: I don't know", None), ("Answer :B A", "B"), ("answer is", None), ("A\u2019s", None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "letter"), CHOICES)
def test_the_last_letter_that_stands_alone_is_the_choice(text, letter):
    assert parse_completion(text, "choice") == letter
    for reference in ("B", "(B)", " B. ", "B: a cat", "b", "AB", ""):
        assert is_correct(text, reference, "choice") is (letter == "B" and reference.strip() in ("B", "(B)", "B."))


TEXT_PIECES = [b"", b" ", b"\n", b"#", b"# ", b"###", b"a", b"A", b"b.", b".", b" a  \tb ", b"answer", b" is", b":",
               b"Answer:", b"\0", b"**", b" **", b"`", "é".encode(), "é".encode()[:1], "é".encode()[1:],
               b"C#", b"<answer>", b"</answer>", b"</ans", b"wer>", b"</think>", b"\\boxed{", b"\\boxed{\\text{",
               b"\\text{", b"{", b"}", b"}", b"\\"]  # fmt: skip
CHOICE_PIECES = [b"", b" ", b"A", b"A", b"B", b"B", b"B.", b"(", b")", b" C", b"AB", b"A B", b"J K", b"'", b"_", b"7",
                 b"a", b"\0", "é".encode()[:1], b"cat ", b" dog", b" ", b"  ", b"Answer", b"answer", b" is", b" is ",
                 b":", b" =", b"**", b"I", b" I", b" A ", b"A Tale", b"because", b"I or ", b"Answer: ", b" answer is ",
                 b"\xe2\x80", b"\x99", b"\xe2", b"\x80\x99", "\u2019".encode(), b"xxxxxxxxxxxxxxxanswer",
                 b" becausebecausebecause", b"\n\t", b"..."]  # fmt: skip
ROWS = [[4, 6, 0] + [6] * 9, [6, 2, 10] + [0] * 9, [11, 12, 13, 6, 10, 0] + [0] * 6]


@pytest.mark.parametrize(
    ("style", "pieces", "others"),
    [
        ("texts", TEXT_PIECES, ["a", "a a b", "A a B.", "é", "C#", ".", "b", ""]),
        ("choice", CHOICE_PIECES, ["A", "(B)", "B.", "C", "K", "A B", "a", ""]),
    ],
)
def test_the_device_says_what_the_host_says(style, pieces, others):
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, len(pieces) + 1, (4000, 12))  # the last is beyond the vocabulary
    tokens[:, -1] = rng.integers(0, 2, 4000)  # and some don't end
    tokens[np.arange(4000), rng.integers(2, 12, 4000)] = 0
    tokens = np.concatenate([tokens, ROWS])
    completions = [ended_text(row.tolist(), pieces, 0) for row in tokens]
    said = [text and parse_completion(text, style) for text in completions]
    # U+FFFD is how the host shows bytes that are no text, and no reference has any.
    usable = [answer if answer and "\ufffd" not in answer else "" for answer in said]
    references = [answer if answer and n % 2 else others[n % len(others)] for n, answer in enumerate(usable)]
    expected = [is_correct(text, reference, style) for text, reference in zip(completions, references, strict=True)]
    encoded = encode_references(references, reference_width(references, style), style)
    found = jax.jit(verify, static_argnames="style")(ON_DEVICE[style][0](pieces), tokens, encoded, 0, style)
    assert found.tolist() == expected
    assert 500 < sum(expected) < 3500
