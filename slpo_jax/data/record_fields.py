"""Layouts: what the fields of a record mean, in the forms that math data sets are published in."""

import functools
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

from slpo_jax.config.bounds import check_fields
from slpo_jax.data.cells import is_missing, listed, said, text_of, written
from slpo_jax.data.choices import choices_of, columns_of
from slpo_jax.data.edges import EDGES, ROLES, read_graph
from slpo_jax.data.problem import Reading
from slpo_jax.data.solutions import marked, measured_number, steps_of
from slpo_jax.errors import UserError
from slpo_jax.rewards.answers import canonical_number

# What DAPO's prompts have around the question.
_DAPO_PROMPT = re.compile(
    r"Solve the following math problem step by step\. The last line of your response should be of the form "
    r"Answer: \$Answer \(without quotes\) where \$Answer is the answer to the problem\.\s+(.*?)\s+"
    r'Remember to put your answer on its own line after "Answer:"\.\s*',
    re.DOTALL,
)

Record = Mapping[str, Any]


@dataclass(frozen=True)
class FieldsConfig:
    """The section `config.data.fields`: the names of a record's fields, where docs/data.md's table hasn't them.

    Sets other than the training data that lack such a field are read by the table.

    Attributes:
        question: the field with the question; "" is: find it. "edges": a graph's, see `data/edges.py`.
        answer: with the answer, or a worked solution.
        steps: with the steps: a list, or one text.
    """

    question: str = ""
    answer: str = ""
    steps: str = ""

    def __post_init__(self) -> None:
        check_fields(self)


FOUND = FieldsConfig()


class RawProblem(NamedTuple):
    """A record's problem, its answer as written.

    Attributes:
        question: the text as it stands, with its choices below it.
        steps: one text a reasoning step, where the record lists them.
        answer: what should be a number, LaTeX or a text; None where there is none.
        numeric: whether the layout promises numbers, so that another answer is a mistake in the record.
        solution: a text with the steps, where they aren't listed; "" for none. See `written_steps`.
    """

    question: str
    steps: tuple[str, ...]
    answer: str | None
    numeric: bool = True
    solution: str = ""


class _Layout(NamedTuple):
    """Two fields of records.

    Attributes:
        question, answer: their names; in a chat, the user's and the assistant's message.
        numeric: see `RawProblem`.
        worked: whether the answer comes with its solution, so that a text without a mark is none.
    """

    question: str
    answer: str
    numeric: bool = True
    worked: bool = False


# The first that fits is taken; then any of these questions with any of these answers.
_LAYOUTS = (
    _Layout("question", "answer"),
    _Layout("question", "final_ans"),
    _Layout("question", "final_answer", numeric=False),
    _Layout("question", "solution", numeric=False, worked=True),
    _Layout("question_concat", "Answer"),
    _Layout("Question", "Answer"),
    _Layout("instruction", "response"),
    _Layout("instruction", "output", numeric=False, worked=True),
    _Layout("query", "response", numeric=False, worked=True),
    _Layout("input", "target"),
    _Layout("input", "output", numeric=False, worked=True),
    _Layout("problem", "answer", numeric=False),
    _Layout("problem", "final_answer", numeric=False),
    _Layout("problem", "expected_answer", numeric=False),
    _Layout("problem", "solution", numeric=False, worked=True),
    _Layout("prompt", "answer", numeric=False),
    _Layout("prompt", "solution", numeric=False),
    _Layout("prompt", "reward_model", numeric=False),
    _Layout("prompt", "completion", numeric=False, worked=True),
    _Layout("messages", "messages", numeric=False, worked=True),
    _Layout("conversations", "conversations", numeric=False, worked=True),
)
_QUESTIONS = tuple(dict.fromkeys([*(each.question for each in _LAYOUTS), "question_stem"]))
_LABELS = ("answerKey", "correct", "correct_answer", "correct_option", "answer_idx", "cop")  # of choices
_ANSWERS = tuple(dict.fromkeys([*(each.answer for each in _LAYOUTS), *_LABELS, "label", "ground_truth"]))
_WORKED = tuple(dict.fromkeys(each.answer for each in _LAYOUTS if each.worked))

