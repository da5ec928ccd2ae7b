"""`python launch/hardware.py`: writes results/hardware.json, the memory and hours of models, stages and cards.

Everything comes from other files of results/ and from the configs' numbers of steps; what nobody measured or compiled
stays blank. A card of 24 GB is judged by what was compiled for an RTX A6000, which has the compute capability of an
RTX 3090.
"""

import sys
import time
from pathlib import Path
from typing import Any

from slpo_jax.io.files import read_json, write_text
from tables import dump, in_todays_words

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "configs"))  # whose files see each other so
import coconut_gpt2  # noqa: E402 - needs the path

FILE = ROOT / "results" / "hardware.json"
SMALL_CARD = 24 * 2**30 / 1e9  # GB of an RTX 3090 or 4090
GPU_SHARE = (
    0.92  # of a GPU's memory that programs get, as launch/one_machine.sh sets it
)
COMPILED = ("RTX A6000, 48 GB", "H100, 80 GB", "TPU v5e, 16 GB")
MEASURED = {
    "CoT-SFT": "CoT-SFT",
    "CODI": "CODI",
    "cold gate": "cold start",
    "SLPO": "SLPO",
}  # rows of real_gpu.json


def _tables(name: str) -> dict[str, Any]:
    """The tables of a results file, by today's names."""
    return in_todays_words(read_json(ROOT / "results" / f"{name}.json")["tables"])


def _column(table: dict[str, Any], name: str) -> dict[str, Any]:
    """A column's cells by their rows' names."""
    place = table["columns"].index(name)
    return {row[0]: row[place] for row in table["rows"]}


def _needed(gigabytes: float, shared: int, fits: bool) -> str:
    """A cell of the table of memory."""
    text = f"{gigabytes:.1f}"
    if shared > 1:
        text += f" on each of {shared}"
    if not fits:
        text += " (too much)"
    return text


def memory() -> dict[str, Any]:
    """GB that each stage of each model needs on each card, as XLA predicts."""
    compiled = _tables("memory")
    names = list(
        dict.fromkeys(row[0] for card in COMPILED for row in compiled[card]["rows"])
    )
    rows = [[name, *("" for _ in range(1 + len(COMPILED)))] for name in names]
    for i, card in enumerate(COMPILED):
        table = compiled[card]
        needed = _column(table, "in all (GB)")
        shared = _column(table, "fsdp")
        fits = _column(table, "fits")
        for row in rows:
            name = row[0]
            if name not in needed:
                continue
            row[2 + i] = _needed(needed[name], shared[name], fits[name] == "yes")
            if i == 0:
                row[1] = _needed(
                    needed[name], shared[name], needed[name] <= GPU_SHARE * SMALL_CARD
                )
    return {"columns": ["", "24 GB", *COMPILED], "rows": rows}


def hours() -> dict[str, Any]:
    """Seconds of a step where one was measured, and the hours of a stage's steps at that rate."""
    config = coconut_gpt2.get_config()
    step = _column(_tables("accelerator")["predicted and measured"], "measured")[
        "a step (s)"
    ]
    imitate = config.imitate
    steps = (
        imitate.cot_steps
        + imitate.max_latent_stage * imitate.stage_steps
        + imitate.final_steps
    )
    rows: list[list[Any]] = [
        ["GPT-2 124M, COCONUT's imitation", "", steps, None, None, ""],
        [
            "GPT-2 124M, cold start, at most",
            "",
            config.cold_start.steps,
            None,
            None,
            "",
        ],
        [
            "GPT-2 124M, SLPO",
            "H100",
            config.rl.steps,
            step,
            config.rl.steps * step / 3600,
            "estimated from 3 steps",
        ],
    ]
    real = _tables("real_gpu")
    speeds = _column(real["programs"], "steps/s")
    times = _column(_tables("real_budget")["one H100"], "times")
    times["SLPO"] = times["slpo"]
    for name, title in MEASURED.items():
        seconds = 1 / speeds[name]
        row = [
            f"SmolLM2-135M, {title}, `benchmarks.real`",
            "H200",
            times[name],
            seconds,
            times[name] * seconds / 3600,
        ]
        rows.append([*row, "measured"])
    wall = _column(real["wall"], "seconds")
    whole = (wall["first call"] + wall["second call"]) / 3600
    rows.append(
        [
            "SmolLM2-135M, all of `benchmarks.real`",
            "H200",
            None,
            None,
            whole,
            "measured, with compiling",
        ]
    )
    columns = ["", "card", "steps", "a step (s)", "hours", "known from"]
    return {"columns": columns, "digits": 3, "rows": rows}


def make_tables() -> dict[str, dict[str, Any]]:
    """Both tables."""
    return {"memory": memory(), "hours": hours()}


if __name__ == "__main__":
    found = {"command": "python launch/hardware.py", "commit": "of the files that it reads",
             "machine": "of the files that it reads", "date": time.strftime("%Y-%m-%d"), "seeds": None}  # fmt: skip
    write_text(FILE, dump(found | {"tables": make_tables()}))
