"""Files and folders written whole or not at all, JSON that says what is wrong with it, digests; the hub's files."""

import contextlib
import ctypes
import fcntl
import functools
import glob
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from slpo_jax.errors import UserError, first_line, key_name
from slpo_jax.runtime import hosts

_TICK = 100_000_000  # nanoseconds within which a file that changes may keep its times
_PARTIAL = ".tmp"  # ends the names of what is being written
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # of fcntl.h and stdio.h


def write_text(path: str | Path, text: str) -> None:
    """Write a whole file or nothing: readers and interrupted runs never see half of it.

    Of several processes the first writes.
    """
    if not hosts.is_first():
        return
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(path)
    try:
        # An ordinary open, for the permissions that the umask leaves.
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_utf8(path: str | Path, name: str = "") -> None:
    """Refuse a path that is not UTF-8, such as any with an accent where Python takes the locale C at its word.

    The libraries that read and write parameters can't open it.

    Args:
        name: of the flag, before the path in the message.
    Raises:
        UserError: it is not.
    """
    whole_path = Path(path).expanduser().absolute()
    try:
        str(whole_path).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{name}{path}: the path {str(whole_path)!a} is not UTF-8, as a checkpoint's has to be; set "
            "LC_ALL=C.UTF-8, or rename it"
        ) from None


def _beside(path: Path) -> Path:
    """Return a new hidden name beside a file or folder, for a new version that will replace it."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PARTIAL}")


def check_free(folder: Path, remedy: str = "give another directory") -> None:
    """Refuse a folder to write to that is in use.

    Raises:
        UserError: it exists and is no directory, or not an empty one.
    """
    if folder.is_file():
        raise UserError(f"{folder}: is a file; give a directory")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: exists and is not empty; {remedy}")


@contextlib.contextmanager
def whole_folder(
    folder: Path, replaces: Collection[str] | None = None
) -> Iterator[Path]:
    """Yield another folder, to be filled, that becomes this one when all is written; on an error nothing is new.

    What it replaces stands until then: a kill leaves the one or the other, and perhaps a hidden folder beside it, which
    the next call for the same folder removes.

    Args:
        replaces: names in a folder that is in use which go; others stay where nothing takes their place. None is for a
            folder that is not in use.
    Raises:
        UserError: as `check_free`.
    """
    if replaces is None:
        check_free(folder)
    check_utf8(folder)
    # Of a link, the folder itself is replaced.
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Remove hidden folders that a kill has left, but none that a living process fills.
    for left in folder.parent.glob(f".{glob.escape(folder.name)}.*{_PARTIAL}"):
        if left.is_dir() and not _is_locked(left):
            shutil.rmtree(left, ignore_errors=True)
    new = _beside(folder)
    new.mkdir()
    lock = os.open(new, os.O_RDONLY)
    try:
        # Locked until this process ends, so that nobody else removes it; some file systems have no locks.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield new
        if not folder.exists():
            new.replace(folder)
            return
        # Files that stay get a second name in the new folder, which then takes the old one's place.
        gone = {*(replaces or ()), *(path.name for path in new.iterdir())}

        def leave_out(at: str, _: list[str]) -> Collection[str]:
            return gone if Path(at) == folder else ()

        shutil.copytree(
            folder,
            new,
            symlinks=True,
            dirs_exist_ok=True,
            copy_function=_link,
            ignore=leave_out,
        )
        _exchange(new, folder)
    finally:
        os.close(lock)
        shutil.rmtree(new, ignore_errors=True)  # what was not finished, or the old one


def _is_locked(folder: Path) -> bool:
    """Tell whether a process holds a lock of a folder."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # it has gone
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def _link(source: str, target: str) -> None:
    """Give a file a second name, or where the file system has none make a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _exchange(new: Path, old: Path) -> None:
    """Have two folders swap names: on Linux at once, elsewhere so that a kill leaves both under other names."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename:
        paths = (_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old))
        failed = rename(*paths, _RENAME_EXCHANGE)
        if not failed:
            return
    # Not every file system can: move the old one aside, and back where that fails.
    aside = new.with_name(f"{new.name}.old")
    old.rename(aside)
    try:
        new.rename(old)
    except BaseException:
        aside.rename(old)
        raise
    aside.rename(new)


