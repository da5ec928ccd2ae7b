"""What the fields of a record mean, by the names that they have in published data sets."""

import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np

from slpo_jax.data.choices import (
    CHOICE_FIELDS,
    RIGHT_ANSWERS,
    WRONG_ANSWERS,
    Choices,
    Counted,
    choices_of,
    choices_with_wrong,
    is_column,
)
from slpo_jax.data.problem import NO_COLUMNS, FieldUse, shown
from slpo_jax.data.record_texts import (
    CHATS,
    Number,
    is_missing,
    is_number,
    listed,
    marked,
    message_of,
    only_one,
    steps_of,
    text_of,
    written,
)
from slpo_jax.errors import UserError, in_a_line
from slpo_jax.rewards.answers import canonical_number
from slpo_jax.rewards.texts import bare
from slpo_jax.settings import Checked, setting

Record = Mapping[str, Any]


@dataclass(frozen=True)
class FieldsConfig(Checked):
    """The section `config.data.fields`: the names of a record's fields, where docs/data.md's table hasn't them.

    Sets other than the training data that lack such a field are read by the table.

    Attributes:
        question: the field with the question; "" is: find it. "edges": a graph's, see `data/record_fields.py`.
        answer: the field with the answer, or with a worked solution; "" is: find it.
        steps: the field with the steps, a list or one text; "" is: find it.
        choices: the field with the choices, a list or texts by label; "" is: find it.
        first_choice: the index of the first choice where answers are indices, 0 or 1; "" is: find it.
    """

    question: str = ""
    answer: str = ""
    steps: str = ""
    choices: str = ""
    first_choice: Counted = setting("", note="as a text")


FOUND = FieldsConfig()


class Wanted(NamedTuple):
    """The demands on a source's records.

    Attributes:
        fields: names that are given.
        strict: whether a record has to have them; otherwise one that doesn't is read without.
        columns: that are kept beside, by name; None is all.
        unanswered: whether a record need not have an answer.
    """

    fields: FieldsConfig
    strict: bool
    columns: frozenset[str] | None
    unanswered: bool


class RawProblem(NamedTuple):
    """A record's problem, its answer as written.

    Attributes:
        where: the record is, for messages.
        question: the text as it stands, with its choices below it.
        steps: one text a reasoning step, where the record lists them.
        answer: what should be a number, LaTeX or a text; None where there is none.
        solution: a text with the steps, where they aren't listed; "" for none. See `written_steps`.
        choices: of the question.
        is_number: whether the record has the answer as a number, and not as a text that writes one.
        columns: of the record, that are kept as they are.
    """

    where: str
    question: str
    steps: tuple[str, ...]
    answer: str | None
    solution: str = ""
    choices: Choices | None = None
    is_number: bool = False
    columns: Mapping[str, Any] = NO_COLUMNS


# Names in lower case; the first that has something in it is taken. Worked solutions come after answers alone.
_QUESTIONS = ("question_concat", "question", "problem", "query", "instruction", "input", "prompt", "question_stem",
              *CHATS)  # fmt: skip
_WORKED = ("solution", "response", "output", "completion", *CHATS)
_ANSWERS = ("answer", "final_answer", "final_ans", "expected_answer", "answerkey", *RIGHT_ANSWERS, "correct_option",
            "correct", "answer_idx", "cop", "target", "ground_truth", "reward_model", *_WORKED, "label")  # fmt: skip
# In the others a worked solution may stand too.
_ALONE = set(_ANSWERS) - {"answer", *_WORKED}
_TARGETS = ("target", "label")  # which may be what a verifier goes by, as that of a number puzzle
# Parts of the question, before or after the field that is named so.
_BEFORE = {"question": ("context", "passage", "body")}
_AFTER = {"instruction": ("input",)}
# Where steps are looked for; in the first three nothing else may be.
_STEPS = ("steps", "cot", "rationale", "reasoning", "chain_of_thought", "explanation", "thought")


_KNOWN = {
    *_QUESTIONS,
    *_ANSWERS,
    *_STEPS,
    *CHOICE_FIELDS,
    *itertools.chain(*_BEFORE.values(), *_AFTER.values(), *WRONG_ANSWERS),
}


def is_known(name: str) -> bool:
    """Tell whether a field would be read as a part of the problem, so that it is no mere column."""
    return name.strip().lower() in _KNOWN or is_column(name)


