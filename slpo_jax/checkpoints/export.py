"""Write exports: directories that transformers opens, and thinks with in plain PyTorch by `custom_generate`."""

import dataclasses
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jinja2
from absl import logging
from safetensors import SafetensorError
from safetensors.numpy import save_file

from slpo_jax.architectures.weights import backbone_weights, gate_weights, write_tree
from slpo_jax.checkpoints.checkpoint import Checkpoint
from slpo_jax.checkpoints.description import FILE, MODEL_FILE, Description
from slpo_jax.checkpoints.external import GENERATION_FILE, SIDE_FILE
from slpo_jax.checkpoints.external_layouts import DECODER_FILE, write_decoder
from slpo_jax.config.config import Config
from slpo_jax.data.chat import PromptConfig
from slpo_jax.data.templates import Template
from slpo_jax.errors import UserError
from slpo_jax.io.artifact import (
    CHECKSUMS,
    matches_checksums,
    read_checksums,
    write_checksums,
)
from slpo_jax.io.files import check_free, flatten, whole_folder, write_text
from slpo_jax.io.orbax import is_checkpoint
from slpo_jax.io.workdir import StageFolder, Workdir
from slpo_jax.models.parts import DECODER, GATE, LATENT_POLICY, REASONER
from slpo_jax.models.reasoner import BACKBONE

