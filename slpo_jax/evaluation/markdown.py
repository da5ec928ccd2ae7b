"""The text of `report.md`, a pure function of what `report.json` holds."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slpo_jax.evaluation.comparisons import AVERAGE
from slpo_jax.evaluation.rows import BEST_FIXED

_TWO_LEVEL = """ and, independently, of training runs, paired in both. With a few runs only, such intervals are
  somewhat too narrow (the bootstrap of R runs understates their variance by 1/R): see the differences by run"""
_BEST_FIXED = """- **Best fixed length** is the best of {rows}, by the very metric on the very
  set: a choice made on the test set, in the baseline's favour.
"""
_DEFINITIONS = """\
- **Acc**: greedy, without noise. **P@k**: k rollouts a problem with noise (dropout's, the latent policy's, sampled
  answers', as the settings say), solved if any is right; mean over the noise's seeds. **maj@k**: the commonest answer
  of k rollouts (ties: the first seen; those without a number don't vote). **best@k**, **vote@k**: the rollout of
  k, or the answer, with the most of a scorer's scores (`config.evaluate.scorers`). **#L**: mean number of latents of
  the Acc rollout. **Cut at the limit**: Acc rollouts without an end within the budget of answer tokens, always wrong.
- **± SE** is over problems; in parentheses, for P@k, over the noise's seeds on these same problems. An SE of 0 at 0 %
  or 100 % says nothing.
- **Unbiased P@k**: 1 - C(n-c, k)/C(n, k) of all n samples of a problem, c of them right: P@k from more samples.
- **Differences** are paired by problem, with 95 % percentile intervals of 10,000 bootstrap draws of
  problems{two_level}. Of twenty intervals for no difference, about one excludes zero.
{best_fixed}- **Mean of the sets** weighs sets equally; its errors and intervals treat the sets as given.
- **Difficulty** of a problem: 1 - the mean correctness of its sampled rollouts. **r**: Pearson's, p two-sided."""


def render(report: Mapping[str, Any]) -> str:
    """The report as Markdown: first the means over the sets, then everything else.

    Args:
        report: what `report.json` holds, see `report.write_report` and `report.compare_runs`.
    """
    runs = report.get("runs", ())
    if len(runs) > 1:
        head = f"Means over {len(runs)} training runs ({', '.join(runs)}); ± is the standard error over runs."
    else:
        head = "One training run; ± is the standard error over problems. Another training seed may move it more."
    labels = {name: row["label"] for name, row in report["rows"].items()} | {BEST_FIXED: "best fixed length"}
    gated = [name for name, row in report["rows"].items() if row["gated"]]
    eval_, entries = report["eval"], _labelled(report["differences"], labels)
    images = [f"![{Path(name).stem}]({name})" for name in report.get("figures", ())]
    columns, unbiased = shown_columns(eval_), shown_columns(eval_, "_unbiased")
    shown = [*columns, ("cut", "cut at the limit")]
    by_set, means = _result_tables(eval_, report[AVERAGE], shown, labels)
    by_set_unbiased, means_unbiased = _result_tables(eval_, report[AVERAGE], unbiased, labels)
    fixed = [f'"{row["label"]}"' for row in report["rows"].values() if row["fixed"]]
    definitions = _DEFINITIONS.format(
        two_level=_TWO_LEVEL * (len(runs) > 1),
        best_fixed=_BEST_FIXED.format(rows=", ".join(fixed)) if fixed else "",
    )
    sections = [
        ("", [*(means or by_set), head, _settings(report["settings"])]),
        ("Results by set (percent; #L in latents)", by_set if means else []),
        ("Differences", _difference_tables(entries, columns)),
        ("Differences by run (unbiased estimator where there is one)", _run_table(entries) if len(runs) > 1 else []),
        ("Unbiased estimator", means_unbiased + by_set_unbiased if unbiased else []),
        ("Differences, unbiased estimator", _difference_tables(entries, unbiased)),
        ("Latents against difficulty", _gate_table(eval_, gated, labels)),
        ("Choices on the validation split (percent, the chosen in bold)", _sweep_tables(report["thresholds"], labels)),
        ("Figures", images),
        ("Definitions", [definitions]),
        ("Notes", ["\n".join(f"- {note}" for note in report["notes"])]),
    ]
    parts = ["# Evaluation report"]
    for title, blocks in sections:
        blocks = [block for block in blocks if block]
        parts += ([f"## {title}"] if title and blocks else []) + blocks
    return "\n\n".join(parts) + "\n"


def _settings(settings: Mapping[str, Mapping[str, Any]]) -> str:
    """What the checkpoints were trained with: a line that all share, then a line each."""

    def listed(stage: str) -> str:
        return ", ".join(f"`{key}` = {json.dumps(value)}" for key, value in settings[stage].items())

    lines = [f"- `{stage}`: {listed(stage)}" for stage in settings if stage and settings[stage]]
    shared = listed("") if settings.get("") else ""
    begin = "Trained, where not at the defaults, with"
    return "\n".join([f"{begin} {shared}; and" if shared else f"{begin}:", "", *lines]) if lines else shared


def _labelled(entries: Sequence[Mapping[str, Any]], labels: Mapping[str, str]) -> list[Mapping[str, Any]]:
    """Differences with their rows' labels for names."""
    return [{**e, "a": labels.get(e["a"], e["a"]), "b": labels.get(e["b"], e["b"])} for e in entries]


def shown_columns(eval_: Mapping[str, Any], suffix: str = "") -> list[tuple[str, str]]:
    """Metric and header of a table's columns: Acc, P@1, P@8, P@16 and up, the largest maj@k, #L."""
    ks = _ks_of(eval_.values(), "pass@", suffix)
    columns = [(f"pass@{k}{suffix}", f"P@{k}") for k in ks if k in (1, 8) or k >= 16 or k == ks[-1]]
    if suffix:
        return columns
    maj = [(f"maj@{k}", f"maj@{k}") for k in _ks_of(eval_.values(), "maj@")[-1:]]
    return [("acc", "Acc"), *columns, *maj, *_chosen_columns(eval_), ("latent_steps", "#L")]


def _chosen_columns(eval_: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Of every scorer the best of the most samples, and their votes."""
    names = dict.fromkeys(name for sets in eval_.values() for figures in sets.values() for name in figures)
    scorers = dict.fromkeys(match[1] for name in names if (match := re.fullmatch(r"best@\d+_(\w+?)(?<!_se)", name)))
    return [
        (f"{way}@{k}_{scorer}", f"{way}@{k} by {scorer}")
        for scorer in scorers
        for way in ("best", "vote")
        for k in _ks_of(eval_.values(), f"{way}@", f"_{scorer}")[-1:]
    ]


def _ks_of(rows: Iterable[Mapping[str, Mapping[str, Any]]], prefix: str, suffix: str = "") -> list[int]:
    """The k of a metric that some set of some row has, ascending.

    Args:
        rows: {set: figures} each.
        prefix: of the metric's name, "pass@" or "maj@".
        suffix: of its name after k.
    """
    names = {name for sets in rows for figures in sets.values() for name, value in figures.items() if value is not None}
    found = (re.fullmatch(rf"{prefix}(\d+){suffix}", name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) if rows else ""


def _scale(metric: str) -> tuple[int, int]:
    """Factor and decimals to print a metric with: points for rates, latents as they are."""
    return (1, 2) if metric == "latent_steps" else (100, 1)


def _cell(figures: Mapping[str, Any], key: str) -> str:
    scale, digits = _scale(key)
    texts = [
        form.format(f"{scale * figures[name]:.{digits}f}")
        for name, form in ((key, "{}"), (f"{key}_se", " ± {}"), (f"{key}_seed_se", " ({})"))
        if figures.get(name) is not None
    ]
    return "".join(texts) or "–"


def _result_tables(
    eval_: Mapping[str, Any], average: Mapping[str, Any], columns: list[tuple[str, str]], labels: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """A table a set, and that of the mean of the sets where there is one."""
    header = ["row", *(title for _, title in columns)]

    def lines(rows: Mapping[str, Any]) -> list[list[str]]:
        return [[labels[row], *(_cell(figures, key) for key, _ in columns)] for row, figures in rows.items()]

    out = []
    for name in dict.fromkeys(name for sets in eval_.values() for name in sets):
        rows = {row: sets[name] for row, sets in eval_.items() if name in sets}
        out += ["### " + _title(name, [figures["n"] for figures in rows.values()]), _table(header, lines(rows))]
    title = _title(AVERAGE, [figures["n"] for figures in average.values()])
    return out, ([f"### {title}", _table(header, lines(average))] if average else [])


def _title(name: str, counts: Iterable[int] = ()) -> str:
    """A set in words, with the number of problems of its rows where they are given."""
    found = sorted(set(counts))
    ends = " to ".join(f"{n:,}" for n in dict.fromkeys((found[0], found[-1]))) if found else ""
    return ("mean of the sets" if name == AVERAGE else name) + (f" ({ends} problems)" if ends else "")


def _titles(counts: Iterable[tuple[str, int]]) -> str:
    """Head line of a table over several sets, from (set, number of problems) of its rows."""
    by_set: dict[str, list[int]] = {}
    for name, n in counts:
        by_set.setdefault(name, []).append(n)
    return "### " + ", ".join(_title(name, ns) for name, ns in by_set.items())


def _pair(entry: Mapping[str, Any]) -> str:
    return f"{entry['a']} − {entry['b']}"


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
        mine = [e for e in entries if e["set"] == name]
        pairs = dict.fromkeys(_pair(e) for e in mine)
        lines = [[pair, *(_difference_cell(found.get((name, pair, key))) for key, _ in columns)] for pair in pairs]
        title = _title(name, [e["n"] for e in mine])
        out += [f"### {title}", _table(["difference", *(title for _, title in columns)], lines)]
    return out if names else []


def _run_table(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each run's own difference, on the mean of the sets where there is one."""
    mean = [e for e in entries if e["set"] == AVERAGE] or entries
    have = {e["metric"] for e in mean}
    ks = sorted({int(match[1]) for key in have if (match := re.fullmatch(r"pass@(\d+)(_unbiased)?", key))})
    ks = [k for k in ks if k in (1, 8) or k >= 16]
    wanted = ["acc", *(f"pass@{k}_unbiased" if f"pass@{k}_unbiased" in have else f"pass@{k}" for k in ks)]
    found = {(e["set"], _pair(e), e["metric"]): [f"{100 * d:+.1f}" for d in e["per_run"]] for e in mean}
    lines = [
        [_title(name), pair, *(", ".join(found.get((name, pair, m), ["–"])) for m in wanted)]
        for name, pair in dict.fromkeys(key[:2] for key in found)
    ]
    table = _table(["set", "difference", "Acc", *(f"P@{k}" for k in ks)], lines)
    return [_titles((e["set"], e["n"]) for e in mean), table] if lines else []


def _correlation(figures: Mapping[str, Any], key: str) -> str:
    r, p = figures.get(f"pearson_{key}_r"), figures.get(f"pearson_{key}_p")
    per_run = figures.get("per_run", {}).get(f"pearson_{key}_r", [])
    if per_run and r is not None:
        return f"r = {r:.2f}, by run {min(per_run):.2f} to {max(per_run):.2f}"
    if r is None or p is None:
        return "–"
    return f"r = {r:.2f}, p {'< 0.001' if p < 0.001 else f'= {p:.3f}'}"


def _gate_table(eval_: Mapping[str, Any], gated: Sequence[str], labels: Mapping[str, str]) -> list[str]:
    found = [(row, name, figures) for row in gated for name, figures in eval_[row].items()]
    correlations = [[_correlation(figures, key) for key in ("steps", "difficulty")] for *_, figures in found]
    lines = [
        [labels[row], name, _cell(figures, "latent_steps"), *told]
        for (row, name, figures), told in zip(found, correlations, strict=True)
    ]
    table = _table(["row", "set", "#L", "with number of steps", "with difficulty"], lines)
    return [_titles((name, figures["n"]) for _, name, figures in found), table] if lines else []


def _sweep_tables(node: Mapping[str, Any], labels: Mapping[str, str], name: str = "") -> list[str]:
    """Accuracy on the validation split by threshold or, ungated, by number of latents, a table a sweep.

    Args:
        node: {row: {"0.5": acc, ..., "chosen": 0.5, "problems": 500}}, or such by run.
        labels: of the rows.
        name: what the table is of.
    """
    if "chosen" not in node:
        parts = {f"{name}, {labels.get(key, key)}": value for key, value in node.items()}
        return [table for title, value in parts.items() for table in _sweep_tables(value, labels, title)]
    rules = sorted((key for key in node if key not in ("chosen", "problems")), key=float)
    cells = [f"{100 * node[key]:.1f}" for key in rules]
    cells = [f"**{c}**" if float(k) == float(node["chosen"]) else c for k, c in zip(rules, cells, strict=True)]
    what = "latents" if any(float(key) > 1 for key in rules) else "threshold"
    what += f" ({node['problems']:,} problems)"
    return [_table([what, *rules], [[f"{name.removeprefix(', ')}: Acc", *cells]])]
