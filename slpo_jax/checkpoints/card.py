"""The model card of an export, `card.md` with what was trained on what, and what it measures, from the run's files."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template

from slpo_jax.checkpoints.description import Description
from slpo_jax.errors import UserError
from slpo_jax.evaluation.markdown import percent, shown_columns
from slpo_jax.io.files import read_json
from slpo_jax.io.workdir import StageFolder
from slpo_jax.stages import CONTROL, IMITATE, RL, SECTIONS, TITLES


def model_card(checkpoint: Path, description: Description, name: str, thinks: bool, explains: bool = False) -> str:
    """README.md of an exported checkpoint.

    Args:
        checkpoint: WORKDIR/checkpoints/STAGE or a step's directory in it; without a run around it, the card says so.
        name: the title.
        thinks: whether it thinks in plain PyTorch.
        explains: whether SIM-CoT's decoder goes along.
    """
    stage = StageFolder.of(checkpoint)
    in_run = stage.workdir is not None and stage.is_finished and stage.facts.is_file() and _kind(stage) in TITLES
    template = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    facts = {field.name: getattr(description, field.name) for field in dataclasses.fields(description)}
    return Template(template, trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined).render(
        facts,
        name=name,
        training=_training(stage) if in_run else _converted(checkpoint, description),
        measured=_figures(stage) if in_run else "Not evaluated by slpo_jax.",
        how=_use(description.settings),
        thinks=thinks,
        explains=explains,
    )


def _kind(stage: StageFolder) -> str:
    """Which stage made a checkpoint: "rl" makes one for each objective, under the objective's name."""
    return RL if stage.is_objective else stage.name


def _training(stage: StageFolder) -> str:
    assert stage.workdir is not None
    lines = []
    for made in _led_to(stage):
        if not (made.facts.is_file() and made.is_finished):
            continue
        facts, kind, steps = made.said(), _kind(made), made.finished.read_text().strip()
        section = facts[next(section for section in SECTIONS if kind.startswith(section))]
        own = facts.get("objective", {}).get(made.name, {})
        rate = own.get("learning_rate") or section["optimizer"]["learning_rate"]
        title = TITLES[kind] + (f" with the objective `{made.name}`" if kind == RL else "")
        if kind == IMITATE and section.get("recipe"):
            title = f"imitation with the recipe `{section['recipe']}`"
        lines.append(
            f"- {title}: {steps} steps of {section['batch_size']} problems, {section['optimizer']['name']} at "
            f"{rate:g}, on `{short(facts['data']['train'])}` (seed {facts['seed']})"
        )
    first = stage.said()
    start = f"`{short(first['init'])}`" if first["init"] else "random weights"
    return "\n".join([f"Started from {start}; then, in order:", "", *lines])


def _led_to(stage: StageFolder) -> list[StageFolder]:
    """The stages that were run one after the other; an imitation control's steps include imitation's."""
    start = stage.said().get("start", {}).get("stage", "")
    if not start or stage.workdir is None or _kind(stage) == CONTROL:
        return [stage]
    return [*_led_to(stage.workdir.stage(start)), stage]


def _converted(checkpoint: Path, description: Description) -> str:
    if description.source and StageFolder.of(checkpoint).workdir is None:
        return f"These weights were converted by slpo_jax from `{description.source}`."
    return "These weights are not from a finished stage of slpo_jax: they were converted, or saved on the way."


def short(source: str) -> str:
    """A local path's last part, or a hub id as it is: what a card may say of where something is from."""
    return Path(source).name if Path(source).suffix or Path(source).is_absolute() else source


def _figures(stage: StageFolder) -> str:
    """What the run's report says of the checkpoint, in the first row that is of it as it is now trained."""
    assert stage.workdir is not None
    path = stage.workdir.report_json
    report, trained = read_json(path, default={}), stage.said()
    try:
        own = {name: row for name, row in report.get("rows", {}).items() if row["stage"] == stage.name}
        found = [name for name, row in own.items() if row["settings"] == trained and not row["source"]]
        sets: dict[str, Any] = report["eval"][found[0]] if found else {}
    except (AttributeError, KeyError, TypeError):
        raise UserError(f"{path}: is no report of this program; delete it and run the evaluate stage again") from None
    if not found:
        return "This checkpoint was not evaluated in its run."
    keys = shown_columns({found[0]: sets})
    rows = [f"| data set | n | {' | '.join(keys)} |", f"| --- | ---: |{' ---: |' * len(keys)}"]
    for name, row in sets.items():
        rows.append(f"| {name} | {row['n']} | {' | '.join(_cell(row, key) for key in keys)} |")
    row = report["rows"][found[0]]
    used, gated = row.get("evaluation", {}), row.get("stopping") == "threshold"
    how = _stopping(used.get("max_latents"), row.get("rule"), gated, used.get("evaluate.max_answer_tokens"))
    note = f"Rates in percent, ± standard error; pass@k under noise; latent_steps is a mean. Measured with {how}."
    return "\n".join([*rows, "", note])


def _stopping(most: Any, rule: Any, gated: bool, tokens: Any) -> str:
    """How it thinks and answers, in words."""
    thought = f"{rule} latents"
    if gated:
        reached = "0.5, as none was chosen," if rule is None else rule
        thought = f"at most {most} latents, until the gate's stop probability reaches {reached}"
    return f"{thought} and answers of at most {tokens} tokens"


def _use(settings: Mapping[str, Any]) -> str:
    """How it was made to think and answer; "" where nothing is known."""
    if not settings:
        return ""
    tokens = settings.get("evaluate.max_answer_tokens") or settings.get("max_answer_tokens")
    return _stopping(settings.get("max_latents"), settings.get("rule"), bool(settings.get("gate.enabled")), tokens)


def _cell(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if value is None:
        return "-"
    if key == "latent_steps":
        return f"{value:.2f}"
    return percent(row, key)