REFUSING = ("sequence_bias", "bad_words_ids")
"""Settings that make transformers' own `generate` and continuous batching fail where our code is not trusted.

The first works everywhere, the second where a caller gives a bias of its own.
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
    """Return the names in a folder that a new export replaces; None where the folder is not in use.

    An export that nobody has changed is replaced without `overwrite`.

    Raises:
        UserError: the folder is in use and must not be overwritten, or it is a run's.
    """
    is_workdir = Workdir(target).checkpoints.is_dir()
    is_export = (target / FILE).is_file()
    is_in_workdir = Workdir(target.absolute().parent).checkpoints.is_dir()
    is_runs_own = is_in_workdir and target.is_dir() and not is_export
    if is_checkpoint(target) or is_workdir or is_runs_own:
        raise UserError(f"{target}: is a run's folder; give another directory")
    names = {CHECKSUMS} | {name.partition("/")[0] for name in read_checksums(target)}
    if is_export and matches_checksums(target):
        return names
    if not (overwrite and target.is_dir()):
        check_free(target, remedy)
        return None
    return names


def write_export(
    target: Path, source: Path, params: dict[str, Any], checkpoint: Checkpoint, config: Config, rule: float | int,
    replaces: Collection[str] | None,
) -> Checkpoint:  # fmt: skip
    """Write a Hugging Face directory of a reasoner, with the code and settings to think in PyTorch.

    Args:
        target: not in use, but for the files that the export replaces.
        source: the checkpoint's place, for the model card.
        params: all parts, on the host.
        checkpoint: describes the parameters; its tokenizer is changed.
        config: the config to use it with; its gate is enabled if it stops the rollouts.
        rule: the gate's threshold, or without a gate the number of latents.
        replaces: see `replaced_by_export`.
    Returns:
        the checkpoint as it was written, without a gate that no stage has trained.
    Raises:
        UserError: no other program knows its latents, or the target is in use.
    """
    if LATENT_POLICY in params:
        raise UserError(
            f"{source}: has parameters of a latent policy's own, which no other program knows; use it as it is"
        )
    # A run's parameters always have a gate, which may be random still.
    if not checkpoint.description.gate_trained:
        without_gate = dataclasses.replace(checkpoint.description, gate=None)
        checkpoint = dataclasses.replace(checkpoint, description=without_gate)

    # Beside the weights go code, settings, the chat template and the card.
    can_think = thinks(config, checkpoint)
    files = thinking_files(config, checkpoint, rule, can_think)
    if can_think:
        write_chat_template(checkpoint.template)
    elif config.max_latents:
        logging.warning(
            "%s: thinks in slpo_jax alone; transformers can't make its latents, or not its prompts",
            target,
        )
    try:
        tokenizer_class = _tokenizer_class(checkpoint)
    except OSError as error:
        raise _no_room(target, error) from None
    if tokenizer_class != "AutoTokenizer":
        logging.warning(
            "%s: transformers' AutoTokenizer cuts texts in another way than its tokenizer.json; open that with "
            "%s.from_pretrained",
            target,
            tokenizer_class,
        )
    files["README.md"] = model_card(
        source,
        checkpoint.description,
        target.name,
        can_think,
        explains=DECODER in params,
        tokenizer_class=tokenizer_class,
    )
    export_reasoner(target, params, checkpoint, files, str(source), replaces)
    return checkpoint


def _tokenizer_class(checkpoint: Checkpoint) -> str:
    """Return the class of transformers that opens a checkpoint's tokenizer as it is.

    For a Qwen2, AutoTokenizer takes a class of its own, whatever the files name.
    """
    from transformers import AutoTokenizer

    text = "Tom has 15 apples, she's 7 ."
    expected = checkpoint.template.tokenizer(text)["input_ids"]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.write(Path(folder))
        opened = AutoTokenizer.from_pretrained(folder)
    is_same = opened(text)["input_ids"] == expected
    return "AutoTokenizer" if is_same else "PreTrainedTokenizerFast"


def _no_room(folder: Path, error: Exception) -> UserError:
    return UserError(
        f"{folder}: can't be written ({error}); make room, and run the command again"
    )


def export_adapters(source: Path, target: Path) -> None:
    """Copy the adapters that a finished stage keeps beside its checkpoint.

    Args:
        source: WORKDIR/checkpoints/STAGE.
        target: must not exist, or be empty.
    Raises:
        UserError: the stage keeps none, or the target is in use.
    """
    folder = StageFolder.of(source).adapters
    if not folder.is_dir():
        raise UserError(
            f"adapters: {source} has none apart; train them with config.rl.lora.rank, or leave it out"
        )
    with whole_folder(target) as temporary:
        shutil.copytree(folder, temporary, dirs_exist_ok=True)


def export_reasoner(
    folder: Path, params: dict[str, Any], checkpoint: Checkpoint, texts: Mapping[str, str], source: str = "checkpoint",
    replaces: Collection[str] | None = None,
) -> None:  # fmt: skip
    """Write a directory that transformers opens: language model, tokenizer, and our own parts beside them.

    Args:
        folder: not in use, but for the files that the export replaces; it appears whole or not at all.
        params: the reasoner's part, and those of the gate and SIM-CoT's decoder if it has them.
        checkpoint: describes the parameters.
        texts: the texts of further files, by their places in the folder.
        source: the checkpoint's place, for messages.
        replaces: see `replaced_by_export`.
    Raises:
        UserError: a tensor has another shape than the description says, the folder is in use, or the disk is full.
    """
    # Name all tensors before anything is written: shapes that don't fit are refused here.
    description = checkpoint.description
    width = description.model.n_embd
    heads = {name: part for name, part in params[REASONER].items() if name != BACKBONE}
    side = write_tree(description.architecture.heads(width), heads, source)
    if description.gate is not None:
        side |= write_tree(gate_weights(width, description.gate), params[GATE], source)
    weights = backbone_weights(description.model)
    model = write_tree(weights, params[REASONER][BACKBONE], source)

    with whole_folder(folder, replaces) as temporary:
        try:
            checkpoint.write(temporary)
            if CODE in texts:
                _name_class(temporary / MODEL_FILE)
            # transformers wants to know whose layout the file has.
            metadata = {"format": "pt"}
            save_file(model, temporary / "model.safetensors", metadata=metadata)
            if side:
                save_file(side, temporary / SIDE_FILE)
            if DECODER in params:
                decoder = write_decoder(params, description.model)
                save_file(decoder, temporary / DECODER_FILE)
        except (SafetensorError, OSError) as error:
            raise _no_room(folder, error) from None
        for name, text in texts.items():
            write_text(temporary / name, text)
        # safetensors makes its files private.
        mode = (temporary / FILE).stat().st_mode
        for file in temporary.glob("*.safetensors"):
            file.chmod(mode)
        write_checksums(temporary)


def _name_class(path: Path) -> None:
    """Name the class of the export's code in a config.json, with the settings of its `forward`.

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
    if (
        checkpoint.description.architecture.layers is None
        or not config.latent_policy.selected.is_the_reasoners
    ):
        return False
    # Not every tokenizer tells the marker at the end of a prompt from the text before it.
    chat = [{"role": "user", "content": "?"}]
    options = {"chat_template": template.chat_template, "return_dict": True}
    ids = template.tokenizer.apply_chat_template(chat, **options)["input_ids"]
    return bool([ids] == template.prompts(["?"], Counter()))


