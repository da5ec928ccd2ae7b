"""Problems and where they are read from.

A source is read in two steps, so that a new kind of source is one function: a row reader (`record_readers` for files
and tables, `dataset_rows` for the hub and directories) gives `(where, record)` pairs, and `record_fields` turns a
record into question, steps and answer by the names of its fields. What was read of the same bytes before is not read
again.
"""

import dataclasses
import functools
import gc
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slpo_jax.data.choices import way_of
from slpo_jax.data.dataset_rows import Role, open_splits, part_of, split_rows
from slpo_jax.data.generated import GENERATED, task_of
from slpo_jax.data.generated_sets import GymConfig, gym_problems, is_gym
from slpo_jax.data.problem import FieldUse, Problem, Problems, normalised
from slpo_jax.data.record_fields import (
    FOUND,
    FieldsConfig,
    RawProblem,
    Wanted,
    no_answer_field,
    read_record,
    unknown_field,
)
from slpo_jax.data.record_readers import FILE_READERS, Rows, given_rows, reader_of, select_split
from slpo_jax.data.record_texts import plain, written_steps
from slpo_jax.errors import UserError, key_name
from slpo_jax.io.files import file_digest
from slpo_jax.rewards.answers import Kind, are_readable, canonical_number
from slpo_jax.rewards.texts import normal_text
from slpo_jax.settings import FieldError, check_fields, setting

# Of every ten problems of a source, those of a part: any order that they are in is spread over all parts.
_PARTS = {"train": (0, 1, 2, 3, 5, 6, 7, 8), "valid": (9,), "test": (4,)}
_FEWEST = 10
_CODE = re.compile(r"[+-]?0[0-9]|.*[eE]")
_DIGITS = 100  # that a number may have: room is made in every answer for the longest, and 1e999 is a slip
_KEPT = 8  # sources that are kept as they were read
_WORD = re.compile(r"[A-Za-z]{2,}")


_Tasks: Any = dataclasses.make_dataclass(
    "_Tasks", [(name, task.settings, task.settings()) for name, task in GENERATED.items()], frozen=True
)


@dataclasses.dataclass(frozen=True)
class DataConfig(_Tasks):
    """The section `config.data`: sources as `load_problems` takes them, and how each of `GENERATED` is made.

    Attributes:
        train: problems to train on; of these, and of `demos`, those that are in `valid` too are dropped.
        demos: problems whose solutions the stage imitate copies; "" is `train`.
        valid: the validation split, on which all choices are made.
        eval: sets to evaluate on, NAME = source; a NAME can also be given on the command line.
        fields: the names of fields that can't be told.
        gym: how the problems of reasoning-gym are made.
    """

    train: str = ""
    demos: str = ""
    valid: str = ""
    eval: dict[str, str] = setting({})
    fields: FieldsConfig = FieldsConfig()
    gym: GymConfig = GymConfig()

    def __post_init__(self) -> None:
        check_fields(self)
        for name in self.eval:
            if not re.fullmatch(r"\w[\w-]*", name):
                remedy = f"{name!r} is to be the name of files: use letters, digits, _ and -"
                raise FieldError(self, "eval", remedy)

    def of_task(self, source: Any) -> Any:
        """Return how a generated source is made; None of others."""
        if is_gym(source):
            return self.gym
        return getattr(self, task_of(source), None) if task_of(source) else None


@dataclasses.dataclass(frozen=True)
class _Source:
    """The rows of a name, which are others where their bytes are."""

    name: str
    content: Any
    rows: Callable[[], Rows] = dataclasses.field(compare=False)


class _Read(NamedTuple):
    """A source as it was read, whatever its answers are compared as.

    Attributes:
        problems: with numbers as answers.
        others: by place, the records of those whose answer is none.
        field_use: of its fields.
    """

    problems: list[Problem]
    others: dict[int, RawProblem]
    field_use: FieldUse


