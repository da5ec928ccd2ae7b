"""The report: `report.json` and `report.md`, a pure function of the files in a workdir.

`write_report` reports one training run, `compare_runs` several training seeds of the same configuration;
`python -m slpo_jax.evaluation.report DIR [DIR...] [--out DIR]` does either.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slpo_jax.errors import UserError
from slpo_jax.evaluation.figures import draw_figures
from slpo_jax.evaluation.records import ROW_LABELS, Evals, is_gated, read_evals, read_json, read_metrics, write_text
from slpo_jax.evaluation.statistics import AVERAGE, BEST_FIXED, PASS_KS, compare_rows, mean_se, summarise

LABELS = ROW_LABELS | {BEST_FIXED: "best fixed-length imitation"}
_CONFIG_KEYS = (
    "seed", "init", "data.train", "data.valid", "max_latents", "slpo.steps", "slpo.learning_rate", "evaluate.limit",
)  # fmt: skip
_TWO_LEVEL = """ and, independently, of training runs, paired in both. With a few runs only, such intervals are
  somewhat too narrow (the bootstrap of R runs understates their variance by 1/R): see the differences by run"""
_DEFINITIONS = """\
- **Acc**: dropout off, greedy. **P@k**: k rollouts a problem with MC-dropout, solved if any is right; mean over the
  dropout seeds. **maj@k**: the commonest answer of k rollouts (ties: the one seen first; rollouts without a number
  don't vote). **#L**: mean number of latents of the Acc rollout.
- **± SE** is over problems: sqrt(p(1-p)/n) for Acc, the sample standard error of the per-problem means for the rest.
  In parentheses, for P@k, the standard error over dropout seeds on these same problems. An SE of 0 at 0 % or 100 %
  says nothing.
- **Unbiased P@k**: 1 - C(n-c, k)/C(n, k) of all n samples of a problem, c of them right: the same quantity as P@k from
  more samples, so less noisy.
- **Differences** are paired by problem; the intervals are 95 % percentile intervals of 10,000 bootstrap draws of
  problems{two_level}.
  They are not corrected for their number: of twenty intervals for no difference, about one excludes zero.
- **Best fixed-length imitation** is the better of the two ungated imitation rows by the very metric on the very set: a
  choice made on the test set, in the baseline's favour.
- **Mean of the sets** weighs sets equally; its errors and intervals treat the sets as given.
- **Difficulty** of a problem: 1 - the mean correctness of its sampled rollouts. **r**: Pearson's, p two-sided."""


def write_report(workdir: str | Path) -> dict[str, Any]:
    """Writes `report.json`, `report.md` and `figures/*.png` of one workdir.

    Reads `eval/ROW/NAME.jsonl`, and where they exist `config.json`, `metrics.jsonl` and `thresholds.json`. Any subset
    of rows, sets and samples will do.

    Returns:
        What `report.json` holds: eval {row: {set: figures}}, average, differences, thresholds, notes, figures.

    Raises:
        UserError: there are no eval files, or a file is malformed.
    """
    workdir = Path(workdir)
    config, thresholds = read_json(workdir / "config.json"), read_json(workdir / "thresholds.json")
    evals = _order_sets(read_evals(workdir), config)
    metrics, notes = read_metrics(workdir / "metrics.jsonl")
    report = _build([evals], notes)
    report["thresholds"] = thresholds
    report["figures"] = [f"figures/{name}" for name in draw_figures(evals, metrics, workdir / "figures")]
    _write(workdir, report, config)
    return report


def compare_runs(workdirs: Sequence[str | Path], out: str | Path) -> dict[str, Any]:
    """Writes `report.json` and `report.md` over several training runs (seeds) of one configuration.

    Figures are means over runs with their standard error over runs; differences resample runs and problems. Rows and
    sets that not every run has are left out and noted, and so are settings, other than the seed, in which runs differ.

    Returns:
        What `report.json` holds, as `write_report`, with `runs` and, in each figure set, `per_run`.

    Raises:
        UserError: a folder without eval files, or named twice.
    """
    paths = [Path(workdir) for workdir in workdirs]
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("compare: the same folder is given twice; name each run once")
    if Path(out).resolve() in {path.resolve() for path in paths}:
        raise UserError(f"{out}: --out is one of the runs, whose own report it would replace; name another folder")
    configs = [read_json(path / "config.json") for path in paths]
    runs = [_order_sets(read_evals(path), config) for path, config in zip(paths, configs, strict=True)]
    pairs = [{(row, name) for row, sets in run.items() for name in sets} for run in runs]
    common = set.intersection(*pairs)
    if not common:
        raise UserError("compare: no row and set that all runs have; evaluate the same sets in each")
    runs = [
        {row: {name: rec for name, rec in sets.items() if (row, name) in common} for row, sets in run.items()}
        for run in runs
    ]
    runs = [{row: sets for row, sets in run.items() if sets} for run in runs]
    notes = [f"{row} on {name}: left out, not every run has it." for row, name in sorted(set.union(*pairs) - common)]
    report = _build(runs, notes + _config_notes(configs))
    report["runs"] = [path.name or str(path) for path in paths]
    report["thresholds"] = {path.name: read_json(path / "thresholds.json") for path in paths}
    _write(Path(out), report, configs[0] if len(paths) == 1 else {})
    return report


def _build(runs: Sequence[Evals], notes: list[str]) -> dict[str, Any]:
    summaries = [
        {row: {name: summarise(rec) for name, rec in sets.items()} for row, sets in run.items()} for run in runs
    ]
    eval_ = {
        row: {name: _over_runs([summary[row][name] for summary in summaries]) for name in sets}
        for row, sets in summaries[0].items()
    }
    differences, left_out = compare_rows(runs)
    return {"eval": eval_, AVERAGE: _averages(summaries), "differences": differences, "notes": notes + left_out}


def _over_runs(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """One run: its figures. Several: means, `_se` over runs, `per_run`; errors and p of single runs don't average."""
    first = summaries[0]
    if len(summaries) == 1:
        return first
    out: dict[str, Any] = {"n": first["n"], "runs": len(summaries)}
    keys = [key for key in first if all(isinstance(s.get(key), float) for s in summaries)]
    keys = [key for key in keys if not key.endswith(("_se", "_p"))]
    per_run = {key: [s[key] for s in summaries] for key in keys}
    for key, values in per_run.items():
        out |= {key: float(np.mean(values)), f"{key}_se": mean_se(np.array(values))}
    return out | {"per_run": per_run}


def _averages(summaries: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Mean over the sets of each row that has them all: {row: {metric, metric_se}}, errors combined over sets."""
    out = {}
    names = {name for sets in summaries[0].values() for name in sets}
    for row, sets in summaries[0].items():
        if len(names) < 2 or set(sets) != names:
            continue
        keys = [key for key in next(iter(sets.values())) if all(s.get(f"{key}_se") is not None for s in sets.values())]
        per_run = []
        for parts in (list(summary[row].values()) for summary in summaries):
            means = {key: float(np.mean([s[key] for s in parts])) for key in keys}
            errors = {f"{key}_se": math.hypot(*(s[f"{key}_se"] for s in parts)) / len(parts) for key in keys}
            per_run.append({"n": sum(s["n"] for s in parts)} | means | errors)
        out[row] = _over_runs(per_run)
    return out


def _order_sets(evals: Evals, config: Mapping[str, Any]) -> Evals:
    wanted = _flatten(config).get("evaluate.datasets") or ()
    order = {name: place for place, name in enumerate(wanted)}
    return {row: dict(sorted(s.items(), key=lambda kv: order.get(kv[0], len(order)))) for row, s in evals.items()}


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in config.items():
        out |= _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out


def _config_notes(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    flat = [_flatten(config) for config in configs]
    keys = sorted({key for config in flat for key in config} - {"seed", "workdir"})
    differ = [key for key in keys if len({json.dumps(config.get(key), sort_keys=True) for config in flat}) > 1]
    seeds = [config["seed"] for config in flat if "seed" in config]
    notes = [f"The runs' configurations differ in: {', '.join(differ)}."] if differ else []
    if len(set(seeds)) < len(seeds):
        notes.append("Some runs share config.seed: they are no independent training seeds.")
    return notes


def _write(folder: Path, report: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    write_text(folder / "report.json", json.dumps(report, indent=1, allow_nan=False) + "\n")
    write_text(folder / "report.md", _markdown(report, config))


def _markdown(report: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    runs = report.get("runs", ())
    if len(runs) > 1:
        head = f"Means over {len(runs)} training runs ({', '.join(runs)}); ± is the standard error over runs."
    else:
        head = "One training run; ± is the standard error over problems. Another training seed may move it more."
    flat = _flatten(config)
    settings = [f"`{key}` = {json.dumps(flat[key])}" for key in _CONFIG_KEYS if key in flat]
    eval_, entries = report["eval"], report["differences"]
    columns, unbiased = _columns(eval_), _columns(eval_, "_unbiased")
    sections = [
        ("", [head, ", ".join(settings)]),
        ("In words", [_words(entries, [key for key, _ in columns]), _gate_words(eval_)]),
        ("Results by set (percent; #L in latents)", _result_tables(eval_, report[AVERAGE], columns)),
        ("Differences", _difference_tables(entries, columns)),
        ("Differences by run (unbiased estimator where there is one)", [_run_table(entries)] if len(runs) > 1 else []),
        ("Unbiased estimator", _result_tables(eval_, report[AVERAGE], unbiased) if unbiased else []),
        ("Differences, unbiased estimator", _difference_tables(entries, unbiased)),
        ("Latents against difficulty", [_gate_table(eval_)]),
        ("Choices on the validation split (percent, the chosen in bold)", _sweep_tables(report["thresholds"])),
        ("Figures", [f"![{Path(name).stem}]({name})" for name in report.get("figures", ())]),
        ("Definitions", [_DEFINITIONS.format(two_level=_TWO_LEVEL * (len(runs) > 1))]),
        ("Notes", ["\n".join(f"- {note}" for note in report["notes"])]),
    ]
    parts = ["# Evaluation report"]
    for title, blocks in sections:
        blocks = [block for block in blocks if block]
        parts += ([f"## {title}"] if title and blocks else []) + blocks
    return "\n\n".join(parts) + "\n"


def _columns(eval_: Mapping[str, Any], suffix: str = "") -> list[tuple[str, str]]:
    """Metric and header of a table's columns: k = 1, 8, 16, or the largest k there is where samples are fewer."""
    have = {key for sets in eval_.values() for figures in sets.values() for key in figures}
    ks = [k for k in PASS_KS if f"pass@{k}{suffix}" in have]
    columns = [(f"pass@{k}{suffix}", f"P@{k}") for k in ks if k in (1, 8, 16, ks[-1])]
    if suffix:
        return columns
    maj = [(f"maj@{k}", f"maj@{k}") for k in reversed(PASS_KS) if f"maj@{k}" in have][:1]
    return [("acc", "Acc"), *columns, *maj, ("latent_steps", "#L")]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) if rows else ""


def _label(row: str) -> str:
    return LABELS.get(row, row)


def _scale(metric: str) -> tuple[int, int]:
    """Factor and decimals to print a metric with: points for rates, latents as they are."""
    return (1, 2) if "latent_steps" in metric else (100, 1)


def _cell(figures: Mapping[str, Any], key: str) -> str:
    scale, digits = _scale(key)
    texts = [
        form.format(f"{scale * figures[name]:.{digits}f}")
        for name, form in ((key, "{}"), (f"{key}_se", " ± {}"), (f"{key}_seed_se", " ({})"))
        if figures.get(name) is not None
    ]
    return "".join(texts) or "–"


def _result_tables(eval_: Mapping[str, Any], average: Mapping[str, Any], columns: list[tuple[str, str]]) -> list[str]:
    header = ["row", *(title for _, title in columns)]
    out = []
    for name in dict.fromkeys(name for sets in eval_.values() for name in sets):
        rows = {row: sets[name] for row, sets in eval_.items() if name in sets}
        lines = [[_label(row), *(_cell(figures, key) for key, _ in columns)] for row, figures in rows.items()]
        out += [f"### {name} ({next(iter(rows.values()))['n']:,} problems)", _table(header, lines)]
    lines = [[_label(row), *(_cell(figures, key) for key, _ in columns)] for row, figures in average.items()]
    return [*out, f"### {_title(AVERAGE)}", _table(header, lines)] if lines else out


def _title(name: str) -> str:
    return "mean of the sets" if name == AVERAGE else name


def _pair(entry: Mapping[str, Any]) -> str:
    return f"{_label(entry['a'])} − {_label(entry['b'])}"


def _difference_cell(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "–"
    scale, digits = _scale(entry["metric"])
    mean, low, high = (f"{scale * entry[key]:+.{digits}f}" for key in ("difference", "low", "high"))
    return f"**{mean}** [{low}, {high}]" if entry["excludes_zero"] else f"{mean} [{low}, {high}]"


def _difference_tables(entries: Sequence[Mapping[str, Any]], columns: list[tuple[str, str]]) -> list[str]:
    found = {(e["set"], _pair(e), e["metric"]): e for e in entries}
    names = dict.fromkeys(e["set"] for e in entries if any(e["metric"] == key for key, _ in columns))
    out = ["Percentage points (#L: latents) with 95 % intervals; bold where the interval excludes zero."]
    for name in sorted(names, key=AVERAGE.__eq__):  # the mean last, the others in their order
        pairs = dict.fromkeys(_pair(e) for e in entries if e["set"] == name)
        lines = [[pair, *(_difference_cell(found.get((name, pair, key))) for key, _ in columns)] for pair in pairs]
        out += [f"### {_title(name)}", _table(["difference", *(title for _, title in columns)], lines)]
    return out if names else []


def _run_table(entries: Sequence[Mapping[str, Any]]) -> str:
    """Each run's own difference, on the mean of the sets where there is one."""
    mean = [e for e in entries if e["set"] == AVERAGE] or entries
    have = {e["metric"] for e in mean}
    wanted = ["acc", *(f"pass@{k}_unbiased" if f"pass@{k}_unbiased" in have else f"pass@{k}" for k in (1, 8, 16))]
    found = {(e["set"], _pair(e), e["metric"]): [f"{100 * d:+.1f}" for d in e["per_run"]] for e in mean}
    lines = [
        [_title(name), pair, *(", ".join(found.get((name, pair, m), ["–"])) for m in wanted)]
        for name, pair in dict.fromkeys(key[:2] for key in found)
    ]
    return _table(["set", "difference", "Acc", "P@1", "P@8", "P@16"], lines)


def _words(entries: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> str:
    """Which intervals of Acc and Pass@k exclude zero, a sentence a comparison."""
    rates = [e for e in entries if e["metric"] in metrics and e["metric"].startswith(("acc", "pass"))]
    lines = []
    for pair in dict.fromkeys(_pair(e) for e in rates):
        mine = [e for e in rates if _pair(e) == pair]
        above, below = [e for e in mine if e["low"] > 0], [e for e in mine if e["high"] < 0]
        counts = f"{len(above)} above zero{_listing(above)}, {len(below)} below zero{_listing(below)}"
        rest = len(mine) - len(above) - len(below)
        lines.append(f"- **{pair}**: of {len(mine)} intervals (Acc and P@k), {counts}, {rest} containing zero.")
    return "\n".join(lines)


def _listing(entries: Sequence[Mapping[str, Any]]) -> str:
    by_set: dict[str, list[str]] = {}
    for e in entries:
        metric = e["metric"].replace("acc", "Acc").replace("pass@", "P@")
        by_set.setdefault(e["set"], []).append(f"{metric} {100 * e['difference']:+.1f}")
    named = [f"{_title(name)}: {', '.join(metrics)}" for name, metrics in by_set.items()]
    return f" ({'; '.join(named)})" if named else ""


def _gated(eval_: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, Any]]]:
    gated = [row for row in eval_ if is_gated(row)]
    return [(row, name, figures) for row in gated for name, figures in eval_[row].items()]


def _correlation(figures: Mapping[str, Any], key: str) -> tuple[str, bool]:
    """r in words, and whether it is told from zero: p < 0.05, or over several runs the same sign in each."""
    r, p = figures.get(f"pearson_{key}_r"), figures.get(f"pearson_{key}_p")
    per_run = figures.get("per_run", {}).get(f"pearson_{key}_r", [])
    if per_run and r is not None:
        return f"r = {r:.2f}, by run {min(per_run):.2f} to {max(per_run):.2f}", min(per_run) > 0 or max(per_run) < 0
    if r is None or p is None:
        return "–", False
    return f"r = {r:.2f}, p {'< 0.001' if p < 0.001 else f'= {p:.3f}'}", p < 0.05


def _gate_words(eval_: Mapping[str, Any]) -> str:
    lines = []
    for row, name, figures in _gated(eval_):
        for key, what in (("steps", "problems with more steps"), ("difficulty", "harder problems")):
            text, told = _correlation(figures, key)
            if text == "–":
                continue
            verdict = "more latents on" if figures[f"pearson_{key}_r"] > 0 else "fewer latents on"
            lines.append(
                f"- {_label(row)} on {name}: {verdict if told else 'no clear tie of latents to'} {what} ({text})."
            )
    return "\n".join(lines)


def _gate_table(eval_: Mapping[str, Any]) -> str:
    lines = [
        [
            _label(row),
            name,
            _cell(figures, "latent_steps"),
            *(_correlation(figures, k)[0] for k in ("steps", "difficulty")),
        ]
        for row, name, figures in _gated(eval_)
    ]
    return _table(["row", "set", "#L", "with number of steps", "with difficulty"], lines)


def _sweep_tables(node: Mapping[str, Any], name: str = "") -> list[str]:
    """Accuracy on the validation split by threshold or, ungated, by number of latents, a table a sweep.

    Args:
        node: {row: {"0.5": acc, ..., "chosen": 0.5}}, or such by run.
        name: what the table is of.
    """
    if "chosen" not in node:
        return [table for key, value in node.items() for table in _sweep_tables(value, f"{name}, {_label(key)}")]
    rules = sorted((key for key in node if key != "chosen"), key=float)
    cells = [f"{100 * node[key]:.1f}" for key in rules]
    cells = [f"**{c}**" if float(k) == float(node["chosen"]) else c for k, c in zip(rules, cells, strict=True)]
    what = "latents" if any(float(key) > 1 for key in rules) else "threshold"
    return [_table([what, *rules], [[f"{name.removeprefix(', ')}: Acc", *cells]])]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: one folder is reported in place, or with --out several are compared. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m slpo_jax.evaluation.report", description="Report evaluated runs.")
    parser.add_argument("workdirs", nargs="+", metavar="DIR", help="workdir of a run that was evaluated")
    parser.add_argument("--out", help="folder for the report over several runs (one DIR alone is reported in place)")
    args = parser.parse_args(argv)
    try:
        if args.out is None and len(args.workdirs) > 1:
            raise UserError("--out: missing; name the folder for the report over several runs")
        if args.out is None:
            write_report(args.workdirs[0])
        else:
            compare_runs(args.workdirs, args.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(Path(args.out or args.workdirs[0]) / "report.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
