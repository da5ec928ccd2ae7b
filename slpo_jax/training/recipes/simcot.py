"""SIM-CoT (Wei et al., 2025): a second language model learns to say, of each thought, the step that it stands for.

It is begun as a copy of the reasoner's backbone, is fed the thought's latents and the step's words in the reasoner's
own embeddings, and its cross-entropy is added to the recipe's loss; the gradient reaches the latents. After training it
is dropped, or kept beside the reasoner, to say thoughts in words (`policy.explain`).

Apart from the published program: a number of latents that differs by row explains as many thoughts as a row has; and
the steps are ours, whole, where that looks for spans between "<<" and ">>".
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from slpo_jax.checked import check_fields, setting
from slpo_jax.errors import UserError
from slpo_jax.models.parts import EXPLAINER, REASONER, Params, reads
from slpo_jax.policy import noise
from slpo_jax.policy.explain import READS, second_model
from slpo_jax.policy.policy import Policy
from slpo_jax.text.batches import EncodedProblems, SuffixBatch, batch_indices, pad_suffixes
from slpo_jax.text.templates import Ids
from slpo_jax.training.recipes.recipe import ImitateSettings, Phase, Recipe


@struct.dataclass
class ExplainedBatch:
    """The recipe's own batch, and what its thoughts say.

    Attributes:
        own: the recipe's.
        texts: `SuffixBatch` [B, S, L], targets the text of each of S thoughts and eos; its weights make of a sum over
            them what the loss adds to the recipe's sum. None where there are no thoughts.
    """

    own: Any
    texts: Any = None


class ExplainedSlots(NamedTuple):
    """The recipe's own slots, and the thoughts S and text slots L of a row."""

    own: Any
    thoughts: int
    text: int


@dataclasses.dataclass(frozen=True)
class _Thoughts:
    """How a recipe's latents are thoughts.

    Attributes:
        latents: in one thought.
        after: whether the last latent's hidden state makes one more, that is not fed (CODI's).
        first: the position of a thought's first latent in the second model.
        lines: whether steps are said as they are, with line breaks between those that one thought says; else as the
            recipe writes them.
        spare: what a thought beyond the steps says: the answer, or nothing.
        noise: whether the second model has dropout, where imitation has.
        mean: of the loss, see `SimCot`.
    """

    latents: int
    after: bool
    first: int
    lines: bool
    spare: Literal["answer", ""]
    noise: bool
    mean: Literal["rows", "tokens"]


@dataclasses.dataclass(frozen=True)
class SimCot:
    """The section `config.imitate.simcot`.

    Attributes:
        weight: of the explanations, beside the loss of the reasoner's own recipe.
        mean: "rows": of the sums over a text's tokens, over rows and thoughts (published on COCONUT); "tokens": of each
            thought's tokens, then over thoughts (on CODI); "" is what was published.
        keep: the second model stays in the stage's checkpoint, and in later ones as it is, to show thoughts in words.
    """

    weight: float = setting(1.0, least=0)
    mean: Literal["", "rows", "tokens"] = ""
    keep: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, settings: ImitateSettings, default: Recipe) -> Recipe:
        """The reasoner's own recipe with explanations.

        Raises:
            UserError: it has no latents, or none of known number.
        """
        thoughts = _thoughts(settings, default)
        thoughts = dataclasses.replace(thoughts, mean=self.mean or thoughts.mean)

        def slots(problems: EncodedProblems, phase: Phase, buckets: Sequence[int] = ()) -> ExplainedSlots:
            count = phase.latent_slots // thoughts.latents
            counts = (
                range(count + 1) if phase.latents is None or phase.latents_a_step else [count]
            )  # fewer thoughts say longer texts
            every = range(len(problems) if count else 0)
            steps = _steps(thoughts, problems, every)
            texts = (text for n in counts for row in _texts(thoughts, problems, phase, every, steps, n) for text in row)
            longest = max(map(len, texts), default=0)
            return ExplainedSlots(default.slots(problems, phase, buckets), _with_last(thoughts, count), longest)

        def batch(problems, phase, step, seed, batch_size, prompt_slots, slots: ExplainedSlots) -> ExplainedBatch:
            own = default.batch(problems, phase, step, seed, batch_size, prompt_slots, slots.own)
            if not slots.thoughts:
                return ExplainedBatch(own)
            latents_B, total = _latents_of(own)
            indices = batch_indices(seed, step, len(problems), batch_size)
            steps, counts = _steps(thoughts, problems, indices), latents_B // thoughts.latents
            rows = [
                _texts(thoughts, problems, phase, [index], [said], int(count))[0]
                for index, said, count in zip(indices, steps, counts, strict=True)
            ]
            return ExplainedBatch(own, _padded(rows, slots, thoughts.mean, total, problems.template.pad_id))

        def loss(policy: Policy, params, batch: ExplainedBatch, key):
            own, metrics, thought = default.loss(policy, params, batch.own, key)
            if batch.texts is None or not self.weight:
                return own, metrics, thought
            explained = _explained(policy, params, batch, thoughts, thought, key)
            total, (_, count) = own + self.weight * explained, metrics["loss"]
            return total, {**metrics, "loss": (total, count), "explained": (explained, count)}, thought

        def kept(params):
            reading = jnp.array([thoughts.latents, thoughts.first], jnp.int32)
            return params | {EXPLAINER: params[EXPLAINER] | {READS: reading}}

        recipe = dataclasses.replace(default, name="simcot", slots=slots, batch=batch, loss=loss, init=_init)
        return dataclasses.replace(recipe, finish=kept, keeps=(EXPLAINER,)) if self.keep else recipe


