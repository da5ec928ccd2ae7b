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

from slpo_jax.data.dataset_rows import Role, open_splits, part_of, split_rows
from slpo_jax.data.generated import GENERATED, task_of
from slpo_jax.data.generated_sets import GymConfig, gym_problems, is_gym
from slpo_jax.data.problem import FieldUse, Problem, Problems, normalise
from slpo_jax.data.record_fields import (
    FOUND,
    FieldsConfig,
    RawProblem,
    Wanted,
    no_answer_field,
    read_record,
    unknown_field,
)
from slpo_jax.data.record_readers import (
    FILE_READERS,
    Rows,
    given_rows,
    reader_of,
    select_split,
)
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
# The most digits of a number: room is made in every answer for the longest, and 1e999 is a slip.
_DIGITS = 100
_KEPT = 8  # sources that are kept as they were read
_KIND_NAMES = {
    "numbers": "number",
    "latex": "LaTeX that can be compared",
    "texts": "text",
}
_WORD = re.compile(r"[A-Za-z]{2,}")


_Tasks: Any = dataclasses.make_dataclass(
    "_Tasks",
    [(name, task.settings, task.settings()) for name, task in GENERATED.items()],
    frozen=True,
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
                remedy = (
                    f"{name!r} is to be the name of files: use letters, digits, _ and -"
                )
                raise FieldError(self, "eval", remedy)

    def of_task(self, source: Any) -> Any:
        """Return how a generated source is made; None of others."""
        if is_gym(source):
            return self.gym
        task = task_of(source)
        return getattr(self, task, None) if task else None


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
    wanted = Wanted(
        fields=fields,
        strict=role == "train",
        columns=columns,
        unanswered=unanswered,
    )

    # Records that a caller holds are read each time.
    if not isinstance(source, str):
        name, records = select_split(source, role)
        record_source = _Source(name, None, lambda: given_rows(records))
        read = _read.__wrapped__(record_source, wanted)
        return _with_answers(name, read, answers, unanswered)

    # A part is a part of all training problems.
    whole_set, part = part_of(source)
    if part:
        whole = load_problems(
            whole_set,
            settings,
            role="train",
            answers=answers,
            fields=fields,
            columns=columns,
            unanswered=unanswered,
        )
        return _select_part(source, part, whole)

    # Tasks generate their problems.
    if is_gym(source):
        problems = gym_problems(source, settings or GymConfig(), role)
        return _select_comparable(source, problems, answers, unanswered)
    task_name = task_of(source)
    if task_name:
        task = GENERATED[task_name]
        set_name = source.removeprefix(f"{task_name}:")
        return task.problems(set_name, settings or task.settings())

    # What remains is a file, a directory, or a set on the hub.
    path = Path(source).expanduser()
    reader = reader_of(path)
    if reader is None and path.is_file():
        kinds = ", ".join(FILE_READERS)
        raise UserError(
            f"{source}: unknown kind of problem file; give one of {kinds}, each also as .gz, a directory, a hub id or "
            "synthetic:NAME"
        )
    if reader:
        digest = file_digest(path)
        file = _Source(source, digest, lambda: reader(path))
        return _read_cached(file, wanted, answers)
    splits = open_splits(source, role)
    content = tuple(split.content for split in splits)
    dataset = _Source(source, content, lambda: split_rows(splits))
    return _read_cached(dataset, wanted, answers)


def _select_part(source: str, name: str, problems: Problems) -> Problems:
    """Return the problems of a part; the warnings are those of the largest.

    Raises:
        UserError: there are too few problems for it.
    """
    if len(problems) < _FEWEST:
        raise UserError(
            f"{source}: {len(problems)} problems are too few to set some apart; give {_FEWEST}, or other sets as "
            "config.data.valid and config.data.eval.NAME"
        )
    digits = _PARTS[name]
    part = []
    for n, problem in enumerate(problems):
        if n % 10 in digits:
            part.append(problem)
    warnings = problems.warnings if name == "train" else ()
    return problems.with_only(part, warnings=warnings)


def _select_comparable(
    source: str, problems: Problems, answers: Kind, unanswered: bool
) -> Problems:
    """Leave out, and count, problems whose answer can't be compared; texts stay as they are."""
    keys = [problem.answer for problem in problems]
    if answers != "texts":
        keys = _normalise_answers(keys, answers)
    comparable: list[Problem] = []
    for problem, key in zip(problems, keys, strict=True):
        if key or (unanswered and not problem.answer):
            comparable.append(dataclasses.replace(problem, answer=key))
    if not comparable:
        raise UserError(
            f"{source}: no problem has an answer that can be compared; leave config.reward to the task"
        )
    left_out = len(problems) - len(comparable)
    warnings = problems.warnings
    if left_out:
        line = f"{source}: left out {left_out} of {len(problems)} problems, whose answer can't be compared"
        warnings = (*warnings, line)
    return Problems(comparable, left_out=left_out, warnings=warnings)


@functools.lru_cache(maxsize=_KEPT)
def _read(source: _Source, wanted: Wanted) -> _Read:
    field_use = FieldUse()
    # The garbage collector would look for cycles among millions of new objects, again and again. There are none.
    is_collected = gc.isenabled()
    gc.disable()
    try:
        rows = source.rows()
        raws = list(_raw_problems(rows, wanted, field_use))
        if not raws:
            raise UserError(
                f"{source.name}: holds no problems; give one with at least one"
            )
        solutions = written_steps(raws, field_use)
        problems: list[Problem] = []
        others: dict[int, RawProblem] = {}
        for place, (raw, steps) in enumerate(zip(raws, solutions, strict=True)):
            number = _number(raw.answer or "")
            problems.append(Problem(raw.question, steps, number, raw.columns))
            if not number:
                others[place] = raw
    finally:
        if is_collected:
            gc.enable()
    return _Read(problems, others, field_use)


@functools.lru_cache(maxsize=_KEPT)
def _read_cached(source: _Source, wanted: Wanted, answers: Kind) -> Problems:
    read = _read(source, wanted)
    return _with_answers(source.name, read, answers, wanted.unanswered)


def _with_answers(
    source: str, read: _Read, answers: Kind, unanswered: bool
) -> Problems:
    """Return what was read, with answers of a kind; or without any, where none is needed."""
    # Answers that are no numbers are compared as their kind is, or their problems are left out.
    problems = dict(enumerate(read.problems))
    others = read.others
    lost = dict[str, list[str]]()
    written = [raw.answer or "" for raw in others.values()]
    compared = _normalise_answers(written, answers)
    for (place, raw), answer in zip(others.items(), compared, strict=True):
        if answer or (unanswered and not raw.answer):
            problems[place] = dataclasses.replace(problems[place], answer=answer)
        else:
            fault, line = _bad_answer(raw, answers)
            lost.setdefault(fault, []).append(line)
            del problems[place]
    count = len(read.problems)
    left_out = count - len(problems)
    if not problems:
        first_lines = next(iter(lost.values()))
        remedy = f"give a set with such answers, or compare others, e.g. with {key_name('config.prompt.answers')}=texts"
        raise UserError(f"{first_lines[0]}, nor is any of the {count}; {remedy}")

    # Warn of what is left out, an example for each reason, and of contradictions.
    warnings: list[str] = []
    reasons: list[str] = []
    for lines in lost.values():
        reason = lines[0]
        if left_out > 1:
            reason = f"{len(lines):,} like {reason}"
        reasons.append(reason)
    if reasons:
        why = "; ".join(reasons)
        warnings.append(f"{source}: left out {left_out} of {count} problems: {why}")
    contradictions = _contradictions(problems.values())
    if contradictions:
        warnings.append(f"{source}: {contradictions}")
    breaks = 0
    for problem in problems.values():
        breaks += problem.question.endswith("\n")
    if breaks:
        warnings.append(
            f"{source}: a line break ends {breaks} of {count} questions, and prompts keep it; take it off if it is the "
            "file's own"
        )
    return Problems(
        problems.values(),
        left_out=left_out,
        field_use=read.field_use,
        warnings=tuple(warnings),
    )


def _contradictions(problems: Iterable[Problem]) -> str:
    """Count the questions that come with different answers, and name one; "" for none."""
    answers: dict[str, str] = {}
    contradicted: dict[str, str] = {}
    for problem in problems:
        if problem.answer:
            question = normalise(problem.question)
            first = answers.setdefault(question, problem.answer)
            if first != problem.answer:
                contradicted.setdefault(question, problem.answer)
    if not contradicted:
        return ""
    question, other = next(iter(contradicted.items()))
    answer = answers[question]
    return (
        f"{len(contradicted)} of {len(answers)} questions come with different answers, such as {question[:60]!r} with "
        f"{answer[:40]!r} and {other[:40]!r}; each problem is held to its own"
    )


def _raw_problems(
    rows: Rows, wanted: Wanted, field_use: FieldUse
) -> Iterator[RawProblem]:
    """Read the rows one by one, then check that the fields that have to be there were."""
    fields = wanted.fields
    first = None
    for where, record in rows:
        if not isinstance(record, Mapping):
            raise UserError(
                f"{where}: not a record with fields; expected question, answer and optionally steps"
            )
        first = first or (where, record)
        raw = read_record(where, record, wanted, field_use)
        if not raw.question.strip():
            raise UserError(
                f"{where}: the question is empty; give its text or remove the record"
            )
        if wanted.columns is None or wanted.columns:
            columns = _kept_columns(record, wanted, field_use)
            raw = raw._replace(columns=columns)
        yield raw

    # A field of the answer or the steps may be missing in some of the records, but not in all.
    if first is None:
        return
    is_named = bool(wanted.strict and fields.answer)
    needs_answer = is_named or not wanted.unanswered
    if needs_answer and "answer" not in field_use.used:
        raise no_answer_field(*first, fields if is_named else FOUND)
    steps = field_use.used.get("steps", {})
    if wanted.strict and fields.steps and fields.steps not in steps:
        raise unknown_field(*first, "steps", fields.steps)


def _kept_columns(
    record: Mapping[str, Any], wanted: Wanted, field_use: FieldUse
) -> dict[str, Any]:
    """Return the cells that are kept beside a problem, and note them as used by the reward."""
    cells = {**getattr(record, "columns", {}), **record}
    if wanted.columns is not None:
        kept = {}
        for name in wanted.columns:
            if name in cells:
                kept[name] = plain(cells[name])
        field_use.note("reward", kept)
        return kept
    # All columns are kept; those that are used for nothing else are the reward's.
    used: set[str] = set()
    for fields in field_use.used.values():
        used.update(fields)
    unused = [name for name in cells if name not in used]
    field_use.note("reward", unused)
    return {name: plain(cell) for name, cell in cells.items()}


def _number(answer: str) -> str:
    """Return what an answer is compared as for any kind; "" where that depends on it, as for a code such as 00012."""
    if _CODE.match(answer.strip()):
        return ""
    return number_of(answer)


def number_of(answer: str) -> str:
    """Return the canonical decimal of an answer; "" where it is none, or a longer one than answers have."""
    number = canonical_number(answer) or ""
    return number if len(number) <= _DIGITS else ""


def _normalise_answers(answers: Sequence[str], kind: Kind) -> list[str]:
    """Return what each answer is compared as; "" where it can't be."""
    if kind == "numbers":
        return [number_of(answer) for answer in answers]
    texts = [_normalise_answer(answer, kind) for answer in answers]
    if kind == "texts":
        return [text if normal_text(text) else "" for text in texts]
    comparable: list[str] = []
    for text, is_readable in zip(texts, are_readable(texts), strict=True):
        comparable.append(text if is_readable else "")
    return comparable


def _normalise_answer(answer: str, kind: Kind) -> str:
    """Return what is compared; "" for a sentence where LaTeX is. A text that is a code, such as 00012 or 1e5, stays."""
    text = answer.strip()
    if kind == "texts" and _CODE.match(text):
        return text
    number = number_of(answer)
    if number:
        return number
    is_sentence = text.endswith((".", "!", "?")) and "\\" not in text
    if kind == "latex" and is_sentence and len(_WORD.findall(text)) >= 4:
        return ""
    return text


def _bad_answer(raw: RawProblem, kind: Kind) -> tuple[str, str]:
    """Return what is wrong with a record's answer, and the same with where it is."""
    answer = raw.answer
    if answer is None:
        line = f"{raw.where}: no answer"
        if raw.solution:
            line += ", nor one behind a mark such as #### in its lines"
        return "no answer", line
    fault = f"no {_KIND_NAMES[kind]}"
    if canonical_number(answer) is not None:
        fault += f" of at most {_DIGITS} digits"
    start = answer
    if len(answer) > 40:
        start = f"{answer[:40]}…"
    return fault, f"{raw.where}: answer {start!r} is {fault}"
