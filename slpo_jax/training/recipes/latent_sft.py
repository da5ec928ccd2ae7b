"""Latent-SFT (Deng et al., 2025): latents are mixtures of token embeddings, each for a chunk of the written steps.

First an encoder, begun as a copy of the reasoner, reads the question and the steps with a token of its own after every
chunk, whose hidden state says a mixture; and the reasoner learns to write, of each mixture, the chunk that comes next,
and of all of them the answer. These mixtures are then the labels of the reasoner's own predictions.

Apart from the published program: the labels are not kept in a file, but made again at each step by the encoder, which
is no longer trained then; the reasoner's adapter goes through all phases; there is no dropout of the adapters' inputs;
and the last step counts, not the best one.
"""

import dataclasses
import functools
from itertools import chain
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from slpo_jax.data.batches import EncodedProblems, SuffixBatch
from slpo_jax.data.templates import Ids
from slpo_jax.errors import UserError
from slpo_jax.models import lora
from slpo_jax.models.parts import ADAPTER, REASONER, Params, detach
from slpo_jax.policy import noise
from slpo_jax.policy.latent_policies.soft_tokens import mixture
from slpo_jax.policy.policy import Policy
from slpo_jax.settings import setting
from slpo_jax.training.recipes import curriculum
from slpo_jax.training.recipes.latent_rows import (
    Cell,
    Row,
    Slots,
    laid_out,
    pad,
    seen_by,
    seen_by_encoder,
    take_before_latents,
)
from slpo_jax.training.recipes.recipe import (
    Draw,
    ImitateSettings,
    Needs,
    Phase,
    Recipe,
    RecipeSettings,
    consecutive,
    in_fours,
)

ENCODER = "encoder"
ENCODER_ADAPTER = "encoder_adapter"
COMPRESS = "compress"
LEAST = 1e-10  # is added to a probability before its logarithm is taken
MOST_DRAWS = 100  # of noise, until no latent is the closing token


@struct.dataclass
class LatentBatch:
    """A step's rows.

    Attributes:
        draw_ids: int [B], the numbers that randomness is drawn by.
        text: the reasoner's input.
        rows: `SuffixBatch` [B, L], the text's targets.
        read: the encoder's input; None without latents.
        divergence: float32 [B, N], weights of the divergences at the latents, which make of a sum over them what the
            loss adds to the cross-entropies' sum; None where there are no latents.
        labelled: whether the encoder's mixtures are labels, in the last phase.
    """

    draw_ids: Any
    text: Slots
    rows: SuffixBatch
    read: Slots | None = None
    divergence: Any = None
    labelled: bool = struct.field(pytree_node=False, default=False)


def perturb(
    key: jax.Array, q_NM: jax.Array, ids_NM: jax.Array, mask_N: jax.Array, closing: int
):
    """Perturb q: softmax(log q + clamped Gumbel noise), drawn again while a latent's likeliest token is `closing`.

    Args:
        key: of one row.
        mask_N: bool, which latents there are.
    """

    def draw(number):
        draw_key = jax.random.fold_in(key, number)
        gumbel_NM = jax.random.gumbel(draw_key, q_NM.shape)
        clipped_NM = jnp.clip(gumbel_NM, -1.5, 3.0)
        logits_NM = jnp.log(q_NM + LEAST) + clipped_NM
        return jax.nn.softmax(logits_NM, axis=-1)

    def closes(state):
        number, drawn_NM = state
        places_N = drawn_NM.argmax(axis=-1)
        likeliest_N1 = jnp.take_along_axis(ids_NM, places_N[:, None], axis=-1)
        closes_N = (likeliest_N1[:, 0] == closing) & mask_N
        return (number < MOST_DRAWS) & closes_N.any()

    def draw_again(state):
        number, _ = state
        return number + 1, draw(number)

    first = (1, draw(0))
    _, drawn_NM = jax.lax.while_loop(closes, draw_again, first)
    return drawn_NM


def divergence(
    q_BNM: jax.Array, ids_BNM: jax.Array, logits_BNV: jax.Array
) -> jax.Array:
    """Return float32 [B, N]: KL(q || softmax(logits)), q of the tokens `ids_BNM`, all others being 0."""
    log_p_BNV = jax.nn.log_softmax(logits_BNV, axis=-1)
    log_p_BNM = jnp.take_along_axis(log_p_BNV, ids_BNM, axis=-1)
    log_q_BNM = jnp.log(jnp.maximum(q_BNM, 1e-12))
    terms_BNM = q_BNM * (log_q_BNM - log_p_BNM)
    return terms_BNM.sum(axis=-1)


