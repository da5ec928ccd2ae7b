"""COCONUT's prompt and suffix, token by token."""

from collections import Counter

import pytest
from tokenizers import AddedToken, processors

from refused import one_line
from slpo_jax.architectures.architecture import Text
from slpo_jax.architectures.coconut import Coconut
from slpo_jax.architectures.codi import Codi
from slpo_jax.architectures.colar import Colar
from slpo_jax.checkpoints.export import write_chat_template
from slpo_jax.data.batches import encode_problems
from slpo_jax.data.chat import PromptConfig, text_template
from slpo_jax.data.problem import Problem
from slpo_jax.data.tokenizer import (
    byte_tokenizer,
    task_tokenizer,
    token_bytes,
    words_of,
    words_tokenizer,
)
from slpo_jax.errors import UserError
from slpo_jax.rewards.answers import parse_completion, read_completion

QUESTION = "Tom has 5 apples . He buys 3 . How many now ?"


def _tokens(template, ids):
    return template.tokenizer.convert_ids_to_tokens(ids)


def test_coconut_prompt_suffix_and_ids():
    tokenizer = task_tokenizer("synthetic", 30)
    template = Coconut().template(tokenizer)
    assert _tokens(template, template.prompt(QUESTION)) == [
        *QUESTION.split(),
        "\n",
        "<|start-latent|>",
    ]
    first = "5 + 3 = 8"
    second = "8 x 2 = 16"
    expected = [
        "<|end-latent|>",
        *first.split(),
        "\n",
        *second.split(),
        "\n",
        "###",
        "16",
        "<eos>",
    ]
    assert _tokens(template, template.suffix([first, second], "16")) == expected
    assert _tokens(template, template.suffix([], "16")) == [
        "<|end-latent|>",
        "###",
        "16",
        "<eos>",
    ]
    names = ["<|start-latent|>", "<|end-latent|>", "<|latent|>", "<eos>", "<pad>"]
    expected = tokenizer.convert_tokens_to_ids(names)
    found = (
        template.start_id,
        *template.closing_ids,
        template.latent_id,
        template.eos_id,
        template.pad_id,
    )
    assert [*found] == expected
    assert template.answer_style == "after_mark"
    assert template.answer_text("72") == "### 72"


def test_many_at_once_equal_one_by_one_and_share_no_list():
    template = Coconut().template(task_tokenizer("synthetic", 30))
    questions = [QUESTION, "Mia has 7 pens .", QUESTION]
    together = template.prompts(questions)
    assert together == [template.prompt(question) for question in questions]
    assert template.question_text(" Two  spaces ") == " Two  spaces \n"
    first, second = template.answer_ids(["7", "7"])
    first.append(0)
    assert second == template.answer_ids(["7"])[0]


def test_begin_of_text_goes_before_the_prompt_alone():
    tokenizer = task_tokenizer("synthetic", 30)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", 0)]
    )  # <pad> plays Llama's begin-of-text
    template = Coconut().template(tokenizer)
    assert _tokens(template, template.prompt("He buys")) == [
        "<pad>",
        "He",
        "buys",
        "\n",
        "<|start-latent|>",
    ]
    assert _tokens(template, template.suffix(["5"], "6")) == [
        "<|end-latent|>",
        "5",
        "\n",
        "###",
        "6",
        "<eos>",
    ]


def test_words_that_have_no_token_are_an_error():
    template = Coconut().template(task_tokenizer("synthetic", 30))
    with pytest.raises(UserError, match=r"'Tom has 31 aardvarks': .*'31', 'aardvarks'"):
        template.prompt("Tom has 31 aardvarks")
    with pytest.raises(UserError, match="### 72"):
        template.suffix([], "72")


def test_unknown_words_of_a_set_to_evaluate_on_are_counted():
    template = Coconut().template(task_tokenizer("synthetic", 30))
    unknown = Counter()
    problems = [
        Problem("Tom has 31 pens", (), "31"),
        Problem("Tom has 5", (), "5"),
        Problem("Mia has 31", (), "5"),
    ]
    encoded = encode_problems(template, problems, unknown=unknown)
    assert unknown == {"31": 3}  # texts
    assert _tokens(template, encoded.prompts[0])[:4] == ["Tom", "has", "<unk>", "pens"]
    assert _tokens(template, encoded.answers[0]) == ["###", "<unk>"]


