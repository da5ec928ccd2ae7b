"""Imitation: CoT-SFT, then the COCONUT curriculum, in which latents replace written steps (Hao et al., 2024).

Stage 0 writes every step out. Stage s feeds s * c_thought latents in place of the first s steps. In the last stage all
steps are gone. With c_thought = 0 nothing replaces the steps, their ablation without thought.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy import noise
from slpo_jax.policy.policy import Policy
from slpo_jax.policy.prompted import Prompts
from slpo_jax.policy.rollout import think
from slpo_jax.text.batches import EncodedProblems, SuffixBatch, batch_indices, draw_numbers, pad_suffixes
from slpo_jax.text.templates import Ids
from slpo_jax.training.recipes.recipe import ImitateSettings, Phase, Recipe


@struct.dataclass
class ImitationBatch:
    """Prompts, the number of latents int [B] after each, a `SuffixBatch`, and int [B] what randomness is drawn by."""

    prompts: Prompts
    latents: Any
    suffix: Any
    index: Any


def phases(settings: ImitateSettings, max_latents: int) -> list[Phase]:
    """The curriculum as consecutive phases; those of no steps are left out.

    Args:
        max_latents: T.
    """
    c_thought, last = settings.c_thought, settings.max_latent_stage
    plans: list[tuple[str, int, int | None, int | None]] = [("cot", settings.cot_steps, 0, 0)]
    plans += [(f"stage_{s}", settings.stage_steps, s, s * c_thought) for s in range(1, last + 1)]
    random = settings.final_latents == "random" and c_thought > 0
    a_step = c_thought if settings.final_latents == "steps" else 0
    plans.append(("final", settings.final_steps, None, None if random else c_thought * last))
    out, start = [], 0
    for name, steps, dropped, latents in plans:
        if steps:
            slots = max_latents if latents is None else latents
            out.append(Phase(name, start, start + steps, dropped, latents, slots, latents_a_step=a_step))
            start += steps
    return out


def usable(problems: EncodedProblems, max_tokens: int) -> list[int]:
    """The problems whose question, steps and answer together have at most `max_tokens` tokens; 0 is no limit."""
    sizes = map(_written, problems.prompts, problems.steps, problems.answers)
    return [i for i, size in enumerate(sizes) if size <= max_tokens or not max_tokens]


def _written(prompt: Ids, steps: list[Ids], answer: Ids) -> int:
    return len(prompt) - 1 + sum(map(len, steps)) + len(answer)


def positions(problems: EncodedProblems, phase: Phase) -> list[int]:
    """The positions that each problem takes in a phase, at most."""
    written = [len(problems.prompts[i]) + len(problems.suffix(i, phase.dropped)) - 1 for i in range(len(problems))]
    return [size + phase.latent_slots for size in written]


def suffix_slots(
    problems: EncodedProblems, phase: Phase, buckets: Sequence[int] = (), multiple: int = 4
) -> tuple[int, ...]:
    """Answer slots of a phase's batches: those of `buckets` that are of use, and the first that holds every suffix."""
    longest = max(len(problems.suffix(i, phase.dropped)) for i in range(len(problems))) - 1
    return buckets_up_to(longest, buckets, multiple)


