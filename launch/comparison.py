"""A comparison of a table's finished runs: paired, over problems and seeds."""

import dataclasses
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

Figures = dict[str, dict[str, float]]
"""metric -> {"value", "low", "high"} of a difference, {"value", "se"} of a mean"""
Counts = dict[tuple[str, str], dict[str, list[dict[str, float]]]]
_VARIANT = re.compile(r"(.*?)_(\de_\d\d)(.*)")

NAMES = {
    # Rows of every run.
    "imitate": "SFT",
    "imitate_by_steps": "SFT, right length",
    "imitate_fixed_tmax": "SFT, T_max latents",
    "imitate_control": "SFT, as many steps more",
    "imitate_no_thought": "no latents",
    "cold_start": "cold gate",
    # Objectives.
    "keys": "SFT on keys",
    "reference": "SFT on keys",
    "slpo": "SLPO",
    "slpo_half": "SLPO, half way",
    "slpo_sum": "SLPO (sum)",
    "slpo_mean": "SLPO (mean)",
    "slpo_pkpo": "SLPO (PKPO)",
    "answer_only_half": "answer_only, half way",
    "answer_only_pkpo": "answer_only (PKPO)",
    "pass_at_k": "pathwise",
    "replay_pkpo": "replay (PKPO)",
    "exact": "exact likelihood",
    "grpo": "GRPO",
    "grpo_latent": "GRPO with latent inference",
    "latent_grpo": "Latent-GRPO",
    "lepo": "LEPO",
    "hrpo": "HRPO",
    "soft_tokens": "Soft Tokens",
    # Reasoners.
    "rewards": "SIM-CoT",
    "no_latents_rewards": "no latents",
    "no_latents": "no latents",
    "no_thought": "no latents",
    "none": "no latents",
    "cot": "chain of thought",
    "cot_sft": "CoT-SFT",
    "icot": "iCoT",
    "coconut": "COCONUT",
    "codi": "CODI",
    "simcot": "SIM-CoT",
    "simcot_coconut": "SIM-CoT on COCONUT",
    "simcot_codi": "SIM-CoT on CODI",
    "dart": "DART-like",
    "colar": "CoLaR",
    "regular": "ReGuLaR with text",
    "latent_sft": "Latent-SFT",
    "adalr": "AdaLR",
    "seven": "seven operations",
    "llama": "tiny Llama",
    # Metrics.
    "acc": "Acc",
    "latent_steps": "latents",
    "sequential_steps": "steps",
    "milliseconds": "ms an answer",
    "answer_tokens": "words",
    "distinct_answers": "answers",
    "pearson_difficulty_r": "r with difficulty",
}
NAMES |= {f"pass@{k}": f"Pass@{k}" for k in (1, 2, 8, 16, 32)}
NAMES |= {f"depth_{depth}": f"depth {depth}" for depth in range(1, 8)}
_BACKBONES = {"gpt2": "GPT-2", "llama": "Llama"}
for _contender in CONTENDERS:
    _reasoner = NAMES[_contender].replace(" on ", ", ")
    for _backbone, _title in _BACKBONES.items():
        NAMES[f"{_contender}_{_backbone}"] = f"{_reasoner} on {_title}"
NAMES["no_thought_gpt2_noisy"] = "no latents with dropout on GPT-2"
"""What rows, runs and metrics are called in tables: as in the paper, where it has them."""


def compare(
    table: Table, root: Path, limit: int | None = None
) -> tuple[dict[str, Any], list[int]]:
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
    lines = _Lines(table)
    seeds: set[int] = set()
    for run in table.runs:
        jobs = find_finished(table, run, root.resolve(), limit)
        if not jobs:
            continue
        seeds |= {job.seed for job in jobs}
        report = compare_runs([job.workdir for job in jobs], root / run.name)
        for row in run.rows or table.rows:
            if row not in report["eval"]:
                continue
            if table.samples:
                figures = report[AVERAGE][row]
                selectors = by_samples(figures, table.samples)
                return {"selectors": selectors}, sorted(seeds)
            lines.add(run, row, report, jobs)
    return lines.tables(sorted(seeds)), sorted(seeds)


