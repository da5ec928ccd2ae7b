"""`python -m benchmarks.ablations --workdir=DIR [--seeds=0,1,2] [--only=NAME,...] [--config=configs/arithmetic.py]`.

The longer experiment and its ablations: for each seed, all stages of the config in `DIR/seed_S`; then, for each
variant, SLPO from the same cold start with one thing changed, in `DIR/NAME/seed_S`. Writes `DIR/main/` (report over the
seeds) and `DIR/ablations.md`, `DIR/ablations.json`: each variant minus the cold gate, on the mean of the test sets.
Run again, it goes on where it was; runs of other seeds may go on beside it.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from slpo_jax.errors import UserError
from slpo_jax.evaluation.comparisons import AVERAGE
from slpo_jax.evaluation.report import compare_runs, write_report
from slpo_jax.io.files import write_text

METRICS = ("acc", "pass@1", "pass@8", "pass@16", "latent_steps")
LATENT, ANSWER, STOP = (f"slpo.objective.{term}_weight" for term in ("latent", "answer", "stop"))

VARIANTS: dict[str, dict[str, object]] = {
    "no_latent_term": {LATENT: 0.0},
    "no_answer_term": {ANSWER: 0.0},
    "no_stop_term": {STOP: 0.0},
    "latent_alone": {ANSWER: 0.0, STOP: 0.0},
    "answer_alone": {LATENT: 0.0, STOP: 0.0},
    "stop_alone": {LATENT: 0.0, ANSWER: 0.0},
    "latent_sum_over_d": {"slpo.objective.latent_reduction": "sum"},
    "detached_variance": {"slpo.objective.detach_variance": True},
    "grpo": {"slpo.advantage": "grpo"},
    "sampled_answers": {"slpo.temperature": 1.0},
    "lr_third": {"slpo.optimizer.learning_rate": 1 / 3},
    "lr_x_3": {"slpo.optimizer.learning_rate": 3.0},
    "lr_x_10": {"slpo.optimizer.learning_rate": 10.0},
    "batch_quarter": {"slpo.batch_size": 1 / 4},
    "no_imitation_dropout": {"imitate.dropout": 0.0},
}
_SCALED = {"slpo.optimizer.learning_rate": float, "slpo.batch_size": int}
"""Keys whose values above are factors of the config's own."""


def run(config: str, workdir: Path, overrides: dict[str, object]) -> None:
    """One run of the main command; what is there already is not done again."""
    flags = [f"--config.{key}={value}" for key, value in overrides.items()]
    command = [sys.executable, "-m", "slpo_jax.main", f"--config={config}", f"--workdir={workdir}", *flags]
    print(" ".join(command[1:]), flush=True)
    done = subprocess.run(command, check=False, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    if done.returncode:
        raise UserError(f"{workdir}: its run ended with status {done.returncode}; mend what it says above")


def resolved(overrides: dict[str, object], base: dict) -> dict[str, object]:
    """The overrides, with factors multiplied out."""
    out = dict(overrides)
    for key, cast in _SCALED.items():
        if key in out:
            value = base
            for part in key.split("."):
                value = value[part]
            out[key] = cast(value * out[key])
    return out


def variant(config: str, root: Path, name: str, seed: int) -> None:
    """SLPO with one thing changed, from the seed's own cold start (or from imitation on, where that is the change)."""
    base, workdir = root / f"seed_{seed}", root / name / f"seed_{seed}"
    settings = json.loads((base / "config.json").read_text())
    overrides = {"seed": seed, "evaluate.seeds": 1, **resolved(VARIANTS[name], settings)}
    if any(key.startswith("imitate.") for key in overrides):
        overrides |= {"imitate.control": False}
    else:
        overrides |= {"stages": "('slpo','evaluate')", "init": base / "checkpoints" / "cold_start"}
    run(config, workdir, overrides)
    # The rows that the variant shares with its seed.
    for row in ("imitate", "imitate_fixed_tmax", "imitate_control", "cold_start"):
        link = workdir / "eval" / row
        if not link.exists():
            link.symlink_to((base / "eval" / row).resolve(), target_is_directory=True)
    write_report(workdir)


def entries(report: dict, b: str) -> dict[str, dict]:
    """metric -> SLPO minus row `b` on the mean of the sets."""
    return {e["metric"]: e for e in report["differences"] if e["a"] == "slpo" and e["b"] == b and e["set"] == AVERAGE}


def table(root: Path) -> str:
    """Variants minus the cold gate, in percentage points, from whatever runs are finished."""
    lines = [
        "| variant | seeds | Acc | P@1 | P@8 | P@16 | #L |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    everything = {}
    for name in ("as configured", *VARIANTS):
        folder = root if name == "as configured" else root / name
        runs = sorted(p.parent for p in folder.glob("seed_*/report.json"))
        if not runs:
            continue
        out = root / "main" if name == "as configured" else folder / "main"
        found = entries(compare_runs(runs, out), "cold_start")
        everything[name] = {"seeds": len(runs), "slpo_minus_cold_start": found}
        cells = []
        for metric in METRICS:
            e, scale = found.get(metric), 1 if metric == "latent_steps" else 100
            cells.append("" if e is None else _cell(e, scale))
        lines.append(f"| {name} | {len(runs)} | {' | '.join(cells)} |")
    write_text(root / "ablations.json", json.dumps(everything, indent=1) + "\n")
    return "\n".join(lines) + "\n"


def _cell(entry: dict, scale: int) -> str:
    difference, low, high = (scale * entry[key] for key in ("difference", "low", "high"))
    text = f"{difference:+.2f} [{low:+.2f}, {high:+.2f}]"
    return f"**{text}**" if entry["excludes_zero"] else text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--config", default="configs/arithmetic.py")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", default=None, help="names of variants; '' for the main runs alone")
    args = parser.parse_args(argv)
    names = list(VARIANTS) if args.only is None else [name for name in args.only.split(",") if name]
    try:
        unknown = [name for name in names if name not in VARIANTS]
        if unknown or not args.seeds.replace(",", "").isdecimal():
            raise UserError(f"--only/--seeds: {unknown or args.seeds}: use seeds as 0,1,2 and {', '.join(VARIANTS)}")
        seeds = [int(seed) for seed in args.seeds.split(",")]
        for seed in seeds:
            run(args.config, args.workdir / f"seed_{seed}", {"seed": seed})
        for name in names:
            for seed in seeds:
                variant(args.config, args.workdir, name, seed)
        text = table(args.workdir)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write_text(args.workdir / "ablations.md", text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
