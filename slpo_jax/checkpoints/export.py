"""Exports: directories that transformers opens, and thinks with in plain PyTorch by `custom_generate` and settings."""

import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from absl import logging
from safetensors import SafetensorError
from safetensors.numpy import save_file

from slpo_jax.architectures.weights import backbone_weights, gate_weights, write_tree
from slpo_jax.checkpoints.checkpoint import Checkpoint
from slpo_jax.checkpoints.description import FILE, MODEL_FILE, Description
from slpo_jax.checkpoints.foreign import GENERATION_FILE, SIDE_FILE
from slpo_jax.checkpoints.foreign_layouts import DECODER_FILE, write_decoder
from slpo_jax.config.config import Config
from slpo_jax.data.chat import PromptConfig
from slpo_jax.data.templates import Template
from slpo_jax.errors import UserError
from slpo_jax.io.artifact import CHECKSUMS, matches_checksums, read_checksums, write_checksums
from slpo_jax.io.files import check_free, flatten, whole_folder, write_text
from slpo_jax.io.orbax import is_checkpoint
from slpo_jax.io.workdir import StageFolder, Workdir
from slpo_jax.models.parts import DECODER, GATE, LATENT_POLICY, REASONER
from slpo_jax.models.reasoner import BACKBONE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

REFUSING = ("sequence_bias", "bad_words_ids")
"""What transformers' own `generate` and continuous batching fail with, where our code is not trusted.

The first says so everywhere, and the second where a caller gives a bias of its own.
"""
CODE = "custom_generate/generate.py"  # where transformers looks for it
_UNTRUSTED = (
    "set to have this fail: the model thinks before it answers, with code beside its weights; open it with "
    "from_pretrained(..., trust_remote_code=True). Where that was given, this is a copy without {}, which "
    "save_pretrained leaves out: copy them from the export"
)
_UNKNOWN = "set to have this fail: the model thinks before it answers, in a way that slpo_jax alone knows; ask it there"


def replaced_by_export(
    target: Path, overwrite: bool = False, remedy: str = "give another directory"
) -> Collection[str] | None:
    """Return what of a folder an export there takes the place of; None where it is not in use.

    An export that nobody has changed since is replaced without being asked.

    Raises:
        UserError: it is in use, and not to be overwritten, or by a run.
    """
    names = {CHECKSUMS} | {name.partition("/")[0] for name in read_checksums(target)}
    if (target / FILE).is_file() and matches_checksums(target):
        return names
    if not (overwrite and target.is_dir()):
        check_free(target, remedy)
        return None
    if is_checkpoint(target) or Workdir(target).checkpoints.is_dir():
        raise UserError(f"{target}: is a run's folder; give another directory")
    return names


def write_export(
    target: Path, source: Path, params: dict[str, Any], checkpoint: Checkpoint, config: Config, rule: float | int,
    replaces: Collection[str] | None,
) -> Checkpoint:  # fmt: skip
    """Write a Hugging Face directory of a reasoner, with what is needed to think in PyTorch.

    Args:
        target: not in use, but for what it replaces.
        source: where it is from, for the model card.
        params: all parts, on the host.
        checkpoint: what they are of; its tokenizer is changed.
        config: what it is used with, whose gate is enabled where it stops the rollouts.
        rule: the gate's threshold, or without a gate the number of latents.
        replaces: see `replaced_by_export`.
    Returns:
        what was written: without the random gate of a run that has none.
    Raises:
        UserError: no other program knows its latents, or the target is in use.
    """
    if LATENT_POLICY in params:
        raise UserError(
            f"{source}: has parameters of a latent policy's own, which no other program knows; use it as it is"
        )
    # A run's parameters always have a gate, which may be random still.
    if not checkpoint.description.gate_trained:
        checkpoint = dataclasses.replace(checkpoint, description=dataclasses.replace(checkpoint.description, gate=None))
    can_think = thinks(config, checkpoint)
    files = thinking_files(config, checkpoint, rule, can_think)
    if can_think:
        write_chat_template(checkpoint.template)
    files["README.md"] = model_card(source, checkpoint.description, target.name, can_think, DECODER in params)
    export_reasoner(target, params, checkpoint, files, str(source), replaces)
    _check_tokenizer(target, checkpoint.template.tokenizer)
    return checkpoint