def read_json(
    path: Path,
    remedy: str = "delete it and run the command again",
    default: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        remedy: for the message where there is none.
        default: returned where the file does not exist; None makes that an error.
    Raises:
        UserError: no such file, or it is no JSON object.
        OSError: it is there, and can't be read.
    """
    if default is not None and not path.exists():
        return default
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: no such file; {remedy}") from None
    except ValueError as error:
        raise UserError(
            f"{path}: is no JSON ({' '.join(str(error).split())}); {remedy}"
        ) from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: is no JSON object; {remedy}")
    return values


def to_json(value: Any, **layout: Any) -> str:
    """Write JSON as `json.dumps` does, with null for NaN and the infinities, for which JSON has no word."""
    return json.dumps(_without_nan(value), allow_nan=False, **layout)


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_json(value: Any) -> Any:
    """Return a value as it comes back from JSON."""
    return json.loads(json.dumps(value))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """List a nested mapping by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def digest(value: Any) -> str:
    """Return the SHA-256 of a JSON value, in hexadecimal."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return a file's SHA-256, in hexadecimal, or "" without one. An unchanged file is read once a process."""
    if not path.is_file():
        return ""
    facts = path.stat()
    changed = max(facts.st_mtime_ns, facts.st_ctime_ns)
    identity = (
        facts.st_dev,
        facts.st_ino,
        facts.st_size,
        facts.st_mtime_ns,
        facts.st_ctime_ns,
    )
    # A file that has just changed may change once more within the clock's tick: don't remember it.
    if time.time_ns() - changed > _TICK:
        return _hash_file(path.absolute(), identity)
    return _hash_file.__wrapped__(path.absolute(), identity)


@functools.lru_cache(maxsize=4096)
def _hash_file(path: Path, _: tuple[int, ...]) -> str:
    """Return the SHA-256 of a file of this identity, size and times."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_digest(path: Path) -> str:
    """Return the SHA-256 of a file, or of names and contents of a directory's files; "" where there is neither."""
    if not path.is_dir():
        return file_digest(path)
    digests = {}
    for file in files_below(path):
        digests[str(file.relative_to(path))] = file_digest(file)
    return digest(digests)


def entries(folder: Path) -> list[Path]:
    """List what lies in a folder, sorted; nothing where there is none.

    Raises:
        OSError: it can't be read, in which `Path.glob` finds nothing.
    """
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def files_below(folder: Path) -> list[Path]:
    """List the files in a folder and all below, sorted.

    Raises:
        OSError: one of the folders can't be read, which `Path.rglob` leaves out.
    """

    def refuse(error: OSError) -> None:
        raise error

    paths = list[Path]()
    for at, _, names in os.walk(folder, onerror=refuse):
        paths += [Path(at) / name for name in names]
    return sorted(path for path in paths if path.is_file())


TEXTS = ("*.json", "merges.txt", "*.jinja", "README.md")  # config, tokenizer and card
_HUB_ID = re.compile(r"([\w.-]+/)?[\w.-]+")


def is_hub_id(text: str) -> bool:
    """Tell whether a text is written as a hub id: "name" or "owner/name"."""
    if not _HUB_ID.fullmatch(text):
        return False
    return not {".", ".."} & set(text.split("/"))


def hub_reachable() -> bool:
    """Tell whether the hub answers its client, which knows HF_HUB_OFFLINE, a proxy and HF_ENDPOINT.

    Without a network `datasets` by itself would try again for half a minute.
    """
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception:  # the client raises errors of several libraries
        return False
    return True


def snapshot(hub_id: str, key: str, patterns: tuple[str, ...] = TEXTS) -> Path:
    """Return the folder of a model's files in the hub's cache, fetched first if need be. Code is never fetched.

    Args:
        key: the config's or flag's name, for messages.
        patterns: of the files that are wanted.
    Raises:
        UserError: it can't be had.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(patterns)))
    except Exception as error:  # as above
        raise UserError(
            f"{key_name(key)}: {hub_id} is no local path, and can't be had from the Hugging Face hub or its cache "
            f"({first_line(error)}); give a local path or check the network"
        ) from None
