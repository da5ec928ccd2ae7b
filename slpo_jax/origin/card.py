"""The model card of an export: what was trained on what, and what it measures, from the run's own files."""

from pathlib import Path
from typing import Any

from slpo_jax.interop.description import Description
from slpo_jax.io.files import read_json
from slpo_jax.io.workdir import StageFolder
from slpo_jax.models.gpt2 import GPT2Config

_TITLES = {
    "imitate": "imitation (CoT-SFT and the latent curriculum or self-distillation)",
    "imitate_control": "further imitation, the control of SLPO",
    "cold_start": "cold start of the stopping gate",
    "slpo": "SLPO (Surrogate Latent Policy Optimization)",
}
_BEFORE = {
    "imitate": ("imitate",),
    "imitate_control": ("imitate_control",),
    "cold_start": ("imitate", "cold_start"),
    "slpo": ("imitate", "cold_start", "slpo"),
}


def model_card(checkpoint: Path, description: Description, name: str) -> str:
    """README.md of an exported checkpoint.

    Args:
        checkpoint: WORKDIR/checkpoints/STAGE or a step's directory in it; without a run around it, the card says so.
        name: the title.
    """
    stage_dir = checkpoint.parent if checkpoint.name.isdigit() else checkpoint
    stage, workdir = stage_dir.name, stage_dir.parent.parent
    in_run = stage in _TITLES and all((stage_dir / name).is_file() for name in ("config.json", "finished"))
    backbone = "GPT-2" if isinstance(description.model, GPT2Config) else "Llama"
    kind = {"coconut": "COCONUT", "codi": "CODI"}[description.kind]
    parts = [
        f"---\nlibrary_name: transformers\ntags: [latent-reasoning, {description.kind}, slpo]\n---",
        f"# {name}",
        (
            f"A latent reasoner: {kind} on {backbone} ({description.model.n_layer} layers, width "
            f"{description.model.n_embd}, {description.model.vocab_size} tokens), exported from slpo_jax."
        ),
        "## Training",
        _training(stage, workdir)
        if in_run
        else _converted(checkpoint, description),
        "## Measured",
        _figures(stage, workdir) if in_run else "Not evaluated by slpo_jax.",
        "## Files",
        _files(description),
    ]
    return "\n\n".join(parts) + "\n"


def _training(stage: str, workdir: Path) -> str:
    lines = []
    for name in _BEFORE[stage]:
        path = workdir / "checkpoints" / name
        if not ((path / "config.json").is_file() and (path / "finished").is_file()):
            continue
        facts, steps = read_json(path / "config.json"), (path / "finished").read_text().strip()
        section = facts[name.removesuffix("_control")]
        optimizer = section["optimizer"]
        lines.append(
            f"- {_TITLES[name]}: {steps} steps of {section['batch_size']} problems, {optimizer['name']} at "
            f"{optimizer['learning_rate']:g}, on `{short(facts['data']['train'])}` (seed {facts['seed']})"
        )
    first = read_json(workdir / "checkpoints" / stage / "config.json")
    start = f"`{short(first['init'])}`" if first["init"] else "random weights"
    return "\n".join([f"Started from {start}; then, in order:", "", *lines])


def _converted(checkpoint: Path, description: Description) -> str:
    if description.source and StageFolder.of(checkpoint).workdir is None:
        return f"These weights were converted by slpo_jax from `{description.source}`."
    return "These weights are not from a finished stage of slpo_jax: they were converted, or saved on the way."


def short(source: str) -> str:
    """A local path's last part, or a hub id as it is: what a card may say of where something is from."""
    return Path(source).name if Path(source).suffix or Path(source).is_absolute() else source


def _figures(stage: str, workdir: Path) -> str:
    path = workdir / "report.json"
    sets: dict[str, Any] = (read_json(path)["eval"].get(stage) or {}) if path.is_file() else {}
    if not sets:
        return "This checkpoint was not evaluated in its run."
    keys = [key for key in ("acc", "pass@1", "pass@8", "pass@16", "maj@16", "latent_steps") if _has(sets, key)]
    rows = [f"| data set | n | {' | '.join(keys)} |", f"| --- | ---: |{' ---: |' * len(keys)}"]
    for name, row in sets.items():
        rows.append(f"| {name} | {row['n']} | {' | '.join(_cell(row, key) for key in keys)} |")
    note = "Rates in percent, ± standard error; pass@k under MC-dropout; latent_steps is a mean."
    return "\n".join([*rows, "", note])


def _has(sets: dict[str, Any], key: str) -> bool:
    return any(row.get(key) is not None for row in sets.values())


def _cell(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if value is None:
        return "-"
    if key == "latent_steps":
        return f"{value:.2f}"
    error = row.get(f"{key}_se")
    return f"{100 * value:.1f}" + (f" ± {100 * error:.1f}" if error is not None else "")


def _files(description: Description) -> str:
    lines = [
        (
            "- `model.safetensors`, `config.json`, tokenizer: the language model, for "
            "`transformers.AutoModelForCausalLM.from_pretrained`. `latent_start_id` and `latent_end_id` in config.json "
            "enclose the latents, which are not tokens."
        ),
    ]
    if description.kind == "codi":
        lines.append(
            "- `reasoner.safetensors`, `projector.{1,3,4}.*`: Linear, GELU, Linear, LayerNorm, from the last hidden "
            "state to the next latent."
        )
    if description.gate is not None:
        state = "trained" if description.gate_trained else "random"
        lines.append(f"- `reasoner.safetensors`, `gate.*`: the stopping gate ({state}), a stop logit from each latent.")
    lines.append("- `reasoner.json`: kind of reasoner and shapes, for slpo_jax (`--config.init=THIS_DIRECTORY`).")
    return "\n".join(lines)