def _check_tokenizer(folder: Path, tokenizer: "PreTrainedTokenizerFast") -> None:
    """Warn where transformers opens another tokenizer: of a Qwen2 it takes its own, whatever the files name."""
    from transformers import AutoTokenizer

    text = "Tom has 15 apples, she's 7 ."
    if AutoTokenizer.from_pretrained(folder)(text)["input_ids"] != tokenizer(text)["input_ids"]:
        logging.warning(
            "%s: transformers' AutoTokenizer cuts texts in another way than its tokenizer.json; open that with "
            "PreTrainedTokenizerFast.from_pretrained",
            folder,
        )


def export_adapters(source: Path, target: Path) -> None:
    """Copy the adapters that a finished stage keeps beside its checkpoint.

    Args:
        source: WORKDIR/checkpoints/STAGE.
        target: must not exist, or be empty.
    Raises:
        UserError: it has none, or the target is in use.
    """
    folder = StageFolder.of(source).adapters
    if not folder.is_dir():
        raise UserError(f"adapters: {source} has none apart; train them with config.rl.lora.rank, or leave it out")
    with whole_folder(target) as temporary:
        shutil.copytree(folder, temporary, dirs_exist_ok=True)


def export_reasoner(
    folder: Path, params: dict[str, Any], checkpoint: Checkpoint, texts: Mapping[str, str], source: str = "checkpoint",
    replaces: Collection[str] | None = None,
) -> None:  # fmt: skip
    """Write a directory that transformers opens: language model, tokenizer, and what only we know beside them.

    Args:
        folder: not in use, but for what it replaces; it appears whole or not at all.
        params: the reasoner's part, and the gate's and SIM-CoT's decoder's as far as there are some.
        checkpoint: what they are of.
        texts: of further files, by their places in the folder.
        source: where they are from, for messages.
        replaces: see `replaced_by_export`.
    Raises:
        UserError: a tensor has another shape than the description says, the folder is in use, or the disk is full.
    """
    description, width = checkpoint.description, checkpoint.description.model.n_embd
    heads = {name: part for name, part in params[REASONER].items() if name != BACKBONE}
    side = write_tree(description.architecture.heads(width), heads, source)
    if description.gate is not None:
        side |= write_tree(gate_weights(width, description.gate), params[GATE], source)
    model = write_tree(backbone_weights(description.model), params[REASONER][BACKBONE], source)
    with whole_folder(folder, replaces) as temporary:
        try:
            checkpoint.write(temporary)
            if CODE in texts:
                _name_class(temporary / MODEL_FILE)
            save_file(model, temporary / "model.safetensors", metadata={"format": "pt"})  # transformers wants to know
            if side:
                save_file(side, temporary / SIDE_FILE)
            if DECODER in params:
                save_file(write_decoder(params, description.model), temporary / DECODER_FILE)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{folder}: can't be written ({error}); make room, and run the command again") from None
        for name, text in texts.items():
            write_text(temporary / name, text)
        mode = (temporary / FILE).stat().st_mode
        for file in temporary.glob("*.safetensors"):
            file.chmod(mode)  # safetensors makes its files private
        write_checksums(temporary)


def _name_class(path: Path) -> None:
    """Name in a config.json the class of the export's code, and what its `forward` goes by.

    The class has the name of transformers' own, so that programs which don't run the code open that.
    """
    config = json.loads(path.read_text(encoding="utf-8"))
    (name,) = config["architectures"]
    config["auto_map"] = {"AutoModelForCausalLM": f"{CODE.removesuffix('.py')}.{name}"}
    config |= {"think_in_forward": False, "allow_plain_forward": False}
    write_text(path, _json(config))


def thinks(config: Config, checkpoint: Checkpoint) -> bool:
    """Tell whether an export thinks in PyTorch.

    Args:
        config: to evaluate it with.
    """
    template = checkpoint.template
    if checkpoint.description.architecture.layers is None or not config.latent_policy.selected.is_the_reasoners:
        return False
    # Not every tokenizer tells the marker at the end of a prompt from the text before it.
    chat, options = [{"role": "user", "content": "?"}], {"chat_template": template.chat_template, "return_dict": True}
    ids = template.tokenizer.apply_chat_template(chat, **options)["input_ids"]
    return bool([ids] == template.prompts(["?"], Counter()))


def write_chat_template(template: Template) -> None:
    """Have the tokenizer itself write prompts: `apply_chat_template` of a question, padded on the left in a batch."""
    tokenizer = template.tokenizer
    tokenizer.chat_template, tokenizer.padding_side = template.chat_template, "left"
    tokenizer.init_kwargs |= {"padding_side": "left", "model_input_names": ["input_ids", "attention_mask"]}  # are saved


