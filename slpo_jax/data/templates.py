"""How a reasoner writes its prompt and its answer; each architecture makes its own (`checkpoints.architectures`)."""

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from tokenizers import models

from slpo_jax.data.problem import Problem
from slpo_jax.data.tokenizer import BREAK, ReasonerTokens, special_names, token_bytes
from slpo_jax.errors import UserError
from slpo_jax.rewards.answers import AnswerStyle

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Ids = list[int]


@dataclass(frozen=True)
class Template:
    """The texts and marker tokens of one architecture, bound to a tokenizer.

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
    question_in_jinja: str = "question"

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """All tokens that end an answer."""
        return self.eos_id, *self.more_eos_ids

    def prompt(self, question: str) -> Ids:
        """ids(question text) + [start]."""
        return self.prompts([question])[0]

    def prompts(self, questions: Sequence[str], unknown: Counter[str] | None = None) -> list[Ids]:
        """`prompt` for many questions, much faster than one by one.

        Special tokens are those of the template: a question that spells one out is text.

        Args:
            unknown: is given the words that a word-level tokenizer doesn't know, which are read as its unknown token.
        Raises:
            UserError: without `unknown`, a question has such a word.
        """
        broken = [self._special.sub(lambda name: name[0][0] + BREAK + name[0][1:], each) for each in questions]
        start = [] if self.start_id is None else [self.start_id]
        return [[*ids, *start] for ids in self._encode(list(map(self.question_text, broken)), unknown, self._asked)]

    @property
    def chat_template(self) -> str:
        """`prompt` of a chat's only message in Jinja, for transformers' `apply_chat_template`."""
        before, after = self.question_text("?").split("?")
        first, last = map(self.tokenizer.convert_ids_to_tokens, self._around)
        before, after = "".join(first) + before, after + "".join(last)
        after += "" if self.start_id is None else self.tokenizer.convert_ids_to_tokens(self.start_id)
        return (
            "{% if messages | length != 1 or messages[0]['role'] != 'user' %}"
            "{{ raise_exception('it is asked one question, as the only message, from the user') }}{% endif %}"
            "{% set found = namespace(text=messages[0]['content']) %}"
            f"{{% for name in {json.dumps(special_names(self.tokenizer), ensure_ascii=False)} %}}"
            f"{{% set found.text = found.text.replace(name, name[0] ~ {json.dumps(BREAK)} ~ name[1:]) %}}{{% endfor %}}"
            "{% set question = found.text %}"
            f"{{{{ {' + '.join(filter(None, (_literal(before), self.question_in_jinja, _literal(after))))} }}}}"
        )

    def suffix(self, steps: Sequence[str], answer: str) -> Ids:
        """[end] + ids of every step's text + ids(answer text) + [eos]; the end marker as far as there is one."""
        return self.join_suffix(self.step_ids([steps])[0], self.answer_ids([answer])[0])

    def step_ids(self, solutions: Sequence[Sequence[str]]) -> list[list[Ids]]:
        """Ids of every step of each solution. Tokenised one by one, so that they don't depend on their neighbours."""
        flat = iter(self._encode([self.step_text(step, i == 0) for steps in solutions for i, step in enumerate(steps)]))
        return [[next(flat) for _ in steps] for steps in solutions]

    def answer_ids(self, answers: Sequence[str], unknown: Counter[str] | None = None) -> list[Ids]:
        """Ids of each answer's text, without eos; `unknown` as for `prompts`."""
        return self._encode([self.answer_text(answer) for answer in answers], unknown)

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

    @functools.cached_property
    def _special(self) -> re.Pattern[str]:
        """Any special token's name."""
        return re.compile("|".join(map(re.escape, special_names(self.tokenizer))) or "(?!)")

    @functools.cached_property
    def _around(self) -> tuple[Ids, Ids]:
        """What the tokenizer puts around any text (Llama's begin-of-text), which belongs to the prompt."""
        if self.bare:
            return [], []
        text, whole = (self.tokenizer("?", add_special_tokens=more)["input_ids"] for more in (False, True))
        first = whole.index(text[0])
        return whole[:first], whole[first + len(text) :]

    def _asked(self, texts: list[str]) -> list[Ids]:
        """Ids of prompts' texts, in which the names of special tokens are these, but for broken ones."""
        rows = self.tokenizer(texts, add_special_tokens=not self.bare, verbose=False)["input_ids"]
        for number, text in enumerate(texts):
            if BREAK in text:
                before, after = self._around
                rows[number] = [*before, *self._in_pieces(text), *after]
        return list(rows)

    def _in_pieces(self, text: str) -> Ids:
        """A text's ids where broken names are literal: what lies between the whole ones is tokenised on its own."""
        first, *others = self._written([piece.replace(BREAK, "") for piece in self._special.split(text)])
        names = self.tokenizer.convert_tokens_to_ids(self._special.findall(text))
        return first + [token for name, ids in zip(names, others, strict=True) for token in (name, *ids)]

    def _written(self, texts: list[str]) -> list[Ids]:
        """Ids of texts that hold no special token, whatever they spell out."""
        rows = self.tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        if self._no_words:
            for number, text in enumerate(texts):
                if self._special.search(text):
                    rows[number] = [self._unknown if token in self._no_words else token for token in rows[number]]
        return list(rows)

    @functools.cached_property
    def _unknown(self) -> int | None:
        """What stands for what the tokenizer doesn't know; None where it can spell everything."""
        token = self.tokenizer.unk_token_id
        return None if token == self.eos_id else token  # GPT-2 calls its eos so, but every byte has a token

    @functools.cached_property
    def _no_words(self) -> set[int]:
        """Special tokens that a word-level vocabulary has among its words."""
        words = isinstance(self.tokenizer.backend_tokenizer.model, models.WordLevel) and self._unknown is not None
        return set(self.tokenizer.convert_tokens_to_ids(special_names(self.tokenizer))) if words else set()

    def _unknown_words(self, text: str) -> list[str]:
        plain = text.replace(BREAK, "")
        found = self.tokenizer(plain, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)
        lost = self._no_words | {self._unknown}
        pairs = zip(found["input_ids"], found["offset_mapping"], strict=True)
        return list(dict.fromkeys(plain[begin:end].strip(" ") or " " for token, (begin, end) in pairs if token in lost))

    def _encode(
        self,
        texts: list[str],
        unknown: Counter[str] | None = None,
        encode: Callable[[list[str]], list[Ids]] | None = None,
    ) -> list[Ids]:
        if not texts:
            return []
        distinct = list(dict.fromkeys(texts))  # most steps and answers of a set come many times
        for text in distinct:
            if not _is_unicode(text):
                raise UserError(f"{text.strip()!r}: has bytes that are no character; write it as UTF-8")
        rows = (encode or self._written)(distinct)
        for text, ids in zip(distinct, rows, strict=True) if self._unknown is not None else ():
            if self._unknown not in ids:
                continue
            words = self._unknown_words(self._special.sub(" ", text) if encode else text)
            if words and unknown is None:
                raise UserError(
                    f"{text.replace(BREAK, '').strip()!r}: the tokenizer doesn't know {listed(words)}; use words that "
                    "it knows, or another config.tokenizer"
                )
            if unknown is not None:
                unknown.update(words)
        by_text = dict(zip(distinct, rows, strict=True))
        return [list(by_text[text]) for text in texts]


def written_texts(template: Template, problems: Iterable[Problem]) -> Iterator[str]:
    """All texts that a template makes of problems."""
    for each in problems:
        yield template.question_text(each.question)
        yield template.answer_text(each.answer)
        for step in each.steps:
            yield template.step_text(step, True)
            yield template.step_text(step, False)


def listed(words: Iterable[str], most: int = 5) -> str:
    """Some of these words, for a message."""
    each = list(words)
    return ", ".join(map(repr, each[:most])) + (f" and {len(each) - most} more" if len(each) > most else "")


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
