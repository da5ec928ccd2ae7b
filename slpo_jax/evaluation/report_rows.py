"""A row of the report, by itself: `eval/ROW/row.json`. No other file of this folder knows a row by name."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from slpo_jax.data.problem import Problem
from slpo_jax.errors import UserError
from slpo_jax.io import artifact
from slpo_jax.io.files import as_json, flatten
from slpo_jax.io.workdir import StageFolder, Workdir

BEST_FIXED = "best_fixed"
"""Stands among a row's baselines for the best of the rows that are `fixed`, by the metric and on the set in question.
That choice is made on the test set itself, so it is a harder baseline than one chosen on the validation split."""
BEST_FIXED_LABEL = "best fixed length"


Rule = float | int
"""How rollouts stop: a threshold of the gate, or a number of latents."""
Facts = Mapping[str, Any]


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
    rules: tuple[Rule, ...] = ()
    rule: Rule | None = None
    latents_a_step: int = 0
    selected_for: str = ""
    sweep: Facts = dataclasses.field(default_factory=dict)
    checkpoint: str = ""
    evaluation: Facts = dataclasses.field(default_factory=dict)
    settings: Facts = dataclasses.field(default_factory=dict)
    shown: Facts = dataclasses.field(default_factory=dict)
    source: str = ""
    about: str = ""

    @property
    def facts(self) -> dict[str, Any]:
        """All but the name, as it comes back from JSON."""
        facts = dict(vars(self))
        del facts["name"]
        return as_json(facts)

    def rule_for(self, problems: Sequence[Problem], by_steps: bool) -> Any:
        """Return the rule of all problems, or a list of each one's where it goes by the problem's steps.

        Args:
            by_steps: whether every number of latents goes by them, one for each step.
        """
        each = self.latents_a_step
        if by_steps and self.stopping == "length":
            each = 1
        if not each or self.rule is None:
            return self.rule
        most = int(self.rule)
        rules = []
        for problem in problems:
            # A problem without steps has as many latents as there may be.
            latents = each * len(problem.steps) or most
            rules.append(min(most, latents))
        return rules


Rows = dict[str, Row]
"""By name, in the report's order."""

_ABSENT = object()
_AGAIN = "delete the file and run the evaluate stage again"


def write_row(workdir: str | Path, row: Row) -> None:
    """Write `eval/ROW/row.json`."""
    folder = Workdir(Path(workdir))
    path = folder.row_facts(row.name)
    artifact.write(path, value=row.facts)


def read_row(workdir: str | Path, name: str) -> Row | None:
    """Read what `write_row` wrote; None where there is no such file.

    Raises:
        UserError: the file is damaged.
    """
    folder = Workdir(Path(workdir))
    path = folder.row_facts(name)
    entry = artifact.read(path, _AGAIN)
    if entry is None:
        return None
    facts = {}
    for key, value in entry.value.items():
        # JSON has no tuples.
        if isinstance(value, list):
            value = tuple(value)
        facts[key] = value
    return Row(name, **facts)


RULES = {"threshold": "a number from 0 to 1", "length": "a whole number, 0 or more"}
"""By the way of stopping, what its rule is."""


def is_rule(stopping: Any, rule: Any) -> bool:
    """Return whether rollouts that stop in this way can have the rule."""
    # True and False are not numbers.
    if stopping == "threshold" and type(rule) in (int, float):
        return 0 <= rule <= 1
    if stopping == "length" and type(rule) is int:
        return 0 <= rule < 2**31  # int32
    return False


def write_rule(stage: StageFolder, row: Row, alike: bool) -> None:
    """Leave a row's rule beside the checkpoint that it was chosen for, with which it stays wherever that is moved.

    Only one that was chosen, of rollouts like those that the checkpoint was trained for, takes such a one's place.

    Args:
        alike: whether the row's rollouts are. Of others a threshold is better than none.
    """
    trained = stage.digest()
    previous = artifact.value_of(stage.rule, trained) or {}
    was_chosen = alike and len(row.rules) > 1
    if previous.get("alike") and not was_chosen:
        return
    is_better_than_none = alike or row.stopping == "threshold"
    if not is_better_than_none:
        return
    rule = {
        "stopping": row.stopping,
        "rule": row.rule,
        "alike": alike,
    }
    if rule != previous:
        artifact.write(stage.rule, trained, rule)


