"""The LoRA adapters of the stage rl: made before its first step, merged after its last.

A checkpoint of a finished stage has them merged into the reasoner, and keeps them apart as PEFT does.
"""

import dataclasses
import functools
import shutil
from pathlib import Path

import jax

from slpo_jax.checkpoints.adapters import write_adapters
from slpo_jax.errors import UserError
from slpo_jax.io.files import whole_folder
from slpo_jax.io.orbax import stored_params
from slpo_jax.models import lora
from slpo_jax.models.parts import ADAPTER, REASONER, Params
from slpo_jax.policy.noise import Stream
from slpo_jax.run.experiment import Stage
from slpo_jax.run.setup import Setup
from slpo_jax.runtime import hosts
from slpo_jax.stages import RL
from slpo_jax.training.stage_checkpoints import StageCheckpoints
from slpo_jax.training.state import TrainState


def init_adapters(setup: Setup, params: Params) -> Params:
    """Make the part ADAPTER, which changes nothing yet; {} where the whole reasoner is trained.

    Raises:
        UserError: a kernel that the reasoner doesn't have.
    """
    config = setup.config.rl.lora
    if not config.rank:
        return {}
    key = jax.random.fold_in(setup.key, Stream.ADAPTERS)
    return {
        ADAPTER: lora.adapter(
            key, params, config.rank, config.kernels, "config.rl.lora"
        )
    }


def list_trained_parts(setup: Setup, params: Params) -> tuple[str, ...]:
    """Return the parts of these parameters that the stage changes: a reasoner's adapters in its place, if any."""
    names = setup.trained_by(RL, params)
    if ADAPTER not in params:
        return names
    return (ADAPTER, *(name for name in names if name != REASONER))


def merge_adapter(setup: Setup, params: Params) -> Params:
    """Return all parts but ADAPTER, if there is one, with that merged, laid out as a state's."""
    if ADAPTER not in params:
        return params
    merge = functools.partial(lora.without_adapter, scale=setup.config.rl.lora.scale)
    specs = setup.layout.specs(jax.eval_shape(merge, params))
    return jax.jit(merge, out_shardings=setup.layout.shardings(specs))(params)


def save_merged(stage: Stage, state: TrainState) -> None:
    """Put merged parameters in the place of a stage's last checkpoint, and adapters, if any, beside as PEFT does."""
    if ADAPTER not in state.params:
        return
    experiment = stage.experiment
    config = experiment.config

    # PEFT's folder names what the adapters are to be put on: the stage before, a folder, or an id of the hub.
    base = (
        stage.start.folder.path if stage.start.name else Path(config.init).expanduser()
    )
    is_folder = stage.start.name or (config.init and base.exists())
    base_name = str(base.absolute()) if is_folder else config.init
    adapters = jax.tree.map(hosts.gather_to_host, state.params[ADAPTER]["lora"])
    if hosts.is_first():
        shutil.rmtree(stage.folder.adapters, ignore_errors=True)
        with whole_folder(stage.folder.adapters) as folder:
            write_adapters(
                folder,
                adapters,
                experiment.reasoner.config,
                config.rl.lora.alpha,
                base_name,
            )

    # The last checkpoint then has a reasoner like every other stage's.
    checkpoints = StageCheckpoints(stage.folder.path)
    whole = dataclasses.replace(
        state, params=merge_adapter(experiment, state.params), opt_state=()
    )
    checkpoints.save(whole, replace=True)
    checkpoints.close()


def find_merged_step(stage: Stage) -> int | None:
    """Return the step of the checkpoint that `save_merged` left before the program was killed; None without one."""
    if not stage.settings.lora.rank:
        return None
    checkpoints = StageCheckpoints(
        stage.folder.path
    )  # which puts what was being replaced back
    step = checkpoints.latest_step
    checkpoints.close()
    if step is None:
        return None
    try:
        parts = stored_params(stage.folder.path).shapes
    except UserError:  # it is damaged, and the one before it has not merged them yet
        return None
    return None if ADAPTER in parts else step
