"""The texts of a record: a text, nothing, a list, a dict or a chat in a cell; a worked solution's answer and steps."""

import ast
import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from slpo_jax.data.layouts import CHATS
from slpo_jax.data.problem import FieldUse
from slpo_jax.errors import UserError
from slpo_jax.rewards.texts import bare, last_boxed

_ROLES = {"human": "user", "gpt": "assistant"}  # of `conversations`
_NOTHING = (
    "",
    "nan",
    "-nan",
    "<na>",
    "nat",
    "n/a",
    "#n/a",
    "null",
    "-",
    "\u2013",
    "\u2014",
    "--",
)
_LIST = re.compile(r"\s*\[\s*['\"]")  # of texts: [2, 5] may be an interval
# NumPy writes no commas, and Python joins such texts.
_SIDE_BY_SIDE = re.compile(r"['\"]\s+['\"]")


class Number(str):
    """A number that a file or a caller has as one, as it is written: a text for all who don't ask."""

    __slots__ = ()


def plain(value: Any) -> Any:
    """Convert a cell to what a reward is given: numbers as int or float, in lists and dicts too."""
    if isinstance(value, Number):
        is_whole = value.lstrip("-").isdigit()
        if is_whole:
            return int(Decimal(value))
        return float(value)
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return value


def constant(name: str) -> Number | None:
    """Convert JSON's NaN, which is a missing value, and its infinities."""
    return None if name == "NaN" else Number(name)


