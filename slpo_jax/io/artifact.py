"""What was made of some facts, known again by digests: nothing stale, changed or half written is taken for it.

An artifact is a JSON file of the facts that it was made of, a value, the digests of the files that belong to it, and
one of all this. Arrays are an archive with one digest of their facts and bytes. What is not to the byte what was
written is as good as not there, and made again, or where that is for the user to say, one line. What is there and
can't be read is neither: the system's error says so.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from slpo_jax.errors import UserError
from slpo_jax.io.files import (
    as_json,
    digest,
    file_digest,
    files_below,
    flatten,
    to_json,
    write_text,
)
from slpo_jax.runtime import hosts

CHECKSUMS = "checksums.json"
_WHOLE = "_CHECKPOINT_METADATA"
_DIGEST = "digest"


@dataclass(frozen=True)
class Artifact:
    """The content of an artifact's file.

    Attributes:
        facts: what it was made of, as it comes back from JSON.
        value: what was made, if that is no file.
        files: digests of the files that belong to it, by name.
    """

    facts: Any = None
    value: Any = None
    files: Mapping[str, str] = field(default_factory=dict)


def write(
    path: Path, facts: Any = None, value: Any = None, files: Iterable[Path] = ()
) -> None:
    """Write an artifact, whole or not at all; of several processes the first does so.

    Args:
        files: as far as they are there; in the same folder or below.
    """
    if hosts.is_first():
        digests = {
            str(file.relative_to(path.parent)): file_digest(file)
            for file in files
            if file.is_file()
        }
        # What has no word in JSON becomes null before the digest is made.
        content = json.loads(to_json(asdict(Artifact(facts, value, digests))))
        text = json.dumps(
            content | {_DIGEST: digest(content)}, indent=1, ensure_ascii=False
        )
        write_text(path, f"{text}\n")


def read(path: Path, remedy: str = "") -> Artifact | None:
    """Read an artifact as it was written; None where there is none, or a damaged one.

    Args:
        remedy: what there is to do about a damaged one, which then is an error.
    Raises:
        UserError: see `remedy`.
        OSError: it is there, and can't be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        is_whole = content.pop(_DIGEST) == digest(content)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, AttributeError, KeyError):
        is_whole = False
    if is_whole:
        return Artifact(**content)
    if remedy:
        raise UserError(f"{path}: is damaged; {remedy}")
    return None


def changed(folder: Path, files: Mapping[str, str]) -> dict[str, str]:
    """Return the files of a folder that are not to the byte what their digests say, and what happened to each."""
    now = {name: file_digest(folder / name) for name in files}
    others = [name for name, value in files.items() if now[name] != value]
    return {
        name: "has changed since it was saved" if now[name] else "is gone"
        for name in others
    }


def is_current(path: Path, facts: Any, names: Iterable[str] = ()) -> bool:
    """Tell whether an artifact is there and whole, with files of these names, and was made of these very facts."""
    artifact = read(path)
    if (
        artifact is None
        or artifact.facts != as_json(facts)
        or not set(names) <= artifact.files.keys()
    ):
        return False
    return not changed(path.parent, artifact.files)


def value_of(path: Path, facts: Any) -> Any:
    """Return the value that was made of these very facts; None where there is none."""
    artifact = read(path)
    return (
        artifact.value
        if artifact is not None and artifact.facts == as_json(facts)
        else None
    )


def write_arrays(path: Path, facts: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays that were made of some facts, whole or not at all; of several processes the first does so."""
    if hosts.is_first():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".part")
        with temporary.open("wb") as file:
            np.savez(file, **arrays, **{_DIGEST: np.array(_digest(facts, arrays))})  # type: ignore[arg-type]
        os.replace(temporary, path)


def read_arrays(path: Path, facts: Any) -> dict[str, np.ndarray] | None:
    """Read what `write_arrays` wrote there of these very facts; None where there is no such thing.

    Raises:
        OSError: it is there, and can't be opened.
    """
    try:
        file = path.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        with file, np.load(file) as stored:
            arrays = dict(stored)
        return arrays if str(arrays.pop(_DIGEST)) == _digest(facts, arrays) else None
    except (
        Exception
    ):  # a machine that lost power tears files, and a torn archive fails in many ways
        return None


def _digest(facts: Any, arrays: Mapping[str, np.ndarray]) -> str:
    contents = {
        name: (x.dtype.str, x.shape, hashlib.sha256(x.tobytes()).hexdigest())
        for name, x in arrays.items()
    }
    return digest([facts, contents])


def first_difference(
    now: Mapping[str, Any], then: Mapping[str, Any]
) -> tuple[str, str, str] | None:
    """Return the first key in which two sets of facts differ, and its two values as JSON of 80 letters at most.

    Those of `now` come first, then the rest, outer ones before inner ones.
    """
    now = flatten(now)
    then = flatten(then)
    for key in [
        *now,
        *sorted(then.keys() - now.keys(), key=lambda key: (key.count("."), key)),
    ]:
        if (key in now, now.get(key)) != (key in then, then.get(key)):
            texts = [
                json.dumps(facts[key]) if key in facts else "unused"
                for facts in (now, then)
            ]
            is_now, was = (
                text if len(text) <= 80 else f"{text[:37]} .. {text[-37:]}"
                for text in texts
            )
            return key, is_now, was
    return None


def write_checksums(folder: Path) -> None:
    """Write down what the files of a finished checkpoint or export are.

    Args:
        folder: WORKDIR/checkpoints/STAGE/STEP, say.
    """
    write(folder / CHECKSUMS, files=_files(folder))


def read_checksums(folder: Path) -> Mapping[str, str]:
    """Read the digests that lie in a folder, by file; {} where there are none."""
    return (read(folder / CHECKSUMS) or Artifact()).files


def matches_checksums(folder: Path) -> bool:
    """Tell whether a folder holds what its checksums are of, to the byte, and nothing else."""
    sums = read_checksums(folder)
    return (
        bool(sums)
        and {folder / name for name in sums} == set(_files(folder))
        and not changed(folder, sums)
    )


def damage(folder: Path, part: str = "") -> str:
    """Tell what has happened to a checkpoint since its checksums were written.

    Args:
        folder: WORKDIR/checkpoints/STAGE/STEP.
        part: look at the files below this folder of it alone; "" is all.
    Returns:
        the first file that is gone or another, and which of the two; "" for a whole checkpoint, or, with a warning, one
        that has none, such as one whose program was killed at that moment.
    """
    path = folder / CHECKSUMS
    if not path.exists():
        # Orbax deletes a checkpoint file by file; one that is whole always has this one.
        if not part and not (folder / _WHOLE).exists():
            return f"{folder} was being deleted"
        logging.warning(
            "%s: is used unchecked, without its %s nothing tells whether it is damaged",
            folder,
            CHECKSUMS,
        )
        return ""
    artifact = read(path)
    if artifact is None:
        return f"{path} can't be read"
    digests = {
        name: value for name, value in artifact.files.items() if name.startswith(part)
    }
    if not digests:
        return f"{path} lists none of its files"
    return next(
        (f"{folder / name} {how}" for name, how in changed(folder, digests).items()), ""
    )


def _files(folder: Path) -> list[Path]:
    return [path for path in files_below(folder) if path != folder / CHECKSUMS]
