"""The stage rl with `config.rl.lora`: adapters are trained, and its checkpoint has them merged and keeps them apart."""

import dataclasses
import functools
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from slpo_jax.checkpoints.adapters import write_adapters
from slpo_jax.errors import UserError
from slpo_jax.io import hosts
from slpo_jax.io.files import whole_folder
from slpo_jax.io.orbax import stored_params
from slpo_jax.models import lora
from slpo_jax.models.parts import ADAPTER, REASONER, Params
from slpo_jax.stages import RL
from slpo_jax.training.checkpoint import StageCheckpoints
from slpo_jax.training.state import TrainState

if TYPE_CHECKING:
    from slpo_jax.run.experiment import Setup
    from slpo_jax.run.stage import Stage


def fresh(setup: "Setup", params: Params) -> Params:
    """The part ADAPTER, which changes nothing yet; {} where the whole reasoner is trained.

    Raises:
        UserError: a kernel that the reasoner doesn't have.
    """
    config, key = setup.config.rl.lora, jax.random.fold_in(setup.key, 1 << 27)
    if not config.rank:
        return {}
    return {ADAPTER: lora.adapter(key, params, config.rank, config.kernels, "config.rl.lora")}


def trained(setup: "Setup", params: Params) -> tuple[str, ...]:
    """The parts of these parameters that the stage changes: instead of a reasoner its adapters, where it has some."""
    names = setup.trained_by(RL, params)
    return (ADAPTER, *(name for name in names if name != REASONER)) if ADAPTER in params else names


def merged(setup: "Setup", params: Params) -> Params:
    """All parts but ADAPTER, if there is one, with that merged, laid out as a state's."""
    if ADAPTER not in params:
        return params
    merge = functools.partial(lora.without_adapter, scale=setup.config.rl.lora.scale)
    layout = setup.layout
    return jax.jit(merge, out_shardings=layout.shardings(layout.specs(jax.eval_shape(merge, params))))(params)


def leave_merged(stage: "Stage", state: TrainState) -> None:
    """Put merged parameters in the place of the stage's last checkpoint, and the adapters beside it as PEFT does."""
    run, start, init = stage.run, stage.start, stage.run.config.init
    apart = jax.tree.map(hosts.whole, state.params[ADAPTER]["lora"])
    base = start.folder.path if start.name else Path(init).expanduser()
    named = str(base.absolute()) if start.name or (init and base.exists()) else init
    if hosts.is_first():
        shutil.rmtree(stage.folder.adapters, ignore_errors=True)
        with whole_folder(stage.folder.adapters) as made:
            write_adapters(made, apart, run.reasoner.config, run.config.rl.lora.alpha, named)
    checkpoints = StageCheckpoints(stage.folder.path)
    checkpoints.save(dataclasses.replace(state, params=merged(run, state.params), opt_state=()), replace=True)
    checkpoints.close()


def left_merged(stage: "Stage") -> int | None:
    """The step of the checkpoint that `leave_merged` left, after which the program was killed; None without one."""
    if not stage.settings.lora.rank:
        return None
    checkpoints = StageCheckpoints(stage.folder.path)  # which puts what was being replaced back
    step = checkpoints.latest_step
    checkpoints.close()
    try:
        return None if step is None or ADAPTER in stored_params(stage.folder.path) else step
    except UserError:  # it is damaged, and the one before it has not merged them yet
        return None
