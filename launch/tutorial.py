"""`python launch/tutorial.py [--folder=DIR]`: walks docs/tutorial.md, whose figures are results/tutorial.json.

The reward and the commands that train are the page's own. Run again, it goes on from what is finished.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import slpo_jax as slpo
from reproduce import provenance
from slpo_jax.errors import FlagParser, UserError, silent_when_unread
from slpo_jax.io.files import read_json, write_text
from tables import dump

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
FILE = ROOT / "results" / "tutorial.json"
METRICS = {"acc": "Acc", "pass@1": "P@1", "pass@8": "P@8", "pass@16": "P@16"}
PROBLEMS = 500  # of the last comparison, as the page has it


def walk(folder: Path) -> None:
    """Write the page's reward into a folder, and run its commands that train there.

    Raises:
        UserError: one of them failed.
    """
    text = PAGE.read_text()
    folder.mkdir(parents=True, exist_ok=True)
    reward = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    write_text(folder / "near.py", reward)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        if not block.startswith("slpo train countdown --workdir"):
            continue
        command = block.replace("slpo", f"{sys.executable} -m slpo_jax", 1)
        done = subprocess.run(
            command, shell=True, cwd=folder, env=environment, check=False
        )
        if done.returncode:
            raise UserError(f"{folder}: {block.strip()} failed; mend it, and run again")


def tables_of(folder: Path) -> dict[str, Any]:
    """Make the page's tables of the two runs."""
    near = read_json(folder / "runs" / "near" / "report.json", "walk the page first")
    exact = read_json(folder / "runs" / "exact" / "report.json", "walk the page first")
    rows = []
    for name in ("imitate", "imitate_control", "answer_only"):
        rows.append([near["rows"][name]["label"], *_cells(near["eval"][name]["test"])])
    plain = exact["eval"]["answer_only"]["test"]
    rows.append(["answer_only, plain verifier", *_cells(plain)])

    # What the report says of the reward against as many steps without it.
    found = {}
    for entry in near["differences"]:
        if (entry["a"], entry["b"]) == ("answer_only", "imitate_control"):
            found[entry["metric"]] = entry
    reward = [
        _interval(found[key]["difference"], found[key]["low"], found[key]["high"])
        for key in METRICS
    ]

    # The page's own comparison of the two rewards.
    judged = []
    for name in ("near", "exact"):
        reasoner = slpo.load(folder / "runs" / name)
        judged.append(reasoner.evaluate("countdown:test", samples=16, limit=PROBLEMS))
    compared = judged[0].compare(judged[1])
    finer = [_interval(*compared[key]) for key in METRICS]

    columns = ["", *METRICS.values()]
    return {
        "rows": _table(["row", *METRICS.values()], rows),
        "minus SFT, as many steps more": _table(columns, [["answer_only", *reward]]),
        "finer reward minus plain verifier": _table(columns, [["answer_only", *finer]]),
    }


def _table(columns: list[str], rows: list[list[Any]]) -> dict[str, Any]:
    return {"columns": columns, "digits": 1, "rows": rows}


def _cells(figures: Mapping[str, Any]) -> list[dict[str, float]]:
    return [
        {"value": 100 * figures[key], "se": 100 * figures[f"{key}_se"]}
        for key in METRICS
    ]


def _interval(mean: float, low: float, high: float) -> dict[str, float]:
    return {"value": 100 * mean, "low": 100 * low, "high": 100 * high}


@silent_when_unread()
def main(argv: list[str] | None = None) -> int:
    """The command; its exit status."""
    parser = FlagParser(
        prog="python launch/tutorial.py", description="The tutorial's figures."
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs") / "tutorial",
        help="default: runs/tutorial",
    )
    try:
        flags = parser.parse_args(argv)
        walk(flags.folder)
        made = tables_of(flags.folder)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    said = provenance("python launch/tutorial.py")
    write_text(FILE, dump({**said, "seeds": [0], "tables": made}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
