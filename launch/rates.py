"""`python launch/rates.py [--workdir=runs/twelve_rates]`: the learning rates for `CHOSEN` in configs/twelve.py.

Of each reasoner and objective that `launch/reproduce.py twelve_rates` has compared, the rate with the best mean of Acc,
Pass@1, Pass@8 and Pass@16 on the validation problems; of equal ones the lower.
"""

import argparse
import pprint
import sys
from pathlib import Path
from typing import Any

from grids import GRIDS
from twelve import TWELVE

from slpo_jax.errors import UserError
from slpo_jax.io.files import read_json

METRICS = ("acc", "pass@1", "pass@8", "pass@16")


def choose(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Reasoner -> objective -> rate, of those that were tried at all rates.

    Args:
        found: what `reproduce.compare` gives.
    Raises:
        UserError: an objective was tried at some of the rates alone.
    """
    chosen: dict[str, dict[str, float]] = {}
    for run in GRIDS["twelve_rates"].runs:
        for name in TWELVE["COMPARED"]:
            lines = {rate: f"{run.label}, {TWELVE['variant'](name, rate)}" for rate in sorted(TWELVE["RATES"])}
            means = {rate: _mean(found[line]) for rate, line in lines.items() if line in found}
            if means and len(means) < len(lines):
                missing = next(line for line in lines.values() if line not in found)
                raise UserError(f"twelve_rates.json: lacks {missing}; run launch/reproduce.py twelve_rates again")
            if means:
                chosen.setdefault(run.label, {})[name] = max(means, key=lambda rate: means[rate])
    return chosen


def _mean(line: dict[str, Any]) -> float:
    return sum(line["means"][metric]["value"] for metric in METRICS) / len(METRICS)


def main() -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[2], allow_abbrev=False)
    parser.add_argument("--workdir", type=Path, default=Path("runs/twelve_rates"), help="default: runs/twelve_rates")
    path = parser.parse_args().workdir / "twelve_rates.json"
    try:
        pprint.pprint(choose(read_json(path, "run launch/reproduce.py twelve_rates first")), width=120)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