def load_problems(
    source: Any,
    settings: Any = None,
    role: Role = "train",
    answers: Kind = "numbers",
    fields: FieldsConfig = FOUND,
    columns: frozenset[str] | None = frozenset(),
    unanswered: bool = False,
) -> Problems:
    """Read a set of problems.

    The fields of a record say what it holds, whatever the kind of source (`record_fields`; docs/data.md has the table).
    Numbers are taken as they are written. Problems whose answer can't be compared are left out, and counted in the
    result's `warnings`.

    Args:
        source: a file of one of the kinds of `FILE_READERS`; "TASK:NAME" for a set of one of `GENERATED`; "gym:TASK"
            for one of reasoning-gym; a directory as on the hub or a hub id, perhaps with configs and
            splits, as `open_splits` takes them; or records with fields, as `given_rows` takes them. An existing path
            comes before a hub id.
            "[train]", "[valid]" or "[test]" at the end are eight, one and one of every ten of its training problems.
        settings: how a generated set is made, of its task's dataclass; None for the defaults.
        role: the split to take of a directory or hub id whose source names none.
        answers: "numbers"; or answers that are none stay as they are written, in "latex", to be compared as such
            (`answers.are_right`, style "boxed"), or as any "texts".
        fields: names of fields that a record of the role "train" has to have; others may.
        columns: of the records that are kept beside (`Problem.columns`), by name; None is all.
        unanswered: problems without an answer are kept, instead of left out.
    Returns:
        the problems in the order of the source, with what else is known of it: the same ones as before, where the
        source is of the same bytes.
    Raises:
        UserError: the source is missing, unreadable, out of reach, empty or of unknown kind, has no such split, or one
            record is malformed; the message has the file and the line (or record), or the data set, the split and row.
    """
    wanted = Wanted(fields, role == "train", columns, unanswered)
    if not isinstance(source, str):
        name, records = select_split(source, role)
        rows = _Source(name, None, lambda: given_rows(records))
        return _with_answers(name, _read.__wrapped__(rows, wanted), answers, unanswered)
    whole_set, part = part_of(source)
    if part:
        return _part(source, part, load_problems(whole_set, settings, "train", answers, fields, columns, unanswered))
    if is_gym(source):
        return _of_gym(source, gym_problems(source, settings or GymConfig(), role), answers, unanswered)
    if name := task_of(source):
        return GENERATED[name].problems(source.removeprefix(f"{name}:"), settings or GENERATED[name].settings())
    path = Path(source).expanduser()
    reader = reader_of(path)
    if reader is None and path.is_file():
        kinds = ", ".join(FILE_READERS)
        raise UserError(
            f"{source}: unknown kind of problem file; give one of {kinds}, each also as .gz, a directory, a hub id or "
            "synthetic:NAME"
        )
    if reader:
        return _cached(_Source(source, file_digest(path), lambda: reader(path)), wanted, answers)
    splits = open_splits(source, role)
    content = tuple(split.content for split in splits)
    return _cached(_Source(source, content, lambda: split_rows(splits)), wanted, answers)


def _part(source: str, name: str, problems: Problems) -> Problems:
    """Return the problems of a part; the warnings are those of the largest.

    Raises:
        UserError: there are too few problems for it.
    """
    if len(problems) < _FEWEST:
        raise UserError(
            f"{source}: {len(problems)} problems are too few to set some apart; give {_FEWEST}, or other sets as "
            "config.data.valid and config.data.eval.NAME"
        )
    some = (problem for place, problem in enumerate(problems) if place % 10 in _PARTS[name])
    return problems.with_only(some, warnings=problems.warnings * (name == "train"))


