"""`python launch/beside_paper.py DIR [--only=NAME,..] [--limit=N]`: published checkpoints beside the paper's table 1.

Each checkpoint of `CHECKPOINTS` is evaluated as the paper says, on the sets in DIR (docs/reproduce.md says where they
are had), in `runs/published/NAME`. `results/published.json` then has our figures beside the paper's, and `python
launch/tables.py` shows them in docs/reproduce.md. The same command goes on with what is missing.
"""

import argparse
import dataclasses
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from slpo_jax.errors import FlagParser, UserError, silent_when_unread
from slpo_jax.io.files import read_json, write_text
from tables import dump

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "results" / "published.json"
SETS = {"gsm8k": "GSM8K", "gsm_hard": "GSM-Hard", "multiarith": "MultiArith"}
METRICS = {"acc": "Acc", "pass@8": "Pass@8", "pass@16": "Pass@16"}
FIXED = (
    "--config.gate.enabled=False",
    "--config.max_latents=6",
)  # published reasoners without a gate


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A row of the paper's table 1.

    Attributes:
        title: of the row.
        paper: Acc, Pass@8 and Pass@16 in percent by set, as printed there.
        config: in configs/, whose own `init` is evaluated; "" where no checkpoint is known to be published.
        flags: of slpo_jax.main.
    """

    title: str
    paper: dict[str, tuple[float, float, float]]
    config: str = ""
    flags: tuple[str, ...] = ()


def _paper(*figures: float) -> dict[str, tuple[float, float, float]]:
    """Nine figures, three of each set, as a row of the paper has them."""
    return {
        name: (figures[3 * i], figures[3 * i + 1], figures[3 * i + 2])
        for i, name in enumerate(SETS)
    }


CHECKPOINTS = {
    "coconut_gpt2": Checkpoint(
        "COCONUT, GPT-2 124M", _paper(34.12, 45.79, 49.13, 7.66, 10.70, 12.06, 80.86, 88.79, 91.38),
        "coconut_gpt2", FIXED,
    ),
    "slpo_coconut_gpt2": Checkpoint(
        "COCONUT+SLPO, GPT-2 124M", _paper(35.63, 49.13, 51.55, 7.66, 10.85, 12.52, 83.10, 91.38, 92.59),
        "coconut_gpt2", ("--config.init=ModalityDance/slpo-coconut-gpt2",),
    ),
    "codi_gpt2": Checkpoint(
        "CODI, GPT-2 124M", _paper(42.30, 52.08, 54.36, 9.26, 11.84, 12.67, 90.21, 96.90, 97.41), "codi_gpt2", FIXED,
    ),
    "slpo_codi_gpt2": Checkpoint(
        "CODI+SLPO, GPT-2 124M", _paper(42.76, 54.13, 56.71, 9.71, 12.06, 13.05, 90.52, 97.24, 97.76),
    ),
    "coconut_llama1b": Checkpoint(
        "COCONUT, Llama-3.2-1B", _paper(21.23, 24.64, 38.13, 4.55, 6.98, 9.94, 41.1, 45.00, 63.10),
    ),
    "slpo_coconut_llama1b": Checkpoint(
        "COCONUT+SLPO, Llama-3.2-1B", _paper(22.37, 30.48, 41.85, 5.77, 8.19, 10.93, 46.90, 57.07, 71.38),
    ),
    "codi_llama1b": Checkpoint(
        "CODI, Llama-3.2-1B", _paper(55.22, 63.91, 67.48, 12.82, 15.02, 15.63, 95.52, 98.28, 98.79),
        "codi_llama1b", FIXED,
    ),
    "slpo_codi_llama1b": Checkpoint(
        "CODI+SLPO, Llama-3.2-1B", _paper(55.27, 65.13, 70.28, 13.20, 15.86, 16.77, 96.38, 98.79, 99.48),
    ),
}  # fmt: skip


def evaluate(name: str, folder: str, limit: int, flags: list[str]) -> None:
    """Evaluate a checkpoint in its workdir.

    Raises:
        UserError: the run failed; its own line stands above.
    """
    checkpoint = CHECKPOINTS[name]
    config = ROOT / "configs" / f"{checkpoint.config}.py"
    command = [
        sys.executable,
        "-m",
        "slpo_jax.main",
        f"--config={config}:{folder}",
        f"--workdir=runs/published/{name}",
    ]
    command += [
        "--config.stages=('evaluate',)",
        f"--config.evaluate.limit={limit}",
        *checkpoint.flags,
        *flags,
    ]
    if subprocess.run(command, check=False).returncode:
        raise UserError(
            f"{name}: its evaluation failed; mend what its last line says, then give the same command again"
        )


def table() -> dict[str, Any]:
    """The paper's figures beside ours, which are null where nothing was evaluated."""
    columns = [
        "",
        *(
            f"{title}, {whose}"
            for title in METRICS.values()
            for whose in ("paper", "ours")
        ),
    ]
    rows: list[list[Any]] = []
    for name, checkpoint in CHECKPOINTS.items():
        report = Path("runs/published") / name / "report.json"
        ours = read_json(report)["eval"]["checkpoint"] if report.exists() else {}
        for key, title in SETS.items():
            row: list[Any] = [f"{checkpoint.title}, {title}"]
            for metric, paper in zip(METRICS, checkpoint.paper[key], strict=True):
                figure = ours.get(key, {}).get(metric)
                row += [paper, None if figure is None else 100 * figure]
            rows.append(row)
    return {"columns": columns, "digits": 2, "rows": rows}


def parse(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The flags, and those for slpo_jax.main.

    Raises:
        UserError: one of them can't be used.
    """
    parser = FlagParser(
        prog="python launch/beside_paper.py",
        description="Published checkpoints beside the paper.",
    )
    parser.add_argument(
        "folder",
        help="with gsm_valid.json, gsm_test.json, gsm_hard.json and multiarith.json",
    )
    parser.add_argument(
        "--only",
        default="",
        help="checkpoints, e.g. coconut_gpt2,codi_gpt2; default: all",
    )
    parser.add_argument(
        "--limit", type=int, default=0, help="problems of each set; default: all"
    )
    parser.add_argument(
        "--out", type=Path, default=FILE, help="default: results/published.json"
    )
    flags, more = parser.parse_known_args(argv)
    known = [name for name, checkpoint in CHECKPOINTS.items() if checkpoint.config]
    flags.names = flags.only.split(",") if flags.only else known
    if unknown := sorted({*flags.names} - {*known}):
        raise UserError(
            f"--only: no checkpoint is known as {unknown[0]}; give some of {', '.join(known)}"
        )
    return flags, more


@silent_when_unread()
def main(argv: list[str] | None = None) -> int:
    """The command; its exit status."""
    try:
        flags, more = parse(argv)
        for name in flags.names:
            evaluate(name, flags.folder, flags.limit, more)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    given = shlex.join(sys.argv[1:] if argv is None else argv)
    facts = {"command": f"python launch/beside_paper.py {given}", "commit": None, "machine": None,
             "date": time.strftime("%Y-%m-%d"), "seeds": [0]}  # fmt: skip
    write_text(flags.out, dump(facts | {"tables": {"beside the paper": table()}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
