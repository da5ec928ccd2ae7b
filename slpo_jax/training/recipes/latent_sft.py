"""Latent-SFT (Deng et al., 2025): latents are mixtures of token embeddings, each for a chunk of the written steps.

First an encoder, begun as a copy of the reasoner, reads the question and the steps with a token of its own after every
chunk, whose hidden state says a mixture; and the reasoner learns to write, of each mixture, the chunk that comes next,
and of all of them the answer. These mixtures are then the labels of the reasoner's own predictions.

Apart from the published program: the labels are not kept in a file, but made anew at each step by the encoder, which is
no longer trained then; the reasoner's adapter goes through all phases; there is no dropout of the adapters' inputs; and
the last step counts, not the best one.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from slpo_jax.data.batches import EncodedProblems, SuffixBatch
from slpo_jax.errors import UserError
from slpo_jax.models import lora
from slpo_jax.models.parts import ADAPTER, REASONER, Params, detached
from slpo_jax.policy import noise
from slpo_jax.policy.latent_policies.soft_tokens import mixture
from slpo_jax.policy.policy import Policy
from slpo_jax.settings import setting
from slpo_jax.training.recipes import curriculum
from slpo_jax.training.recipes.latent_rows import (
    Row,
    Slots,
    at_latents,
    laid_out,
    padded,
    seen_by,
    seen_by_encoder,
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
        draws: int [B], what randomness is drawn by.
        text: what the reasoner reads.
        rows: `SuffixBatch` [B, L], the text's targets.
        read: what the encoder reads; None where there are no latents.
        divergence: float32 [B, N], weights of the divergences at the latents, which make of a sum over them what the
            loss adds to the cross-entropies' sum; None where there are no latents.
        labelled: whether the encoder's mixtures are labels, in the last phase.
    """

    draws: Any
    text: Slots
    rows: SuffixBatch
    read: Slots | None = None
    divergence: Any = None
    labelled: bool = struct.field(pytree_node=False, default=False)


def perturbed(
    key: jax.Array, q_NM: jax.Array, ids_NM: jax.Array, mask_N: jax.Array, closing: int
):
    """Perturb q: softmax(log q + clamped Gumbel noise), drawn again while a latent's likeliest token is `closing`.

    Args:
        key: of one row.
        mask_N: bool, which latents there are.
    """

    def draw(number):
        gumbel_NM = jax.random.gumbel(jax.random.fold_in(key, number), q_NM.shape)
        return jax.nn.softmax(
            jnp.log(q_NM + LEAST) + jnp.clip(gumbel_NM, -1.5, 3.0), axis=-1
        )

    def closes(state):
        number, drawn_NM = state
        likeliest_N = jnp.take_along_axis(
            ids_NM, drawn_NM.argmax(axis=-1)[:, None], axis=-1
        )[:, 0]
        return (number < MOST_DRAWS) & jnp.any((likeliest_N == closing) & mask_N)

    return jax.lax.while_loop(
        closes, lambda state: (state[0] + 1, draw(state[0])), (1, draw(0))
    )[1]