@dataclasses.dataclass
class _Lines:
    """What the tables of a comparison have of each line, which is a row of a run.

    Attributes:
        means: line -> metric -> the mean of the sets.
        by_set: line -> set -> the figures of a report.
        by_seed: metric -> "LINE: SET" -> "seed N" -> the figure.
        correlations: line -> r of its latents with the problems' steps.
        differences: baseline -> line -> metric -> the difference, mean of the sets.
        counts: (kind, baseline) -> metric -> the differences of all sets.
    """

    table: Table
    means: dict[str, Figures] = dataclasses.field(default_factory=dict)
    by_set: dict[str, Any] = dataclasses.field(default_factory=dict)
    by_seed: dict[str, Any] = dataclasses.field(default_factory=dict)
    correlations: dict[str, Figures] = dataclasses.field(default_factory=dict)
    differences: dict[str, Any] = dataclasses.field(default_factory=dict)
    counts: Counts = dataclasses.field(default_factory=dict)

    def add(
        self,
        run: Run,
        row: str,
        report: dict[str, Any],
        jobs: Sequence[Job],
    ) -> None:
        """Add a row of a run's report over its seeds."""
        table = self.table
        # A line is called by what there are several of.
        names = []
        if len(table.runs) > 1:
            names.append(run.name)
        if len(table.rows) > 1:
            names.append(row)
        line = ": ".join(map(display_name, names or [run.name]))
        self.means[line] = _means(report, row, table.metrics)
        self.by_set[line] = report["eval"][row]

        # Each set's figure in each seed's run.
        for metric in table.by_set:
            by_seed = self.by_seed.setdefault(metric, {})
            for name, figures in report["eval"][row].items():
                values = _by_seed(figures, metric)
                cells = {}
                for job, value in zip(jobs, values, strict=True):
                    cells[f"seed {job.seed}"] = value
                by_seed[f"{line}: {display_name(name)}"] = cells
        # How the latents go with the problems' steps, where sets differ in these.
        if table.by_set:
            r_S = [depth_correlation(job.workdir, row) for job in jobs]
            known = np.array([r for r in r_S if r is not None])
            if known.size:
                r = {
                    "value": float(np.mean(known)),
                    "se": mean_se(known) or 0.0,
                }
                self.correlations[line] = {"r": r}

        # The differences from each baseline.
        by_set = {}
        for b in table.minus:
            self.differences.setdefault(b, {})
            if b == row:
                continue
            by_set[b] = _differences(
                report,
                row,
                b,
                table.metrics,
            )
            # The mean of the sets comes after them; where there is one set alone, its figure stands.
            of_mean = {}
            for metric, sets in by_set[b].items():
                of_mean[metric] = list(sets.values())[-1]
            if of_mean:
                self.differences[b][line] = of_mean
        _count(self.counts, run.kind or row, by_set)

    def tables(self, seeds: Sequence[int]) -> dict[str, Any]:
        """Make the tables of all lines, see `compare`."""
        table = self.table
        metrics = table.metrics
        columns = ["", *map(display_name, metrics)]
        found = {"rows": make_table(columns, self.means, metrics)}

        # The figures of each set, and of each seed; of groups there would be too many.
        is_grouped = any(run.group for run in table.runs)
        for metric in table.by_set if self.by_set else ():
            sets = list(next(iter(self.by_set.values())))
            lines = {}
            for line, row in self.by_set.items():
                lines[line] = {name: _figure(row[name], metric) for name in sets}
            header = ["", *map(display_name, sets)]
            found[f"{display_name(metric)} by set"] = make_table(header, lines, sets)
            if len(table.runs) == 1 or not is_grouped:
                names = [f"seed {seed}" for seed in seeds]
                by_seed = self.by_seed[metric]
                found[f"{display_name(metric)} by seed"] = make_table(
                    [
                        "",
                        *names,
                    ],
                    by_seed,
                    names,
                )

        if self.correlations:
            header = ["", "r of latents with steps"]
            found["correlation"] = make_table(header, self.correlations, ["r"])
        for b in table.minus:
            lines = self.differences.get(b, {})
            found[f"minus {display_name(b)}"] = make_table(columns, lines, metrics)

        # In how many settings a row is above its baselines, where there are several settings.
        of_settings = []
        for figures_of in self.counts.values():
            of_settings += map(len, figures_of.values())
        if max(of_settings, default=0) > 1:
            found["settings above"] = _count_settings(columns, self.counts, metrics)
        first = self.differences.get(table.minus[0], {}) if table.minus else {}
        if rates := best_rates(first, metrics):
            found["rates"] = rates
        return found


