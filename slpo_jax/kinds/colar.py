"""CoLaR (Tan et al., 2025): a head on the last hidden state predicts the next, compressed, input embedding.

Of its head, a Gaussian, this is the mean: the head of its checkpoints in Hugging Face's layout.
"""

import dataclasses
from typing import Any

import flax.linen as nn
from absl import logging

from slpo_jax.checked import setting
from slpo_jax.errors import UserError
from slpo_jax.interop.weights import linear, norm
from slpo_jax.kinds.kind import NO_PROMPT, Kind, Unwrapped
from slpo_jax.models.reasoner import LatentReasoner
from slpo_jax.text.templates import Template
from slpo_jax.text.tokenizer import LATENT, add_words

_MARK = "###"  # begins the thought and ends it
_ASKED = "Question: {} Let's think step by step:(Thinking speed: 2)"
_ANSWER = "Answer:"
_SCALE = "latent_embedding_std"  # in config.json


class Head(nn.Module):
    """MLP with a norm, and the mean.

    Attributes:
        hidden: width of its hidden layers.
        width: D.
        scale: what the mean is multiplied by, the standard deviation of the base model's embeddings.
        dtype: of activations.
    """

    hidden: int
    width: int
    scale: float
    dtype: Any

    @nn.compact
    def __call__(self, h_BLD):
        x_BLH = nn.gelu(nn.Dense(self.hidden, dtype=self.dtype, name="fc_in")(h_BLD), approximate=False)
        x_BLH = nn.Dense(self.hidden, dtype=self.dtype, name="fc_out")(x_BLH)
        x_BLH = nn.LayerNorm(epsilon=1e-5, dtype=self.dtype, name="norm")(x_BLH)
        return self.scale * nn.Dense(self.width, dtype=self.dtype, name="mean")(x_BLH)


class Predicting(LatentReasoner):
    """A reasoner whose latent is the head's; attributes as there."""

    hidden: int
    scale: float

    def setup(self):
        config = self.backbone.config
        self.head = Head(self.hidden, config.n_embd, self.scale, config.dtype)

    def transition(self, hidden_BLD):
        return self.head(hidden_BLD)


@dataclasses.dataclass(frozen=True)
class Colar(Kind):
    """A head beside the language model, `lt_head.*` in Hugging Face's layout; no tokens of its own.

    Its own program ends a thought where "###" is the likeliest token; here a gate or a number of latents does.

    Attributes:
        projector: width of the head's hidden layers.
        scale: of its latents; published: 0.018 for Llama-3.2-1B and -3B.
    """

    projector: int = setting(least=1)
    scale: float = setting(0.018, above=0)

    name, title = "colar", "CoLaR"
    latents = 13  # published: 12.7 on average on GSM8K, at thinking speed 2
    about_head = "`lt_head.*`: Linear, GELU, Linear, LayerNorm, Linear, from the last hidden state to the next latent"

    def module(self, backbone):
        return Predicting(backbone, self.projector, self.scale)

    def template(self, tokenizer, first_id=None, prompt=NO_PROMPT):
        """Question, as it asks it + "###" | latents | "###" + steps, a line each + "Answer:72" + eos; no bos."""
        if tokenizer.eos_token is None:
            raise UserError("tokenizer: has no eos token, so that answers couldn't end; set eos_token in its config")
        add_words(tokenizer, _ASKED.format(""))
        add_words(tokenizer, _ANSWER, apart=False)
        mark = tokenizer(_MARK, add_special_tokens=False)["input_ids"]
        if len(mark) != 1:
            raise UserError(
                f"tokenizer: {_MARK!r} is {len(mark)} tokens, but CoLaR's thought has one at each end; give Llama 3's, "
                "or another that knows it"
            )
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        return Template(
            answer_style="texts" if prompt.answers == "texts" else "last_number",
            start_id=mark[0],
            closing_ids=(mark[0],),
            latent_id=tokenizer.get_vocab().get(LATENT),
            eos_id=tokenizer.eos_token_id,
            pad_id=tokenizer.pad_token_id,
            tokenizer=tokenizer,
            question_text=_ASKED.format,
            step_text=lambda step, first: step + "\n",
            answer_text=lambda answer: f"{_ANSWER}{answer}",
            bare=True,
        )

    def heads(self, width):
        return [
            *linear(("head", "fc_in"), "lt_head.fc.0", (self.projector, width)),
            *linear(("head", "fc_out"), "lt_head.fc.2", (self.projector, self.projector)),
            *norm(("head", "norm"), "lt_head.fc.3", self.projector),
            *linear(("head", "mean"), "lt_head.mean", (width, self.projector)),
        ]

    @classmethod
    def unwrap(cls, tensors, source):
        head = {name: tensor for name, tensor in tensors.items() if name.startswith("lt_head.")}
        return Unwrapped({name: t for name, t in tensors.items() if name not in head}, head) if head else None

    @classmethod
    def drawn(cls, width, projector=0):
        return cls(projector or width)

    @classmethod
    def found(cls, unwrapped, config, source):
        first, scale = unwrapped.head.get("lt_head.fc.0.weight"), config.get(_SCALE)
        if first is None:
            raise UserError(f"{source}: tensor lt_head.fc.0.weight is missing; give a CoLaR checkpoint with its head")
        if type(scale) not in (int, float) or scale <= 0:
            raise UserError(
                f"{source}: {_SCALE} in its config.json is {scale!r}, but a latent is that many times the head's; give "
                "the checkpoint's own, published: 0.018 for Llama-3.2-1B"
            )
        logging.warning(
            "%s: CoLaR's own program ends a thought where %s is the likeliest token; here, without a trained gate, all "
            "have config.max_latents (solve: --latents)", source, _MARK,
        )  # fmt: skip
        return cls(first.shape[0], scale)