def read_rule(stage: StageFolder, stopping: str) -> Rule | None:
    """Read the rule of a checkpoint that stops in this way; None where none is known of it as it is now trained.

    Raises:
        UserError: the file is damaged.
    """
    entry = artifact.read(stage.rule, _AGAIN)
    if entry is None:
        return None
    if entry.facts != stage.digest():
        return None
    if entry.value["stopping"] != stopping:
        return None
    return entry.value["rule"]


def sweeps_of(rows: Rows) -> dict[str, Facts]:
    """Return, by row, the choice of its rule, where it had one."""
    sweeps: dict[str, Facts] = {}
    for name, row in rows.items():
        if row.sweep:
            sweeps[name] = row.sweep
    return sweeps


def read_rows(workdir: str | Path) -> Rows:
    """Read the rows that a workdir has records of, in the report's order.

    Raises:
        UserError: a row doesn't say what it is, or `row.json` is malformed.
    """
    folder = Workdir(Path(workdir))
    names: dict[str, None] = {}
    for name, _ in folder.list_evaluated():
        names[name] = None
    rows = []
    for name in names:
        row = read_row(workdir, name)
        if row is None:
            path = folder.row_facts(name)
            raise UserError(
                f"{path}: missing; run the evaluate stage again, or delete its folder"
            )
        rows.append(row)
    rows.sort(key=lambda row: (row.order, row.name))
    return {row.name: row for row in rows}


def baselines_of(row: Row, rows: Rows) -> dict[str, tuple[str, ...]]:
    """Return the baselines of a row that are there, each with the rows that it is the best of."""
    others: list[str] = []
    for other in rows.values():
        if other.fixed and other.name != row.name:
            others.append(other.name)
    # Those that were evaluated; the best fixed one stands for all other fixed rows.
    baselines: dict[str, tuple[str, ...]] = {}
    for name in row.baselines:
        if name in rows:
            baselines[name] = (name,)
        elif name == BEST_FIXED and others:
            baselines[name] = tuple(others)
    return baselines


def reported_settings(runs: Sequence[Rows]) -> dict[str, dict[str, Any]]:
    """Return what the checkpoints of some runs' rows were trained with, as far as all runs agree.

    Args:
        runs: the rows of each run.

    Returns:
        {"": settings that all checkpoints share, STAGE: its own, in the rows' order}, each by key of the config.
    """
    # Rows of one stage have its settings in common; what all stages share is shown once.
    by_stage: dict[str, list[Facts]] = {}
    for rows in runs:
        for row in rows.values():
            if row.shown:
                stage = row.stage or row.name
                shown = by_stage.setdefault(stage, [])
                shown.append(row.shown)
    agreed: dict[str, Facts] = {}
    for stage, settings_of_rows in by_stage.items():
        agreed[stage] = _common_entries(settings_of_rows)
    shared = _common_entries(list(agreed.values()))
    settings = {"": shared}
    for stage, values in agreed.items():
        own: dict[str, Any] = {}
        for key, value in values.items():
            if key not in shared:
                own[key] = value
        settings[stage] = own
    return settings


def differing_settings(runs: Sequence[Rows]) -> list[str]:
    """Return keys in which a row's checkpoints differ between runs, without the seed and what follows from it."""
    # Of each row, the keys that not all runs have with the same value.
    keys: set[str] = set()
    names = set().union(*runs)
    for name in names:
        settings: list[Facts] = []
        for rows in runs:
            if name in rows:
                settings.append(flatten(rows[name].settings))
        common = _common_entries(settings)
        for entries in settings:
            differing = entries.keys() - common.keys()
            keys |= differing
    return sorted(keys - {"seed", "start.digest"})


def _common_entries(settings: Sequence[Facts]) -> dict[str, Any]:
    """Return the entries that are the same in all."""
    if not settings:
        return {}
    first, *others = settings
    agreed = dict(first)
    for run in others:
        for key, value in first.items():
            if run.get(key, _ABSENT) != value:
                agreed.pop(key, None)
    return agreed
