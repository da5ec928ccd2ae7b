"""`benchmarks.real --profile`: the operations that a step's time goes to, and their part of the roofline."""

import argparse
import dataclasses
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from benchmarks.measure.products import products
from benchmarks.measure.profile import Op, Peaks, peaks, profile
from benchmarks.measure.programs import Program, filled, objectives
from benchmarks.measure.report import machine
from benchmarks.real_tables import called
from benchmarks.real_work import PEAK
from slpo_jax.config.config import rl_of
from slpo_jax.io.files import digest, read_json, write_text
from slpo_jax.io.orbax import load_params
from slpo_jax.io.workdir import Workdir
from slpo_jax.run.rl import make_objective
from slpo_jax.run.setup import Setup
from slpo_jax.run.train_stage import host_batches
from slpo_jax.runtime.mesh import shard_rows
from slpo_jax.stages import COLD_START

PROFILE = "profile.json"
PROFILED = ("slpo", "pathwise", "answer_only")
STEPS, DEAREST = 4, 10  # of which the first is not timed; operations that are told
_LAYERS = "backbone/backbone.run/backbone._stacked/while/body/closed_call/"
WIDTH, TINY_WIDTH = 32768, 512  # of the product and the copy that the device's peaks are


def profiled(flags: argparse.Namespace, setup: Setup, given: str) -> None:
    """Steps of the objectives one after the other, as far as WORKDIR/profile.json doesn't have them, which is kept.

    They start from the cold start's checkpoint in the workdir, or else from SmolLM2 itself.

    Args:
        setup: assembled on the devices that are here.
        given: digest of what its config was given.
    """
    here = {name: value for name, value in machine().items() if name != "date"}
    folder = Workdir(flags.workdir).stage_folder(COLD_START)
    file, what = flags.workdir / PROFILE, digest([given, here, folder.is_finished])
    found = read_json(file, default={})
    if found.get("what") != what:
        width = TINY_WIDTH if flags.tiny else WIDTH
        found = {"what": what, "peaks": peaks(setup.config.model.dtype, width), "steps": {}}
    names = [name for name in setup.config.rl.objectives if name in PROFILED]
    programs = dict(zip(setup.config.rl.objectives, objectives(setup, own=True), strict=True))
    left = [name for name in names if name not in found["steps"]]
    with ThreadPoolExecutor() as pool:  # nothing is timed while something is compiled
        made = dict(zip(left, pool.map(lambda name: _compiled(setup, programs[name]), left), strict=True))
    for name, compiled in made.items():
        shapes = setup.abstract_params()
        params = load_params(folder.path, shapes) if folder.is_finished else setup.initial_params()
        found["steps"][name] = _measured(setup, name, programs[name], params, *compiled)
        write_text(file, json.dumps(found) + "\n")


def _compiled(setup: Setup, program: Program) -> tuple[Any, float]:
    """The compiled program, and FLOPs of its products."""
    traced = program.function.trace(*program.arguments)
    return traced.lower().compile(), products(traced, setup.config.max_latents)


def _measured(setup: Setup, name: str, program: Program, params: Any, step: Any, flops: float) -> dict[str, Any]:
    """The seconds of an objective's steps on the run's own batches, and the operations of a further one."""
    objective = make_objective(setup, name)
    batches = host_batches(setup, setup.config.rl, rl_of(setup.config.rl, objective).steps, objective.needs_answers)
    state = dataclasses.replace(jax.tree.map(filled, program.arguments[0]), params=params)
    taken = []
    for number in range(STEPS):
        batch = shard_rows(batches(number), setup.mesh)
        begin = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        taken.append(time.perf_counter() - begin)
    ops = profile(step, [(state, shard_rows(batches(STEPS), setup.mesh))])
    return {
        "seconds": statistics.median(taken[1:]), "flops": flops, "count": len(ops),
        "in_all": sum(op.seconds for op in ops.values()), "found": sum(op.flops for op in ops.values()),
        "answer_tokens": float(metrics["answer_tokens"]), "latent_steps": float(metrics["latent_steps"]),
        "ops": dict(list(ops.items())[:DEAREST]),
    }  # fmt: skip


def profile_tables(found: dict[str, Any]) -> dict[str, Any]:
    """What was found so far, as results/ has it: of the steps, and of each one's dearest operations."""
    if not found:
        return {}
    best = Peaks(*found["peaks"])
    columns = ["", "step (ms)", "in operations (ms)", "of them the ten below (%)", "operations", "TFLOP",
               "of the peak (%)", "latents", "answer tokens"]  # fmt: skip
    lines, made = [], {}
    for name, step in found["steps"].items():
        ops = {op: Op(*each) for op, each in step["ops"].items()}
        share = 100 * sum(op.seconds for op in ops.values()) / step["in_all"]
        tflop = step["flops"] / 1e12
        lines.append([called(name), 1e3 * step["seconds"], 1e3 * step["in_all"], share, step["count"], tflop,
                      100 * tflop / step["seconds"] / PEAK, step["latent_steps"], step["answer_tokens"]])  # fmt: skip
        rows = [[op, 1e3 * each.seconds, each.times, 100 * each.seconds / step["in_all"], each.flops / 1e9,
                 each.bytes / 1e9, 100 * best.share(each), _source(each.name)]
                for op, each in ops.items()]  # fmt: skip
        about = ["", "ms", "times", "share (%)", "GFLOP", "GB", "of the roofline (%)", "source"]
        made[f"{called(name)}'s step"] = {"columns": about, "digits": 2, "rows": rows}
    device = [["products (TFLOP/s)", best.flops / 1e12], ["copies (GB/s)", best.bytes / 1e9]]
    return {
        "the device's peaks": {"columns": ["", "measured"], "digits": 0, "rows": device},
        "steps": {"columns": columns, "digits": 2, "rows": lines},
    } | made


def _source(name: str) -> str:
    """An op_name without what all have; with `transpose` it is a gradient's, with `jvp()/while/body` a rollout's."""
    for part, short in (("jit(train_step)/", ""), ("jit(of_batch)/", ""), (_LAYERS, "layers/")):
        name = name.replace(part, short)
    return name
