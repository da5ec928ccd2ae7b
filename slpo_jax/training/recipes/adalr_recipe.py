"""AdaLR's imitation (2511.21581): CODI's distillation, of a thought that learns how long it should be.

The student's number of latents follows from the problem, and every choice to go on or to stop is one of the tokens of
its cross-entropy. Hidden states are compared one token later than CODI compares them, where the answer itself begins.

Apart from the published program: the standard deviations are an example's, not a batch's; the student does not learn to
write `<START>`, which is always given; "Question: " stands before no question, as in its rewards and evaluation.
"""

import dataclasses
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from slpo_jax.data.batches import EncodedProblems
from slpo_jax.errors import UserError
from slpo_jax.policy import noise
from slpo_jax.policy.policy import Policy
from slpo_jax.settings import setting
from slpo_jax.training.recipes import curriculum
from slpo_jax.training.recipes.distil import (
    DistilBatch,
    Distillation,
    distillation,
    teach,
    usable,
)
from slpo_jax.training.recipes.recipe import (
    Draw,
    ImitateSettings,
    Phase,
    Recipe,
    consecutive,
)

_LATENT_POLICY = "adalr"


@struct.dataclass
class AdaptiveBatch(DistilBatch):
    """A step's rows; choices and the student's tokens have the same weight, and all weights add up to B.

    Attributes:
        choice_weights: float [B], of each choice of a row; None where the teacher learns alone.
    """

    choice_weights: Any = None


