"""Problems and where they are read from.

A source is read in two steps, so that a new kind of source is one function: a row reader
(`rows` for files and tables, `dataset_rows` for the hub and directories) gives `(where, record)` pairs, and
`record_fields` turns a record into question, steps and answer by the names of its fields. What was read of the same
bytes before is not read again.
"""

import contextlib
import dataclasses
import functools
import gc
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import logging

from slpo_jax.data.choices import way_of
from slpo_jax.data.dataset_rows import Role, open_splits, part_of, split_rows
from slpo_jax.data.generated import GENERATED, Generated, task_of
from slpo_jax.data.gym import GymConfig, gym_problems, is_gym
from slpo_jax.data.problem import Problem, Problems, Reading
from slpo_jax.data.record_fields import FOUND, FieldsConfig, RawProblem, read_record, unknown_field
from slpo_jax.data.record_readers import FILE_READERS, Rows, given_rows
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
    eval: dict[str, str] = setting({}, affects="report")
    fields: FieldsConfig = FieldsConfig()
    gym: GymConfig = GymConfig()

    def __post_init__(self) -> None:
        check_fields(self)
        for name in self.eval:
            if not re.fullmatch(r"\w[\w-]*", name):
                remedy = f"{name!r} is to be the name of files: use letters, digits, _ and -"
                raise FieldError(self, "eval", remedy)

    def of_task(self, source: Any) -> Any:
        """How a generated source is made; None of others."""
        if is_gym(source):
            return self.gym
        return getattr(self, task_of(source), None) if task_of(source) else None


@dataclasses.dataclass(frozen=True)
class _Source:
    """Rows of a name, which are others where their bytes are."""

    name: str
    content: Any
    rows: Callable[[], Rows] = dataclasses.field(compare=False)


class _Read(NamedTuple):
    """A source as it was read, whatever its answers are compared as.

    Attributes:
        problems: with numbers as answers.
        others: by place, those whose answer is none: where it is, and what it has.
        reading: of its fields.
    """

    problems: list[Problem]
    others: dict[int, tuple[str, RawProblem]]
    reading: Reading


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
    Numbers are taken as they are written. Problems whose answer can't be compared are left out, with a warning that
    counts them.

    Args:
        source: a file of one of the kinds of `FILE_READERS`; "TASK:NAME" for a set of one of `GENERATED`; "gym:TASK"
            for one of reasoning-gym (`data.gym`); a directory as on the hub or a hub id, perhaps with configs and
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
        the problems in the order of the source, with what else is known of it.
    Raises:
        UserError: the source is missing, unreadable, out of reach, empty or of unknown kind, has no such split, or one
            record is malformed; the message has the file and the line (or record), or the data set, the split and row.
    """
    how = _How(fields, role == "train", columns, unanswered)
    if not isinstance(source, str):
        given = _Source("records", None, lambda: given_rows(source))
        return _problems("records", _read.__wrapped__(given, how), answers, unanswered)
    whole, part = part_of(source)
    if part:
        return _part(source, part, load_problems(whole, settings, "train", answers, fields, columns, unanswered))
    if is_gym(source):
        made, said = gym_problems(source, settings or GymConfig(), role)
        if said:
            logging.warning("%s", said)
        return _with_keys(source, made, answers, unanswered)
    path = Path(source).expanduser()
    if name := task_of(source):
        problems, said = _generated(name, source, settings or GENERATED[name].settings())
        if said:
            logging.warning("%s", said)
        return Problems(problems)
    reader = FILE_READERS.get(path.suffix.lower())
    if reader is None and path.is_file():
        known = ", ".join(FILE_READERS)
        raise UserError(
            f"{source}: unknown kind of problem file; give one of {known}, a directory, a hub id or synthetic:NAME"
        )
    if reader:
        found = _Source(source, file_digest(path), lambda: reader(path))
    else:
        splits = open_splits(source, role)
        found = _Source(source, tuple(each.content for each in splits), lambda: split_rows(splits))
    return _problems(source, _read(found, how), answers, unanswered)


@functools.lru_cache(maxsize=_KEPT)
def _generated(task: str, source: str, settings: Any) -> Generated:
    return GENERATED[task].problems(source.removeprefix(f"{task}:"), settings)


def _part(source: str, name: str, problems: Problems) -> Problems:
    """See `load_problems`.

    Raises:
        UserError: there are too few problems for it.
    """
    if len(problems) < _FEWEST:
        raise UserError(
            f"{source}: {len(problems)} problems are too few to set some apart; give {_FEWEST}, or other sets as "
            "config.data.valid and config.data.eval.NAME"
        )
    return problems.with_only(problem for place, problem in enumerate(problems) if place % 10 in _PARTS[name])


class _How(NamedTuple):
    """How records are read; see `load_problems`."""

    fields: FieldsConfig
    strict: bool
    columns: frozenset[str] | None
    unanswered: bool


def _with_keys(source: str, problems: Sequence[Problem], answers: Kind, unanswered: bool) -> Problems:
    """Problems of which answers that can't be compared are left out, and counted; texts stay as they are."""
    keys = [each.answer for each in problems]
    compared = keys if answers == "texts" else _compared(keys, answers)
    pairs = zip(problems, compared, strict=True)
    kept = [(each, key) for each, key in pairs if key or (unanswered and not each.answer)]
    read = Problems(dataclasses.replace(each, answer=key) for each, key in kept)
    read.left_out = len(problems) - len(read)
    if not read:
        raise UserError(f"{source}: no problem has an answer that can be compared; leave config.reward to the task")
    if read.left_out:
        logging.warning("%s: left out %d of %d problems, whose answer can't be compared", source, read.left_out,
                        len(problems))  # fmt: skip
    return read


