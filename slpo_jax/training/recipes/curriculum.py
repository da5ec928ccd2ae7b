"""Curricula in which written steps go one by one: COCONUT's, for latents, and iCoT, token by token, for nothing.

COCONUT (Hao et al., 2024), after CoT-SFT: stage 0 writes every step out. Stage s feeds s * c_thought latents in place
of the first s steps. In the last stage all steps are gone. With c_thought = 0 nothing replaces the steps, their
ablation without thought.

iCoT (Deng et al., 2024): after every `rise` steps one token more is dropped at the beginning of the steps, s of them by
then, and of each problem o further ones, P(o) ~ exp(-lambda o), so that no rise comes all at once. The loss is that of
all tokens after the question, and the optimizer is reset at each rise. In the end the answer alone is left.

Apart from iCoT's published program: texts are the reasoner's own, in which no eos stands between steps and answer, and
the line break that ends a step is one of its tokens; and there are no more resets from the s on that no problem has
tokens for, where that one looks at the batch before.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from slpo_jax.data.batches import EncodedProblems, SuffixBatch
from slpo_jax.data.templates import Ids
from slpo_jax.errors import UserError
from slpo_jax.models.gate import first_stop_log_probs
from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy import noise
from slpo_jax.policy.noise import Stream
from slpo_jax.policy.policy import Policy, Prompts
from slpo_jax.policy.rollout import think
from slpo_jax.settings import setting
from slpo_jax.training.recipes.recipe import (
    Draw,
    ImitateSettings,
    Needs,
    Phase,
    Recipe,
    RecipeSettings,
    consecutive,
    usable,
)
from slpo_jax.training.state import Sums


@struct.dataclass
class ImitationBatch:
    """A step's rows.

    Attributes:
        prompts: of B problems.
        latents: int [B], the number of latents after each prompt.
        suffix: `SuffixBatch`, the text after the latents.
        draw_ids: int [B], the numbers that randomness is drawn by.
        stops: float32 [B], the weight of a stop after the latents: 0 where steps are still written after them.
    """

    prompts: Prompts
    latents: Any
    suffix: Any
    draw_ids: Any
    stops: Any


def phases(
    settings: ImitateSettings, max_latents: int, last: str = "final"
) -> list[Phase]:
    """Return the curriculum as consecutive phases.

    Args:
        max_latents: T.
        last: name of the last of them.
    """
    c_thought = settings.c_thought
    stages = settings.max_latent_stage
    a_step = c_thought if settings.final_latents == "steps" else 0

    def phase(name: str, steps: int, dropped: int | None, latents: int | None) -> Phase:
        slots = max_latents if latents is None else latents
        return Phase(
            name=name,
            start=0,
            end=steps,
            dropped=dropped,
            latents=latents,
            latent_slots=slots,
            latents_a_step=a_step,
        )

    plan = [phase("cot", settings.cot_steps, 0, 0)]
    for stage in range(1, stages + 1):
        latents = stage * c_thought
        plan.append(phase(f"stage_{stage}", settings.stage_steps, stage, latents))
    # All steps have become latents, whose number may be drawn for each problem.
    is_random = settings.final_latents == "random" and c_thought > 0
    most = None if is_random else c_thought * stages
    plan.append(phase(last, settings.final_steps, None, most))
    return consecutive(plan)


def needs(problems: EncodedProblems, phase: Phase) -> list[Needs]:
    """Count each problem's `Needs`: positions, and slots of its suffix."""
    sizes = list[Needs]()
    for index in range(len(problems)):
        before = len(problems.prompts[index]) + phase.latent_slots
        size = problems.suffix_size(index, phase.dropped) - 1
        sizes.append((before + size, size))
    return sizes


