"""`python launch/rates.py [NAME] [--workdir=runs/NAME]`: the learning rates for `CHOSEN` of a config file.

NAME is `twelve_rates` or `falling_rates` (configs/twelve.py), or `soft_rates` (configs/soft_quickstart.py), which the
command `launch/reproduce.py NAME` has compared. Of each run and objective the rate with the best mean of some metrics
on the validation problems; of equal ones the lower. Before that a table of that mean at each rate, minus a baseline's.
"""

import math
import pprint
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grids import GRIDS
from soft import SOFT
from twelve import TWELVE

from slpo_jax.errors import FlagParser, UserError, silent_when_unread
from slpo_jax.io.files import read_json

Gains = Mapping[str, Mapping[str, Mapping[float, float]]]


@dataclass(frozen=True)
class Tried:
    """What a grid has tried.

    Attributes:
        names: of objectives, or methods.
        rates: that each was trained at.
        variant: (name, rate) -> its row.
        metrics: whose mean decides.
        baseline: the row that it is shown beside.
    """

    names: Sequence[str]
    rates: Sequence[float]
    variant: Callable[[str, float], str]
    metrics: Sequence[str]
    baseline: str


TRIED = {
    "twelve_rates": Tried(
        tuple(TWELVE["COMPARED"]), TWELVE["RATES"], TWELVE["variant"], ("acc", "pass@1", "pass@8", "pass@16"),
        "cold_start",
    ),
    "falling_rates": Tried(
        TWELVE["FALLING_TUNED"], TWELVE["RATES"], TWELVE["variant"], ("acc", "pass@1", "pass@8", "pass@16"),
        "cold_start",
    ),
    "soft_rates": Tried(tuple(SOFT["METHODS"]), SOFT["RATES"], SOFT["variant"], ("pass@1", "pass@32"), "imitate"),
}  # fmt: skip


def gains(name: str, found: Mapping[str, Any]) -> Gains:
    """Run -> objective -> rate -> mean of the metrics, a share, minus the baseline's.

    Args:
        name: in `TRIED`.
        found: what `comparison.compare` gives.
    Raises:
        UserError: an objective was not tried at some of the rates, or a line can't be read.
    """
    tried, best_of = TRIED[name], dict[str, dict[str, dict[float, float]]]()
    for run in GRIDS[name].runs:
        seeds = set()
        for objective in tried.names:  # which another run may have
            lines = {rate: f"{run.label}, {tried.variant(objective, rate)}" for rate in sorted(tried.rates)}
            if not any(line in found for line in lines.values()):
                continue
            for rate, line in lines.items():
                if line not in found:
                    raise UserError(f"{name}.json: lacks {line}; run launch/reproduce.py {name} again")
                gain = _gain(tried, found[line])
                if gain is not None:
                    seeds.add(found[line].get("seeds"))
                    best_of.setdefault(run.label, {}).setdefault(objective, {})[rate] = gain
                if gain is None or len(seeds) > 1:
                    what = "is damaged, or of other seeds"
                    raise UserError(f"{name}.json: {line} {what}; run launch/reproduce.py {name} again")
    if not best_of:
        raise UserError(f"{name}.json: holds none of its runs; run launch/reproduce.py {name} again")
    return best_of


def _gain(tried: Tried, line: Mapping[str, Any]) -> float | None:
    """The mean of the metrics, minus the baseline's; None of what is no such line."""
    try:
        differences = line["differences"][tried.baseline]
        mean = sum(differences[metric]["value"] for metric in tried.metrics) / len(tried.metrics)
    except (KeyError, TypeError):
        return None
    return round(mean, 9) if math.isfinite(mean) else None  # equal means stay so in any order of their sums


def best(each: Mapping[float, float]) -> float:
    """The rate of the largest gain; of equal ones the lowest."""
    return min(each, key=lambda rate: (-each[rate], rate))


def choose(found: Gains) -> dict[str, dict[str, float]]:
    """Run -> objective -> rate."""
    return {run: {name: best(each) for name, each in objectives.items()} for run, objectives in found.items()}


def markdown(name: str, found: Gains) -> str:
    """A table a run, in percentage points, the best rate's in bold."""
    tried = TRIED[name]
    lines = [f"Mean of {', '.join(tried.metrics)}, minus {tried.baseline}'s, in points:"]
    for run, objectives in found.items():
        rates = sorted(tried.rates)
        lines += ["", f"| {run} | " + " | ".join(f"{rate:.0e}" for rate in rates) + " |"]
        lines += ["| --- | " + " | ".join(["---:"] * len(rates)) + " |"]
        for objective, each in objectives.items():
            cells = [f"**{100 * x:+.1f}**" if rate == best(each) else f"{100 * x:+.1f}" for rate, x in each.items()]
            lines.append(f"| `{objective}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


@silent_when_unread()
def main(argv: list[str] | None = None) -> int:
    """The command; its exit status."""
    parser = FlagParser(prog="python launch/rates.py", description=(__doc__ or "").partition("\n")[2])
    parser.add_argument("name", nargs="?", choices=sorted(TRIED), default="twelve_rates", help="of the grid")
    parser.add_argument("--workdir", type=Path, help="default: runs/NAME")
    try:
        flags = parser.parse_args(argv)
        path = (flags.workdir or Path("runs") / flags.name).expanduser() / f"{flags.name}.json"
        where = f" --workdir={flags.workdir}" if flags.workdir else ""
        found = gains(flags.name, read_json(path, f"run launch/reproduce.py {flags.name}{where} first"))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(markdown(flags.name, found))
    pprint.pprint(choose(found), width=120)
    return 0


if __name__ == "__main__":
    sys.exit(main())
