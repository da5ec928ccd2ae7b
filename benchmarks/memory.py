"""`python -m benchmarks.memory [--models gpt2 llama1b llama3b] [--meshes 4x1 2x2 1x4] [--json FILE]`; see `--help`.

What a training step of the shipped configs needs of each device's memory, at the paper's batch: by mesh (data x fsdp),
micro-batches, how the layers are run, and type of activations. Programs are compiled and never run; nothing of a
model's size is allocated. Prints Markdown; `--json` writes every number behind it.
"""

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
from tqdm import tqdm

from benchmarks.measure.compiled import abstract_batch, abstract_state, collectives, device_memory
from benchmarks.measure.report import Parser, check_flags, listed, machine, page, run_command, set_up
from benchmarks.measure.workload import GPT2, load_file
from slpo_jax.checked import fill
from slpo_jax.errors import UserError
from slpo_jax.run.experiment import Setup, assemble
from slpo_jax.run.rl import make_objective, optimizer_config, training_policy
from slpo_jax.training import cold_start, rl
from slpo_jax.training.optimizer import make_optimizer
from slpo_jax.training.state import make_train_step

CARDS = (24, 48, 80)  # GB; the paper's have 48
DEVICES = 4
_LLAMA = {  # of the text the size of the vocabulary alone: 128,256 tokens and COCONUT's three
    "tokenizer": "synthetic:128198", "base": "", "model.n_positions": 2048, "model.rope_theta": 500_000.0,
    "model.n_inner": 8192, "model.n_kv_head": 8,
}  # fmt: skip
MODELS = {  # file in configs/, what a checkpoint would say
    "gpt2": ("coconut_gpt2.py", {}),
    "llama1b": ("coconut_llama1b.py", _LLAMA | {"model.n_layer": 16, "model.n_embd": 2048, "model.n_head": 32}),
    "llama3b": ("coconut_llama1b.py", _LLAMA | {"model.n_layer": 28, "model.n_embd": 3072, "model.n_head": 24}),
}
LAYERS = {  # of each its (remat, scan_layers)
    "plain": (False, False), "remat": (True, False), "remat, scanned": (True, True),
}  # fmt: skip
DEFINITIONS = f"""
mesh: data x fsdp devices; a batch is spread over all of them, parameters and optimizer state over fsdp
state: parameters and optimizer state on a device; scratch: what the step needs beside them, gathered parameters and \
gradients among it; both as XLA assigned buffers when it compiled the step for {DEVICES} CPU devices, which compute \
products of bfloat16 in float32 and so overstate its scratch
fits: the smallest of {", ".join(map(str, CARDS))} GB (10^9 bytes) with 5 % to spare; - where none does
sent: bytes of collectives' results on a device in a step
prompts in the largest bucket, padded; as many devices as the paper; its optimizer, K and G
""".strip().splitlines()


@dataclasses.dataclass(frozen=True)
class Point:
    """One compiled step; `shipped` where a field is None: as the config has it."""

    model: str
    stage: str = "rl"
    mesh: str = f"{DEVICES}x1"
    micro_batches: int | None = None
    layers: str | None = None
    dtype: str | None = None


def setup_of(point: Point, changes: Mapping[str, Any] | None = None) -> Setup:
    """The shipped config at a point, assembled without any weights.

    Args:
        changes: further config keys, by dotted name.
    """
    file, shapes = MODELS[point.model]
    config = load_file(f"configs/{file}")
    config.update_from_flattened_dict(GPT2 | shapes | dict(changes or {}))
    if point.micro_batches is not None:
        config[point.stage].micro_batches = point.micro_batches
    if point.layers is not None:
        config.model.remat, config.model.scan_layers = LAYERS[point.layers]
    if point.dtype is not None:
        config.model.dtype = point.dtype
    config.sharding.fsdp = int(point.mesh.partition("x")[2])
    return assemble(config)


