"""The interface of an architecture: its module, its texts, and its tensors beside a language model's."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from slpo_jax.architectures.tensors import Stored
from slpo_jax.architectures.weights import Weight
from slpo_jax.data.chat import PromptConfig, text_template
from slpo_jax.data.templates import Template
from slpo_jax.data.tokenizer import END_LATENT, START_LATENT
from slpo_jax.errors import UserError
from slpo_jax.models.backbone import Backbone
from slpo_jax.models.reasoner import (
    BackboneConfig,
    LatentReasoner,
    ModelConfig,
    Reasoner,
    as_functions,
    backbone,
)
from slpo_jax.policy.explain import Reads
from slpo_jax.settings import check_fields

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


NO_PROMPT = PromptConfig()
NO_SHAPES = ModelConfig()


class Decoder(NamedTuple):
    """A SIM-CoT decoder that has not been read yet.

    Attributes:
        tensors: under Hugging Face's names.
        reads: how it reads thoughts.
        latents: the reasoner's number of latents; 0 is the number that it has without a decoder.
    """

    tensors: dict[str, Stored]
    reads: Reads
    latents: int = 0


class Unwrapped(NamedTuple):
    """A checkpoint's tensors, separated into parts.

    Attributes:
        model: the language model's under Hugging Face's names, LoRA adapters beside the weights that they are of.
        head: those of `Architecture.heads`, under their names there.
        original: they lie as the method's own program writes them, whose config and tokenizer are the base model's.
        gate: the stopping gate's `gate.out.*` and, of two layers, `gate.hidden.*`; empty without one.
        decoder: SIM-CoT's decoder, if it is there and can be read.
    """

    model: dict[str, Stored]
    head: dict[str, Stored]
    original: bool = False
    gate: dict[str, Stored] = {}  # noqa: RUF012 - a tuple's default, never written to
    decoder: Decoder | None = None


@dataclasses.dataclass(frozen=True)
class Architecture(abc.ABC):
    """An architecture; the fields of a subclass are a checkpoint's settings beside its backbone's shapes.

    Fields are written to reasoner.json, and one that is a key of `config.model` too to the run's config.

    Attributes:
        name: its name in `ARCHITECTURES`, and with a backbone's in `config.reasoner`.
        title: its name in texts.
        default_recipe: the recipe that trains it on written solutions.
        further_latents: latents that a pretrained model takes beside one for each step; 0 where their number does not
            follow the steps.
        not_taught_by: our recipes that can't train its thoughts.
        prompt_keys: the keys of `config.prompt` that its texts use; all use `answers` being texts.
        needs_words: whether single bytes can't be its tokens.
        has_latents: whether it feeds vectors of its own; without latents it writes as its language model does.
        has_gate: whether it may have a stopping gate.
        latents: the number of latents of published checkpoints, which have no gate.
        tokens: the special tokens that its vocabulary needs, in the order of their ids.
        markers: those that start and end a thought; a tokenizer that has both is a reasoner's.
        after_vocabulary: their ids come after all rows of the base model's vocabulary, not after its tokenizer's.
        about_head: a description of its own tensors, for the card of an export.
        head_prefix: the prefix of their names in Hugging Face's layout; "" without any.
        first_of_head: the weight of their first linear layer, whose width is the field `projector`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    default_recipe: ClassVar[str] = "curriculum"
    further_latents: ClassVar[int] = 0
    not_taught_by: ClassVar[tuple[str, ...]] = ("latent_sft",)
    prompt_keys: ClassVar[tuple[str, ...]] = ()
    needs_words: ClassVar[bool] = False
    has_latents: ClassVar[bool] = True
    has_gate: ClassVar[bool] = True
    latents: ClassVar[int] = 6
    tokens: ClassVar[tuple[str, ...]] = ()
    markers: ClassVar[tuple[str, str]] = (START_LATENT, END_LATENT)
    after_vocabulary: ClassVar[bool] = False
    about_head: ClassVar[str] = ""
    head_prefix: ClassVar[str] = ""
    first_of_head: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def layers(self) -> tuple[tuple[str, str | float], ...] | None:
        """The layers from a hidden state to a latent, for `checkpoints.custom_generate`; () is the state itself.

        ("linear" or "norm" (epsilon 1e-5), its name in `heads`), ("gelu", PyTorch's `approximate`) or ("scale", a
        factor), in order. None: exports don't think in PyTorch.
        """
        return None

    def module(self, backbone: Backbone) -> LatentReasoner:
        """Make the model: by default its last hidden state is its next input."""
        return LatentReasoner(backbone)

    def on(self, config: BackboneConfig) -> Reasoner:
        """Make the pure functions on the backbone of these shapes."""
        return as_functions(self.module(backbone(config)))

    @abc.abstractmethod
    def template(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        first_id: int | None = None,
        prompt: PromptConfig = NO_PROMPT,
    ) -> Template:
        """Return the texts of prompts and answers.

        Args:
            tokenizer: gets the tokens that it lacks, in place (`tokenizer.add_reasoner_tokens`).
            first_id: where they go; None for the first id that is free.
            prompt: the texts around a question for an architecture without markers; for others, whether answers are
                texts.
        Raises:
            UserError: the tokenizer can't be used.
        """

    def heads(self, width: int) -> list[Weight]:
        """Return the tensors beside the backbone's.

        Args:
            width: D.
        Returns:
            paths in the reasoner's tree, with the names and shapes of Hugging Face's layout.
        """
        return []

    @classmethod
    def unwrap(cls, tensors: dict[str, Stored], source: str) -> Unwrapped | None:
        """Separate the parts of a state dict of this architecture; None for another's, or for a language model's.

        Args:
            tensors: by the names in the file.
            source: the file or directory, for messages.
        Raises:
            UserError: a tensor that it can't have.
        """
        if not cls.head_prefix:
            return None
        names = [name for name in tensors if name.startswith(cls.head_prefix)]
        if not names:
            return None
        head = {name: tensors[name] for name in names}
        model = {name: x for name, x in tensors.items() if name not in head}
        return Unwrapped(model, head)

    @classmethod
    def from_config(cls, width: int, shapes: ModelConfig = NO_SHAPES) -> Self:
        """Make one whose own tensors are still random.

        Args:
            width: D.
            shapes: `config.model`, which has keys for the architecture's own settings.
        """
        settings: dict[str, Any] = {}
        if cls.first_of_head:
            settings["projector"] = shapes.projector or width
        return cls(**settings)

    @classmethod
    def with_texts(
        cls,
        unwrapped: Unwrapped,
        config: Mapping[str, Any],
        tokenizer: "PreTrainedTokenizerFast",
        source: str,
    ) -> Unwrapped:
        """Return a published checkpoint's tensors, with those in place that its config and tokenizer locate.

        Args:
            unwrapped: its tensors.
            config: its config.json.
            tokenizer: its own.
            source: the file or directory, for messages.
        Raises:
            UserError: tensors, config and tokenizer don't fit together.
        """
        return unwrapped

    @classmethod
    def published_settings(
        cls, unwrapped: Unwrapped, config: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the settings of a checkpoint's own program that differ from the defaults, by key of the config.

        Args:
            unwrapped: its tensors.
            config: its config.json.
        """
        return {}

    @classmethod
    def from_checkpoint(
        cls, unwrapped: Unwrapped, config: Mapping[str, Any], source: str
    ) -> Self:
        """Make one with the settings that a checkpoint's files show.

        Args:
            unwrapped: its tensors, whose shapes show settings.
            config: its config.json.
            source: the file or directory, for messages.
        Raises:
            UserError: a tensor or key that shows a setting is missing.
        """
        settings: dict[str, Any] = {}
        if cls.first_of_head:
            settings["projector"] = cls.hidden(unwrapped, source)
        return cls(**settings)

    @classmethod
    def hidden(cls, unwrapped: Unwrapped, source: str) -> int:
        """Return the rows of its head's first tensor, which are the width of a hidden layer, the field `projector`.

        Raises:
            UserError: it is missing.
        """
        first = unwrapped.head.get(cls.first_of_head)
        if first is None:
            raise UserError(
                f"{source}: tensor {cls.first_of_head} is missing; give a {cls.title} checkpoint with its head"
            )
        return first.shape[0]


def refuse_others(
    tensors: Mapping[str, Stored], prefixes: tuple[str, ...], title: str, source: str
) -> None:
    """Refuse tensors whose names have none of these prefixes.

    Raises:
        UserError: names the first such tensor.
    """
    for name in tensors:
        if not name.startswith(prefixes):
            raise UserError(
                f"{source}: tensor {name} is unexpected; give a checkpoint in {title}'s layout"
            )


@dataclasses.dataclass(frozen=True)
class Text(Architecture):
    """A language model alone, without latents of its own."""

    name = "text"
    title = "language model, in words or soft tokens,"
    not_taught_by = ("distil", "silent")  # latents
    has_latents = False
    has_gate = False
    latents = 0
    prompt_keys = ("system", "instruction", "format", "closing", "answers")

    def template(self, tokenizer, first_id=None, prompt=NO_PROMPT):
        return text_template(tokenizer, prompt)
