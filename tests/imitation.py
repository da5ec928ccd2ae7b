"""The imitate stage alone, with real steps or with ones in no time that crash where they are told to."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_run import train

from slpo_jax.config import read_config, validate
from slpo_jax.io.mesh import replicate
from slpo_jax.run import imitate
from slpo_jax.run.experiment import Experiment, build
from slpo_jax.run.plan import check_stages


class Crash(Exception):
    """Stands for a kill: nothing is cleaned up."""


def run_imitation(config, workdir) -> Experiment:
    validate.check(config)
    experiment = build(read_config(config), workdir)
    try:
        check_stages(experiment)
        train(experiment, "imitate")
    finally:
        experiment.log.close()
    return experiment


def fake_steps(monkeypatch: pytest.MonkeyPatch, params: Any, numbers_of) -> dict[str, Any]:
    """Have the stage take steps that read and write what real ones do, in no time, and crash at the step `at`.

    Args:
        params: what stands for the experiment's.
        numbers_of: what a step depends on, an array of a batch.
    Returns:
        what they got: steps, those with a fresh optimizer, programs, batches' shapes, and what came last.
    """
    record = {"steps": [], "fresh": [], "slots": {}, "at": None}

    def make_train_step(loss_fn, optimizer, trained, layout, stream, micro_batches=1, schedule=None):
        shapes = record["slots"].setdefault(len(record["slots"]), set())
        record.update(loss_fn=loss_fn, trained=trained)

        @jax.transfer_guard("allow")
        def step(state, batch):
            now, numbers = int(state.step), np.asarray(numbers_of(batch))
            record["steps"].append(now)
            if not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state.opt_state)):
                record["fresh"].append(now)
            shapes.add(numbers.shape)
            if record["at"] == now:
                record["at"] = None
                raise Crash
            data = float(numbers.sum())
            part = {name: state.params[name] for name in trained}
            grads = jax.tree.map(lambda p: jnp.full_like(p, 2 + np.sin(data + now)), part)
            updates, opt_state = optimizer.update(grads, state.opt_state, part)
            params = {**state.params, **optax.apply_updates(part, updates)}
            record["params"] = jax.tree.map(np.asarray, params)
            return state.replace(step=state.step + 1, params=params, opt_state=opt_state), {"loss": jnp.float32(data)}

        return step

    monkeypatch.setattr(imitate, "make_train_step", make_train_step)
    for name in ("initial_params", "abstract_params"):
        monkeypatch.setattr(Experiment, name, lambda self, *_: replicate(params, self.mesh))
    return record
