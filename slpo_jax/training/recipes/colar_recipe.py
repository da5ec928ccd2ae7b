"""CoLaR's training (Tan et al., 2025): one latent stands for r tokens of the written solution, r drawn again each step.

First CoT-SFT on the same text, asked at speed 1. Then the solution's tokens are cut into chunks of r, whose embeddings,
summed and divided by the root of their number, are the inputs in their place. At each the reasoner says a token of the
next chunk, drawn at random, and its head predicts the next input. So all positions are trained at once.

Apart from the published program: a line break ends the last step too, as in all texts of ours.
"""

import dataclasses
import functools
from collections.abc import Callable
from itertools import chain
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from slpo_jax.data.batches import EncodedProblems, pad_suffixes
from slpo_jax.data.chat import MOST_SPEED, at_speed, speed_of
from slpo_jax.data.templates import Ids
from slpo_jax.errors import UserError
from slpo_jax.models.parts import Params
from slpo_jax.models.reasoner import StepProjector
from slpo_jax.policy import noise
from slpo_jax.policy.latent_policies.latent_policy import standard_normal
from slpo_jax.policy.policy import Policy, Prompts, encode_prompts
from slpo_jax.training.recipes.recipe import (
    Draw,
    ImitateSettings,
    Needs,
    Phase,
    Recipe,
    RecipeSettings,
    consecutive,
)

COT = "cot"


@struct.dataclass
class ChunkBatch:
    """Prompts without the mark, and what follows: "###", a slot a chunk, "###", the answer's tokens.

    Weights are scaled to add up to B, so that a sum over them, divided by B, is their mean.

    Attributes:
        ids: int [B, S, R], the tokens of each slot.
        sizes: int [B, S], how many they are; 0 is padding.
        targets: int [B, 1 + S], the token to say after the prompt and at each slot; of a chunk one of its tokens.
        weights: float32 [B, 1 + S].
        chunks: bool [B, S], the slots that are latents at inference.
        predicted: float32 [B, S], weights of the head's prediction of the next slot's input; None while only words are
            learned.
        draw_ids: int [B], the numbers that randomness is drawn by.
    """

    prompts: Prompts
    ids: Any
    sizes: Any
    targets: Any
    weights: Any
    chunks: Any
    predicted: Any
    draw_ids: Any


VectorsFn = Callable[[Policy, Any, ChunkBatch], jax.Array]
"""(policy, params, batch) -> the slots' inputs [B, S, D]."""


@dataclasses.dataclass(frozen=True)
class Compression(RecipeSettings):
    """Nothing to set: r is one draw a batch from 1 to `MOST_SPEED`."""

    uses_c_thought = False
    metrics: ClassVar = {
        "answered": "Share of answers that are right after the true thought, which isn't the head's.",
        "said": "CoLaR's cross-entropy, of a token of each chunk and of the answer.",
        "latent": "CoLaR's loss of its head, which predicts the next chunk's embedding.",
    }

    def __call__(
        self, settings: ImitateSettings, default: Recipe | None = None
    ) -> Recipe:
        """Return the recipe: CoT-SFT for `cot_steps`, if any, then chunks for `final_steps`, without stages."""
        return chunk_recipe(settings, "colar", chunks_of, MOST_SPEED, pool)


def chunks_of(steps: list[Ids], speed: int) -> list[Ids]:
    """Cut the tokens of all steps into chunks of so many."""
    tokens = list(chain.from_iterable(steps))
    starts = range(0, len(tokens), speed)
    return [tokens[at : at + speed] for at in starts]


def pool(policy: Policy, params, batch: ChunkBatch) -> jax.Array:
    """Return the inputs [B, S, D]: sums of embeddings by the root of their number, to which a chunk's adds 1e-5."""
    sizes_BS1 = batch.sizes[..., None]
    *_, most = batch.ids.shape
    places_R = jnp.arange(most)
    used_BSR = places_R[None, None] < sizes_BS1
    embedded_BSRD = policy.reasoner.embed(params, batch.ids)
    summed_BSD = jnp.sum(embedded_BSRD, axis=2, where=used_BSR[..., None])
    is_chunk_BS1 = batch.chunks[..., None]
    root_BS1 = jnp.sqrt(sizes_BS1) + 1e-5
    divisor_BS1 = jnp.where(is_chunk_BS1, root_BS1, 1)
    inputs_BSD = summed_BSD / divisor_BS1
    return inputs_BSD.astype(embedded_BSRD.dtype)