def write_chat_template(template: Template) -> None:
    """Have the tokenizer write prompts by `apply_chat_template` of a question, padded on the left in a batch."""
    tokenizer = template.tokenizer
    tokenizer.chat_template = template.chat_template
    tokenizer.padding_side = "left"
    # These are the settings that are saved.
    tokenizer.init_kwargs["padding_side"] = "left"
    tokenizer.init_kwargs["model_input_names"] = ["input_ids", "attention_mask"]


def thinking_files(
    config: Config, checkpoint: Checkpoint, rule: float | int, thinks: bool
) -> dict[str, str]:
    """Return the code and its settings; if PyTorch can't think in its latents, settings that make transformers fail.

    Args:
        config: the config to evaluate it with.
        rule: the rule that ends its rollouts, see `write_export`.
        thinks: of `thinks`.
    Returns:
        texts by their files in the export; {} for a reasoner in words, with which transformers generates as it is.
    """
    described = checkpoint.description
    if not described.architecture.has_latents:
        return {}
    template = checkpoint.template
    settings: dict[str, Any] = {
        "eos_token_id": list(dict.fromkeys([template.eos_id, *described.eos_ids])),
        "pad_token_id": template.pad_id,
        "do_sample": False,
    }
    if not thinks:
        return {GENERATION_FILE: _json(settings | dict.fromkeys(REFUSING, _UNKNOWN))}

    # A thought may end at tokens of the latent policy.
    latent_policy = config.latent_policy.selected
    ended_by, least = latent_policy.ended_by
    halting = template.token(ended_by) if ended_by else None
    goes_on_by = latent_policy.goes_on_by
    going_on = template.token(goes_on_by) if goes_on_by else None

    # The gate ends it at the threshold, or without a gate the number of latents does.
    most = config.max_latents
    threshold = None
    gate_layers: list[tuple[str, str]] = []
    if config.gate.enabled:
        threshold = rule
        gate_layers = [("linear", "gate.out")]
        if described.gate:
            gate_layers = [("linear", "gate.hidden"), ("gelu", "tanh"), *gate_layers]
    else:
        least_number = 1 if halting is None else 0
        most = min(most, max(least_number, int(rule)))
    # An answer with an unknown word could not be read by `forward`, in which a user's own is an error.
    never_said = [*template.banned_ids, *template.impossible_ids]
    if template.unknown_id is not None:
        never_said.append(template.unknown_id)
    settings |= {
        "max_new_tokens": config.evaluate.max_answer_tokens or config.max_answer_tokens,
        "suppress_tokens": never_said or None,
        "prompt_end_id": template.prompt_end,
        "unknown_token_id": template.unknown_id,
        "closing_ids": list(template.closing_ids),
        "max_latents": most,
        "stop_threshold": threshold,
        "latent_layers": described.architecture.layers,
        "gate_layers": gate_layers,
        "halting_token_id": halting,
        "going_on_token_id": going_on,
        "halting_least": least,
    }

    # Where the code isn't trusted, transformers fails and names the files that a copy lacks.
    heads = described.architecture.heads(described.model.n_embd)
    has_side_file = described.gate is not None or heads
    files = [CODE, SIDE_FILE, FILE] if has_side_file else [CODE, FILE]
    untrusted = _UNTRUSTED.format(" and ".join(files))
    settings |= dict.fromkeys(REFUSING, untrusted)
    code = Path(__file__).with_name("custom_generate.py").read_text(encoding="utf-8")
    return {CODE: code, GENERATION_FILE: _json(settings)}