def depth_correlation(workdir: Path, row: str) -> float | None:
    """Pearson's r of a row's greedy numbers of latents with the problems' steps, its test sets weighing the same.

    Sets with problems of more steps than imitation has stages, which nothing was trained on, are left out.

    Returns:
        None where all problems have as many latents, or none has known steps.
    """
    trained = read_json(workdir / "config.json")["imitate"]["max_latent_stage"]
    evals, _ = read_evals(workdir, read_rows(workdir))
    steps = []
    latents = []
    weights = []
    for records in evals[row].values():
        if records.problem_steps.max() <= trained:
            n = len(records.latent_steps)
            steps.append(records.problem_steps)
            latents.append(records.latent_steps)
            weights.append(np.full(n, 1 / n))
    if not steps:
        return None
    latents_N = np.concatenate(latents)
    if np.ptp(latents_N) == 0:
        return None
    weights_N = np.concatenate(weights)
    cov = np.cov(np.concatenate(steps), latents_N, aweights=weights_N)
    return float(cov[0, 1] / np.sqrt(cov[0, 0] * cov[1, 1]))


def by_samples(figures: Mapping[str, Any], samples: Sequence[int]) -> dict[str, Any]:
    """The table of what each selector makes of so many samples; Pass@N bounds them all.

    Args:
        figures: of a report's row, mean of the sets.
    """
    scorers: dict[str, None] = {}
    for name in figures:
        match = re.fullmatch(r"vote@\d+_(\w+?)", name)
        if match and not match[1].endswith("_se"):
            scorers[match[1]] = None

    # The selectors, and the figure of each for N samples.
    selectors = {"greedy": "acc", "a sample": "pass@1", "majority vote": "maj@{}"}
    for scorer in scorers:
        selectors[f"best of N by {scorer}"] = f"best@{{}}_{scorer}"
        selectors[f"vote by {scorer}"] = f"vote@{{}}_{scorer}"
    selectors["beam search by latent_rm"] = "searched"
    selectors["any of N (Pass@N)"] = "pass@{}"

    rows = []
    for selector, pattern in selectors.items():
        row: list[Any] = [selector]
        for count in samples:
            name = pattern.format(count)
            cell = None
            if name in figures:
                se = 100 * figures[f"{name}_se"]
                cell = {
                    "value": 100 * figures[name],
                    "se": se,
                }
            row.append(cell)
        rows.append(row)
    columns = [f"N = {count}" for count in samples]
    return {
        "columns": ["", *columns],
        "rows": rows,
        "digits": 1,
    }


def find_finished(
    table: Table,
    run: Run,
    root: Path,
    limit: int | None,
) -> list[Job]:
    """The run's seeds that are finished as the table has it now; of the others a line is printed."""
    seeds = []
    for path in (root / run.name).glob(f"seed_*/{DONE}"):
        seeds.append(path.parent.name.removeprefix("seed_"))
    jobs = []
    for seed in sorted(seeds):
        if not seed.isdecimal():
            continue
        job = make_job(
            table,
            run,
            root,
            int(seed),
            limit,
        )
        if job.is_finished:
            jobs.append(job)
        else:
            print(
                f"{job.workdir}: left out, it was run with other settings or data, or its results have changed "
                "since; run it again",
                flush=True,
            )
    return jobs


def display_name(name: str) -> str:
    """What tables call a row, a run or a metric."""
    return NAMES.get(name, name)


def scale(metric: str) -> int:
    """What a metric is multiplied by: shares are shown in percent."""
    return 100 if metric.startswith(("acc", "pass@")) else 1


def make_table(
    columns: Sequence[str],
    lines: Mapping[str, Figures],
    metrics: Sequence[str],
) -> dict[str, Any]:
    """A table, as a results file has it."""
    rows = []
    for line, figures in lines.items():
        cells = [figures.get(metric) for metric in metrics]
        rows.append([line, *cells])
    return {"columns": list(columns), "rows": rows}


def _means(
    report: dict[str, Any],
    name: str,
    metrics: Sequence[str],
) -> Figures:
    """Of the mean of the sets, or of the only one, with one standard error."""
    row = report[AVERAGE].get(name)
    if not row:
        sets = report["eval"].get(name, {})
        row = next(iter(sets.values()), {})
    known = [metric for metric in metrics if row.get(metric) is not None]
    return {metric: _figure(row, metric) for metric in known}