@functools.lru_cache(maxsize=_KEPT)
def _read(source: _Source, how: _How) -> _Read:
    reading = Reading()
    with _without_collection():
        raw = list(_raw_problems(source.rows(), how, reading))
        if not raw:
            raise UserError(f"{source.name}: holds no problems; give one with at least one")
        steps = written_steps([(where, each.steps, each.solution) for where, each in raw])
        raw = _chosen(raw, how, reading)
        numbers = [_number(each.answer or "") for _, each in raw]
        found = zip(raw, steps, numbers, strict=True)
        problems = [Problem(each.question, own, number, each.columns) for (_, each), own, number in found]
    return _Read(problems, {at: raw[at] for at, number in enumerate(numbers) if not number}, reading)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Without looking for cycles among millions of new objects, again and again: there are none."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _problems(source: str, found: _Read, answers: Kind, unanswered: bool) -> Problems:
    """What was read, with answers of a kind; or without any, where none is needed."""
    every, others = list(found.problems), found.others
    compared = _compared([each.answer or "" for _, each in others.values()], answers)
    for at, answer in zip(others, compared, strict=True):
        every[at] = dataclasses.replace(every[at], answer=answer)
    lost = {at: raw for at, raw in others.items() if not (every[at].answer or (unanswered and not raw[1].answer))}
    read = Problems(each for at, each in enumerate(every) if at not in lost)
    read.why, read.left_out = tuple(_bad_answer(*each, answers) for each in lost.values()), len(lost)
    read.reading = found.reading
    if lost and not read:
        remedy = f"give a set with such answers, or compare others, e.g. with {key_name('config.prompt.answers')}=texts"
        raise UserError(f"{read.why[0]}, nor is any of the {len(every)}; {remedy}")
    if lost:
        logging.warning("%s: left out %d of %d problems: %s", source, len(lost), len(every), read.why[0])
    return read


def _raw_problems(rows: Rows, how: _How, reading: Reading) -> Iterator[tuple[str, RawProblem]]:
    first, (fields, strict, columns, unanswered) = None, how
    for where, record in rows:
        if not isinstance(record, Mapping):
            raise UserError(f"{where}: not a record with fields; expected question, answer and optionally steps")
        first = first or (where, record)
        raw = read_record(where, record, fields, strict, reading, (columns or ()) if unanswered else None)
        if not raw.question.strip():
            raise UserError(f"{where}: the question is empty; give its text or remove the record")
        if columns is None or columns:
            every = {**getattr(record, "columns", {}), **record}
            kept = {name: plain(every[name]) for name in (every if columns is None else columns) if name in every}
            if columns and kept:  # of all, nobody knows which are used
                reading.note("reward", kept)
            raw = raw._replace(columns=kept)
        yield where, raw
    if first and strict and fields.steps and fields.steps not in reading.used.get("steps", {}):
        raise unknown_field(*first, "steps", fields.steps)


def _chosen(raw: list[tuple[str, RawProblem]], how: _How, reading: Reading) -> list[tuple[str, RawProblem]]:
    """With labels or texts of choices as answers, where there are choices."""
    asked = {
        at: (where, each.choices, each.answer, each.is_number)
        for at, (where, each) in enumerate(raw)
        if each.choices and each.answer and each.answer.strip()
    }
    way = way_of(asked.values(), how.fields.first_choice, how.strict)
    answers = {at: choices.answer(where, said, way) for at, (where, choices, said, _) in asked.items()}
    if way.isdecimal():
        said = f"answer (an index from {way})"
        reading.used = {said if role == "answer" else role: names for role, names in reading.used.items()}
    return [
        (where, each._replace(answer=answers.get(at)) if each.choices else each) for at, (where, each) in enumerate(raw)
    ]


def _number(answer: str) -> str:
    """What an answer is compared as whatever is asked for; "" where that depends on it, as of a code such as 00012."""
    return "" if _CODE.match(answer.strip()) else canonical_number(answer) or ""


def _compared(answers: Sequence[str], kind: Kind) -> list[str]:
    """What each answer is compared as; "" where it can't be."""
    if kind == "numbers":
        return [canonical_number(answer) or "" for answer in answers]
    written = [_written(answer, kind) for answer in answers]
    good = are_readable(written) if kind == "latex" else map(normal_text, written)
    return [answer if is_good else "" for answer, is_good in zip(written, good, strict=True)]


def _written(answer: str, kind: Kind) -> str:
    """What is compared; "" for a sentence where LaTeX is. A text that is a code, such as 00012 or 1e5, stays."""
    text = answer.strip()
    if kind == "texts" and _CODE.match(text):
        return text
    is_sentence = text.endswith((".", "!", "?")) and "\\" not in text and len(_WORD.findall(text)) >= 4
    return canonical_number(answer) or ("" if is_sentence and kind == "latex" else text)


def _bad_answer(where: str, raw: RawProblem, kind: Kind) -> str:
    answer, wanted = raw.answer, {"numbers": "number", "latex": "LaTeX that can be compared", "texts": "text"}[kind]
    if answer is None:
        return f"{where}: no answer" + ", nor one behind a mark such as #### in its lines" * bool(raw.solution)
    return f"{where}: answer {str(answer if len(answer) <= 40 else answer[:40] + '...')!r} is no {wanted}"