def chunk_loss(vectors: VectorsFn, policy: Policy, params, batch: ChunkBatch, key):
    """Return the tokens' cross-entropy and the squared error of the next slot's input, a constant, as the head draws.

    Args:
        policy, params, key: as in `Recipe.loss`.
    """
    reasoner = policy.reasoner
    rate = policy.config.dropout_rate
    params = reasoner.stack(params)
    keys_B = noise.row_keys(key, batch.draw_ids)
    slots_S = jnp.arange(batch.sizes.shape[1])
    # Read the prompts, then the slots that follow them.
    noisy = noise.prompt_dropout(keys_B, batch.prompts.valid, rate, "all")
    first_BD, prefix = encode_prompts(reasoner, params, batch.prompts, noisy)
    inputs_BSD = vectors(policy, params, batch)
    positions_BS = batch.prompts.lengths[:, None] + slots_S[None]
    hidden_BSD, _ = reasoner.forward(
        params,
        inputs_BSD,
        positions_BS,
        batch.sizes > 0,
        prefix=prefix,
        dropout=noise.answer_dropout(keys_B, slots_S, rate, "all"),
    )
    # The state before a slot says its token: the prompt's last one says the first.
    first_B1D = first_BD[:, None]
    before_BLD = jnp.concatenate([first_B1D, hidden_BSD], axis=1)
    mask_BL = batch.weights != 0
    log_probs_BL, likeliest_BL = reasoner.log_probs(
        params, before_BLD, batch.targets, mask_BL, likeliest=True
    )
    words = -jnp.sum(log_probs_BL * batch.weights)
    wrong_BL = (likeliest_BL != batch.targets) & mask_BL
    rows = jnp.float32(batch.draw_ids.shape[0])
    if batch.predicted is None:
        right_B = ~wrong_BL.any(axis=1)
        sums = {"accuracy": (right_B.sum(), rows), "loss": (words, rows)}
        return words, sums, None
    # Of a chunk any of its tokens is right, so what follows the thought alone is judged.
    backwards_BS = batch.chunks[:, ::-1]
    chunks_left_BS = jnp.cumsum(backwards_BS, axis=1)[:, ::-1]
    is_behind_BS = chunks_left_BS == 0
    wrong_BL &= jnp.pad(is_behind_BS, ((0, 0), (1, 0)))
    right_B = ~wrong_BL.any(axis=1)
    # The head's draw at each slot is drawn towards the next slot's input, in the latents' unit.
    assert reasoner.law is not None
    law = reasoner.law(params, hidden_BSD)
    next_BSD = jnp.roll(inputs_BSD, -1, axis=1)
    next_BSD = jax.lax.stop_gradient(next_BSD)
    aims_BSD = next_BSD.astype(jnp.float32) / reasoner.unit
    keys_BS = noise.draw_keys(keys_B, slots_S)
    noise_BSD = standard_normal(keys_BS, law.mean)
    sample_BSD = law.mean + law.std * noise_BSD
    squares_BSD = jnp.square(sample_BSD - aims_BSD)
    error_BS = squares_BSD.mean(axis=-1)
    latent = jnp.sum(error_BS * batch.predicted)
    total = words + latent
    metrics = {
        "answered": (right_B.sum(), rows),
        "said": (words, rows),
        "latent": (latent, rows),
        "loss": (total, rows),
    }
    return total, metrics, None


