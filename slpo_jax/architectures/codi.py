"""CODI (Shen et al., 2025): the next input embedding is a projection of the last hidden state.

And in the spirit of DART (2506.11752): silent tokens with a learned embedding, which a light network changes.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from slpo_jax.architectures.architecture import (
    NO_PROMPT,
    Architecture,
    Unwrapped,
    refuse_others,
)
from slpo_jax.architectures.weights import Weight, linear, norm, strip_all, with_prefix
from slpo_jax.data.templates import Template
from slpo_jax.data.tokenizer import (
    END_LATENT,
    PAD_LATENT,
    START_LATENT,
    add_reasoner_tokens,
    add_words,
)
from slpo_jax.errors import UserError
from slpo_jax.models.reasoner import LatentReasoner
from slpo_jax.settings import setting

_TOKENS = (PAD_LATENT, START_LATENT, END_LATENT)
_ANSWER = "The answer is:"
# The layers of the original's `prj.`, and their names in Hugging Face's `projector.`.
_LAYERS = {"1": "1", "3": "3", "ln": "4"}


class Projector(nn.Module):
    """A projector [B, L, D] -> [B, L, D], without the dropout of probability 0 that the published one has."""

    hidden: int
    width: int
    dtype: Any

    @nn.compact
    def __call__(self, h_BLD):
        x_BLH = nn.Dense(self.hidden, dtype=self.dtype, name="fc_in")(h_BLD)
        x_BLH = nn.gelu(x_BLH, approximate=False)
        x_BLD = nn.Dense(self.width, dtype=self.dtype, name="fc_out")(x_BLH)
        return nn.LayerNorm(epsilon=1e-5, dtype=self.dtype, name="norm")(x_BLD)


class Projecting(LatentReasoner):
    """A reasoner whose latent is a projector of the hidden state.

    Attributes:
        hidden: width of the projector's hidden layer.
    """

    hidden: int

    def setup(self):
        config = self.backbone.config
        self.projector = Projector(self.hidden, config.n_embd, config.dtype)

    def transition(self, hidden_BLD):
        return self.projector(hidden_BLD)


@dataclasses.dataclass(frozen=True)
class Codi(Architecture):
    """A projector: Linear, GELU, Linear, LayerNorm.

    Its program writes the language model under `codi.`, with LoRA adapters beside the base weights, and the projector
    under `prj.`; in Hugging Face's layout the names are the language model's and `projector.*`.

    Attributes:
        projector: width of its hidden layer.
        tidy: as in CODI's own program, questions are stripped and two spaces become one, and the end marker can't be
            generated; False is the protocol of checkpoints in Hugging Face's layout.
    """

    projector: int = setting(least=1)
    tidy: bool = True

    name = "codi"
    title = "CODI"
    default_recipe = "distil"
    tokens = _TOKENS
    after_vocabulary = True
    head_prefix = "projector."
    first_of_head = "projector.1.weight"
    about_head = "`projector.{1,3,4}.*`: Linear, GELU, Linear, LayerNorm, from the last hidden state to the next latent"
    layers = (
        ("linear", "projector.1"),
        ("gelu", "none"),
        ("linear", "projector.3"),
        ("norm", "projector.4"),
    )

    def module(self, backbone):
        return Projecting(backbone, self.projector)

    def template(self, tokenizer, first_id=None, prompt=NO_PROMPT):
        """Lay out question + start (bot) | latents | end (eot) + steps, a space between + "The answer is: 72" + eos."""
        add_words(tokenizer, _ANSWER)
        tokens = add_reasoner_tokens(tokenizer, _TOKENS, first_id)
        # The chat template of an export must write questions as `question_text` does.
        in_jinja = "question"
        if self.tidy:
            in_jinja = "question.strip().replace('  ', ' ')"
        return Template(
            **tokens,
            tokenizer=tokenizer,
            answer_style=prompt.marked_style("last_number"),
            question_text=_tidy if self.tidy else str,
            question_in_jinja=in_jinja,
            step_text=lambda step, first: step if first else " " + step,
            answer_text=lambda answer: f"{_ANSWER} {answer}",
            banned_ids=tokens["closing_ids"] if self.tidy else (),
        )

    def heads(self, width):
        return [
            *linear(("projector", "fc_in"), "projector.1", (self.projector, width)),
            *linear(("projector", "fc_out"), "projector.3", (width, self.projector)),
            *norm(("projector", "norm"), "projector.4", width),
        ]

    @classmethod
    def unwrap(cls, tensors, source):
        model = with_prefix(tensors, "codi.")
        if model:
            refuse_others(tensors, ("codi.", "prj."), cls.title, source)
            head = {}
            for name, tensor in with_prefix(tensors, "prj.").items():
                head[_hugging_face_name(name, source)] = tensor
            return Unwrapped(strip_all(model, "base_model.model."), head, original=True)
        return super().unwrap(tensors, source)

    @classmethod
    def from_checkpoint(cls, unwrapped, config, source):
        return cls(cls.hidden(unwrapped, source), tidy=unwrapped.original)


def _hugging_face_name(name: str, source: str) -> str:
    number, _, part = name.partition(".")
    if number not in _LAYERS:
        raise UserError(
            f"{source}: tensor prj.{name} is unexpected; CODI's projector has prj.1, prj.3 and prj.ln"
        )
    return f"projector.{_LAYERS[number]}.{part}"


def _tidy(question: str) -> str:
    return question.strip().replace("  ", " ")


class Evolution(nn.Module):
    """A silent token's input: a learned embedding plus an MLP of the state before, which begins at zero."""

    hidden: int
    width: int
    dtype: Any

    @nn.compact
    def __call__(self, h_BLD):
        silent_D = self.param("silent", nn.initializers.normal(0.02), (self.width,))
        x_BLH = nn.Dense(self.hidden, dtype=self.dtype, name="fc_in")(h_BLD)
        x_BLH = nn.gelu(x_BLH, approximate=False)
        zeros = nn.initializers.zeros
        out = nn.Dense(self.width, dtype=self.dtype, kernel_init=zeros, name="fc_out")
        x_BLD = out(x_BLH)
        return x_BLD + jnp.asarray(silent_D, self.dtype)[None, None]


