"""Imitation: CoT-SFT, then the COCONUT curriculum, in which latents replace written steps (Hao et al., 2024).

Stage 0 writes every step out. Stage s feeds s * c_thought latents in place of the first s steps. In the last stage all
steps are gone. With c_thought = 0 nothing replaces the steps, their ablation without thought. The other recipe,
`training.icot`, drops tokens instead of steps.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import jax.numpy as jnp
import numpy as np
from flax import struct

from slpo_jax.checked import FieldError, check_fields, setting
from slpo_jax.models.lora import LoraConfig
from slpo_jax.policy import noise
from slpo_jax.policy.answer_score import token_log_probs
from slpo_jax.policy.policy import Policy
from slpo_jax.policy.prompted import Prompts
from slpo_jax.policy.rollout import think
from slpo_jax.text.batches import EncodedProblems, batch_indices, draw_numbers, pad_suffixes
from slpo_jax.text.templates import Ids
from slpo_jax.training.optimizer import OptimizerConfig
from slpo_jax.training.state import LossFn


@dataclasses.dataclass(frozen=True)
class IcotConfig:
    """The section `config.imitate.icot`: how fast the steps' tokens are dropped, see `icot.Internalization`.

    Attributes:
        tokens_per_epoch: how often, in an epoch, s rises by one: the tokens that are dropped of every problem.
        all_from: from this s on all are dropped, however many there are.
        offset_decay: lambda of P(o) ~ exp(-lambda o), o the further tokens that are dropped of one problem.
    """

    tokens_per_epoch: int = setting(8, least=1)
    all_from: int = setting(39, least=1)
    offset_decay: float = setting(4.0, above=0)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class ImitateConfig:
    """The section `config.imitate`.

    Attributes:
        recipe: "steps", the reasoner's own: COCONUT's curriculum or CODI's distillation; or "icot", which trains any
            reasoner without latents.
        batch_size: problems a step, over all devices.
        micro_batches: gradient accumulation.
        max_tokens: leaves out problems whose question, steps and answer are longer; 0 keeps all.
        c_thought: latents that replace one step; with 0, steps are dropped and nothing replaces them.
        max_latent_stage: the last stage in which steps are replaced one by one. CODI has no stages, but as many latents
            as COCONUT's last.
        cot_steps: optimizer steps of CoT-SFT; for CODI, of the teacher alone.
        stage_steps: of each stage 1 .. max_latent_stage; not for CODI and iCoT.
        final_steps: of the last stage, where all steps have become latents; for iCoT, all that come after `cot_steps`.
        final_latents: c_thought * max_latent_stage of them, as "published", or a "random" number: from a problem's
            steps to T.
        dropout: at every position, while imitating.
        suffix_slots: buckets of written steps and answer (of CODI's whole teacher text), below the one that holds all;
            each is compiled.
        reset_optimizer: at the beginning of every stage; for iCoT, whenever a further token is dropped.
        control: also imitate on for as many steps as reinforcement learning takes, as its control.
        teacher_factor, distil_factor: of CODI's losses beside the student's, see `distil.Distillation`.
        last_step: whether CODI's teacher writes its last step too.
        icot: of the recipe "icot".
        lora: adapters instead of the whole reasoner.
        optimizer: of every stage.
    """

    recipe: Literal["steps", "icot"] = "steps"
    batch_size: int = setting(128, least=1)
    micro_batches: int = setting(1, least=1)
    max_tokens: int = setting(0, least=0, note="0 keeps all problems")
    c_thought: int = setting(2, least=0)
    max_latent_stage: int = setting(3, least=0)
    cot_steps: int = setting(10_000, least=0)
    stage_steps: int = setting(5_000, least=0)
    final_steps: int = setting(10_000, least=0)
    final_latents: Literal["published", "random"] = "published"
    dropout: float = setting(0.0, least=0, below=1)
    suffix_slots: tuple[int, ...] = setting((), least=1)
    reset_optimizer: bool = True
    control: bool = False
    teacher_factor: float = setting(1.0, least=0)
    distil_factor: float = setting(20.0, least=0)
    last_step: bool = False
    icot: IcotConfig = IcotConfig()
    lora: LoraConfig = LoraConfig()
    optimizer: OptimizerConfig = OptimizerConfig("adamw", 1e-4)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.lora.rank and self.control:
            remedy = "the control goes on with all parameters, but lora.rank trains adapters: set one of them to 0"
            raise FieldError(self, "control", remedy)
        if self.recipe == "icot" and self.c_thought:
            raise FieldError(self, "c_thought", "iCoT (imitate.recipe) puts no latents in place of steps: set it to 0")


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of imitation steps with one input format.

    Attributes:
        name: for logs.
        start, end: steps [start, end) of the imitate stage.
        dropped: leading steps of a problem that are not written; None drops all.
        latents: number of latents, or None to draw it for each example between its number of steps and T.
        latent_slots: T of this phase's layout.
        rise: for iCoT, steps after which one token more is dropped of those that `dropped` leaves; 0 drops none.
    """

    name: str
    start: int
    end: int
    dropped: int | None
    latents: int | None
    latent_slots: int
    rise: int = 0

    @property
    def stretches(self) -> list[tuple[int, int]]:
        """The steps [start, end) from one reset of the optimizer to the next: all, or those between two rises."""
        every = self.rise or self.end - self.start
        return [(at, min(at + every, self.end)) for at in range(self.start, self.end, every)]


@struct.dataclass
class ImitationBatch:
    """Prompts, the number of latents int [B] after each, a `SuffixBatch`, and int [B] what randomness is drawn by."""

    prompts: Prompts
    latents: Any
    suffix: Any
    index: Any


class Imitation(Protocol):
    """A way of imitating, as the stage sees it: this module, `distil.Distillation` or `icot.Internalization`."""

    def phases(self, cot_steps: int, stage_steps: int, final_steps: int, c_thought: int, max_latent_stage: int,
               final_latents: Literal["published", "random"], max_latents: int) -> list[Phase]: ...  # fmt: skip

    def usable(self, problems: EncodedProblems, max_tokens: int) -> list[int]: ...

    def positions(self, problems: EncodedProblems, phase: Phase) -> list[int]: ...

    def suffix_slots(self, problems: EncodedProblems, phase: Phase, buckets: Sequence[int] = ()) -> Any: ...

    def make_batch(self, problems: EncodedProblems, phase: Phase, step: int, seed: int, batch_size: int,
                   prompt_slots: Sequence[int], slots: Any) -> Any: ...  # fmt: skip

    def make_loss(self, policy: Policy) -> LossFn: ...


def phases(
    cot_steps: int,
    stage_steps: int,
    final_steps: int,
    c_thought: int,
    max_latent_stage: int,
    final_latents: Literal["published", "random"],
    max_latents: int,
) -> list[Phase]:
    """The curriculum as consecutive phases; those of no steps are left out.

    Args:
        cot_steps, stage_steps, final_steps: optimizer steps of stage 0, of each of stages 1..max_latent_stage, and
            of the last.
        max_latents: T.
    """
    plans: list[tuple[str, int, int | None, int | None]] = [("cot", cot_steps, 0, 0)]
    plans += [(f"stage_{s}", stage_steps, s, s * c_thought) for s in range(1, max_latent_stage + 1)]
    random = final_latents == "random" and c_thought > 0
    plans.append(("final", final_steps, None, None if random else c_thought * max_latent_stage))
    out, start = [], 0
    for name, steps, dropped, latents in plans:
        if steps:
            slots = max_latents if latents is None else latents
            out.append(Phase(name, start, start + steps, dropped, latents, slots))
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
) -> ImitationBatch:
    """The batch of one step, in the smallest buckets that hold it; a pure function of its arguments.

    Args:
        removed_B: tokens that are left out at the beginning of each row's steps; None leaves out none.
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
    suffixes = [problems.suffix(i, phase.dropped, n) for i, n in zip(indices, removed_B, strict=True)]
    longest = max(map(len, suffixes)) - 1
    suffix = pad_suffixes(suffixes, next(s for s in slots if s >= longest), problems.template.pad_id)
    index = draw_numbers(indices, len(problems))
    return ImitationBatch(prompts, latents, suffix, index)


def after_latents(policy: Policy, params, batch: ImitationBatch, keys_B) -> dict[str, Any]:
    """Think, differentiably; then what `Reasoner.forward` or `trace` over the suffixes is called with.

    Args:
        policy: as in `make_loss`.
        keys_B: the rows' keys.
    """
    slots_A, config = jnp.arange(batch.suffix.tokens.shape[1]), policy.config
    layout = policy.having(stopping="length", dropout_where="all", thinker_noise=False, answer_slots=len(slots_A))
    thought, prefix = think(layout, params, batch.prompts, keys_B, batch.latents, differentiable=True)
    before_B = batch.prompts.lengths + thought.lengths_N
    return dict(
        inputs_BLD=policy.reasoner.embed(params, batch.suffix.tokens),
        positions_BL=before_B[:, None] + slots_A[None],
        valid_BL=batch.suffix.weights > 0,
        prefix=prefix,
        cache=thought.cache,
        start=config.max_latents,
        dropout=noise.answer_dropout(keys_B, slots_A, config.dropout_rate, "all"),
    )


def make_loss(policy: Policy) -> LossFn:
    """Cross-entropy of the suffix after a number of latents, with the gradient through the latents.

    Args:
        policy: `max_latents` is the phase's latent slots; dropout, if any, is on at every position, the thinker's own
            noise nowhere.
    """
    reasoner = policy.reasoner

    def loss_fn(params, batch: ImitationBatch, key):
        keys_B = noise.row_keys(key, batch.index)
        inputs = after_latents(policy, params, batch, keys_B)
        hidden_BAD, _ = reasoner.forward(params, **inputs)
        logits_BAV = reasoner.logits(params, hidden_BAD)
        weights_BA = batch.suffix.weights
        loss = -jnp.sum(token_log_probs(logits_BAV, batch.suffix.targets) * weights_BA)
        right_B = jnp.all((jnp.argmax(logits_BAV, axis=-1) == batch.suffix.targets) | (weights_BA == 0), axis=1)
        return loss, {
            "loss": (loss, weights_BA.sum()),
            "accuracy": (right_B.sum(), jnp.float32(right_B.shape[0])),
        }

    return loss_fn