def read_record(where: str, record: Record, wanted: Wanted, field_use: FieldUse) -> RawProblem:
    """Read a record by the names of its fields.

    Args:
        where: file and line, or data set, split and row, for messages.
        record: fields by name. Numbers are texts, ints or Decimals.
        wanted: of it; what may be a column that a reward asks for is no answer where it need not have one.
        field_use: is told which fields are used.
    Returns:
        the problem, without its columns.
    Raises:
        UserError: a field is missing or has the wrong type.
    """
    fields, strict, columns, unanswered = wanted
    if fields.question == EDGES and (strict or EDGES in record):
        field_use.see(record)
        for role, names in ROLES.items():
            field_use.note(role, names)
        return RawProblem(where, *read_graph(where, record))
    record = {
        name: None if is_missing(value) and not (value == "-" and is_column(name)) else value
        for name, value in record.items()
    }
    field_use.see(record)
    original, record = record, {str(name).strip().lower(): value for name, value in record.items()} | record
    named_question = fields.question if strict or fields.question in original else ""
    if named_question and named_question not in original:
        raise unknown_field(where, original, "question", named_question)
    question_field = _first_field(record, [named_question] if named_question else _QUESTIONS)
    if question_field is None:
        raise _missing_field(where, original, "question")
    named_answer = fields.answer if strict or fields.answer in original else ""
    if unanswered and not named_answer:
        record = {name: value for name, value in record.items() if not (name in _TARGETS and name in (columns or ()))}
    # A record may lack its answer, as a cell of a table may be empty; see `no_answer_field` on those that all do.
    answer_field = _first_field(record, [named_answer] if named_answer else _ANSWERS)
    solution, answer = ("", None) if answer_field is None else _answer(where, record, answer_field)
    if strict and fields.choices and fields.choices not in original:
        raise unknown_field(where, original, "choices", fields.choices)
    question = _question(where, record, question_field, field_use)
    choices = choices_of(where, record, fields.choices if fields.choices in original else "")
    if choices is None and answer and answer_field in RIGHT_ANSWERS:
        choices, answer = choices_with_wrong(record, question, answer) or (None, answer)
    if choices:
        question = choices.below(question)
        field_use.note("choices", choices.fields)
    if answer_field is not None:
        field_use.note("answer", [answer_field])
    steps, text = _steps(where, record, fields.steps, field_use)
    if not text and not steps:
        texts = {answer_field or "": solution}
        for field in _WORKED:
            if record.get(field) is not None and field != answer_field:
                texts[field] = _without_mark(message_of(where, record, field, "assistant", needed=False))
        field, text = next(((field, text) for field, text in texts.items() if text.strip()), ("", ""))
        if text:
            field_use.note("steps", [field])
    has_number = answer_field is not None and is_number(record[answer_field])
    return RawProblem(where, question, steps, answer, text, choices, has_number)


def _first_field(record: Record, names: Sequence[str]) -> str | None:
    """Return the first of these fields that has something in it, else the first that is there, else None."""
    present = [name for name in names if name in record]
    filled = [name for name in present if record[name] is not None]
    return next(iter(filled or present), None)


def no_answer_field(where: str, record: Record, fields: FieldsConfig) -> UserError:
    """Make the error of records of which not one has a field with an answer.

    Args:
        where, record: the first of them.
        fields: names that are given.
    """
    if fields.answer and fields.answer not in record:
        return unknown_field(where, record, "answer", fields.answer)
    return _missing_field(where, record, "answer")


def _missing_field(where: str, record: Record, key: str) -> UserError:
    """Make the error of a record without a field of the question or the answer."""
    remedy = f"rename the one that holds it to {key}, or name it with config.data.fields.{key}"
    names = {str(name).strip().lower() for name in record}
    if any(isinstance(value, list) and value and isinstance(value[0], Mapping) for value in record.values()):
        remedy += ", or give the list of records alone where one of them holds that"
    elif not {*_QUESTIONS, *_ANSWERS} & names:
        remedy += ", or begin a table with a line of names"
    return UserError(f"{where}: field '{key}' is missing, only {shown(record)} are there; {remedy}")


def unknown_field(where: str, record: Record, key: str, name: str) -> UserError:
    """Make the error of a field that `config.data.fields` names and a record hasn't."""
    return UserError(
        f"{where}: has no field {name!r} (config.data.fields.{key}), only {shown(record)}; give one of these"
    )


