"""The work that the benchmark of Pass@k evaluation times: shapes, problems, weights."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.measure.workload import (
    GPT2,
    Shapes,
    build_ending,
    random_problems,
    random_weights,
)
from benchmarks.measure.workload import SHAPES as STEP_SHAPES
from slpo_jax.data.batches import EncodedProblems
from slpo_jax.errors import UserError
from slpo_jax.run.experiment import Experiment


@dataclasses.dataclass(frozen=True)
class PasskShapes(Shapes):
    """What is measured; `prompts` is the default of --problems.

    Attributes:
        test_set: the problems, a name in config.data.eval; "" for random prompts.
        prompt_quantiles: (share, tokens) of the random prompts' lengths, the shares from 0 to 1.
    """

    test_set: str = ""
    prompt_quantiles: tuple[tuple[float, int], ...] = ()


# Of the test set's prompts under GPT-2's tokenizer; their mean is about 59.
GSM8K_LENGTHS = (
    (0, 23),
    (0.05, 32),
    (0.25, 43),
    (0.5, 55),
    (0.75, 70),
    (0.95, 100),
    (0.99, 121),
    (1, 184),
)
SHAPES = {
    "graph": PasskShapes(
        "graph.py",
        {},
        prompts=1000,
        answer_tokens=STEP_SHAPES["graph"].answer_tokens,
        test_set="depth_2",
    ),
    "gpt2": PasskShapes(
        "coconut_gpt2.py",
        GPT2
        | {
            "max_latents": 6,
            "evaluate.batch_size": 128,
        },  # COCONUT's published budget of latents
        prompts=16,
        answer_tokens=STEP_SHAPES["gpt2"].answer_tokens,
        prompt_quantiles=GSM8K_LENGTHS,
    ),
}


@dataclasses.dataclass
class Work:
    """The same evaluation for every implementation.

    Attributes:
        experiment: gives the evaluator; answers end at `answer_tokens`.
        params: all parts.
        samples: k.
        answer_tokens: of every rollout, eos included.
    """

    experiment: Experiment
    params: dict[str, Any]
    problems: EncodedProblems
    samples: int
    answer_tokens: int


def make_work(
    shapes: PasskShapes, config, problems: int, samples: int, workdir: Path
) -> Work:
    """Builds the model, its random weights and the problems.

    Args:
        config: from `load_config`.
        problems: how many.
        workdir: where `build` may write.
    Raises:
        UserError: the test set has fewer problems.
    """
    experiment = build_ending(shapes, config, workdir)
    if shapes.test_set:
        found = experiment.test_set(shapes.test_set)
        if problems > len(found):
            raise UserError(
                f"--problems: {problems} is more than the test set's {len(found)}; give at most as many"
            )
        chosen = found.subset(range(problems))
    else:
        chosen = random_problems(
            problems, shapes.prompt_quantiles, experiment.template, config.seed
        )
    return Work(
        experiment, random_weights(experiment), chosen, samples, shapes.answer_tokens
    )


def facts_of(work: Work) -> dict[str, Any]:
    """What the work is, for the header."""
    config = work.experiment.config
    lengths = list(map(len, work.problems.prompts))
    return {
        "parameters": sum(x.size for x in jax.tree.leaves(work.params)),
        "activations": config.model.dtype,
        "problems": len(work.problems),
        "k": work.samples,
        "batch_size": config.evaluate.batch_size,
        "mean_prompt_tokens": round(float(np.mean(lengths)), 1),
        "largest_prompt_tokens": max(lengths),
        "latents_T": config.max_latents,
        "answer_tokens": work.answer_tokens,
        "answer_slots": work.experiment.evaluator.policy.config.answer_slots,
        "dropout": [config.dropout.rate, config.dropout.where],
        "shards": work.experiment.mesh.size,
    }
