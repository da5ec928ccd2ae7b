"""Our step as the benchmarks time it: its programs, compiled, and what a measured step says."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure.workload import TRAINED, Parts, Workload
from slpo_jax.policy import noise
from slpo_jax.policy.score import used_slots
from slpo_jax.runtime.mesh import EVERYWHERE, ROWS, Layout, psum_all, replicate
from slpo_jax.training.rl_loss import make_rollout_and_loss
from slpo_jax.training.rollouts import roll_out
from slpo_jax.training.state import make_train_step

PROGRAMS = ("rollout", "surrogate", "gradient", "step")


class Ours:
    """Our step at one (K, G): its four programs, compiled, and how long that took.

    Attributes:
        compile_seconds: by name in `PROGRAMS`.
        lengths: tau of the last measured step's rollouts.
    """

    implementation = "slpo_jax"

    def __init__(
        self,
        work: Workload,
        passes: int,
        group: int,
        rollouts: dict[int, tuple[Any, float]],
    ):
        """Compiles; `rollouts` keeps the rollout program of each G and its seconds, as it doesn't depend on K."""
        self.passes = passes
        self.group = group
        self.lengths = np.zeros(0)
        seconds: dict[str, float] = {}
        parts = work.parts.at(passes, group)
        loss_fn = make_rollout_and_loss(
            parts.policy, parts.objective, parts.reward, group
        )
        step = make_train_step(
            loss_fn, work.optimizer, TRAINED, Layout(work.mesh), "rl"
        )
        params = work.state.params
        batch = work.batch(0)
        key = step_key(work, 0)
        rollout, surrogate, gradient = part_programs(parts, work.mesh)
        if group not in rollouts:
            rollouts[group] = compiled(rollout, params, batch, key)
        self.rollout, seconds["rollout"] = rollouts[group]
        sampled = self.rollout(params, batch, key)
        self.surrogate, seconds["surrogate"] = compiled(
            surrogate, params, batch, *sampled, key
        )
        self.gradient, seconds["gradient"] = compiled(
            gradient, params, batch, *sampled, key
        )
        self.step, seconds["step"] = compiled(step, work.state, batch)
        self.compile_seconds = seconds

    def measure(self, work: Workload, step: int) -> dict[str, float]:
        """Seconds of each program in one step, which advances work.state, and what its rollouts were like."""
        batch = work.batch(step)
        key = step_key(work, step)
        params = work.state.params
        seconds: dict[str, float] = {}
        sampled = time_call(seconds, "rollout", self.rollout, params, batch, key)
        time_call(seconds, "surrogate", self.surrogate, params, batch, *sampled, key)
        time_call(seconds, "gradient", self.gradient, params, batch, *sampled, key)
        del params  # the step donates them
        state = work.state.replace(step=replicate(jnp.int32(step), work.mesh))
        work.state, _ = time_call(seconds, "step", self.step, state, batch)
        seconds["backward"] = seconds.pop("gradient") - seconds["surrogate"]
        seconds["other"] = (
            seconds["step"]
            - seconds["rollout"]
            - seconds["surrogate"]
            - seconds["backward"]
        )
        self.lengths = np.asarray(sampled[0].lengths)
        answers = np.asarray(used_slots(work.parts.policy, sampled[0])[1].sum(axis=1))
        tokens = (1 + self.passes) * int(self.lengths.sum() + answers.sum())
        return {
            **seconds,
            "trajectories_per_second": len(self.lengths) / seconds["step"],
            "tokens_per_second": tokens / seconds["step"],
            "mean_latents": float(self.lengths.mean()),
            "longest_latents": float(self.lengths.max()),
            "mean_answer_tokens": float(answers.mean()),
        }


def compiled(function, *args) -> tuple[Any, float]:
    """The program for these arguments, and the seconds that it took to make."""
    start = time.perf_counter()
    program = function.lower(*args).compile()
    return program, time.perf_counter() - start


def part_programs(parts: Parts, mesh):
    """(rollout, surrogate, gradient), sharded as the train step is."""
    rows = ROWS
    same = EVERYWHERE

    def sharded(function, ins, outs):
        mapped = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=ins,
            out_specs=outs,
            check_vma=False,
        )
        return jax.jit(mapped)

    def loss(params, batch, trajectories, rewards, key):
        value, *_ = parts.objective(
            parts.policy,
            params,
            batch,
            trajectories,
            rewards,
            key,
        )
        return value

    def rollout(params, batch, key):
        return roll_out(parts.policy, params, batch, parts.reward, parts.group, key)

    fixed = (same, rows, rows, rows, same)
    return (
        sharded(rollout, (same, rows, same), rows),
        sharded(lambda *args: psum_all(loss(*args)), fixed, same),
        sharded(lambda *args: psum_all(jax.value_and_grad(loss)(*args)), fixed, same),
    )


def step_key(work: Workload, step: int):
    """The key that the train step makes for itself."""
    return replicate(noise.stream_key(work.state.key, "rl", step), work.mesh)


def time_call(seconds: dict[str, float], name: str, function, *args):
    """The function's result, once it is ready; its seconds go into `seconds[name]`."""
    start = time.perf_counter()
    out = jax.block_until_ready(function(*args))
    seconds[name] = time.perf_counter() - start
    return out