def _of_gym(source: str, problems: Problems, answers: Kind, unanswered: bool) -> Problems:
    """Leave out, and count, problems whose answer can't be compared; texts stay as they are."""
    keys = [problem.answer for problem in problems]
    pairs = zip(problems, keys if answers == "texts" else _compared(keys, answers), strict=True)
    comparable = [dataclasses.replace(problem, answer=key) for problem, key in pairs
            if key or (unanswered and not problem.answer)]  # fmt: skip
    if not comparable:
        raise UserError(f"{source}: no problem has an answer that can be compared; leave config.reward to the task")
    left_out = len(problems) - len(comparable)
    line = f"{source}: left out {left_out} of {len(problems)} problems, whose answer can't be compared"
    return Problems(comparable, left_out=left_out, warnings=(*problems.warnings, *[line] * bool(left_out)))


@functools.lru_cache(maxsize=_KEPT)
def _read(source: _Source, wanted: Wanted) -> _Read:
    field_use, is_collected = FieldUse(), gc.isenabled()
    gc.disable()  # which would look for cycles among millions of new objects, again and again: there are none
    try:
        raws = list(_raw_problems(source.rows(), wanted, field_use))
        if not raws:
            raise UserError(f"{source.name}: holds no problems; give one with at least one")
        solutions = written_steps([(raw.where, raw.steps, raw.solution) for raw in raws])
        raws = _chosen(raws, wanted, field_use)
        numbers = [_number(raw.answer or "") for raw in raws]
        rows = zip(raws, solutions, numbers, strict=True)
        problems = [Problem(raw.question, steps, number, raw.columns) for raw, steps, number in rows]
    finally:
        if is_collected:
            gc.enable()
    return _Read(problems, {place: raws[place] for place, number in enumerate(numbers) if not number}, field_use)


@functools.lru_cache(maxsize=_KEPT)
def _cached(source: _Source, wanted: Wanted, answers: Kind) -> Problems:
    return _with_answers(source.name, _read(source, wanted), answers, wanted.unanswered)


def _with_answers(source: str, read: _Read, answers: Kind, unanswered: bool) -> Problems:
    """Return what was read, with answers of a kind; or without any, where none is needed."""
    problems, others, lost = dict(enumerate(read.problems)), read.others, dict[str, list[str]]()
    compared = _compared([raw.answer or "" for raw in others.values()], answers)
    for (place, raw), answer in zip(others.items(), compared, strict=True):
        if answer or (unanswered and not raw.answer):
            problems[place] = dataclasses.replace(problems[place], answer=answer)
        else:
            fault, line = _bad_answer(raw, answers)
            lost.setdefault(fault, []).append(line)
            del problems[place]
    count, left_out = len(read.problems), len(read.problems) - len(problems)
    why = [f"{len(lines):,} like {lines[0]}" if left_out > 1 else lines[0] for lines in lost.values()]
    if not problems:
        remedy = f"give a set with such answers, or compare others, e.g. with {key_name('config.prompt.answers')}=texts"
        raise UserError(f"{next(iter(lost.values()))[0]}, nor is any of the {count}; {remedy}")
    warnings: list[str] = []
    if why:
        warnings.append(f"{source}: left out {left_out} of {count} problems: {'; '.join(why)}")
    if line := _contradictions(problems.values()):
        warnings.append(f"{source}: {line}")
    return Problems(problems.values(), left_out=left_out, field_use=read.field_use, warnings=tuple(warnings))


def _contradictions(problems: Iterable[Problem]) -> str:
    """Count the questions that come with different answers, and name one; "" for none."""
    answers: dict[str, str] = {}
    contradicted: dict[str, str] = {}
    for problem in problems:
        if problem.answer:
            question = normalised(problem.question)
            if answers.setdefault(question, problem.answer) != problem.answer:
                contradicted.setdefault(question, problem.answer)
    if not contradicted:
        return ""
    question, other = next(iter(contradicted.items()))
    return (
        f"{len(contradicted)} of {len(answers)} questions come with different answers, such as {question[:60]!r} with "
        f"{answers[question][:40]!r} and {other[:40]!r}; each problem is held to its own"
    )


