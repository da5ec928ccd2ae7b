"""What a row of the report says of itself: `eval/ROW/row.json`. No other file of this folder knows a row by name."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from slpo_jax.errors import UserError
from slpo_jax.io.files import digest, read_json, write_text
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
        checkpoint: digest of the parameters.
        evaluation: what all its evaluations depend on, see `manifest.Manifest.settings`.
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
    checkpoint: str = ""
    evaluation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shown: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    source: str = ""
    about: str = ""

    @property
    def facts(self) -> dict[str, Any]:
        """All but the name, as it comes back from JSON."""
        return json.loads(json.dumps({key: value for key, value in vars(self).items() if key != "name"}))


Rows = dict[str, Row]
"""By name, in the report's order."""

_KINDS: dict[str, Any] = {
    "label": str, "order": int, "gated": bool, "fixed": bool, "baselines": list, "stage": str, "stopping": str,
    "rules": list, "rule": (int, float, type(None)), "selected_for": str, "checkpoint": str, "evaluation": dict,
    "settings": dict, "shown": dict, "source": str, "about": str,
}  # fmt: skip


def write_row(workdir: str | Path, row: Row) -> None:
    """Writes `eval/ROW/row.json`."""
    write_text(Workdir(Path(workdir)).row_facts(row.name), json.dumps(row.facts, indent=1, ensure_ascii=False) + "\n")


def read_row(workdir: str | Path, name: str) -> Row | None:
    """Reads what `write_row` wrote; None where there is no such file.

    Raises:
        UserError: the file is malformed.
    """
    path = Workdir(Path(workdir)).row_facts(name)
    if not path.exists():
        return None
    found: dict[str, Any] = {"about": ""} | read_json(path)
    for key, kind in _KINDS.items():
        if not isinstance(found.get(key), kind) or key not in found:
            raise UserError(
                f"{path}: '{key}' is missing or of the wrong type; delete the file and run the evaluate stage again"
            )
    facts: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in found.items() if key in _KINDS
    }
    return Row(name, **facts)


RULES = {"threshold": "a number from 0 to 1", "length": "a whole number, 0 or more"}
"""By the way of stopping, what its rule is."""


def is_rule(stopping: Any, rule: Any) -> bool:
    """Whether rollouts that stop in this way can have it."""
    if stopping == "threshold":
        return type(rule) in (int, float) and 0 <= rule <= 1
    return stopping == "length" and type(rule) is int and 0 <= rule < 2**31  # int32


def write_rule(stage: StageFolder, row: Row) -> None:
    """Leave a row's rule beside the checkpoint that it was chosen for, with which it stays wherever that is moved.

    The only one that the row could have was not chosen, so it takes no other's place.
    """
    if len(row.rules) == 1 and _rule_of(stage):
        return
    found = {"stopping": row.stopping, "rule": row.rule, "settings": digest(dict(row.settings))}
    text = json.dumps(found, indent=1) + "\n"
    if not stage.rule.is_file() or stage.rule.read_bytes() != text.encode():
        write_text(stage.rule, text)


def read_rule(stage: StageFolder, stopping: str) -> float | int | None:
    """The rule of a checkpoint that stops in this way; None where none is known of it as it is now trained.

    A threshold that was chosen with other settings than the checkpoint was made with, such as another T, is used
    where there is no other.

    Raises:
        UserError: the file is malformed.
    """
    found = _rule_of(stage)
    if found and found["stopping"] == stopping:
        return found["rule"]
    row = read_row(stage.workdir.root, stage.name) if stage.workdir and stopping == "threshold" else None
    of_it = row is not None and not row.source and row.settings == read_json(stage.facts, default={})
    if not (row and of_it and row.stopping == stopping and row.rule is not None):
        return None
    if stage.workdir and not is_rule(stopping, row.rule):
        raise UserError(
            f"{stage.workdir.row_facts(stage.name)}: 'rule' is not {RULES[stopping]}; delete the file and run the "
            "evaluate stage again"
        )
    return row.rule


def _rule_of(stage: StageFolder) -> dict[str, Any]:
    """What `write_rule` wrote; {} where that is not of the checkpoint as it is now trained."""
    if not stage.rule.exists():
        return {}
    found = read_json(stage.rule)
    if not is_rule(found.get("stopping"), found.get("rule")) or not isinstance(found.get("settings"), str):
        raise UserError(f"{stage.rule}: holds no rule; delete the file and run the evaluate stage again")
    return found if found["settings"] == digest(read_json(stage.facts, default={})) else {}


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
