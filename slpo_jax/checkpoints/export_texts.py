"""What an export has beside its weights: its card, and to think in plain PyTorch `custom_generate` with settings."""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from slpo_jax.checkpoints.checkpoint import Checkpoint
from slpo_jax.checkpoints.description import FILE, Description
from slpo_jax.checkpoints.source import GENERATION_FILE, SIDE_FILE
from slpo_jax.config.config import Config
from slpo_jax.data.chat import PromptConfig
from slpo_jax.data.templates import Template
from slpo_jax.io.files import flatten
from slpo_jax.io.workdir import StageFolder

REFUSING = "bad_words_ids"  # with which transformers' own `generate` fails, where our code is not trusted
CODE = "custom_generate/generate.py"  # where transformers looks for it
_UNTRUSTED = (
    "set to have this fail: the model thinks before it answers, with code beside its weights; open it with "
    "from_pretrained(..., trust_remote_code=True). Where that was given, this is a copy without {}, which "
    "save_pretrained leaves out: copy them from the export"
)
_UNKNOWN = "set to have this fail: the model thinks before it answers, in a way that slpo_jax alone knows; ask it there"


def thinks(config: Config, checkpoint: Checkpoint) -> bool:
    """Whether an export thinks in PyTorch.

    Args:
        config: to evaluate it with.
    """
    template = checkpoint.template
    if checkpoint.architecture.layers is None or not config.latent_policy.selected.is_the_reasoners:
        return False
    # Not every tokenizer tells the marker at the end of a prompt from the text before it.
    chat, how = [{"role": "user", "content": "?"}], {"chat_template": template.chat_template, "return_dict": True}
    asked = template.tokenizer.apply_chat_template(chat, **how)["input_ids"]
    return bool([asked] == template.prompts(["?"], Counter()))


def have_asked(template: Template) -> None:
    """Have the tokenizer itself write prompts: `apply_chat_template` of a question, padded on the left in a batch."""
    tokenizer = template.tokenizer
    tokenizer.chat_template, tokenizer.padding_side = template.chat_template, "left"
    tokenizer.init_kwargs |= {"padding_side": "left", "model_input_names": ["input_ids", "attention_mask"]}  # are saved


def thinking_files(config: Config, checkpoint: Checkpoint, rule: float | int, thinks: bool) -> dict[str, str]:
    """The code and its settings; of latents that PyTorch can't think in, settings that have transformers say so.

    Args:
        config: to evaluate it with.
        rule: how its rollouts end, see `export.write_export`.
        thinks: of `thinks`.
    Returns:
        texts by their files in the export; {} for what transformers generates as it is.
    """
    if not checkpoint.architecture.has_latents:
        return {}
    template = checkpoint.template
    eos_ids = list(dict.fromkeys([template.eos_id, *checkpoint.description.eos_ids]))
    settings: dict[str, Any] = {"eos_token_id": eos_ids, "pad_token_id": template.pad_id, "do_sample": False}
    if not thinks:
        return {GENERATION_FILE: _json(settings | {REFUSING: _UNKNOWN})}
    described = checkpoint.description
    has_side = described.gate is not None or bool(described.architecture.heads(described.model.n_embd))
    left_out = " and ".join([CODE, *([SIDE_FILE] if has_side else []), FILE])
    ended_by, least = config.latent_policy.selected.ended_by
    halting = template.token(ended_by) if ended_by else None
    settings |= {
        "max_new_tokens": config.evaluate.max_answer_tokens or config.max_answer_tokens,
        "suppress_tokens": list(template.banned_ids) or None,
        "prompt_end_id": template.prompt_end,
        "unknown_token_id": template.unknown_id,
        "closing_ids": list(template.closing_ids),
        "max_latents": config.max_latents,
        "stop_threshold": rule,
        "latent_layers": checkpoint.architecture.layers,
        "gate_layers": _gate_layers(described.gate),
        "halting_token_id": halting,
        "halting_least": least,
        REFUSING: _UNTRUSTED.format(left_out),
    }
    if not config.gate.enabled:
        most = min(config.max_latents, max(1 if halting is None else 0, int(rule)))
        settings |= {"max_latents": most, "stop_threshold": None, "gate_layers": []}
    code = (Path(__file__).parent / "custom_generate.py").read_text(encoding="utf-8")
    return {CODE: code, GENERATION_FILE: _json(settings)}


def _gate_layers(hidden: int | None) -> list[tuple[str, str]]:
    """As `Architecture.layers`, from a latent to the stop logit."""
    return [*([("linear", "gate.hidden"), ("gelu", "tanh")] if hidden else []), ("linear", "gate.out")]


def _json(settings: dict[str, Any]) -> str:
    return json.dumps(settings, indent=2) + "\n"


def model_card(checkpoint: Path, description: Description, name: str, thinks: bool, explains: bool = False) -> str:
    """README.md of an exported checkpoint, `card.md` filled in.

    Args:
        checkpoint: WORKDIR/checkpoints/STAGE or a step's directory in it, or what was imported.
        name: the title.
        thinks: whether it thinks in plain PyTorch.
        explains: whether SIM-CoT's decoder goes along.
    """
    stage, source = StageFolder.of(checkpoint), description.source
    origin = "These weights are not from a finished stage of slpo_jax: they were converted, or saved on the way."
    if source and stage.workdir is None:
        origin = f"These weights were converted by slpo_jax from `{source}`."
    elif stage.is_finished and (said := stage.said()):
        start = f"`{short(said['init'])}`" if said.get("init") else "random weights"
        origin = f"Trained by slpo_jax from {start}, to the end of the stage `{stage.name}`."
    template = jinja2.Template(
        Path(__file__).with_name("card.md").read_text(encoding="utf-8"),
        trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    facts = {field.name: getattr(description, field.name) for field in dataclasses.fields(description)}
    how = _use(description.settings)
    return template.render(facts, name=name, origin=origin, how=how, thinks=thinks, explains=explains)


def short(source: str) -> str:
    """A local path's last part, or a hub id as it is: what a card may say of where something is from."""
    return Path(source).name if Path(source).suffix or Path(source).is_absolute() else source


def _use(settings: Mapping[str, Any]) -> str:
    """How it was made to think and answer; "" where nothing is known."""
    if not settings:
        return ""
    rule, tokens = settings.get("rule"), settings.get("evaluate.max_answer_tokens") or settings.get("max_answer_tokens")
    own = flatten({"prompt": vars(PromptConfig())})
    asked = ", ".join(f"{key}={settings[key]!r}" for key in own if settings.get(key, own[key]) != own[key])
    thought = f"{rule} latents"
    if settings.get("gate.enabled"):
        reached = "0.5, as none was chosen," if rule is None else rule
        thought = f"at most {settings.get('max_latents')} latents, until the gate's stop probability reaches {reached}"
    return f"{thought} and answers of at most {tokens} tokens" + f", asked with `{asked}`" * bool(asked)
