"""`python launch/reproduce.py NAME [--workdir=DIR] [--seeds=0,1,2] [--only=RUN,..] [--limit=N]`.

Every run of a table in `launch/runs.py`, in `DIR/RUN/seed_S`, and their comparison: `DIR/RUN/report.md` over the seeds,
and `DIR/NAME.md` and `DIR/NAME.json` over the runs, from whatever is finished; the latter in the form of results/. Run
again, it goes on where it was; a run that is finished is not run again. Others of its runs (--seeds, --only) may go on
beside it. The paper's table of time is `python -m benchmarks.step`.
"""

import argparse
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from comparison import compare
from jobs import ROOT, plan, run_all
from pooled import pool
from runs import TABLES
from slpo_jax.errors import FlagParser, UserError, silent_when_unread
from slpo_jax.io.files import write_text
from tables import dump, markdown


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags.

    Raises:
        UserError: one of them is unknown or can't be used.
    """
    parser = FlagParser(
        prog="python launch/reproduce.py",
        description="Runs of a table, and their comparison.",
    )
    parser.add_argument("name", choices=sorted(TABLES), help="in launch/runs.py")
    parser.add_argument("--workdir", type=Path, help="default: runs/NAME")
    parser.add_argument("--seeds", default="", help="e.g. 0,1; default: the table's")
    parser.add_argument("--only", default="", help="runs, e.g. main,grpo; default: all")
    parser.add_argument(
        "--limit", type=int, help="problems of each test set; default: the config's"
    )
    flags = parser.parse_args(argv)
    if flags.seeds and not flags.seeds.replace(",", "").isdecimal():
        raise UserError(
            f"--seeds: {flags.seeds} is no list of whole numbers from 0 on; give e.g. 0,1,2"
        )
    if flags.limit is not None and flags.limit < 1:
        raise UserError(f"--limit: {flags.limit} is too few; give at least 1")
    return flags


@silent_when_unread()
def main(argv: list[str] | None = None) -> int:
    """The command; its exit status."""
    try:
        flags = parse(argv)
        tables, seeds, root = reproduce(flags)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "\ninterrupted; the same command goes on from what is finished",
            file=sys.stderr,
        )
        return 130
    except BrokenPipeError:
        raise
    except OSError as error:
        print(
            f"error: --workdir: {error.filename}: {error.strerror}; give another",
            file=sys.stderr,
        )
        return 2
    given = [
        f"--{key}={value}"
        for key in ("seeds", "only", "limit")
        if (value := getattr(flags, key))
    ]
    command = shlex.join(["python", "launch/reproduce.py", flags.name, *given])
    write_text(
        root / f"{flags.name}.json",
        dump({**provenance(command), "seeds": seeds, "tables": tables}),
    )
    text = "\n".join(
        f"{title}:\n\n{markdown(table)}" for title, table in tables.items()
    )
    write_text(root / f"{flags.name}.md", text)
    print(text)
    return 0


def reproduce(flags: argparse.Namespace) -> tuple[dict[str, Any], list[int], Path]:
    """Run what is not finished; the tables, the seeds in them, and the folder where they belong."""
    table = TABLES[flags.name]
    root = (flags.workdir or Path("runs") / (table.folder or flags.name)).expanduser()
    seeds = list(dict.fromkeys(int(seed) for seed in flags.seeds.split(",") if seed))
    jobs = plan(
        table,
        root,
        seeds,
        [name for name in flags.only.split(",") if name],
        flags.limit,
    )
    root.mkdir(parents=True, exist_ok=True)
    run_all(jobs)
    tables, seeds = compare(table, root, flags.limit)
    return tables | pool(table, root, flags.limit), seeds, root


def provenance(command: str) -> dict[str, Any]:
    """What a results file says of where its figures are from; the commit is null outside of a git checkout."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    said = subprocess.run(git, capture_output=True, text=True, check=False)
    cpuinfo = Path("/proc/cpuinfo")
    model = platform.machine()
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
    machine = f"{model}, {os.cpu_count()} cores"
    return {"command": command, "commit": said.stdout.strip() or None, "machine": machine,
            "date": time.strftime("%Y-%m-%d")}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
