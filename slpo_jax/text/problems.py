"""Problems and where they are read from.

A source is read in two steps, so that a new kind of file and a new field layout are one function each:
a *row reader* (chosen by file suffix) turns a file into `(where, record)` pairs, and a *layout* (chosen by the
fields that a record has) turns a record into question, steps and answer.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slpo_jax.errors import UserError
from slpo_jax.text.answers import canonical_decimal

if TYPE_CHECKING:
    from slpo_jax.text.synthetic import SyntheticConfig

SYNTHETIC_PREFIX = "synthetic:"
_ANNOTATION = re.compile(r"<<.*?>>", re.DOTALL)
_STEP_PIECE = re.compile(r"<<.*?>>|\S+")

Record = Mapping[str, Any]
RawProblem = tuple[str, tuple[str, ...], str]  # question, steps, answer as written


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
      question: the text as it stands in the source, stray spaces included.
      steps: one text a reasoning step, e.g. "<<48/2=24>>"; empty where the source has none.
      answer: canonical decimal (`answers.canonical_decimal`).
    """

    question: str
    steps: tuple[str, ...]
    answer: str


def load_problems(source: str, synthetic: "SyntheticConfig | None" = None) -> tuple[Problem, ...]:
    """Reads a set of problems.

    Args:
      source: a path ending in .json (a list of records), .jsonl (a record a line) or .txt
        ("question||steps #### answer" a line), or "synthetic:NAME" for a generated set.
      synthetic: how the generated sets are made; None for the defaults.

    Returns:
      The problems in the order of the source.

    Raises:
      UserError: the source is missing, unreadable, empty or of unknown kind, or one record is malformed; the
        message has the file and the line (or record) number.
    """
    if source.startswith(SYNTHETIC_PREFIX):
        # Imported here because the generator makes `Problem`s and so imports this module.
        from slpo_jax.text.synthetic import SyntheticConfig, synthetic_problems

        return synthetic_problems(source.removeprefix(SYNTHETIC_PREFIX), synthetic or SyntheticConfig())
    path = Path(source).expanduser()
    reader = _ROW_READERS.get(path.suffix.lower())
    if reader is None:
        known = ", ".join(_ROW_READERS)
        raise UserError(f"{source}: unknown kind of problem file; give one of {known} or {SYNTHETIC_PREFIX}NAME")
    problems = tuple(_problem(where, record) for where, record in reader(path))
    if not problems:
        raise UserError(f"{source}: holds no problems; give a file with at least one")
    return problems


def without(problems: Iterable[Problem], held_out: Iterable[Problem]) -> tuple[Problem, ...]:
    """Drops the problems whose question is also in `held_out`, where runs of white space count as one space.

    GSM8K's training file holds all questions of the validation set: 7,473 problems become 6,973.
    """
    held_out_questions = {normalised(problem.question) for problem in held_out}
    return tuple(problem for problem in problems if normalised(problem.question) not in held_out_questions)


def normalised(question: str) -> str:
    """The question with outer white space removed and inner runs of it made one space; identifies a problem."""
    return " ".join(question.split())


def _problem(where: str, record: Any) -> Problem:
    if not isinstance(record, Mapping):
        raise UserError(f"{where}: not a record with fields; expected question, answer and optionally steps")
    question, steps, answer = _layout(where, record)(where, record)
    if not question.strip():
        raise UserError(f"{where}: the question is empty; give its text or remove the record")
    try:
        return Problem(question, steps, canonical_decimal(answer))
    except UserError:
        shown = answer if len(answer) <= 40 else answer[:40] + "..."
        raise UserError(f"{where}: answer {shown!r} is no number; write digits, e.g. 72 or -1,450.5") from None


# --- layouts: record -> question, steps, answer ----------------------------------------------------------------


def _layout(where: str, record: Record) -> Callable[[str, Record], RawProblem]:
    for field in ("question", "answer"):
        if field not in record:
            raise UserError(f"{where}: field '{field}' is missing; expected question, answer and optionally steps")
    worked_solution = isinstance(record["answer"], str) and "####" in record["answer"]
    return _gsm8k if worked_solution else _coconut


def _coconut(where: str, record: Record) -> RawProblem:
    steps = record.get("steps", [])
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise UserError(f"{where}: field 'steps' is no list of texts; write [\"<<1+2=3>>\", ...] or leave it out")
    return _text(where, record, "question"), tuple(steps), _text(where, record, "answer")


def _gsm8k(where: str, record: Record) -> RawProblem:
    solution, _, answer = _text(where, record, "answer").rpartition("####")
    return _text(where, record, "question"), tuple(_ANNOTATION.findall(solution)), answer.strip()


def _text(where: str, record: Record, field: str) -> str:
    value = record[field]
    if not isinstance(value, str):
        raise UserError(f"{where}: field '{field}' is {type(value).__name__}, not a text; write it as a text")
    return value


# --- row readers: file -> (where, record) ----------------------------------------------------------------------


def _read_json(path: Path) -> Iterator[tuple[str, Any]]:
    records = _parse_json(_read_text(path), str(path), line=None)
    if not isinstance(records, list):
        raise UserError(f'{path}: not a list of problems; write [{{"question": ..., "answer": ...}}, ...]')
    for number, record in enumerate(records, start=1):
        yield f"{path}, record {number}", record


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in _lines(path):
        yield f"{path}, line {number}", _parse_json(line, str(path), number)


def _read_icot(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        question, bars, solution = line.partition("||")
        steps, hashes, answer = solution.rpartition("####")
        if not bars or not hashes:
            raise UserError(f"{where}: malformed; expected 'question||steps #### answer'")
        # Text between annotations becomes steps word by word, as COCONUT's own preprocessing has it.
        pieces = _STEP_PIECE.findall(steps)
        if any(piece.startswith("<<") and not piece.endswith(">>") for piece in pieces):
            raise UserError(f"{where}: a step opens with << and is not closed; write <<1+2=3>>")
        yield where, {"question": question, "steps": pieces, "answer": answer.strip()}


_ROW_READERS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".txt": _read_icot,
}


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    # Only "\n" ends a line: str.splitlines would also cut at separators that occur inside JSON texts.
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if line.strip():
            yield number, line.rstrip("\r")


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; check the path") from None
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror}); check the path and its permissions") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def _parse_json(text: str, path: str, line: int | None) -> Any:
    try:
        # Numbers stay as written: a float would round 3244047.0999999996 and 2.01e-06 for good.
        return json.loads(text, parse_int=str, parse_float=str, parse_constant=str)
    except (json.JSONDecodeError, RecursionError) as error:
        inner = getattr(error, "lineno", 1)
        reason = getattr(error, "msg", "nested too deeply")
        raise UserError(f"{path}, line {line or inner}: malformed JSON ({reason}); mend or remove it") from None
