"""Orbax checkpoints of parameters: shapes, reading and writing.

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
        problem = difference(self.shapes, like)
        if problem:
            raise UserError(
                f"{self.folder}: does not fit this config's model ({problem}); set config.gate, config.model and "
                "config.latent_policy as they were"
            )
        with ocp.StandardCheckpointer() as checkpointer:
            try:
                params = checkpointer.restore(self.folder, abstract_tree(like))
            except Exception as error:
                # Orbax turns some of tensorstore's into bare ones.
                is_bare = type(error) is Exception
                if not is_bare and not isinstance(
                    error, OSError | ValueError | KeyError
                ):
                    raise
                problem = first_line(error.__cause__ or error)
                raise _damage_error(self.folder, problem) from None
        for path, leaf in jax.tree.leaves_with_path(params):
            # What is spread over processes is a running stage's own.
            if not leaf.is_fully_replicated:
                continue
            is_finite = np.isfinite(leaf)
            if not is_finite.all():
                problem = f"{_name(path)} holds values that are not finite"
                raise _damage_error(self.folder, problem)
        return params


def load_params(directory: Path, like: Any = None) -> Any:
    """Read the parameters of a stage's newest checkpoint; arguments and errors as of `stored_params` and its `read`."""
    stored = stored_params(directory)
    return stored.read(like)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _list_shapes(tree: Any) -> dict[str, Any]:
    shapes = dict[str, Any]()
    for path, leaf in jax.tree.leaves_with_path(tree):
        shapes[_name(path)] = leaf.shape
    return shapes


def difference(stored: Any, like: Any) -> str:
    """Describe the first parameter whose shape differs between two trees; "" where none does."""
    there = _list_shapes(stored)
    here = _list_shapes(like)
    for name in here | there:
        shape_there = there.get(name)
        shape_here = here.get(name)
        if shape_here != shape_there:
            return f"{name} is {shape_there} there, {shape_here} here"
    return ""


def _damage_error(path: Path, problem: str) -> UserError:
    """Make the error of parameters that can't be read, with the remedy."""
    step = path.parent
    stage = StageFolder.of(step)
    remedy = f"delete {step}"
    if stage.is_finished:
        goes_on = _goes_on(stage, step.name)
        remedy += f" and {stage.finished}, and run the stage again: {goes_on}"
    else:
        remedy += ", and get or make it again"
    return UserError(f"{path}: is damaged ({problem}); {remedy}")


def _goes_on(stage: StageFolder, lost: str) -> str:
    """Describe how a stage goes on that has lost the checkpoint of a step."""
    newest = None
    for step in stage.steps:
        if str(step) != lost:
            newest = step
    if newest is None:
        return "it begins anew"
    return f"it goes on from the checkpoint of step {newest}"


def save_params(directory: Path, params: Any) -> None:
    """Write a checkpoint of parameters alone, which `load_params` reads.

    Raises:
        SaveError: it can't be written.
    """
    import orbax.checkpoint as ocp

    step = directory.absolute() / "0"
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(step / "params", params)
        write_checksums(step)
    except (OSError, ValueError) as error:
        remedy = "make room, and run the command again"
        raise save_error(directory, error, remedy) from None


def save_error(directory: Path, error: Exception | str, remedy: str) -> SaveError:
    """Make the error of a checkpoint that can't be written.

    Args:
        error: of a save, of which tensorstore's are `ValueError`s, for a full disk as well; or the reason.
    """
    # tensorstore names operation by operation, then what the system said, then its number and settings.
    line = " ".join(str(error).split())
    text, *_ = re.split(r" \[\w+=", line)
    _, _, reason = text.rpartition(": ")
    reason = reason[-200:]
    if isinstance(error, OSError) and error.strerror:
        reason = error.strerror
    problem = f"the checkpoint can't be written ({reason})"
    return SaveError(f"{directory}: {problem}; {remedy}")


def stored_params(directory: Path) -> StoredParams:
    """Find a checkpoint's parameters, and check their files.

    Args:
        directory: `WORKDIR/checkpoints/STAGE`, or one step's directory in it.
    Raises:
        UserError: no checkpoint there, or a damaged one.
    """
    import orbax.checkpoint as ocp

    path = params_dir(directory)
    problem = damage(path.parent, path.name)
    if problem:
        raise _damage_error(path, problem)
    try:
        # Not by a checkpointer: it would warn that the parameters, one item of a checkpoint, lack the whole's metadata.
        handler = ocp.StandardCheckpointHandler()
        tree = handler.metadata(path).tree
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError) as error:
        raise _damage_error(path, first_line(error)) from None
    # Whoever reads them without saying where gets them on one device.
    first, *_ = jax.local_devices()
    device = SingleDeviceSharding(first)

    def on_one_device(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device)

    shapes = jax.tree.map(on_one_device, tree)
    return StoredParams(path, shapes)


def is_checkpoint(directory: Path) -> bool:
    """Tell whether a directory is a stage's of this project, or one step's in it."""
    return _newest(directory) is not None


def _newest(directory: Path) -> Path | None:
    """Return the parameters of one step's directory, or of a stage's newest that has any."""
    folders = [directory]
    stage = StageFolder(directory)
    for step in reversed(stage.steps):
        folders.append(directory / str(step))
    for folder in folders:
        params = folder / "params"
        if params.is_dir():
            return params
    return None


def params_dir(directory: Path) -> Path:
    """Return the folder of a stage's newest parameters, or of one step's.

    Raises:
        UserError: there are none, or the last ones of a finished stage are gone.
    """
    path = _newest(directory.absolute())
    stage = StageFolder(directory)
    # A finished stage has written down its last step, which an older one can't stand for.
    newest = path.parent.name if path else ""
    last = newest
    if stage.is_finished:
        last = stage.finished.read_text().strip()
    if last and newest != last:
        goes_on = _goes_on(stage, last)
        raise UserError(
            f"{directory}: its last checkpoint, of step {last}, is gone; delete {stage.finished} and run the stage "
            f"again: {goes_on}"
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
        if isinstance(x, jax.ShapeDtypeStruct):
            return x
        return ocp.utils.to_shape_dtype_struct(x)

    return jax.tree.map(abstract, tree)


def params_digest(params: Any) -> str:
    """Return the SHA-256 of parameters: names, types, shapes and bytes.

    Not of the checkpoint's files, whose names and layout differ between two savings of the same numbers.
    """
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.asarray(leaf)
        name = jax.tree_util.keystr(path)
        head = f"{name} {array.dtype} {array.shape}\n"
        digest.update(head.encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