def _figure(row: Mapping[str, Any], metric: str) -> dict[str, float]:
    """A figure of a report's row, and its standard error."""
    error = row.get(f"{metric}_se") or 0.0
    times = scale(metric)
    return {
        "value": times * row[metric],
        "se": times * error,
    }


def _by_seed(row: Mapping[str, Any], metric: str) -> list[float]:
    """A figure of a report's row in each of its runs."""
    alone = {metric: [row[metric]]}
    values = row.get("per_run", alone)[metric]
    return [scale(metric) * value for value in values]


def _differences(
    report: dict[str, Any],
    a: str,
    b: str,
    metrics: Sequence[str],
) -> dict[str, dict[str, Any]]:
    """Metric -> set -> the difference with its interval; the mean of the sets is called `AVERAGE`."""
    found: dict[str, dict[str, Any]] = {}
    for entry in report["differences"]:
        metric = entry["metric"]
        if metric not in metrics or (entry["a"], entry["b"]) != (a, b):
            continue
        times = scale(metric)
        figure = {
            "value": times * entry["difference"],
            "low": times * entry["low"],
            "high": times * entry["high"],
        }
        found.setdefault(metric, {})[entry["set"]] = figure
    return found


def _count(counts: Counts, kind: str, by_set: dict) -> None:
    """Adds a row's differences in each set: from each baseline, and the least of all where it has all."""
    each: dict[str, dict[str, dict[str, Any]]] = {}
    for b, metrics in by_set.items():
        of_metrics = {}
        for metric, sets in metrics.items():
            single = [name for name in sets if name != AVERAGE]
            of_metrics[metric] = {name: sets[name] for name in single}
        if of_metrics:
            each[b] = of_metrics

    # Where a row is compared with every baseline, the least of its differences counts too.
    if len(each) == len(by_set) > 1:
        every = list(each.values())
        least: dict[str, dict[str, Any]] = {}
        for metric, sets in every[0].items():
            least[metric] = {}
            for name in sets:
                figures = [b[metric][name] for b in every]
                value = min(figure["value"] for figure in figures)
                low = min(figure["low"] for figure in figures)
                least[metric][name] = {
                    "value": value,
                    "low": low,
                }
        each["all of them"] = least

    for b, metrics in each.items():
        found = counts.setdefault((kind, b), {})
        for metric, sets in metrics.items():
            found.setdefault(metric, []).extend(sets.values())


def _count_settings(
    columns: Sequence[str],
    counts: Counts,
    metrics: Sequence[str],
) -> dict[str, Any]:
    """In how many settings a row is above, and in brackets in how many its interval is."""
    rows = []
    for (kind, b), found in counts.items():
        cells: list[str | None] = [f"{display_name(kind)}, above {display_name(b)}"]
        for metric in metrics:
            figures = found.get(metric, [])
            above = sum(figure["value"] > 0 for figure in figures)
            surely = sum(figure["low"] > 0 for figure in figures)
            cell = f"{above} ({surely}) of {len(figures)}"
            cells.append(cell if figures else None)
        rows.append(cells)
    return {"columns": list(columns), "rows": rows}


def best_rates(
    lines: Mapping[str, Figures], metrics: Sequence[str]
) -> dict[str, Any] | None:
    """Of lines that are called NAME_RATE, or NAME_RATE: ROW, the mean of the metrics' differences, and the best rate.

    Of equal ones the lowest rate. None: there are no such lines.
    """
    tried: dict[str, dict[str, float]] = {}
    every: set[str] = set()
    for line, figures in lines.items():
        match = _VARIANT.fullmatch(line)
        if match is None or not figures:
            continue
        known = [metric for metric in metrics if metric in figures]
        mean = np.mean([figures[metric]["value"] for metric in known])
        rate = match[2].replace("e_", "e-")
        every.add(rate)
        tried.setdefault(match[1] + match[3], {})[rate] = round(float(mean), 9)
    if not tried:
        return None

    # A line for each name, a column for each rate; of equal means the lowest rate is the best.
    rates = sorted(every, key=float)
    rows = []
    for name, means in tried.items():
        ascending = sorted(means, key=float)
        best = max(ascending, key=means.__getitem__)
        cells = [means.get(rate) for rate in rates]
        rows.append([name, *cells, best])
    columns = ["", *rates, "best"]
    return {"columns": columns, "rows": rows, "signed": True, "digits": 1}
