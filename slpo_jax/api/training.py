"""Train in Python, as `slpo train` does, and open the reasoners of a run."""

import contextlib
import dataclasses
import functools
import os
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast, get_args

from ml_collections import ConfigDict

from slpo_jax.api.load_options import by_argument
from slpo_jax.api.trained_reasoner import TrainedReasoner, load
from slpo_jax.config.config_checks import check
from slpo_jax.config.registry import register_reward
from slpo_jax.data.problem import Problems
from slpo_jax.data.problems import DataConfig, load_problems
from slpo_jax.data.record_fields import FieldsConfig
from slpo_jax.data.record_files import records_text
from slpo_jax.data.record_readers import is_dataset_dict, reusable, select_split
from slpo_jax.errors import UserError, about
from slpo_jax.io.files import read_json, write_text
from slpo_jax.io.workdir import Workdir
from slpo_jax.rewards.answers import STYLES, AskedStyle, Kind, style_of
from slpo_jax.rewards.functions import name_of
from slpo_jax.run.own_data_settings import answers_of
from slpo_jax.run.requested_config import requested_config
from slpo_jax.run.sources import made_with, read_as
from slpo_jax.runtime.backend import set_up_jax
from slpo_jax.settings import FieldError


@dataclasses.dataclass(frozen=True)
class Run:
    """A workdir: `run["slpo"]` is the reasoner of a stage or objective, `list(run)` names them.

    Attributes:
        workdir: its folder.
    """

    workdir: Path

    def __iter__(self) -> Iterator[str]:
        return iter(Workdir(self.workdir).finished_stages())

    def __getitem__(self, stage: str) -> TrainedReasoner:
        names = list(self)
        if stage not in names:
            raise UserError(
                f"{self.workdir}: has no finished stage {stage!r}; use one of {', '.join(names) or 'none'}"
            )
        return load(Workdir(self.workdir).stage_folder(stage).path)

    @functools.cached_property
    def report(self) -> dict[str, Any]:
        """The contents of report.json: figures by row and set, differences with intervals.

        Raises:
            UserError: the run was not evaluated.
        """
        return read_json(Workdir(self.workdir).report_json, "run the evaluate stage")


def train(
    start: str | os.PathLike[str] | ConfigDict = "",
    /,
    *,
    train: Any = "",
    valid: Any = "",
    eval: Mapping[str, Any] | None = None,
    base: str | os.PathLike[str] = "",
    workdir: str | os.PathLike[str] = "",
    config: Mapping[str, Any] | None = None,
    reward: str | Callable[..., Any] = "",
) -> Run:
    """Run the stages of a config, as `slpo train` does; called again, it goes on where it was.

    Args:
        start: the name of a shipped config (`slpo configs`), a config file, or a ConfigDict made by one; "" has the
            settings chosen from the problems of `train`, and shown.
        train, valid: sources of problems, as `config.data.train` takes them, or records, as `read` takes them, which
            are written to WORKDIR/data; "" is the config's. A `datasets.DatasetDict` as `train` also gives the
            validation and test sets that are not given, where it has such splits.
        eval: sets to evaluate on, NAME = source or records, instead of the config's.
        base: where `start` is "": the model to begin with, a directory, hub id or file; "" is a small one.
        workdir: where checkpoints and reports go; "" is runs/NAME of the config.
        config: further keys by dotted name, such as {"rl.steps": 100}, or nested.
        reward: a registered name, or a function, see `register_reward`, which goes by its name; "" is the config's.
    Returns:
        the run: its reasoners by stage, its report.
    Raises:
        UserError: a key, a file or a value can't be used; nothing has been done then.
        KeyboardInterrupt: after Ctrl-C, once the stage is saved.
    """
    # Check the types of the arguments.
    for key, value in {"eval": eval, "config": config}.items():
        is_mapping = isinstance(value, Mapping | None)
        if not is_mapping or not all(isinstance(name, str) for name in value or ()):
            shown = reprlib.repr(value)  # short, whatever it is
            raise UserError(f"{key}: {shown} is not valid; give a dict by names")
    for key, path in {"start": start, "base": base, "workdir": workdir}.items():
        if not isinstance(path, str | os.PathLike | ConfigDict):
            raise UserError(f"{key}: {path!r} is not valid; give a text or a path")

    # A function is registered under its own name.
    keys = dict(config or {})
    if reward:
        given = {key.removeprefix("config.") for key in keys}
        if {"reward", "rewards"} & given:
            raise UserError("reward: config has a reward too; leave one of the two out")
        if callable(reward):
            name = name_of(reward)
            if name == "<lambda>":
                raise UserError(
                    "reward: a lambda has no name to be kept under; define it with def"
                )
            register_reward(name, reward)
            reward = name
        keys["reward"] = reward

    # The workdir is named after the config, as the command does.
    name = "run"
    if not isinstance(start, ConfigDict):
        start = os.fspath(start)
        name = Path(start.partition(":")[0]).stem or "own"
    folder = Path(workdir or f"runs/{name}").expanduser()

    # Records become files of the workdir.
    tests = dict(eval or {})
    if is_dataset_dict(train):
        valid, tests = _other_splits(train, valid, tests)
    # Records are written under these names.
    try:
        DataConfig(eval=dict.fromkeys(tests, ""))
    except FieldError as error:
        raise UserError("eval", error.problem) from None
    sources = {
        "train": _source("train", train, folder),
        "valid": _source("valid", valid, folder),
        "base": os.fspath(base),
    }
    test_sources = {}
    for key, test in tests.items():
        test_sources[key] = _source(key, test, folder, learned=False)
    checked = check(requested_config(start, sources, test_sources, keys, set_up_jax))

    # Run the stages, whose modules are imported once jax is set up.
    from slpo_jax.run.run_stages import run_stages

    try:
        run_stages(checked, folder)
    except SystemExit as end:
        # Only a command exits; a caller's process goes on.
        raise KeyboardInterrupt from end
    return Run(folder)


