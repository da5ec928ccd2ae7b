"""A comparison of a table's finished runs: paired, over problems and seeds."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jobs import DONE, Job, Run, Table, make_job
from runs import CONTENDERS
from slpo_jax.evaluation.comparisons import AVERAGE
from slpo_jax.evaluation.records import read_evals
from slpo_jax.evaluation.report import compare_runs
from slpo_jax.evaluation.report_rows import read_rows
from slpo_jax.evaluation.statistics import mean_se
from slpo_jax.io.files import read_json

Figures = dict[str, dict[str, float]]  # metric -> {"value", "low", "high"} of a difference, {"value", "se"} of a mean
_VARIANT = re.compile(r"(.*?)_(\de_\d\d)(.*)")

NAMES = {
    "imitate": "imitation", "imitate_by_steps": "imitation, right length", "imitate_no_thought": "no latents",
    "imitate_fixed_tmax": "imitation, T_max latents", "imitate_control": "further imitation",
    "cold_start": "cold gate", "slpo_sum": "SLPO (sum)", "slpo_mean": "SLPO (mean)", "slpo_pkpo": "SLPO (PKPO)",
    "pass_at_k": "pathwise", "replay": "pathwise (reward)", "replay_pkpo": "pathwise (PKPO)", "keys": "reference",
    "answer_only_pkpo": "answer_only (PKPO)", "simcot": "SIM-CoT", "no_latents": "no latents",
    "slpo": "SLPO", "slpo_half": "SLPO, half way", "answer_only_half": "answer_only, half way",
    "cot_sft": "CoT-SFT", "no_thought": "no latents", "icot": "iCoT",
    "simcot_coconut": "SIM-CoT on COCONUT", "simcot_codi": "SIM-CoT on CODI", "coconut": "COCONUT", "codi": "CODI",
    "dart": "DART-like", "colar": "CoLaR", "regular": "ReGuLaR with text", "exact": "exact likelihood",
    "latent_sft": "Latent-SFT", "latent_grpo": "Latent-GRPO",
    "cot": "chain of thought", "none": "no latents",
    "grpo": "GRPO", "grpo_latent": "GRPO with latent inference",
    "lepo": "LEPO", "hrpo": "HRPO", "soft_tokens": "Soft Tokens", "acc": "Acc", "latent_steps": "latents",
    "sequential_steps": "steps", "milliseconds": "ms an answer",
    "answer_tokens": "words", "distinct_answers": "answers", "pearson_difficulty_r": "r with difficulty",
    **{f"pass@{k}": f"Pass@{k}" for k in (1, 2, 8, 16, 32)},
    **{f"depth_{depth}": f"depth {depth}" for depth in (1, 2, 3, 4, 5)},
}  # fmt: skip
_BACKBONES = {"gpt2": "GPT-2", "llama": "Llama"}
NAMES |= {
    f"{name}_{on}": f"{NAMES[name].replace(' on ', ', ')} on {title}"
    for name in CONTENDERS for on, title in _BACKBONES.items()
} | {"no_thought_gpt2_noisy": "no latents with dropout on GPT-2"}  # fmt: skip
"""What rows, runs and metrics are called in tables: as in the paper, where it has them."""


def compare(table: Table, root: Path, limit: int | None = None) -> tuple[dict[str, Any], list[int]]:
    """Tables of every run with a finished seed, over its seeds, and those seeds; writes the runs' own reports.

    Runs that were finished with other settings or data than the table's now, or whose results were changed or lost
    since, are left out, saying so.

    Args:
        limit: problems of each test set; None: the config's own.
    Returns:
        Name -> {"columns", "rows"}, as `tables.markdown` takes it: the rows themselves; their differences from each
        baseline, mean of the sets; in how many settings, each run and set being one, a row is above a baseline and
        above all of them; of rates that were tried the best.
    """
    means: dict[str, Figures] = {}
    by_set_of: dict[str, dict[str, Any]] = {}
    correlations: dict[str, Figures] = {}
    differences: dict[str, dict[str, Figures]] = {b: {} for b in table.minus}
    counts: dict[tuple[str, str], dict[str, list[dict[str, float]]]] = {}
    by_seed: dict[str, Figures] = {}
    seeds: set[int] = set()
    for run in table.runs:
        jobs = finished(table, run, root.resolve(), limit)
        if not jobs:
            continue
        seeds |= {job.seed for job in jobs}
        report = compare_runs([job.workdir for job in jobs], root / run.name)
        for row in (row for row in run.rows or table.rows if row in report["eval"]):
            names = [run.name] * (len(table.runs) > 1) + [row] * (len(table.rows) > 1)
            line = ": ".join(map(called, names or [run.name]))
            if table.samples:
                return {"selectors": by_samples(report[AVERAGE][row], table.samples)}, sorted(seeds)
            if table.by_set and (r_S := [r for job in jobs if (r := depth_correlation(job.workdir, row)) is not None]):
                correlations[line] = {"r": {"value": float(np.mean(r_S)), "se": mean_se(np.array(r_S)) or 0.0}}
            means[line], by_set_of[line] = _means(report, row, table.metrics), report["eval"][row]
            for metric in table.by_set:
                for name, figures in report["eval"][row].items():
                    cells = zip((f"seed {job.seed}" for job in jobs), _by_seed(figures, metric), strict=True)
                    by_seed.setdefault(metric, {})[f"{line}: {called(name)}"] = dict(cells)
            by_set = {b: _differences(report, row, b, table.metrics) for b in table.minus if b != row}
            for b, metrics in by_set.items():
                # The mean of the sets comes after them; where there is one set alone, its figure stands.
                differences[b][line] = {metric: list(sets.values())[-1] for metric, sets in metrics.items()}
            _count(counts, run.kind or row, by_set)
    columns = ["", *(called(metric) for metric in table.metrics)]
    found = {"rows": made(columns, means, table.metrics)}
    for metric in table.by_set if by_set_of else ():
        sets = list(next(iter(by_set_of.values())))
        lines = {line: {s: _figure(row[s], metric) for s in sets} for line, row in by_set_of.items()}
        found[f"{called(metric)} by set"] = made(["", *map(called, sets)], lines, sets)
        if len(table.runs) == 1 or not any(run.group for run in table.runs):  # of groups there would be too many
            names = [f"seed {seed}" for seed in sorted(seeds)]
            found[f"{called(metric)} by seed"] = made(["", *names], by_seed[metric], names)
    if correlations:
        found["correlation"] = made(["", "r of latents with steps"], correlations, ["r"])
    for b, lines in differences.items():
        found[f"minus {called(b)}"] = made(columns, {line: x for line, x in lines.items() if x}, table.metrics)
    if any(len(figures) > 1 for metrics in counts.values() for figures in metrics.values()):
        found["settings above"] = _counted(columns, counts, table.metrics)
    if rates := best_rates(differences[table.minus[0]] if table.minus else {}, table.metrics):
        found["rates"] = rates
    return found, sorted(seeds)


def depth_correlation(workdir: Path, row: str) -> float | None:
    """Pearson's r of a row's greedy numbers of latents with the problems' steps, its test sets weighing the same.

    Sets with problems of more steps than imitation has stages, which nothing was trained on, are left out.

    Returns:
        None where all problems have as many latents, or none has known steps.
    """
    trained = read_json(workdir / "config.json")["imitate"]["max_latent_stage"]
    found = read_evals(workdir, read_rows(workdir))[0][row].values()
    sets = [records for records in found if records.problem_steps.max() <= trained]
    if not sets:
        return None
    steps_N = np.concatenate([records.problem_steps for records in sets])
    latents_N = np.concatenate([records.latent_steps for records in sets])
    if np.ptp(latents_N) == 0:
        return None
    weights_N = np.concatenate([np.full(len(records.latent_steps), 1 / len(records.latent_steps)) for records in sets])
    cov = np.cov(steps_N, latents_N, aweights=weights_N)
    return float(cov[0, 1] / np.sqrt(cov[0, 0] * cov[1, 1]))


def by_samples(figures: Mapping[str, Any], samples: Sequence[int]) -> dict[str, Any]:
    """The table of what each selector makes of so many samples; Pass@N bounds them all.

    Args:
        figures: of a report's row, mean of the sets.
    """
    lines = {"greedy": "acc", "a sample": "pass@1", "majority vote": "maj@{}"}
    for scorer in dict.fromkeys(match[1] for name in figures if (match := re.fullmatch(r"vote@\d+_(\w+?)", name))):
        if not scorer.endswith("_se"):
            lines |= {f"best of N by {scorer}": f"best@{{}}_{scorer}", f"vote by {scorer}": f"vote@{{}}_{scorer}"}
    lines |= {"beam search by latent_rm": "searched", "any of N (Pass@N)": "pass@{}"}

    def cell(name: str) -> dict[str, float] | None:
        return {"value": 100 * figures[name], "se": 100 * figures[f"{name}_se"]} if name in figures else None

    rows = [[line, *(cell(name.format(count)) for count in samples)] for line, name in lines.items()]
    return {"columns": ["", *(f"N = {count}" for count in samples)], "rows": rows, "digits": 1}


def finished(table: Table, run: Run, root: Path, limit: int | None) -> list[Job]:
    """The run's seeds that are finished as the table has it now; of the others a line is printed."""
    seeds = (path.parent.name.removeprefix("seed_") for path in (root / run.name).glob(f"seed_*/{DONE}"))
    jobs = [make_job(table, run, root, int(seed), limit) for seed in sorted(seeds) if seed.isdecimal()]
    for job in jobs:
        if not job.is_finished:
            print(f"{job.workdir}: left out, it was run with other settings or data, or its results have changed "
                  "since; run it again", flush=True)  # fmt: skip
    return [job for job in jobs if job.is_finished]


