"""Train a latent reasoner on problems of your own, in minutes on two CPU cores: `python examples/own_data.py`.

The problems are in a CSV file with the columns question, steps and answer. Everything else (tokens, sizes, stages,
learning rates) is chosen from the data, and printed with the reason.
"""

import csv
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import slpo_jax as slpo


def write_problems(file: Path, largest: int) -> None:
    """Write word problems of two steps; replace this by a file of your own.

    Args:
        largest: numbers are 2 … largest.
    """
    with file.open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["question", "steps", "answer"])
        for a, b, c in itertools.product(range(2, largest + 1), repeat=3):
            question = f"Ada has {a} pens . She buys {b} boxes of {c} pens . How many pens has she ?"
            steps = f"{b} * {c} = {b * c}\n{a} + {b * c} = {a + b * c}"
            rows.writerow([question, steps, a + b * c])


def main(
    folder: Path = Path("runs/own_data"),
    largest: int = 12,
    more: Mapping[str, Any] | None = None,
) -> slpo.Run:
    """Write the problems, show how they are read, train, and ask the reasoner.

    Args:
        folder: of the problems and the run.
        more: further keys of the config.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "pens.csv"
    write_problems(file, largest)
    print(slpo.read(file))

    # A tenth of the problems is kept for validation, and another for the test.
    run = slpo.train(train=file, workdir=folder / "run", config=more)
    print(f"report: {folder / 'run' / 'report.html'}")
    reasoner = slpo.load(folder / "run")
    print(
        reasoner.solve(
            "Ada has 3 pens . She buys 4 boxes of 5 pens . How many pens has she ?"
        )
    )
    return run


if __name__ == "__main__":
    main()
