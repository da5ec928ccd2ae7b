"""`python -m benchmarks.memory [--device cuda:a6000] [--count 4] [--fsdp 1 4] [--models gpt2]`; see `--help`.

What the programs of the shipped configs need of each device, at the paper's batch: whether they fit, what is largest,
what devices send each other, and what is computed and moved. Programs are compiled for devices that need not be there,
and never run; nothing of a model's size is allocated. Prints Markdown; `--json` writes every number behind it.
"""

import argparse
import ast
import dataclasses
import itertools
import json
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from benchmarks.measure.compiled import collectives, device_memory, largest, traffic
from benchmarks.measure.products import products
from benchmarks.measure.programs import STAGES, Program, programs
from benchmarks.measure.report import (
    Parser,
    check_flags,
    format_facts,
    machine,
    page,
    run_command,
    set_up,
)
from benchmarks.measure.targets import Target, known, target
from benchmarks.measure.workload import GPT2, load_file
from configs._presets import SOFT_METHODS
from slpo_jax.config.config_checks import check
from slpo_jax.errors import UserError, in_a_line
from slpo_jax.io.files import write_text
from slpo_jax.models import xla_cpu
from slpo_jax.run.run_checks import check_batch
from slpo_jax.run.setup import Setup, assemble
from slpo_jax.stages import EVALUATE, RL

DEVICES = 4  # the paper's
_TEXT = GPT2 | {
    "tokenizer": "synthetic:128198",
    "base": "",
}  # of it the size of the vocabulary alone
_LLAMA = _TEXT | {
    "model.n_positions": 4096,
    "model.rope_theta": 500_000.0,
    "model.n_inner": 8192,
    "model.n_kv_head": 8,
}
_SHAPES = {
    "smollm2": _TEXT | {"tokenizer": "synthetic:49090", "model.n_positions": 8192, "model.rope_theta": 100_000.0,
                        "model.n_layer": 30, "model.n_embd": 576, "model.n_head": 9, "model.n_kv_head": 3,
                        "model.n_inner": 1536},
    "llama1b": _LLAMA | {"model.n_layer": 16, "model.n_embd": 2048, "model.n_head": 32},
    "llama3b": _LLAMA | {"model.n_layer": 28, "model.n_embd": 3072, "model.n_head": 24},
    "qwen05b": _TEXT | {"reasoner": "coconut_qwen2", "tokenizer": "synthetic:151800", "model.n_positions": 32768,
                        "model.rope_theta": 1e6, "model.n_layer": 24, "model.n_embd": 896, "model.n_head": 14,
                        "model.n_kv_head": 2, "model.n_inner": 4864},
}  # fmt: skip
_QWEN = _LLAMA | {"tokenizer": "synthetic:152000", "model.n_positions": 32768, "model.rope_theta": 1e6,
                  "model.tied": False, "model.n_layer": 28, "model.n_embd": 3584, "model.n_head": 28,
                  "model.n_kv_head": 4, "model.n_inner": 18944}  # fmt: skip
_SOFT = {
    "smollm2": "soft_llama1b.py",
    "llama1b": "soft_llama1b.py",
    "llama3b": "soft_llama3b.py",
}
MODELS = (  # file in configs/, what a checkpoint would say
    {"graph": ("graph.py", {}), "gpt2": ("coconut_gpt2.py", GPT2)}
    | {name: ("coconut_llama1b.py", shapes) for name, shapes in _SHAPES.items()}
    | {
        f"soft_{name}:{method}": (f"{file}:{method}", _SHAPES[name])
        for name, file in _SOFT.items() for method, (*_, kind, _, _) in SOFT_METHODS.items() if kind
    }
    | {
        f"soft_{name}:{method},{cards}": (f"soft_{name}.py:{method},{cards}", shapes)
        for name, shapes, on in (("llama3b", _SHAPES["llama3b"], (1, 4)), ("qwen7b", _QWEN, (1,)))
        for method in ("slpo", "grpo") for cards in on
    }
)  # fmt: skip
DEFINITIONS = """
devices: as many as COUNT; a batch is spread over all of them, parameters and optimizer state over FSDP
state: parameters and optimizer state on a device; scratch: what the program needs beside them, gathered parameters \
and gradients among it; as XLA's compiler for the device assigned them
fits: in what a program can use of the device's memory: 92 % of a GPU's (XLA_PYTHON_CLIENT_MEM_FRACTION), and of a \
TPU's what its compiler takes
largest: array; sent: bytes of collectives' results on a device, and how many of them are in a loop
TFLOP: of a device's matrix products, and GB that its kernels read and write, with loops at their full length
prompts in the largest bucket, padded; the config's batch, optimizer, K and G
rollout, policy update: the two programs of a step whose answers are read on the host, one after the other
"""
DEFINITIONS = DEFINITIONS.strip().splitlines()


