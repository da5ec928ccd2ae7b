"""What a reasoner is, beside its weights: the files in which a folder says so.

Such a folder is a Hugging Face model directory: `config.json` (the language model's shapes), the tokenizer's files, and
`reasoner.json` (below). Without weights it lies beside our Orbax checkpoints; with `model.safetensors` it is an export.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slpo_jax.architectures import ARCHITECTURES, Architecture
from slpo_jax.checkpoints.hf_config import from_hugging_face, to_hugging_face
from slpo_jax.data.templates import Template
from slpo_jax.data.tokenizer_files import save_tokenizer
from slpo_jax.errors import UserError
from slpo_jax.io.files import read_json
from slpo_jax.models.reasoner import BackboneConfig
from slpo_jax.settings import FieldError

FILE = "reasoner.json"
MODEL_FILE = "config.json"
REMEDY = "give the model's whole directory, or fetch it again"  # for one of its files
_FACTS = ("gate", "gate_trained", "source", "settings")


@dataclasses.dataclass(frozen=True)
class Description:
    """A reasoner's architecture and shapes.

    Attributes:
        architecture: with what is to be known beside the backbone's shapes.
        model: the backbone's shapes.
        gate: hidden width of the stopping gate (0 is linear), None where there is no gate.
        gate_trained: False for a gate that is still random.
        source: what the weights were converted from; "" for a run's.
        eos_ids: of the tokens that end what it writes, which lie in config.json; () for the tokenizer's.
        settings: what else decides what it answers, see `checkpoints.decode_settings.made_with`; {} where nothing is
            known.
    """

    architecture: Architecture
    model: BackboneConfig
    gate: int | None = None
    gate_trained: bool = False
    source: str = ""
    eos_ids: tuple[int, ...] = ()
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def write_description(folder: Path, description: Description, template: Template) -> None:
    """Write the folder's files, without weights.

    Args:
        folder: exists.
        template: with the tokenizer, and the ids that transformers and other latent-reasoning programs look for.
    """
    tokenizer, closing = template.tokenizer, template.closing_ids
    end = closing[0] if len(closing) == 1 and template.start_id is not None else None
    latent = {"latent_start_id": template.start_id, "latent_end_id": end, "latent_id": template.latent_id}
    config = to_hugging_face(description.model) | {key: index for key, index in latent.items() if index is not None}
    eos_ids = list(dict.fromkeys([template.eos_id, *description.eos_ids]))
    config |= {"eos_token_id": eos_ids if len(eos_ids) > 1 else eos_ids[0], "pad_token_id": template.pad_id}
    config["bos_token_id"] = tokenizer.bos_token_id
    facts = {"format": 1, "architecture": description.architecture.name} | dataclasses.asdict(description.architecture)
    facts |= {name: getattr(description, name) for name in _FACTS}
    for name, values in ((MODEL_FILE, config), (FILE, facts)):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    save_tokenizer(tokenizer, folder)


def read_description(folder: Path) -> Description | None:
    """The description in a folder, None if it has none.

    Raises:
        UserError: one that can't be read.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    values, config = read_json(path, REMEDY), read_json(folder / MODEL_FILE, REMEDY)
    try:
        architecture = ARCHITECTURES[values["architecture"]]
        made = architecture(**{field.name: values[field.name] for field in dataclasses.fields(architecture)})
        facts = {name: values[name] for name in _FACTS}
    except KeyError as error:
        raise UserError(
            f"{path}: key or value {error} is not known here; export it again, or upgrade slpo_jax"
        ) from None
    except FieldError as error:
        raise UserError(f"{path}: key {error.field}: {error.problem}") from None
    model = from_hugging_face(config, str(folder / MODEL_FILE))
    return Description(made, model, eos_ids=end_tokens(str(folder), config), **facts)


def end_tokens(source: str, *settings: dict[str, Any]) -> tuple[int, ...]:
    """Ids of the tokens that end what a model writes; () where nothing is said.

    Args:
        source: the model's directory or file, for messages.
        settings: its generation_config.json and its config.json; the first that names any counts.
    Raises:
        UserError: what is there can't be ids.
    """
    found: Any = next((value for each in settings if (value := each.get("eos_token_id")) is not None), [])
    ids = found if isinstance(found, list) else [found]
    if not all(type(number) is int and number >= 0 for number in ids):
        raise UserError(f"{source}: its eos_token_id is {found!r}, neither a token's id nor a list of ids; mend it")
    return tuple(ids)
