"""iCoT: the written steps are internalised token by token (Deng et al., 2024).

After every `rise` steps one token more is dropped at the beginning of the steps, s of them by then, and of each problem
o further ones, P(o) ~ exp(-lambda o), so that no rise comes all at once. The loss is that of all tokens after the
question, and the optimizer is reset at each rise. In the end the answer alone is left.

Apart from the published program: texts are the reasoner's own, in which no eos stands between steps and answer, and the
line break that ends a step is one of its tokens; and there are no more resets from the s on that no problem has tokens
for, where that one looks at the batch before.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from slpo_jax.errors import UserError
from slpo_jax.text.batches import EncodedProblems
from slpo_jax.training import imitate
from slpo_jax.training.imitate import ImitationBatch, Phase


@dataclasses.dataclass(frozen=True)
class Internalization:
    """iCoT's way of imitating (see `imitate.Imitation`); the loss and what is left out are `imitate`'s.

    Attributes:
        rise: steps at each s.
        gone: the s from which on no token of the steps is left.
        offset_decay: lambda.
    """

    rise: int
    gone: int
    offset_decay: float

    usable = staticmethod(imitate.usable)
    positions = staticmethod(imitate.positions)
    suffix_slots = staticmethod(imitate.suffix_slots)
    make_loss = staticmethod(imitate.make_loss)

    def phases(
        self,
        cot_steps: int,
        stage_steps: int,
        final_steps: int,
        c_thought: int,
        max_latent_stage: int,
        final_latents: Literal["published", "random"],
        max_latents: int,
    ) -> list[Phase]:
        """CoT-SFT, if any; s from 0 to the last that leaves something; and the answer alone.

        Arguments as in `imitate.phases`: `final_steps` are those of the last two together.

        Raises:
            UserError: they are too few for the answer alone.
        """
        begin, total = cot_steps + self.gone * self.rise, cot_steps + final_steps
        if begin >= total:
            raise UserError(
                f"config.imitate.final_steps: {final_steps}, but iCoT drops the last token after "
                f"{self.gone * self.rise} steps ({self.gone} tokens, {self.rise} steps each); give more, or raise "
                "config.imitate.icot.tokens_per_epoch"
            )
        plan = [
            Phase("cot", 0, cot_steps, 0, 0, 0),
            Phase("icot", cot_steps, begin, 0, 0, 0, self.rise),
            Phase("final", begin, total, None, 0, 0),
        ]
        return [phase for phase in plan if phase.end > phase.start]

    def removed(self, phase: Phase, step: int, seed: int, batch_size: int) -> np.ndarray:
        """s + o of a batch's rows, int [B]; a pure function of its arguments."""
        offsets = np.random.default_rng([seed, step, 2]).geometric(-np.expm1(-self.offset_decay), batch_size) - 1
        return (step - phase.start) // phase.rise + offsets

    def make_batch(
        self,
        problems: EncodedProblems,
        phase: Phase,
        step: int,
        seed: int,
        batch_size: int,
        prompt_slots: Sequence[int],
        slots: tuple[int, ...],
    ) -> ImitationBatch:
        """The batch of one step, in the smallest buckets that hold it; a pure function of its arguments."""
        removed_B = self.removed(phase, step, seed, batch_size) if phase.rise else None
        return imitate.make_batch(problems, phase, step, seed, batch_size, prompt_slots, slots, removed_B)


def internalization(settings: Mapping[str, Any], problems: EncodedProblems) -> Internalization:
    """iCoT at the pace of `config.imitate` on problems, some of which may be too long.

    Args:
        settings: the section, checked.
    """
    kept, icot = imitate.usable(problems, settings["max_tokens"]), settings["icot"]
    epoch = -(-len(kept) // settings["batch_size"])
    longest = max((sum(map(len, problems.steps[i])) for i in kept), default=0)
    rise = max(1, round(epoch / icot["tokens_per_epoch"]))
    return Internalization(rise, min(icot["all_from"], longest), icot["offset_decay"])