def _thoughts(settings: ImitateSettings, default: Recipe) -> _Thoughts:
    if not settings.c_thought:
        raise UserError("config.imitate.c_thought: 0, but simcot explains latents; give e.g. 2, or another recipe")
    if default.name not in ("curriculum", "distil"):
        raise UserError(
            f"config.imitate.recipe: simcot explains latents of COCONUT's and CODI's recipes, and {default.name} is "
            "neither; use another"
        )
    if default.name == "curriculum":
        return _Thoughts(
            settings.c_thought, after=False, first=1, lines=True, spare="answer", noise=False, mean="rows",
        )  # fmt: skip
    if settings.final_latents != "published":
        raise UserError(
            "config.imitate.final_latents: simcot on CODI explains the last hidden state too, where all rows have it: "
            "set it to published"
        )
    return _Thoughts(1, after=True, first=0, lines=False, spare="", noise=True, mean="tokens")


def _with_last(thoughts: _Thoughts, count: int) -> int:
    return count + 1 if count and thoughts.after else count


def _steps(thoughts: _Thoughts, problems: EncodedProblems, indices: Sequence[int] | np.ndarray) -> list[list[Ids]]:
    """Ids of the steps of each of these problems, as a thought says them."""
    if not thoughts.lines:
        return [problems.steps[index] for index in indices]
    bare = dataclasses.replace(problems.template, step_text=lambda step, first: step)
    return bare.step_ids([problems.problems[index].steps for index in indices])


def _texts(
    thoughts: _Thoughts,
    problems: EncodedProblems,
    phase: Phase,
    indices: Sequence[int],
    steps: list[list[Ids]],
    count: int,
) -> list[list[Ids]]:
    """What each thought of these problems says, eos included, where there are `count` before CODI's last."""
    template, count = problems.template, _with_last(thoughts, count)
    line = template.tokenizer("\n", add_special_tokens=False)["input_ids"] if thoughts.lines else []
    joins, rows = count and phase.dropped is None, []
    for index, said in zip(indices, steps, strict=True):
        texts = said[:count]
        if joins and len(said) > count:
            texts[-1] = [token for step in said[count - 1 :] for token in (*step, *line)][: -len(line) or None]
        spare = [problems.answers[index]] * (count - len(said)) if thoughts.spare else []
        rows.append([[*text, template.eos_id] for text in (*texts, *spare)])
    return rows


def _latents_of(own: Any) -> tuple[np.ndarray, float]:
    """The number of latents of each row [B], and what the recipe's sum is divided by."""
    student = getattr(own, "student", own)
    return student.latents, float(student.suffix.weights.sum())


def _padded(rows: list[list[Ids]], slots: ExplainedSlots, mean: str, total: float, pad_id: int) -> SuffixBatch:
    """[B, S, L] of B rows of at most S texts.

    Args:
        total: what the sum is divided by in the end.
    """
    flat = [[pad_id, *text] for row in rows for text in row + [[]] * (slots.thoughts - len(row))]
    texts = SuffixBatch(
        *(array.reshape(len(rows), slots.thoughts, -1) for array in pad_suffixes(flat, slots.text, pad_id))
    )
    if mean == "rows":
        thoughts_B = np.maximum(1, [len(row) for row in rows])
        weights = texts.weights * total / (len(rows) * thoughts_B[:, None, None])
    else:
        tokens_S = texts.weights.sum(axis=(0, 2))
        weights = texts.weights * total / np.maximum(1, tokens_S * (tokens_S > 0).sum())[None, :, None]
    return texts._replace(weights=weights.astype(np.float32))


def _explained(policy: Policy, params, batch: ExplainedBatch, thoughts: _Thoughts, thought, key) -> jax.Array:
    """The weighted sum of the texts' cross-entropies under the second model."""
    texts, latents_BTD = batch.texts, thought.actions
    if thoughts.after:
        latents_BTD = jnp.concatenate([latents_BTD, thought.action[:, None]], axis=1)
    rows, count, slots = texts.tokens.shape
    z_NCD = latents_BTD[:, : count * thoughts.latents].reshape(rows * count, thoughts.latents, -1)
    tokens_NL, targets_NL, weights_NL = (x.reshape(rows * count, slots) for x in texts)
    words_NLD = policy.reasoner.embed(params, tokens_NL[:, 1:])
    inputs_NLD = jnp.concatenate([z_NCD, words_NLD.astype(z_NCD.dtype)], axis=1)
    places_L = jnp.arange(inputs_NLD.shape[1])
    # Other noise than the reasoner's (0) and CODI's teacher's (1).
    keys_N = noise.row_keys(key, jnp.repeat(batch.own.index, count), jnp.tile(2 + jnp.arange(count), rows))
    model, rate = second_model(policy.reasoner.config, params), policy.config.dropout_rate if thoughts.noise else 0.0
    hidden_NLD, _ = reads(EXPLAINER, model.forward)(
        params,
        inputs_NLD,
        jnp.broadcast_to(thoughts.first + places_L, inputs_NLD.shape[:2]),
        jnp.ones(inputs_NLD.shape[:2], bool),  # padding is on the right, where no word looks
        dropout=noise.answer_dropout(keys_N, places_L, rate, "all"),
    )
    before_NLD, log_probs = hidden_NLD[:, thoughts.latents - 1 :], reads(EXPLAINER, model.log_probs)
    return -jnp.sum(log_probs(params, before_NLD, targets_NL, weights_NL != 0)[0] * weights_NL)


def _init(key: jax.Array, policy: Policy, params: Params) -> Params:
    return {EXPLAINER: {"backbone": jax.tree.map(lambda x: jnp.array(x, copy=True), params[REASONER]["backbone"])}}
