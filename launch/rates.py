"""`python launch/rates.py [--workdir=runs/twelve_rates]`: the learning rates for `CHOSEN` in configs/twelve.py.

Of each reasoner and objective that `launch/reproduce.py twelve_rates` has compared, the rate with the best mean of Acc,
Pass@1, Pass@8 and Pass@16 on the validation problems; of equal ones the lower. Before that a table of that mean at each
rate, minus the cold gate's.
"""

import argparse
import pprint
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grids import GRIDS
from twelve import TWELVE

from slpo_jax.errors import UserError
from slpo_jax.io.files import read_json

METRICS = ("acc", "pass@1", "pass@8", "pass@16")
BASELINE = "cold_start"
Gains = Mapping[str, Mapping[str, Mapping[float, float]]]


def gains(found: Mapping[str, Any]) -> Gains:
    """Reasoner -> objective -> rate -> mean of the four metrics, a share, minus the cold gate's.

    Args:
        found: what `comparison.compare` gives.
    Raises:
        UserError: an objective was tried at some of the rates alone.
    """
    tried: dict[str, dict[str, dict[float, float]]] = {}
    for run in GRIDS["twelve_rates"].runs:
        for name in TWELVE["COMPARED"]:
            lines = {rate: f"{run.label}, {TWELVE['variant'](name, rate)}" for rate in sorted(TWELVE["RATES"])}
            each = {rate: _gain(found[line]) for rate, line in lines.items() if line in found}
            if each and len(each) < len(lines):
                missing = next(line for line in lines.values() if line not in found)
                raise UserError(f"twelve_rates.json: lacks {missing}; run launch/reproduce.py twelve_rates again")
            if each:
                tried.setdefault(run.label, {})[name] = each
    return tried


def _gain(line: Mapping[str, Any]) -> float:
    mean = sum(line["differences"][BASELINE][metric]["value"] for metric in METRICS) / len(METRICS)
    return round(mean, 9)  # equal means stay so in any order of their sums


def best(each: Mapping[float, float]) -> float:
    """The rate of the largest gain; of equal ones the lowest."""
    return min(each, key=lambda rate: (-each[rate], rate))


def choose(tried: Gains) -> dict[str, dict[str, float]]:
    """Reasoner -> objective -> rate."""
    return {run: {name: best(each) for name, each in objectives.items()} for run, objectives in tried.items()}


def markdown(tried: Gains) -> str:
    """A table a reasoner, in percentage points, the best rate's in bold."""
    lines = [f"Mean of {', '.join(METRICS)}, minus {BASELINE}'s, in points:"]
    for run, objectives in tried.items():
        rates = sorted(TWELVE["RATES"])
        lines += ["", f"| {run} | " + " | ".join(f"{rate:.0e}" for rate in rates) + " |"]
        lines += ["| --- | " + " | ".join(["---:"] * len(rates)) + " |"]
        for name, each in objectives.items():
            cells = [f"**{100 * x:+.1f}**" if rate == best(each) else f"{100 * x:+.1f}" for rate, x in each.items()]
            lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[2], allow_abbrev=False)
    parser.add_argument("--workdir", type=Path, default=Path("runs/twelve_rates"), help="default: runs/twelve_rates")
    path = parser.parse_args().workdir / "twelve_rates.json"
    try:
        tried = gains(read_json(path, "run launch/reproduce.py twelve_rates first"))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(markdown(tried))
    pprint.pprint(choose(tried), width=120)
    return 0


if __name__ == "__main__":
    sys.exit(main())
