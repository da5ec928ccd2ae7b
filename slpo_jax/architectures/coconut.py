"""COCONUT (Hao et al., 2024): the last hidden state itself is the next input embedding."""

import dataclasses

import numpy as np

from slpo_jax.architectures.architecture import (
    NO_PROMPT,
    Architecture,
    Unwrapped,
    refuse_others,
)
from slpo_jax.architectures.weights import EMBEDDING, with_prefix
from slpo_jax.data.chat import QUESTION
from slpo_jax.data.templates import Template, line
from slpo_jax.data.tokenizer import ANSWER_MARK, COCONUT_TOKENS, add_reasoner_tokens
from slpo_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Coconut(Architecture):
    """A language model alone.

    Its program writes the model under `base_causallm.` and the token embedding once more, as `embedding.weight`; in
    Hugging Face's layout the names are the language model's.
    """

    name = "coconut"
    title = "COCONUT"
    tokens = COCONUT_TOKENS
    layers = ()
    prompt_keys = ("format", "closing")

    def template(self, tokenizer, first_id=None, prompt=NO_PROMPT):
        """Lay out question + line break + start | latents | end + steps, a line each + "### 72" + eos.

        With `prompt.closing` it is format | latents | closing + "72" + eos (Zhu et al., 2025).
        """
        if bool(prompt.format) != bool(prompt.closing):
            raise UserError(
                "config.prompt.format",
                "takes the place of COCONUT's markers together with config.prompt.closing; give both or neither",
            )
        marked = Template(
            **add_reasoner_tokens(tokenizer, COCONUT_TOKENS, first_id),
            tokenizer=tokenizer,
            answer_style=prompt.marked_style("after_mark"),
            question_text=line,
            step_text=lambda step, first: step + "\n",
            answer_text=lambda answer: f"{ANSWER_MARK} {answer}",
        )
        if not prompt.closing:
            return marked

        # Texts take the place of the markers.
        closing_ids = tokenizer(prompt.closing, add_special_tokens=False)["input_ids"]
        return dataclasses.replace(
            marked,
            start_id=None,
            closing_ids=tuple(closing_ids),
            question_text=lambda question: prompt.format.replace(QUESTION, question),
            step_text=lambda step, first: step,
            answer_text=str,
            bare=True,
        )

    @classmethod
    def unwrap(cls, tensors, source):
        model = with_prefix(tensors, "base_causallm.")
        if not model:
            return None
        known = ("base_causallm.", "embedding.weight")
        refuse_others(tensors, known, cls.title, source)

        # The second embedding must be a copy of the model's.
        copy = tensors.get("embedding.weight")
        originals = [model[name] for name in EMBEDDING.values() if name in model]
        if copy is not None and originals:
            original = originals[0]
            if not np.array_equal(copy.read(), original.read()):
                raise UserError(
                    f"{source}: tensor embedding.weight differs from {original.name}; the checkpoint is corrupt, "
                    "fetch it again"
                )
        return Unwrapped(model, {}, original=True)