@dataclasses.dataclass(frozen=True)
class Point:
    """What is compiled.

    Attributes:
        model: one of `MODELS`, or a config file, as --config of a run names it.
        fsdp: devices that share a copy of the parameters.
        changes: further config keys, by dotted name.
    """

    model: str
    stage: str = RL
    fsdp: int = 1
    changes: tuple[tuple[str, Any], ...] = ()


def setup_of(point: Point, devices: Any = None) -> Setup:
    """The shipped config at a point, assembled without any weights.

    Args:
        devices: None is all there are.
    """
    file, shapes = MODELS.get(point.model, (str(Path(point.model).resolve()), {}))
    try:
        config = load_file(f"configs/{file}" if point.model in MODELS else file)
    except Exception as error:  # it is the user's code, and can raise anything
        raise UserError(
            f"--models: {point.model} is no config ({in_a_line(error)}); give another"
        ) from None
    config.update_from_flattened_dict(shapes | {"sharding.fsdp": point.fsdp})
    for key, value in point.changes:
        try:
            config.update_from_flattened_dict({key: value})
        except (KeyError, TypeError, ValueError):
            raise UserError(
                f"--with: {key}={value!r} is no key of {file}, or of another type; mend it"
            ) from None
    config.stages = (point.stage,)
    setup = assemble(check(config), devices=devices)
    if point.stage != EVALUATE:
        check_batch(setup.config, point.stage, setup.mesh.size)
    return setup


def measure(point: Point, where: Target) -> list[dict[str, Any]]:
    """The numbers of each of a point's programs."""
    with xla_cpu.made_for(where.platform):
        setup = setup_of(point, where.devices)
        parameters = sum(x.size for x in jax.tree.leaves(setup.abstract_params()))
        facts = {"model": point.model, "stage": point.stage, "device": where.name, "count": len(where.devices),
                 "fsdp": point.fsdp, "changes": dict(point.changes), "parameters": parameters,
                 "dtype": setup.config.model.dtype}  # fmt: skip
        trips = max(1, setup.config.max_latents)
        made = [
            (each.name, compiled(each, where, trips)[0])
            for each in programs(setup, point.stage)
        ]
        return [facts | {"program": name} | numbers for name, numbers in made]


def compiled(program: Program, where: Target, trips: int) -> tuple[dict[str, Any], Any]:
    """The numbers of a program, or why there are none, and the program itself, or None.

    Args:
        trips: of loops that end when all thoughts have.
    """
    start = time.perf_counter()
    traced = program.function.trace(*program.arguments)
    found: dict[str, Any] = {"flops": products(traced, trips)}
    try:
        made = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        used = re.search(
            r"temporaries \(([\d.]+)G\)", str(error)
        )  # a TPU's compiler takes nothing that doesn't fit
        wanted = {"scratch": int(float(used[1]) * 2**30)} if used else {}
        return found | wanted | {"fits": False, "failed": " ".join(str(error).split())[:300],
                                 "compile_seconds": time.perf_counter() - start}, None  # fmt: skip
    seconds = time.perf_counter() - start
    memory = device_memory(made)
    sent = collectives(made)
    array, size = largest(made)
    return found | memory | {
        "fits": memory["total"] <= where.memory if where.memory else None,
        "failed": "",
        "largest": array,
        "largest_bytes": size,
        "sent": sum(each.bytes for each in sent),
        "collectives": len(sent),
        "collectives_in_loops": sum(each.in_loop for each in sent),
        "bytes": traffic(made, trips),
        "code": made.memory_analysis().generated_code_size_in_bytes,
        "compile_seconds": seconds,
    }, made  # fmt: skip


