"""iCoT: the written steps are internalised token by token (Deng et al., 2024).

After every `rise` steps one token more is dropped at the beginning of the steps, s of them by then, and of each problem
o further ones, P(o) ~ exp(-lambda o), so that no rise comes all at once. The loss is that of all tokens after the
question, and the optimizer is reset at each rise. In the end the answer alone is left.

Apart from the published program: texts are the reasoner's own, in which no eos stands between steps and answer, and the
line break that ends a step is one of its tokens; and there are no more resets from the s on that no problem has tokens
for, where that one looks at the batch before.
"""

import dataclasses

import numpy as np

from slpo_jax.data.batches import EncodedProblems
from slpo_jax.errors import UserError
from slpo_jax.policy.noise import Stream
from slpo_jax.settings import setting
from slpo_jax.training.recipes import curriculum
from slpo_jax.training.recipes.recipe import Draw, ImitateSettings, Phase, Recipe, RecipeSettings, consecutive, usable


@dataclasses.dataclass(frozen=True)
class Internalization(RecipeSettings):
    """The section `config.imitate.icot`: how fast the steps' tokens are dropped.

    Attributes:
        tokens_per_epoch: how often, in an epoch, s rises by one: the tokens that are dropped of every problem.
        all_from: from this s on all are dropped, however many there are.
        offset_decay: lambda of P(o) ~ exp(-lambda o), o the further tokens that are dropped of one problem.
    """

    label = "iCoT"

    tokens_per_epoch: int = setting(8, least=1)
    all_from: int = setting(39, least=1)
    offset_decay: float = setting(4.0, above=0)

    def __call__(self, settings: ImitateSettings, default: Recipe | None = None) -> Recipe:
        """Return the recipe, whose texts and loss are the curriculum's."""
        return Recipe(
            phases=lambda problems, max_latents: self.phases(settings, problems, max_latents),
            needs=curriculum.needs,
            rows=lambda draw: curriculum.imitation_batch(draw, self.removed(draw)),
            loss=curriculum.loss,
        )

    def pace(self, settings: ImitateSettings, problems: EncodedProblems) -> tuple[int, int]:
        """Return (optimizer steps at each s, the s from which on no token of the steps is left).

        Args:
            problems: some may be too long, and are not counted.
        """
        indices = usable(problems, settings.max_tokens)
        epoch = -(-len(indices) // settings.batch_size)
        longest = max((sum(map(len, problems.steps[i])) for i in indices), default=0)
        return max(1, round(epoch / self.tokens_per_epoch)), min(self.all_from, longest)

    def phases(self, settings: ImitateSettings, problems: EncodedProblems, max_latents: int) -> list[Phase]:
        """Plan CoT-SFT, if any; s from 0 to the last that leaves any; the answer alone, `final_steps` with these.

        Raises:
            UserError: they are too few for the answer alone, or there are latents.
        """
        if max_latents:
            raise UserError(f"config.max_latents: {max_latents}, but iCoT trains without latents; set it to 0")
        rise, gone = self.pace(settings, problems)
        if gone * rise >= settings.final_steps:
            raise UserError(
                f"config.imitate.final_steps: {settings.final_steps}, but iCoT drops the last token after "
                f"{gone * rise} steps ({gone} tokens, {rise} steps each); give more, or raise "
                "config.imitate.icot.tokens_per_epoch"
            )
        cot, dropping = Phase("cot", 0, settings.cot_steps, 0, 0, 0), Phase("icot", 0, gone * rise, 0, 0, 0, rise)
        return consecutive([cot, dropping, Phase("final", 0, settings.final_steps - gone * rise, None, 0, 0)])

    def removed(self, draw: Draw) -> np.ndarray | int:
        """Draw s + o of a batch's rows, int [B]; 0 where nothing is left out."""
        if not draw.phase.rise:
            return 0
        offsets = draw.rng(Stream.REMOVED_TOKENS).geometric(-np.expm1(-self.offset_decay), len(draw.indices)) - 1
        return (draw.step - draw.phase.start) // draw.phase.rise + offsets
