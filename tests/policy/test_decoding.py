"""Greedy answers and latents of published checkpoints, against transformers one unpadded problem at a time."""

import dataclasses

import numpy as np
import pytest

from published import (
    QUESTIONS,
    answers,
    coconut_hugging_face,
    coconut_original,
    codi_hugging_face,
    codi_original,
)
from published_bases import (
    FIXED,
    base_gguf,
    base_gpt2,
    base_llama,
    decode_here,
    written,
)

TOLERANCE = 4e-4  # of latents of size 1: rounding grows from one to the next, in one row to 1.3e-4
LAYOUTS = {
    "COCONUT in Hugging Face's layout": (coconut_hugging_face,),
    "COCONUT's own, GPT-2": (coconut_original, "gpt2"),
    "COCONUT's own, Llama": (coconut_original, "llama"),
    "CODI in Hugging Face's layout": (codi_hugging_face,),
    "CODI's own, GPT-2": (codi_original, "gpt2"),
    "CODI's own, Llama": (codi_original, "llama"),
}
BASES = {
    "GPT-2": (base_gpt2,),
    "GPT-2 as on the hub": (base_gpt2, True),
    "Llama": (base_llama,),
    "Qwen2": (base_llama, "qwen2"),
    "Qwen3": (base_llama, "qwen3"),
    "GGUF": (base_gguf,),
}


def but_slow(names, *quick):
    """All the names, of which only these are tested among the quick tests."""
    return [
        name if name in quick else pytest.param(name, marks=pytest.mark.slow)
        for name in names
    ]


def check_answers(case, found):
    """Some answers end with eos and some don't, and they aren't all alike."""
    wanted = [tokens for tokens, _ in answers(case)]
    assert found == wanted
    assert 0 < sum(case.eos in tokens for tokens in wanted) < len(wanted)
    assert len({token for tokens in wanted for token in tokens}) > 10


def check_latents(case, found):
    wanted = np.stack([latents for _, latents in answers(case)])
    np.testing.assert_allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def decode_at_once(case, folder):
    """All questions in one batch, and so by one program."""
    slots = (FIXED | case.settings)["prompt_slots"][-1:]
    return decode_here(
        case.settings | {"evaluate.batch_size": len(QUESTIONS), "prompt_slots": slots},
        folder,
    )


@pytest.mark.parametrize(
    "layout", but_slow(LAYOUTS, "COCONUT in Hugging Face's layout", "CODI's own, Llama")
)
def test_decodes_as_a_slow_loop(layout, tmp_path):
    case = written(*LAYOUTS[layout])
    tokens, latents = decode_at_once(case, tmp_path)
    check_answers(case, tokens)
    check_latents(case, latents)


@pytest.mark.parametrize("layout", but_slow(BASES, "GPT-2"))
def test_base_models_begin_as_their_own_continuation(layout, tmp_path):
    case = written(*BASES[layout])
    tokens, latents = decode_at_once(case, tmp_path)
    same = 0
    for question, ours, (wanted, _) in zip(
        QUESTIONS, tokens, answers(case), strict=True
    ):
        same += ours == wanted
        if ours != wanted:  # only where the oracle itself has a tie
            place = next(
                i
                for i, pair in enumerate(zip(ours, wanted, strict=False))
                if pair[0] != pair[1]
            )
            assert (
                abs(
                    case.preference(
                        question, wanted[:place], ours[place], wanted[place]
                    )
                )
                < 1e-5
            ), question
    assert same >= len(QUESTIONS) - 1
    check_latents(case, latents)


def test_codis_own_program_never_generates_the_end_marker():
    """Without the ban on it, the same checkpoint would."""
    case = written(codi_original, "gpt2")
    free = [
        dataclasses.replace(case, banned=()).decode(question)[0]
        for question in QUESTIONS
    ]
    assert any(case.end in tokens for tokens in free)
    assert not any(case.end in tokens for tokens, _ in answers(case))
