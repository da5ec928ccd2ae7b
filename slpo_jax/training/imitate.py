"""Imitation: CoT-SFT, then the COCONUT curriculum, in which latents replace written steps (Hao et al., 2024).

Stage 0 writes every step out. Stage s feeds s * c_thought latents in place of the first s steps. In the last stage all
steps are gone. With c_thought = 0 nothing replaces the steps: iCoT's no-thought setting.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import jax.numpy as jnp
import numpy as np
from flax import struct

from slpo_jax.checked import FieldError, check_fields, setting
from slpo_jax.models import lora
from slpo_jax.models.lora import LoraConfig
from slpo_jax.policy import noise
from slpo_jax.policy.policy import Policy
from slpo_jax.policy.prompted import Prompts
from slpo_jax.policy.rollout import think
from slpo_jax.policy.score import token_log_probs
from slpo_jax.text.batches import EncodedProblems, batch_indices, draw_numbers, pad_suffixes
from slpo_jax.text.templates import Ids
from slpo_jax.training.optimizer import OptimizerConfig
from slpo_jax.training.state import LossFn


@dataclasses.dataclass(frozen=True)
class ImitateConfig:
    """The section `config.imitate`.

    Attributes:
        batch_size: problems a step, over all devices.
        micro_batches: gradient accumulation.
        max_tokens: leaves out problems whose question, steps and answer are longer; 0 keeps all.
        c_thought: latents that replace one step; 0 is iCoT's no-thought setting.
        max_latent_stage: the last stage in which steps are replaced one by one. CODI has no stages, but as many latents
            as COCONUT's last.
        cot_steps: optimizer steps of CoT-SFT; for CODI, of the teacher alone.
        stage_steps: of each stage 1 .. max_latent_stage; not for CODI.
        final_steps: of the last stage, where all steps have become latents.
        final_latents: c_thought * max_latent_stage of them, as "published", or a "random" number: from a problem's
            steps to T.
        dropout: at every position, while imitating.
        suffix_slots: buckets of written steps and answer (of CODI's whole teacher text), below the one that holds all;
            each is compiled.
        reset_optimizer: at the beginning of every stage.
        control: also imitate on for as many steps as reinforcement learning takes, as its control.
        teacher_factor, distil_factor: of CODI's losses beside the student's, see `distil.Distillation`.
        last_step: whether CODI's teacher writes its last step too.
        lora: adapters instead of the whole reasoner.
        optimizer: of every stage.
    """

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
    lora: LoraConfig = LoraConfig()
    optimizer: OptimizerConfig = OptimizerConfig("adamw", 1e-4)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.lora.rank and self.control:
            remedy = "the control goes on with all parameters, but lora.rank trains adapters: set one of them to 0"
            raise FieldError(self, "control", remedy)


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of imitation steps with one input format.

    Attributes:
        name: for logs.
        start, end: steps [start, end) of the imitate stage.
        dropped: leading steps of a problem that are not written; None drops all.
        latents: number of latents, or None to draw it for each example between its number of steps and T.
        latent_slots: T of this phase's layout.
    """

    name: str
    start: int
    end: int
    dropped: int | None
    latents: int | None
    latent_slots: int


@struct.dataclass
class ImitationBatch:
    """Prompts, the number of latents int [B] after each, a `SuffixBatch`, and int [B] what randomness is drawn by."""

    prompts: Prompts
    latents: Any
    suffix: Any
    index: Any


class Imitation(Protocol):
    """A way of imitating, as the stage sees it; this module is one, `distil.Distillation` another."""

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
    problems: EncodedProblems, phase: Phase, step: int, seed: int, batch_size: int, prompt_slots, slots: tuple[int, ...]
) -> ImitationBatch:
    """The batch of one step, in the smallest buckets that hold it; a pure function of its arguments."""
    indices = batch_indices(seed, step, len(problems), batch_size)
    prompts = problems.before_suffix(indices, prompt_slots)
    if phase.latents is None:
        fewest = np.array([max(1, len(problems.steps[i])) for i in indices])
        draw = np.random.default_rng([seed, step, 1]).random(batch_size)
        most = np.maximum(fewest, phase.latent_slots)
        latents = np.minimum(fewest + np.floor(draw * (most - fewest + 1)), phase.latent_slots).astype(np.int32)
    else:
        latents = np.full(batch_size, phase.latents, np.int32)
    suffixes = [problems.suffix(i, phase.dropped) for i in indices]
    longest = max(map(len, suffixes)) - 1
    suffix = pad_suffixes(suffixes, next(s for s in slots if s >= longest), problems.template.pad_id)
    index = draw_numbers(indices, len(problems))
    return ImitationBatch(Prompts(prompts.tokens, prompts.valid), latents, suffix, index)


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
        inputs_BLD=policy.reasoner.embed(params["reasoner"], batch.suffix.tokens),
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
        hidden_BAD, _ = reasoner.forward(params["reasoner"], **inputs)
        logits_BAV = reasoner.logits(params["reasoner"], hidden_BAD)
        weights_BA = batch.suffix.weights
        loss = -jnp.sum(token_log_probs(logits_BAV, batch.suffix.targets) * weights_BA)
        right_B = jnp.all((jnp.argmax(logits_BAV, axis=-1) == batch.suffix.targets) | (weights_BA == 0), axis=1)
        return loss, {
            "loss": (loss, weights_BA.sum()),
            "accuracy": (right_B.sum(), jnp.float32(right_B.shape[0])),
        }

    return loss_fn


def of_adapter(loss_fn: LossFn, scale: float) -> LossFn:
    """The loss of the reasoner with what is trained of it, params["adapter"] (see `lora.adapt`), merged in.

    Args:
        scale: alpha / rank.
    """

    def adapter_loss(params, batch, key):
        reasoner = lora.adapted(params["reasoner"], params["adapter"], scale)
        return loss_fn({"reasoner": reasoner, "gate": params["gate"]}, batch, key)

    return adapter_loss
