"""How a reasoner writes its prompt and its answer; each kind of reasoner makes its own (`slpo_jax.kinds`)."""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from slpo_jax.errors import UserError
from slpo_jax.rewards.answers import AnswerStyle
from slpo_jax.text.tokenizer import ReasonerTokens, token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Ids = list[int]


@dataclass(frozen=True)
class Template:
    """The texts and marker tokens of one kind of reasoner, bound to a tokenizer.

    Attributes:
        answer_style: name of the answer grammar that reads the completions (`slpo_jax.rewards.answers`).
        start_id: ends the prompt; latents follow. None without latents of the reasoner's own.
        closing_ids: begin the suffix; the answer follows. (): the prompt's last token is what it follows.
        latent_id: stands for a latent in Hugging Face's layout of COCONUT; never fed by us.
        eos_id: ends the suffix.
        pad_id: fills slots that no token has.
        tokenizer: what the ids belong to.
        question_text: question -> text of the prompt, before the start marker.
        step_text: (reasoning step, whether it is the first) -> text.
        answer_text: canonical answer (or LaTeX) -> text, before eos.
        banned_ids: ids that are never generated.
        bare: the prompt's text has all special tokens that it needs: the tokenizer puts none in front.
        more_eos_ids: of further tokens that end an answer, which no suffix has.
        stop: texts that end one, see `slpo_jax.text.chat.PromptConfig`.
        question_in_jinja: `question` as it stands in its text, for `chat_template`.
    """

    answer_style: AnswerStyle
    start_id: int | None
    closing_ids: tuple[int, ...]
    latent_id: int | None
    eos_id: int
    pad_id: int
    tokenizer: "PreTrainedTokenizerFast"
    question_text: Callable[[str], str]
    step_text: Callable[[str, bool], str]
    answer_text: Callable[[str], str]
    banned_ids: tuple[int, ...] = ()
    bare: bool = False
    more_eos_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    question_in_jinja: str = "question"

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """All tokens that end an answer."""
        return self.eos_id, *self.more_eos_ids

    def prompt(self, question: str) -> Ids:
        """ids(question text) + [start]."""
        return self.prompts([question])[0]

    def prompts(self, questions: Sequence[str]) -> list[Ids]:
        """`prompt` for many questions, much faster than one by one.

        Raises:
            UserError: a question has a word that a word-level tokenizer doesn't know.
        """
        texts = [self.question_text(question) for question in questions]
        # Special tokens that the tokenizer puts in front (Llama's begin-of-text) belong to the prompt.
        start = [] if self.start_id is None else [self.start_id]
        return [[*ids, *start] for ids in self._encode(texts, add_special_tokens=not self.bare)]

    @property
    def chat_template(self) -> str:
        """`prompt` of a chat's only message in Jinja, for transformers' `apply_chat_template`."""
        before, after = self.question_text("?").split("?")
        if not self.bare:  # what the tokenizer puts around any text
            text, whole = (self.tokenizer("?", add_special_tokens=more)["input_ids"] for more in (False, True))
            names, first = self.tokenizer.convert_ids_to_tokens(whole), whole.index(text[0])
            before = "".join(names[:first]) + before
            after += "".join(names[first + len(text) :])
        after += "" if self.start_id is None else self.tokenizer.convert_ids_to_tokens(self.start_id)
        return (
            "{% if messages | length != 1 or messages[0]['role'] != 'user' %}"
            "{{ raise_exception('it is asked one question, as the only message, from the user') }}{% endif %}"
            "{% set question = messages[0]['content'] %}"
            f"{{{{ {' + '.join(filter(None, (_literal(before), self.question_in_jinja, _literal(after))))} }}}}"
        )

    def suffix(self, steps: Sequence[str], answer: str) -> Ids:
        """[end] + ids of every step's text + ids(answer text) + [eos]; the end marker as far as there is one."""
        return self.join_suffix(self.step_ids([steps])[0], self.answer_ids([answer])[0])

    def step_ids(self, solutions: Sequence[Sequence[str]]) -> list[list[Ids]]:
        """Ids of every step of each solution. Tokenised one by one, so that they don't depend on their neighbours."""
        flat = iter(self._encode([self.step_text(step, i == 0) for steps in solutions for i, step in enumerate(steps)]))
        return [[next(flat) for _ in steps] for steps in solutions]

    def answer_ids(self, answers: Sequence[str]) -> list[Ids]:
        """Ids of each answer's text, without eos."""
        return self._encode([self.answer_text(answer) for answer in answers])

    def join_suffix(self, steps: Sequence[Ids], answer: Ids) -> Ids:
        """`suffix` from the ids of steps and answer."""
        return [*self.closing_ids, *(token for step in steps for token in step), *answer, self.eos_id]

    def token(self, text: str) -> int:
        """The id of a text that is one token.

        Raises:
            UserError: the tokenizer splits it, or doesn't know it.
        """
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        pieces = ", ".join(map(repr, self.tokenizer.convert_ids_to_tokens(ids)))
        if len(ids) != 1:
            raise UserError(f"{text!r} is {len(ids)} tokens to this tokenizer ({pieces}); give a text that is one")
        if ids[0] == self.tokenizer.unk_token_id != self.eos_id:
            raise UserError(f"{text!r} is no token of this tokenizer; give a text that is one")
        return ids[0]

    def distilled_position(self, ids: Ids, answer: str) -> int:
        """Where CODI's distillation compares hidden states: at the token just before the answer itself.

        Args:
            ids: the answer's, from `answer_ids`.
            answer: the canonical answer, with which its text ends.
        Returns:
            the index in `ids` of the last token that holds none of the answer's characters: ":" for GPT-2, whose " 72"
            is one token, the lone " " where digits are tokens of their own.
        """
        ends = list(accumulate(len(self.token_bytes[token]) for token in ids))
        return sum(end <= ends[-1] - len(answer.encode()) for end in ends) - 1

    @functools.cached_property
    def token_bytes(self) -> list[bytes]:
        """What each id writes; b"" for special tokens."""
        return token_bytes(self.tokenizer)

    def _encode(self, texts: list[str], add_special_tokens: bool = False) -> list[Ids]:
        if not texts:
            return []
        distinct = list(dict.fromkeys(texts))  # most steps and answers of a set come many times
        for text in distinct:
            if not _is_unicode(text):
                raise UserError(f"{text.strip()!r}: has bytes that are no character; write it as UTF-8")
        rows = self.tokenizer(distinct, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        unknown = self.tokenizer.unk_token_id
        # GPT-2 calls its eos "unknown" too, but never needs it: every byte has a token.
        if unknown is not None and unknown != self.eos_id:
            for text, ids in zip(distinct, rows, strict=True):
                if unknown in ids:
                    raise UserError(
                        f"{text.strip()!r}: has a word or number that the tokenizer doesn't know; "
                        "use its vocabulary, or another config.tokenizer"
                    )
        by_text = dict(zip(distinct, rows, strict=True))
        return [list(by_text[text]) for text in texts]


def marked_template(tokenizer: "PreTrainedTokenizerFast", tokens: ReasonerTokens, **texts: Any) -> Template:
    """One with markers around the latents; `texts` are `Template`'s other fields."""
    return Template(
        start_id=tokens.start,
        closing_ids=(tokens.end,),
        latent_id=tokens.latent,
        eos_id=tokens.eos,
        pad_id=tokens.pad,
        tokenizer=tokenizer,
        **texts,
    )


def token_texts(template: Template, rows: int) -> list[str]:
    """The text of each of the model's token ids; a special token's is its name, a padded row's is empty.

    Args:
        rows: of the model's vocabulary.
    """
    names = {index: name for name, index in template.tokenizer.get_vocab().items()}
    pieces = enumerate(template.token_bytes)
    texts = [piece.decode("utf-8", "replace") or names.get(index, "") for index, piece in pieces]
    return texts + [""] * (rows - len(texts))


def _literal(text: str) -> str:
    """A text in Jinja; "" for none."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _is_unicode(text: str) -> bool:
    """Whether it has no half of a surrogate pair, as which Python keeps bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def line(text: str) -> str:
    return text + "\n"
