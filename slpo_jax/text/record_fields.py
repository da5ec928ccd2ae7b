"""Layouts: what the fields of a record mean, in the forms that math data sets are published in."""

import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from slpo_jax.errors import UserError
from slpo_jax.text.answers import last_boxed

_ANNOTATION = re.compile(r"<<.*?>>", re.DOTALL)
_STEP_PIECE = re.compile(r"<<.*?>>|\S+", re.DOTALL)
# What DAPO's prompts have around the question.
_DAPO_PROMPT = re.compile(
    r"Solve the following math problem step by step\. The last line of your response should be of the form "
    r"Answer: \$Answer \(without quotes\) where \$Answer is the answer to the problem\.\s+(.*?)\s+"
    r'Remember to put your answer on its own line after "Answer:"\.\s*',
    re.DOTALL,
)

Record = Mapping[str, Any]


class RawProblem(NamedTuple):
    """A record's problem, its answer as written.

    Attributes:
        question: the text as it stands.
        steps: one text a reasoning step.
        answer: what should be a number, or LaTeX.
        numeric: whether the layout promises numbers, so that another answer is a mistake in the record.
    """

    question: str
    steps: tuple[str, ...]
    answer: str
    numeric: bool = True


def read_record(where: str, record: Record) -> RawProblem:
    """Read a record in the first of the layouts all of whose fields it has.

    Args:
        where: file and line, or data set, split and row, for messages.
        record: fields by name. Numbers are texts, ints, floats (whose shortest decimal that reads back is taken) or
            Decimals.
    Returns:
        the problem.
    Raises:
        UserError: a field is missing or has the wrong type.
    """
    for fields, read in _LAYOUTS:
        if all(field in record for field in fields):
            return read(where, record)
    nearest = max((fields for fields, _ in _LAYOUTS), key=lambda fields: sum(field in record for field in fields))
    missing = next(field for field in nearest if field not in record)
    known = "; ".join(" + ".join(fields) for fields, _ in _LAYOUTS)
    raise UserError(f"{where}: field '{missing}' is missing; the known layouts are {known}")


def _question_answer(where: str, record: Record) -> RawProblem:
    question, answer = _text(where, record, "question"), _number(where, record, "answer")
    if "####" in answer:  # GSM8K's worked solution
        solution, _, answer = answer.rpartition("####")
        return RawProblem(question, tuple(_ANNOTATION.findall(solution)), answer.strip())
    return RawProblem(question, _steps(where, record), answer)


def _multiarith(where: str, record: Record) -> RawProblem:
    return RawProblem(_text(where, record, "question"), (), _number(where, record, "final_ans"))


def _svamp(where: str, record: Record) -> RawProblem:
    return RawProblem(_text(where, record, "question_concat"), (), _number(where, record, "Answer"))


def _svamp_raw(where: str, record: Record) -> RawProblem:
    question = f"{_text(where, record, 'Body')} {_text(where, record, 'Question')}"
    return RawProblem(question, (), _number(where, record, "Answer"))


def _gsm_hard(where: str, record: Record) -> RawProblem:
    return RawProblem(_text(where, record, "instruction"), (), _number(where, record, "response"))


def _math(where: str, record: Record) -> RawProblem:
    question = _text(where, record, "problem")
    if record.get("answer") is not None:
        return RawProblem(question, (), _number(where, record, "answer"), numeric=False)
    return RawProblem(question, (), last_boxed(_text(where, record, "solution")), numeric=False)


def _dapo(where: str, record: Record) -> RawProblem:
    question = _dapo_question(_text(where, record, "prompt"))
    return RawProblem(question, (), _number(where, record, "solution"), numeric=False)


def _dapo_chat(where: str, record: Record) -> RawProblem:
    match record:
        case {"prompt": [*_, {"content": str(prompt)}], "reward_model": {"ground_truth": answer}}:
            found = _number(where, {"reward_model.ground_truth": answer}, "reward_model.ground_truth")
            return RawProblem(_dapo_question(prompt), (), found, numeric=False)
    raise UserError(
        f"{where}: fields 'prompt' and 'reward_model' don't hold a chat and its answer; write "
        '[{"role": "user", "content": QUESTION}] and {"ground_truth": ANSWER}'
    )


def _dapo_question(prompt: str) -> str:
    """Without the set's own instruction, which asks for another form of the answer than the reader's."""
    match = _DAPO_PROMPT.fullmatch(prompt)
    return match[1] if match else prompt


# The first that fits is taken; also the order in which an error lists them.
_LAYOUTS: tuple[tuple[tuple[str, ...], Callable[[str, Record], RawProblem]], ...] = (
    (("question", "answer"), _question_answer),
    (("question", "final_ans"), _multiarith),
    (("question_concat", "Answer"), _svamp),
    (("Body", "Question", "Answer"), _svamp_raw),
    (("instruction", "response"), _gsm_hard),
    (("problem", "answer"), _math),
    (("problem", "solution"), _math),
    (("prompt", "solution"), _dapo),
    (("prompt", "reward_model"), _dapo_chat),
)


def _steps(where: str, record: Record) -> tuple[str, ...]:
    """From `steps`, a list of texts, or `cot`, one text. A column that arrow filled with nulls is as none."""
    if "steps" not in record and record.get("cot") is not None:
        return _split_steps(where, _text(where, record, "cot"))
    steps = record.get("steps", [])
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise UserError(f"{where}: field 'steps' is no list of texts; write [\"<<1+2=3>>\", ...] or leave it out")
    return tuple(steps)


def _split_steps(where: str, text: str) -> tuple[str, ...]:
    """Annotations, and word by word what is between them, as COCONUT's own preprocessing has it."""
    pieces = _STEP_PIECE.findall(text)
    if any(piece.startswith("<<") and not piece.endswith(">>") for piece in pieces):
        raise UserError(f"{where}: a step opens with << and is not closed; write <<1+2=3>>")
    return tuple(pieces)


def _text(where: str, record: Record, field: str) -> str:
    value = record[field]
    if not isinstance(value, str):
        raise UserError(f"{where}: field '{field}' is {type(value).__name__}, not a text; write it as a text")
    return value


def _number(where: str, record: Record, field: str) -> str:
    value = record[field]
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    if isinstance(value, int | Decimal | float) and not isinstance(value, bool):
        return str(value)
    return _text(where, record, field)
