"""Layouts: what the fields of a record mean, in the forms that math data sets are published in."""

import itertools
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from slpo_jax.errors import UserError
from slpo_jax.rewards.answers import canonical_number, last_boxed

_ANNOTATION = re.compile(r"<<.*?>>", re.DOTALL)
_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!Mr\.)(?<!Mrs\.)(?<!Ms\.)(?<!Dr\.)\s+")
# MetaMathQA's last line.
_ANSWER_IS = re.compile(r"(.*)\bthe answer is:?\s*([^\n]+?)\.?\s*", re.DOTALL | re.IGNORECASE)
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
        steps: one text a reasoning step, where the record lists them.
        answer: what should be a number, or LaTeX; None where there is none.
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


# The first that fits is taken; also the order in which an error lists them.
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
)
# Fields that are a part of the question, before or after the one that is named so.
_STORY = ("context", "Context", "passage", "body", "Body")
_BEFORE = {"question": _STORY, "Question": _STORY}
_AFTER = {"instruction": ("input",)}
_CHATS = ("prompt", "completion", "messages")


def read_record(where: str, record: Record) -> RawProblem:
    """Read a record in the first of the layouts both of whose fields it has, and has something in.

    Args:
        where: file and line, or data set, split and row, for messages.
        record: fields by name. Numbers are texts (`file_rows.Rounded` for those of 64 bits and less), ints or Decimals.
    Returns:
        the problem.
    Raises:
        UserError: a field is missing or has the wrong type.
    """
    full = (each for each in _LAYOUTS if record.get(each.question) is not None and record.get(each.answer) is not None)
    layout = next(full, None) or next(
        (each for each in _LAYOUTS if {each.question, each.answer} <= record.keys()), None
    )
    if layout is None:
        nearest = max(_LAYOUTS, key=lambda each: (each.question in record) + (each.answer in record))
        missing = nearest.answer if nearest.question in record else nearest.question
        groups = itertools.groupby(_LAYOUTS, key=lambda each: each.question)
        known = "; ".join(f"{name} + {'/'.join(each.answer for each in group)}" for name, group in groups)
        raise UserError(f"{where}: field '{missing}' is missing; the known layouts are {known}")
    for field in ("choices", "options"):
        if record.get(field):
            raise UserError(
                f"{where}: field '{field}': can't verify a choice; give the answer itself, without the field"
            )
    solution, answer = _answer(where, record, layout)
    texts = [_text(where, record, field) for field in ("cot", "rationale") if record.get(field) is not None]
    if layout.answer != "solution" and isinstance(record.get("solution"), str):
        texts.append(record["solution"])
    written = next((_marked(text)[0] for text in texts if text.strip() and not canonical_number(text)), solution)
    question, steps = _question(where, record, layout.question), _listed_steps(where, record)
    return RawProblem(question, steps, answer, layout.numeric, written)


def written_steps(found: Sequence[tuple[str, RawProblem]]) -> list[tuple[str, ...]]:
    """The steps of a set's problems, all found in one way.

    Where at least half of the solutions have annotations, as GSM8K's, those are the steps, and nothing between them is.
    Otherwise a line is a step; of a solution that is one line, a sentence.

    Args:
        found: where each problem is, and the problem.
    Returns:
        the steps of each.
    Raises:
        UserError: an annotation isn't closed.
    """
    texts = [raw.solution for _, raw in found if raw.solution.strip()]
    annotated = 2 * sum("<<" in text for text in texts) >= len(texts)
    read = _annotations if annotated else _lines
    return [raw.steps or read(where, raw.solution) for where, raw in found]


def _annotations(where: str, text: str) -> tuple[str, ...]:
    if "<<" in _ANNOTATION.sub("", text):
        raise UserError(f"{where}: a step opens with << and is not closed; write <<1+2=3>>")
    return tuple(_ANNOTATION.findall(text))


def _lines(_: str, text: str) -> tuple[str, ...]:
    lines = [line.strip() for line in _ANNOTATION.sub("", text).split("\n") if line.strip()]
    return tuple(_SENTENCE_END.split(lines[0]) if len(lines) == 1 else lines)


def _question(where: str, record: Record, field: str) -> str:
    text = _said(where, record, field, "user")
    if field == "prompt":
        # Without the set's own instruction, which asks for another form of the answer than the reader's.
        match = _DAPO_PROMPT.fullmatch(text)
        return match[1] if match else text
    before, after = (
        [_text(where, record, name) for name in around.get(field, ()) if record.get(name)]
        for around in (_BEFORE, _AFTER)
    )
    return "\n".join(filter(str.strip, [" ".join([*before, text]), *after]))


def _answer(where: str, record: Record, layout: _Layout) -> tuple[str, str | None]:
    """The solution that the answer stands in, "" for none, and the answer."""
    value, field = record[layout.answer], layout.answer
    if field == "reward_model" and value is not None:
        if not isinstance(value, Mapping) or "ground_truth" not in value:
            raise UserError(f"{where}: field 'reward_model' has no ground_truth; write {{\"ground_truth\": ANSWER}}")
        field, value = "reward_model.ground_truth", value["ground_truth"]
    if value is None:
        return "", None
    if isinstance(value, int | Decimal) and not isinstance(value, bool):
        return "", str(value)
    solution, answer = _marked(_said(where, {field: value}, field, "assistant"))
    if answer is None:
        return "", solution if not layout.worked or canonical_number(solution) else None
    return solution, answer


def _marked(text: str) -> tuple[str, str | None]:
    r"""A solution, without the mark behind which its answer stands if it can be cut, and the answer, None without one.

    The mark is the last "####", or else the last \boxed{}, or else "the answer is" of the last line. MetaMathQA has a
    line of that kind behind the first mark or the second.
    """
    before, hashes, after = text.rpartition("####")
    said = _ANSWER_IS.fullmatch(text) if "answer is" in text.lower() else None  # which takes its time
    boxed = last_boxed(text)
    if hashes:
        return before, said[2] if said and "####" not in said[2] else after.strip()
    # Less than a sentence can't be cut out.
    solution = said[1] if said and re.fullmatch(r"(.*[.!?\n])?\s*", said[1], re.DOTALL) else text
    return solution, boxed or (said[2] if said else None)


def _listed_steps(where: str, record: Record) -> tuple[str, ...]:
    """From `steps`, a list of texts. A column that arrow filled with nulls is as none."""
    steps = record.get("steps")
    if steps is None:
        return ()
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise UserError(f"{where}: field 'steps' is no list of texts; write [\"<<1+2=3>>\", ...] or leave it out")
    return tuple(steps)


def _said(where: str, record: Record, field: str, role: str) -> str:
    """A text, or of a chat the one message of a role; of other roles (system, tool) nothing is taken."""
    value = record[field]
    if field not in _CHATS or not isinstance(value, list):
        return _text(where, record, field)
    if not all(isinstance(said, Mapping) and isinstance(said.get("content"), str) for said in value):
        raise UserError(
            f'{where}: field \'{field}\' is no chat; write [{{"role": "{role}", "content": TEXT}}] or a text'
        )
    texts = [said["content"] for said in value if said.get("role", role) == role]
    if len(texts) != 1:
        raise UserError(
            f"{where}: field '{field}' has {len(texts)} messages of the role {role}, not one; give one problem a record"
        )
    return texts[0]


def _text(where: str, record: Record, field: str) -> str:
    value = record[field]
    if not isinstance(value, str):
        raise UserError(f"{where}: field '{field}' is {type(value).__name__}, not a text; write it as a text")
    return value