def compile_step(setup: Setup, stage: str) -> Any:
    """The stage's train step as training compiles it, for the largest prompts."""
    config = setup.config
    if stage == "rl":
        objective = make_objective(setup, "slpo")
        policy = training_policy(setup, objective)
        loss = rl.make_loss(policy, objective, setup.reward, config.rl.group)
        trained, optimizing = ("reasoner", "gate"), optimizer_config(setup, objective)
    else:
        known = {"min_latents": config.min_latents, "gate_dropout": config.gate.dropout}
        settings = fill(cold_start.ColdStartConfig, config.cold_start, "config.cold_start", **known)
        loss = cold_start.make_loss(setup.policy, setup.reward, settings)
        trained, optimizing = ("gate",), setup.optimizer_config("cold_start", config.cold_start.steps)
    optimizer = make_optimizer(optimizing)
    step = make_train_step(loss, optimizer, trained, setup.layout, stage, config[stage].micro_batches)
    state = abstract_state(setup.abstract_params(), trained, optimizer, setup.layout)
    batch = abstract_batch(setup.mesh, config[stage].batch_size, max(setup.prompt_slots))
    return step.lower(state, batch).compile()


def measure(point: Point) -> dict[str, Any]:
    """The numbers of one point."""
    setup, start = setup_of(point), time.perf_counter()
    program = compile_step(setup, point.stage)
    config, sent = setup.config, collectives(program)
    layers = next(name for name, flags in LAYERS.items() if flags == (config.model.remat, config.model.scan_layers))
    shown = dataclasses.replace(
        point, micro_batches=config[point.stage].micro_batches, layers=layers, dtype=config.model.dtype
    )
    return dataclasses.asdict(shown) | device_memory(program) | {
        "parameters": sum(x.size for x in jax.tree.leaves(setup.abstract_params())),
        "sent": sum(each.bytes for each in sent),
        "sent_in_loops": sum(each.bytes for each in sent if each.in_loop),
        "compile_seconds": time.perf_counter() - start,
        "shipped": point == Point(point.model, point.stage, point.mesh),
    }  # fmt: skip


def fits(total: int) -> str:
    """The smallest card that holds it."""
    return next((f"{card} GB" for card in CARDS if total <= 0.95e9 * card), "-")


def markdown(result: dict[str, Any]) -> str:
    """The header lines and the table."""
    head = ("Model", "Stage", "Mesh", "Micro-batches", "Layers", "Activations", "State (GB)", "Scratch (GB)",
            "In all (GB)", "Fits", "Sent (GB)", "Compile (s)")  # fmt: skip
    lines = [
        [row["model"] + " (as shipped)" * row["shipped"], row["stage"], row["mesh"], str(row["micro_batches"]),
         row["layers"], row["dtype"], *(f"{row[name] / 1e9:.1f}" for name in ("arguments", "scratch", "total")),
         fits(row["total"]), f"{row['sent'] / 1e9:.2f}", f"{row['compile_seconds']:.0f}"]
        for row in result["rows"]
    ]  # fmt: skip
    facts = (f"machine: {listed(result['machine'])}",)
    return page("Memory of a training step", facts, DEFINITIONS, head, lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags.

    Raises:
        UserError: one of them is unknown or can't be used.
    """
    meshes = [f"{DEVICES // fsdp}x{fsdp}" for fsdp in (1, 2, 4)]
    parser = Parser("memory", "Memory of a training step.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gpt2", "llama1b"], help="default: not 3B")
    parser.add_argument("--stages", nargs="+", choices=("rl", "cold_start"), default=["rl"], help="default: rl")
    parser.add_argument("--meshes", nargs="+", choices=meshes, default=meshes, help="data x fsdp; default: all")
    parser.add_argument("--micro_batches", nargs="+", type=int, default=[None], help="default: the config's")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=[None], help="default: the config's")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=[None],
                        help="of activations; default: the config's")  # fmt: skip
    flags = parser.parse_args(argv)
    check_flags(flags)
    if any(count is not None and count < 1 for count in flags.micro_batches):
        raise UserError("--micro_batches: give 1 or more")
    return flags


def benchmark(flags: argparse.Namespace) -> dict[str, Any]:
    """Every number of the report, ready for JSON."""
    set_up(DEVICES)
    axes = (flags.models, flags.stages, flags.meshes, flags.micro_batches, flags.layers, flags.dtypes)
    points = [Point(*values) for values in itertools.product(*axes)]
    rows = [measure(point) for point in tqdm(points, "points", disable=not sys.stderr.isatty())]
    return {"machine": machine(), "definitions": DEFINITIONS, "rows": rows}


def main(argv: list[str] | None = None) -> None:
    """The command."""
    run_command(argv, parse, benchmark, markdown)


if __name__ == "__main__":
    main()
