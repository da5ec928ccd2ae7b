"""What a row of the report says of itself: `eval/ROW/row.json`. No other file of this folder knows a row by name."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from slpo_jax.errors import UserError
from slpo_jax.io import artifact
from slpo_jax.io.files import as_json, digest, flatten
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
    """Writes `eval/ROW/row.json`."""
    artifact.write(Workdir(Path(workdir)).row_facts(row.name), value=row.facts)


def read_row(workdir: str | Path, name: str) -> Row | None:
    """Reads what `write_row` wrote; None where there is no such file.

    Raises:
        UserError: the file is damaged.
    """
    found = artifact.read(Workdir(Path(workdir)).row_facts(name), _AGAIN)
    if found is None:
        return None
    facts: dict[str, Any] = found.value
    facts |= {key: tuple(value) for key, value in facts.items() if isinstance(value, list)}
    return Row(name, **facts)


RULES = {"threshold": "a number from 0 to 1", "length": "a whole number, 0 or more"}
"""By the way of stopping, what its rule is."""


def is_rule(stopping: Any, rule: Any) -> bool:
    """Whether rollouts that stop in this way can have it."""
    if stopping == "threshold":
        return type(rule) in (int, float) and 0 <= rule <= 1
    return stopping == "length" and type(rule) is int and 0 <= rule < 2**31  # int32


def write_rule(stage: StageFolder, row: Row, alike: bool) -> None:
    """Leave a row's rule beside the checkpoint that it was chosen for, with which it stays wherever that is moved.

    Only one that was chosen, of rollouts like those that the checkpoint was trained for, takes such a one's place.

    Args:
        alike: whether the row's rollouts are. Of others a threshold is better than none.
    """
    trained = digest(dict(row.settings))
    known = artifact.value_of(stage.rule, trained) or {}
    told = {"stopping": row.stopping, "rule": row.rule, "alike": alike}
    takes = (alike and len(row.rules) > 1) or (not known.get("alike") and (alike or row.stopping == "threshold"))
    if takes and told != known:
        artifact.write(stage.rule, trained, told)


def read_rule(stage: StageFolder, stopping: str) -> float | int | None:
    """The rule of a checkpoint that stops in this way; None where none is known of it as it is now trained.

    Raises:
        UserError: the file is damaged.
    """
    found = artifact.read(stage.rule, _AGAIN)
    known = found is not None and found.facts == digest(stage.said())
    return found.value["rule"] if found and known and found.value["stopping"] == stopping else None


def sweeps_of(rows: Rows) -> dict[str, Mapping[str, Any]]:
    """Row -> the choice of its rule, of those that had one."""
    return {name: row.sweep for name, row in rows.items() if row.sweep}


def read_rows(workdir: str | Path) -> Rows:
    """The rows that a workdir has records of, in the report's order.

    Raises:
        UserError: a row doesn't say what it is, or `row.json` is malformed.
    """
    folder = Workdir(Path(workdir))
    found = []
    for name in dict.fromkeys(row for row, _ in folder.evaluated()):
        row = read_row(workdir, name)
        if row is None:
            raise UserError(f"{folder.row_facts(name)}: missing; run the evaluate stage again, or delete its folder")
        found.append(row)
    return {row.name: row for row in sorted(found, key=lambda row: (row.order, row.name))}


def baselines_of(row: Row, rows: Rows) -> dict[str, tuple[str, ...]]:
    """The baselines of a row that are there, each with the rows that it is the best of."""
    fixed = tuple(other.name for other in rows.values() if other.fixed and other.name != row.name)
    found = {name: fixed if name == BEST_FIXED else (name,) for name in row.baselines}
    return {name: members for name, members in found.items() if members and set(members) <= rows.keys()}


def reported_settings(runs: Sequence[Rows]) -> dict[str, dict[str, Any]]:
    """What the checkpoints of some runs' rows were trained with, as far as all runs agree.

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
    agreed = {stage: _agreed(found) for stage, found in by_stage.items()}
    shared = _agreed([*agreed.values()])
    own = {stage: {key: found[key] for key in found if key not in shared} for stage, found in agreed.items()}
    return {"": shared} | own


def differing_settings(runs: Sequence[Rows]) -> list[str]:
    """Keys in which the checkpoints of a row differ between runs, other than the seed and what follows from it."""
    keys: set[str] = set()
    for name in {name for rows in runs for name in rows}:
        found = [flatten(rows[name].settings) for rows in runs if name in rows]
        keys |= {key for one in found for key in one}.difference(_agreed(found), {"seed", "start.digest"})
    return sorted(keys)


def _agreed(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The entries that are the same in all."""
    first = found[0] if found else {}
    return {key: value for key, value in first.items() if all(key in one and one[key] == value for one in found)}
