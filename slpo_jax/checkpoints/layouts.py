"""The layouts in which latent reasoners are published, peeled down to plain Hugging Face names."""

import collections
from collections.abc import Mapping

from slpo_jax.checkpoints.adapters import Lora, adapted, merge_lora
from slpo_jax.checkpoints.architectures import ARCHITECTURES, Architecture, Unwrapped
from slpo_jax.checkpoints.decoder import take_decoder
from slpo_jax.checkpoints.gates import take_gate
from slpo_jax.checkpoints.tensors import Stored
from slpo_jax.checkpoints.weights import EMBEDDING, strip_all
from slpo_jax.errors import UserError

_FINAL_NORM = {"gpt2": "transformer.ln_f.weight", "llama": "model.norm.weight"}


def are_adapters(stored: Mapping[str, Stored]) -> bool:
    """Whether a file holds LoRA adapters without the model that they are of."""
    tables = ("wte.", "embed_tokens.", "lm_head.")
    return any(".lora_A." in name for name in stored) and not any(table in name for name in stored for table in tables)


def recognise(
    stored: Mapping[str, Stored], source: str, lora: Lora | None, base: Mapping[str, Stored] | None = None
) -> tuple[type[Architecture] | None, Unwrapped]:
    """Find out which layout a checkpoint has, and take it off.

    Args:
        stored: by the names in the file.
        source: the file or directory, for messages.
        lora: how LoRA adapters are scaled; None if nothing says it.
        base: the language model that adapters are of which lie without it.
    Returns:
        the architecture, None where there is a language model alone; and its tensors, adapters merged.
    Raises:
        UserError: no language model in it, adapters without their scale, or half an adapter.
    """
    tensors, decoder = take_decoder(strip_all(dict(stored), "module."), source)
    tensors, gate = take_gate(tensors, source)
    architecture, unwrapped = None, Unwrapped(tensors, {})
    for each in ARCHITECTURES.values():
        if found := each.unwrap(tensors, source):
            architecture, unwrapped = each, found
            break
    tensors = unwrapped.model
    if base is not None:  # a language model alone is CoLaR's first, still without a head
        tensors = adapted(base, strip_all(tensors, "llm."), lora, source)
    if not any(table in name for name in tensors for table in ("wte.", "embed_tokens.", "lm_head.")):
        raise _unknown(stored, source)
    tensors = merge_lora(tensors, lora, source)
    # GPT-2 and Llama saved without their head have no prefix.
    for marker, prefix in (("wte.weight", "transformer."), ("embed_tokens.weight", "model.")):
        if marker in tensors:
            tensors = {name if name == "lm_head.weight" else prefix + name: t for name, t in tensors.items()}
    for backbone, name in EMBEDDING.items():
        # Of tensors that share their memory, safetensors' save_model keeps the first in the alphabet.
        if name not in tensors and _FINAL_NORM[backbone] in tensors and "lm_head.weight" in tensors:
            tensors[name] = tensors["lm_head.weight"]
        if name in tensors:
            return architecture, unwrapped._replace(model=tensors, gate=gate, decoder=decoder)
    raise _unknown(stored, source)


def _unknown(stored: Mapping[str, Stored], source: str) -> UserError:
    """The error of a file without a language model, with what it holds: its names' first parts, and one whole name."""
    counts = collections.Counter(name.split(".")[0] for name in stored)
    shown = [f"{count} {first}.*" if count > 1 else first for first, count in counts.most_common(4)]
    held = ", ".join([*shown, *([f"{len(counts) - 4} other prefixes"] if len(counts) > 4 else [])])
    example = next(name for name in stored if name.split(".")[0] == counts.most_common(1)[0][0])
    titles = ", ".join(each.title for each in ARCHITECTURES.values())
    return UserError(
        f"{source}: neither transformer.wte.weight nor model.embed_tokens.weight is in it, but {held}, e.g. {example}; "
        f"give a GPT-2 or Llama checkpoint, or a reasoner's ({titles})"
    )
