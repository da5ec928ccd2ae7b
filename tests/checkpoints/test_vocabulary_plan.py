"""Which rows of an external embedding are the reasoner's tokens, by the sizes of published checkpoints."""

from functools import partial

import pytest

from slpo_jax.architectures import ARCHITECTURES
from slpo_jax.architectures.tensors import Stored
from slpo_jax.checkpoints.checkpoint import vocabulary_plan
from slpo_jax.errors import UserError

GPT2 = 50257
LLAMA = 128256


def _plan(
    architecture,
    rows,
    base=None,
    known=GPT2,
    named=False,
    published=True,
    missing_head="",
):
    embedding = Stored("wte.weight", (rows, 8), partial(pytest.fail, "read"))
    asked = dict(
        base=base,
        tokens=known,
        has_names=named,
        published=published,
        missing_head=missing_head,
    )
    return tuple(
        vocabulary_plan(ARCHITECTURES[architecture], embedding, "here", **asked)
    )


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (("coconut", GPT2 + 3, GPT2), (None, "")),
        (("coconut", GPT2, None, GPT2, False, False), (None, "special tokens")),
        (
            ("coconut", GPT2 + 3, None, GPT2 + 3, True, False),
            (None, ""),
        ),  # a language model with these tokens
        (("coconut", GPT2, None, GPT2), (None, "special tokens")),
        (("codi", GPT2 + 3, GPT2), (GPT2, "")),
        (("codi", GPT2 + 5, GPT2), (GPT2, "")),  # SIM-CoT's, with two spare rows
        (("codi", LLAMA + 3, LLAMA, LLAMA), (LLAMA, "")),
        (("codi", LLAMA, None, LLAMA, False, False, "projector"), (LLAMA, "projector")),
        (("text", GPT2, None, GPT2, False, False), (None, "")),
        (("colar", GPT2, None, GPT2, False, False, "head"), (None, "head")),
    ],
)
def test_tokens_are_where_published_checkpoints_have_them(case, expected):
    assert _plan(*case) == expected


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (("codi", GPT2 + 4, GPT2), r"has 50261 rows, config.base 50257 \(\+ 3 "),
        (("coconut", GPT2 + 5, GPT2), r"has 50262 rows, config.base 50257 \(\+ 3 "),
        (
            ("coconut", GPT2, None, GPT2 + 3, True),
            "has 50257 rows, but the tokenizer 50260 tokens",
        ),
    ],
)
def test_another_vocabulary_is_refused(case, message):
    with pytest.raises(UserError, match=f"^here: tensor wte.weight {message}"):
        _plan(*case)
