"""How a reasoner writes its prompt and its answer; each architecture makes its own (`architectures`)."""

import functools
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from slpo_jax.data.problem import Problem
from slpo_jax.data.tokenizer import token_bytes
from slpo_jax.errors import UserError, key_name
from slpo_jax.rewards.answers import AnswerStyle

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Ids = list[int]
_PLACE = "\ue000"  # of a question: no text around it has this character
# The number of lists of texts whose ids are kept: prompts, steps and answers of the sets of a run.
_KEPT = 12
_AT_ONCE = 4096  # texts
# Half of a surrogate pair, as which Python keeps bytes that are no UTF-8.
_HALF = re.compile("[\ud800-\udfff]")


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
        impossible_ids: ids that are never generated, nor have a share in the likelihood of others.
        trained_ids: ids whose rows of the vocabulary are trained in full where adapters are trained.
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
    impossible_ids: tuple[int, ...] = ()
    trained_ids: tuple[int, ...] = ()
    bare: bool = False
    more_eos_ids: tuple[int, ...] = ()
    question_in_jinja: str = "question"

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """All tokens that end an answer."""
        return self.eos_id, *self.more_eos_ids

    def prompt(self, question: str) -> Ids:
        """Return ids(question text) + [start]."""
        return self.prompts([question])[0]

    def prompts(
        self, questions: Sequence[str], unknown: Counter[str] | None = None
    ) -> list[Ids]:
        """Return `prompt` of many questions, much faster than one by one.

        Args:
            unknown: is given the words that a word-level tokenizer doesn't know, which are read as its unknown token.
        Raises:
            UserError: without `unknown`, a question has such a word.
        """
        texts = [self.question_text(question) for question in questions]
        return self._encode(texts, unknown, is_prompt=True)

    @property
    def prompt_end(self) -> int | None:
        """The token that every prompt ends with; None where it is the question's last."""
        if self.start_id is not None:
            return self.start_id
        prompt = self.question_text(_PLACE)
        if prompt.endswith(_PLACE):
            return None
        ends = set()
        for ids in self.prompts(["?", "5", "a"], Counter()):
            ends.add(ids[-1])
        return ends.pop() if len(ends) == 1 else None

    @property
    def chat_template(self) -> str:
        """`prompt` of a chat in Jinja, for transformers' `apply_chat_template`.

        The question is the user's last message, a text or a list of parts whose texts are joined. Others are left out:
        the reasoner knows one question. An assistant's message at the end is the answer, as programs that train on
        chats have it, and has the eos token behind it; not where a marker ends no prompt. A chat without a question is
        no text at all, which the export's `generate` refuses: what a template raises is no fault of a client's where
        transformers serves.
        """
        prompt_text = self.question_text(_PLACE)
        before, after = prompt_text.split(_PLACE)
        # Around it is what the tokenizer puts around any text (Llama's begin-of-text)
        text = self.tokenizer("?", add_special_tokens=False)["input_ids"]
        framed = self.tokenizer("?", add_special_tokens=not self.bare)["input_ids"]
        begin = framed.index(text[0])
        end = begin + len(text)
        first = self.tokenizer.convert_ids_to_tokens(framed[:begin])
        last = self.tokenizer.convert_ids_to_tokens(framed[end:])
        before = "".join(first) + before
        after = after + "".join(last)
        answer = ""
        if self.start_id is not None:
            # Decoded, since a marker that is a word of the vocabulary has a blank of its own before it.
            marker = self.tokenizer.decode([self.start_id])
            after += marker
            blank = _literal(self._blank_after(marker))
            eos_token = self.tokenizer.convert_ids_to_tokens(self.eos_id)
            eos = _literal(eos_token)
            pieces = [blank, "text_of(messages[-1])", eos]
            written = " + ".join(piece for piece in pieces if piece)
            answer = (
                "{% if messages[-1]['role'] == 'assistant' and not add_generation_prompt %}"
                f"{{% generation %}}{{{{ {written} }}}}{{% endgeneration %}}"
                "{% endif %}"
            )
        parts = [_literal(before), self.question_in_jinja, _literal(after)]
        prompt = " + ".join(part for part in parts if part)
        return (
            "{% macro text_of(message) %}"
            "{% set content = message['content'] %}"
            "{% if content is not string %}"
            "{% set content = content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join %}"
            "{% endif %}"
            "{{ content }}"
            "{% endmacro %}"
            "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
            "{% if asked %}"
            "{% set question = text_of(asked[-1]) %}"
            f"{{{{ {prompt} }}}}"
            f"{answer}"
            "{% endif %}"
        )

    def _blank_after(self, marker: str) -> str:
        """Return what parts an answer's text from a marker: " " where the two would be one word, else ""."""
        text = self.answer_text("5")
        (expected,) = self.answer_ids(["5"], Counter())
        size = len(expected)
        for blank in ("", " "):
            together = marker + blank + text
            ids = self.tokenizer(together, add_special_tokens=False)["input_ids"]
            if ids[-size:] == list(expected):
                return blank
        return ""

    def suffix(self, steps: Sequence[str], answer: str) -> Ids:
        """Return [end] + ids of every step's text + ids(answer text) + [eos]; the end marker as far as there is one."""
        (ids_of_steps,) = self.step_ids([steps])
        (ids_of_answer,) = self.answer_ids([answer])
        return self.join_suffix(ids_of_steps, ids_of_answer)

    def step_ids(self, solutions: Sequence[Sequence[str]]) -> list[list[Ids]]:
        """Encode every step of each solution, one by one, so that ids don't depend on their neighbours."""
        # Encode the steps of all solutions at once, and part them again.
        texts: list[str] = []
        for steps in solutions:
            for place, step in enumerate(steps):
                texts.append(self.step_text(step, place == 0))
        flat = iter(self._encode(texts))
        ids_of_solutions: list[list[Ids]] = []
        for steps in solutions:
            ids_of_steps = itertools.islice(flat, len(steps))
            ids_of_solutions.append(list(ids_of_steps))
        return ids_of_solutions

    def answer_ids(
        self, answers: Sequence[str], unknown: Counter[str] | None = None
    ) -> list[Ids]:
        """Encode each answer's text, without eos; `unknown` as for `prompts`."""
        texts = [self.answer_text(answer) for answer in answers]
        return self._encode(texts, unknown)

    def join_suffix(self, steps: Sequence[Ids], answer: Ids) -> Ids:
        """Return `suffix` from the ids of steps and answer."""
        tokens = itertools.chain(*steps)
        return [*self.closing_ids, *tokens, *answer, self.eos_id]

    def token(self, text: str) -> int:
        """Return the id of a text that is one token.

        Raises:
            UserError: the tokenizer splits it, or doesn't know it.
        """
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens = self.tokenizer.convert_ids_to_tokens(ids)
        pieces = ", ".join(map(repr, tokens))
        if len(ids) != 1:
            raise UserError(
                f"{text!r} is {len(ids)} tokens to this tokenizer ({pieces}); give a text that is one"
            )
        unknown = self.tokenizer.unk_token_id
        if ids[0] == unknown and unknown != self.eos_id:
            raise UserError(
                f"{text!r} is no token of this tokenizer; give a text that is one"
            )
        return ids[0]

    def distilled_position(self, ids: Ids, answer: str) -> int:
        """Return where CODI's distillation compares hidden states: at the token just before the answer itself.

        Args:
            ids: the answer's, from `answer_ids`.
            answer: the canonical answer, with which its text ends.
        Returns:
            the index in `ids` of the last token that holds none of the answer's characters: ":" for GPT-2, whose " 72"
            is one token, the lone " " where digits are tokens of their own.
        """
        sizes = [len(self.token_bytes[token]) for token in ids]
        begin = sum(sizes) - len(answer.encode())
        n_before = sum(end <= begin for end in accumulate(sizes))
        return n_before - 1

    @functools.cached_property
    def token_bytes(self) -> list[bytes]:
        """What each id writes; b"" for special tokens."""
        return token_bytes(self.tokenizer)

    @functools.cached_property
    def unknown_id(self) -> int | None:
        """What stands for what the tokenizer doesn't know; None where it can spell everything."""
        token = self.tokenizer.unk_token_id
        # GPT-2 calls its eos so, but every byte has a token
        return None if token == self.eos_id else token

    @functools.cached_property
    def _encoder(self) -> "_Encoder":
        file = self.tokenizer.backend_tokenizer.to_str()
        digest = hashlib.sha256(file.encode())
        return _Encoder(digest.digest(), self.tokenizer)

    def _encode(
        self,
        texts: list[str],
        unknown: Counter[str] | None = None,
        is_prompt: bool = False,
    ) -> list[Ids]:
        """Encode each text, into ids that nobody may change; prompts with the start marker.

        Special tokens are read in prompts alone, as transformers does.
        """
        # Most steps and answers of a set come many times.
        distinct = tuple(dict.fromkeys(texts))
        end: tuple[int, ...] = ()
        if is_prompt and self.start_id is not None:
            end = (self.start_id,)
        around = is_prompt and not self.bare
        encoded, unknown_words = _encode_texts(
            self._encoder,
            distinct,
            special=is_prompt,
            around=around,
            unknown=self.unknown_id,
            end=end,
        )
        for row, words in unknown_words.items():
            if unknown is None:
                raise UserError(
                    f"{distinct[row].strip()!r}: the tokenizer doesn't know {list_words(words)}; use words that it "
                    f"knows, or another {key_name('config.tokenizer')}"
                )
            unknown.update(words)
        by_text = dict(zip(distinct, encoded, strict=True))
        return [by_text[text] for text in texts]


