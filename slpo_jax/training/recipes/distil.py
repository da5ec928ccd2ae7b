"""CODI's self-distillation (Shen et al., 2025): one model is teacher and student of itself.

The teacher writes its steps out; the student thinks in latents and answers. At the token just before the answer, where
the two are about to say the same, the student's hidden states of all layers are drawn towards the teacher's.

Apart from the published program: its standard deviations are a batch's, here an example's own, so that micro-batches
and devices change nothing; left padding is masked, as its option fix_attn_mask does; one pass of the teacher gives
both its loss and its states, where that has two, which differ in their dropout.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from slpo_jax.data.batches import EncodedProblems, SuffixBatch
from slpo_jax.data.templates import Ids, Template
from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy import noise
from slpo_jax.policy.policy import Policy
from slpo_jax.settings import setting
from slpo_jax.training.recipes import curriculum, recipe
from slpo_jax.training.recipes.curriculum import ImitationBatch
from slpo_jax.training.recipes.recipe import (
    Draw,
    ImitateSettings,
    Needs,
    Phase,
    Recipe,
    RecipeSettings,
    in_fours,
)


@struct.dataclass
class DistilBatch:
    """A step's rows. Weights are scaled to add up to B, so that a sum over them, divided by B, is their mean.

    Attributes:
        draw_ids: int [B], the numbers that randomness is drawn by.
        text: the teacher's `SuffixBatch` [B, L]: question, steps, answer and eos, right-padded; weights are 0 on
            targets that belong to the question.
        valid: bool [B, L], where the text has a token.
        at: int [B], the distilled position in the text.
        student: prompts, numbers of latents and answers; None where the teacher learns alone.
        student_at: int [B], the distilled position in the answers, or None.
    """

    draw_ids: Any
    text: Any
    valid: Any
    at: Any
    student: ImitationBatch | None = None
    student_at: Any = None


def distillation(student_BMD: jax.Array, teacher_BMD: jax.Array) -> jax.Array:
    """Measure how far the student's hidden states are from the teacher's, which has no gradient from it.

    Smooth L1 (of threshold 1), its mean over D divided by the standard deviation (with Bessel's correction) of the
    teacher's state over D, and the mean of that over M levels.

    Returns:
        float32 [B].
    """
    teacher_BMD = jax.lax.stop_gradient(teacher_BMD)
    teacher_BMD = teacher_BMD.astype(jnp.float32)
    student_BMD = student_BMD.astype(jnp.float32)
    distance_BMD = optax.losses.huber_loss(student_BMD, teacher_BMD, delta=1.0)
    distance_BM = distance_BMD.mean(axis=-1)
    spread_BM = jnp.std(teacher_BMD, axis=-1, ddof=1)
    relative_BM = distance_BM / spread_BM
    return relative_BM.mean(axis=-1)


@dataclasses.dataclass(frozen=True)
class Distillation(RecipeSettings):
    """The section `config.imitate.distil`.

    Attributes:
        teacher_factor: factor of the teacher's loss, beside the student's 1.
        distil_factor: factor of the distillation, beside the student's 1.
        last_step: whether the teacher writes its last step too, which has the answer in it.
    """

    teacher_factor: float = setting(1.0, least=0)
    distil_factor: float = setting(20.0, least=0)
    last_step: bool = False

    has_teacher = True
    teaches_stop = True
    metrics: ClassVar = {
        "student": "CODI's loss of the thinking student, or SIM-CoT's.",
        "teacher": "CODI's loss of the teacher, which writes its steps.",
        "distil": "CODI's distance of the student's hidden states from the teacher's.",
    }

    def __call__(
        self, settings: ImitateSettings, default: Recipe | None = None
    ) -> Recipe:
        """Return the recipe: the teacher alone for `cot_steps`, if any, then both for `final_steps`, without stages."""
        unstaged = dataclasses.replace(settings, stage_steps=0)

        def phases(problems: EncodedProblems, max_latents: int) -> list[Phase]:
            return curriculum.phases(unstaged, max_latents, last="codi")

        return Recipe(
            phases=phases,
            needs=self.needs,
            rows=self.rows,
            loss=functools.partial(self.loss, gate_weight=settings.gate_weight),
            usable=usable,
            fewest_steps=lambda plan: 1 if self.last_step else 2,
        )

    def needs(self, problems: EncodedProblems, phase: Phase) -> list[Needs]:
        """Count positions of the teacher or the student, whoever takes more; slots of the text, and of the answer."""
        teacher = list[int]()
        for index in range(len(problems)):
            text, _ = self._text(problems, index)
            teacher.append(len(text) - 1)
        if phase.dropped == 0:  # the teacher alone
            return [(size, size) for size in teacher]
        sizes = list[Needs]()
        student = curriculum.needs(problems, phase)
        for size, (positions, answer) in zip(teacher, student, strict=True):
            most_positions = max(size, positions)
            sizes.append((most_positions, size, in_fours(answer)))
        return sizes

    def rows(self, draw: Draw) -> DistilBatch:
        """Make the rows of one step."""
        problems = draw.problems
        indices = draw.indices
        texts: list[Ids] = []
        questions: list[int] = []
        for index in indices:
            ids, question = self._text(problems, index)
            texts.append(ids)
            questions.append(question)
        text = draw.suffixes(texts)
        valid = text.weights > 0
        # The teacher learns what follows the question.
        _, slots = text.tokens.shape
        targets_L = np.arange(1, slots + 1)
        questions_B = np.array(questions)
        is_question_BL = targets_L < questions_B[:, None]
        weights_BL = np.where(is_question_BL, 0.0, text.weights)
        weights_BL = weights_BL.astype(np.float32)
        text = _scale(text._replace(weights=weights_BL))
        # The distilled position lies in the answer, with which a text ends before its eos.
        offsets = list[int]()
        places = list[int]()
        for row, index in zip(texts, indices, strict=True):
            ids = problems.answers[index]
            answer = problems.problems[index].answer
            offset = self.position(problems.template, ids, answer)
            begin = len(row) - 1 - len(ids)
            offsets.append(offset)
            places.append(begin + offset)
        batch = DistilBatch(
            draw_ids=draw.draw_ids,
            text=text,
            valid=valid,
            at=np.array(places, np.int32),
        )
        if draw.phase.dropped == 0:
            return batch
        # The student has its question and its answer, which have one bucket.
        _, answer_slots = draw.slots
        answer_draw = dataclasses.replace(draw, slots=((answer_slots,),))
        student = curriculum.imitation_batch(answer_draw)
        suffix = _scale(student.suffix)
        # A stop weighs as much as a token of an answer.
        stops_B = student.stops * suffix.weights.max()
        student = dataclasses.replace(student, suffix=suffix, stops=stops_B)
        after_end_marker = np.array(offsets, np.int32) + 1
        return dataclasses.replace(batch, student=student, student_at=after_end_marker)

    def position(self, template: Template, ids: Ids, answer: str) -> int:
        """Return the index of the token of an answer's text at which hidden states are compared.

        Args:
            ids: of the text.
            answer: that the text ends with.
        """
        return template.distilled_position(ids, answer)

    def loss(
        self, policy: Policy, params, batch: DistilBatch, key, gate_weight: float = 0.0
    ):
        """Sum over examples of student + teacher_factor * teacher + distil_factor * distillation.

        The gradient of the student and the distillation goes back through the latents. The student's part has the
        gate's, where that has a weight.

        Args:
            policy: as in `Recipe.loss`; dropout, if any, is on for the teacher too.
            gate_weight: see `curriculum.stop_term`.
        """
        rows = jnp.float32(batch.draw_ids.shape[0])
        params = policy.reasoner.stack(params)
        # The teacher reads its written steps.
        teacher, teacher_BMD = teach(
            policy.reasoner, params, batch, key, policy.config.dropout_rate
        )
        if batch.student is None:
            return teacher, {"loss": (teacher, rows)}, None
        # The student thinks, and answers after its latents.
        keys_B = noise.row_keys(key, batch.draw_ids)
        inputs, thought = curriculum.after_latents(
            policy, params, batch.student, keys_B
        )
        hidden_BAD, _, student_BMD = policy.reasoner.trace(
            params, at_B=batch.student_at, **inputs
        )
        of_stops, stops_right_B, stop_metrics = curriculum.stop_term(
            policy, params, batch.student, thought, gate_weight
        )
        of_words, metrics = curriculum.cross_entropy(
            policy.reasoner, params, hidden_BAD, batch.student.suffix, stops_right_B
        )
        student = of_words + of_stops
        # Its states at the distilled position are drawn towards the teacher's.
        distance = distillation(student_BMD, teacher_BMD).sum()
        loss = student + self.teacher_factor * teacher
        loss += self.distil_factor * distance
        parts = {
            "loss": (loss, rows),
            "student": (student, rows),
            "teacher": (teacher, rows),
            "distil": (distance, rows),
        }
        return loss, metrics | stop_metrics | parts, thought

    def _text(self, problems: EncodedProblems, index: int) -> tuple[Ids, int]:
        """Write a problem as the teacher does, eos included; return it and the length of the question in it."""
        question = problems.prompts[index][:-1]
        steps = problems.steps[index]
        if not self.last_step:
            steps = steps[:-1]
        text = list(question)
        for step in steps:
            text += step
        text += problems.answers[index]
        text.append(problems.template.eos_id)
        return text, len(question)


def usable(problems: EncodedProblems, max_tokens: int) -> list[int]:
    """Choose problems as `recipe.usable`, without negative answers: published CODI is not trained on them."""
    indices: list[int] = []
    for index in recipe.usable(problems, max_tokens):
        answer = problems.problems[index].answer
        if not answer.startswith("-"):
            indices.append(index)
    return indices


def _scale(rows: SuffixBatch) -> SuffixBatch:
    """Scale weights so that they add up to the number of rows."""
    total = rows.weights.sum()
    factor = np.float32(len(rows.weights) / total)
    return rows._replace(weights=rows.weights * factor)


def teach(reasoner: Reasoner, params, batch: DistilBatch, key, dropout_rate: float):
    """Return the written text's cross-entropy, summed with its weights, and the levels [B, M, D] at the position."""
    rows, slots = batch.text.tokens.shape
    slots_L = jnp.arange(slots)
    # Other noise than the student's: its positions have the same numbers.
    ones_B = jnp.ones_like(batch.draw_ids)
    keys_B = noise.row_keys(key, batch.draw_ids, ones_B)
    hidden_BLD, _, levels_BMD = reasoner.trace(
        params,
        reasoner.embed(params, batch.text.tokens),
        jnp.broadcast_to(slots_L, (rows, slots)),
        batch.valid,
        at_B=batch.at,
        dropout=noise.answer_dropout(keys_B, slots_L, dropout_rate, "all"),
    )
    weights_BL = batch.text.weights
    log_probs_BL, _ = reasoner.log_probs(
        params, hidden_BLD, batch.text.targets, weights_BL != 0
    )
    return -jnp.sum(log_probs_BL * weights_BL), levels_BMD


@dataclasses.dataclass(frozen=True)
class Dart(Distillation):
    """The section `config.imitate.silent`; attributes as of `Distillation`."""

    distil_factor: float = setting(1.0, least=0)
    last_step: bool = True
