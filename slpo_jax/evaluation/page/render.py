"""The page itself: the report and the problems as JSON, put into `report.html` with its style and its scripts."""

import re
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from slpo_jax.evaluation.definitions import SHARED, about_differences, about_rows, scalars
from slpo_jax.evaluation.markdown import shown_columns
from slpo_jax.evaluation.page.problems import Thoughts, browsed
from slpo_jax.evaluation.records import Evals
from slpo_jax.evaluation.statistics import defined
from slpo_jax.io.files import to_json

MOST_BYTES = 4_900_000
"""Of a page: browsers open it at once, and it can be sent."""


def render_page(title: str, report: Mapping[str, Any], evals: Evals, thoughts: Thoughts) -> str:
    """The page as HTML, which asks no network for anything.

    Args:
        title: of the page.
        report: what `report.json` holds.
        evals: row -> set -> records, of which problems are shown as far as they fit; {} for several runs.
        thoughts: of these, see `problems.thoughts_of`.
    """
    metrics = [key for key in _metrics(report["eval"]) if defined(key)]
    columns = {
        "main": [*(key for key, _ in shown_columns(report["eval"])), "cut"],
        "all": metrics,
    }
    logged = {name for curves in report.get("training", {}).values() for name in curves}
    data = {
        "title": title,
        "report": report,
        "columns": {name: found for name, found in columns.items() if found},
        "metrics": {key: dict(zip(("title", "about"), defined(key) or (), strict=True)) for key in metrics},
        "scalars": SHARED if logged <= {*SHARED, "elapsed"} else scalars(),
        "row_about": about_rows(report["rows"]),
        "differences_about": about_differences(len(report.get("runs", ()))),
    }
    room = MOST_BYTES - len(_as_json(data).encode()) - 100_000  # the rest is the page's own
    data["problems"] = browsed(evals, thoughts, room) if evals else {}
    scripts = "\n".join(_asset(name) for name in ("common.js", "charts.js", "problems.js", "report.js"))
    parts = {"title": escape(title), "data": _as_json(data), "css": _asset("report.css"), "js": scripts}
    return re.sub(r"{{(\w+)}}", lambda match: parts[match[1]], _asset("report.html"))


def _metrics(eval_: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(key for sets in eval_.values() for figures in sets.values() for key in figures))


def _as_json(value: Any) -> str:
    """JSON that can't end the script that it stands in."""
    return to_json(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8").strip()
