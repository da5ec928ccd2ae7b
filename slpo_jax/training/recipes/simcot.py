"""SIM-CoT (Wei et al., 2025): a second language model learns to say, of each thought, the step that it stands for.

It is begun as a copy of the reasoner's backbone, is fed the thought's latents and the step's words in the reasoner's
own embeddings, and its cross-entropy is added to the recipe's loss; the gradient reaches the latents. After training it
is dropped, or kept beside the reasoner, to say thoughts in words (`policy.explain`).

It differs from the published program in two ways: where the number of latents differs by row, each row explains as many
thoughts as it has; and a step is the whole step, where that program looks for spans between "<<" and ">>".
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from slpo_jax.data.batches import EncodedProblems, SuffixBatch, pad_suffixes
from slpo_jax.data.templates import Ids
from slpo_jax.errors import UserError
from slpo_jax.models.parts import DECODER, REASONER, Params
from slpo_jax.policy import noise
from slpo_jax.policy.explain import READS, decoder_of
from slpo_jax.policy.policy import Policy
from slpo_jax.settings import setting
from slpo_jax.training.recipes.recipe import (
    Draw,
    ImitateSettings,
    Needs,
    Phase,
    Recipe,
    RecipeSettings,
)


@struct.dataclass
class ExplainedBatch:
    """The recipe's own batch, and the texts of its thoughts.

    Attributes:
        base: the recipe's.
        texts: `SuffixBatch` [B, S, L], targets the text of each of S thoughts and eos; its weights make of a sum over
            them what the loss adds to the recipe's sum. None where there are no thoughts.
    """

    base: Any
    texts: Any = None


Indices = Sequence[int] | np.ndarray


@dataclasses.dataclass(frozen=True)
class _Thoughts:
    """COCONUT's thoughts: they say steps as they are, with line breaks between several, and beyond them the answer.

    The loss is summed over a text's tokens, averaged over a row's thoughts, and then over rows.

    Attributes:
        latents: in one thought.
        first: the position of a thought's first latent in the decoder.
        has_dropout: whether the decoder has dropout, where imitation has.
    """

    latents: int
    first = 1
    has_dropout = False

    def number(self, latents: int) -> int:
        """Count the thoughts that this number of latents makes."""
        return latents // self.latents

    def steps(
        self, problems: EncodedProblems, indices: Indices
    ) -> tuple[list[list[Ids]], Ids]:
        """Tokenise the steps of each problem at `indices`, and the text between two steps of one thought."""
        template = dataclasses.replace(
            problems.template, step_text=lambda step, first: step
        )
        line = template.tokenizer("\n", add_special_tokens=False)["input_ids"]
        written = [problems.problems[index].steps for index in indices]
        return template.step_ids(written), line

    def beyond(self, answer: Ids) -> list[Ids]:
        """Return the texts of thoughts beyond the steps: one or none."""
        return [answer]

    def states(self, thought: Any) -> jax.Array:
        """Return the hidden states [B, T, D] that make the thoughts."""
        return thought.actions

    def divisors(self, weights_BSL: np.ndarray, counts: list[int]) -> np.ndarray:
        """Divide weights of 1 by these, and a sum is the loss; `counts` are the rows' thoughts."""
        rows = len(counts)
        divisors_B = rows * np.maximum(1, counts)
        return divisors_B[:, None, None]


class _CodiThoughts(_Thoughts):
    """CODI's thoughts: they say steps as the recipe writes them, and beyond them nothing.

    The last latent's hidden state makes one more thought, that is not fed. The loss is the mean over each thought's
    tokens, then over thoughts.
    """

    first = 0
    has_dropout = True

    def number(self, latents):
        return latents + 1 if latents else 0

    def steps(self, problems, indices):
        return [problems.steps[index] for index in indices], []

    def beyond(self, answer):
        return []

    def states(self, thought):
        last_B1D = thought.action[:, None]
        return jnp.concatenate([thought.actions, last_B1D], axis=1)

    def divisors(self, weights_BSL, counts):
        tokens_S = weights_BSL.sum(axis=(0, 2))
        spoken = (tokens_S > 0).sum()
        divisors_S = np.maximum(1, tokens_S * spoken)
        return divisors_S[None, :, None]