def chunk_recipe(
    settings: ImitateSettings,
    name: str,
    cut: Callable[[list[Ids], int], list[Ids]],
    most: int,
    vectors: VectorsFn,
) -> Recipe:
    """Make a recipe of CoT-SFT and a phase in which slots stand for several tokens.

    Args:
        name: of the recipe, and of that phase.
        cut: (a problem's steps, speed) -> the tokens of each slot of its solution.
        most: the highest speed; that of a batch is drawn from 1 to this.
        vectors: the slots' inputs.
    """

    def phases(problems: EncodedProblems, max_latents: int) -> list[Phase]:
        if speed_of(problems.template) > most:  # which only CoLaR's has
            raise UserError(
                f"config.prompt.speed: the recipe {name} asks at speed {most} always; set it to {most}"
            )
        cot = Phase(
            name=COT,
            start=0,
            end=settings.cot_steps,
            dropped=0,
            latents=0,
            latent_slots=0,
        )
        compressed = Phase(
            name=name,
            start=0,
            end=settings.final_steps,
            dropped=None,
            latents=None,
            latent_slots=max_latents,
        )
        return consecutive([cot, compressed])

    def needs(problems: EncodedProblems, phase: Phase) -> list[Needs]:
        """Return positions; slots, at speed 1; tokens of one, at the highest."""
        split = cut
        highest = most
        if phase.name == COT:
            split = chunks_of
            highest = 1
        sizes = list[Needs]()
        texts = zip(problems.prompts, problems.steps, problems.answers, strict=True)
        for prompt, steps, answer in texts:
            thought = split(steps, 1)
            size = len(thought) + 1 + len(answer) + 1
            positions = len(prompt) - 1 + size
            chunks = split(steps, highest)
            longest = max(map(len, chunks), default=1)
            sizes.append((positions, size, longest))
        return sizes

    def rows(draw: Draw) -> ChunkBatch:
        problems = draw.problems
        indices = draw.indices
        template = problems.template
        # One speed for the whole batch: words for the tokens themselves.
        in_words = draw.phase.name == COT
        split = cut
        if in_words:
            split = chunks_of
            speed = 1
        else:
            rng = draw.rng(noise.Stream.SPEED)
            speed = int(rng.integers(1, most, endpoint=True))
        pairs: list[tuple[list[Ids], Ids]] = []
        questions: list[str] = []
        longest = 0
        for index in indices:
            thought = split(problems.steps[index], speed)
            answer = problems.answers[index]
            pairs.append((thought, answer))
            questions.append(problems.problems[index].question)
            longest = max(longest, len(thought) + 2 + len(answer))
        prompt_ids = at_speed(template, speed).prompts(questions)
        # Fill a row's slots: the mark, the thought's chunks, the mark, the answer.
        count = len(indices)
        slots = draw.fit(longest)
        most_tokens = draw.slots[1]
        ids = np.full((count, slots, most_tokens), template.pad_id, np.int32)
        sizes = np.zeros((count, slots), np.int32)
        chunks = np.zeros((count, slots), bool)
        predicted = np.zeros((count, slots), np.float32)
        mark: Any = template.start_id
        labels = draw.rng(noise.Stream.LABELS)
        texts = []
        for row, (thought, answer) in enumerate(pairs):
            answer_slots = [[token] for token in answer]
            row_slots = [[mark], *thought, [mark], *answer_slots]
            for slot, tokens in enumerate(row_slots):
                size = len(tokens)
                ids[row, slot, :size] = tokens
                sizes[row, slot] = size
            # Of each chunk one token, drawn at random, is the target.
            label: Ids = []
            for tokens in thought:
                place = labels.integers(len(tokens))
                label.append(tokens[place])
            text = [template.pad_id, mark, *label, mark, *answer, template.eos_id]
            texts.append(text)
            end = 1 + len(thought)
            chunks[row, 1:end] = True
            predicted[row, :end] = 1.0
        # Weights add up to the number of rows, see `ChunkBatch`.
        _, targets, weights = pad_suffixes(texts, 1 + slots, template.pad_id)
        weights = weights * (count / weights.sum())
        predicted = predicted * (count / predicted.sum())
        prompts = [row[:-1] for row in prompt_ids]
        return ChunkBatch(
            prompts=draw.prompts(prompts),
            ids=ids,
            sizes=sizes,
            targets=targets,
            weights=weights,
            chunks=chunks,
            predicted=None if in_words else predicted,
            draw_ids=draw.draw_ids,
        )

    return Recipe(
        phases=phases,
        needs=needs,
        rows=rows,
        loss=functools.partial(chunk_loss, vectors),
    )


PROJECTOR = "step_projector"


@dataclasses.dataclass(frozen=True)
class StepPerLatent(RecipeSettings):
    """Nothing to set. The published program is under GPL-3.0; this is written from facts alone."""

    uses_c_thought = False
    metrics = Compression.metrics

    def __call__(
        self, settings: ImitateSettings, default: Recipe | None = None
    ) -> Recipe:
        """Return the recipe: CoT-SFT for `cot_steps`, if any, then steps as latents for `final_steps`."""
        recipe = chunk_recipe(
            settings, "regular", lambda steps, speed: steps, 1, _project
        )
        return dataclasses.replace(recipe, init=_init)


def _init(key: jax.Array, policy: Policy, params: Params) -> Params:
    width = policy.reasoner.width
    example = jnp.zeros((1, width))
    variables = StepProjector(width).init(key, example)
    return {PROJECTOR: variables["params"]}


def _project(policy: Policy, params: Any, batch: ChunkBatch) -> jax.Array:
    """Return the slots' inputs [B, S, D]: embeddings, and of the thought the projector's, times the latents' unit."""
    words_BSD = pool(policy, params, batch)
    reasoner = policy.reasoner
    if batch.predicted is None:
        return words_BSD
    words_ND = words_BSD.reshape(-1, reasoner.width)
    codes_ND = jax.lax.stop_gradient(words_ND)
    variables = {"params": params[PROJECTOR]}
    projector = StepProjector(reasoner.width)
    latents_ND: Any = projector.apply(variables, codes_ND)
    scaled_ND = reasoner.unit * latents_ND
    scaled_ND = scaled_ND.astype(words_BSD.dtype)
    latents_BSD = scaled_ND.reshape(words_BSD.shape)
    return jnp.where(batch.chunks[..., None], latents_BSD, words_BSD)
