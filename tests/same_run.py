"""Is behaviour what it was, bit for bit?

    python tests/same_run.py --write FILE [WORD ..]     run the cases of net_cases.py with all words, keep the digests
    python tests/same_run.py --against FILE [WORD ..]   the same, and say what differs; status 1 where a value does

A name alone that differs (of a parameter, a metric, a key, a file) is said to be renamed. FILE is of one machine, and
one version of jax. In Python `differences` compares two workdirs.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from safetensors.numpy import load_file

from net_cases import CASES, TINY
from slpo_jax.io.workdir import StageFolder
from slpo_jax.training.metrics import CLOCK

Parts = dict[str, dict[str, str]]
_LONGEST = 200  # characters of a value that is shown as it is
_ASIDE = {
    "tensorboard",
    "metrics.jsonl",
    "times.json",
    "report.html",
    "report.md",
    "checksums.json",
    "params",
    "rest",
}
_DERIVED = (
    ".lock",
    ".manifest",
    ".digest.json",
)  # of what is looked at, in whatever words
_MOVING = re.compile(r"commit|version|sha256|digest|seconds|elapsed")
_HEX = re.compile(
    r"\b[0-9a-f]{64}\b"
)  # of what is looked at itself, or of where it lies


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Two checkpoints as `checkpoint_of` reads them, to the bit."""
    assert one.keys() == other.keys()
    for path, leaf in one.items():
        np.testing.assert_array_equal(other[path], leaf, err_msg=path)


def rows_of(workdir: Path, timing: bool = False) -> list[dict[str, Any]]:
    """metrics.jsonl, without what depends on the clock."""
    rows = [
        json.loads(line)
        for line in (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return (
        rows
        if timing
        else [
            {name: value for name, value in row.items() if name not in CLOCK}
            for row in rows
        ]
    )


def checkpoint_of(workdir: Path, stage: str, step: int | None = None) -> dict[str, Any]:
    """Everything in a stage's newest checkpoint, or a step's, by path, and its step; read by Orbax alone."""
    import jax
    import orbax.checkpoint as ocp

    folder = StageFolder((workdir / "checkpoints" / stage).absolute())
    path = folder.path / str(step or folder.steps[-1])
    tree = {}
    with ocp.PyTreeCheckpointer() as reader:
        for part in ("params", "rest"):
            there = ocp.StandardCheckpointHandler().metadata(path / part).tree
            whole = jax.tree.map(
                lambda _: ocp.RestoreArgs(restore_type=np.ndarray), there
            )  # on whatever devices
            tree[part] = reader.restore(path / part, restore_args=whole)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"step": int(path.name)} | {
        jax.tree_util.keystr(at): np.asarray(leaf) for at, leaf in leaves
    }


def assert_same_run(one: Path, other: Path, *stages: str) -> None:
    """The rows of two runs but for the clock's, and these stages' checkpoints, to the bit."""
    assert rows_of(one) == rows_of(other)
    for stage in stages:
        assert_same(checkpoint_of(one, stage), checkpoint_of(other, stage))


def texts_of(workdir: Path) -> dict[str, bytes]:
    """Every file of a run but events, checkpoints, what tells the time, and the pages, which have it too."""
    aside = {
        "tensorboard",
        "checkpoints",
        "metrics.jsonl",
        "times.json",
        ".lock",
        "report.html",
        "report.md",
    }
    files = {
        path.relative_to(workdir): path for path in workdir.rglob("*") if path.is_file()
    }
    return {
        str(name): _timeless(path)
        for name, path in files.items()
        if not aside & set(name.parts)
    }


def _timeless(path: Path) -> bytes:
    """A file's bytes; of report.json those without the curves of the clock."""
    if path.name != "report.json":
        return path.read_bytes()
    report = json.loads(path.read_text(encoding="utf-8"))
    for curves in report.get("training", {}).values():
        for name in (*CLOCK, "elapsed"):
            curves.pop(name, None)
    for row in (*report["eval"].values(), report["average"]):
        for figures in row.values():
            figures.pop("milliseconds", None)
    return json.dumps(report).encode()


def _arrays_of(workdir: Path) -> dict[str, str]:
    """The leaves of every finished stage's last checkpoint."""
    stages = sorted(
        path.parent.name for path in (workdir / "checkpoints").glob("*/finished")
    )
    return {
        k: v
        for stage in stages
        for k, v in flat(checkpoint_of(workdir, stage), f"{stage} ").items()
    }


def differences(one: Path, other: Path) -> list[str]:
    """What differs between two finished runs, a line each; empty if they are the same run.

    Compared are the rows of metrics.jsonl but for the clock's, every array of every stage's last checkpoint, and all
    other files to the byte, but for TensorBoard's and what is drawn of the clock.
    """
    found = []
    for part, leaves_of in (
        ("metrics.jsonl", rows_of),
        ("checkpoints", _arrays_of),
        ("files", texts_of),
    ):
        text = difference(flat(leaves_of(one)), flat(leaves_of(other)))[1]
        found += [f"{part}: {text}"] * bool(text)
    return found


def flat(value: Any, name: str = "") -> dict[str, str]:
    """A tree's leaves by their path, each as its own text, or as a digest where that is long."""
    if isinstance(value, dict):
        return {
            k: v
            for key, each in value.items()
            for k, v in flat(each, f"{name}.{key}".lstrip(".")).items()
        }
    if isinstance(value, list | tuple):
        return flat(dict(enumerate(value)), name)
    if isinstance(value, np.ndarray):
        text = f"{value.dtype}{list(value.shape)} "
        return {
            name: text
            + hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]
        }
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    return {
        name: text
        if len(text) <= _LONGEST
        else hashlib.sha256(text.encode()).hexdigest()[:16]
    }