@dataclass(frozen=True)
class _Encoder:
    """A tokenizer, which is another where its file would be."""

    digest: bytes
    tokenizer: "PreTrainedTokenizerFast" = field(compare=False)


@functools.lru_cache(maxsize=_KEPT)
def _encode_texts(
    encoder: _Encoder,
    texts: tuple[str, ...],
    special: bool,
    around: bool,
    unknown: int | None,
    end: tuple[int, ...],
) -> tuple[list[Ids], dict[int, list[str]]]:
    """Encode each text, and return by place the words of those that have some which the tokenizer doesn't know.

    A set's are needed where settings are chosen, and where it is trained on.

    Args:
        special: special tokens are read in them.
        around: the tokenizer puts its own around them.
        unknown: the id of words that it doesn't know, if there is one.
        end: ids that come after each.
    Raises:
        UserError: a text is none.
    """
    backend = encoder.tokenizer.backend_tokenizer
    encoded = list[Ids]()
    unknown_words = dict[int, list[str]]()
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = not special
    # What the library has of each text is large.
    for first in range(0, len(texts), _AT_ONCE):
        some = texts[first : first + _AT_ONCE]
        wrong = next(filter(_HALF.search, some), "")
        if wrong:
            raise UserError(
                f"{wrong.strip()!r}: has bytes that are no character; write it as UTF-8"
            )
        for row in backend.encode_batch_fast(some, add_special_tokens=around):
            encoded.append([*row.ids, *end])
    if unknown is None:
        return encoded, unknown_words

    # Name the words that the unknown token stands for.
    for place, ids in enumerate(encoded):
        if unknown in ids:
            text = texts[place]
            row = backend.encode(text, add_special_tokens=around)
            pairs = zip(row.ids, row.offsets, strict=True)
            words = []
            for token, (begin, after) in pairs:
                if token == unknown:
                    word = text[begin:after].strip(" ")
                    words.append(word or " ")
            unknown_words[place] = list(dict.fromkeys(words))
    return encoded, unknown_words


