"""Orbax checkpoints of parameters: what is in them, reading and writing.

Orbax takes a second to import, so that is done where it is used.
"""

from pathlib import Path
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from slpo_jax.errors import UserError
from slpo_jax.io.workdir import StageFolder


def load_params(directory: Path, like: Any) -> Any:
    """The parameters of a stage's newest checkpoint.

    Args:
        directory: `WORKDIR/checkpoints/STAGE`, or one step's directory in it.
        like: parameters of the same shapes, or their `jax.ShapeDtypeStruct`s.
    Raises:
        UserError: no checkpoint there, or one of another model.
    """
    import orbax.checkpoint as ocp

    path = _existing_params_dir(directory)
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            return checkpointer.restore(path, abstract_tree(like))
        except (ValueError, KeyError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{path}: does not fit this config's model ({reason}); set config.gate and config.model as they were"
            ) from None


def save_params(directory: Path, params: Any) -> None:
    """A checkpoint of parameters alone, which `load_params` reads."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory.absolute() / "0" / "params", params)


def stored_params(directory: Path) -> Any:
    """Shapes and types of a checkpoint's parameters, as they were saved.

    Raises:
        UserError: no checkpoint there.
    """
    import orbax.checkpoint as ocp

    # Not by a checkpointer: it would warn that the parameters, one item of a checkpoint, lack the whole's metadata.
    found = ocp.StandardCheckpointHandler().metadata(_existing_params_dir(directory)).tree
    device = SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), found)


def is_checkpoint(directory: Path) -> bool:
    """Whether it is a stage's directory of this project, or one step's in it."""
    return _params_dir(directory) is not None


def _params_dir(directory: Path) -> Path | None:
    if (directory / "params").is_dir():
        return directory / "params"
    found = [directory / str(step) / "params" for step in StageFolder(directory).steps]
    return next((path for path in reversed(found) if path.is_dir()), None)


def _existing_params_dir(directory: Path) -> Path:
    path = _params_dir(directory.absolute())
    if path is None:
        raise UserError(f"config.init: {directory} holds no checkpoint of this project; give WORKDIR/checkpoints/STAGE")
    return path


def abstract_tree(tree: Any) -> Any:
    """The shapes, types and sharding of arrays."""

    import orbax.checkpoint as ocp

    def abstract(x):
        return x if isinstance(x, jax.ShapeDtypeStruct) else ocp.utils.to_shape_dtype_struct(x)

    return jax.tree.map(abstract, tree)