def _file(path: Path, hidden: dict[str, str]) -> dict[str, str]:
    """A file's leaves: tensors, JSON's values, or the lines of a text, without the folders of this very run."""
    if path.suffix == ".safetensors":
        return flat(load_file(path))
    if path.suffix == ".npz":
        return flat(dict(np.load(path)))
    text = _HEX.sub("DIGEST", _timeless(path).decode(errors="replace"))
    for here, there in hidden.items():
        text = text.replace(here, there)
    if path.suffix == ".json":
        return {
            k: v for k, v in flat(json.loads(text)).items() if not _MOVING.search(k)
        }
    return flat(
        {
            number: line
            for number, line in enumerate(text.splitlines())
            if not _MOVING.search(line)
        }
    )


def files_of(folder: Path, hidden: dict[str, str]) -> dict[str, str]:
    """The leaves of all files of a folder but what is looked at in itself, and what Orbax writes."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder)
        if not (_ASIDE & set(name.parts) or path.name.endswith(_DERIVED)):
            found |= {
                f"{name}: {key}": value for key, value in _file(path, hidden).items()
            }
    return found


@contextlib.contextmanager
def _watched() -> Iterator[tuple[dict[str, str], list[str]]]:
    """What is spread over devices by rows, in order, and what is warned of, while this is open."""
    import jax

    batches = {}
    warnings = []
    make = jax.make_array_from_callback

    def noted(shape, sharding, callback, **more):
        if any(sharding.spec):
            batches[f"{len(batches)}"] = flat(
                np.asarray(callback((slice(None),) * len(shape)))
            )[""]
        return make(shape, sharding, callback, **more)

    def warned(message, *arguments):
        warnings.append(message % arguments)

    with (
        patch.object(jax, "make_array_from_callback", noted),
        patch("absl.logging.warning", warned),
    ):
        yield batches, warnings


def digest(changes: dict[str, Any], workdir: Path) -> Parts:
    """Run a case in a folder, export what it leaves, ask it, and digest all of it."""
    import slpo_jax
    from small_run import load_config

    config = load_config()
    hidden = {
        str(workdir): "WORKDIR",
        str(workdir.parent): "WORK",
        str(Path(config.data.train).parent): "DATA",
    }
    config.update_from_flattened_dict(changes)
    if config.init:
        config.init = str(workdir.parent / f"{config.init} export")
    with _watched() as (batches, warnings):
        run = slpo_jax.train(config, workdir=workdir)
        records = (
            min(workdir.glob("eval/*/real.jsonl"))
            .read_text(encoding="utf-8")
            .splitlines()
        )
        reasoner = run[config.rl.objectives[-1] if "rl" in config.stages else "imitate"]
        export = workdir.parent / f"{workdir.name} export"
        try:
            reasoner.export(export)
        except slpo_jax.UserError as error:  # no other program knows some parameters
            warnings.append(f"export: {error}")
        shown = reasoner.solve(json.loads(records[0])["question"], samples=2).shown
    parts: Parts = {
        "parameters": {},
        "optimizer": {},
        "batches": batches,
        "metrics": flat(rows_of(workdir)),
    }
    for name, leaf in _arrays_of(workdir).items():
        parts["parameters" if "['params']" in name else "optimizer"][name] = leaf
    said = "\n".join([shown, *warnings])
    for here, there in hidden.items():
        said = said.replace(here, there)
    files = {"files": files_of(workdir, hidden), "export": files_of(export, hidden)}
    return parts | files | {"said": flat(said.splitlines())}


def difference(old: dict[str, str], new: dict[str, str]) -> tuple[bool, str]:
    """How a part differs from what it was: whether in more than names, and each way's number and first leaf."""
    lost = []
    come = defaultdict(list)
    renamed = []
    for name in new:
        if name not in old:
            come[new[name]].append(name)
    for name in [name for name in old if name not in new]:
        if come[old[name]]:
            renamed.append(f"{name} -> {come[old[name]].pop(0)}")
        else:
            lost.append(name)
    added = [name for names in come.values() for name in names]
    changed = [
        f"{name}: {old[name]} -> {new[name]}"
        for name in old
        if new.get(name, old[name]) != old[name]
    ]
    only_moved = sorted(old.values()) == sorted(new.values())
    ways = {"the same values in other places" if only_moved else "changed": changed, "gone": lost, "new": added,
            "renamed": renamed}  # fmt: skip
    text = "; ".join(
        f"{len(names)} {way}, first {names[0]}" for way, names in ways.items() if names
    )
    return bool(changed or lost or added), text


