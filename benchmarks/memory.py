"""`python -m benchmarks.memory [--models gpt2 soft_llama1b:grpo] [--meshes 4x1 2x2 1x4] [--json FILE]`; see `--help`.

What a training step of the shipped configs needs of each device's memory, at the paper's batch: by mesh (data x fsdp),
micro-batches, how the layers are run, and type of activations. Where rewards come from the host a step is two programs,
each with a row of its own. Programs are compiled and never run; nothing of a
model's size is allocated. Prints Markdown; `--json` writes every number behind it.
"""

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from tqdm import tqdm

from benchmarks.measure.compiled import abstract_batch, abstract_rollouts, abstract_state, collectives, device_memory
from benchmarks.measure.report import Parser, check_flags, listed, machine, page, run_command, set_up
from benchmarks.measure.workload import GPT2, load_file
from slpo_jax.config import read_config
from slpo_jax.errors import UserError
from slpo_jax.run.experiment import Setup, assemble
from slpo_jax.run.presets import SOFT_METHODS
from slpo_jax.run.rl import make_objective, optimizer_of, training_policy
from slpo_jax.sections import fill
from slpo_jax.training import cold_start, rl
from slpo_jax.training.halves import make_rollout
from slpo_jax.training.optimizer import make_optimizer
from slpo_jax.training.state import make_train_step

