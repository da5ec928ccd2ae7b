"""The settings of the stage `rl` that all objectives have in common."""

from dataclasses import dataclass
from typing import Literal

from slpo_jax.models.lora import LoraConfig
from slpo_jax.rewards.unjudged import Truncated, Unjudged
from slpo_jax.settings import Checked, FieldError, setting
from slpo_jax.training.optimizer import OptimizerConfig


@dataclass(frozen=True)
class RlConfig(Checked):
    """The section `config.rl`: what all objectives have in common.

    Attributes:
        batch_size: prompts a step, over all devices, of G completions each.
        micro_batches: gradient accumulation.
        steps: steps of each objective that has no number of its own: rollouts, and as many optimizer updates of them as
            the objective has.
        objectives: names under `config.objective`; each is trained from the same start, or after another of them.
        group: G, rollouts a prompt (TRL's num_generations).
        temperature: temperature of the answers in training rollouts; 0 is greedy, where a group's rollouts differ by
            dropout and by where they stop.
        top_k: likeliest tokens that they are sampled from; 0 is all.
        top_p: then the likeliest of these that have this probability together; 1 is all.
        stopping: "sample" stops with the gate's probability, "threshold" where it is at least 0.5.
        capacities: buckets of padded lengths: shares of the latent and answer slots that scoring has room for,
            ascending to (1, 1). Each pair is a compiled program, and the smallest that a batch fits in is used.
        truncated: "lowest": a completion that is not judged, as it is truncated or a reward failed on it, earns what
            the lowest judged one of its batch earns, over all processes, and at most 0; "value": `truncated_value`;
            "masked": nothing, as it is out of loss and advantage (DAPO's overlong filtering); "judged": a truncated one
            is judged by its text. With "value" and "masked" this is so of all truncated ones, whether a reward has
            judged them or not.
        truncated_value: what each earns where `truncated` is "value".
        dynamic_batches: batches that may be rolled out for a step, until `batch_size` groups have rewards that differ,
            which alone are improved on (DAPO's dynamic sampling); 0 improves on every group of one batch.
        evaluate_every: steps between validations; an objective then leaves the parameters of its best one instead of
            the last ones.
        lora: adapters instead of the whole reasoner.
        optimizer: of each objective, but for its own learning rate.
    """

    batch_size: int = setting(64, least=1)
    micro_batches: int = setting(1, least=1)
    steps: int = setting(40_000, least=1)
    objectives: tuple[str, ...] = setting(("slpo",), fewest=1)
    group: int = setting(8, least=2, note="fewer give no baseline")
    temperature: float = setting(0.0, least=0)
    top_k: int = setting(0, least=0, note="0 is all")
    top_p: float = setting(1.0, above=0, most=1)
    stopping: Literal["sample", "threshold"] = "sample"
    capacities: tuple[tuple[float, float], ...] = setting(
        ((0.75, 0.5), (1.0, 1.0)),
        above=0,
        most=1,
        note="they ascend to (1, 1)",
    )
    truncated: Truncated = "lowest"
    truncated_value: float = setting(0.0, least=-1e6, most=1e6)
    dynamic_batches: int = setting(0, least=0, note="0 keeps every group")
    evaluate_every: int = setting(0, least=0, note="0 is never")
    lora: LoraConfig = LoraConfig()
    optimizer: OptimizerConfig = OptimizerConfig("adafactor", 1e-6, warmup_steps=2_000)

    @property
    def unjudged(self) -> Unjudged:
        """The rule for completions that are not judged."""
        return Unjudged(self.truncated, self.truncated_value)

    def __post_init__(self) -> None:
        super().__post_init__()
        distinct = set(self.objectives)
        if len(distinct) < len(self.objectives):
            raise FieldError(self, "objectives", "give each name once")

        # The shares of latent slots ascend, those of answer slots too, and the last pair has room for all.
        ascends = True
        for shares in zip(*self.capacities, strict=True):
            ascends &= list(shares) == sorted(shares)
        has_room_for_all = self.capacities[-1:] == ((1, 1),)
        if not has_room_for_all or not ascends:
            raise FieldError(
                self,
                "capacities",
                "give pairs that ascend to (1, 1), e.g. ((0.5, 0.5), (1, 1))",
            )
