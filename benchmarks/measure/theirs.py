"""The PyTorch witness as the benchmarks time it, on the work that our programs have."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure.workload import Parts, Workload
from slpo_jax.errors import UserError
from slpo_jax.policy.policy import Prompts
from slpo_jax.training.optimizer import OptimizerConfig


class Torch:
    """The PyTorch reference at one (K, G), on trajectories as long as ours.

    Attributes:
        lengths: tau of its next rollouts.
    """

    implementation = "torch"
    compile_seconds: dict[str, float]

    def __init__(self, witness, work: Workload, passes: int, group: int):
        """A `benchmarks.witness.step.Witness` may serve all candidates."""
        self.witness = witness
        self.passes = passes
        self.group = group
        self.objective = work.parts.at(passes, group).objective
        self.lengths = np.zeros(0)
        self.compile_seconds = {}

    def measure(self, work: Workload, step: int) -> dict[str, float]:
        """Seconds of each part of one step."""
        self.witness.objective = self.objective
        self.witness.group = self.group
        batch = work.batch(step)
        prompts = Prompts(
            np.asarray(batch.prompts.tokens), np.asarray(batch.prompts.valid)
        )
        index_N = np.repeat(np.asarray(batch.draw_ids), self.group)
        return self.witness.step(prompts, index_N, work.verify, self.lengths)


def make_witness(work: Workload, compiled_torch: bool):
    """The PyTorch reference with the workload's weights.

    Raises:
        UserError: there is no torch, or no compiler for it.
    """
    return witness_of(
        work.parts,
        work.state.params,
        work.optimizer_config,
        work.end_answers_at,
        compiled_torch,
    )


def witness_of(
    parts: Parts,
    params: Any,
    optimizer_config: OptimizerConfig,
    end_answers_at: int,
    compiled_torch: bool = False,
):
    """The PyTorch reference of these parts, a `benchmarks.witness.step.Witness`.

    Args:
        end_answers_at: the generated token, counted from 0, that is always eos.
    Raises:
        UserError: there is no torch, or no compiler for it.
    """
    try:
        import torch  # no requirement of the benchmarks

        from benchmarks.witness.model import CompileError
        from benchmarks.witness.step import Witness
    except ImportError as error:
        raise UserError(
            f"--torch: {error}; pip install torch==2.13.0, or give --torch none"
        ) from error
    device = "cpu" if jax.default_backend() == "cpu" else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "--torch: this torch has no GPU, but slpo_jax runs on one; install another or give --torch none"
        )
    try:
        return Witness(
            params,
            parts.policy,
            parts.objective,
            parts.group,
            optimizer_config,
            compiled=compiled_torch,
            dtype=getattr(torch, jnp.dtype(parts.policy.reasoner.config.dtype).name),
            device=device,
            end_answers_at=end_answers_at,
        )
    except CompileError as error:
        raise UserError(f"--torch compiled: {error}; give another") from error
