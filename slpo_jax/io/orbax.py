"""Orbax checkpoints of parameters: what is in them, reading and writing.

Orbax takes a second to import, so that is done where it is used.
"""

import hashlib
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from slpo_jax.errors import SaveError, UserError, first_line
from slpo_jax.io.artifact import damage, write_checksums
from slpo_jax.io.workdir import StageFolder


class StoredParams(NamedTuple):
    """The parameters of a checkpoint that were found whole, to the byte, and not read yet.

    Attributes:
        folder: where they lie.
        shapes: their shapes and types, as they were saved.
    """

    folder: Path
    shapes: Any

    def read(self, like: Any = None) -> Any:
        """Read the parameters.

        Args:
            like: parameters of the same shapes, or their `jax.ShapeDtypeStruct`s; None is as they were saved.
        Raises:
            UserError: they are of another model, or damaged, with NaN among their values.
        """
        import orbax.checkpoint as ocp

        like = self.shapes if like is None else like
        if what := difference(self.shapes, like):
            raise UserError(
                f"{self.folder}: does not fit this config's model ({what}); set config.gate, config.model and "
                "config.latent_policy as they were"
            )
        with ocp.StandardCheckpointer() as checkpointer:
            try:
                params = checkpointer.restore(self.folder, abstract_tree(like))
            except Exception as error:
                # Orbax turns some of tensorstore's into bare ones.
                if (
                    not isinstance(error, OSError | ValueError | KeyError)
                    and type(error) is not Exception
                ):
                    raise
                raise _damaged(
                    self.folder, first_line(error.__cause__ or error)
                ) from None
        for at, leaf in jax.tree.leaves_with_path(params):
            # What is spread over processes is a running stage's own.
            if leaf.is_fully_replicated and not np.isfinite(leaf).all():
                raise _damaged(
                    self.folder, f"{_name(at)} holds values that are not finite"
                )
        return params


def load_params(directory: Path, like: Any = None) -> Any:
    """Read the parameters of a stage's newest checkpoint; arguments and errors as of `stored_params` and its `read`."""
    return stored_params(directory).read(like)


def _name(at: Any) -> str:
    return jax.tree_util.keystr(at, simple=True, separator="/")


def difference(stored: Any, like: Any) -> str:
    """Tell the first parameter in whose shape two trees differ, in words; "" where they don't."""
    there, here = (
        {_name(at): x.shape for at, x in jax.tree.leaves_with_path(tree)}
        for tree in (stored, like)
    )
    different = (name for name in here | there if here.get(name) != there.get(name))
    return next(
        (
            f"{name} is {there.get(name)} there, {here.get(name)} here"
            for name in different
        ),
        "",
    )


def _damaged(path: Path, problem: str) -> UserError:
    """Make the error of parameters that can't be read, with what there is to do about it."""
    step = path.parent
    stage = StageFolder.of(path.parent)
    remedy = f"delete {step}"
    if stage.is_finished:
        remedy += f" and {stage.finished}, and run the stage again: {_goes_on(stage, step.name)}"
    else:
        remedy += ", and get or make it again"
    return UserError(f"{path}: is damaged ({problem}); {remedy}")


def _goes_on(stage: StageFolder, lost: str) -> str:
    """Tell what a stage does that has lost the checkpoint of a step."""
    others = [step for step in stage.steps if str(step) != lost]
    return (
        f"it goes on from the checkpoint of step {others[-1]}"
        if others
        else "it begins anew"
    )


def save_params(directory: Path, params: Any) -> None:
    """Write a checkpoint of parameters alone, which `load_params` reads.

    Raises:
        SaveError: it can't be written.
    """
    import orbax.checkpoint as ocp

    try:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(directory.absolute() / "0" / "params", params)
        write_checksums(directory.absolute() / "0")
    except (OSError, ValueError) as error:
        raise unwritten(
            directory, error, "make room, and run the command again"
        ) from None


def unwritten(directory: Path, error: Exception | str, remedy: str) -> SaveError:
    """Make the error of a checkpoint that can't be written.

    Args:
        error: of a save, of which tensorstore's are `ValueError`s, for a full disk as well; or the reason.
    """
    # tensorstore names operation by operation, then what the system said, then its number and settings.
    text = re.split(r" \[\w+=", " ".join(str(error).split()))[0]
    reason = (
        error.strerror
        if isinstance(error, OSError) and error.strerror
        else text.rpartition(": ")[2][-200:]
    )
    return SaveError(
        f"{directory}: the checkpoint can't be written ({reason}); {remedy}"
    )


def stored_params(directory: Path) -> StoredParams:
    """Find a checkpoint's parameters, and check their files.

    Args:
        directory: `WORKDIR/checkpoints/STAGE`, or one step's directory in it.
    Raises:
        UserError: no checkpoint there, or a damaged one.
    """
    import orbax.checkpoint as ocp

    path = params_dir(directory)
    if problem := damage(path.parent, path.name):
        raise _damaged(path, problem)
    try:
        # Not by a checkpointer: it would warn that the parameters, one item of a checkpoint, lack the whole's metadata.
        tree = ocp.StandardCheckpointHandler().metadata(path).tree
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError) as error:
        raise _damaged(path, first_line(error)) from None
    device = SingleDeviceSharding(jax.local_devices()[0])
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), tree
    )
    return StoredParams(path, shapes)


def is_checkpoint(directory: Path) -> bool:
    """Tell whether a directory is a stage's of this project, or one step's in it."""
    return _newest(directory) is not None


def _newest(directory: Path) -> Path | None:
    """Return the parameters of one step's directory, or of a stage's newest that has any."""
    steps = [
        directory,
        *(directory / str(step) for step in reversed(StageFolder(directory).steps)),
    ]
    return next((step / "params" for step in steps if (step / "params").is_dir()), None)


def params_dir(directory: Path) -> Path:
    """Return the folder of a stage's newest parameters, or of one step's.

    Raises:
        UserError: there are none, or the last ones of a finished stage are gone.
    """
    path = _newest(directory.absolute())
    stage = StageFolder(directory)
    last = stage.finished.read_text().strip() if stage.is_finished else ""
    if last and (path is None or path.parent.name != last):
        raise UserError(
            f"{directory}: its last checkpoint, of step {last}, is gone; delete {stage.finished} and run the stage "
            f"again: {_goes_on(stage, last)}"
        )
    if path is not None:
        return path
    raise UserError(
        "config.init",
        f"{directory} holds no checkpoint of this project; give WORKDIR/checkpoints/STAGE",
    )


def abstract_tree(tree: Any) -> Any:
    """Return the shapes, types and sharding of arrays."""

    import orbax.checkpoint as ocp

    def abstract(x):
        return (
            x
            if isinstance(x, jax.ShapeDtypeStruct)
            else ocp.utils.to_shape_dtype_struct(x)
        )

    return jax.tree.map(abstract, tree)


def params_digest(params: Any) -> str:
    """Return the SHA-256 of parameters: names, types, shapes and bytes.

    Not of the checkpoint's files, whose names and layout differ between two savings of the same numbers.
    """
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.asarray(leaf)
        digest.update(
            f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode()
        )
        digest.update(array.tobytes())
    return digest.hexdigest()
