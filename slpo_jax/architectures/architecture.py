"""An architecture: its module, its texts, and the tensors that it has beside a language model's."""

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
from slpo_jax.models.reasoner import BackboneConfig, LatentReasoner, ModelConfig, Reasoner, as_functions, backbone
from slpo_jax.policy.explain import Reads
from slpo_jax.settings import check_fields

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


NO_PROMPT, NO_SHAPES = PromptConfig(), ModelConfig()


class Decoder(NamedTuple):
    """A SIM-CoT decoder that has not been read yet.

    Attributes:
        tensors: under Hugging Face's names.
        reads: how it reads thoughts.
        latents: in which the reasoner beside it thinks; 0 is as many as without it.
    """

    tensors: dict[str, Stored]
    reads: Reads
    latents: int = 0


class Unwrapped(NamedTuple):
    """A checkpoint's tensors, taken apart.

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
    """An architecture; fields of a subclass are what is to be known of a checkpoint beside its backbone's shapes.

    Fields are written to reasoner.json, and one that is a key of `config.model` too to the run's config.

    Attributes:
        name: in `ARCHITECTURES`, and with a backbone's in `config.reasoner`.
        title: what people call it.
        default_recipe: how it is trained on written solutions.
        not_taught_by: recipes of ours that train no thought of its.
        prompt_keys: of `config.prompt`, what its texts go by; all go by `answers` being texts.
        needs_words: whether single bytes can't be its tokens.
        has_latents: whether it feeds vectors of its own; one that doesn't speaks as its language model does.
        has_gate: whether it may have a stopping gate.
        latents: how many published checkpoints think in, which have no gate.
        tokens: special ones that its vocabulary needs, in the order of their ids.
        markers: of these, those that start and end a thought; a tokenizer that has both is a reasoner's.
        after_vocabulary: their ids come after all rows of the base model's vocabulary, not after its tokenizer's.
        about_head: what its own tensors do, for the card of an export.
        head_prefix: how their names begin in Hugging Face's layout; "" without any.
        first_of_head: the weight of their first linear layer, of which the field `projector` is the width.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    default_recipe: ClassVar[str] = "curriculum"
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
        """The way from a hidden state to a latent, for `checkpoints.custom_generate`; () is the hidden state itself.

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
        self, tokenizer: "PreTrainedTokenizerFast", first_id: int | None = None, prompt: PromptConfig = NO_PROMPT
    ) -> Template:
        """Return the texts of prompts and answers.

        Args:
            tokenizer: gets the tokens that it lacks, in place (`tokenizer.add_reasoner_tokens`).
            first_id: where they go; None for the first id that is free.
            prompt: what an architecture without markers is asked with; of the others, whether answers are texts.
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
        """Take apart a state dict of this architecture; None for one of another, or of a language model alone.

        Args:
            tensors: by the names in the file.
            source: the file or directory, for messages.
        Raises:
            UserError: a tensor that it can't have.
        """
        head = {name: x for name, x in tensors.items() if cls.head_prefix and name.startswith(cls.head_prefix)}
        return Unwrapped({name: x for name, x in tensors.items() if name not in head}, head) if head else None

    @classmethod
    def drawn(cls, width: int, shapes: ModelConfig = NO_SHAPES) -> Self:
        """Make one whose own tensors are still random.

        Args:
            width: D.
            shapes: `config.model`, of which what is the architecture's counts.
        """
        return cls(**{"projector": shapes.projector or width} if cls.first_of_head else {})

    @classmethod
    def with_texts(
        cls, unwrapped: Unwrapped, config: Mapping[str, Any], tokenizer: "PreTrainedTokenizerFast", source: str
    ) -> Unwrapped:
        """Return a published checkpoint's tensors, of which some may lie where its config and tokenizer say.

        Args:
            unwrapped: its tensors.
            config: its config.json.
            tokenizer: its own.
            source: the file or directory, for messages.
        Raises:
            UserError: they don't go together.
        """
        return unwrapped

    @classmethod
    def published_settings(cls, unwrapped: Unwrapped, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return how the program of a checkpoint thinks, by key of the config, where that is not the default.

        Args:
            unwrapped: its tensors.
            config: its config.json.
        """
        return {}

    @classmethod
    def found(cls, unwrapped: Unwrapped, config: Mapping[str, Any], source: str) -> Self:
        """Tell a checkpoint's settings of the architecture.

        Args:
            unwrapped: its tensors, whose shapes tell.
            config: its config.json.
            source: the file or directory, for messages.
        Raises:
            UserError: a tensor or key is missing that tells.
        """
        return cls(**{"projector": cls.hidden(unwrapped, source)} if cls.first_of_head else {})

    @classmethod
    def hidden(cls, unwrapped: Unwrapped, source: str) -> int:
        """Return the rows of its head's first tensor: the width of a hidden layer, its field `projector`.

        Raises:
            UserError: it is missing.
        """
        first = unwrapped.head.get(cls.first_of_head)
        if first is None:
            raise UserError(
                f"{source}: tensor {cls.first_of_head} is missing; give a {cls.title} checkpoint with its head"
            )
        return first.shape[0]


def refuse_others(tensors: Mapping[str, Stored], prefixes: tuple[str, ...], title: str, source: str) -> None:
    """Refuse tensors whose names begin in none of these ways.

    Raises:
        UserError: names the first that doesn't.
    """
    for name in tensors:
        if not name.startswith(prefixes):
            raise UserError(f"{source}: tensor {name} is unexpected; give a checkpoint in {title}'s layout")


@dataclasses.dataclass(frozen=True)
class Text(Architecture):
    """Nothing beside the language model, and no latents of its own."""

    name, title = "text", "language model, in words or soft tokens,"
    not_taught_by = ("distil", "silent")  # latents
    has_latents, has_gate, latents = False, False, 0
    prompt_keys = ("system", "instruction", "format", "closing", "answers")

    def template(self, tokenizer, first_id=None, prompt=NO_PROMPT):
        return text_template(tokenizer, prompt)