def net(wanted: list[str], old: dict[str, Parts]) -> tuple[dict[str, Parts], bool]:
    """All cases of these words, a line each; what differs from `old` in further lines."""
    found = {}
    differs = False
    with tempfile.TemporaryDirectory() as folder:
        for name, changes in CASES.items():
            if not all(word in name for word in wanted):
                continue
            begun = time.monotonic()
            try:
                found[name] = digest(TINY | changes, Path(folder, name))
            except Exception as error:  # the others are worth knowing
                traceback.print_exc()
                found[name] = {
                    "failed": {
                        "why": f"{type(error).__name__}: {error}".replace(folder, "")
                    }
                }
            files = found[name].get("files", {})
            before = old.get(name, {})
            some = {
                part: {k: v for k, v in files.items() if f"{part}: " in k}
                for part in ("row.json", "report.json")
            }
            parts = (found[name] | some).items()
            short = {
                part: hashlib.sha256(json.dumps(leaves).encode()).hexdigest()[:8]
                for part, leaves in parts
            }
            print(
                f"{name} ({time.monotonic() - begun:.0f} s):",
                *(f"{k}={v}" for k, v in short.items()),
                flush=True,
            )
            for part in (before | found[name]) if old else ():
                changed, text = difference(
                    before.get(part, {}), found[name].get(part, {})
                )
                differs |= changed
                if text:
                    print(
                        f"    {'DIFFERS' if changed else 'renamed'} {part}: {text}",
                        flush=True,
                    )
    return found, differs


def main() -> int:
    """The command: status 1 where something differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("words", nargs="*")
    given = parser.parse_args()
    os.environ.setdefault(
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0"
    )  # compiling takes most of the time
    import jax

    import conftest  # noqa: F401 - the tests' flags of XLA, and their cache of programs

    jax.config.update("jax_num_cpu_devices", 1)
    begun = time.monotonic()
    old = json.loads(given.against.read_text()) if given.against else {}
    found, differs = net(given.words, old)
    if given.write:
        given.write.write_text(json.dumps(found))
    print(
        f"{len(found)} cases, {time.monotonic() - begun:.0f} s: {'they differ' if differs else 'done'}"
    )
    return differs


if __name__ == "__main__":
    sys.exit(main())
