"""COCONUT on graphs: after s latents, a node that is s + 1 edges from the root (Zhu et al., 2025).

At stage s a problem of n steps has min(s, n) latents. Out of the last of them, or of the prompt, comes one of the nodes
of step s + 1, by chance; where no step is left, the closing text and the answer follow. Whenever a problem comes, its
edges are shuffled again, and so are the two nodes that it asks about.

Apart from the published program: eos is learned after the answer, as its rows in words have it, where that one takes
just one token; a share `mix` of the rows is at any stage up to its own, as there.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct

from slpo_jax.data.batches import EncodedProblems, SuffixBatch
from slpo_jax.data.record_fields import ASKED, BAR
from slpo_jax.data.templates import Ids
from slpo_jax.errors import UserError
from slpo_jax.policy import noise
from slpo_jax.policy.policy import Policy
from slpo_jax.training.recipes import curriculum
from slpo_jax.training.recipes.curriculum import ImitationBatch
from slpo_jax.training.recipes.recipe import (
    Draw,
    ImitateSettings,
    Needs,
    Phase,
    Recipe,
    RecipeSettings,
)


@struct.dataclass
class FrontierBatch(ImitationBatch):
    """`ImitationBatch`, whose rows answer where their suffix has weights, and else say `nodes`, int [B]."""

    nodes: Any


@dataclasses.dataclass(frozen=True)
class Frontier(RecipeSettings):
    """Nothing to set: the schedule is `config.imitate`'s own, `cot_steps` those of stage 0."""

    has_stages = True

    def __call__(
        self, settings: ImitateSettings, default: Recipe | None = None
    ) -> Recipe:
        published = dataclasses.replace(settings, final_latents="published")

        def phases(problems: EncodedProblems, max_latents: int) -> list[Phase]:
            # Questions of another kind are refused before any training.
            bar, mark = _find_signs(problems)
            rng = np.random.default_rng(0)
            for prompt in problems.prompts:
                shuffle(prompt, bar, mark, rng)
            return curriculum.phases(published, max_latents)

        def needs(problems: EncodedProblems, phase: Phase) -> list[Needs]:
            # The suffix is the answer at every stage.
            answers = dataclasses.replace(phase, dropped=None)
            return curriculum.needs(problems, answers)

        def rows(draw: Draw) -> FrontierBatch:
            return frontier_batch(settings, draw)

        return Recipe(
            phases=phases,
            needs=needs,
            rows=rows,
            loss=loss,
        )


def _find_signs(problems: EncodedProblems) -> tuple[int, int]:
    """Return the tokens between edges, and behind them.

    Raises:
        UserError: there are none, or the prompt is of another kind.
    """
    template = problems.template
    if template.start_id is not None or not template.closing_ids:
        raise UserError(
            "config.imitate.recipe: frontier is for graphs; set config.data.fields.question, config.tokenizer and "
            "config.prompt as configs/prosqa.py:graph does, or take another recipe"
        )
    return template.token(BAR), template.token(ASKED)


def shuffle(prompt: Ids, bar: int, mark: int, rng: np.random.Generator) -> Ids:
    """Shuffle the edges of a prompt `.. a b | c d | e f [Q] x y ..`, and x and y.

    Args:
        bar, mark: tokens | and [Q].
    Raises:
        UserError: it is no such prompt.
    """
    # Find the edges before the mark, each of two nodes with a bar behind, but for the last.
    end = prompt.index(mark) if mark in prompt else 0
    bars = prompt[:end].count(bar)
    begin = end - 3 * bars - 2
    has_edges = 0 <= begin < end
    has_both_nodes = len(prompt) > end + 2
    edges = None
    if has_edges and has_both_nodes:
        ids = [*prompt[begin:end], bar]
        edges = np.array(ids).reshape(-1, 3)
    if edges is None or (edges[:, 2] != bar).any():
        raise UserError(
            "config.data.train: a question is no `0 2 | 1 3 [Q] 3 2 [R] 1`, which recipe frontier asks for"
        )
    # Put them in another order, and the two nodes that are asked about in either one.
    shuffled = rng.permutation(edges).reshape(-1)
    *ids, _ = shuffled.tolist()
    one, other = prompt[end + 1 : end + 3]
    if rng.random() >= 0.5:
        one, other = other, one
    before = prompt[:begin]
    after = prompt[end + 3 :]
    return [*before, *ids, mark, one, other, *after]


def frontier_batch(settings: ImitateSettings, draw: Draw) -> FrontierBatch:
    """Make the rows of one step."""
    problems = draw.problems
    phase = draw.phase
    indices = draw.indices
    rng = draw.rng(noise.Stream.GRAPHS)
    rows = len(indices)
    steps_B = np.array([len(problems.steps[i]) for i in indices])
    stage = phase.dropped
    if stage is None:
        stage = settings.max_latent_stage
    stages_B = np.minimum(steps_B, stage)
    # Some rows are at any stage up to their own.
    kind_B, stage_B = rng.random((2, rows))
    is_mixed_B = kind_B < settings.mix
    any_stage_B = np.floor(stage_B * (stages_B + 1))
    stages_B = np.where(is_mixed_B, any_stage_B.astype(int), stages_B)
    # Shuffle each question's edges and ends.
    bar, mark = _find_signs(problems)
    again: list[Ids] = []
    suffixes: list[Ids] = []
    for index in indices:
        shuffled = shuffle(problems.prompts[index], bar, mark, rng)
        again.append(shuffled)
        suffixes.append(problems.suffix(index, None))
    suffix = draw.suffixes(suffixes)
    # A row that has no step left answers; the others say a node of the next step.
    answers_B = stages_B == steps_B
    nodes_B = np.full(rows, problems.template.pad_id, np.int32)
    for row, index in enumerate(indices):
        if answers_B[row]:
            continue
        nodes = problems.steps[index][stages_B[row]]
        if nodes:
            nodes_B[row] = rng.choice(nodes)
    latents_B = stages_B * settings.c_thought
    weights_BA = suffix.weights * answers_B[:, None]
    return FrontierBatch(
        prompts=draw.prompts(again),
        latents=latents_B.astype(np.int32),
        suffix=suffix._replace(weights=weights_BA),
        draw_ids=draw.draw_ids,
        stops=answers_B.astype(np.float32),
        nodes=nodes_B,
    )


def loss(policy: Policy, params, batch: FrontierBatch, key):
    """Return the cross-entropy of a node after some latents, or of what follows them, with the gradient through them.

    Args:
        policy: as in `Recipe.loss`.
    """
    params = policy.reasoner.stack(params)
    open_ended = policy.with_config(closing_ids=())  # so it keeps the last state
    keys_B = noise.row_keys(key, batch.draw_ids)
    inputs, thought = curriculum.after_latents(open_ended, params, batch, keys_B)
    hidden_BAD, _ = policy.reasoner.forward(params, **inputs)
    suffix: Any = batch.suffix
    # A row says a node at the slot before its suffix, or else the suffix itself.
    says_B1 = 1.0 - suffix.weights[:, :1]
    nodes_B1 = batch.nodes[:, None]
    targets: Any = jnp.concatenate([nodes_B1, suffix.targets], axis=1)
    weights: Any = jnp.concatenate([says_B1, suffix.weights], axis=1)
    rows = SuffixBatch(suffix.tokens, targets, weights)
    last_B1D = thought.hidden_ND[:, None]
    hidden_BLD = jnp.concatenate([last_B1D, hidden_BAD], axis=1)
    total, metrics = curriculum.cross_entropy(policy.reasoner, params, hidden_BLD, rows)
    return total, metrics, thought
