"""The work that the benchmarks time: models, random weights and prompts, the same for every implementation."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slpo_jax.config import read_config
from slpo_jax.config.config import rl_of
from slpo_jax.config.registry import read_config_file
from slpo_jax.data.batches import EncodedProblems
from slpo_jax.data.problem import Problem
from slpo_jax.data.templates import Template
from slpo_jax.errors import UserError
from slpo_jax.models.reasoner import Reasoner
from slpo_jax.policy.policy import Policy, PromptedBatch, Prompts
from slpo_jax.rewards.reward import RewardFn
from slpo_jax.run.experiment import Experiment, build
from slpo_jax.run.train_rl import make_training_policy
from slpo_jax.runtime.mesh import Layout, shard_rows
from slpo_jax.training.objectives.slpo import Slpo
from slpo_jax.training.optimizer import OptimizerConfig, make_optimizer
from slpo_jax.training.rollouts import make_batch
from slpo_jax.training.state import TrainState, init_state

ROOT = Path(__file__).resolve().parents[2]
TRAINED = ("reasoner", "gate")


@dataclasses.dataclass(frozen=True)
class Shapes:
    """What is measured.

    Attributes:
        config: a file in configs/.
        changes: config keys that differ, by dotted name.
        prompts: the default of --prompts.
        answer_tokens: length of the rollouts' answers, eos included.
        prompt_tokens: least and most of random prompts; None for problems of config.data.train.
    """

    config: str
    changes: dict[str, Any]
    prompts: int
    answer_tokens: int
    prompt_tokens: tuple[int, int] | None = None


# Of the text, GPT-2's shapes need the size of the vocabulary alone: 50,257 tokens and COCONUT's three.
GPT2 = {
    "init": "",
    "tokenizer": "synthetic:50199",
    "data.train": "synthetic:train",
    "data.valid": "",
    "data.synthetic.train_size": 64,
    "data.synthetic.valid_size": 64,
    "data.synthetic.test_size": 64,
}
SHAPES = {
    "graph": Shapes("graph.py", {}, prompts=32, answer_tokens=3),  # "### n5" and eos
    "gpt2": Shapes(
        "coconut_gpt2.py",
        GPT2 | {"prompt_slots": (72,)},
        prompts=2,
        answer_tokens=5,
        prompt_tokens=(68, 72),
    ),
}


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a step is made of.

    Attributes:
        objective: the paper's, K among its settings; elsewhere than in `Workload` any.
        group: G.
    """

    policy: Policy
    objective: Any
    reward: RewardFn
    group: int

    def at(self, passes: int, group: int) -> "Parts":
        """The same at another K and G."""
        return dataclasses.replace(
            self,
            objective=dataclasses.replace(self.objective, passes=passes),
            group=group,
        )


@dataclasses.dataclass
class Workload:
    """The same work for every configuration and every implementation.

    Attributes:
        parts: of the step; a configuration replaces K and G.
        optimizer_config, optimizer: the stage's.
        state: its parameters are the random weights.
        batch: measured or warm-up step -> sharded `PromptedBatch`.
        verify: (tokens int [N, A], problems' indices [N]) -> float rewards [N], on the host.
        end_answers_at: the generated token, counted from 0, that is always eos.
        facts: what it is, for the header.
    """

    parts: Parts
    optimizer_config: OptimizerConfig
    optimizer: Any
    mesh: jax.sharding.Mesh
    state: TrainState
    batch: Callable[[int], PromptedBatch]
    verify: Callable[[np.ndarray, np.ndarray], np.ndarray]
    end_answers_at: int
    facts: dict[str, Any]


def load_file(name: str):
    """What a config file of the checkout says.

    Args:
        name: FILE or FILE:ARGUMENT.
    """
    return read_config_file(str(ROOT / name))


def load_config(shapes: Shapes):
    """The shapes' config, changes applied."""
    config = load_file(f"configs/{shapes.config}")
    config.update_from_flattened_dict(shapes.changes)
    return config


def make_workload(shapes: Shapes, config, prompts: int, workdir: Path) -> Workload:
    """Builds models, weights and input as training does.

    Args:
        config: from `load_config`.
        prompts: B, over all devices.
        workdir: where `build` may write.
    Raises:
        UserError: the prompts can't be shared out over the devices.
    """
    experiment = build_ending(shapes, config, workdir)
    mesh = experiment.mesh
    template = experiment.template
    if prompts % mesh.size:
        raise UserError(
            f"--prompts: {prompts} is not a multiple of {mesh.size} devices; give one"
        )
    real = make_parts(experiment)
    parts = dataclasses.replace(
        real,
        reward=lambda tokens, references: (
            real.reward(tokens, references) | (jnp.arange(len(tokens)) % 2 == 0)
        ),
    )
    params = random_weights(experiment)
    optimizer_config = experiment.optimizer_config("rl", config.rl.steps)
    optimizer = make_optimizer(optimizer_config)
    state = init_state(params, TRAINED, optimizer, experiment.key, Layout(mesh))

    most = experiment.train.most_tokens(
        config.seed, config.rl.steps, prompts, mesh.size
    )

    def batch(step: int):
        references = experiment.references
        train = experiment.train
        slots = config.prompt_slots
        made = make_batch(
            train, step, config.seed, prompts, slots, references, most, mesh.size
        )
        if shapes.prompt_tokens:
            below = template.closing_ids[0]
            seed = (config.seed, step)
            made = made.replace(
                prompts=random_prompts(
                    prompts, slots[0], shapes.prompt_tokens, below, seed
                )
            )
        return shard_rows(made, mesh)

    def verify(tokens_NA, index_N):
        rewards = experiment.reward.on_host(
            tokens_NA, [experiment.train.problems[i] for i in index_N]
        )
        return rewards.clip(np.arange(len(rewards)) % 2 == 0, 1)

    lengths = np.concatenate([batch(step).prompts.lengths for step in range(4)])
    facts = {
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "prompts": prompts,
        "shards": mesh.size,
    }
    facts |= {"prompt_tokens": [int(lengths.min()), int(lengths.max())]} | _settings(
        config
    )
    return Workload(
        parts,
        optimizer_config,
        optimizer,
        mesh,
        state,
        batch,
        verify,
        shapes.answer_tokens - 1,
        facts,
    )


