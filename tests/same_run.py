"""Are two workdirs those of the same run, bit for bit? `python tests/same_run.py WORKDIR WORKDIR`."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from slpo_jax.training.metrics import CLOCK


def rows_of(workdir: Path, timing: bool = False) -> list[dict[str, Any]]:
    """metrics.jsonl, without what depends on the clock."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return rows if timing else [{name: value for name, value in row.items() if name not in CLOCK} for row in rows]


def checkpoint_of(workdir: Path, stage: str) -> dict[str, Any]:
    """Everything in a stage's newest checkpoint, by path, and its step; read by Orbax alone."""
    import jax
    import orbax.checkpoint as ocp

    steps = (path for path in (workdir / "checkpoints" / stage).absolute().iterdir() if path.name.isdecimal())
    step = max(steps, key=lambda path: int(path.name))
    tree = {}
    with ocp.PyTreeCheckpointer() as reader:
        for part in ("params", "rest"):
            there = ocp.StandardCheckpointHandler().metadata(step / part).tree
            whole = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), there)  # on whatever devices
            tree[part] = reader.restore(step / part, restore_args=whole)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"step": int(step.name)} | {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def texts_of(workdir: Path) -> dict[str, bytes]:
    """Every file of a run but events, checkpoints, the rows that tell the time, and the page, which draws them."""
    files = [path for path in workdir.rglob("*") if path.is_file()]
    kept = [path for path in files if not {"tensorboard", "checkpoints"} & set(path.relative_to(workdir).parts)]
    return {
        str(path.relative_to(workdir)): _timeless(path)
        for path in kept
        if path.name not in ("metrics.jsonl", ".lock", "report.html")
    }


def _timeless(path: Path) -> bytes:
    """A file's bytes; of report.json those without the curves of the clock."""
    if path.name != "report.json":
        return path.read_bytes()
    report = json.loads(path.read_text(encoding="utf-8"))
    for curves in report.get("training", {}).values():
        for name in (*CLOCK, "elapsed"):
            curves.pop(name, None)
    return json.dumps(report).encode()


def differences(one: Path, other: Path) -> list[str]:
    """What differs between two finished runs, a line each; empty if they are the same run.

    Compared are the rows of metrics.jsonl but for the clock's, every array of every stage's last checkpoint, and all
    other files to the byte, but for TensorBoard's and what is drawn of the clock.
    """
    found = []
    rows, others = rows_of(one), rows_of(other)
    if rows != others:
        number = next((i for i, pair in enumerate(zip(rows, others, strict=False)) if pair[0] != pair[1]), -1)
        found.append(f"metrics.jsonl: {len(rows)} and {len(others)} rows, the first other one is {number}")
    stages = [sorted(path.parent.name for path in (root / "checkpoints").glob("*/finished")) for root in (one, other)]
    if stages[0] != stages[1]:
        return [*found, f"checkpoints: finished are {stages[0]} and {stages[1]}"]
    for stage in stages[0]:
        mine, theirs = checkpoint_of(one, stage), checkpoint_of(other, stage)
        unlike = sorted(
            name
            for name in mine.keys() | theirs.keys()
            if name not in mine or name not in theirs or not np.array_equal(mine[name], theirs[name], equal_nan=True)
        )
        if unlike:
            found.append(f"checkpoints/{stage}: {len(unlike)} arrays, the first is {unlike[0]}")
    mine, theirs = texts_of(one), texts_of(other)
    found += [f"{name}: differs" for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
    return found


if __name__ == "__main__":
    found = differences(*map(Path, sys.argv[1:]))
    print("\n".join(found) or "the same run, bit for bit")
    sys.exit(bool(found))
