"""A recipe: a way of imitating written solutions, as the stage imitate sees it."""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

import jax
import numpy as np

from slpo_jax.data.batches import (
    EncodedProblems,
    SuffixBatch,
    batch_indices,
    draw_numbers,
    pad_prompts,
    pad_suffixes,
)
from slpo_jax.data.templates import Ids
from slpo_jax.errors import UserError
from slpo_jax.models import lora, parts
from slpo_jax.models.lora import LoraConfig
from slpo_jax.models.parts import Params
from slpo_jax.policy.noise import Stream
from slpo_jax.policy.policy import Policy, Prompts
from slpo_jax.settings import Checked, setting
from slpo_jax.training.optimizer import OptimizerConfig
from slpo_jax.training.state import LossFn

Slots = tuple[Any, ...]
"""Shapes of a phase's batches: buckets of its main texts, and the one size of everything else."""
Needs = tuple[int, ...]
"""Of one problem, at most: positions, slots of its main text, and the size of everything else."""


@dataclasses.dataclass(frozen=True)
class Draw:
    """The origin of one step's batch.

    Attributes:
        phase: `recipe.Phase`.
        indices: int [B], of the problems.
        prompt_slots: buckets.
        slots: of `Recipe.slots`.
    """

    problems: EncodedProblems
    phase: Any
    step: int
    seed: int
    indices: np.ndarray
    prompt_slots: Sequence[int]
    slots: Slots

    @cached_property
    def draw_ids(self) -> np.ndarray:
        """int [B], the numbers that the rows' randomness is drawn by."""
        return draw_numbers(self.indices, len(self.problems))

    def rng(self, stream: Stream) -> np.random.Generator:
        """Return the generator of one use's draws on the host in this step."""
        return np.random.default_rng([self.seed, self.step, stream])

    def fit(self, longest: int) -> int:
        """Return the smallest bucket of the main texts that holds so many slots."""
        buckets, *_ = self.slots
        return next(size for size in buckets if size >= longest)

    def prompts(self, rows: Sequence[Ids]) -> Prompts:
        """Pad B prompts to their smallest bucket."""
        pad_id = self.problems.template.pad_id
        tokens, valid = pad_prompts(rows, self.prompt_slots, pad_id)
        return Prompts(tokens, valid)

    def suffixes(self, rows: Sequence[Ids]) -> SuffixBatch:
        """Pad B main texts to their smallest bucket."""
        pad_id = self.problems.template.pad_id
        longest = max(map(len, rows))
        slots = self.fit(longest - 1)
        return pad_suffixes(rows, slots, pad_id)