# Fields that are a part of the question, before or after the one that is named so.
_STORY = ("context", "Context", "passage", "body", "Body")
_BEFORE = {"question": _STORY, "Question": _STORY}
_AFTER = {"instruction": ("input",)}
# Where steps are looked for; in the first three nothing else may be.
_STEPS = ("steps", "cot", "rationale", "reasoning", "chain_of_thought", "explanation", "thought", "thoughts")
_USUAL = {*_QUESTIONS, *_ANSWERS, *_STORY, *_STEPS, "choices", "options"}
# Where the answer is, if it isn't in the worked solution of its layout.
_BESIDE = ("answer", "Answer", "final_answer", "expected_answer", "ground_truth", "reward_model")
_EMPTY: tuple[Any, ...] = (None, "", [])


def read_record(
    where: str,
    record: Record,
    fields: FieldsConfig = FOUND,
    strict: bool = True,
    reading: Reading | None = None,
) -> RawProblem:
    """Read a record in the first of the layouts both of whose fields it has, and has something in.

    Args:
        where: file and line, or data set, split and row, for messages.
        record: fields by name. Numbers are texts (`file_rows.Rounded` for those of 64 bits and less), ints or Decimals.
        fields: names that are given.
        strict: whether a record has to have them; otherwise one that doesn't is read without.
        reading: is told which fields are used.
    Returns:
        the problem.
    Raises:
        UserError: a field is missing or has the wrong type.
    """
    for key in ("question", "answer"):
        name = getattr(fields, key)
        if name and name not in record:
            if not strict and _layout(record, FOUND):
                return read_record(where, record, reading=reading)
            raise unknown_field(where, record, key, name)
    if fields.question == EDGES:
        reading = reading or Reading()
        reading.see(record)
        for role, names in ROLES.items():
            reading.note(role, names)
        return RawProblem(*read_graph(where, record))
    given, record = record, _without_missing(_with_usual_names(record), fields.answer)
    layout = _layout(record, fields)
    if layout is None:
        missing = "answer" if fields.question or any(name in record for name in _QUESTIONS) else "question"
        raise UserError(
            f"{where}: field '{missing}' is missing, only {_names(given)} are there; rename the one that holds it to "
            f"{missing}, or name it with config.data.fields.{missing}"
        )
    reading = reading or Reading()
    reading.see({name: record[name] for name in given})
    others = _BESIDE if layout.worked and not fields.answer else ()
    beside, answer_field = next((name for name in others if record.get(name) is not None), None), layout.answer
    solution, answer = _answer(where, record, layout, needed=beside is None)
    if answer is None and beside:
        told, answer = _answer(where, record, layout._replace(answer=beside, worked=False))
        solution, answer_field = solution or told, beside
    if answer is None:
        solution = ""
    question, choices = _question(where, record, layout, reading), choices_of(where, record, answer)
    if choices:
        question = choices.below(question)
        answer = choices.answer(where, answer) if answer and answer.strip() else None
        reading.note("choices", choices.fields)
    reading.note("answer", [answer_field])
    steps, text = _steps(where, record, fields.steps, reading)
    worked = record.get("solution")
    if not text and not steps and layout.answer != "solution" and isinstance(worked, str) and not is_missing(worked):
        text = _without_mark(text_of(where, record, "solution"))
        reading.note("steps", ["solution"])
    if not text and not steps and solution:
        reading.note("steps", [layout.answer])
    return RawProblem(question, steps, answer, layout.numeric, text or solution)


def _with_usual_names(record: Record) -> Record:
    """The record, in which a field of a usual name may be written with capitals or blanks around it."""
    others = {name: str(name).strip().lower() for name in record if name not in _USUAL}
    usual = {new: record[name] for name, new in others.items() if new != name and new in _USUAL and new not in record}
    return {**record, **usual} if usual else record


def _without_missing(record: Record, answer: str) -> Record:
    """The record, in which what is missing is None; "None" may be an answer or a choice."""
    exact = {*_ANSWERS, answer, *columns_of(tuple(record)).values()}
    return {name: None if is_missing(value, name not in exact) else value for name, value in record.items()}


def _layout(record: Record, fields: FieldsConfig) -> _Layout | None:
    """The fields of the question and the answer, None where one isn't known."""
    layouts = _layouts(fields)
    full = (each for each in layouts if record.get(each.question) is not None and record.get(each.answer) is not None)
    return next(full, None) or next((each for each in layouts if {each.question, each.answer} <= record.keys()), None)


