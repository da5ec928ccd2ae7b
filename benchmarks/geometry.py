"""`python -m benchmarks.geometry --config=FILE BEFORE AFTER.. [--sets NAME ..] [--figure FILE]`; see `--help`.

How training changes the shape of a thought (paper, appendix "Latent Geometry Analysis", figures 6, 9 and 10). The first
checkpoint is what the others are set beside. Prints Markdown; `--json` writes every number behind it, `--figure` draws
the effective rank of the first latents.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg

from benchmarks.measure import checkpoints
from benchmarks.measure.report import (
    Parser,
    check_file,
    check_flags,
    listed,
    machine,
    markdown_table,
    run_command,
    set_up,
)
from slpo_jax.errors import UserError
from slpo_jax.evaluation.drawing import LOOK, legend_below, open_panels, style_at
from slpo_jax.run.experiment import Setup

DEFINITIONS = """
step representation: the mean of a problem's latent t over rollouts under dropout, of fixed length
distance: cosine distance of consecutive step representations, mean over steps and problems
rank: effective rank of all step representations, centred: the sum of squared singular values over the largest's square
change: in percent of the first checkpoint's; ± one standard error over problems, paired
""".strip().splitlines()


def inter_step_distance(steps: np.ndarray) -> np.ndarray:
    """Mean cosine distance of consecutive step representations [P, T, D]: [P]."""
    norms = np.linalg.norm(steps, axis=-1)
    cosines = (steps[:, 1:] * steps[:, :-1]).sum(axis=-1) / (norms[:, 1:] * norms[:, :-1])
    return (1 - cosines).mean(axis=1)


def prefix_ranks(steps: np.ndarray) -> np.ndarray:
    """Effective rank of the first t = 2..T step representations [P, T, D], centred over them: [P, T - 1]."""
    ranks = []
    for count in range(2, steps.shape[1] + 1):
        prefix = steps[:, :count]
        squares = np.square(np.linalg.svd(prefix - prefix.mean(axis=1, keepdims=True), compute_uv=False))
        ranks.append(squares.sum(axis=1) / squares[:, 0])
    return np.stack(ranks, axis=1)


def relative_change(before: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """100 (mean after - mean before) / mean before of paired values [P], and its standard error (delta method)."""
    base, ratio = before.mean(), after.mean() / before.mean()
    error = np.std(after - ratio * before, ddof=1) / np.sqrt(len(before)) / base
    return 100 * float(ratio - 1), 100 * float(error)


def step_representations(setup: Setup, params: Any, name: str, problems: int, samples: int) -> np.ndarray:
    """Of the first problems of a set: float64 [P, T, D]."""
    found = setup.evaluator.run(
        params, setup.test_set(name), "length", setup.config.max_latents, seed=0, samples=samples, limit=problems,
        keep_latents=True, label=name,
    )  # fmt: skip
    assert found.latents is not None
    latents = found.latents.astype(np.float64)
    return latents.reshape(-1, samples, *latents.shape[1:]).mean(axis=1)


def measure(setups: Iterable[tuple[Path, Setup]], flags: argparse.Namespace) -> dict[str, Any]:
    """Set -> a row a checkpoint."""
    tables: dict[str, list[dict[str, Any]]] = {}
    first: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    shared: Setup | None = None  # its programs serve all
    for path, setup in setups:
        shared, params = shared or setup, setup.initial_params()
        for name in flags.sets or list(setup.config.data.eval):
            steps = step_representations(shared, params, name, flags.problems, flags.samples)
            distance, ranks = inter_step_distance(steps), prefix_ranks(steps)
            before = first.setdefault(name, (distance, ranks))
            tables.setdefault(name, []).append({
                "checkpoint": str(path),
                "problems": len(distance),
                "distance": float(distance.mean()),
                "distance_change": relative_change(before[0], distance),
                "ranks": ranks.mean(axis=0).tolist(),
                "rank_change": relative_change(before[1][:, -1], ranks[:, -1]),
            })  # fmt: skip
    return tables


def benchmark(flags: argparse.Namespace) -> dict[str, Any]:
    """Every number of the report, ready for JSON."""
    _check_sets(flags)
    set_up(1)
    work = {name: getattr(flags, name) for name in ("config", "problems", "samples")}
    tables = measure(checkpoints.opened(flags, {}), flags)
    result = {"machine": machine(), "work": work, "definitions": DEFINITIONS, "tables": tables}
    if flags.figure:
        draw(result, flags.figure)
    return result


def _check_sets(flags: argparse.Namespace) -> None:
    config = checkpoints.load_file(flags.config)
    for name in flags.sets:
        if name not in config.data.eval:
            raise UserError(f"--sets: {name} is none of the config's: {', '.join(config.data.eval)}")
    if config.max_latents < 2:
        raise UserError(f"--config: {flags.config} has config.max_latents={config.max_latents}; thoughts of 2 or more "
                        "latents have a geometry")  # fmt: skip


def markdown(result: dict[str, Any]) -> str:
    """The header lines and a table a set."""
    lines = ["# The geometry of thoughts before and after"]
    lines += [f"- {line}" for line in (f"machine: {listed(result['machine'])}", f"work: {listed(result['work'])}")]
    lines += [f"- {line}" for line in result["definitions"]]
    for name, rows in result["tables"].items():
        cells = []
        for place, row in enumerate(rows):
            changes = ["{:+.1f} ± {:.1f}".format(*row[key]) for key in ("distance_change", "rank_change")]
            distance, rank = f"{row['distance']:.4f}", f"{row['ranks'][-1]:.3f}"
            label = checkpoints.name_of(Path(row["checkpoint"]))
            cells.append([label, distance, changes[0] if place else "", rank, changes[1] if place else ""])
        head = ("Checkpoint", "Distance", "Change (%)", "Rank", "Change (%)")
        lines += ["", f"{name}, {rows[0]['problems']} problems:", "", *markdown_table(head, cells)]
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """The effective rank of the first t latents, a panel a set and a line a checkpoint."""
    with matplotlib.rc_context(LOOK):
        figure, axes = open_panels(len(result["tables"]))
        for axis, (name, rows) in zip(axes, result["tables"].items(), strict=True):
            for place, row in enumerate(rows):
                label = checkpoints.name_of(Path(row["checkpoint"])).partition(", ")[2]
                style = style_at(place, label.replace("_", " "))
                axis.plot(np.arange(2, len(row["ranks"]) + 2), row["ranks"], **style.line, ms=5, lw=1.6)
            axis.set(title=name, xlabel="first latents")
        axes[0].set_ylabel("effective rank")
        FigureCanvasAgg(legend_below(figure, axes)).print_png(path)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags.

    Raises:
        UserError: one of them is unknown or can't be used.
    """
    parser = Parser("geometry", "The geometry of thoughts before and after.")
    checkpoints.add_flags(parser)
    parser.add_argument("--sets", nargs="+", default=[], metavar="NAME", help="of config.data.eval; default: all")
    parser.add_argument("--problems", type=int, default=32, help="the first of each set; default: 32")
    parser.add_argument("--samples", type=int, default=16, help="rollouts of each; default: 16")
    parser.add_argument("--figure", type=Path, help="file for a picture, .png")
    flags = parser.parse_args(argv)
    check_flags(flags, problems=2, samples=1)
    checkpoints.check_paths(flags)
    if len(flags.checkpoints) < 2:
        raise UserError("CHECKPOINT: give one before and at least one after")
    if flags.figure and flags.figure.suffix != ".png":
        raise UserError(f"--figure: {flags.figure} is no .png; give one")
    if flags.figure:
        check_file("figure", flags.figure)
    return flags


def main(argv: list[str] | None = None) -> None:
    """The command."""
    run_command(argv, parse, benchmark, markdown)


if __name__ == "__main__":
    main()