def divergence(
    q_BNM: jax.Array, ids_BNM: jax.Array, logits_BNV: jax.Array
) -> jax.Array:
    """Return float32 [B, N]: KL(q || softmax(logits)), q of the tokens `ids_BNM`, all others being 0."""
    log_p_BNM = jnp.take_along_axis(
        jax.nn.log_softmax(logits_BNV, axis=-1), ids_BNM, axis=-1
    )
    return jnp.sum(q_BNM * (jnp.log(jnp.maximum(q_BNM, 1e-12)) - log_p_BNM), axis=-1)


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
        adapters = settings.lora.rank > 0
        owned = (ADAPTER if adapters else REASONER,)
        begun = (
            (ENCODER, REASONER),
            *([(ENCODER_ADAPTER, ADAPTER)] if adapters else []),
        )
        encoders = (ENCODER_ADAPTER if adapters else ENCODER, COMPRESS)

        def phases(problems: EncodedProblems, max_latents: int) -> list[Phase]:
            if not problems.template.closing_ids:
                raise UserError(
                    "config.prompt.closing: latent_sft's thoughts end with a text, and there is none; give e.g. "
                    "</think>"
                )
            parts: dict[str, tuple[str, ...]] = {
                "encoder": encoders,
                "reasoner": owned,
                "union": owned + encoders,
            }
            steps = [
                ("cot", settings.cot_steps, owned),
                *((n, settings.stage_steps, t) for n, t in parts.items()),
            ]
            before = [
                Phase(name, 0, n, None, None, max_latents, trains=trains)
                for name, n, trains in steps
            ]
            final = Phase(
                "final",
                0,
                settings.final_steps,
                None,
                None,
                max_latents,
                0,
                owned,
                self.final_learning_rate,
            )
            plan = consecutive([*before, final])
            if plan and plan[0].name == "cot":
                plan[1:2] = [
                    dataclasses.replace(phase, copies=begun) for phase in plan[1:2]
                ]
            return plan

        def init(key: jax.Array, policy: Policy, params: Params) -> Params:
            copy = jax.tree.map(lambda x: jnp.array(x, copy=True), params[REASONER])
            table_VD = policy.reasoner.embed(
                params, jnp.arange(policy.reasoner.config.vocab_size)
            )
            adapter = (
                {ENCODER_ADAPTER: lora.adapter(key, params, settings.lora.rank)}
                if adapters
                else {}
            )
            return {
                ENCODER: copy,
                COMPRESS: {"embedding": table_VD.astype(jnp.float32).mean(axis=0)},
            } | adapter

        def encoder(params: Params) -> Params:
            if not adapters:
                return params[ENCODER]
            tree = {REASONER: params[ENCODER], ADAPTER: params[ENCODER_ADAPTER]}
            return lora.without_adapter(tree, settings.lora.scale)[REASONER]

        return Recipe(
            phases=phases,
            needs=self.needs,
            rows=self.rows,
            loss=lambda policy, params, batch, key: self.loss(
                policy, params, encoder(params), batch, key
            ),
            init=init,
        )

    def texts(
        self, problems: EncodedProblems, phase: str, index: int
    ) -> tuple[Row, Row]:
        """Lay out what the reasoner reads of a problem in a phase, and what the encoder does, with a last token.

        `padded` feeds neither eos nor that.
        """
        prompt = problems.prompts[index]
        template = problems.template
        written = [token for step in problems.steps[index] for token in step]
        in_words, thought = (written, []) if phase == "cot" else ([], written)
        suffix = [
            *in_words,
            *template.closing_ids,
            *problems.answers[index],
            template.eos_id,
        ]
        chunks = [
            thought[at : at + self.ratio] for at in range(0, len(thought), self.ratio)
        ]
        spans = (
            [[] for _ in chunks]
            if phase == "final"
            else [*chunks[1:], *[[]] * bool(chunks)]
        )
        read = [(token, 0) for token in prompt]
        for n, chunk in enumerate(chunks, 1):
            read += [*((token, 0) for token in chunk), (0, n)]
        cells = [(token, at, latent, 0) for at, (token, latent) in enumerate(read)]
        return laid_out(prompt, spans, suffix), Row([*cells, (0, 0, 0, 0)], len(cells))

    def needs(self, problems: EncodedProblems, phase: Phase) -> list[Needs]:
        """Count positions; slots of the reasoner's text, and of what the encoder reads; latents."""
        pairs = (
            self.texts(problems, phase.name, index) for index in range(len(problems))
        )
        return [
            (
                max(text.positions, len(read.cells) - 1),
                len(text.cells) - 1,
                in_fours(len(read.cells) - 1),
                read.latents,
            )
            for text, read in pairs
        ]

    def rows(self, draw: Draw) -> LatentBatch:
        """Make the rows of one step."""
        last = draw.phase.name == "final"
        texts, read = zip(
            *(
                self.texts(draw.problems, draw.phase.name, index)
                for index in draw.indices
            ),
            strict=True,
        )
        text, rows = padded(texts, draw.fit(max(len(row.cells) for row in texts) - 1))
        _, read_slots, latents = draw.slots
        if not latents:
            return LatentBatch(draw.draws, text, rows)
        counts_B = np.array([row.latents for row in texts])
        mask_BN = np.arange(latents)[None] < counts_B[:, None]
        weight_B = rows.weights.sum() / (len(texts) * np.maximum(counts_B, 1))
        weights_BN = (mask_BN * weight_B[:, None]).astype(np.float32)
        return LatentBatch(
            draw.draws, text, rows, padded(read, read_slots)[0], weights_BN, last
        )

    def mixtures(
        self, policy: Policy, params, encoder: Params, batch: LatentBatch, keys_B
    ):
        """Make probabilities and token ids [B, N, M] of the mixtures that the encoder makes of its own embeddings."""
        reasoner = policy.reasoner
        read = batch.read
        assert read is not None
        tree = {**params, REASONER: encoder}
        inputs_BLD = reasoner.embed(tree, read.tokens)
        compress_D = params[COMPRESS]["embedding"].astype(inputs_BLD.dtype)
        rate = 0.0 if batch.labelled else policy.config.dropout_rate
        slots_L = jnp.arange(read.tokens.shape[1])
        hidden_BLD, _ = reasoner.forward(
            reasoner.stacked(tree),
            jnp.where(read.latents[..., None] > 0, compress_D[None, None], inputs_BLD),
            read.positions,
            read.positions >= 0,
            dropout=noise.answer_dropout(keys_B, slots_L, rate, "all"),
            sees_BLL=seen_by_encoder(read),
        )
        table_VD = jax.lax.stop_gradient(
            reasoner.embed(tree, jnp.arange(reasoner.config.vocab_size))
        )
        hidden_BND = at_latents(hidden_BLD, read, 0, batch.divergence.shape[1])
        logits_BNV = jnp.einsum(
            "bnd,vd->bnv", hidden_BND, table_VD, preferred_element_type=jnp.float32
        )
        logits_BNM, ids_BNM = jax.lax.top_k(
            logits_BNV, min(self.top_k, table_VD.shape[0])
        )
        return jax.nn.softmax(logits_BNM, axis=-1), ids_BNM

    def loss(self, policy: Policy, params, encoder: Params, batch: LatentBatch, key):
        """Return the sum of the cross-entropies, and in the last phase of the divergences from the labels.

        Args:
            policy: as in `Recipe.loss`.
            encoder: its parameters, as the reasoner's.
        """
        reasoner = policy.reasoner
        text = batch.text
        count = batch.rows.weights.sum()
        stacked = reasoner.stacked(params)
        keys_B = noise.row_keys(key, batch.draws)
        inputs_BLD = reasoner.embed(params, text.tokens)
        labels = None
        if batch.read is not None:
            encoder_keys_B = noise.row_keys(
                key, batch.draws, jnp.ones_like(batch.draws)
            )
            q_BNM, ids_BNM = self.mixtures(
                policy, params, encoder, batch, encoder_keys_B
            )
            if batch.labelled:
                noisy = jax.vmap(
                    functools.partial(perturbed, closing=policy.config.closing_ids[0])
                )
                q_BNM = labels = jax.lax.stop_gradient(
                    noisy(encoder_keys_B, q_BNM, ids_BNM, batch.divergence > 0)
                )
            mixed_BND = mixture(reasoner, detached(params, REASONER), ids_BNM, q_BNM)
            place_BL1 = jnp.maximum(text.latents - 1, 0)[..., None]
            latents_BLD = jnp.take_along_axis(mixed_BND, place_BL1, axis=1)
            inputs_BLD = jnp.where(text.latents[..., None] > 0, latents_BLD, inputs_BLD)
        slots_L = jnp.arange(text.tokens.shape[1])
        hidden_BLD, _ = reasoner.forward(
            stacked, inputs_BLD, text.positions, text.positions >= 0,
            dropout=noise.answer_dropout(keys_B, slots_L, policy.config.dropout_rate, "all"), sees_BLL=seen_by(text),
        )  # fmt: skip
        total, metrics = curriculum.cross_entropy(
            reasoner, stacked, hidden_BLD, batch.rows
        )
        if labels is None:
            return total, metrics, None
        before_BND = at_latents(hidden_BLD, text, 1, batch.divergence.shape[1])
        away = jnp.sum(
            batch.divergence
            * divergence(labels, ids_BNM, reasoner.logits(stacked, before_BND))
        )
        return (
            total + away,
            {**metrics, "loss": (total + away, count), "divergence": (away, count)},
            None,
        )