def ending_settings(
    config: Config, checkpoint: Checkpoint, rule: float | int
) -> dict[str, Any]:
    """Return what `generate` has to be told for a thought and an answer to end as in an export of this reasoner.

    Args:
        config, checkpoint, rule: as of `write_export`.
    Returns:
        by argument; {} where an export doesn't think in PyTorch.
    """
    if not thinks(config, checkpoint):
        return {}
    files = thinking_files(config, checkpoint, rule, thinks=True)
    settings = json.loads(files[GENERATION_FILE])
    names = ("max_latents", "stop_threshold", "max_new_tokens")
    return {name: settings[name] for name in names if settings[name] is not None}


def _json(settings: dict[str, Any]) -> str:
    return json.dumps(settings, indent=2) + "\n"


def model_card(
    checkpoint: Path,
    description: Description,
    name: str,
    thinks: bool,
    explains: bool = False,
    tokenizer_class: str = "AutoTokenizer",
) -> str:
    """Fill in `card.md`, the README.md of an exported checkpoint.

    Args:
        checkpoint: WORKDIR/checkpoints/STAGE or a step's directory in it, or an imported checkpoint.
        description: the checkpoint's.
        name: the title.
        thinks: whether it thinks in plain PyTorch.
        explains: whether SIM-CoT's decoder goes along.
        tokenizer_class: of transformers, which opens its tokenizer as it is.
    """
    # Say where the weights are from.
    stage = StageFolder.of(checkpoint)
    source = description.source
    origin = "These weights are not from a finished stage of slpo_jax: they were converted, or saved on the way."
    if source and stage.workdir is None:
        origin = f"These weights were converted by slpo_jax from `{source}`."
    elif stage.is_finished:
        init = stage.read_config()["init"]
        start = f"`{shorten_source(init)}`" if init else "random weights"
        origin = (
            f"Trained by slpo_jax from {start}, to the end of the stage `{stage.name}`."
        )

    settings = flatten(description.config)
    template = jinja2.Template(
        Path(__file__).with_name("card.md").read_text(encoding="utf-8"),
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    return template.render(
        vars(description),
        name=name,
        origin=origin,
        settings=settings,
        how=_describe_use(settings, description.rule),
        thinks=thinks,
        explains=explains,
        tokenizer_class=tokenizer_class,
    )


def shorten_source(source: str) -> str:
    """Return a local path's last part, or a hub id as it is, so that a card doesn't show private folders."""
    path = Path(source)
    return path.name if path.suffix or path.is_absolute() else source


def _describe_use(settings: Mapping[str, Any], rule: float | int | None) -> str:
    """Describe its thoughts and answers in slpo_jax; "" where it has no config.

    Args:
        settings: its config by dotted key.
        rule: its threshold, or number of latents.
    """
    if not settings:
        return ""
    thought = f"{rule} latents"
    if settings.get("gate.enabled"):
        limit = "0.5, as none was chosen," if rule is None else rule
        thought = f"at most {settings.get('max_latents')} latents, until the gate's stop probability reaches {limit}"
    tokens = settings["evaluate.max_answer_tokens"] or settings["max_answer_tokens"]
    use = f"{thought} and answers of at most {tokens} tokens"

    # The prompt is worth a word only where it is not the default.
    prompt = []
    for key, value in flatten({"prompt": vars(PromptConfig())}).items():
        if settings.get(key, value) != value:
            prompt.append(f"{key}={settings[key]!r}")
    if prompt:
        use += f", asked with `{', '.join(prompt)}`"
    return use