def _question(where: str, record: Record, field: str, field_use: FieldUse) -> str:
    before, after = ([name for name in around.get(field, ()) if record.get(name)] for around in (_BEFORE, _AFTER))
    field_use.note("question", [field, *before, *after])
    texts = [text_of(where, record, name) for name in before] + [message_of(where, record, field, "user")]
    return "\n".join(filter(str.strip, [" ".join(texts), *(text_of(where, record, name) for name in after)]))


def _answer(where: str, record: Record, field: str) -> tuple[str, str | None]:
    """Return the solution that the answer stands in, "" for none, and the answer."""
    value = record[field]
    if field == "reward_model" and value is not None:
        value = written(value) if isinstance(value, str) else value
        if not isinstance(value, Mapping) or "ground_truth" not in value:
            raise UserError(f"{where}: field 'reward_model' has no ground_truth; write {{\"ground_truth\": ANSWER}}")
        value = value["ground_truth"]
    value = only_one(value)
    if is_missing(value):
        return "", None
    if isinstance(value, int | Decimal | Number):  # True and False are answers of ProntoQA
        return "", canonical_number(str(value)) or str(value)
    text = message_of(where, {field: value}, field, "assistant")
    solution, answer = marked(text)
    if answer == "" and field in _ALONE:  # a text over several lines
        return "", text
    return ("", bare(text)) if answer is None else (solution, answer or None)


def _steps(where: str, record: Record, chosen: str, field_use: FieldUse) -> tuple[tuple[str, ...], str]:
    """Return the steps that are listed, else a text that has them. A column that arrow filled with nulls is as none."""
    for field in [chosen] if chosen else _STEPS:
        value = record.get(field)
        if isinstance(value, str):
            value = listed(where, record, field)
        if isinstance(value, list):
            value = steps_of(value)
        if isinstance(value, list) and value and all(isinstance(step, str) for step in value):
            field_use.note("steps", [field])
            return tuple(value), ""
        if isinstance(value, str) and (text := _without_mark(value)):
            field_use.note("steps", [field])
            return (), text
        if value and not isinstance(value, str) and field in (chosen, *_STEPS[:3]):
            raise UserError(
                f"{where}: field '{field}' is neither texts nor a text; write [\"<<1+2=3>>\", ...] or leave it out"
            )
    return (), ""


def _without_mark(text: str) -> str:
    """Return a solution without its answer's mark; "" for what is none, but a number."""
    return marked(text)[0] if text.strip() and not canonical_number(text) else ""


EDGES = "edges"
"""The field, by which `config.data.fields.question` asks for this layout."""
BAR, ASKED, ROOT = "|", "[Q]", "[R]"
_NODES = ("target", "neg_target", "root")
_LAYERS = "neighbor_k"
ROLES = {"question": (EDGES, *_NODES), "answer": ("target",), "steps": (_LAYERS,)}
"""The fields by what is made of them."""


def read_graph(where: str, record: Mapping[str, Any]) -> tuple[str, tuple[str, ...], str]:
    """Return a record's question, steps and answer.

    Args:
        where: file and record, for messages.
        record: with edges, [[FROM, TO], ..]; target, neg_target and root, nodes; neighbor_k, by "1", "2", .. the nodes
            that are so many edges from root on a shortest way to target.
    Returns:
        the question; of each distance its nodes, in one text; the target.
    Raises:
        UserError: a field is missing or holds something else.
    """

    try:
        edges = [f"{int(begin)} {int(end)}" for begin, end in record[EDGES]]
        target, other, root = (str(int(record[field])) for field in _NODES)
        layers: Any = record[_LAYERS]
        # 0 may be there, root itself.
        distances = [layers[str(k)] for k in range(1, len(layers) + 1) if layers.get(str(k))]
        steps = tuple(" ".join(str(int(node)) for node in layer) for layer in distances)
        if not edges or target not in steps[-1].split():
            raise ValueError("target is in no layer")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{where}: is no graph ({in_a_line(error)}); write edges [[0, 2], ..], target, neg_target and root, and "
            'neighbor_k {"1": [9, 5], .., "4": [TARGET]}, or leave out config.data.fields'
        ) from None
    rng = np.random.default_rng(zlib.crc32(" ".join([*edges, target, other, root]).encode()))
    edges = [edges[place] for place in rng.permutation(len(edges))]
    first, second = (target, other) if rng.random() < 0.5 else (other, target)
    question = f"{f' {BAR} '.join(edges)} {ASKED} {first} {second} {ROOT} {root}"
    return question, steps, target