@dataclasses.dataclass(frozen=True)
class LatentSft(RecipeSettings):
    """The section `config.imitate.latent_sft`.

    Attributes:
        ratio: tokens of the steps that one latent stands for.
        top_k: tokens of a mixture; the latent policy `soft` has to mix as many.
        final_learning_rate: learning rate of the last phase; None is the optimizer's.
    """

    uses_c_thought = False
    metrics: ClassVar = {
        "divergence": "Latent-SFT's, of its labels from what it predicts at the latents."
    }

    ratio: int = setting(2, least=1)
    top_k: int = setting(10, least=1)
    final_learning_rate: float | None = setting(None, above=0)

    def check(self, name, config):
        super().check(name, config)
        mixed = config.latent_policy.selected.mixed
        policy = config.latent_policy.name
        if mixed not in (None, self.top_k):
            raise UserError(
                f"config.imitate.latent_sft.top_k: {self.top_k}, but config.latent_policy.{policy} mixes "
                f"{mixed or 'all'} tokens (the fewer of its top_k and most); give both the same"
            )

    def __call__(
        self, settings: ImitateSettings, default: Recipe | None = None
    ) -> Recipe:
        """Return the recipe: words for `cot_steps`, if any; encoder, reasoner and both, `stage_steps` each; labels."""
        reasoner_parts = (REASONER,)
        encoder_parts = (ENCODER, COMPRESS)
        copies: tuple[tuple[str, str], ...] = ((ENCODER, REASONER),)
        # With adapters, those of the reasoner and of the encoder are trained, and their weights stay.
        adapters = settings.lora.rank > 0
        if adapters:
            reasoner_parts = (ADAPTER,)
            encoder_parts = (ENCODER_ADAPTER, COMPRESS)
            copies += ((ENCODER_ADAPTER, ADAPTER),)

        def phases(problems: EncodedProblems, max_latents: int) -> list[Phase]:
            if not problems.template.closing_ids:
                raise UserError(
                    "config.prompt.closing: latent_sft's thoughts end with a text, and there is none; give e.g. "
                    "</think>"
                )

            def phase(name: str, steps: int, trains: tuple[str, ...]) -> Phase:
                return Phase(
                    name=name,
                    start=0,
                    end=steps,
                    dropped=None,
                    latents=None,
                    latent_slots=max_latents,
                    trains=trains,
                )

            rate = self.final_learning_rate
            both = reasoner_parts + encoder_parts
            final = phase("final", settings.final_steps, reasoner_parts)
            in_order = [
                phase("cot", settings.cot_steps, reasoner_parts),
                phase("encoder", settings.stage_steps, encoder_parts),
                phase("reasoner", settings.stage_steps, reasoner_parts),
                phase("union", settings.stage_steps, both),
                dataclasses.replace(final, learning_rate=rate),
            ]
            plan = consecutive(in_order)
            # After CoT-SFT the encoder begins as a copy of what the reasoner has become.
            if len(plan) > 1 and plan[0].name == "cot":
                plan[1] = dataclasses.replace(plan[1], copies=copies)
            return plan

        def init(key: jax.Array, policy: Policy, params: Params) -> Params:
            def copy(x):
                return jnp.array(x, copy=True)

            begun = jax.tree.map(copy, params[REASONER])
            # The compress token's embedding begins as the mean of the vocabulary's.
            tokens_V = jnp.arange(policy.reasoner.config.vocab_size)
            table_VD = policy.reasoner.embed(params, tokens_V)
            mean_D = table_VD.astype(jnp.float32).mean(axis=0)
            made: Params = {ENCODER: begun, COMPRESS: {"embedding": mean_D}}
            if adapters:
                made[ENCODER_ADAPTER] = lora.adapter(key, params, settings.lora.rank)
            return made

        def encoder(params: Params) -> Params:
            if not adapters:
                return params[ENCODER]
            tree = {REASONER: params[ENCODER], ADAPTER: params[ENCODER_ADAPTER]}
            merged = lora.without_adapter(tree, settings.lora.scale)
            return merged[REASONER]

        def loss(policy: Policy, params: Params, batch: LatentBatch, key: jax.Array):
            return self.loss(policy, params, encoder(params), batch, key)

        return Recipe(
            phases=phases,
            needs=self.needs,
            rows=self.rows,
            loss=loss,
            init=init,
        )

    def texts(
        self, problems: EncodedProblems, phase: str, index: int
    ) -> tuple[Row, Row]:
        """Lay out the inputs of the reasoner and of the encoder for a problem in a phase, each with a last token.

        `pad` feeds neither eos nor that.
        """
        prompt = problems.prompts[index]
        template = problems.template
        answer = problems.answers[index]
        written = list(chain.from_iterable(problems.steps[index]))
        suffix = [*template.closing_ids, *answer, template.eos_id]
        # CoT-SFT writes the steps; later they are cut into chunks, one for each latent.
        chunks = list[Ids]()
        if phase == "cot":
            suffix = written + suffix
        else:
            starts = range(0, len(written), self.ratio)
            chunks = [written[at : at + self.ratio] for at in starts]
        # After a latent the reasoner writes the next chunk, but in the last phase nothing.
        spans = [list[int]() for _ in chunks]
        if phase != "final":
            spans[:-1] = chunks[1:]
        # The encoder reads the question, and each chunk with its compress token behind it.
        cells = [Cell(token, position) for position, token in enumerate(prompt)]
        for n, chunk in enumerate(chunks, 1):
            for position, token in enumerate(chunk, len(cells)):
                cells.append(Cell(token, position))
            cells.append(Cell(0, len(cells), latent=n))
        last = Cell(0, 0)
        encoder_row = Row([*cells, last], given=len(cells))
        return laid_out(prompt, spans, suffix), encoder_row

    def needs(self, problems: EncodedProblems, phase: Phase) -> list[Needs]:
        """Count positions; slots of the reasoner's and of the encoder's text; latents."""
        sizes = list[Needs]()
        for index in range(len(problems)):
            text, read = self.texts(problems, phase.name, index)
            slots = len(text.cells) - 1
            read_slots = len(read.cells) - 1
            positions = max(text.positions, read_slots)
            read_slots = in_fours(read_slots)
            sizes.append((positions, slots, read_slots, read.latents))
        return sizes

    def rows(self, draw: Draw) -> LatentBatch:
        """Make the rows of one step."""
        phase = draw.phase.name
        texts: list[Row] = []
        encoder_texts: list[Row] = []
        for index in draw.indices:
            row, encoder_row = self.texts(draw.problems, phase, index)
            texts.append(row)
            encoder_texts.append(encoder_row)
        longest = max(len(row.cells) for row in texts)
        slots = draw.fit(longest - 1)
        text, rows = pad(texts, slots)
        batch = LatentBatch(draw.draw_ids, text, rows)
        _, read_slots, latents = draw.slots
        if not latents:
            return batch
        read, _ = pad(encoder_texts, read_slots)
        # A divergence is the mean over a row's latents and over rows, in the scale of the cross-entropies' sum.
        counts_B = np.array([row.latents for row in texts])
        numbers_N = np.arange(latents)
        mask_BN = numbers_N < counts_B[:, None]
        divisors_B = len(texts) * np.maximum(counts_B, 1)
        weight_B = rows.weights.sum() / divisors_B
        weights_BN = mask_BN * weight_B[:, None]
        return dataclasses.replace(
            batch,
            read=read,
            divergence=weights_BN.astype(np.float32),
            labelled=phase == "final",
        )

    def mixtures(
        self, policy: Policy, params, encoder: Params, batch: LatentBatch, keys_B
    ):
        """Make probabilities and token ids [B, N, M] of the mixtures that the encoder makes of its own embeddings."""
        reasoner = policy.reasoner
        read = batch.read
        assert read is not None
        # The encoder reads its text, with the compress token's embedding at each latent.
        tree = {**params, REASONER: encoder}
        inputs_BLD = reasoner.embed(tree, read.tokens)
        compress_D = params[COMPRESS]["embedding"].astype(inputs_BLD.dtype)
        rate = 0.0 if batch.labelled else policy.config.dropout_rate
        slots_L = jnp.arange(read.tokens.shape[1])
        stacked = reasoner.stack(tree)
        is_latent_BL1 = read.latents[..., None] > 0
        compress_11D = compress_D[None, None]
        inputs_BLD = jnp.where(is_latent_BL1, compress_11D, inputs_BLD)
        hidden_BLD, _ = reasoner.forward(
            stacked,
            inputs_BLD,
            read.positions,
            read.positions >= 0,
            dropout=noise.answer_dropout(keys_B, slots_L, rate, "all"),
            sees_BLL=seen_by_encoder(read),
        )
        # Its hidden states there, against its own embeddings, say a mixture each.
        tokens_V = jnp.arange(reasoner.config.vocab_size)
        table_VD = reasoner.embed(tree, tokens_V)
        table_VD = jax.lax.stop_gradient(table_VD)
        _, latents = batch.divergence.shape
        hidden_BND = take_before_latents(hidden_BLD, read, 0, latents)
        logits_BNV = jnp.einsum(
            "bnd,vd->bnv", hidden_BND, table_VD, preferred_element_type=jnp.float32
        )
        most = min(self.top_k, table_VD.shape[0])
        logits_BNM, ids_BNM = jax.lax.top_k(logits_BNV, most)
        q_BNM = jax.nn.softmax(logits_BNM, axis=-1)
        return q_BNM, ids_BNM

    def loss(self, policy: Policy, params, encoder: Params, batch: LatentBatch, key):
        """Return the sum of the cross-entropies, and in the last phase of the divergences from the labels.

        Args:
            policy: as in `Recipe.loss`.
            encoder: its parameters, as the reasoner's.
        """
        reasoner = policy.reasoner
        text = batch.text
        count = batch.rows.weights.sum()
        stacked = reasoner.stack(params)
        keys_B = noise.row_keys(key, batch.draw_ids)
        inputs_BLD = reasoner.embed(params, text.tokens)
        labels = None
        if batch.read is not None:
            # The encoder's noise is other than the reasoner's.
            ones_B = jnp.ones_like(batch.draw_ids)
            encoder_keys_B = noise.row_keys(key, batch.draw_ids, ones_B)
            q_BNM, ids_BNM = self.mixtures(
                policy, params, encoder, batch, encoder_keys_B
            )
            if batch.labelled:
                closing = policy.config.closing_ids[0]
                perturb_rows = jax.vmap(functools.partial(perturb, closing=closing))
                mask_BN = batch.divergence > 0
                noisy_BNM = perturb_rows(encoder_keys_B, q_BNM, ids_BNM, mask_BN)
                labels = jax.lax.stop_gradient(noisy_BNM)
                q_BNM = labels
            # A latent's input is its mixture of the reasoner's embeddings, which get no gradient by it.
            detached = detach(params, REASONER)
            mixed_BND = mixture(reasoner, detached, ids_BNM, q_BNM)
            place_BL = jnp.maximum(text.latents - 1, 0)
            latents_BLD = jnp.take_along_axis(mixed_BND, place_BL[..., None], axis=1)
            is_latent_BL1 = text.latents[..., None] > 0
            inputs_BLD = jnp.where(is_latent_BL1, latents_BLD, inputs_BLD)
        # The reasoner reads its text, whose tokens after the question are learned.
        slots_L = jnp.arange(text.tokens.shape[1])
        rate = policy.config.dropout_rate
        hidden_BLD, _ = reasoner.forward(
            stacked,
            inputs_BLD,
            text.positions,
            text.positions >= 0,
            dropout=noise.answer_dropout(keys_B, slots_L, rate, "all"),
            sees_BLL=seen_by(text),
        )
        words, metrics = curriculum.cross_entropy(
            reasoner, stacked, hidden_BLD, batch.rows
        )
        if labels is None:
            return words, metrics, None
        # In the last phase it also learns to predict each label, one slot before it.
        _, latents = batch.divergence.shape
        before_BND = take_before_latents(hidden_BLD, text, 1, latents)
        logits_BNV = reasoner.logits(stacked, before_BND)
        divergence_BN = divergence(labels, ids_BNM, logits_BNV)
        away = jnp.sum(batch.divergence * divergence_BN)
        total = words + away
        metrics |= {"loss": (total, count), "divergence": (away, count)}
        return total, metrics, None