def _other_splits(
    splits: Mapping[str, Any], valid: Any, tests: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return the given validation and test sets, else those among the splits of a `datasets.DatasetDict`."""
    taken = ["train"]
    if isinstance(valid, str) and not valid and "validation" in splits:
        valid = splits["validation"]
        taken.append("validation")
    if not tests and "test" in splits:
        tests = {"test": splits["test"]}
        taken.append("test")
    print(
        f"train: splits {', '.join(taken)} of {', '.join(splits)} are used",
        file=sys.stderr,
    )
    return valid, tests


def _source(name: str, source: Any, folder: Path, learned: bool = True) -> str:
    """Return a source of problems as a text; records are written to a file in the workdir, whose path it is.

    Args:
        name: of the set.
        source: a text, a path or records.
        folder: the workdir.
        learned: whether stages depend on the set, so that a run can't go on with another one.
    Raises:
        UserError: it is of another type, or the workdir's run has begun with other records.
    """
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    with about(name):
        text = records_text(select_split(source, "train" if learned else "test")[1])
    path = Workdir(folder).records(name)
    before = path.read_text(encoding="utf-8") if path.is_file() else text
    if learned and before != text and any(Workdir(folder).checkpoints.glob("*/*")):
        raise UserError(
            f"{name}: the records are not those that {folder} began with; give these, or another workdir"
        )
    write_text(path, text)
    return str(path)


_ARE: dict[Kind, str] = {"numbers": "numbers", "latex": "LaTeX", "texts": "texts"}


@by_argument()
def read(
    source: Any,
    answers: str = "",
    fields: Mapping[str, str] | None = None,
    with_columns: bool = True,
) -> Problems:
    """Read problems as `train` does; `print` says how they were understood, and which fields are not used.

    Args:
        source: a file, a directory, a hub id or a generated set, as `config.data.train` takes it, or records, as
            `evaluate` takes them.
        answers: how answers are read, as `config.prompt.answers`; "" chooses numbers where nine of ten
            answers are some, else texts.
        fields: names of fields that aren't recognised: question, answer, steps, choices; first_choice is "0" or "1".
        with_columns: keep all that a reward may ask for: the records' other columns, which take time and memory, and
            problems without an answer where others have one.
    Returns:
        the problems, with question, steps and answer each.
    Raises:
        UserError: the source can't be read.
    """
    # Check the arguments.
    styles = get_args(AskedStyle)
    if answers and answers not in styles:
        raise UserError(
            f"answers: {answers!r} is not valid; give one of {', '.join(styles)}"
        )
    try:
        fields_config = FieldsConfig(**cast(Any, fields or {}))
    except (TypeError, FieldError):
        raise UserError(
            f"fields: {fields!r} is not valid; give texts as question, answer, steps and so on"
        ) from None
    source = reusable(source)
    source = os.fspath(source) if isinstance(source, os.PathLike) else source

    # Without `answers`, the answers themselves decide how they are read.
    why = ""
    if not answers:
        choice = answers_of(_load(source, "texts", fields_config, with_columns))
        answers = choice.values.get("prompt.answers", "texts")
        why = f" ({choice.why})"
    kind = STYLES[style_of(cast(AskedStyle, answers), "after_mark")].kind
    problems = _load(source, kind, fields_config, with_columns)

    # The reward `correct` has no use for problems without an answer among others.
    if not with_columns:
        unanswered = sum(not problem.answer for problem in problems)
        if 0 < unanswered < len(problems):
            problems = _load(
                source, kind, fields_config, with_columns, unanswered=False
            )

    # Say with which settings a generated set is made. A command prints the summary instead of warnings.
    generation = made_with(source)
    if generation:
        warnings = (*problems.warnings, f"{source}: {generation}")
        problems = problems.with_only(problems, warnings=warnings)
    if with_columns:
        problems.warn()

    name = source if isinstance(source, str) else select_split(source, "train")[0]
    lines = read_as(name, problems, _ARE[kind] + why)
    return problems.with_only(problems, summary=tuple(lines))


def _load(
    source: Any,
    answers: Kind,
    fields: FieldsConfig,
    with_columns: bool,
    unanswered: bool = True,
) -> Problems:
    columns = None if with_columns else frozenset[str]()
    with contextlib.nullcontext() if isinstance(source, str) else about("source"):
        problems = load_problems(
            source,
            answers=answers,
            fields=fields,
            columns=columns,
            unanswered=unanswered,
        )
    # No reward asks for the other columns yet; they are only kept.
    used = {
        role: names
        for role, names in problems.field_use.used.items()
        if role != "reward"
    }
    field_use = dataclasses.replace(problems.field_use, used=used)
    return problems.with_only(problems, field_use=field_use)