def called(name: str) -> str:
    """What tables call a row, a run or a metric."""
    return NAMES.get(name, name)


def scale(metric: str) -> int:
    """What a metric is multiplied by: shares are shown in percent."""
    return 100 if metric.startswith(("acc", "pass@")) else 1


def made(columns: Sequence[str], lines: Mapping[str, Figures], metrics: Sequence[str]) -> dict[str, Any]:
    """A table, as a results file has it."""
    rows = [[line, *(figures.get(metric) for metric in metrics)] for line, figures in lines.items()]
    return {"columns": list(columns), "rows": rows}


def _means(report: dict[str, Any], name: str, metrics: Sequence[str]) -> Figures:
    """Of the mean of the sets, or of the only one, with one standard error."""
    row = report[AVERAGE].get(name) or next(iter(report["eval"].get(name, {}).values()), {})
    return {metric: _figure(row, metric) for metric in metrics if row.get(metric) is not None}


def _figure(row: Mapping[str, Any], metric: str) -> dict[str, float]:
    """A figure of a report's row, and its standard error."""
    return {"value": scale(metric) * row[metric], "se": scale(metric) * (row.get(f"{metric}_se") or 0.0)}


def _by_seed(row: Mapping[str, Any], metric: str) -> list[float]:
    """A figure of a report's row in each of its runs."""
    return [scale(metric) * value for value in row.get("per_run", {metric: [row[metric]]})[metric]]


