"""Differences of a results file as a picture: a dot with its interval a line, a panel a figure."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_COLOURS = ("#7F7F7F", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9")  # Okabe and Ito's
_LEFT, _WIDE, _GAP, _LINE, _TOP = 150, 300, 40, 15, 44


def intervals(table: Mapping[str, Any], columns: Sequence[str]) -> str:
    """An SVG; lines called GROUP: NAME stand together, each NAME in its colour.

    Args:
        table: as in a results file, its cells {"value", "low", "high"}.
        columns: a panel each.
    """
    lines = [(*row[0].split(": ", 1), row[1:]) for row in table["rows"]]
    names = list(dict.fromkeys(name for _, name, _ in lines))
    places = [table["columns"].index(column) - 1 for column in columns]
    cells = [cells[place] for *_, cells in lines for place in places]
    low, high = min(0, *(cell["low"] for cell in cells)), max(0, *(cell["high"] for cell in cells))
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100) if (high - low) / step <= 8)
    first, last = int(low // step), int(-(-high // step))
    height = _TOP + _LINE * (len(lines) + len({group for group, *_ in lines})) + 26
    width = _LEFT + len(columns) * (_WIDE + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        "<style>text {font: 11px sans-serif}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for i, name in enumerate(names):
        x = 20 + 110 * i
        parts.append(f'<circle cx="{x}" cy="10" r="4" fill="{_COLOURS[i % len(_COLOURS)]}"/>{_text(x + 8, 14, name)}')
    for panel, (column, place) in enumerate(zip(columns, places, strict=True)):
        left = _LEFT + panel * (_WIDE + _GAP)
        at = [left + _WIDE * (tick - first) / max(1, last - first) for tick in range(first, last + 1)]
        parts.append(_text(left, 34, f"{column}, points"))
        for tick, x in zip(range(first, last + 1), at, strict=True):
            colour = "#888" if tick == 0 else "#E5E5E5"
            parts.append(f'<path d="M{x:.1f} {_TOP - 4}V{height - 20}" stroke="{colour}"/>')
            parts.append(_text(x, height - 6, f"{tick * step:+d}" if tick else "0", "middle"))
        y, before = _TOP, ""
        for group, name, cells in lines:
            y += _LINE * (2 if before and group != before else 1)
            if not panel and group != before:
                parts.append(_text(_LEFT - 10, y, group, "end"))
            x0, x, x1 = (left + _WIDE * (cells[place][key] / step - first) / max(1, last - first)
                         for key in ("low", "value", "high"))  # fmt: skip
            colour = _COLOURS[names.index(name) % len(_COLOURS)]
            parts.append(f'<path d="M{x0:.1f} {y - 4}H{x1:.1f}" stroke="{colour}" stroke-width="2"/>')
            parts.append(f'<circle cx="{x:.1f}" cy="{y - 4}" r="4" fill="{colour}"/>')
            before = group
    return "\n".join([*parts, "</svg>\n"])


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
