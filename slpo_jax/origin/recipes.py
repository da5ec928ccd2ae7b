"""The reasoners that a config can name: a kind and a backbone each."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slpo_jax.models.gpt2 import GPT2Config
from slpo_jax.models.llama import LlamaConfig
from slpo_jax.models.reasoner import BackboneConfig, Reasoner, coconut, codi
from slpo_jax.text.chat import PromptConfig, text_template
from slpo_jax.text.templates import Template, coconut_template, codi_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What one reasoner is made of.

    Attributes:
        kind: "coconut", "codi" or "text".
        backbone: "gpt2" or "llama".
        model_config: the backbone's config class.
        functions: (backbone config, projector width) -> the model.
        template: (tokenizer, id of the first token to be added, tidy, prompt) -> the texts.
        has_projector: whether the transition has parameters.
        default_recipe: how it is trained on written solutions: a name in `training.recipes.RECIPES`.
    """

    kind: str
    backbone: str
    model_config: type[GPT2Config] | type[LlamaConfig]
    functions: Callable[[BackboneConfig, int], Reasoner]
    template: Callable[["PreTrainedTokenizerFast", int | None, bool, PromptConfig], Template]
    has_projector: bool
    default_recipe: str


_BACKBONES: dict[str, Any] = {"gpt2": GPT2Config, "llama": LlamaConfig}
_KINDS: dict[str, Any] = {
    "coconut": (
        lambda config, _: coconut(config),
        lambda tokenizer, first_id, tidy, prompt: coconut_template(tokenizer, first_id),
        False,
        "curriculum",
    ),
    "codi": (
        codi,
        lambda tokenizer, first_id, tidy, prompt: codi_template(tokenizer, first_id, tidy),
        True,
        "distil",
    ),
    "text": (
        lambda config, _: coconut(config),  # with no latents to feed, it is the language model
        lambda tokenizer, first_id, tidy, prompt: text_template(tokenizer, prompt),
        False,
        "curriculum",
    ),
}
REASONERS = {
    f"{kind}_{backbone}": Recipe(kind, backbone, config, *parts)
    for kind, parts in _KINDS.items()
    for backbone, config in _BACKBONES.items()
}


def name_of(kind: str, model: BackboneConfig) -> str:
    """The name in `REASONERS` of a kind on a backbone of these shapes."""
    return next(n for n, recipe in REASONERS.items() if recipe.kind == kind and recipe.model_config is type(model))