def _differences(report: dict[str, Any], a: str, b: str, metrics: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Metric -> set -> the difference with its interval; the mean of the sets is called `AVERAGE`."""
    found: dict[str, dict[str, Any]] = {}
    for entry in report["differences"]:
        if (entry["a"], entry["b"]) == (a, b) and entry["metric"] in metrics:
            keys = {"value": "difference", "low": "low", "high": "high"}
            figure = {key: scale(entry["metric"]) * entry[name] for key, name in keys.items()}
            found.setdefault(entry["metric"], {})[entry["set"]] = figure
    return found


def _count(counts: dict[tuple[str, str], dict[str, list]], kind: str, by_set: dict) -> None:
    """Adds a row's differences in each set: from each baseline, and the least of all where it has all."""
    each = {
        b: {metric: {s: x for s, x in sets.items() if s != AVERAGE} for metric, sets in metrics.items()}
        for b, metrics in by_set.items() if metrics
    }  # fmt: skip
    if len(each) == len(by_set) > 1:
        every = list(each.values())
        each["all of them"] = {
            metric: {s: {key: min(b[metric][s][key] for b in every) for key in ("value", "low")} for s in sets}
            for metric, sets in every[0].items()
        }
    for b, metrics in each.items():
        for metric, sets in metrics.items():
            counts.setdefault((kind, b), {}).setdefault(metric, []).extend(sets.values())


def _counted(columns: Sequence[str], counts: Mapping[tuple[str, str], dict], metrics: Sequence[str]) -> dict[str, Any]:
    """In how many settings a row is above, and in brackets in how many its interval is."""
    rows = []
    for (kind, b), found in counts.items():
        cells: list[str | None] = [f"{called(kind)}, above {called(b)}"]
        for figures in (found.get(metric, []) for metric in metrics):
            above = [sum(figure[key] > 0 for figure in figures) for key in ("value", "low")]
            cells.append("{} ({}) of {}".format(*above, len(figures)) if figures else None)
        rows.append(cells)
    return {"columns": list(columns), "rows": rows}


def best_rates(lines: Mapping[str, Figures], metrics: Sequence[str]) -> dict[str, Any] | None:
    """Of lines that are called NAME_RATE, or NAME_RATE: ROW, the mean of the metrics' differences, and the best rate.

    Of equal ones the lowest rate. None: there are no such lines.
    """
    tried: dict[str, dict[str, float]] = {}
    for line, figures in lines.items():
        if (match := _VARIANT.fullmatch(line)) and figures:
            mean = np.mean([figures[metric]["value"] for metric in metrics if metric in figures])
            tried.setdefault(match[1] + match[3], {})[match[2].replace("e_", "e-")] = round(float(mean), 9)
    rates = sorted({rate for means in tried.values() for rate in means}, key=float)
    rows = [
        [name, *(means.get(rate) for rate in rates), min(means, key=lambda rate: (-means[rate], float(rate)))]
        for name, means in tried.items()
    ]
    return {"columns": ["", *rates, "best"], "rows": rows, "signed": True, "digits": 1} if rows else None
