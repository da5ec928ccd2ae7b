"""How questions are asked: `config.prompt`, a language model's template without markers, and CoLaR's question."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slpo_jax.data.templates import Template, line
from slpo_jax.data.tokenizer import TEXT_ANSWER, add_words, end_ids
from slpo_jax.errors import UserError, first_line
from slpo_jax.rewards.answers import STYLES, AnswerStyle, AskedStyle, style_of
from slpo_jax.settings import FieldError, check_fields, setting

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

QUESTION = "{question}"
MOST_SPEED = 5  # published


@dataclass(frozen=True)
class PromptConfig:
    r"""The section `config.prompt`: what a question is asked with, by a text reasoner or CoLaR; how answers are read.

    COCONUT takes format and closing, both together, in the place of its markers.

    Attributes:
        system: comes before the question, in a chat as the system's message.
        instruction: comes after the question, on a line of its own.
        format: in the place of these two, and of the tokenizer's chat template, if it has one: the whole prompt, with
            {question} in it and all special tokens that it needs, such as the text that opens a thought.
        closing: ends a thought, as </think> does: all of its tokens are fed before the answer. A thought in soft tokens
            ends before the step at which the first of them is the likeliest.
        answers: how answers are written, read and compared, see docs/data.md. "auto" is the reasoner's own way; of a
            text reasoner, what follows the last # is one number, as imitation has it written.
        speed: speed that CoLaR is asked to think at: tokens of a written solution that one latent stands for.
    """

    system: str = ""
    instruction: str = ""
    format: str = ""
    closing: str = ""
    answers: AskedStyle = "auto"
    speed: int = setting(2, least=1, most=MOST_SPEED)

    def marked_style(self, default: AnswerStyle) -> AnswerStyle:
        """Return the style that answers are read in, of a reasoner with its own way to ask and its own `default`."""
        style = style_of(self.answers, default)
        return style if STYLES[style].marked else default

    def __post_init__(self) -> None:
        check_fields(self)
        if self.format and self.format.count(QUESTION) != 1:
            raise FieldError(
                self, "format", f"write {QUESTION} once, where the question stands"
            )
        if self.format and (self.system or self.instruction):
            raise FieldError(
                self,
                "format",
                "it is the whole prompt; put system and instruction into it",
            )


def text_template(
    tokenizer: "PreTrainedTokenizerFast", prompt: PromptConfig
) -> Template:
    r"""Lay out the question in the chat template, or question + line break | steps + "#### 72" + eos.

    Where answers are read from a box, "\boxed{72}" takes the place of "#### 72".

    Args:
        tokenizer: gets no tokens but, a word-level one, the answer's mark.
        prompt: what the question is asked with.
    Raises:
        UserError: the tokenizer's chat template can't be used, or it has no eos token.
    """
    # A word-level tokenizer is given the words of the answer's mark and of the prompt.
    style = style_of(prompt.answers, "after_mark")
    around = STYLES[style].around or (f"{TEXT_ANSWER} ", "")
    before, after = around
    add_words(tokenizer, " ".join(around), apart=not after)
    prompt_words = prompt.format.replace(QUESTION, "")
    add_words(tokenizer, f"{prompt_words} {prompt.closing}")

    # Ask in the prompt's own format, in the tokenizer's chat template, or with the plain question.
    chat = not prompt.format and tokenizer.chat_template is not None
    ask: Callable[[str], str] = functools.partial(_plain_text, prompt)
    if prompt.format:
        ask = functools.partial(prompt.format.replace, QUESTION)
    if chat:
        ask = functools.partial(_chat, tokenizer, prompt)
        try:
            ask("?")
        except Exception as error:  # templates are programs, which raise what they like
            raise UserError(
                "config.prompt",
                f"the tokenizer's chat template can't take it ({first_line(error)}); change "
                "config.prompt.system, or give the whole prompt as config.prompt.format",
            ) from None

    closing_ids: tuple[int, ...] = ()
    if prompt.closing:
        encoded = tokenizer(prompt.closing, add_special_tokens=False)
        closing_ids = tuple(encoded["input_ids"])
    return Template(
        **end_ids(tokenizer),
        answer_style=style,
        start_id=None,
        closing_ids=closing_ids,
        latent_id=None,
        tokenizer=tokenizer,
        question_text=ask,
        step_text=lambda step, first: step + "\n",
        answer_text=lambda answer: f"{before}{answer}{after}",
        bare=chat or bool(prompt.format),
    )


def _plain_text(prompt: PromptConfig, question: str) -> str:
    lines: list[str] = []
    for part in (prompt.system, question, prompt.instruction):
        if part:
            lines.append(line(part))
    return "".join(lines)


def _chat(
    tokenizer: "PreTrainedTokenizerFast", prompt: PromptConfig, question: str
) -> str:
    parts = [question, prompt.instruction]
    content = "\n".join(part for part in parts if part)
    messages: list[dict[str, str]] = []
    if prompt.system:
        messages.append({"role": "system", "content": prompt.system})
    messages.append({"role": "user", "content": content})
    return str(
        tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    )


@dataclass(frozen=True)
class SpeedPrompt:
    """A question's text at a thinking speed: tokens of a written solution that one latent stands for."""

    speed: int

    def __call__(self, question: str) -> str:
        return f"Question: {question} Let's think step by step:(Thinking speed: {self.speed})"


def speed_of(template: Template) -> int:
    """Return the speed that a template asks at.

    Raises:
        UserError: at none.
    """
    if not isinstance(template.question_text, SpeedPrompt):
        raise UserError(
            "config.reasoner",
            "only CoLaR's is asked at a speed; set it to colar_gpt2 or another colar's",
        )
    return template.question_text.speed


def at_speed(template: Template, speed: int) -> Template:
    """Return the template, asking at another speed."""
    return replace(template, question_text=SpeedPrompt(speed))
