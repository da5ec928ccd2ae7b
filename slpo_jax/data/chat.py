"""How a language model is asked in its own words, without markers: `config.prompt` and the template that it makes."""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slpo_jax.config.bounds import FieldError, check_fields, setting
from slpo_jax.data.speed import MOST_SPEED
from slpo_jax.data.templates import Template, line
from slpo_jax.data.tokenizer import TEXT_ANSWER, add_words
from slpo_jax.errors import UserError, first_line
from slpo_jax.rewards.answers import STYLES, AnswerStyle, AskedStyle, style_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

QUESTION = "{question}"


@dataclass(frozen=True)
class PromptConfig:
    r"""The section `config.prompt`: what a question is asked with, by a text reasoner or CoLaR; how answers are read.

    COCONUT takes format and closing, both together, in the place of its markers.

    Attributes:
        system: comes before the question, in a chat as the system's message.
        instruction: comes after the question, on a line of its own.
        chat: whether in the tokenizer's chat template: where it has one ("auto"), or "never".
        format: in the place of these three: the whole prompt, with {question} in it and all special tokens that it
            needs, such as the text that opens a thought.
        closing: ends a thought, as </think> does: all of its tokens are fed before the answer. LatentPolicies in soft
            tokens end before the step at which the first of them is the likeliest.
        answers: how they are written, read and compared, see docs/data.md. "auto" is the reasoner's own way; of a text
            reasoner, what follows the last # is one number, as imitation has it written.
        speed: that CoLaR is asked to think at: tokens of a written solution that one latent stands for.
    """

    system: str = ""
    instruction: str = ""
    chat: Literal["auto", "never"] = "auto"
    format: str = ""
    closing: str = ""
    answers: AskedStyle = "auto"
    speed: int = setting(2, least=1, most=MOST_SPEED)

    def marked_style(self, own: AnswerStyle) -> AnswerStyle:
        """How the answers of a reasoner are read that has a way of its own to ask, and to answer in the style `own`."""
        style = style_of(self.answers, own)
        return style if STYLES[style].marked else own

    def __post_init__(self) -> None:
        check_fields(self)
        if self.format and self.format.count(QUESTION) != 1:
            raise FieldError(self, "format", f"write {QUESTION} once, where the question stands")
        if self.format and (self.system or self.instruction):
            raise FieldError(self, "format", "it is the whole prompt; put system and instruction into it")


def text_template(tokenizer: "PreTrainedTokenizerFast", prompt: PromptConfig) -> Template:
    r"""A language model's own: the question in its chat template, or question + line break | steps + "#### 72" + eos.

    Where answers are read from a box, "\boxed{72}" takes the place of "#### 72".

    Args:
        tokenizer: gets no tokens but, a word-level one, the answer's mark.
        prompt: what the question is asked with.
    Raises:
        UserError: the tokenizer's chat template can't be used, or it has no eos token.
    """
    if tokenizer.eos_token is None:
        raise UserError("tokenizer: has no eos token, so that answers couldn't end; set eos_token in its config")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    style = style_of(prompt.answers, "after_mark")
    before, after = around = STYLES[style].around or (f"{TEXT_ANSWER} ", "")
    add_words(tokenizer, " ".join(around), apart=not after)
    add_words(tokenizer, f"{prompt.format.replace(QUESTION, '')} {prompt.closing}")
    chat = not prompt.format and prompt.chat == "auto" and tokenizer.chat_template is not None
    if chat:
        _check_chat(tokenizer, prompt)
    ask = _formatted if prompt.format else _chat if chat else _asked
    return Template(
        answer_style=style,
        start_id=None,
        closing_ids=tuple(tokenizer(prompt.closing, add_special_tokens=False)["input_ids"]) if prompt.closing else (),
        latent_id=None,
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
        tokenizer=tokenizer,
        question_text=functools.partial(ask, tokenizer, prompt),
        step_text=lambda step, first: step + "\n",
        answer_text=lambda answer: f"{before}{answer}{after}",
        bare=chat or bool(prompt.format),
    )


def _asked(tokenizer: "PreTrainedTokenizerFast", prompt: PromptConfig, question: str) -> str:
    return "".join(line(part) for part in (prompt.system, question, prompt.instruction) if part)


def _formatted(tokenizer: "PreTrainedTokenizerFast", prompt: PromptConfig, question: str) -> str:
    return prompt.format.replace(QUESTION, question)


def _chat(tokenizer: "PreTrainedTokenizerFast", prompt: PromptConfig, question: str) -> str:
    asked = "\n".join(part for part in (question, prompt.instruction) if part)
    messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
    messages.append({"role": "user", "content": asked})
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _check_chat(tokenizer: "PreTrainedTokenizerFast", prompt: PromptConfig) -> None:
    try:
        _chat(tokenizer, prompt, "?")
    except Exception as error:  # templates are programs, which raise what they like
        raise UserError(
            f"config.prompt: the tokenizer's chat template can't take it ({first_line(error)}); change "
            'config.prompt.system, or set config.prompt.chat to "never"'
        ) from None