def in_fours(size: int) -> int:
    """Round up to a multiple of 4, so that few programs are compiled."""
    fours = -(-size // 4)
    return fours * 4


def usable(problems: EncodedProblems, max_tokens: int) -> list[int]:
    """Return the problems whose question, steps and answer together have at most `max_tokens` tokens; 0 is no limit."""
    if not max_tokens:
        return list(range(len(problems)))
    indices = list[int]()
    for index in range(len(problems)):
        # Of the prompt its last token, the end marker, is not counted.
        question = len(problems.prompts[index]) - 1
        steps = sum(map(len, problems.steps[index]))
        answer = len(problems.answers[index])
        size = question + steps + answer
        if size <= max_tokens:
            indices.append(index)
    return indices


@dataclasses.dataclass(frozen=True)
class ImitateSettings(Checked):
    """What every recipe has of the section `config.imitate`; further keys are the recipes' own sections, by name.

    Attributes:
        recipe: "" is the reasoner's own: COCONUT's curriculum or CODI's distillation.
        batch_size: problems a step, over all devices.
        micro_batches: gradient accumulation.
        max_tokens: leaves out problems whose question, steps and answer are longer; 0 keeps all.
        c_thought: latents that replace one step; with 0, steps are dropped and nothing replaces them.
        max_latent_stage: the last stage in which steps are replaced one by one. CODI has no stages, but as many latents
            as COCONUT's last.
        cot_steps: optimizer steps of CoT-SFT; for CODI, of the teacher alone.
        stage_steps: optimizer steps of each stage 1 .. max_latent_stage; not for CODI and iCoT. For Latent-SFT, of the
            encoder, of the reasoner after it, and of both.
        final_steps: optimizer steps of the last stage, where all steps have become latents; for iCoT, all that come
            after `cot_steps`.
        stage_until: ends every stage, the last one too, when it is learned: when this share of the training rows has
            all of its tokens right, in the mean of 20 steps; 0 takes all steps.
        stage_least: fewest steps of a stage that `stage_until` ends; its most are `cot_steps`, `stage_steps` or
            `final_steps`, and those that the stages before it did not need.
        mix: share of a batch's problems that are at an earlier stage, each as likely (COCONUT's uniform_prob, which
            draws later ones too).
        final_latents: latents of the last stage: "published" is c_thought * max_latent_stage, "random" a number from a
            problem's steps to T. With "steps" every stage has c_thought for each step that it drops, so that shorter
            problems have fewer.
        gate_weight: weight of the log-likelihood of a stop exactly after the steps, which teaches the gate when to
            stop; 0 leaves the gate as it is. It asks for final_latents="steps". A stop counts as one more token of its
            row, and only where all of the row's steps are latents: in the last stage, and before that in shorter
            problems. With `stage_until` a row is right only if the gate, at a threshold of 0.5, stops there too.
        dropout: dropout rate at every position, while imitating.
        suffix_slots: buckets of written steps and answer (of CODI's whole teacher text), below the one that holds all;
            each is compiled.
        reset_optimizer: reset the optimizer's state at every stage; for iCoT, whenever a further token is dropped.
        control: also train *SFT, as many steps more*: as many as reinforcement learning takes, as its control.
            Parts that the recipe trains beside the reasoner (SIM-CoT's decoder) and the optimizer's state go on too.
        control_rate: its learning rate, which stays as it is.
        no_thought: also train *no latents*: imitation without latents, in COCONUT's stages and their very steps.
        lora: adapters instead of the whole reasoner.
        optimizer: of every stage.
    """

    recipe: str = ""
    batch_size: int = setting(128, least=1)
    micro_batches: int = setting(1, least=1)
    max_tokens: int = setting(0, least=0, note="0 keeps all problems")
    c_thought: int = setting(2, least=0)
    max_latent_stage: int = setting(3, least=0)
    cot_steps: int = setting(10_000, least=0)
    stage_steps: int = setting(5_000, least=0)
    final_steps: int = setting(10_000, least=0)
    stage_until: float = setting(0.0, least=0, most=1, note="0 takes all steps")
    stage_least: int = setting(100, least=1)
    mix: float = setting(0.0, least=0, most=1)
    final_latents: Literal["published", "random", "steps"] = "published"
    gate_weight: float = setting(0.0, least=0, note="0 leaves the gate as it is")
    dropout: float = setting(0.0, least=0, below=1)
    suffix_slots: tuple[int, ...] = setting((), least=1)
    reset_optimizer: bool = True
    control: bool = False
    control_rate: float = setting(0.0, least=0, note="0 goes on as imitation ended")
    no_thought: bool = False
    lora: LoraConfig = LoraConfig()
    optimizer: OptimizerConfig = OptimizerConfig("adamw", 1e-4)


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of imitation steps with one input format.

    Attributes:
        name: for logs.
        start, end: steps [start, end) of the imitate stage.
        dropped: leading steps of a problem that are not written; None drops all.
        latents: number of latents, or None to draw it for each example between its number of steps and T.
        latent_slots: T of this phase's layout.
        trains: parts that it changes; () is all that the recipe trains.
        learning_rate: of its own; None is the optimizer's.
        copies: (part, another) each: it begins with that part as a copy of the other.
        rise: for iCoT, steps after which one token more is dropped of those that `dropped` leaves; 0 drops none.
        latents_a_step: where not 0, an example has at most this number for each of its steps, and one at least.
    """

    name: str
    start: int
    end: int
    dropped: int | None
    latents: int | None
    latent_slots: int
    rise: int = 0
    trains: tuple[str, ...] = ()
    learning_rate: float | None = None
    copies: tuple[tuple[str, str], ...] = ()
    latents_a_step: int = 0

    @property
    def stretches(self) -> list[tuple[int, int]]:
        """The steps [start, end) from one reset of the optimizer to the next: all, or those between two rises."""
        every = self.rise or self.end - self.start
        stretches: list[tuple[int, int]] = []
        for start in range(self.start, self.end, every):
            end = min(start + every, self.end)
            stretches.append((start, end))
        return stretches


def consecutive(phases: Sequence[Phase]) -> list[Phase]:
    """Place phases, given as from 0 to their number of steps, one after the other, without those of no steps."""
    placed = list[Phase]()
    start = 0
    for phase in phases:
        end = start + phase.end
        if end > start:
            phase = dataclasses.replace(phase, start=start, end=end)
            placed.append(phase)
        start = end
    return placed


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A way of imitating: pure functions, made of the section `config.imitate.NAME`.

    Attributes:
        phases: (problems, T) -> list[Phase], one after the other.
        needs: (problems, phase) -> `Needs` of each problem.
        rows: `Draw` -> one step's rows, in numpy, in the smallest buckets that hold them; a pure function.
        loss: (policy, params, batch, key) -> (sum of the loss, `state.Sums`, what is known of the thought, or None).
            The policy's `max_latents` is the phase's latent slots; dropout, if any, is on at every position.
        usable: (problems, max_tokens) -> indices of those that are imitated.
        fewest_steps: (phases) -> how many steps a problem has to have for one to be written; 0 where none has to be.
        init: (key, policy, params) -> parts of its own that it trains (an auxiliary decoder, adapters); None: none.
        trains_only_these: whether these are all that it trains.
        finish: all parts, trained -> those that later stages get; what `init` made is dropped from them.
        keeps: the parts of `parts.CARRIED` that are not dropped.
        name: in `RECIPES`.
    """

    phases: Callable[[EncodedProblems, int], list[Phase]]
    needs: Callable[[EncodedProblems, Phase], list[Needs]]
    rows: Callable[[Draw], Any]
    loss: Callable[[Policy, Params, Any, jax.Array], tuple]
    usable: Callable[[EncodedProblems, int], list[int]] = usable
    fewest_steps: Callable[[list[Phase]], int] = lambda phases: 1
    init: Callable[[jax.Array, Policy, Params], Params] | None = None
    trains_only_these: bool = False
    finish: Callable[[Params], Params] = dict
    keeps: tuple[str, ...] = ()
    name: str = ""

    def slots(
        self, problems: EncodedProblems, phase: Phase, buckets: Sequence[int] = ()
    ) -> Slots:
        """Return the shapes of a phase's batches.

        Args:
            buckets: of its main texts, below the first multiple of 4 that holds each of them.
        """
        sizes = self.needs(problems, phase)
        # The largest need of each kind; shorter main texts have buckets of their own.
        kinds = zip(*sizes, strict=True)
        _, longest, *further = map(max, kinds)
        most = in_fours(longest)
        smaller = sorted(size for size in buckets if size < most)
        main_buckets = (*smaller, most)
        return main_buckets, *further

    def batch(
        self,
        problems: EncodedProblems,
        phase: Phase,
        step: int,
        seed: int,
        batch_size: int,
        prompt_slots: Sequence[int],
        slots: Slots,
    ) -> Any:
        """Make the batch of one step; a pure function of its arguments."""
        indices = batch_indices(seed, step, len(problems), batch_size)
        draw = Draw(
            problems=problems,
            phase=phase,
            step=step,
            seed=seed,
            indices=indices,
            prompt_slots=prompt_slots,
            slots=slots,
        )
        return self.rows(draw)

    @property
    def has_extra_parameters(self) -> bool:
        """Whether the parts while it trains are not those that later stages get, which `finish` makes of them."""
        return self.init is not None or self.finish is not dict

    def loss_of(self, policy: Policy) -> LossFn:
        """Return the loss with a phase's policy, for `state.make_train_step`."""

        def loss_fn(params, batch, key):
            total, sums, _ = self.loss(policy, params, batch, key)
            return total, sums

        return loss_fn


@dataclasses.dataclass(frozen=True)
class RecipeSettings(Checked, abc.ABC):
    """A recipe's settings, a frozen dataclass that is its own config section; calling it makes the recipe.

    Attributes:
        uses_c_thought: whether `config.imitate.c_thought` says how many latents a step has; else thoughts are as long
            as the steps are, and the last phase trains them.
        has_teacher: whether a teacher writes the steps, but perhaps the last (`last_step`), beside a student.
        teaches_stop: whether `config.imitate.gate_weight` can teach the gate where the steps end.
        has_stages: whether latents replace steps in stages, of which `config.imitate.mix` may mix earlier ones in.
        label: what a report calls the reasoner that it leaves without a thought; "" goes by what is still written.
        metrics: names of the metrics that it alone logs, with their meaning.
    """

    uses_c_thought: ClassVar[bool] = True
    has_teacher: ClassVar[bool] = False
    teaches_stop: ClassVar[bool] = False
    has_stages: ClassVar[bool] = False
    label: ClassVar[str] = ""
    metrics: ClassVar[Mapping[str, str]] = {}

    def check(self, name: str, config: Any) -> None:
        """Refuse a run that the recipe can't be used in.

        Args:
            name: of the recipe.
            config: the run's, whole.
        Raises:
            UserError: one line with the key and the remedy.
        """
        imitate = config.imitate
        most = config.max_latents
        # A thought has to have room for the latents of the last stage, or for some at all.
        latents = imitate.c_thought * imitate.max_latent_stage
        if self.uses_c_thought and latents > most:
            raise UserError(
                f"config.imitate.c_thought: {latents} latents in the last stage are more than max_latents ({most})"
            )
        if not self.uses_c_thought and imitate.final_steps and not most:
            raise UserError(
                f"config.max_latents: 0, but the recipe {name} trains thoughts; give 1 or more, or 0 for "
                "config.imitate.final_steps"
            )

    @abc.abstractmethod
    def __call__(self, settings: ImitateSettings, default: Any) -> Recipe:
        """Make the recipe, given the settings that all share, and the reasoner's own recipe.

        Raises:
            UserError: it can't be used with these settings.
        """


def with_lora(
    recipe: Recipe, config: LoraConfig, tokens: tuple[int, ...] = ()
) -> Recipe:
    """Return the recipe that trains low-rank adapters of the reasoner, and what it has beside its backbone.

    Args:
        tokens: ids whose rows of the vocabulary are trained too.
    """

    def init(key, policy, params):
        # What it trains beside the reasoner is drawn by a key of its own.
        made = {}
        if recipe.init:
            own_key = jax.random.fold_in(key, 1)
            made = recipe.init(own_key, policy, params)
        made[parts.ADAPTER] = lora.adapter(
            key, params, config.rank, config.kernels, tokens=tokens
        )
        return made

    def merge(params):
        return lora.without_adapter(params, config.scale, tokens=tokens)

    def loss(policy, params, batch, key):
        return recipe.loss(policy, merge(params), batch, key)

    def finish(params):
        return recipe.finish(merge(params))

    return dataclasses.replace(
        recipe, init=init, trains_only_these=True, loss=loss, finish=finish
    )