def imitation_batch(
    draw: Draw,
    removed: int | np.ndarray = 0,
    stages: int | np.ndarray = -1,
    c_thought: int = 0,
) -> ImitationBatch:
    """Make the rows of one step.

    Args:
        removed: tokens that are left out at the beginning of the steps, of all rows or int [B].
        stages: the stage that a row is at instead of the phase's own, -1 for that; of all rows or int [B].
        c_thought: latents of each step that an earlier stage has dropped.
    """
    problems = draw.problems
    phase = draw.phase
    indices = draw.indices
    rows = len(indices)
    removed_B = np.broadcast_to(removed, rows)
    stages_B = np.broadcast_to(stages, rows)
    counts = [len(problems.steps[index]) for index in indices]
    steps_B = np.maximum(1, counts)
    # The number of latents is the phase's, or drawn between a problem's steps and the slots.
    latents: Any = phase.latents
    if latents is None:
        most = np.maximum(steps_B, phase.latent_slots)
        choices_B = most - steps_B + 1
        draws_B = draw.rng(noise.Stream.LATENT_COUNTS).random(rows)
        numbers = steps_B + np.floor(draws_B * choices_B)
        latents = np.minimum(numbers, phase.latent_slots)
    # A row at an earlier stage has that one's, and a short problem may have fewer.
    latents = np.where(stages_B < 0, latents, stages_B * c_thought)
    if phase.latents_a_step:
        latents = np.minimum(latents, phase.latents_a_step * steps_B)
    # The steps that are left are written after the latents, and where none is, the thought is whole.
    suffixes = list[Ids]()
    stops_B = np.zeros(rows, np.float32)
    for row, index in enumerate(indices):
        dropped = phase.dropped
        if stages_B[row] >= 0:
            dropped = int(stages_B[row])
        suffixes.append(problems.suffix(index, dropped, removed_B[row]))
        if dropped is None or steps_B[row] <= dropped:
            stops_B[row] = 1.0
    # Without a closing text the prompt's last token, the end marker, begins the suffix.
    last = None if problems.template.closing_ids else -1
    prompts = [problems.prompts[index][:last] for index in indices]
    return ImitationBatch(
        prompts=draw.prompts(prompts),
        latents=latents.astype(np.int32),
        suffix=draw.suffixes(suffixes),
        draw_ids=draw.draw_ids,
        stops=stops_B,
    )


def earlier_stages(draw: Draw, mix: float, last: int) -> np.ndarray:
    """Draw, int [B], for a share `mix` of the rows a stage before the phase's, each as likely, and -1 for the others.

    Args:
        last: the stage before the one in which all steps are gone.
    """
    rng = draw.rng(noise.Stream.EARLIER_STAGES)
    kind_B, stage_B = rng.random((2, len(draw.indices)))
    before = last + 1 if draw.phase.dropped is None else draw.phase.dropped
    is_earlier_B = (kind_B < mix) & (before > 0)
    stages_B = np.where(is_earlier_B, np.floor(stage_B * before), -1)
    return stages_B.astype(np.int64)


def after_latents(
    policy: Policy, params, batch: ImitationBatch, keys_B, may_lack: bool = False
) -> tuple[dict[str, Any], Any]:
    """Think, differentiably; the arguments of `Reasoner.forward` or `trace` over the suffixes, and the thought.

    Args:
        policy: as in `Recipe.loss`.
        keys_B: the rows' keys.
        may_lack: rows may have no latents, where there are slots for them.
    """
    slots_A = jnp.arange(batch.suffix.tokens.shape[1])
    config = policy.config
    layout = policy.with_config(
        stopping="length",
        dropout_where="all",
        latent_policy_noise=False,
        answer_slots=len(slots_A),
    )
    # Think as many latents as the batch says.
    real_B = batch.latents > 0 if may_lack else None
    thought, prefix = think(
        layout,
        params,
        batch.prompts,
        keys_B,
        batch.latents,
        differentiable=True,
        real_N=real_B,
    )
    # The suffix goes on at the position after a row's last latent.
    before_B = batch.prompts.lengths + thought.lengths_N
    inputs = dict(
        inputs_BLD=policy.reasoner.embed(params, batch.suffix.tokens),
        positions_BL=before_B[:, None] + slots_A[None],
        valid_BL=batch.suffix.weights > 0,
        prefix=prefix,
        cache=thought.cache,
        start=config.max_latents,
        dropout=noise.answer_dropout(keys_B, slots_A, config.dropout_rate, "all"),
    )
    return inputs, thought


