"""A policy: a reasoner, the law of its thought, and how rollouts think, stop and answer."""

import dataclasses
from typing import Literal

from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy.latent_policies import LatentPolicy
from slpo_jax.policy.noise import DropoutWhere

Stopping = Literal["sample", "threshold", "length"]


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How to think and to answer.

    Attributes:
        max_latents: T; 0 is explicit text alone.
        answer_slots: A; at most A tokens are generated, the end-of-sequence token included.
        closing_ids: of the marker between thought and answer, all of which are fed; () is none, and the first answer
            token comes out of the thought's last position.
        eos_ids: of the tokens that end an answer, each of them; the first stands for all where texts are read.
        pad_id: of what follows the end.
        dropout_rate: p; 0 is without dropout.
        dropout_where: see `noise.DropoutConfig`.
        latent_policy_noise: whether the latent policy draws with its own noise, where it has any.
        stopping: "sample" (Bernoulli(rho_t), the law of training), "threshold" (first rho_t >= threshold, Alg. 1) or
            "length" (a given number of latents a row).
        temperature: of the answer tokens; 0 is greedy.
        top_k, top_p: what is left to sample from, see `sampling.most_likely`.
        banned_ids: tokens that are never generated.
    """

    max_latents: int
    answer_slots: int
    closing_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    pad_id: int
    dropout_rate: float = 0.1
    dropout_where: DropoutWhere = "thought"
    latent_policy_noise: bool = True
    stopping: Stopping = "sample"
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    banned_ids: tuple[int, ...] = ()

    @property
    def suffix_slots(self) -> int:
        """Slots after the thought: of the marker and of the answer, whose last token is not fed after a marker."""
        return self.answer_slots + self.closing_slots

    @property
    def closing_slots(self) -> int:
        """How many of them no answer token comes out of: those of the marker but its last."""
        return max(len(self.closing_ids) - 1, 0)


@dataclasses.dataclass(frozen=True)
class Policy:
    """Static: all of it is known when a program is traced.

    Attributes:
        reasoner: the model.
        latent_policy: the law of a step of thought.
        config: of rollouts, which scoring mirrors.
        capacities: (share of a prompt's G*T latent slots, share of its G*A answer slots) that a scoring pass has room
            for, ascending to (1, 1). Each pair is a program of its own; no result depends on them.
        layout: of a scoring pass: a prompt's G trajectories side by side in one row ("packed"), or a row each ("rows"),
            for long ones: a position then attends to its own trajectory's slots alone.
    """

    reasoner: Reasoner
    latent_policy: LatentPolicy
    config: RolloutConfig
    capacities: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    layout: Literal["packed", "rows"] = "packed"

    @property
    def stops_itself(self) -> bool:
        """Whether the gate decides on the length, which then has a likelihood."""
        return self.config.stopping != "length"

    def row_of(self, group: int) -> int:
        """Trajectories in a row of a scoring pass, of a prompt's G."""
        return group if self.layout == "packed" else 1

    def having(self, **changes) -> "Policy":
        """The policy with other values in its `RolloutConfig`."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **changes))

    def without_noise(self) -> "Policy":
        """The deterministic policy: no dropout, no noise of the latent policy's, and greedy answers."""
        return self.having(dropout_rate=0.0, latent_policy_noise=False, temperature=0.0)