CARDS = (24, 48, 80)  # GB; the paper's have 48
DEVICES = 4
_LLAMA = {  # of the text the size of the vocabulary alone: 128,256 tokens and COCONUT's three
    "tokenizer": "synthetic:128198", "base": "", "model.n_positions": 2048, "model.rope_theta": 500_000.0,
    "model.n_inner": 8192, "model.n_kv_head": 8,
}  # fmt: skip
_SHAPES = {
    "1b": {"model.n_layer": 16, "model.n_embd": 2048, "model.n_head": 32},
    "3b": {"model.n_layer": 28, "model.n_embd": 3072, "model.n_head": 24},
}
MODELS = {  # file in configs/, what a checkpoint would say
    "gpt2": ("coconut_gpt2.py", {}),
    "llama1b": ("coconut_llama1b.py", _LLAMA | _SHAPES["1b"]),
    "llama3b": ("coconut_llama1b.py", _LLAMA | _SHAPES["3b"]),
} | {
    f"soft_llama{size}:{method}": (f"soft_llama{size}.py:{method}", _LLAMA | shapes | {"model.n_positions": 4096})
    for size, shapes in _SHAPES.items() for method, (*_, kind, _, _) in SOFT_METHODS.items() if kind
}  # fmt: skip
LAYERS = {  # of each its (remat, scan_layers)
    "plain": (False, False), "remat": (True, False), "remat, scanned": (True, True),
}  # fmt: skip
HALVES = ("rollout", "improvement")
DEFINITIONS = f"""
mesh: data x fsdp devices; a batch is spread over all of them, parameters and optimizer state over fsdp
state: parameters and optimizer state on a device; scratch: what the step needs beside them, gathered parameters and \
gradients among it; both as XLA assigned buffers when it compiled the step for {DEVICES} CPU devices, which compute \
products of bfloat16 in float32 and so overstate its scratch
fits: the smallest of {", ".join(map(str, CARDS))} GB (10^9 bytes) with 5 % to spare; - where none does
sent: bytes of collectives' results on a device in a step
prompts in the largest bucket, padded; as many devices as the paper; its optimizer, K and G
rl: rollout, rl: improvement: the two programs of a step whose answers are read on the host, one after the other; the \
step needs what the larger of them does, and its trajectories are among the second's state
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
    return assemble(read_config(config))


def compile_step(setup: Setup, stage: str, halves: Sequence[str] = HALVES) -> dict[str, Any]:
    """The programs of the stage's train step as training compiles them, for the largest prompts, in their order.

    Args:
        halves: which are compiled, of a step that is two programs.
    Returns:
        "" -> the step; or "rollout" and "improvement", as `halves.make_rl_step` cuts it in two.
    """
    config = setup.config
    if stage == "rl":
        objective = make_objective(setup, config.rl.objectives[0])
        policy = training_policy(setup, objective)
        loss = rl.make_loss(policy, objective, setup.reward.on_device, config.rl.group)
        params = setup.abstract_params()
        trained = tuple(name for name in ("reasoner", "gate", "thinker") if name in params)
        trained = tuple(name for name in trained if name != "gate" or policy.stops_itself)
        optimizer = optimizer_of(setup, objective, {name: params[name] for name in trained})
    else:
        known = {"min_latents": config.min_latents, "gate_dropout": config.gate.dropout}
        settings = fill(cold_start.ColdStartConfig, config.cold_start, "config.cold_start", **known)
        loss = cold_start.make_loss(setup.policy, setup.reward.on_device, settings)
        trained = ("gate",)
        optimizer = make_optimizer(setup.optimizer_config("cold_start", config.cold_start.steps))
    how = (optimizer, trained, setup.layout, stage, getattr(config, stage).micro_batches)
    state = abstract_state(setup.abstract_params(), trained, optimizer, setup.layout)
    reward = setup.reward.on_device
    references = 16 if reward else 0
    batch = abstract_batch(setup.mesh, getattr(config, stage).batch_size, max(setup.prompt_slots), references)
    if stage != "rl" or not (not reward or objective.needs_reference or objective.updates_per_step > 1):
        return {"": make_train_step(loss, *how).lower(state, batch).compile()}
    rollout = make_rollout(policy, objective, reward, config.rl.group, setup.layout, stage, config.rl.micro_batches)
    improvement = make_train_step(rl.make_improvement(policy, objective), *how, updates=objective.updates_per_step)
    reference = state.params if objective.needs_reference else {}
    rolled = abstract_rollouts(rollout, state, batch, reference, setup.layout, config.rl.group)
    both = {"rollout": (rollout, (batch, reference)), "improvement": (improvement, (rolled,))}
    return {name: program.lower(state, *given).compile() for name, (program, given) in both.items() if name in halves}


def measure(point: Point, halves: Sequence[str] = HALVES) -> list[dict[str, Any]]:
    """The numbers of one point, of each of its programs; `halves` as in `compile_step`."""
    setup, start = setup_of(point), time.perf_counter()
    programs = compile_step(setup, point.stage, halves)
    seconds = time.perf_counter() - start
    config = setup.config
    layers = next(name for name, flags in LAYERS.items() if flags == (config.model.remat, config.model.scan_layers))
    shown = dataclasses.replace(
        point, micro_batches=getattr(config, point.stage).micro_batches, layers=layers, dtype=config.model.dtype
    )
    parameters = sum(x.size for x in jax.tree.leaves(setup.abstract_params()))
    rows = []
    for name, program in programs.items():
        sent = collectives(program)
        rows.append(dataclasses.asdict(shown) | device_memory(program) | {
            "program": name,
            "parameters": parameters,
            "sent": sum(each.bytes for each in sent),
            "sent_in_loops": sum(each.bytes for each in sent if each.in_loop),
            "compile_seconds": seconds,
            "shipped": point == Point(point.model, point.stage, point.mesh),
        })  # fmt: skip
    return rows


def fits(total: int) -> str:
    """The smallest card that holds it."""
    return next((f"{card} GB" for card in CARDS if total <= 0.95e9 * card), "-")


def markdown(result: dict[str, Any]) -> str:
    """The header lines and the table."""
    head = ("Model", "Stage", "Mesh", "Micro-batches", "Layers", "Activations", "State (GB)", "Scratch (GB)",
            "In all (GB)", "Fits", "Sent (GB)", "Compile (s)")  # fmt: skip
    lines = [
        [row["model"] + " (as shipped)" * row["shipped"], ": ".join(filter(None, (row["stage"], row["program"]))),
         row["mesh"], str(row["micro_batches"]),
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
    parser.add_argument("--halves", nargs="+", choices=HALVES, default=HALVES, help="programs of a step with the host "
                        "between; default: both; that of rollouts, not scanned, compiles for minutes")  # fmt: skip
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
    shown = tqdm(points, "points", disable=not sys.stderr.isatty())
    rows = [row for point in shown for row in measure(point, flags.halves)]
    return {"machine": machine(), "rows": rows}


def main(argv: list[str] | None = None) -> None:
    """The command."""
    run_command(argv, parse, benchmark, markdown)


if __name__ == "__main__":
    main()
