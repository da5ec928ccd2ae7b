"""Stages with steps in no time that crash where they are told to, and the imitate stage alone."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from slpo_jax.config import config_checks, read_config
from slpo_jax.run import train_imitation, train_rl, train_stage
from slpo_jax.run.experiment import Experiment, build
from slpo_jax.run.run_stages import check_stages
from slpo_jax.runtime.mesh import replicate
from slpo_jax.training.optimizer import make_optimizer
from small_run import train


class Crash(Exception):
    """Stands for a kill: nothing is cleaned up."""


def crash(*_: Any, **__: Any) -> None:
    raise Crash


def crash_at(patch: pytest.MonkeyPatch, module: Any, *steps: int) -> None:
    """Have the real train steps that a module makes crash before each of these, once."""
    make = module.make_train_step
    left = list(steps)

    def crashing(*arguments, **settings):
        step_fn = make(*arguments, **settings)

        def step(state, batch):
            if int(state.step) in left[:1]:
                left.pop(0)
                raise Crash
            return step_fn(state, batch)

        return step

    patch.setattr(module, "make_train_step", crashing)


def run_imitation(config, workdir) -> Experiment:
    config_checks.check(config)
    experiment = build(read_config(config), workdir)
    with contextlib.closing(experiment.log):
        check_stages(experiment)
        train(experiment, "imitate")
    return experiment


@functools.cache
def _update_of(optimizer):
    """(state, trained part of its parameters, a number) -> the state after an update by gradients of this number."""

    @jax.jit
    def update(state, part, number):
        grads = jax.tree.map(lambda p: jnp.full_like(p, number), part)
        updates, opt_state = optimizer.update(grads, state.opt_state, part)
        params = {**state.params, **optax.apply_updates(part, updates)}
        state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
        return state, optax.tree.norm(params)

    return update


def fake_steps(
    patch: pytest.MonkeyPatch, params: Any, numbers_of: Callable[[Any], np.ndarray]
) -> dict[str, Any]:
    """Have the stages take steps that read and write what real ones do, in no time.

    Args:
        params: what stands for the experiment's.
        numbers_of: what a step depends on, an array of a batch.
    Returns:
        what they got: (stream, number) of the steps, numbers of those with a fresh optimizer, programs, batches'
        shapes, and what came last. At the step `at`, `what` happens; with `learns` they have an accuracy.
    """
    record = {
        "steps": [],
        "fresh": [],
        "slots": {},
        "at": None,
        "what": crash,
        "learns": False,
    }

    def make_train_step(
        loss_fn, optimizer, trained, layout, stream, micro_batches=1, schedule=None
    ):
        shapes = record["slots"].setdefault(len(record["slots"]), set())
        record.update(loss_fn=loss_fn, trained=trained)

        @jax.transfer_guard("allow")
        def step(state, batch):
            now = int(state.step)
            numbers = np.asarray(numbers_of(batch))
            record["steps"].append((stream, now))
            if not any(
                np.asarray(leaf).any() for leaf in jax.tree.leaves(state.opt_state)
            ):
                record["fresh"].append(now)
            shapes.add(numbers.shape)
            if record["at"] == (stream, now):
                record["at"] = None
                record["what"]()
            data = float(numbers.sum())
            key = np.asarray(jax.random.key_data(state.key)).astype(np.float32)
            part = {name: state.params[name] for name in trained}
            state, width = _update_of(optimizer)(
                state, part, np.float32(np.sin(data + now + float(key.sum())))
            )
            record["params"] = jax.tree.map(np.asarray, state.params)
            accuracy = (
                {"accuracy": np.float32(abs(np.sin(now)))} if record["learns"] else {}
            )
            return state, {"loss": jnp.float32(data), "width": width, **accuracy}

        return step

    for module in (train_imitation, train_stage, train_rl):
        patch.setattr(module, "make_train_step", make_train_step)
    for module in (train_imitation, train_stage, train_rl):
        patch.setattr(
            module, "make_optimizer", functools.cache(make_optimizer)
        )  # for `_update_of`
    for name in ("initial_params", "abstract_params"):
        patch.setattr(Experiment, name, lambda self, *_: replicate(params, self.mesh))
    return record