def thinking_files(config: Config, checkpoint: Checkpoint, rule: float | int, thinks: bool) -> dict[str, str]:
    """Return the code and its settings; of latents that PyTorch can't think in, settings that have transformers say so.

    Args:
        config: to evaluate it with.
        rule: how its rollouts end, see `export.write_export`.
        thinks: of `thinks`.
    Returns:
        texts by their files in the export; {} for what transformers generates as it is.
    """
    if not checkpoint.description.architecture.has_latents:
        return {}
    template = checkpoint.template
    eos_ids = list(dict.fromkeys([template.eos_id, *checkpoint.description.eos_ids]))
    settings: dict[str, Any] = {"eos_token_id": eos_ids, "pad_token_id": template.pad_id, "do_sample": False}
    if not thinks:
        return {GENERATION_FILE: _json(settings | dict.fromkeys(REFUSING, _UNKNOWN))}
    described = checkpoint.description
    has_side = described.gate is not None or bool(described.architecture.heads(described.model.n_embd))
    left_out = " and ".join([CODE, *([SIDE_FILE] if has_side else []), FILE])
    latent_policy = config.latent_policy.selected
    ended_by, least = latent_policy.ended_by
    halting = template.token(ended_by) if ended_by else None
    going_on = template.token(latent_policy.goes_on_by) if latent_policy.goes_on_by else None
    settings |= {
        "max_new_tokens": config.evaluate.max_answer_tokens or config.max_answer_tokens,
        "suppress_tokens": [*template.banned_ids, *template.impossible_ids] or None,
        "prompt_end_id": template.prompt_end,
        "unknown_token_id": template.unknown_id,
        "closing_ids": list(template.closing_ids),
        "max_latents": config.max_latents,
        "stop_threshold": rule,
        "latent_layers": checkpoint.description.architecture.layers,
        "gate_layers": _gate_layers(described.gate),
        "halting_token_id": halting,
        "going_on_token_id": going_on,
        "halting_least": least,
    }
    settings |= dict.fromkeys(REFUSING, _UNTRUSTED.format(left_out))
    if not config.gate.enabled:
        most = min(config.max_latents, max(1 if halting is None else 0, int(rule)))
        settings |= {"max_latents": most, "stop_threshold": None, "gate_layers": []}
    code = (Path(__file__).parent / "custom_generate.py").read_text(encoding="utf-8")
    return {CODE: code, GENERATION_FILE: _json(settings)}


def _gate_layers(hidden: int | None) -> list[tuple[str, str]]:
    """Return layers as `Architecture.layers`, from a latent to the stop logit."""
    return [*([("linear", "gate.hidden"), ("gelu", "tanh")] if hidden else []), ("linear", "gate.out")]


def _json(settings: dict[str, Any]) -> str:
    return json.dumps(settings, indent=2) + "\n"


def model_card(checkpoint: Path, description: Description, name: str, thinks: bool, explains: bool = False) -> str:
    """Fill in `card.md`, the README.md of an exported checkpoint.

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
    elif stage.is_finished:
        init = stage.read_config()["init"]
        start = f"`{short(init)}`" if init else "random weights"
        origin = f"Trained by slpo_jax from {start}, to the end of the stage `{stage.name}`."
    template = jinja2.Template(
        Path(__file__).with_name("card.md").read_text(encoding="utf-8"),
        trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    fields = {field.name: getattr(description, field.name) for field in dataclasses.fields(description)}
    settings = flatten(description.config)
    use = _use(settings, description.rule)
    options = {"settings": settings, "how": use, "thinks": thinks, "explains": explains}
    return template.render(fields, name=name, origin=origin, **options)


def short(source: str) -> str:
    """Return a local path's last part, or a hub id as it is: what a card may say of where something is from."""
    return Path(source).name if Path(source).suffix or Path(source).is_absolute() else source


def _use(settings: Mapping[str, Any], rule: float | int | None) -> str:
    """Tell how it thinks and answers in slpo_jax; "" where it has no config.

    Args:
        settings: its config by dotted key.
        rule: its threshold, or number of latents.
    """
    if not settings:
        return ""
    tokens = settings["evaluate.max_answer_tokens"] or settings["max_answer_tokens"]
    defaults = flatten({"prompt": vars(PromptConfig())})
    changed = [key for key, value in defaults.items() if settings.get(key, value) != value]
    prompt = ", ".join(f"{key}={settings[key]!r}" for key in changed)
    thought = f"{rule} latents"
    if settings.get("gate.enabled"):
        limit = "0.5, as none was chosen," if rule is None else rule
        thought = f"at most {settings.get('max_latents')} latents, until the gate's stop probability reaches {limit}"
    return f"{thought} and answers of at most {tokens} tokens" + f", asked with `{prompt}`" * bool(prompt)