def written_texts(template: Template, problems: Iterable[Problem]) -> Iterator[str]:
    """Yield all texts that a template makes of problems."""
    for problem in problems:
        yield template.question_text(problem.question)
        yield template.answer_text(problem.answer)
        for step in problem.steps:
            yield template.step_text(step, True)
            yield template.step_text(step, False)


def list_words(words: Iterable[str], most: int = 5) -> str:
    """Write some of these words, for a message."""
    items = list(words)
    listed = ", ".join(map(repr, items[:most]))
    if len(items) > most:
        listed += f" and {len(items) - most} more"
    return listed


def token_texts(template: Template, rows: int) -> list[str]:
    """Return the text of each of the model's token ids; a special token's is its name, a padded row's is empty.

    Args:
        rows: of the model's vocabulary.
    """
    names = {}
    for name, index in template.tokenizer.get_vocab().items():
        names[index] = name
    pieces = enumerate(template.token_bytes)
    texts = []
    for index, piece in pieces:
        text = piece.decode("utf-8", "replace")
        texts.append(text or names.get(index, ""))
    n_padded = rows - len(texts)
    return texts + [""] * n_padded


def _literal(text: str) -> str:
    """Write a text in Jinja; "" for none."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def line(text: str) -> str:
    return text + "\n"