def markdown(result: Mapping[str, Any]) -> str:
    """The header lines and the table."""
    head = ("Model", "Program", "Devices", "FSDP", "State (GB)", "Scratch (GB)", "In all (GB)", "Fits", "Largest",
            "Sent (GB)", "In loops", "TFLOP", "Moved (GB)", "Compile (s)")  # fmt: skip
    lines = [_line(row) for row in result["rows"]]
    failed = [
        f"{row['model']}, {row['stage']}: {row['failed']}"
        for row in result["rows"]
        if row["failed"]
    ]
    return page(
        "Memory of programs",
        (f"machine: {format_facts(result['machine'])}", *failed),
        DEFINITIONS,
        head,
        lines,
    )


def _line(row: Mapping[str, Any]) -> list[str]:
    model = ", ".join(
        [
            row["model"],
            *(f"{key}={value}" for key, value in row["changes"].items()),
            row["dtype"],
        ]
    )
    sizes = [
        f"{row[name] / 1e9:.1f}" if name in row else ""
        for name in ("arguments", "scratch", "total")
    ]
    fits = {True: "yes", False: "no", None: ""}[row["fits"]]
    last = [f"{row['flops'] / 1e12:.2f}", f"{row['bytes'] / 1e9:.0f}" if "bytes" in row else "",
            f"{row['compile_seconds']:.0f}"]  # fmt: skip
    sent = (
        [row["largest"], f"{row['sent'] / 1e9:.2f}", str(row["collectives_in_loops"])]
        if "sent" in row
        else [""] * 3
    )
    name = " ".join(filter(None, (row["stage"], row["program"])))
    return [
        model,
        name,
        f"{row['count']} {row['device']}",
        str(row["fsdp"]),
        *sizes,
        fits,
        *sent,
        *last,
    ]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags.

    Raises:
        UserError: one of them is unknown or can't be used.
    """
    parser = Parser("memory", "What programs need of a device.")
    parser.add_argument(
        "--device", default="cpu", help=f"cpu, {', '.join(known())}; default: cpu"
    )
    parser.add_argument(
        "--count",
        type=int,
        default=DEVICES,
        help=f"devices; default: {DEVICES}, as the paper",
    )
    parser.add_argument(
        "--fsdp",
        nargs="+",
        type=int,
        default=[1],
        help="devices that share parameters; default: 1",
    )
    parser.add_argument("--models", nargs="+", default=["gpt2"],
                        help=f"{', '.join(MODELS)}, or config files; default: gpt2")  # fmt: skip
    parser.add_argument(
        "--stages", nargs="+", choices=STAGES, default=[RL], help="default: rl"
    )
    parser.add_argument("--with", nargs="+", default=[], metavar="KEY=VALUE", dest="changes",
                        help="config keys that differ, e.g. rl.micro_batches=4")  # fmt: skip
    flags = parser.parse_args(argv)
    check_flags(flags, count=1)
    for fsdp in flags.fsdp:
        if fsdp < 1 or flags.count % fsdp:
            raise UserError(
                f"--fsdp: {fsdp} does not divide --count {flags.count}; give one that does"
            )
    for model in flags.models:
        if model not in MODELS and not Path(model.partition(":")[0]).is_file():
            raise UserError(
                f"--models: {model!r} is no config file and none of {', '.join(MODELS)}; give one"
            )
    flags.changes = tuple(map(_change, flags.changes))
    return flags


def _change(text: str) -> tuple[str, Any]:
    """(key, value) of KEY=VALUE, whose value is a Python literal or else a text."""
    key, equals, value = text.partition("=")
    if not equals:
        raise UserError(
            f"--with: {text!r} is not KEY=VALUE; give e.g. rl.micro_batches=4"
        )
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def benchmark(flags: argparse.Namespace) -> dict[str, Any]:
    """Every number of the report, ready for JSON, and in the file of --json after each point."""
    jax.config.update(
        "jax_platforms", "cpu"
    )  # nothing runs, and a plugin for a device that isn't there would complain
    set_up(flags.count)
    where = target(flags.device, flags.count)
    points = [
        Point(model, stage, fsdp, flags.changes)
        for model, stage, fsdp in itertools.product(
            flags.models, flags.stages, flags.fsdp
        )
    ]
    result: dict[str, Any] = {"machine": machine(), "rows": []}
    for point in tqdm(points, "points", disable=not sys.stderr.isatty()):
        result["rows"] += measure(point, where)
        if flags.json:
            write_text(flags.json, json.dumps(result, indent=1) + "\n")
    return result


def main(argv: list[str] | None = None) -> None:
    """The command."""
    run_command(argv, parse, benchmark, markdown)


if __name__ == "__main__":
    main()