def _settings(config) -> dict[str, Any]:
    """The config's part of a workload's facts."""
    return {
        "activations": config.model.dtype,
        "prompt_slots": config.prompt_slots[0],
        "latent_slots": config.max_latents,
        "answer_slots": config.max_answer_tokens,
        "dropout": [config.dropout.rate, config.dropout.where],
        "optimizer": config.rl.optimizer.name,
    }


def make_parts(experiment: Experiment) -> Parts:
    """The parts of the step that the config describes."""
    objective = experiment.config.objective["slpo"]
    assert isinstance(objective, Slpo)
    rl = rl_of(experiment.config.rl, objective)
    policy = make_training_policy(experiment, rl)
    return Parts(
        policy, objective, experiment.reward.on_device, experiment.config.rl.group
    )


def build_ending(shapes: Shapes, config, workdir: Path) -> Experiment:
    """What the config describes, but answers in rollouts end where the shapes say."""
    experiment = build(read_config(config), workdir)
    slot = config.max_latents + shapes.answer_tokens - 1
    reasoner = ending_answers(experiment.reasoner, experiment.template.eos_id, slot)
    return dataclasses.replace(
        experiment, policy=dataclasses.replace(experiment.policy, reasoner=reasoner)
    )


def random_weights(experiment: Experiment) -> dict[str, Any]:
    """Initial parameters; the gate's are 0, with the bias that makes the mean trajectory T/2 latents long."""
    params = experiment.initial_params()
    gate = jax.tree.map(jnp.zeros_like, params["gate"])
    gate["out"]["bias"] += half_way_bias(experiment.config.max_latents)
    return {**params, "gate": gate}


def random_prompts(
    rows: int, slots: int, lengths: tuple[int, int], vocabulary: int, seed
) -> Prompts:
    """Left-padded prompts of random tokens, their lengths evenly spread between the two given."""
    tokens = np.random.default_rng(seed).integers(
        0, vocabulary, size=(rows, slots), dtype=np.int32
    )
    lengths_B = np.linspace(*lengths, rows).round().astype(int)
    return Prompts(tokens, np.arange(slots) >= slots - lengths_B[:, None])


def random_problems(
    count: int, quantiles, template: Template, seed: int
) -> EncodedProblems:
    """Problems of random tokens, without texts, in random order.

    Args:
        quantiles: (share, tokens) of the lengths. One length is drawn from each of `count` equal shares of their
            distribution, so that few problems have its mean too.
    """
    rng = np.random.default_rng(seed)
    shares = rng.permutation((np.arange(count) + rng.random(count)) / count)
    lengths = np.interp(shares, *np.transpose(quantiles)).round().astype(int)
    prompts = [
        rng.integers(0, template.closing_ids[0], size=length).tolist()
        for length in lengths
    ]
    nothing: list[list[Any]] = [[] for _ in prompts]
    return EncodedProblems(
        (Problem("", (), "0"),) * count, prompts, nothing, nothing, template
    )


def half_way_bias(steps: int) -> float:
    """The gate's bias with which the mean first stop, forced at `steps`, is `steps` / 2."""
    low = 0.0
    high = 1.0
    for _ in range(60):
        rho = (low + high) / 2
        mean = sum((1 - rho) ** t for t in range(steps))  # P(tau > t)
        low, high = (rho, high) if mean > steps / 2 else (low, rho)
    return float(np.log(rho / (1 - rho))) if rho < 1 else 20.0


def ending_answers(reasoner: Reasoner, eos_id: int, slot: int) -> Reasoner:
    """The reasoner, but from cache slot `slot` on its next token is eos: random weights never say that they are done.

    Scoring passes have no cache, and are as they were.
    """

    def forward(params, *args, cache=None, start=0, **kwargs):
        hidden_BLD, new = reasoner.forward(
            params, *args, cache=cache, start=start, **kwargs
        )
        if cache is not None:
            # Embeddings are tied: the token most like eos's own embedding is eos.
            hidden_BLD = jnp.where(
                start >= slot, reasoner.embed(params, jnp.array([[eos_id]])), hidden_BLD
            )
        return hidden_BLD, new

    return dataclasses.replace(reasoner, forward=forward)