@functools.cache
def _layouts(fields: FieldsConfig) -> tuple[_Layout, ...]:
    """Those of the table that have the fields that are named, then any others that do."""
    known = [each for each in _LAYOUTS if fields.question in ("", each.question) and fields.answer in ("", each.answer)]
    questions = [fields.question] if fields.question else _QUESTIONS
    answers = [fields.answer] if fields.answer else _ANSWERS
    others = [
        _Layout(question, answer, numeric=answer not in _WORKED, worked=not fields.answer and answer in _WORKED)
        for question, answer in itertools.product(questions, answers)
    ]
    return (*known, *others)


def answer_field(record: Record, fields: FieldsConfig) -> str | None:
    """Where a record has its answer, None where that isn't known."""
    layout = _layout(record, fields)
    return layout and layout.answer


def unknown_field(where: str, record: Record, key: str, name: str) -> UserError:
    """The error of a field that `config.data.fields` names and a record hasn't."""
    return UserError(
        f"{where}: has no field {name!r} (config.data.fields.{key}), only {_names(record)}; give one of these"
    )


def _names(record: Record) -> str:
    names = ", ".join(map(str, record))
    return names if len(names) <= 120 else f"{names[:117]}..."


def _question(where: str, record: Record, layout: _Layout, reading: Reading) -> str:
    field = layout.question
    text = said(where, record, field, "user", chat=field == layout.answer)
    around = [name for name in (*_BEFORE.get(field, ()), *_AFTER.get(field, ())) if record.get(name)]
    reading.note("question", [field, *around])
    if field == "prompt":
        # Without the set's own instruction, which asks for another form of the answer than the reader's.
        match = _DAPO_PROMPT.fullmatch(text)
        return match[1] if match else text
    before, after = (
        [text_of(where, record, name) for name in around.get(field, ()) if record.get(name)]
        for around in (_BEFORE, _AFTER)
    )
    return "\n".join(filter(str.strip, [" ".join([*before, text]), *after]))


def _answer(where: str, record: Record, layout: _Layout, needed: bool = True) -> tuple[str, str | None]:
    """The solution that the answer stands in, "" for none, and the answer; `needed` as in `said`."""
    value, field = record[layout.answer], layout.answer
    if field == "reward_model" and value is not None:
        value = written(value) if isinstance(value, str) else value
        if not isinstance(value, Mapping) or "ground_truth" not in value:
            raise UserError(f"{where}: field 'reward_model' has no ground_truth; write {{\"ground_truth\": ANSWER}}")
        field, value = "reward_model.ground_truth", value["ground_truth"]
    if is_missing(value, words=False):
        return "", None
    if isinstance(value, int | Decimal):  # True and False are answers of ProntoQA
        return "", str(value)
    solution, answer = marked(said(where, {field: value}, field, "assistant", needed=needed))
    if answer is None:
        is_answer = not layout.worked or canonical_number(solution) or measured_number(solution)
        return ("", solution) if is_answer else (solution, None)
    return solution, answer


def _steps(where: str, record: Record, named: str, reading: Reading) -> tuple[tuple[str, ...], str]:
    """The steps that are listed, and else a text that has them. A column that arrow filled with nulls is as none."""
    for field in [named] if named else _STEPS:
        value = record.get(field)
        if isinstance(value, str):
            value = listed(where, record, field)
        if isinstance(value, list):
            value = steps_of(value)
        if isinstance(value, list) and value and all(isinstance(step, str) for step in value):
            reading.note("steps", [field])
            return tuple(value), ""
        if isinstance(value, str) and (text := _without_mark(value)):
            reading.note("steps", [field])
            return (), text
        if value not in _EMPTY and not isinstance(value, str) and field in (named, *_STEPS[:3]):
            raise UserError(
                f"{where}: field '{field}' is neither texts nor a text; write [\"<<1+2=3>>\", ...] or leave it out"
            )
    return (), ""


def _without_mark(text: str) -> str:
    """A solution without its answer's mark; "" for what is none, but a number."""
    return marked(text)[0] if text.strip() and not canonical_number(text) else ""
