"""Tables of time: a benchmark of random weights, its page, its numbers, and a picture beside the paper's."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from grid import Timing
from jobs import ROOT
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from slpo_jax.errors import UserError
from slpo_jax.evaluation.drawing import style_at
from slpo_jax.io.files import read_json, write_text


def measure(name: str, timing: Timing, root: Path) -> str:
    """The benchmark, with its progress; `NAME.json`, `NAME.md` and `NAME.png` in `root`, and the page itself.

    It is measured anew at every call, since its result depends on the code and on the machine.

    Raises:
        UserError: it failed.
    """
    root.mkdir(parents=True, exist_ok=True)
    result = (root / f"{name}.json").resolve()
    command = [sys.executable, "-m", f"benchmarks.{timing.module}", *timing.flags, f"--json={result}"]
    print(f"{name}: runs; {' '.join(command[1:])}", flush=True)
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        raise UserError(f"benchmarks.{timing.module}: ended with status {ended.returncode}; see above, and mend it")
    write_text(root / f"{name}.md", ended.stdout)
    draw(timing, read_json(result, "run it again"), root / f"{name}.png")
    return ended.stdout


def draw(timing: Timing, result: Mapping[str, Any], path: Path) -> None:
    """Bars of parts a (K, G), here and in the paper, in units of either one's step of relative time 1.

    Parts that were timed as less than nothing, being what a step has beyond others, are not drawn.
    """
    own = [_medians(row, timing.parts) for row in result["rows"] if row["implementation"] == "slpo_jax"]
    columns = {"here": own, "paper": result["paper"]}
    figure = Figure(figsize=(7, 3.4), dpi=130, layout="constrained")
    axis = figure.subplots()
    for side, (title, rows) in zip((-0.2, 0.2), columns.items(), strict=True):
        unit = next((row["step"] for row in rows if row["relative"] == 1), 1.0)
        places, bottom = np.arange(len(rows)) + side, np.zeros(len(rows))
        for number, part in enumerate(timing.parts):
            heights = np.array([max(row[part], 0.0) for row in rows]) / unit
            label = part if title == "here" else None
            axis.bar(places, heights, 0.36, bottom, color=style_at(number, part).colour, alpha=0.8, label=label)
            bottom += heights
        for place, row, top in zip(places, rows, bottom, strict=True):
            axis.annotate(f"{title}\n{row['step']:.2f} s", (place, top), ha="center", va="bottom", fontsize=8)
    axis.set_xticks(range(len(own)), [f"K = {row['passes']}, G = {row['group']}" for row in own])
    axis.set(ylabel="time of a step, relative to K, G = 4, 8", ylim=(0, axis.get_ylim()[1] * 1.12))
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    FigureCanvasAgg(figure).print_png(path)


def _medians(row: Mapping[str, Any], parts: tuple[str, ...]) -> dict[str, float]:
    numbers = {name: row[name] for name in ("passes", "group", "relative")}
    return numbers | {name: row[name]["median"] for name in ("step", *parts)}