class Evolving(LatentReasoner):
    """A reasoner whose latents are silent tokens.

    Attributes:
        hidden: width of the network's hidden layer.
    """

    hidden: int

    def setup(self):
        config = self.backbone.config
        self.evolution = Evolution(self.hidden, config.n_embd, config.dtype)

    def transition(self, hidden_BLD):
        return self.evolution(hidden_BLD)


@dataclasses.dataclass(frozen=True)
class Dart(Architecture):
    """A learned embedding, and a light network: Linear, GELU, Linear. No program or checkpoint is published.

    Attributes:
        projector: width of the network's hidden layer.
    """

    projector: int = setting(least=1)

    name = "dart"
    title = "DART"
    default_recipe = "silent"
    latents = 20
    tokens = Codi.tokens
    after_vocabulary = True
    head_prefix = "silent."
    first_of_head = "silent.fc_in.weight"
    about_head = "`silent.*`: a learned embedding, and Linear, GELU, Linear of the last hidden state, added to it"

    def module(self, backbone):
        return Evolving(backbone, self.projector)

    def template(self, tokenizer, first_id=None, prompt=NO_PROMPT):
        """Lay out texts as CODI does."""
        return Codi(self.projector, tidy=False).template(tokenizer, first_id, prompt)

    def heads(self, width):
        return [
            Weight(("evolution", "silent"), "silent.embedding", (width,)),
            *linear(("evolution", "fc_in"), "silent.fc_in", (self.projector, width)),
            *linear(("evolution", "fc_out"), "silent.fc_out", (width, self.projector)),
        ]