@dataclasses.dataclass(frozen=True)
class AdaptiveLength(Distillation):
    """The section `config.imitate.adalr`; further attributes as of `Distillation`.

    A problem has `latents` + `latents_a_step` * (its steps) latents, and at most `most`. The defaults are the published
    "latent-6"; "latent-6-by-1" has `latents=5` and `latents_a_step=1`.

    Attributes:
        latents: number of latents beside those for steps.
        latents_a_step: number of latents for each step, the last one included.
        most: most latents of a problem.
    """

    latents: int = setting(6, least=0)
    latents_a_step: int = setting(0, least=0)
    most: int = setting(10, least=1)

    uses_c_thought = False

    def check(self, name, config):
        super().check(name, config)
        if config.imitate.final_steps and config.latent_policy.name != _LATENT_POLICY:
            raise UserError(
                f"config.latent_policy.name: {config.latent_policy.name}, but the recipe {name} trains when a thought "
                f"stops; set it to {_LATENT_POLICY}"
            )
        most = self.most if self.latents_a_step else min(self.latents, self.most)
        if config.imitate.final_steps and most > config.max_latents:
            raise UserError(
                f"config.max_latents: {config.max_latents}, but the recipe {name} trains thoughts of up to {most} "
                f"latents; raise it, or lower config.imitate.{name}.most"
            )

    def __call__(
        self, settings: ImitateSettings, default: Recipe | None = None
    ) -> Recipe:
        """Return the recipe: the teacher alone for `cot_steps`, if any, then both for `final_steps`."""
        return Recipe(
            phases=lambda problems, max_latents: self.phases(settings, problems),
            needs=self.needs,
            rows=self.rows,
            loss=self.loss,
            usable=usable,
            fewest_steps=lambda plan: 1 if self.last_step else 2,
        )

    def phases(
        self, settings: ImitateSettings, problems: EncodedProblems
    ) -> list[Phase]:
        """Return the phases, of which the last has slots for the longest thought of these problems."""
        lengths = self.lengths(problems, range(len(problems)))
        slots = int(max(lengths, default=0))
        cot = Phase(
            name="cot",
            start=0,
            end=settings.cot_steps,
            dropped=0,
            latents=0,
            latent_slots=0,
        )
        adalr = Phase(
            name="adalr",
            start=0,
            end=settings.final_steps,
            dropped=None,
            latents=slots,
            latent_slots=slots,
        )
        return consecutive([cot, adalr])

    def lengths(self, problems: EncodedProblems, indices: Any) -> np.ndarray:
        """Return the number of latents of each of these problems, int [B]."""
        counts = [len(problems.steps[index]) for index in indices]
        steps_B = np.array(counts, np.int32)
        latents_B = self.latents + self.latents_a_step * steps_B
        return np.minimum(latents_B, self.most).astype(np.int32)

    def position(self, template, ids, answer):
        """Return the index of the first token behind "The answer is:", the answer's or a lone space's."""
        text = template.answer_text(answer)
        before = text.removesuffix(answer).rstrip()
        begin = len(before.encode())
        # Count the tokens that end before the answer begins.
        sizes = [len(template.token_bytes[token]) for token in ids]
        return sum(end <= begin for end in accumulate(sizes))

    def rows(self, draw: Draw) -> AdaptiveBatch:
        """Make the rows of one step."""
        batch = super().rows(draw)
        if batch.student is None:
            return AdaptiveBatch(**vars(batch))
        latents_B = self.lengths(draw.problems, draw.indices)
        rows = len(latents_B)
        # A row chooses before each latent to go on, and after the last one to stop.
        # Weights were scaled for tokens alone: count them again, together with the choices.
        is_token_BA = batch.student.suffix.weights > 0
        choices = np.sum(latents_B + 1)
        weight = np.float32(rows / (is_token_BA.sum() + choices))
        suffix = batch.student.suffix._replace(weights=is_token_BA * weight)
        student = dataclasses.replace(batch.student, latents=latents_B, suffix=suffix)
        whole = vars(batch) | {"student": student}
        weights_B = np.full(rows, weight, np.float32)
        return AdaptiveBatch(**whole, choice_weights=weights_B)

    def loss(  # type: ignore[override]  # it makes its own batches, and has no gate
        self, policy: Policy, params, batch: AdaptiveBatch, key
    ):
        """Sum over examples of student + teacher_factor * teacher + distil_factor * distillation.

        The student's part is the cross-entropy of its answer's tokens and of its choices to go on and to stop.

        Args:
            policy: as in `Recipe.loss`, with the latent policy adalr.
        """
        rows = jnp.float32(batch.draw_ids.shape[0])
        params = policy.reasoner.stack(params)
        # The teacher reads its written steps.
        teacher, teacher_BMD = teach(
            policy.reasoner, params, batch, key, policy.config.dropout_rate
        )
        if batch.student is None:
            return teacher, {"loss": (teacher, rows)}, None
        # Lengths are given, so that nothing stops by itself. Without an end marker the thought's last state is kept.
        given = dataclasses.replace(
            policy.with_config(closing_ids=()),
            latent_policy=policy.latent_policy.not_halting(),
        )
        keys_B = noise.row_keys(key, batch.draw_ids)
        inputs, thought = curriculum.after_latents(given, params, batch.student, keys_B)
        # The student answers, and is asked for every choice that its length stands for.
        hidden_BAD, _, student_BMD = policy.reasoner.trace(
            params, at_B=batch.student_at, **inputs
        )
        answers, metrics = curriculum.cross_entropy(
            policy.reasoner, params, hidden_BAD, batch.student.suffix
        )
        choices_B = self.choices(policy, params, thought, batch.student.latents)
        student = answers + jnp.sum(batch.choice_weights * choices_B)
        # The first level is the embeddings', which the published distance leaves out.
        student_BMD = student_BMD[:, 1:]
        teacher_BMD = teacher_BMD[:, 1:]
        distance = distillation(student_BMD, teacher_BMD).sum()
        loss = student + self.teacher_factor * teacher
        loss += self.distil_factor * distance
        parts = {
            "loss": (loss, rows),
            "student": (student, rows),
            "teacher": (teacher, rows),
            "distil": (distance, rows),
        }
        return loss, metrics | parts, thought

    def choices(
        self, policy: Policy, params, thought, latents_B: jax.Array
    ) -> jax.Array:
        """Return the cross-entropy of going on before each latent and of stopping after the last, float32 [B]."""
        latent_policy = policy.latent_policy
        assert latent_policy.halting_log_prob is not None
        stop_BT = latent_policy.stop_logits(params, thought.actions)
        steps_T = jnp.arange(stop_BT.shape[1])
        is_fed_BT = steps_T[None] < latents_B[:, None]
        going_on_BT = jax.nn.log_sigmoid(-stop_BT)
        going_on_B = jnp.sum(going_on_BT, axis=1, where=is_fed_BT)
        last_N1D = thought.hidden_ND[:, None]
        stopping_BT = latent_policy.halting_log_prob(params, last_N1D)
        return -(going_on_B + stopping_BT[:, 0])
