"""`python launch/reproduce.py NAME [--workdir=DIR] [--seeds=0,1,2] [--only=LABEL,..] [--limit=N]`.

Every run of a grid in `launch/grids.py`, in `DIR/LABEL/seed_S`, and their comparison: `DIR/LABEL/report.md` over the
seeds, and `DIR/NAME.md`, `.json` and `.png` over the labels, from whatever runs are finished (of some grids also
`DIR/NAME_training.png`, how they went). Run again, it goes on where it was; a run that is finished is not run again.
Others of its runs (--seeds, --only) may go on beside it.

Or a table of time: `DIR/NAME.md`, `.json` and `.png`, measured anew at every call.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import timings
from comparison import compare, draw, markdown
from grid import Grid
from grids import GRIDS, TIMINGS
from jobs import plan, run_all
from over_training import draw_curves

from slpo_jax.errors import FlagParser, UserError, silent_when_unread
from slpo_jax.io.files import write_text


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags.

    Raises:
        UserError: one of them is unknown or can't be used.
    """
    parser = FlagParser(prog="python launch/reproduce.py", description="Runs of a grid, and their comparison.")
    parser.add_argument("name", choices=sorted([*GRIDS, *TIMINGS]), help="in launch/grids.py")
    parser.add_argument("--workdir", type=Path, help="default: runs/NAME")
    parser.add_argument("--seeds", default="", help="e.g. 0,1; default: the grid's")
    parser.add_argument("--only", default="", help="labels, e.g. main,grpo; default: all")
    parser.add_argument("--limit", type=int, help="problems of each test set; default: the config's")
    flags = parser.parse_args(argv)
    if flags.seeds and not flags.seeds.replace(",", "").isdecimal():
        raise UserError(f"--seeds: {flags.seeds} is no list of whole numbers from 0 on; give e.g. 0,1,2")
    if flags.limit is not None and flags.limit < 1:
        raise UserError(f"--limit: {flags.limit} is too few; give at least 1")
    if flags.name in TIMINGS and (given := [key for key in ("seeds", "only", "limit") if getattr(flags, key)]):
        raise UserError(f"--{given[0]}: {flags.name} has no runs; leave it out")
    return flags


@silent_when_unread()
def main(argv: list[str] | None = None) -> int:
    """The command; its exit status."""
    try:
        flags = parse(argv)
        if flags.name in TIMINGS:
            print(timings.measure(flags.name, TIMINGS[flags.name], _folder(flags, flags.name)))
            return 0
        compared, found, root = reproduce(flags)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from what is finished", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"error: --workdir: {error.filename}: {error.strerror}; give another", file=sys.stderr)
        return 2
    text = markdown(compared, found)
    write_text(root / f"{flags.name}.json", json.dumps(found, indent=1) + "\n")
    write_text(root / f"{flags.name}.md", text)
    draw(compared, found, root / f"{flags.name}.png")
    if compared.over_training:
        draw_curves(compared, root, compared.over_training, root / f"{flags.name}_training.png")
    print(text)
    return 0


def reproduce(flags: argparse.Namespace) -> tuple[Grid, dict[str, Any], Path]:
    """Run what is not finished; what is compared, its lines, and the folder for the tables."""
    grid = GRIDS[flags.name]
    root = _folder(flags, grid.folder or flags.name)
    seeds = list(dict.fromkeys(int(seed) for seed in flags.seeds.split(",") if seed))
    jobs = plan(grid, root, seeds, [label for label in flags.only.split(",") if label], flags.limit)
    root.mkdir(parents=True, exist_ok=True)
    run_all(jobs)
    return grid, compare(grid, root, flags.limit), root


def _folder(flags: argparse.Namespace, name: str) -> Path:
    return (flags.workdir or Path("runs") / name).expanduser()


if __name__ == "__main__":
    sys.exit(main())
