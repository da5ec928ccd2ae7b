"""The options of using a checkpoint: arguments of `slpo_jax.load`, and flags of the commands that ask a reasoner."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Literal

from slpo_jax.data.chat import MOST_SPEED
from slpo_jax.errors import naming
from slpo_jax.rewards.answers import AskedStyle
from slpo_jax.settings import Checked, Limits


def _option(default: Any, about: str, *keys: str, **limits: Any) -> Any:
    """Make a field with its description and the config's keys that it sets; messages name the last of these."""
    metadata = {
        "limits": Limits(in_config=False, **limits),
        "about": about,
        "keys": keys,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class LoadOptions(Checked):
    """The arguments of loading; None or "" is the checkpoint's own value, or its run's."""

    threshold: float | None = _option(
        None, "of the gate; default: the one chosen in the run, or 0.5", least=0, most=1
    )
    latents: int | None = _option(
        None, "a fixed number of latents, instead of the gate", "max_latents", least=0
    )
    max_answer_tokens: int | None = _option(
        None,
        "default: the run's, or 16",
        "max_answer_tokens",
        "evaluate.max_answer_tokens",
        least=1,
    )
    reasoner: str = _option(
        "", "such as coconut_gpt2; default: what the checkpoint says", "reasoner"
    )
    base: str = _option("", "base model's directory or hub id, for a bare file", "base")
    tokenizer: str = _option(
        "", "directory or hub id; default: the checkpoint's or the base's", "tokenizer"
    )
    lora_alpha: float | None = _option(
        None,
        "scale of LoRA adapters times their rank (CODI's published: 32)",
        "lora_alpha",
        above=0,
    )
    latent_policy: str = _option(
        "",
        "of a thought's steps, such as soft; default: the run's",
        "latent_policy.name",
    )
    instruction: str = _option(
        "",
        "after the question, to a text reasoner; default: the run's",
        "prompt.instruction",
    )
    answers: Literal["", AskedStyle] = _option(
        "", "how a text reasoner's answer is read; default: the run's", "prompt.answers"
    )
    speed: int | None = _option(
        None,
        "that CoLaR is asked to think at; default: the run's",
        "prompt.speed",
        least=1,
        most=MOST_SPEED,
    )
    explain: bool = _option(
        False, "keep SIM-CoT's decoder; decode each latent to text, where it was kept"
    )


KEYS: dict[str, tuple[str, ...]] = {
    field.name: field.metadata["keys"] for field in dataclasses.fields(LoadOptions)
}
"""Keys of the config by the option that sets them."""

_ARGUMENTS = {"config.init": "checkpoint"}
for _name, _keys in KEYS.items():
    _ARGUMENTS[f"--{_name}"] = _name
    _ARGUMENTS |= {f"config.{key}": _name for key in _keys}

by_argument = functools.partial(naming, _ARGUMENTS)
"""A context in which messages name the user's argument, such as `latents`, not a flag or the config's key."""
