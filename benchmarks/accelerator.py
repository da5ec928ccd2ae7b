"""`python -m benchmarks.accelerator [--workdir=runs/accelerator] [--seconds=1200] [--tiny]`; see `--help`.

Everything that is to be known of a new kind of device, in one command of at most 20 minutes: what a compiled step is
predicted to need of it beside what it needs, the tests of parity on it, the quick start, and the tables of the step and
of Pass@16 against the torch witness. Prints one page, and leaves it in the workdir as `page.md`. Cut off by a limit,
the same command goes on with the parts that are left. On a CPU, or with --tiny, shapes are tiny, so that it can be
tried anywhere.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks.measure.report import Parser, check_flags, listed, markdown_table
from benchmarks.measure.workload import ROOT
from slpo_jax.errors import UserError
from slpo_jax.io.files import digest, read_json, write_text

PARITY = (
    "tests/models/test_backbones.py", "tests/policy/test_rollout.py", "tests/policy/test_score.py",
    "tests/policy/test_decoding.py", "tests/training/test_slpo.py", "tests/training/test_optimizer.py",
    "tests/checkpoints/test_smollm2.py",
)  # fmt: skip
SHORT = (  # the quick start's own steps take minutes of two cores
    "--config.imitate.cot_steps=0", "--config.imitate.stage_steps=0", "--config.imitate.final_steps=20",
    "--config.imitate.control=False", "--config.imitate.optimizer.warmup_steps=5",
    "--config.rl.optimizer.warmup_steps=2", "--config.cold_start.steps=10", "--config.rl.steps=10",
    "--config.evaluate.limit=20", "--config.evaluate.samples=0", "--config.evaluate.datasets=('test',)",
)  # fmt: skip

_FEW = (
    "--config.imitate.final_steps=10", "--config.imitate.optimizer.warmup_steps=2", "--config.rl.steps=5",
    "--config.rl.optimizer.warmup_steps=1", "--config.trackers=()",
)  # fmt: skip
# A program or two of each method that is trained apart from the others, small. LatentRM's reasoner has to be right now
# and then, or no thoughts differ.
METHODS = {
    "colar": ("arena.py:colar_llama", "--config.stages=('imitate','rl')", "--config.imitate.cot_steps=0",
              "--config.rl.objectives=('grpo',)", *_FEW),
    "latent_sft": ("arena.py:latent_sft_llama", "--config.stages=('imitate',)", "--config.imitate.cot_steps=0",
                   "--config.imitate.stage_steps=5", *_FEW),
    "latent_grpo": ("arena.py:latent_grpo_llama", "--config.stages=('imitate','rl')", "--config.imitate.cot_steps=0",
                    "--config.imitate.stage_steps=0", "--config.rl.objectives=('latent_grpo',)", *_FEW),
    "latent_rm": ("graph.py", "--config.stages=('imitate','latent_rm')", "--config.gate.enabled=False",
                  "--config.imitate.cot_steps=0", "--config.imitate.stage_steps=0", "--config.imitate.control=False",
                  *_FEW[1:], "--config.imitate.final_steps=600", "--config.latent_rm.problems=64",
                  "--config.latent_rm.completions=4", "--config.latent_rm.steps=20", "--config.latent_rm.batch_size=8",
                  "--config.latent_rm.evaluate_every=0", "--config.latent_rm.optimizer.warmup_steps=2"),
}  # fmt: skip
TITLES = {"gpt2": "GPT-2 124M", "smollm2": "SmolLM2-135M", "qwen05b": "Qwen2.5-0.5B"}
PLUGINS = {"gpu": "cuda"}  # what JAX_PLATFORMS calls a platform


@dataclasses.dataclass(frozen=True)
class Part:
    """One section of the page.

    Attributes:
        name: of the section, and of its file.
        command: what is run, from the checkout.
        least: seconds that it needs; with fewer left it waits for the next call.
        wanted: a heading of the output from which on it belongs on the page; "" is its last lines.
        report: a file whose first section belongs there instead.
    """

    name: str
    command: tuple[str, ...]
    least: int
    wanted: str = ""
    report: Path | None = None

    def on(self, here: dict[str, Any]) -> str:
        """Digest of the command and the machine, of `look`, to which a finished part belongs."""
        machine = {name: value for name, value in here["machine"].items() if name != "date"}
        return digest([list(self.command), here["platform"], machine])


def parts(workdir: Path, tiny: bool) -> list[Part]:
    """The page's parts in the order of their value: what a step was predicted to need, then what was never run."""
    python, run = sys.executable, workdir / ("quickstart_tiny" if tiny else "quickstart")
    quick = (python, "-m", "slpo_jax.main", "--config=configs/quickstart.py", f"--workdir={run}")
    tests = ("tests/models/test_gate.py",) if tiny else PARITY
    shapes = "graph" if tiny else "gpt2"
    few = ("--steps", "1", "--warmup", "1", "--only", "4,8", "--prompts", "4") if tiny else ("--steps", "4")
    passk = ("--problems", "8", "--samples", "4", "--rounds", "1") if tiny else ("--rounds", "2")
    torch = ("--torch", "none") if tiny or not _has_torch() else ()

    def predicted(model: str) -> tuple[str, ...]:
        return (python, "-m", "benchmarks.accelerator", "--only_predicted", model, *["--tiny"] * tiny)

    def method(name: str, config: str, *changes: str) -> Part:
        found = f"{name}_tiny" if tiny else name
        run = (python, "-m", "slpo_jax.main", f"--config=configs/{config}", f"--workdir={workdir / found}", *changes)
        return Part(name, run, 30)

    return [
        Part("predicted", predicted("gpt2"), 30, "# Predicted"),
        Part("smollm2", predicted("smollm2"), 30, "# Predicted"),
        *(method(name, *words) for name, words in METHODS.items()),
        Part("parity", (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests), 30),
        Part("step", (python, "-m", "benchmarks.step", "--shapes", shapes, *few, *torch), 60, "# One SLPO step"),
        Part("pass_at_16", (python, "-m", "benchmarks.passk", "--shapes", shapes, *passk, *torch), 60, "# Pass@"),
        Part("quickstart", (*quick, *(SHORT if tiny else ())), 60, report=run / "report.md"),
    ]