def is_number(value: Any) -> bool:
    """Tell whether a cell has a number as one; True and False are none."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int | Decimal | Number)


def is_missing(value: Any) -> bool:
    """Tell whether a cell holds nothing; "None" may be an answer or a choice."""
    if isinstance(value, str):
        return value.strip().lower() in _NOTHING
    return value is None


def parse_written(text: str) -> list[Any] | dict[str, Any] | None:
    """Parse the list or dict that a text writes, as JSON or Python do; None for another text."""
    text = text.strip()
    if not text.startswith(("[", "{")):
        return None
    with contextlib.suppress(json.JSONDecodeError, RecursionError):
        return json.loads(
            text, parse_int=Number, parse_float=Number, parse_constant=constant
        )
    # It is not JSON, but may be Python.
    if _SIDE_BY_SIDE.search(text):
        return None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None


def message_of(
    where: str, record: Mapping[str, Any], field: str, role: str, needed: bool = True
) -> str:
    """Return a text, or of a chat the one message of a role; of other roles (system, tool) nothing is taken.

    Args:
        where: the record, for messages.
        record: with the field.
        field: its name.
        role: "user" or "assistant".
        needed: whether a chat has to have such a message.
    Returns:
        the text, "" for a missing one.
    Raises:
        UserError: it is neither.
    """
    # A chat is a list of messages, or a text that writes one.
    chat = record[field]
    if isinstance(chat, str):
        chat = parse_written(chat)
    messages = chat if isinstance(chat, list) else []
    is_message = [isinstance(message, Mapping) for message in messages]
    is_chat = field in CHATS or is_message[:1] == [True]
    if not is_chat:
        return text_of(where, record, field)

    # Take the messages of the role, by whichever names a chat has for its fields.
    if not all(is_message):
        messages = []
    texts: list[Any] = []
    for message in messages:
        name = message.get("role", message.get("from"))
        if _ROLES.get(name, name) == role:
            text = message.get("content", message.get("value"))
            texts.append(text)
    if not texts and messages and not needed:
        return ""
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise UserError(
            f"{where}: field '{field}' is no chat with one message of the role {role}; write "
            f'[{{"role": "{role}", "content": TEXT}}], and a record a problem'
        )
    return texts[0]


def text_of(where: str, record: Mapping[str, Any], field: str) -> str:
    """Return the text of a field, "" where it is missing.

    Raises:
        UserError: it is something else.
    """
    value = record[field]
    if value is None:
        return ""
    if not isinstance(value, str):
        kind = type(value).__name__
        raise UserError(
            f"{where}: field '{field}' is {kind}, not a text; write it as a text"
        )
    return value


def parse_listed(where: str, record: Mapping[str, Any], field: str) -> list[Any] | str:
    """Return the list that a field's text writes, as tables of texts have it, or the text.

    Raises:
        UserError: it begins as a list of texts and is none.
    """
    text = text_of(where, record, field)
    value = parse_written(text)
    if value is None and _LIST.match(text):
        raise UserError(
            f"{where}: field '{field}' begins as a list and is none; mend it, or write a text"
        )
    if isinstance(value, list):
        return value
    return text


def only_one(value: Any) -> Any:
    """Return what stands alone in a list, also in one that a text writes; else the value."""
    items = value
    if isinstance(value, str) and _LIST.match(value):
        items = parse_written(value)
    if not isinstance(items, list) or len(items) != 1:
        return value
    (item,) = items
    if isinstance(item, Mapping):
        return value
    return item


_ANNOTATION = re.compile(r"<<.*?>>", re.DOTALL)
_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!Mr\.)(?<!Mrs\.)(?<!Ms\.)(?<!Dr\.)\s+")
# What an answer stands behind in the last line, or in the line before, as in MetaMathQA, many chats and Minerva's.
_NAME = r"\b(?:the\s+)?(?:(?:final|correct|right)\s+)*(?:answer|ans|(?<=[tl] )(?:option|choice))\b"
_MARK = re.compile(rf"{_NAME}(?:\s+is\b|\W{{0,3}}?[:=])[\s*:]*", re.IGNORECASE)
_NEXT_LINE = re.compile(
    rf"(^[^\w\n]*{_NAME}[^\w\n]*|{_NAME}(?:\s+is\b|[^\w\n]{{0,3}}:)[^\w\n]*)\n\s*([^\n]+)\Z",
    re.IGNORECASE | re.MULTILINE,
)
_DISPLAY = re.compile(r"(\\\[|\$\$)\s*([^$\n]+?)\s*(\\\]|\$\$)\.?\Z")
_HOPE = re.compile(r"\s*I hope (?:it|this) is correct\.?\s*\Z", re.IGNORECASE)
# A last line that is no step.
_BOX_ALONE = re.compile(r"\W*\\(?:f?box|boxed|framebox)\b\s*(?:\{.*\}|\S+)\W*")
_MATRIX = re.compile(r"\W*\\begin\{.*\\end\{\w+\*?\}\W*", re.DOTALL)
_THOUGHT = "think|thinking|thoughts?|reason|reasoning|reflection|scratchpad|working_out"
_ANSWER = "answer|final_answer|solution|output"
# As models write them: <think>, <|begin_of_thought|>, <start_working_out>, [THINK], and Kimi's between triangles.
_TAG = re.compile(
    rf"(?:<(/?)|<\|?(?:(end)|begin|start)_(?:of_)?)(?:({_THOUGHT})|{_ANSWER})\|?>|\[(/?)(THINK)\]|\u25c1(/?)(think)\u25b7",
    re.IGNORECASE,
)
# Every mark has one of these, and so do several lines.
_MAY_MARK = re.compile(r"[#\\\n]|ans|option|choice", re.IGNORECASE)
_BEHIND = re.compile(r"(.*)<answer>(.*?)(?:</answer>.*)?", re.DOTALL)
_BEHIND_THOUGHT = re.compile(r"(.*)</think>(.*)", re.DOTALL)


def split_mark(text: str) -> tuple[str, str | None]:
    r"""Return a solution without the mark behind which its answer stands, and the answer.

    The mark is the tag <answer>, or else the end of a thought, </think> or its like, or else the last "####", or else
    the last \boxed{}, or else "the answer is", "answer:" and so on in the last line or the one before it.

    Returns:
        the solution, and the answer: without what is around it (`bare`); None of one line without a mark, "" of several
        lines in which none is found.
    """
    # Most steps and answers of large sets have no mark.
    stripped = text.strip()
    if not (_MAY_MARK.search(stripped) or _TAG.search(text)):
        return text if stripped else "", None

    # Part the text at a tag, or at the end of a thought.
    tagged = _TAG.sub(_plain_tag, text)
    match = _BEHIND.fullmatch(tagged) or _BEHIND_THOUGHT.fullmatch(tagged)
    solution = text
    behind = ""
    if match:
        solution, behind = match.groups()
    solution = without_tags(solution)
    if not solution.strip():
        return _split_mark(without_tags(behind))
    if not behind.strip():
        return _split_mark(solution)

    # What is behind it is the answer, or has a mark of its own.
    solution, _ = _split_mark(solution)
    behind = without_tags(behind)
    _, answer = _split_mark(behind.strip())
    if answer is None:
        answer = bare(behind)
    return solution, answer


def without_tags(text: str) -> str:
    """Return a text without <think> and its like, in whose places lines end."""
    return _TAG.sub("\n", text)


def _plain_tag(match: re.Match[str]) -> str:
    is_closing = match[1] or match[2] or match[4] or match[6]
    is_thought = match[3] or match[5] or match[7]
    slash = "/" if is_closing else ""
    name = "think" if is_thought else "answer"
    return f"<{slash}{name}>"


def _split_mark(text: str) -> tuple[str, str | None]:
    """Return `split_mark` of a text without tags."""
    # The last #### is the first choice, unless a heading follows.
    before, hashes, after = text.rpartition("####")
    if hashes:
        first, _, rest = after.strip().partition("\n")
        is_heading = rest and _NEXT_LINE.match(f"{first}\n1")
        if not is_heading:
            return before, bare(first)

    # Then "the answer is" in the last line, to which the line before it is joined where it ends with that.
    tail = _HOPE.sub("", text).rstrip()
    tail = _DISPLAY.sub(r"\1 \2 \3", tail)
    tail = _NEXT_LINE.sub(r"\1: \2", tail)
    lines, _, last = tail.rpartition("\n")
    boxed = last_boxed(text)
    before_mark = ""
    answer = ""
    for mark in _MARK.finditer(last):
        before_mark = last[: mark.start()]
        behind_mark = last[mark.end() :]
        answer = re.sub(r"[\s*]*\.?[\s*]*\Z", "", behind_mark)
    if answer:
        sentences = _SENTENCE_END.split(before_mark.rstrip("*"))
        # The sentence of the mark isn't a step, unless it is all there is and computes something.
        is_all = len(sentences) == 1 and not lines
        if not (is_all and "=" in sentences[0]):
            sentences = sentences[:-1]
        step = " ".join(sentences).strip()
        solution = f"{lines}\n{step}".strip("\n")
        return solution, boxed or bare(answer)

    # Then a box; the line is a step where it says more.
    if boxed:
        is_alone = _BOX_ALONE.fullmatch(last)
        return lines if is_alone else text, boxed

    # Several lines without a mark are steps, but a matrix is an answer.
    has_lines = "\n" in text.strip()
    if has_lines and not _MATRIX.fullmatch(text):
        return text, ""
    return text, None


def steps_of(steps: list[Any]) -> list[Any]:
    """Clean a list of steps: none has tags, is missing or is the answer; an empty one stays, as COCONUT has it."""
    cleaned: list[Any] = []
    for step in steps:
        if isinstance(step, str):
            step = without_tags(step).strip("\n")
        is_left_out = is_missing(step) or _is_answer(step)
        if step == "" or not is_left_out:
            cleaned.append(step)
    return cleaned


def _is_answer(step: Any) -> bool:
    """Tell whether a step is a marked answer and nothing else."""
    if not isinstance(step, str):
        return False
    solution, answer = split_mark(step)
    return bool(answer) and not solution.strip()


def written_steps(raws: Sequence[Any], field_use: FieldUse) -> list[tuple[str, ...]]:
    """Return the steps of a set's problems, all read in one way.

    Where at least half of the solutions have annotations, as GSM8K's, those are the steps, and nothing between them is.
    Otherwise a line is a step; of a solution that is one line, a sentence, or what semicolons part.

    Args:
        raws: `RawProblem`s, with the steps where they are listed, and else a solution.
        field_use: is told which of the two ways it was, if a solution has annotations.
    Returns:
        the steps of each.
    Raises:
        UserError: an annotation isn't closed.
    """
    n_solutions = 0
    n_annotated = 0
    for raw in raws:
        n_solutions += bool(raw.solution.strip())
        n_annotated += "<<" in raw.solution
    are_annotated = 2 * n_annotated >= n_solutions
    split = _annotations if are_annotated else _lines
    if n_annotated:
        way = "between << and >> alone" if are_annotated else "lines"
        field_use.details["steps"] = way
    return [raw.steps or split(raw.where, raw.solution) for raw in raws]


def _annotations(where: str, text: str) -> tuple[str, ...]:
    if "<<" in _ANNOTATION.sub("", text):
        raise UserError(
            f"{where}: a step opens with << and is not closed; write <<1+2=3>>"
        )
    return tuple(_ANNOTATION.findall(text))


def _lines(_: str, text: str) -> tuple[str, ...]:
    without_annotations = _ANNOTATION.sub("", text)
    lines = [line.strip() for line in without_annotations.split("\n")]
    lines = [line for line in lines if line]
    # One line is split into sentences, one sentence by its semicolons.
    if len(lines) == 1:
        lines = _SENTENCE_END.split(lines[0])
    if len(lines) == 1:
        lines = re.split(r";\s+", lines[0])
    return tuple(lines)