def stop_term(
    policy: Policy, params, batch: ImitationBatch, thought, weight: float
) -> tuple[Any, Any, Sums]:
    """Measure how well the gate stops where the thoughts do.

    The likelihood of a stop after exactly tau latents is rho_tau * prod_{k < tau} (1 - rho_k), of the gate on the
    latents themselves (paper section 4.1, as printed: the last latent that there may be is not an exception).

    Args:
        policy: as in `Recipe.loss`.
        thought: of `after_latents`.
        weight: `config.imitate.gate_weight`.
    Returns:
        minus the log-likelihoods, summed with `batch.stops` and the weight; bool [B], False where a stop that counts is
        not the gate's first at a threshold of 0.5; and the mean log-likelihood as a metric. Nothing of it, 0 and True,
        where the weight is 0 or there are no latents.
    """
    if not weight or not policy.config.max_latents:
        return 0.0, True, {}
    logits_BT = policy.latent_policy.stop_logits(params, thought.actions)
    first_stop = functools.partial(first_stop_log_probs, forced=False)
    log_probs_BT = jax.vmap(first_stop)(logits_BT)
    place_B1 = jnp.maximum(batch.latents - 1, 0)[:, None]
    # A row without latents has no stop, and what stands at its place is dropped before it could be infinite.
    counts_B = batch.stops > 0
    there_B = jnp.take_along_axis(log_probs_BT, place_B1, axis=1)[:, 0]
    log_probs_B = jnp.where(counts_B, there_B, 0.0)
    # At a threshold of 0.5 the gate fires where its logit is not negative.
    fires_BT = logits_BT >= 0
    fires_there_B = jnp.take_along_axis(fires_BT, place_B1, axis=1)[:, 0]
    first_B = jnp.argmax(fires_BT, axis=1)
    is_first_B = fires_there_B & (first_B == place_B1[:, 0])
    total = jnp.sum(log_probs_B * batch.stops)
    right_B = is_first_B | (batch.stops == 0)
    of_stops = -weight * total
    metrics = {"stop_log_likelihood": (total, batch.stops.sum())}
    return of_stops, right_B, metrics


def cross_entropy(
    reasoner: Reasoner,
    params,
    hidden_BLD: jax.Array,
    rows: SuffixBatch,
    stops_right_B: Any = True,
) -> tuple[jax.Array, Sums]:
    """Return the cross-entropy summed with its weights, and loss, by the weights, and accuracy, by rows all right.

    Args:
        stops_right_B: bool [B], which rows stop where they should.
    """
    mask_BL = rows.weights != 0
    log_probs_BL, likeliest_BL = reasoner.log_probs(
        params, hidden_BLD, rows.targets, mask_BL, likeliest=True
    )
    total = -jnp.sum(log_probs_BL * rows.weights)
    right_BL = (likeliest_BL == rows.targets) | ~mask_BL
    right_B = jnp.all(right_BL, axis=1) & stops_right_B
    metrics = {
        "loss": (total, rows.weights.sum()),
        "accuracy": (right_B.sum(), jnp.float32(right_B.shape[0])),
    }
    return total, metrics


def loss(
    policy: Policy,
    params,
    batch: ImitationBatch,
    key,
    may_lack: bool = False,
    gate_weight: float = 0.0,
):
    """Return the cross-entropy of the suffix after a number of latents, with the gradient through the latents.

    With a weight for the gate, minus the log-likelihood of the stop after these latents is added.

    Args:
        policy: as in `Recipe.loss`; the latent policy's own noise is nowhere.
        may_lack: see `after_latents`.
        gate_weight: see `stop_term`.
    """
    params = policy.reasoner.stack(params)
    # Think, and read what follows the latents.
    inputs, thought = after_latents(
        policy, params, batch, noise.row_keys(key, batch.draw_ids), may_lack
    )
    hidden_BAD, _ = policy.reasoner.forward(params, **inputs)
    # Judge the gate's stop, and the words of the suffix.
    of_stops, stops_right_B, stop_metrics = stop_term(
        policy, params, batch, thought, gate_weight
    )
    of_words, metrics = cross_entropy(
        policy.reasoner, params, hidden_BAD, batch.suffix, stops_right_B
    )
    total = of_words + of_stops
    _, tokens = metrics["loss"]
    metrics |= stop_metrics
    metrics["loss"] = (total, tokens)
    return total, metrics, thought


