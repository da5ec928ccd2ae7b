"""How a source of problems is understood, before anything is trained."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any, cast, get_args

from slpo_jax.api.load_options import by_argument
from slpo_jax.data.problem import Problems
from slpo_jax.data.problems import load_problems
from slpo_jax.data.record_fields import FieldsConfig
from slpo_jax.errors import UserError, about
from slpo_jax.rewards.answers import STYLES, AskedStyle, Kind, style_of
from slpo_jax.run.own_data_settings import answers_of
from slpo_jax.run.sources import read_as
from slpo_jax.settings import FieldError

_ARE: dict[Kind, str] = {"numbers": "numbers", "latex": "LaTeX", "texts": "texts"}


@by_argument()
def read(
    source: Any, answers: str = "", fields: Mapping[str, str] | None = None, with_columns: bool = True
) -> Problems:
    """Read problems as `train` does; `print` says how they were understood, and which fields are not used.

    Args:
        source: a file, a directory, a hub id or a generated set, as `config.data.train` takes it, or records, as
            `evaluate` takes them.
        answers: how answers are read, as `config.prompt.answers`; "" chooses numbers where nine of ten
            answers are some, else texts.
        fields: names of fields that can't be told: question, answer, steps, choices; first_choice is "0" or "1".
        with_columns: keep the records' other columns, which a reward may name; they take time and memory.
    Returns:
        the problems, with question, steps and answer each.
    Raises:
        UserError: the source can't be read.
    """
    if answers and answers not in (known := get_args(AskedStyle)):
        raise UserError(f"answers: {answers!r} is not valid; give one of {', '.join(known)}")
    try:
        named = FieldsConfig(**cast(Any, fields or {}))
    except (TypeError, FieldError):
        raise UserError(f"fields: {fields!r} is not valid; give texts as question, answer, steps and so on") from None
    source = list(source) if isinstance(source, Iterator) else source
    source = os.fspath(source) if isinstance(source, os.PathLike) else source
    why = ""
    if not answers:
        choice = answers_of(_load(source, "texts", named, with_columns))
        answers, why = choice.values.get("prompt.answers", "texts"), f" ({choice.why})"
    kind = STYLES[style_of(cast(AskedStyle, answers), "after_mark")].kind
    problems = _load(source, kind, named, with_columns)
    name = source if isinstance(source, str) else "records"
    problems.warn()
    return problems.with_only(problems, said=tuple(read_as(name, problems, _ARE[kind] + why)))


def _load(source: Any, answers: Kind, fields: FieldsConfig, with_columns: bool) -> Problems:
    columns = None if with_columns else frozenset[str]()
    with contextlib.nullcontext() if isinstance(source, str) else about("source"):
        return load_problems(source, answers=answers, fields=fields, columns=columns, unanswered=True)