def _has_torch() -> bool:
    from importlib.util import find_spec

    return find_spec("torch") is not None


def look() -> dict[str, Any]:
    """`machine`, the platform and what a program can use of a device's memory; in bytes, 0 where that isn't told.

    They are asked in a process of its own: this one must not take the device's memory.


    Raises:
        UserError: jax finds no device.
    """
    program = (
        "import json, jax; from benchmarks.measure.report import machine; "
        "memory = (jax.devices()[0].memory_stats() or {}).get('bytes_limit', 0); "
        "print(json.dumps({'platform': jax.default_backend(), 'machine': machine(), 'memory': memory}))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise UserError(
            f"jax: finds no device to run on ({(done.stderr.strip().splitlines() or ['?'])[-1]}); mend that"
        )
    return json.loads(done.stdout.splitlines()[-1])


def run_part(part: Part, workdir: Path, here: dict[str, Any], seconds: float) -> dict[str, Any] | None:
    """What a part's command said and how it ended; None if it was cut off."""
    log, begin = workdir / f"{part.name}.log", time.perf_counter()
    # The tests ask for the CPU by themselves.
    platform = here["platform"]
    environment = {
        "JAX_PLATFORMS": platform if platform == "cpu" else f"{PLUGINS.get(platform, platform)},cpu"
    } | os.environ
    with log.open("w") as file:
        process = subprocess.Popen(part.command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # a run saves its state
            process.wait()
            return None
    return {"what": part.on(here), "status": status, "seconds": time.perf_counter() - begin, "said": log.read_text()}


def section(part: Part, found: dict[str, Any] | None) -> str:
    """A part of the page."""
    title = f"## {part.name.replace('_', ' ')}"
    command = " ".join(Path(word).name if word == sys.executable else word for word in part.command)
    if found is None:
        return f"{title}\n\nNot finished: give the command again.\n"
    ended = f"`{command}`: {found['seconds']:.0f} s, status {found['status']}"
    said = found["said"]
    if part.report and found["status"] == 0 and part.report.exists():
        said = part.report.read_text(encoding="utf-8").partition("\n## ")[0]
    elif part.wanted and part.wanted in said:
        said = said[said.index(part.wanted) :]
    else:
        said = "\n".join(said.strip().splitlines()[-8:])
    lines = (line if not line.startswith("#") else f"##{line}" for line in said.strip().splitlines())
    return "\n".join([title, "", ended, "", *lines, ""])


def predicted_page(model: str, tiny: bool) -> str:
    """What SLPO's step of a model at the paper's batch was predicted to need of these devices, and needs.

    Args:
        model: one of `TITLES`.
        tiny: a layer and a few prompts instead.
    """
    from benchmarks.measure.predicted import predicted_and_measured

    count = len(jax.devices())
    few = {"tokenizer": "synthetic:199", "model.n_layer": 1, "rl.batch_size": 4 * count, "prompt_slots": (16,)}
    size = f"one layer of {TITLES[model]}" if tiny else f"{TITLES[model]} at the paper's batch"
    lines = [f"SLPO's step of {size} on {count} of {jax.devices()[0].device_kind}:", ""]
    rows, heaviest = predicted_and_measured(model, few if tiny else {})
    lines += markdown_table(("", "predicted", "measured"), rows)
    lines += ["", *markdown_table(("op", "ms", "times", "source"), heaviest)]
    return "\n".join(["# Predicted and measured", "", *lines])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags.

    Raises:
        UserError: one of them is unknown or can't be used.
    """
    parser = Parser("accelerator", "What is to be known of a new kind of device.")
    parser.add_argument("--workdir", type=Path, default=Path("runs/accelerator"), help="default: runs/accelerator")
    parser.add_argument("--seconds", type=int, default=1200, help="after which it stops; default: 1200")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, which on a CPU are used anyhow")
    names = [part.name for part in parts(Path(), True)]
    parser.add_argument("--only", nargs="+", choices=names, help="parts; default: all")
    parser.add_argument("--only_predicted", choices=TITLES, help="what the part of a model prints, in this process")
    flags = parser.parse_args(argv)
    check_flags(flags, seconds=1)
    return flags


def page(flags: argparse.Namespace) -> tuple[str, bool]:
    """The page, after as many parts as the time allows, and whether all are there and ended well.

    `--json` gets the machine and, by part, what it said, its status and its seconds; null for one that is left.
    """
    begin, workdir = time.perf_counter(), flags.workdir.resolve()
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--workdir: {workdir} can't be made ({error.strerror}); give another") from None
    here = look()
    tiny = flags.tiny or here["platform"] == "cpu"
    sections, ended = [], {}
    for part in parts(workdir, tiny):
        if flags.only and part.name not in flags.only:
            continue
        known = workdir / f"{part.name}.json"
        found: dict[str, Any] | None = read_json(known, default={})
        if found is None or found.get("what") != part.on(here) or found["status"] != 0:
            left = flags.seconds - (time.perf_counter() - begin)
            found = run_part(part, workdir, here, left) if left >= min(part.least, flags.seconds) else None
            if found is not None:
                write_text(known, json.dumps(found) + "\n")
        sections.append(section(part, found))
        ended[part.name] = found
    head = [
        "# An accelerator's page",
        "",
        f"- machine: {listed(here['machine'])}",
        f"- shapes: {'tiny' if tiny else 'GPT-2 124M'}",
        "",
    ]
    if flags.json:
        write_text(flags.json, json.dumps({**here, "tiny": tiny, "parts": ended}, indent=1) + "\n")
    return "\n".join([*head, *sections]), all(found and found["status"] == 0 for found in ended.values())


def main(argv: list[str] | None = None) -> None:
    """The command; status 1 where a part failed or is left."""
    try:
        flags = parse(argv)
        if flags.only_predicted:
            print(predicted_page(flags.only_predicted, flags.tiny))
            return
        text, well = page(flags)
        write_text(flags.workdir / "page.md", text + "\n")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(text)
    sys.exit(not well)


if __name__ == "__main__":
    main()
