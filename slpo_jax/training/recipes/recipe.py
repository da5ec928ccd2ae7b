"""What a recipe is: a way of imitating written solutions, as the stage imitate sees it."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax

from slpo_jax.config.bounds import check_fields, setting
from slpo_jax.data.batches import EncodedProblems
from slpo_jax.models import lora, parts
from slpo_jax.models.lora import LoraConfig
from slpo_jax.models.parts import Params
from slpo_jax.policy.policy import Policy
from slpo_jax.training.optimizer import OptimizerConfig
from slpo_jax.training.state import LossFn


@dataclasses.dataclass(frozen=True)
class ImitateSettings:
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
        stage_steps: of each stage 1 .. max_latent_stage; not for CODI and iCoT. For Latent-SFT, of the encoder, of the
            reasoner after it, and of both.
        final_steps: of the last stage, where all steps have become latents; for iCoT, all that come after `cot_steps`.
        stage_until: ends every stage, the last one too, when it is learned: when so many of the training rows have all
            of their tokens right, in the mean of 20 steps; 0 takes all steps.
        stage_least: steps that a stage then has at least; it has `cot_steps`, `stage_steps` or `final_steps` at most,
            and those that the stages before it did not need.
        mix: share of a batch's problems that are at an earlier stage, each as likely (COCONUT's uniform_prob, which
            draws later ones too).
        final_latents: of the last stage: c_thought * max_latent_stage of them, as "published", or a "random" number,
            from a problem's steps to T. With "steps" every stage has c_thought for each step that it drops, so that
            shorter problems have fewer.
        dropout: at every position, while imitating.
        suffix_slots: buckets of written steps and answer (of CODI's whole teacher text), below the one that holds all;
            each is compiled.
        reset_optimizer: at the beginning of every stage; for iCoT, whenever a further token is dropped.
        control: also imitate on for as many steps as reinforcement learning takes, as its control.
        no_thought: also imitate without latents, as a baseline, in COCONUT's stages and their very steps.
        lora: adapters instead of the whole reasoner.
        optimizer: of every stage.
    """

    recipe: str = ""
    batch_size: int = setting(128, least=1)
    micro_batches: int = setting(1, least=1, affects="nothing")
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
    dropout: float = setting(0.0, least=0, below=1)
    suffix_slots: tuple[int, ...] = setting((), least=1)
    reset_optimizer: bool = True
    control: bool = setting(False, affects="report")
    no_thought: bool = setting(False, affects="report")
    lora: LoraConfig = LoraConfig()
    optimizer: OptimizerConfig = OptimizerConfig("adamw", 1e-4)

    def __post_init__(self) -> None:
        check_fields(self)


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
        latents_a_step: where not 0, an example has at most so many for each of its steps, and one at least.
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
        return [(at, min(at + every, self.end)) for at in range(self.start, self.end, every)]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One way of imitating: pure functions, made of the section `config.imitate.NAME`.

    Attributes:
        name: in `RECIPES`.
        phases: (problems, T) -> list[Phase], one after the other.
        usable: (problems, max_tokens) -> indices of those that are imitated.
        fewest_steps: (phases) -> how many steps a problem has to have for one to be written; 0 where none has to be.
        positions: (problems, phase) -> the positions that each problem takes, at most.
        slots: (problems, phase, buckets) -> the shapes of a phase's batches, for `batch`.
        batch: (problems, phase, step, seed, batch_size, prompt_slots, slots) -> one step's rows, in numpy; a pure
            function of its arguments.
        loss: (policy, params, batch, key) -> (sum of the loss, `state.Sums`, what is known of the thought, or None).
            The policy's `max_latents` is the phase's latent slots; dropout, if any, is on at every position.
        init: (key, policy, params) -> parts of its own that it trains (an auxiliary decoder, adapters); None: none.
        alone: whether these are all that it trains.
        finish: all parts, trained -> those that later stages get; what `init` made is dropped from them.
        keeps: what of that is not dropped, of `parts.CARRIED`.
    """

    name: str
    phases: Callable[[EncodedProblems, int], list[Phase]]
    usable: Callable[[EncodedProblems, int], list[int]]
    fewest_steps: Callable[[list[Phase]], int]
    positions: Callable[[EncodedProblems, Phase], list[int]]
    slots: Callable[..., Any]
    batch: Callable[..., Any]
    loss: Callable[[Policy, Params, Any, jax.Array], tuple]
    init: Callable[[jax.Array, Policy, Params], Params] | None = None
    alone: bool = False
    finish: Callable[[Params], Params] = dict
    keeps: tuple[str, ...] = ()

    @property
    def ends_apart(self) -> bool:
        """Whether what it trains is finished into what later stages get."""
        return self.init is not None or self.finish is not dict

    def loss_of(self, policy: Policy) -> LossFn:
        """The loss with a phase's policy, for `state.make_train_step`."""
        return lambda params, batch, key: self.loss(policy, params, batch, key)[:2]


def with_lora(recipe: Recipe, rank: int, alpha: float, kernels: tuple[str, ...] = ()) -> Recipe:
    """The recipe, of the reasoner of which low-rank adapters are trained instead, and what it has beside its backbone.

    Args:
        rank: of the adapters.
        alpha: their scale times the rank.
        kernels: that have adapters; () is all.
    """
    scale = alpha / rank

    def init(key, policy, params):
        own = recipe.init(jax.random.fold_in(key, 1), policy, params) if recipe.init else {}
        return own | {parts.ADAPTER: lora.adapter(key, params, rank, kernels)}

    def loss(policy, params, batch, key):
        return recipe.loss(policy, lora.without_adapter(params, scale), batch, key)

    def finish(params):
        return recipe.finish(lora.without_adapter(params, scale))

    return dataclasses.replace(recipe, init=init, alone=True, loss=loss, finish=finish)
