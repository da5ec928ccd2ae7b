"""Records become problems by the names of their fields, of which `layouts` has the table."""

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np

from slpo_jax.data.choices import (
    Choices,
    FirstChoice,
    choices_with_wrong,
    read_choices,
)
from slpo_jax.data.layouts import (
    AFTER_QUESTION,
    ANSWERS_ALONE,
    BEFORE_QUESTION,
    FIELD_NAMES,
    RIGHT_ANSWERS,
    STEPS_ALONE,
    VERIFIER_TARGETS,
    WORKED_SOLUTIONS,
    match_choice_column,
)
from slpo_jax.data.problem import NO_COLUMNS, FieldUse, list_fields
from slpo_jax.data.record_texts import (
    Number,
    is_missing,
    is_number,
    message_of,
    only_one,
    parse_listed,
    parse_written,
    split_mark,
    steps_of,
    text_of,
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
        question: the field with the question; "" is: by the table. "edges": a graph's, see `data/record_fields.py`.
        answer: the field with the answer, or with a worked solution; "" is: by the table.
        steps: the field with the steps, a list or one text; "" is: by the table.
        choices: the field with the choices, a list or texts by label; "" is: by the table.
        first_choice: the index of the first choice where answers are indices, 0 or 1; "" is: as the set's fields say.
    """

    question: str = ""
    answer: str = ""
    steps: str = ""
    choices: str = ""
    first_choice: FirstChoice = setting("", note="as a text")


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
        answer: what should be a number, LaTeX or a text, of choices the label or the text; None where there is none.
        solution: a text with the steps, where they aren't listed; "" for none. See `written_steps`.
        columns: of the record, that are kept as they are.
    """

    where: str
    question: str
    steps: tuple[str, ...]
    answer: str | None
    solution: str = ""
    columns: Mapping[str, Any] = NO_COLUMNS


def read_record(
    where: str, record: Record, wanted: Wanted, field_use: FieldUse
) -> RawProblem:
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
    fields = wanted.fields
    if fields.question == EDGES and (wanted.strict or EDGES in record):
        field_use.see(record)
        for role, names in ROLES.items():
            field_use.note(role, names)
        return RawProblem(where, *read_graph(where, record))

    # Missing values become None, and the table's names, in lower case, are found however they are written.
    original = _without_missing(record)
    field_use.see(original)
    record = {}
    for name, value in original.items():
        record[str(name).strip().lower()] = value
    record.update(original)

    # Find the question's field.
    question_names = [*FIELD_NAMES["question"]]
    if fields.question and (wanted.strict or fields.question in original):
        question_names = [fields.question]
        _check_has(where, original, "question", fields.question)
    question_field = _first_field(record, question_names)
    if question_field is None:
        raise _missing_field(where, original, "question")

    # Find the answer's field, and the solution that the answer stands in. A record may lack it, as a cell of a table
    # may be empty; `no_answer_field` is for records that all do.
    answer_names = [*FIELD_NAMES["answer"]]
    if fields.answer and (wanted.strict or fields.answer in original):
        answer_names = [fields.answer]
    elif wanted.unanswered:
        for_reward = {*VERIFIER_TARGETS} & {*(wanted.columns or ())}
        answer_names = [name for name in answer_names if name not in for_reward]
    answer_field = _first_field(record, answer_names)
    solution = ""
    answer = None
    if answer_field is not None:
        solution, answer = _read_answer(where, record, answer_field)

    # Write the choices below the question. The answer becomes a label, or a choice's text.
    if wanted.strict and fields.choices:
        _check_has(where, original, "choices", fields.choices)
    question = _read_question(where, record, question_field, field_use)
    named_choices = fields.choices if fields.choices in original else ""
    choices = read_choices(where, record, named_choices)
    if choices is None and answer and answer_field in RIGHT_ANSWERS:
        with_wrong = choices_with_wrong(record, question, answer)
        if with_wrong:
            choices, answer = with_wrong
    if choices:
        question = choices.format_under(question)
        field_use.note("choices", choices.fields)
        as_number = answer_field is not None and is_number(record[answer_field])
        answer = _choose(where, choices, answer, as_number, fields, field_use)
    if answer_field is not None:
        field_use.note("answer", [answer_field])

    # Find the steps: in a field of their own, else in the solution of the answer, else in another worked solution.
    steps, text = _read_steps(where, record, fields.steps, field_use)
    if not text and not steps:
        texts = {answer_field or "": solution}
        for field in WORKED_SOLUTIONS:
            if record.get(field) is not None and field != answer_field:
                message = message_of(where, record, field, "assistant", needed=False)
                texts[field] = _without_mark(message)
        for field, solution in texts.items():
            if solution.strip():
                text = solution
                field_use.note("steps", [field])
                break
    return RawProblem(where, question, steps, answer, text)


def _without_missing(record: Record) -> dict[str, Any]:
    """Replace missing values by None. A dash may be a choice."""
    cells: dict[str, Any] = {}
    for name, value in record.items():
        may_be_choice = value == "-" and match_choice_column(name) is not None
        if is_missing(value) and not may_be_choice:
            value = None
        cells[name] = value
    return cells


def _first_field(record: Record, names: Iterable[str]) -> str | None:
    """Return the first of these fields that has something in it, else the first that is there, else None."""
    first = None
    for name in names:
        if name not in record:
            continue
        if record[name] is not None:
            return name
        first = first or name
    return first


def _choose(
    where: str,
    choices: Choices,
    answer: str | None,
    is_number: bool,
    fields: FieldsConfig,
    field_use: FieldUse,
) -> str | None:
    """Return the label or the text of the choice that an answer stands for, None without an answer."""
    if answer is None or not answer.strip():
        return None
    first_choice = fields.first_choice
    chosen, first = choices.stands_for(where, answer, is_number, first_choice)
    if first is not None:
        field_use.details["answer"] = f"an index from {first}"
    return chosen


def no_answer_field(where: str, record: Record, fields: FieldsConfig) -> UserError:
    """Make the error of records of which not one has a field with an answer.

    Args:
        where: the first record.
        record: the first record.
        fields: names that are given.
    """
    if fields.answer and fields.answer not in record:
        return unknown_field(where, record, "answer", fields.answer)
    return _missing_field(where, record, "answer")


def _missing_field(where: str, record: Record, key: str) -> UserError:
    """Make the error of a record without a field of the question or the answer."""
    remedy = (
        f"name the one that holds it, --config.data.fields.{key}=NAME, or rename it"
    )
    names = {str(name).strip().lower() for name in record}
    known = {*FIELD_NAMES["question"], *FIELD_NAMES["answer"]}
    holds_records = any(_is_list_of_records(value) for value in record.values())
    if holds_records:
        remedy += ", or give the list of records alone where one of them holds that"
    elif names.isdisjoint(known):
        remedy += ", or begin a table with a line of names"
    fields = list_fields(record)
    return UserError(
        f"{where}: field '{key}' is missing, only {fields} are there; {remedy}"
    )


def _is_list_of_records(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return isinstance(value[0], Mapping)


def unknown_field(where: str, record: Record, key: str, name: str) -> UserError:
    """Make the error of a field that `config.data.fields` names and a record hasn't."""
    return UserError(
        f"{where}: has no field {name!r} (config.data.fields.{key}), only {list_fields(record)}; give one of these"
    )


def _check_has(where: str, record: Record, key: str, name: str) -> None:
    """Refuse a record that lacks a field that is named."""
    if name not in record:
        raise unknown_field(where, record, key, name)


def _read_question(where: str, record: Record, field: str, field_use: FieldUse) -> str:
    """Return the question with the parts that stand before and after it in fields of their own."""
    before = []
    for name in BEFORE_QUESTION.get(field, ()):
        if record.get(name):
            before.append(name)
    after = []
    for name in AFTER_QUESTION.get(field, ()):
        if record.get(name):
            after.append(name)
    field_use.note("question", [field, *before, *after])

    # What stands before is on the question's line, what stands after on lines of its own.
    parts = [text_of(where, record, name) for name in before]
    parts.append(message_of(where, record, field, "user"))
    lines = [" ".join(parts)]
    for name in after:
        lines.append(text_of(where, record, name))
    filled = [line for line in lines if line.strip()]
    return "\n".join(filled)


def _read_answer(where: str, record: Record, field: str) -> tuple[str, str | None]:
    """Return the solution that the answer stands in, "" for none, and the answer."""
    value = record[field]
    if field == "reward_model" and value is not None:
        if isinstance(value, str):
            value = parse_written(value)
        if not isinstance(value, Mapping) or "ground_truth" not in value:
            raise UserError(
                f"{where}: field 'reward_model' has no ground_truth; write {{\"ground_truth\": ANSWER}}"
            )
        value = value["ground_truth"]
    value = only_one(value)
    if is_missing(value):
        return "", None
    # True and False, ints too, are answers of ProntoQA.
    if isinstance(value, int | Decimal | Number):
        written = str(value)
        return "", canonical_number(written) or written

    text = message_of(where, {field: value}, field, "assistant")
    solution, answer = split_mark(text)
    if answer is None:
        return "", bare(text)
    # Several lines without a mark are the answer of a field that holds nothing else.
    if answer == "" and field in ANSWERS_ALONE:
        return "", text
    return solution, answer or None


def _read_steps(
    where: str, record: Record, chosen: str, field_use: FieldUse
) -> tuple[tuple[str, ...], str]:
    """Return the steps that are listed, else a text that has them. A column that arrow filled with nulls is as none."""
    names: Iterable[str] = [chosen] if chosen else FIELD_NAMES["steps"]
    for field in names:
        value = record.get(field)
        if isinstance(value, str):
            value = parse_listed(where, record, field)
        if isinstance(value, str):
            text = _without_mark(value)
            if text:
                field_use.note("steps", [field])
                return (), text
            continue
        if isinstance(value, list):
            value = steps_of(value)
            if value and all(isinstance(step, str) for step in value):
                field_use.note("steps", [field])
                return tuple(value), ""
        if value and (field == chosen or field in STEPS_ALONE):
            raise UserError(
                f"{where}: field '{field}' is neither texts nor a text; write [\"<<1+2=3>>\", …] or leave it out"
            )
    return (), ""


def _without_mark(text: str) -> str:
    """Return a solution without its answer's mark; "" for what is none, but a number."""
    if not text.strip() or canonical_number(text):
        return ""
    solution, _ = split_mark(text)
    return solution


EDGES = "edges"
"""The field, by which `config.data.fields.question` asks for this layout."""
BAR = "|"
ASKED = "[Q]"
ROOT = "[R]"
_NODES = ("target", "neg_target", "root")
_LAYERS = "neighbor_k"
ROLES = {"question": (EDGES, *_NODES), "answer": ("target",), "steps": (_LAYERS,)}
"""The fields by what is made of them."""


def read_graph(
    where: str, record: Mapping[str, Any]
) -> tuple[str, tuple[str, ...], str]:
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
        edges = []
        for begin, end in record[EDGES]:
            edges.append(f"{int(begin)} {int(end)}")
        three_nodes = [str(int(record[field])) for field in _NODES]
        target, other, root = three_nodes
        layers: Any = record[_LAYERS]
        # A layer 0 may be there, which is root itself.
        steps: list[str] = []
        for distance in range(1, len(layers) + 1):
            layer = layers.get(str(distance))
            if layer:
                nodes = [str(int(node)) for node in layer]
                steps.append(" ".join(nodes))
        if not edges or target not in steps[-1].split():
            raise ValueError("target is in no layer")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{where}: is no graph ({in_a_line(error)}); write edges [[0, 2], …], target, neg_target and root, and "
            'neighbor_k {"1": [9, 5], …, "4": [TARGET]}, or leave out config.data.fields'
        ) from None

    # Neither the order of the edges nor that of the two ends says which end is reached.
    content = " ".join([*edges, target, other, root])
    seed = zlib.crc32(content.encode())
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(edges))
    shuffled = [edges[place] for place in order]
    told = f" {BAR} ".join(shuffled)
    ends = f"{target} {other}"
    if rng.random() >= 0.5:
        ends = f"{other} {target}"
    question = f"{told} {ASKED} {ends} {ROOT} {root}"
    return question, tuple(steps), target
