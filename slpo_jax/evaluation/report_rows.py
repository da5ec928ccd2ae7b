"""A row of the report, by itself: `eval/ROW/row.json`. No other file of this folder knows a row by name."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from slpo_jax.errors import UserError
from slpo_jax.io import artifact
from slpo_jax.io.files import as_json, flatten
from slpo_jax.io.workdir import StageFolder, Workdir

BEST_FIXED = "best_fixed"
"""Stands among a row's baselines for the best of the rows that are `fixed`, by the metric and on the set in question.
That choice is made on the test set itself, so it is a harder baseline than one chosen on the validation split."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the report: a checkpoint and how its rollouts end.

    Attributes:
        name: of the row and of its folder in eval/.
        label: what tables and figures call it.
        order: its place in the report, ascending; rows of the same place stand by name.
        gated: whether a gate chooses the number of latents.
        fixed: whether it is one of those whose best is `BEST_FIXED`.
        baselines: names of the rows that it is compared with, as far as they are there, and `BEST_FIXED`.
        stage: whose checkpoint it is; "" for `config.init`.
        stopping: how rollouts end, "threshold" or "length".
        rules: thresholds or numbers of latents to choose from on the validation split.
        rule: the chosen one.
        latents_a_step: where not 0, a problem has so many latents for each of its steps, and as many as the rule says
            at most.
        selected_for: digest of what the choice depended on; "" where there was none.
        sweep: what each rule reached on the validation split, {rule: Acc, "chosen": the rule, "problems": how many}.
        checkpoint: digest of the parameters.
        evaluation: what all its evaluations depend on, by key of the config.
        settings: what the checkpoint was trained with, as it stands beside the checkpoint.
        shown: of these, by key of the config, those that a report names.
        source: the workdir that the row was taken from; "" for a run's own.
        about: what it is, in a sentence.
    """

    name: str
    label: str
    order: int = 0
    gated: bool = False
    fixed: bool = False
    baselines: tuple[str, ...] = ()
    stage: str = ""
    stopping: Literal["threshold", "length"] = "length"
    rules: tuple[float | int, ...] = ()
    rule: float | int | None = None
    latents_a_step: int = 0
    selected_for: str = ""
    sweep: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    checkpoint: str = ""
    evaluation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shown: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    source: str = ""
    about: str = ""

    @property
    def facts(self) -> dict[str, Any]:
        """All but the name, as it comes back from JSON."""
        return as_json({key: value for key, value in vars(self).items() if key != "name"})


Rows = dict[str, Row]
"""By name, in the report's order."""

_AGAIN = "delete the file and run the evaluate stage again"


def write_row(workdir: str | Path, row: Row) -> None:
    """Write `eval/ROW/row.json`."""
    artifact.write(Workdir(Path(workdir)).row_facts(row.name), value=row.facts)


def read_row(workdir: str | Path, name: str) -> Row | None:
    """Read what `write_row` wrote; None where there is no such file.

    Raises:
        UserError: the file is damaged.
    """
    entry = artifact.read(Workdir(Path(workdir)).row_facts(name), _AGAIN)
    if entry is None:
        return None
    facts: dict[str, Any] = entry.value
    facts |= {key: tuple(value) for key, value in facts.items() if isinstance(value, list)}
    return Row(name, **facts)


RULES = {"threshold": "a number from 0 to 1", "length": "a whole number, 0 or more"}
"""By the way of stopping, what its rule is."""


def is_rule(stopping: Any, rule: Any) -> bool:
    """Return whether rollouts that stop in this way can have the rule."""
    if stopping == "threshold":
        return type(rule) in (int, float) and 0 <= rule <= 1
    return stopping == "length" and type(rule) is int and 0 <= rule < 2**31  # int32


def write_rule(stage: StageFolder, row: Row, alike: bool) -> None:
    """Leave a row's rule beside the checkpoint that it was chosen for, with which it stays wherever that is moved.

    Only one that was chosen, of rollouts like those that the checkpoint was trained for, takes such a one's place.

    Args:
        alike: whether the row's rollouts are. Of others a threshold is better than none.
    """
    trained = stage.digest()
    previous = artifact.value_of(stage.rule, trained) or {}
    rule = {"stopping": row.stopping, "rule": row.rule, "alike": alike}
    takes = (alike and len(row.rules) > 1) or (not previous.get("alike") and (alike or row.stopping == "threshold"))
    if takes and rule != previous:
        artifact.write(stage.rule, trained, rule)


def read_rule(stage: StageFolder, stopping: str) -> float | int | None:
    """Read the rule of a checkpoint that stops in this way; None where none is known of it as it is now trained.

    Raises:
        UserError: the file is damaged.
    """
    entry = artifact.read(stage.rule, _AGAIN)
    is_current = entry is not None and entry.facts == stage.digest()
    return entry.value["rule"] if entry and is_current and entry.value["stopping"] == stopping else None


def sweeps_of(rows: Rows) -> dict[str, Mapping[str, Any]]:
    """Return, by row, the choice of its rule, where it had one."""
    return {name: row.sweep for name, row in rows.items() if row.sweep}


def read_rows(workdir: str | Path) -> Rows:
    """Read the rows that a workdir has records of, in the report's order.

    Raises:
        UserError: a row doesn't say what it is, or `row.json` is malformed.
    """
    folder = Workdir(Path(workdir))
    rows = []
    for name in dict.fromkeys(row for row, _ in folder.evaluated()):
        row = read_row(workdir, name)
        if row is None:
            raise UserError(f"{folder.row_facts(name)}: missing; run the evaluate stage again, or delete its folder")
        rows.append(row)
    return {row.name: row for row in sorted(rows, key=lambda row: (row.order, row.name))}


def baselines_of(row: Row, rows: Rows) -> dict[str, tuple[str, ...]]:
    """Return the baselines of a row that are there, each with the rows that it is the best of."""
    fixed = tuple(other.name for other in rows.values() if other.fixed and other.name != row.name)
    baselines = {name: fixed if name == BEST_FIXED else (name,) for name in row.baselines}
    return {name: members for name, members in baselines.items() if members and set(members) <= rows.keys()}


def reported_settings(runs: Sequence[Rows]) -> dict[str, dict[str, Any]]:
    """Return what the checkpoints of some runs' rows were trained with, as far as all runs agree.

    Args:
        runs: the rows of each run.

    Returns:
        {"": settings that all checkpoints share, STAGE: its own, in the rows' order}, each by key of the config.
    """
    by_stage: dict[str, list[Mapping[str, Any]]] = {}
    for rows in runs:
        for row in rows.values():
            if row.shown:
                by_stage.setdefault(row.stage or row.name, []).append(row.shown)
    agreed = {stage: _agreed(values) for stage, values in by_stage.items()}
    shared = _agreed([*agreed.values()])
    of_stage = {stage: {key: values[key] for key in values if key not in shared} for stage, values in agreed.items()}
    return {"": shared} | of_stage


def differing_settings(runs: Sequence[Rows]) -> list[str]:
    """Return keys in which a row's checkpoints differ between runs, without the seed and what follows from it."""
    keys: set[str] = set()
    for name in {name for rows in runs for name in rows}:
        settings = [flatten(rows[name].settings) for rows in runs if name in rows]
        keys |= {key for run in settings for key in run}.difference(_agreed(settings), {"seed", "start.digest"})
    return sorted(keys)


def _agreed(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entries that are the same in all."""
    first = settings[0] if settings else {}
    return {key: value for key, value in first.items() if all(key in run and run[key] == value for run in settings)}
