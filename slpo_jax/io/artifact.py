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
        value: what was made, if it isn't a file.
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
        files: in the same folder or below; those that don't exist are left out.
    """
    if not hosts.is_first():
        return
    digests = dict[str, str]()
    for file in files:
        if file.is_file():
            name = str(file.relative_to(path.parent))
            digests[name] = file_digest(file)
    # What has no word in JSON becomes null before the digest is made.
    artifact = Artifact(facts, value, digests)
    content = json.loads(to_json(asdict(artifact)))
    content[_DIGEST] = digest(content)
    text = json.dumps(content, indent=1, ensure_ascii=False)
    write_text(path, f"{text}\n")


def read(path: Path, remedy: str = "") -> Artifact | None:
    """Read an artifact as it was written; None where there is none, or a damaged one.

    Args:
        remedy: for the message of a damaged one, which is then an error; "" takes it for absent.
    Raises:
        UserError: see `remedy`.
        OSError: it is there, and can't be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
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


def find_changed(folder: Path, files: Mapping[str, str]) -> dict[str, str]:
    """Return the files of a folder that differ from their digests, and what happened to each."""
    damages = dict[str, str]()
    for name, value in files.items():
        now = file_digest(folder / name)
        if not now:
            damages[name] = "is gone"
        elif now != value:
            damages[name] = "has changed since it was saved"
    return damages


def is_current(path: Path, facts: Any, names: Iterable[str] = ()) -> bool:
    """Tell whether an artifact is there and whole, with files of these names, and was made of these very facts."""
    artifact = read(path)
    if artifact is None or artifact.facts != as_json(facts):
        return False
    if not set(names) <= artifact.files.keys():
        return False
    return not find_changed(path.parent, artifact.files)


def value_of(path: Path, facts: Any) -> Any:
    """Return the value that was made of these very facts; None where there is none."""
    artifact = read(path)
    if artifact is None or artifact.facts != as_json(facts):
        return None
    return artifact.value


def write_arrays(path: Path, facts: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays that were made of some facts, whole or not at all; of several processes the first does so."""
    if not hosts.is_first():
        return
    content = dict(arrays)
    content[_DIGEST] = np.array(_digest(facts, arrays))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    with temporary.open("wb") as file:
        np.savez(file, **content)  # type: ignore[arg-type]
    os.replace(temporary, path)


def read_arrays(path: Path, facts: Any) -> dict[str, np.ndarray] | None:
    """Read the arrays that `write_arrays` wrote of these very facts; None where there are none.

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
        stored_digest = str(arrays.pop(_DIGEST))
        is_whole = stored_digest == _digest(facts, arrays)
    except Exception:
        # A machine that lost power tears files, and a torn archive fails in many ways.
        return None
    return arrays if is_whole else None


def _digest(facts: Any, arrays: Mapping[str, np.ndarray]) -> str:
    contents = {}
    for name, array in arrays.items():
        sha256 = hashlib.sha256(array.tobytes())
        contents[name] = (array.dtype.str, array.shape, sha256.hexdigest())
    return digest([facts, contents])


def first_difference(
    now: Mapping[str, Any], then: Mapping[str, Any]
) -> tuple[str, str, str] | None:
    """Return the first key in which two sets of facts differ, and its two values as JSON of 80 letters at most.

    Those of `now` come first, then the rest, outer ones before inner ones.
    """
    now = flatten(now)
    then = flatten(then)
    gone = sorted(then.keys() - now.keys())
    gone.sort(key=lambda key: key.count("."))
    for key in [*now, *gone]:
        # None as a value is not the same as no value.
        is_in_both = key in now and key in then
        if is_in_both and now[key] == then[key]:
            continue
        return key, _write_value(now, key), _write_value(then, key)
    return None


def _write_value(facts: Mapping[str, Any], key: str) -> str:
    if key not in facts:
        return "unused"
    text = json.dumps(facts[key])
    if len(text) <= 80:
        return text
    return f"{text[:37]} .. {text[-37:]}"


def write_checksums(folder: Path) -> None:
    """Write down the digests of the files of a finished checkpoint or export.

    Args:
        folder: WORKDIR/checkpoints/STAGE/STEP, say.
    """
    write(folder / CHECKSUMS, files=_files(folder))


def read_checksums(folder: Path) -> Mapping[str, str]:
    """Read the digests that lie in a folder, by file; {} where there are none."""
    artifact = read(folder / CHECKSUMS)
    if artifact is None:
        return {}
    return artifact.files


def matches_checksums(folder: Path) -> bool:
    """Tell whether a folder holds exactly the files of its checksums, to the byte."""
    sums = read_checksums(folder)
    named = {folder / name for name in sums}
    present = set(_files(folder))
    if not sums or named != present:
        return False
    return not find_changed(folder, sums)


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
    sums = dict[str, str]()
    for name, value in artifact.files.items():
        if name.startswith(part):
            sums[name] = value
    if not sums:
        return f"{path} lists none of its files"
    damages = find_changed(folder, sums)
    for name, how in damages.items():
        return f"{folder / name} {how}"
    return ""


def _files(folder: Path) -> list[Path]:
    files = list(files_below(folder))
    own = folder / CHECKSUMS
    return [path for path in files if path != own]