@dataclasses.dataclass(frozen=True)
class SimCot(RecipeSettings):
    """The section `config.imitate.simcot`.

    Attributes:
        weight: weight of the decoder's cross-entropy, beside the loss of the reasoner's own recipe.
        keep: the decoder stays in the stage's checkpoint, and in later ones as it is, to show thoughts in words.
    """

    weight: float = setting(1.0, least=0)
    keep: bool = False

    teaches_stop: ClassVar = True  # by the reasoner's own recipe
    metrics: ClassVar = {
        "explained": "SIM-CoT's loss of the steps that its latents are to explain."
    }

    def __call__(self, settings: ImitateSettings, default: Recipe) -> Recipe:
        """Return the reasoner's own recipe with explanations.

        Raises:
            UserError: it has no latents, or none of known number.
        """
        thoughts = _thoughts(settings, default)

        def needs(problems: EncodedProblems, phase: Phase) -> list[Needs]:
            """Count as the recipe itself does, with the decoder's positions; thoughts, and slots of the text of one."""
            most = thoughts.number(phase.latent_slots)
            base = default.needs(problems, phase)
            if not most:
                return [(*sizes, 0, 0) for sizes in base]
            texts = _texts(thoughts, problems, phase, range(len(problems)))
            needed = list[Needs]()
            for index, sizes in enumerate(base):
                longest = 0
                for latents in _list_numbers(problems, phase, index):
                    for text in texts(index, latents):
                        longest = max(longest, len(text))
                # The decoder reads a thought's latents, and then each word of its text but the last.
                positions, *base_slots = sizes
                read = thoughts.first + thoughts.latents + longest - 1
                needed.append((max(positions, read), *base_slots, most, longest))
            return needed

        def rows(draw: Draw) -> ExplainedBatch:
            *slots, count, text = draw.slots
            base_draw = dataclasses.replace(draw, slots=tuple(slots))
            base = default.rows(base_draw)
            if not count:
                return ExplainedBatch(base)
            # CODI's student thinks in a batch of its own.
            student = getattr(base, "student", base)
            texts = _texts(thoughts, draw.problems, draw.phase, draw.indices)
            spoken: list[list[Ids]] = []
            for place, latents in enumerate(student.latents):
                spoken.append(texts(place, int(latents)))
            total = float(student.suffix.weights.sum())
            pad_id = draw.problems.template.pad_id
            padded = _pad(thoughts, spoken, (count, text), total, pad_id)
            return ExplainedBatch(base, padded)

        def loss(policy: Policy, params, batch: ExplainedBatch, key):
            base, metrics, thought = default.loss(policy, params, batch.base, key)
            if batch.texts is None or not self.weight:
                return base, metrics, thought
            explained = _explain(policy, params, batch, thoughts, thought, key)
            total = base + self.weight * explained
            _, count = metrics["loss"]
            sums = {"loss": (total, count), "explained": (explained, count)}
            return total, metrics | sums, thought

        def keep_decoder(params):
            # Its checkpoint says how the decoder reads latents.
            reading = jnp.array([thoughts.latents, thoughts.first], jnp.int32)
            decoder = params[DECODER] | {READS: reading}
            return params | {DECODER: decoder}

        recipe = dataclasses.replace(
            default, needs=needs, rows=rows, loss=loss, init=_init
        )
        if not self.keep:
            return recipe
        return dataclasses.replace(recipe, finish=keep_decoder, keeps=(DECODER,))


def _thoughts(settings: ImitateSettings, default: Recipe) -> _Thoughts:
    if not settings.c_thought:
        raise UserError(
            "config.imitate.c_thought: 0, but simcot explains latents; give e.g. 2, or another recipe"
        )
    if default.name not in ("curriculum", "distil"):
        raise UserError(
            f"config.imitate.recipe: simcot explains latents of COCONUT's and CODI's recipes, and {default.name} is "
            "neither; use another"
        )
    if default.name == "curriculum":
        return _Thoughts(settings.c_thought)
    if settings.final_latents != "published":
        raise UserError(
            "config.imitate.final_latents: simcot on CODI explains the last hidden state too, where all rows have it: "
            "set it to published"
        )
    return _CodiThoughts(1)


def _list_numbers(problems: EncodedProblems, phase: Phase, index: int) -> Sequence[int]:
    """List the numbers of latents that a problem may have in a phase, as `curriculum.imitation_batch` has them."""
    steps = max(1, len(problems.steps[index]))
    # The number is drawn between the problem's steps and the slots.
    if phase.latents is None:
        least = min(steps, phase.latent_slots)
        return range(least, phase.latent_slots + 1)
    # Else it is the phase's, or less where the problem has fewer steps.
    if phase.latents_a_step:
        return [min(phase.latents, phase.latents_a_step * steps)]
    return [phase.latents]


