"""The work of a step on completions in words: a shipped config's step, on real questions, with rewards that differ."""

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure.workload import Parts, load_file
from slpo_jax.checkpoints.export import export_reasoner
from slpo_jax.config import read_config
from slpo_jax.config.config import rl_of
from slpo_jax.data.batches import batch_indices
from slpo_jax.errors import UserError
from slpo_jax.policy.policy import PromptedBatch
from slpo_jax.run.setup import Setup, assemble
from slpo_jax.run.train_rl import make_optimizer_config, make_training_policy
from slpo_jax.training.optimizer import OptimizerConfig
from slpo_jax.training.rollouts import make_batch

CONFIG = "configs/soft_smollm2.py:grpo"
DTYPES = ("float32", "bfloat16")  # that both sides are tried in


@dataclasses.dataclass(frozen=True)
class Work:
    """What both sides do.

    Attributes:
        parts: policy, objective, reward and group of the step.
        params: the weights.
        batch: round -> `PromptedBatch`, of numpy.
        verify: (tokens int [N, A], problems' indices [N]) -> float rewards [N], on the host.
        facts: what it is, for the header.
    """

    setup: Setup
    parts: Parts
    optimizer_config: OptimizerConfig
    params: dict[str, Any]
    batch: Callable[[int], PromptedBatch]
    verify: Callable[[np.ndarray, np.ndarray], np.ndarray]
    facts: dict[str, Any]


def make_work(
    flags: argparse.Namespace,
    changes: Mapping[str, Any] | None = None,
    file: str = CONFIG,
) -> Work:
    """The step that the shipped config describes, on these problems.

    Args:
        flags: problems, prompts, samples, tokens, and the steps: warmup and rounds.
        changes: further config keys, by dotted name.
        file: what `load_file` takes.
    Raises:
        UserError: no such problems, or no SmolLM2.
    """
    config = load_file(file)
    config.update_from_flattened_dict({
        "data.train": flags.problems, "data.valid": "", "max_answer_tokens": flags.tokens, "rl.group": flags.samples,
        "rl.batch_size": flags.prompts, "rl.top_k": 0, "rl.top_p": 1.0,
        "rl.capacities": ((1.0, 1.0),),  # all completions are full
        **(changes or {}),
    })  # fmt: skip
    setup = assemble(read_config(config))
    objective = setup.config.objective[config.rl.objectives[0]]
    template = setup.template
    devices = setup.mesh.size
    if flags.prompts % devices:
        raise UserError(
            f"--prompts: {flags.prompts} is not a multiple of {devices} devices; give one"
        )
    rl = rl_of(config.rl, objective)
    policy = make_training_policy(setup, rl).with_config(
        banned_ids=(*template.banned_ids, *template.eos_ids)
    )
    rounds = flags.warmup + flags.rounds
    train = setup.train
    drawn = batch_indices(config.seed, 0, len(train), rounds * flags.prompts)
    lengths = [len(train.prompts[index]) for index in drawn]
    slots = (-(-max(lengths) // 16) * 16,)
    most = train.most_tokens(config.seed, rounds, flags.prompts, devices)

    def reward(tokens, references):
        return setup.reward.on_device(tokens, references) | (
            jnp.arange(len(tokens)) % 2 == 0
        )

    def batch(number: int) -> PromptedBatch:
        return make_batch(
            train,
            number,
            config.seed,
            flags.prompts,
            slots,
            setup.references,
            most,
            devices,
        )

    def verify(tokens_NA, index_N):
        asked = [train.problems[index % len(train)] for index in index_N]
        return setup.reward.on_host(tokens_NA, asked).clip(
            np.arange(len(index_N)) % 2 == 0, 1
        )

    params = setup.initial_params()
    facts = {name: getattr(flags, name) for name in ("prompts", "samples", "tokens", "rounds")} | {
        "parameters": sum(x.size for x in jax.tree.leaves(params["reasoner"])), "shards": devices,
        "prompt_tokens": [min(lengths), max(lengths)], "prompt_slots": slots[0],
        "optimizer": config.rl.optimizer.name,
    }  # fmt: skip
    parts = Parts(policy, objective, reward, flags.samples)
    return Work(
        setup, parts, make_optimizer_config(rl, objective), params, batch, verify, facts
    )


def export(setup: Setup, params: Mapping[str, Any], folder: Path) -> None:
    """Weights as transformers opens them at its fastest: out of GGUF it would dequantise in every product.

    Args:
        params: {"reasoner": ...}, and what is not exported.
    """
    checkpoint = setup.checkpoint
    host = {"reasoner": jax.device_get(params["reasoner"])}
    export_reasoner(folder, host, checkpoint, {})