def buckets_up_to(longest: int, buckets: Sequence[int], multiple: int = 4) -> tuple[int, ...]:
    """The smaller ones of `buckets`, and the first multiple that holds the longest row."""
    most = -(-longest // multiple) * multiple
    return (*sorted(size for size in buckets if size < most), most)


def make_batch(
    problems: EncodedProblems,
    phase: Phase,
    step: int,
    seed: int,
    batch_size: int,
    prompt_slots,
    slots: tuple[int, ...],
    removed_B: Sequence[int] | np.ndarray | None = None,
    stages_B: np.ndarray | None = None,
    c_thought: int = 0,
) -> ImitationBatch:
    """The batch of one step, in the smallest buckets that hold it; a pure function of its arguments.

    Args:
        removed_B: tokens that are left out at the beginning of each row's steps; None leaves out none.
        stages_B: int [B], the stage that a row is at instead of the phase's own, -1 for that; None: all are at that.
        c_thought: latents of each step that an earlier stage has dropped.
    """
    indices = batch_indices(seed, step, len(problems), batch_size)
    prompts = Prompts(*problems.before_suffix(indices, prompt_slots))
    if phase.latents is None:
        fewest = np.array([max(1, len(problems.steps[i])) for i in indices])
        draw = np.random.default_rng([seed, step, 1]).random(batch_size)
        most = np.maximum(fewest, phase.latent_slots)
        latents = np.minimum(fewest + np.floor(draw * (most - fewest + 1)), phase.latent_slots).astype(np.int32)
    else:
        latents = np.full(batch_size, phase.latents, np.int32)
    removed_B = np.zeros(batch_size, np.int64) if removed_B is None else removed_B
    dropped: list[int | None] = [phase.dropped] * batch_size
    if stages_B is not None:
        latents = np.where(stages_B < 0, latents, stages_B * c_thought).astype(np.int32)
        dropped = [phase.dropped if stage < 0 else int(stage) for stage in stages_B]
    if phase.latents_a_step:
        of_steps_B = [phase.latents_a_step * max(1, len(problems.steps[i])) for i in indices]
        latents = np.minimum(latents, np.array(of_steps_B, np.int32))
    suffixes = [problems.suffix(i, first, n) for i, first, n in zip(indices, dropped, removed_B, strict=True)]
    longest = max(map(len, suffixes)) - 1
    suffix = pad_suffixes(suffixes, next(s for s in slots if s >= longest), problems.template.pad_id)
    index = draw_numbers(indices, len(problems))
    return ImitationBatch(prompts, latents, suffix, index)


def earlier_stages(phase: Phase, step: int, seed: int, batch_size: int, mix: float, last: int) -> np.ndarray:
    """int [B]: for a share `mix` of the rows a stage before the phase's, each as likely, and -1 for the others.

    Args:
        last: the stage before the one in which all steps are gone.
    """
    draws = np.random.default_rng([seed, step, 5]).random((2, batch_size))
    before = last + 1 if phase.dropped is None else phase.dropped
    return np.where((draws[0] < mix) & (before > 0), np.floor(draws[1] * before), -1).astype(np.int64)


def fewest_steps(plan: list[Phase]) -> int:
    """1 where a phase writes steps."""
    return int(any(phase.dropped is not None for phase in plan))


def after_latents(
    policy: Policy, params, batch: ImitationBatch, keys_B, may_lack: bool = False
) -> tuple[dict[str, Any], Any]:
    """Think, differentiably; then what `Reasoner.forward` or `trace` over the suffixes is called with, and the thought.

    Args:
        policy: as in `Recipe.loss`.
        keys_B: the rows' keys.
        may_lack: rows may have no latents, where there are slots for them.
    """
    slots_A, config = jnp.arange(batch.suffix.tokens.shape[1]), policy.config
    layout = policy.having(stopping="length", dropout_where="all", thinker_noise=False, answer_slots=len(slots_A))
    real_B = batch.latents > 0 if may_lack else None
    thought, prefix = think(layout, params, batch.prompts, keys_B, batch.latents, differentiable=True, real_N=real_B)
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


def cross_entropy(reasoner: Reasoner, params, hidden_BLD: jax.Array, rows: SuffixBatch) -> tuple[jax.Array, jax.Array]:
    """The weighted sum over all rows, and bool [B], of which rows each target of a weight is the likeliest token."""
    asked_BL = rows.weights != 0
    log_probs_BL, likeliest_BL = reasoner.log_probs(params, hidden_BLD, rows.targets, asked_BL, likeliest=True)
    return -jnp.sum(log_probs_BL * rows.weights), jnp.all((likeliest_BL == rows.targets) | ~asked_BL, axis=1)


def loss(policy: Policy, params, batch: ImitationBatch, key, may_lack: bool = False):
    """Cross-entropy of the suffix after a number of latents, with the gradient through the latents.

    Args:
        policy: as in `Recipe.loss`; the thinker's own noise is nowhere.
        may_lack: see `after_latents`.
    """
    params = policy.reasoner.in_loop(params)
    inputs, thought = after_latents(policy, params, batch, noise.row_keys(key, batch.index), may_lack)
    hidden_BAD, _ = policy.reasoner.forward(params, **inputs)
    total, right_B = cross_entropy(policy.reasoner, params, hidden_BAD, batch.suffix)
    metrics = {"loss": (total, batch.suffix.weights.sum()), "accuracy": (right_B.sum(), jnp.float32(right_B.shape[0]))}
    return total, metrics, thought


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """COCONUT's, and without latents CoT-SFT; its schedule is `config.imitate`'s own."""

    def __call__(self, settings: ImitateSettings, default: Recipe | None = None) -> Recipe:
        published = Recipe(
            name="curriculum",
            phases=lambda problems, max_latents: phases(settings, max_latents),
            usable=usable,
            fewest_steps=fewest_steps,
            positions=positions,
            slots=suffix_slots,
            batch=make_batch,
            loss=loss,
        )
        return _mixed(published, settings) if settings.mix else published


def _mixed(recipe: Recipe, settings: ImitateSettings) -> Recipe:
    """With rows of earlier stages: there are slots for all written steps, and rows without latents."""

    def longest(phase: Phase) -> Phase:
        return dataclasses.replace(phase, dropped=0)

    def batch(problems, phase, step, seed, batch_size, prompt_slots, slots) -> ImitationBatch:
        stages_B = earlier_stages(phase, step, seed, batch_size, settings.mix, settings.max_latent_stage)
        own = (phase, step, seed, batch_size, prompt_slots, slots)
        return make_batch(problems, *own, stages_B=stages_B, c_thought=settings.c_thought)

    return dataclasses.replace(
        recipe,
        positions=lambda problems, phase: recipe.positions(problems, longest(phase)),
        slots=lambda problems, phase, *buckets: recipe.slots(problems, longest(phase), *buckets),
        batch=batch,
        loss=functools.partial(loss, may_lack=True),
    )
