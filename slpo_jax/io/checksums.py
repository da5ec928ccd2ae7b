"""Digests of a checkpoint's files, kept beside them, so that what was damaged since is not read for what was saved."""

import json
from pathlib import Path

from absl import logging

from slpo_jax.io import hosts
from slpo_jax.io.files import file_digest, write_text

CHECKSUMS = "checksums.json"
_WHOLE = "_CHECKPOINT_METADATA"


def write_checksums(folder: Path) -> None:
    """Write down what the files of a finished checkpoint are.

    Args:
        folder: WORKDIR/checkpoints/STAGE/STEP.
    """
    if not hosts.is_first():
        return
    found = {name: file_digest(folder / name) for name in _files(folder)}
    write_text(folder / CHECKSUMS, json.dumps(found, indent=1, sort_keys=True) + "\n")


def read_checksums(folder: Path) -> dict[str, str]:
    """The digests that lie in a folder, by file; {} where there are none."""
    try:
        found = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        return {str(name): str(value) for name, value in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def matches_checksums(folder: Path) -> bool:
    """Whether a folder holds what its checksums are of, to the byte, and nothing else."""
    expected = read_checksums(folder)
    return bool(expected) and expected == {name: file_digest(folder / name) for name in _files(folder)}


def edited(folder: Path, suffix: str) -> list[str]:
    """The files with names that end so which are not as their checksums say, or gone."""
    ours = {name: value for name, value in read_checksums(folder).items() if name.endswith(suffix)}
    return [name for name, value in ours.items() if file_digest(folder / name) != value]


def damage(folder: Path, part: str = "") -> str:
    """What has happened to a checkpoint since its checksums were written.

    Args:
        folder: WORKDIR/checkpoints/STAGE/STEP.
        part: look at the files below this folder of it alone; "" is all.
    Returns:
        the first file that is gone or another, and which of the two; "" for a whole checkpoint, or, with a warning, one
        that has none, such as one whose program was killed at that moment.
    """
    try:
        stored = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        expected = {str(name): str(value) for name, value in stored.items()}
    except FileNotFoundError:
        # Orbax deletes a checkpoint file by file; one that is whole always has this one.
        if not part and not (folder / _WHOLE).exists():
            return f"{folder} was being deleted"
        logging.warning("%s: is used unchecked, without its %s nothing tells whether it is damaged", folder, CHECKSUMS)
        return ""
    except (OSError, ValueError, AttributeError):
        return f"{folder / CHECKSUMS} can't be read"
    ours = {name: value for name, value in expected.items() if name.startswith(part)}
    for name, value in ours.items():
        found = file_digest(folder / name)
        if found != value:
            return f"{folder / name} {'has changed since it was saved' if found else 'is gone'}"
    return "" if ours else f"{folder / CHECKSUMS} lists none of its files"


def _files(folder: Path) -> list[str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(folder)) for path in files if path.name != CHECKSUMS)
