"""ReGuLaR (Wang et al., 2026) with a text encoder: one latent stands for a whole step, in a learned code of it.

As CoLaR's training, asked at speed 1 throughout, with a slot a step. Its input is a projector's of a frozen encoding of
the step; the cross-entropy trains the projector, through the inputs, and the head learns to predict what comes out,
which is a constant to it. The projector is dropped after training.

Not the published method: there the encoding is DeepSeek-OCR's of a picture of the step's text. Here it is CoLaR's own,
the sum of its tokens' embeddings divided by the root of their number, so that no vision model is needed. It is frozen
where the embeddings are, as under LoRA; else these are trained by all else that they are used for.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from slpo_jax.data.batches import EncodedProblems
from slpo_jax.data.chat import speed_of
from slpo_jax.data.templates import Ids
from slpo_jax.errors import UserError
from slpo_jax.models.parts import Params
from slpo_jax.models.reasoner import StepProjector
from slpo_jax.policy.policy import Policy
from slpo_jax.training.recipes.colar import ChunkBatch, Compression, chunked, pooled
from slpo_jax.training.recipes.recipe import ImitateSettings, Recipe, RecipeSettings

PROJECTOR = "step_projector"


@dataclasses.dataclass(frozen=True)
class StepPerLatent(RecipeSettings):
    """Nothing to set."""

    uses_c_thought = False
    metrics = Compression.metrics

    def __call__(self, settings: ImitateSettings, default: Recipe | None = None) -> Recipe:
        """CoT-SFT for `cot_steps`, if any, then steps as latents for `final_steps`."""

        def cut(problems: EncodedProblems, index: int, speed: int) -> list[Ids]:
            return problems.steps[index]

        recipe = chunked(settings, "regular", cut, 1, _codes)

        def phases(problems: EncodedProblems, max_latents: int):
            plan = recipe.phases(problems, max_latents)
            if speed_of(problems.template) != 1:
                raise UserError("config.prompt.speed: the recipe regular asks at speed 1 always; set it to 1")
            return plan

        return dataclasses.replace(recipe, phases=phases, init=_init)


def _init(key: jax.Array, policy: Policy, params: Params) -> Params:
    width = policy.reasoner.width
    return {PROJECTOR: StepProjector(width).init(key, jnp.zeros((1, width)))["params"]}


def _codes(policy: Policy, params: Any, batch: ChunkBatch) -> jax.Array:
    """The slots' inputs [B, S, D]: embeddings, and of the thought the projector's, times the latents' unit."""
    words_BSD, reasoner = pooled(policy, params, batch), policy.reasoner
    if batch.predicted is None:
        return words_BSD
    codes_ND = jax.lax.stop_gradient(words_BSD.reshape(-1, reasoner.width))
    latents_ND: Any = StepProjector(reasoner.width).apply({"params": params[PROJECTOR]}, codes_ND)
    latents_BSD = (reasoner.unit * latents_ND).astype(words_BSD.dtype).reshape(words_BSD.shape)
    return jnp.where(batch.chunks[..., None], latents_BSD, words_BSD)