def _raw_problems(rows: Rows, wanted: Wanted, field_use: FieldUse) -> Iterator[RawProblem]:
    first = None
    fields, strict, columns, unanswered = wanted
    for where, record in rows:
        if not isinstance(record, Mapping):
            raise UserError(f"{where}: not a record with fields; expected question, answer and optionally steps")
        first = first or (where, record)
        raw = read_record(where, record, wanted, field_use)
        if not raw.question.strip():
            raise UserError(f"{where}: the question is empty; give its text or remove the record")
        if columns is None or columns:
            cells = {**getattr(record, "columns", {}), **record}
            values = {name: plain(cells[name]) for name in (cells if columns is None else columns) if name in cells}
            others = {field for fields in field_use.used.values() for field in fields}
            field_use.note("reward", values if columns else [name for name in values if name not in others])
            raw = raw._replace(columns=values)
        yield raw
    is_named = bool(strict and fields.answer)
    if first and "answer" not in field_use.used and (is_named or not unanswered):
        raise no_answer_field(*first, fields if is_named else FOUND)
    if first and strict and fields.steps and fields.steps not in field_use.used.get("steps", {}):
        raise unknown_field(*first, "steps", fields.steps)


def _chosen(raws: list[RawProblem], wanted: Wanted, field_use: FieldUse) -> list[RawProblem]:
    """Make labels or texts of choices the answers, where there are choices."""
    answered = {
        place: (raw.where, raw.choices, raw.answer, raw.is_number)
        for place, raw in enumerate(raws) if raw.choices and raw.answer and raw.answer.strip()
    }  # fmt: skip
    way = way_of(answered.values(), wanted.fields.first_choice, wanted.strict)
    answers = {place: choices.answer(where, answer, way) for place, (where, choices, answer, _) in answered.items()}
    if way.isdecimal():
        index = f"answer (an index from {way})"
        field_use.used = {index if role == "answer" else role: names for role, names in field_use.used.items()}
    return [raw._replace(answer=answers.get(place)) if raw.choices else raw for place, raw in enumerate(raws)]


def _number(answer: str) -> str:
    """Return what an answer is compared as for any kind; "" where that depends on it, as for a code such as 00012."""
    return "" if _CODE.match(answer.strip()) else number_of(answer)


def number_of(answer: str) -> str:
    """Return the canonical decimal of an answer; "" where it is none, or a longer one than answers have."""
    number = canonical_number(answer) or ""
    return number if len(number) <= _DIGITS else ""


def _compared(answers: Sequence[str], kind: Kind) -> list[str]:
    """Return what each answer is compared as; "" where it can't be."""
    if kind == "numbers":
        return [number_of(answer) for answer in answers]
    texts = [_written(answer, kind) for answer in answers]
    readable = are_readable(texts) if kind == "latex" else map(normal_text, texts)
    return [answer if is_good else "" for answer, is_good in zip(texts, readable, strict=True)]


def _written(answer: str, kind: Kind) -> str:
    """Return what is compared; "" for a sentence where LaTeX is. A text that is a code, such as 00012 or 1e5, stays."""
    text = answer.strip()
    if kind == "texts" and _CODE.match(text):
        return text
    is_sentence = text.endswith((".", "!", "?")) and "\\" not in text and len(_WORD.findall(text)) >= 4
    return number_of(answer) or ("" if is_sentence and kind == "latex" else text)


def _bad_answer(raw: RawProblem, kind: Kind) -> tuple[str, str]:
    """Return what is wrong with a record's answer, and the same with where it is."""
    answer, name = raw.answer, {"numbers": "number", "latex": "LaTeX that can be compared", "texts": "text"}[kind]
    if answer is None:
        behind = ", nor one behind a mark such as #### in its lines" * bool(raw.solution)
        return "no answer", f"{raw.where}: no answer{behind}"
    shown = str(answer if len(answer) <= 40 else answer[:40] + "...")
    long = f" of at most {_DIGITS} digits" * (canonical_number(answer) is not None)
    return f"no {name}{long}", f"{raw.where}: answer {shown!r} is no {name}{long}"
