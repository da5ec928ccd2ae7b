"""Figures of a results file as pictures: differences as dots, means by test set as lines, and one figure by another."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_COLOURS = (
    "#7F7F7F",
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#000000",
    "#56B4E9",
)  # Okabe and Ito's
_LEFT = 150
_WIDE = 300
_GAP = 40
_LINE = 15
_TOP = 44


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
    low = min(0, *(cell["low"] for cell in cells))
    high = max(0, *(cell["high"] for cell in cells))
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100) if (high - low) / step <= 8)
    first = int(low // step)
    last = int(-(-high // step))
    height = _TOP + _LINE * (len(lines) + len({group for group, *_ in lines})) + 26
    width = _LEFT + len(columns) * (_WIDE + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        "<style>text {font: 11px sans-serif}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for i, name in enumerate(names):
        x = 20 + 110 * i
        parts.append(
            f'<circle cx="{x}" cy="10" r="4" fill="{_COLOURS[i % len(_COLOURS)]}"/>{_text(x + 8, 14, name)}'
        )
    for panel, (column, place) in enumerate(zip(columns, places, strict=True)):
        left = _LEFT + panel * (_WIDE + _GAP)
        at = [
            left + _WIDE * (tick - first) / max(1, last - first)
            for tick in range(first, last + 1)
        ]
        parts.append(_text(left, 34, f"{column}, points"))
        for tick, x in zip(range(first, last + 1), at, strict=True):
            colour = "#888" if tick == 0 else "#E5E5E5"
            parts.append(
                f'<path d="M{x:.1f} {_TOP - 4}V{height - 20}" stroke="{colour}"/>'
            )
            parts.append(
                _text(x, height - 6, f"{tick * step:+d}" if tick else "0", "middle")
            )
        y = _TOP
        before = ""
        for group, name, cells in lines:
            y += _LINE * (2 if before and group != before else 1)
            if not panel and group != before:
                parts.append(_text(_LEFT - 10, y, group, "end"))
            x0, x, x1 = (left + _WIDE * (cells[place][key] / step - first) / max(1, last - first)
                         for key in ("low", "value", "high"))  # fmt: skip
            colour = _COLOURS[names.index(name) % len(_COLOURS)]
            parts.append(
                f'<path d="M{x0:.1f} {y - 4}H{x1:.1f}" stroke="{colour}" stroke-width="2"/>'
            )
            parts.append(f'<circle cx="{x:.1f}" cy="{y - 4}" r="4" fill="{colour}"/>')
            before = group
    return "\n".join([*parts, "</svg>\n"])


def lines(tables: Mapping[str, Mapping[str, Any]], diagonal: str = "") -> str:
    """An SVG; a table's rows are lines over its columns, with a bar of one standard error to each side.

    Args:
        tables: by the panel's title; as in a results file, with the same rows, their cells {"value", "se"}.
        diagonal: the panel with a line through the places of its columns, 1, 2, ..
    """
    wide = 250
    high = 170
    left = 44
    top = 44
    names = [row[0] for row in next(iter(tables.values()))["rows"]]
    full = wide + left + 26
    width = len(tables) * (wide + left + 26)
    height = top + high + 26 + 16 * len(names)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        "<style>text {font: 11px sans-serif}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for panel, (title, table) in enumerate(tables.items()):
        x0 = left + panel * full
        columns = table["columns"][1:]
        most = max(
            cell["value"] + cell["se"] for row in table["rows"] for cell in row[1:]
        )
        most = max(most, len(columns)) if title == diagonal else most
        step = next(
            step for step in (0.5, 1, 2, 5, 10, 25, 50, 100) if most / step <= 5
        )

        def at(
            place: float,
            value: float,
            x0=x0,
            columns=columns,
            top_of=-(-most // step) * step,
        ):
            return x0 + wide * (place + 0.5) / len(columns), top + high * (
                1 - value / top_of
            )

        parts.append(_text(x0, top - 14, title))
        for tick in range(int(-(-most // step)) + 1):
            y = at(0, tick * step)[1]
            parts.append(f'<path d="M{x0} {y:.1f}h{wide}" stroke="#E5E5E5"/>')
            parts.append(_text(x0 - 6, y + 4, f"{tick * step:g}", "end"))
        parts += [
            _text(at(place, 0)[0], top + high + 16, name, "middle")
            for place, name in enumerate(columns)
        ]
        if title == diagonal:
            (xa, ya), (xb, yb) = at(0, 1), at(len(columns) - 1, len(columns))
            parts.append(
                f'<path d="M{xa:.1f} {ya:.1f}L{xb:.1f} {yb:.1f}" stroke="#888" stroke-dasharray="4 3"/>'
            )
        for place, row in enumerate(table["rows"]):
            colour = _COLOURS[place % len(_COLOURS)]
            points = [at(i, cell["value"]) for i, cell in enumerate(row[1:])]
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            parts.append(
                f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
            )
            for i, cell in enumerate(row[1:]):
                (x, y) = points[i]
                bar = high * cell["se"] / (-(-most // step) * step)
                parts.append(
                    f'<path d="M{x:.1f} {y - bar:.1f}v{2 * bar:.1f}" stroke="{colour}"/>'
                )
                parts.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
                )
    for i, name in enumerate(names):
        y = top + high + 36 + 16 * i
        parts.append(
            f'<path d="M{left} {y - 4}h18" stroke="{_COLOURS[i % len(_COLOURS)]}" stroke-width="2"/>'
        )
        parts.append(_text(left + 24, y, name))
    return "\n".join([*parts, "</svg>\n"])


def points(
    along: Mapping[str, Any],
    up: Mapping[str, Any],
    column: str,
    titles: tuple[str, str],
) -> str:
    """An SVG; a dot for each row, with a bar of one standard error up and down.

    Args:
        along, up: tables of a results file with the same rows, their cells {"value", "se"}; up are percent.
        column: of both.
        titles: of the two axes.
    """
    wide = 380
    high = 220
    left = 52
    top = 30
    right = 190
    width = left + wide + right
    height = top + high + 46
    place = along["columns"].index(column)
    cells = {row[0]: row[place] for row in up["rows"]}
    most = max(row[place]["value"] for row in along["rows"])
    step = next(
        step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500) if most / step <= 8
    )
    last = step * (int(most // step) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        "<style>text {font: 11px sans-serif}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        _text(left, top - 14, titles[1]),
        _text(left + wide / 2, height - 8, titles[0], "middle"),
    ]
    for tick in range(0, 101, 20):
        y = top + high * (1 - tick / 100)
        parts.append(f'<path d="M{left} {y:.1f}h{wide}" stroke="#E5E5E5"/>')
        parts.append(_text(left - 6, round(y + 4, 1), str(tick), "end"))
    for tick in range(0, last + 1, step):
        x = left + wide * tick / last
        parts.append(f'<path d="M{x:.1f} {top}v{high}" stroke="#E5E5E5"/>')
        parts.append(_text(x, top + high + 16, str(tick), "middle"))
    for number, row in enumerate(along["rows"]):
        colour = _COLOURS[number % len(_COLOURS)]
        cell = cells[row[0]]
        x = left + wide * row[place]["value"] / last
        y = top + high * (1 - cell["value"] / 100)
        bar = high * cell["se"] / 100
        parts.append(
            f'<path d="M{x:.1f} {y - bar:.1f}v{2 * bar:.1f}" stroke="{colour}"/>'
        )
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        named = top + 16 * number
        parts.append(
            f'<circle cx="{left + wide + 16}" cy="{named - 4}" r="4" fill="{colour}"/>'
        )
        parts.append(_text(left + wide + 26, named, row[0]))
    return "\n".join([*parts, "</svg>\n"])


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