@dataclasses.dataclass(frozen=True)
class Curriculum(RecipeSettings):
    """COCONUT's, and without latents CoT-SFT; its schedule is `config.imitate`'s own."""

    has_stages = True
    teaches_stop = True

    def __call__(
        self, settings: ImitateSettings, default: Recipe | None = None
    ) -> Recipe:
        gate_weight = settings.gate_weight

        def fewest_steps(plan: list[Phase]) -> int:
            return int(any(phase.dropped is not None for phase in plan))

        published = Recipe(
            phases=lambda problems, max_latents: phases(settings, max_latents),
            needs=needs,
            rows=imitation_batch,
            loss=functools.partial(loss, gate_weight=gate_weight),
            fewest_steps=fewest_steps,
        )
        if not settings.mix:
            return published

        def mixed_needs(problems: EncodedProblems, phase: Phase) -> list[Needs]:
            # There are slots for all written steps.
            return needs(problems, dataclasses.replace(phase, dropped=0))

        def rows(draw: Draw) -> ImitationBatch:
            stages_B = earlier_stages(draw, settings.mix, settings.max_latent_stage)
            return imitation_batch(draw, stages=stages_B, c_thought=settings.c_thought)

        # Rows at the earliest stage have no latents.
        mixed_loss = functools.partial(loss, may_lack=True, gate_weight=gate_weight)
        return dataclasses.replace(
            published, needs=mixed_needs, rows=rows, loss=mixed_loss
        )


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

    def __call__(
        self, settings: ImitateSettings, default: Recipe | None = None
    ) -> Recipe:
        """Return the recipe, whose texts and loss are the curriculum's."""
        phases = functools.partial(self.phases, settings)

        def rows(draw: Draw) -> ImitationBatch:
            return imitation_batch(draw, self.draw_removed(draw))

        return Recipe(
            phases=phases,
            needs=needs,
            rows=rows,
            loss=loss,
        )

    def pace(
        self, settings: ImitateSettings, problems: EncodedProblems
    ) -> tuple[int, int]:
        """Return (optimizer steps at each s, the s from which on no token of the steps is left).

        Args:
            problems: some may be too long, and are not counted.
        """
        indices = usable(problems, settings.max_tokens)
        epoch = -(-len(indices) // settings.batch_size)
        rise = max(1, round(epoch / self.tokens_per_epoch))
        longest = 0
        for index in indices:
            tokens = sum(map(len, problems.steps[index]))
            longest = max(longest, tokens)
        gone = min(self.all_from, longest)
        return rise, gone

    def phases(
        self, settings: ImitateSettings, problems: EncodedProblems, max_latents: int
    ) -> list[Phase]:
        """Plan CoT-SFT, if any; s from 0 to the last that leaves any; the answer alone, `final_steps` with these.

        Raises:
            UserError: they are too few for the answer alone, or there are latents.
        """
        if max_latents:
            raise UserError(
                f"config.max_latents: {max_latents}, but iCoT trains without latents; set it to 0"
            )
        rise, gone = self.pace(settings, problems)
        steps = gone * rise
        if steps >= settings.final_steps:
            raise UserError(
                f"config.imitate.final_steps: {settings.final_steps}, but iCoT drops the last token after "
                f"{steps} steps ({gone} tokens, {rise} steps each); give more, or raise "
                "config.imitate.icot.tokens_per_epoch"
            )
        cot = Phase(
            name="cot",
            start=0,
            end=settings.cot_steps,
            dropped=0,
            latents=0,
            latent_slots=0,
        )
        dropping = dataclasses.replace(cot, name="icot", end=steps, rise=rise)
        answers = dataclasses.replace(
            cot,
            name="final",
            end=settings.final_steps - steps,
            dropped=None,
        )
        return consecutive([cot, dropping, answers])

    def draw_removed(self, draw: Draw) -> np.ndarray | int:
        """Draw s + o of a batch's rows, int [B]; 0 where nothing is left out."""
        if not draw.phase.rise:
            return 0
        # A geometric distribution of this rate, from 0, is exp(-lambda o), normalised.
        rate = -np.expm1(-self.offset_decay)
        rng = draw.rng(Stream.REMOVED_TOKENS)
        offsets_B = rng.geometric(rate, len(draw.indices)) - 1
        risen = (draw.step - draw.phase.start) // draw.phase.rise
        return risen + offsets_B
