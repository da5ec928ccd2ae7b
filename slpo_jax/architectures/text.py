"""A language model as it is, which thinks in words or, by a latent policy, in mixtures of its tokens' embeddings."""

import dataclasses

from slpo_jax.architectures.architecture import NO_PROMPT, Architecture
from slpo_jax.data.chat import text_template


@dataclasses.dataclass(frozen=True)
class Text(Architecture):
    """Nothing beside the language model, and no latents of its own."""

    name, title = "text", "language model, in words or soft tokens,"
    not_taught_by = ("distil", "silent")  # latents
    has_latents, has_gate, latents = False, False, 0
    prompt_keys = ("system", "instruction", "chat", "format", "closing", "answers")

    def template(self, tokenizer, first_id=None, prompt=NO_PROMPT):
        return text_template(tokenizer, prompt)
