"""CoLaR (Tan et al., 2025): a head on the last hidden state predicts the next, compressed, input embedding.

The head is a Gaussian; its checkpoints in Hugging Face's layout have only the mean.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from slpo_jax.architectures.architecture import (
    NO_PROMPT,
    NO_SHAPES,
    Architecture,
    Unwrapped,
    refuse_others,
)
from slpo_jax.architectures.weights import linear, norm, with_prefix
from slpo_jax.data.chat import MOST_SPEED, SpeedPrompt
from slpo_jax.data.templates import Template
from slpo_jax.data.tokenizer import LATENT, add_words, end_ids
from slpo_jax.errors import UserError, key_name
from slpo_jax.models.reasoner import LatentLaw, LatentReasoner
from slpo_jax.settings import setting

_MARK = "###"  # begins the thought and ends it
_ANSWER = "Answer:"
_SCALE = "latent_embedding_std"  # in config.json
# By D: of GPT-2, a Qwen2 and the Llama 3s.
_SCALES = {768: 0.12, 1536: 0.03, 2048: 0.018, 3072: 0.018, 4096: 0.008}


class Head(nn.Module):
    """MLP with a norm; the mean and, of a Gaussian, the logarithm of the standard deviation, float32.

    Attributes:
        hidden: width of its hidden layers.
        width: D.
        gaussian: whether there is a standard deviation.
        dtype: of activations.
    """

    hidden: int
    width: int
    gaussian: bool
    dtype: Any

    @nn.compact
    def __call__(self, h_BLD):
        x_BLH = nn.Dense(self.hidden, dtype=self.dtype, name="fc_in")(h_BLD)
        x_BLH = nn.gelu(x_BLH, approximate=False)
        x_BLH = nn.Dense(self.hidden, dtype=self.dtype, name="fc_out")(x_BLH)
        x_BLH = nn.LayerNorm(epsilon=1e-5, dtype=self.dtype, name="norm")(x_BLH)
        names = ("mean", "log_std") if self.gaussian else ("mean",)
        return [
            nn.Dense(self.width, dtype=jnp.float32, name=name)(x_BLH) for name in names
        ]


class Predicting(LatentReasoner):
    """A reasoner whose latent is the scaled mean of the head.

    Attributes:
        hidden, gaussian: as of `Head`.
        scale: the factor of the head's outputs, the standard deviation of the base model's embeddings.
    """

    hidden: int
    scale: float
    gaussian: bool

    def setup(self):
        config = self.backbone.config
        self.head = Head(self.hidden, config.n_embd, self.gaussian, config.dtype)

    def transition(self, hidden_BLD):
        return (self.scale * self.head(hidden_BLD)[0]).astype(hidden_BLD.dtype)

    def law(self, hidden_BLD):
        """Return `LatentLaw` of the latent at the next slot."""
        outputs = self.head(hidden_BLD)
        mean_BLD = outputs[0]
        std_BLD = jnp.exp(outputs[1]) if self.gaussian else jnp.zeros_like(mean_BLD)
        return LatentLaw(mean_BLD, std_BLD)


@dataclasses.dataclass(frozen=True)
class Colar(Architecture):
    """A head beside the language model, `lt_head.*` in Hugging Face's layout; no tokens of its own.

    Its own program writes the parts that it has trained: the head as `latent_policy.*`, and adapters under `llm.`,
    which need the base model.

    Attributes:
        projector: width of the head's hidden layers.
        scale: the factor of its latents.
        gaussian: whether the head has a standard deviation; without one its mean is the latent.
    """

    projector: int = setting(least=1)
    scale: float = setting(0.018, above=0)
    gaussian: bool = False

    name = "colar"
    title = "CoLaR"
    default_recipe = "colar"
    # These recipes teach neither the head's sigma nor when a thought ends.
    not_taught_by = ("curriculum", "distil", "silent", "latent_sft")
    prompt_keys = ("speed",)
    needs_words = True
    latents = 64  # published; "###" ends a thought
    head_prefix = "lt_head."
    first_of_head = "lt_head.fc.0.weight"
    about_head = (
        "`lt_head.*`: Linear, GELU, Linear, LayerNorm, and from there one Linear each to the mean of the next latent "
        "and to the logarithm of its standard deviation, if there is one"
    )

    @property
    def layers(self):
        """The layers up to the mean."""
        hidden = (
            ("linear", "lt_head.fc.0"),
            ("gelu", "none"),
            ("linear", "lt_head.fc.2"),
            ("norm", "lt_head.fc.3"),
        )
        return *hidden, ("linear", "lt_head.mean"), ("scale", self.scale)

    def module(self, backbone):
        return Predicting(backbone, self.projector, self.scale, self.gaussian)

    def template(self, tokenizer, first_id=None, prompt=NO_PROMPT):
        """Lay out question, as it asks + "###" | latents | "###" + steps, a line each + "Answer:72" + eos; no bos."""
        requests = [SpeedPrompt(speed)("") for speed in range(1, MOST_SPEED + 1)]
        add_words(tokenizer, " ".join(requests))
        add_words(tokenizer, _ANSWER, apart=False)
        mark = tokenizer(_MARK, add_special_tokens=False)["input_ids"]
        if len(mark) != 1:
            raise UserError(
                f"tokenizer: {_MARK!r} is {len(mark)} tokens, but CoLaR's thought has one at each end; give Llama 3's, "
                f"or another that knows it, or without a base model {key_name('config.tokenizer')}=words"
            )
        return Template(
            **end_ids(tokenizer),
            answer_style=prompt.marked_style("last_number"),
            start_id=mark[0],
            closing_ids=(mark[0],),
            latent_id=tokenizer.get_vocab().get(LATENT),
            tokenizer=tokenizer,
            question_text=SpeedPrompt(prompt.speed),
            step_text=lambda step, first: step + "\n",
            answer_text=lambda answer: f"{_ANSWER}{answer}",
            bare=True,
        )

    def heads(self, width):
        hidden = self.projector
        weights = [
            *linear(("head", "fc_in"), "lt_head.fc.0", (hidden, width)),
            *linear(("head", "fc_out"), "lt_head.fc.2", (hidden, hidden)),
            *norm(("head", "norm"), "lt_head.fc.3", hidden),
            *linear(("head", "mean"), "lt_head.mean", (width, hidden)),
        ]
        if self.gaussian:
            weights += linear(("head", "log_std"), "lt_head.log_std", (width, hidden))
        return weights

    @classmethod
    def unwrap(cls, tensors, source):
        policy = with_prefix(tensors, "latent_policy.")
        if policy:
            refuse_others(tensors, ("latent_policy.", "llm."), cls.title, source)
            head = {f"lt_head.{name}": tensor for name, tensor in policy.items()}
            return Unwrapped(with_prefix(tensors, "llm."), head, original=True)
        return super().unwrap(tensors, source)

    @classmethod
    def from_config(cls, width, shapes=NO_SHAPES):
        scale = shapes.scale or _SCALES.get(width, cls.scale)
        return cls(shapes.projector or width, scale, gaussian=True)

    @classmethod
    def published_settings(cls, unwrapped, config):
        return {
            "latent_policy.name": "colar",
            "latent_policy.colar.least": int(unwrapped.original),
        }

    @classmethod
    def from_checkpoint(cls, unwrapped, config, source):
        hidden = cls.hidden(unwrapped, source)
        scale = config.get(_SCALE)
        if unwrapped.original and scale is None:
            scale = _SCALES.get(unwrapped.head[cls.first_of_head].shape[1])
        if type(scale) not in (int, float) or scale <= 0:
            owner = f"{key_name('config.base')}'s" if unwrapped.original else "its"
            raise UserError(
                f"{source}: {_SCALE} in {owner} config.json is {scale!r}, but a latent is that many times the head's; "
                "set it there to the checkpoint's own, published: 0.018 for Llama-3.2-1B"
            )
        return cls(hidden, scale, gaussian="lt_head.log_std.weight" in unwrapped.head)