def test_special_tokens_are_read_in_a_question_and_are_text_in_an_answer():
    """As transformers does, here and in an export."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=True)], special_tokens=True)
    template = Codi(1).template(tokenizer)
    expected = [*b"a", tokenizer.convert_tokens_to_ids("<|im_end|>"), template.start_id]
    assert template.prompt("a<|im_end|>") == expected
    assert (
        bytes(template.answer_ids(["<|im_end|>"])[0])
        == template.answer_text("<|im_end|>").encode()
    )
    write_chat_template(template)
    chat = [{"role": "user", "content": "a<|im_end|>"}]
    assert (
        tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"] == expected
    )


def test_a_chat_template_ends_with_a_marker_that_is_a_word():
    prompt = "Question: 2 + 3 Let's think step by step:(Thinking speed: 2) ###"
    tokenizer = words_tokenizer(words_of([prompt]))
    template = Colar(64).template(tokenizer)
    write_chat_template(template)
    chat = [{"role": "user", "content": "2 + 3"}]
    asked = tokenizer.apply_chat_template(chat, return_dict=True)
    assert asked["input_ids"] == template.prompt("2 + 3")


def test_codi_on_a_word_level_tokenizer():
    tokenizer = task_tokenizer("synthetic", 30)
    known = len(tokenizer)
    template = Codi(1).template(tokenizer)
    prompt = template.prompt("  Tom has  5 apples . ")
    # As its program does it.
    assert template.question_text(" a  b   c\n d ") == "a b  c\n d"
    assert _tokens(template, prompt) == [
        "Tom",
        "has",
        "5",
        "apples",
        ".",
        "<|start-latent|>",
    ]
    expected = [
        "<|end-latent|>",
        "5",
        "+",
        "3",
        "=",
        "8",
        "The",
        "answer",
        "is:",
        "8",
        "<eos>",
    ]
    suffix = template.suffix(["5 + 3 = 8"], "8")
    assert _tokens(template, suffix) == expected
    pieces = token_bytes(tokenizer)
    assert b"".join(pieces[index] for index in suffix) == b" 5 + 3 = 8 The answer is: 8"
    assert len(tokenizer) == known + 3  # three words; the latent tokens were there
    Codi(1).template(tokenizer)
    assert len(tokenizer) == known + 3


CHAT = (
    "{% for m in messages %}{% if m.role == 'system' and not m.content %}{{ raise_exception('empty') }}{% endif %}"
    "<eos> {{ m.role }} {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<eos> Mia \n{% endif %}"
)


def _with_chat(chat_template=CHAT):
    tokenizer = task_tokenizer("synthetic", 30)
    tokenizer.chat_template = chat_template
    tokenizer.add_tokens(["user", "system"])
    return tokenizer


def test_text_is_the_question_and_what_is_written_after_it():
    """Without any marker: a suffix begins with what it comes out of."""
    tokenizer = task_tokenizer("synthetic", 30)
    template = text_template(tokenizer, PromptConfig(instruction="How many now ?"))
    assert _tokens(template, template.prompt("He buys 3 .")) == [
        "He",
        "buys",
        *"3.\n",
        "How",
        "many",
        "now",
        *"?\n",
    ]
    assert _tokens(template, template.suffix(["5 + 3 = 8"], "8")) == [
        *"5+3=8",
        "\n",
        "####",
        "8",
        "<eos>",
    ]
    assert (template.start_id, template.closing_ids, template.latent_id) == (
        None,
        (),
        None,
    )
    assert (template.eos_id, template.answer_style) == (
        tokenizer.eos_token_id,
        "after_mark",
    )
    problems = encode_problems(template, [Problem("He buys 3 .", ("3 + 1 = 4",), "4")])
    prompt = problems.prompts[0]
    assert problems.suffix(0) == [prompt[-1], *template.suffix(["3 + 1 = 4"], "4")]
    assert problems.suffix(0, None) == [prompt[-1], *template.suffix([], "4")]


@pytest.mark.parametrize(
    ("answers", "style"), [("last_number", "last_number"), ("boxed", "boxed")]
)
def test_text_writes_what_its_answers_are_read_from(answers, style):
    template = text_template(
        task_tokenizer("synthetic", 30), PromptConfig(answers=answers)
    )
    assert template.answer_style == style
    written = [r"\boxed{", "8", "}"] if answers == "boxed" else ["####", "8"]
    ids = template.suffix(["5 + 3 = 8"], "8")
    assert _tokens(template, ids)[-1 - len(written) :] == [*written, "<eos>"]
    text = read_completion(ids, token_bytes(template.tokenizer), template.eos_ids).text
    assert parse_completion(text, template.answer_style) == "8"
    assert template.answer_text(r"\frac{1}{2}") == (
        r"\boxed{\frac{1}{2}}" if answers == "boxed" else r"#### \frac{1}{2}"
    )


@pytest.mark.parametrize("architecture", [Coconut(), Codi(8), Colar(8), Text()])
def test_every_architecture_s_answers_may_be_texts(architecture):
    tokenizer = task_tokenizer("synthetic", 3)
    tokenizer.add_tokens(["###"])
    template = architecture.template(tokenizer, prompt=PromptConfig(answers="texts"))
    assert template.answer_style == "texts"
    written = "".join(
        template.step_text(step, step == "1") for step in ("1", "Tom is a #.")
    )
    assert (
        parse_completion(written + template.answer_text("Tom is a lempus."), "texts")
        == "Tom is a lempus"
    )


def test_text_in_a_chat():
    """As the template writes it, with nothing put in front a second time."""
    tokenizer = _with_chat()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", 0)]
    )
    template = text_template(
        tokenizer, PromptConfig(system="Tom has 5", instruction="How many ?")
    )
    written = (
        "<eos> system Tom has 5 \n <eos> user He buys \n How many ? \n <eos> Mia \n"
    )
    assert " ".join(_tokens(template, template.prompt("He buys"))) == written
    plain = text_template(tokenizer, PromptConfig(format="{question} \n"))
    assert _tokens(plain, plain.prompt("He buys")) == ["He", "buys", "\n"]


@pytest.mark.parametrize(
    ("chat_template", "fault"),
    [
        (
            "{{ raise_exception('no user here') }}",
            "config.prompt: .*chat template can't take it .no user here.",
        ),
        ("{% if %}", "config.prompt: .*chat template can't take it"),
    ],
)
def test_a_chat_that_can_not_be_is_one_line(chat_template, fault):
    one_line(
        lambda: text_template(_with_chat(chat_template), PromptConfig()), match=fault
    )