def _texts(
    thoughts: _Thoughts, problems: EncodedProblems, phase: Phase, indices: Indices
) -> Callable[[int, int], list[Ids]]:
    """Make (place in `indices`, latents) -> the text of each thought of that problem, eos included."""
    steps, line = thoughts.steps(problems, indices)

    def write(place: int, latents: int) -> list[Ids]:
        count = thoughts.number(latents)
        step_ids = steps[place]
        texts = step_ids[:count]
        # In the last phase the last thought says all steps that are left.
        if texts and phase.dropped is None:
            last = list(texts[-1])
            for step in step_ids[count:]:
                last += [*line, *step]
            texts[-1] = last
        # Thoughts beyond the steps say the answer, or nothing.
        answer = problems.answers[indices[place]]
        beyond = thoughts.beyond(answer)
        for _ in range(count - len(step_ids)):
            texts += beyond
        return [[*text, problems.template.eos_id] for text in texts]

    return write


def _pad(
    thoughts: _Thoughts,
    rows: list[list[Ids]],
    shape: tuple[int, int],
    total: float,
    pad_id: int,
) -> SuffixBatch:
    """Pad B rows of at most S texts to [B, S, L].

    Args:
        shape: S and L.
        total: the number that the sum is divided by in the end, which is the batch's count of `metrics["loss"]`.
    """
    most, slots = shape
    flat = list[Ids]()
    counts = list[int]()
    for row in rows:
        count = len(row)
        flat += [[pad_id, *text] for text in row]
        flat += [[pad_id]] * (most - count)
        counts.append(count)
    tokens, targets, weights = pad_suffixes(flat, slots, pad_id)
    shape_BSL = (len(rows), most, -1)
    weights_BSL = weights.reshape(shape_BSL)
    divisors = thoughts.divisors(weights_BSL, counts)
    scaled_BSL = weights_BSL * total / divisors
    return SuffixBatch(
        tokens=tokens.reshape(shape_BSL),
        targets=targets.reshape(shape_BSL),
        weights=scaled_BSL.astype(np.float32),
    )


def _explain(
    policy: Policy, params, batch: ExplainedBatch, thoughts: _Thoughts, thought, key
) -> jax.Array:
    """Return the weighted sum of the texts' cross-entropies under the decoder."""
    texts = batch.texts
    latents_BTD = thoughts.states(thought)
    rows, count, slots = texts.tokens.shape
    # Each thought's latents come before the words of its text, in a row of its own.
    size = rows * count
    fed = count * thoughts.latents
    z_NCD = latents_BTD[:, :fed].reshape(size, thoughts.latents, -1)
    tokens_NL = texts.tokens.reshape(size, slots)
    targets_NL = texts.targets.reshape(size, slots)
    weights_NL = texts.weights.reshape(size, slots)
    words_NLD = policy.reasoner.embed(params, tokens_NL[:, 1:])
    words_NLD = words_NLD.astype(z_NCD.dtype)
    inputs_NLD = jnp.concatenate([z_NCD, words_NLD], axis=1)
    places_L = jnp.arange(inputs_NLD.shape[1])
    # Other noise than the reasoner's (0) and CODI's teacher's (1).
    draw_ids_N = jnp.repeat(batch.base.draw_ids, count)
    numbers_S = 2 + jnp.arange(count)
    numbers_N = jnp.tile(numbers_S, rows)
    keys_N = noise.row_keys(key, draw_ids_N, numbers_N)
    # The decoder reads them, and is asked for each word from the last latent on.
    decoder = decoder_of(policy.reasoner.config, params)
    rate = policy.config.dropout_rate if thoughts.has_dropout else 0.0
    shape = inputs_NLD.shape[:2]
    positions_NL = jnp.broadcast_to(thoughts.first + places_L, shape)
    hidden_NLD, _ = decoder.forward(
        params,
        inputs_NLD,
        positions_NL,
        jnp.ones(shape, bool),  # padding is on the right, where no word looks
        dropout=noise.answer_dropout(keys_N, places_L, rate, "all"),
    )
    last_latent = thoughts.latents - 1
    before_NLD = hidden_NLD[:, last_latent:]
    is_word_NL = weights_NL != 0
    log_probs_NL, _ = decoder.log_probs(params, before_NLD, targets_NL, is_word_NL)
    return -jnp.sum(log_probs_NL * weights_NL)


def _init(key: jax.Array, policy: Policy, params: Params) -> Params:
    def copy(x):
        return jnp.array(x, copy=True)

    backbone = jax.tree.map(copy, params[REASONER]["backbone"])
    return {DECODER: {"backbone": backbone}}
