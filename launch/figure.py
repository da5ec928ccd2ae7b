"""Figures of a results file as pictures: differences as dots, and one figure against another."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

Table = Mapping[str, Any]

# Okabe and Ito's, which stay apart under colour blindness.
_COLOURS = (
    "#7F7F7F",
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#000000",
    "#56B4E9",
)
_GRID = "#E5E5E5"
_AXIS = "#888"


def intervals(table: Table, columns: Sequence[str]) -> str:
    """Draw differences with their intervals; lines called GROUP: NAME stand together, each NAME in its colour.

    Args:
        table: as in a results file, its cells {"value", "low", "high"}.
        columns: a panel each.
    """
    left_margin = 150
    wide = 300
    gap = 40
    line_height = 15
    top = 44

    # What the lines are called, and the cells of the columns that are shown.
    lines = []
    for name, *cells in table["rows"]:
        group, name = name.split(": ", 1)
        lines.append((group, name, cells))
    groups = {group for group, _, _ in lines}
    names = list(dict.fromkeys(name for _, name, _ in lines))
    places = [table["columns"].index(column) - 1 for column in columns]
    shown = []
    for _, _, cells in lines:
        shown += [cells[place] for place in places]

    # All panels have the same axis, with at most some eight ticks; 0 is one of them.
    low = min(0, *(cell["low"] for cell in shown))
    high = max(0, *(cell["high"] for cell in shown))
    step = _choose_step(high - low, 8, (1, 2, 5, 10, 20, 50, 100))
    first = int(low // step)
    last = int(-(-high // step))

    height = top + line_height * (len(lines) + len(groups)) + 26
    width = left_margin + len(columns) * (wide + gap)
    parts = _begin(width, height)
    for i, name in enumerate(names):
        x = 20 + 110 * i
        parts.append(_dot(x, 10, _colour(i)) + _text(x + 8, 14, name))

    for panel, (column, place) in enumerate(zip(columns, places, strict=True)):
        left = left_margin + panel * (wide + gap)

        def x_of(tick: float, left: int = left) -> float:
            return left + wide * (tick - first) / max(1, last - first)

        parts.append(_text(left, 34, f"{column}, points"))
        for tick in range(first, last + 1):
            x = x_of(tick)
            colour = _GRID if tick else _AXIS
            parts.append(_line(f"M{x:.1f} {top - 4}V{height - 20}", colour))
            label = f"{tick * step:+d}" if tick else "0"
            parts.append(
                _text(
                    x,
                    height - 6,
                    label,
                    "middle",
                )
            )

        # A bar from low to high and a dot at the mean; a group is set apart from the one before.
        y = top
        before = ""
        for group, name, cells in lines:
            is_new = group != before
            y += line_height * (2 if before and is_new else 1)
            if is_new and not panel:
                parts.append(
                    _text(
                        left_margin - 10,
                        y,
                        group,
                        "end",
                    )
                )
            cell = cells[place]
            x_low = x_of(cell["low"] / step)
            x_high = x_of(cell["high"] / step)
            x = x_of(cell["value"] / step)
            colour = _colour(names.index(name))
            bar = f"M{x_low:.1f} {y - 4}H{x_high:.1f}"
            parts.append(_line(bar, colour, 'stroke-width="2"'))
            parts.append(_dot(f"{x:.1f}", y - 4, colour))
            before = group
    return _end(parts)


def points(
    along: Table,
    up: Table,
    column: str,
    titles: tuple[str, str],
) -> str:
    """Draw a dot for each row, with a bar of one standard error up and down.

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
    step = _choose_step(most, 8, (1, 2, 5, 10, 20, 50, 100, 200, 500))
    last = step * (int(most // step) + 1)

    parts = _begin(width, height)
    parts.append(_text(left, top - 14, titles[1]))
    parts.append(
        _text(
            left + wide / 2,
            height - 8,
            titles[0],
            "middle",
        )
    )
    for tick in range(0, 101, 20):
        y = top + high * (1 - tick / 100)
        parts.append(_line(f"M{left} {y:.1f}h{wide}", _GRID))
        parts.append(
            _text(
                left - 6,
                round(y + 4, 1),
                str(tick),
                "end",
            )
        )
    for tick in range(0, last + 1, step):
        x = left + wide * tick / last
        parts.append(_line(f"M{x:.1f} {top}v{high}", _GRID))
        parts.append(
            _text(
                x,
                top + high + 16,
                str(tick),
                "middle",
            )
        )

    for number, row in enumerate(along["rows"]):
        name = row[0]
        colour = _colour(number)
        x = left + wide * row[place]["value"] / last
        y = top + high * (1 - cells[name]["value"] / 100)
        bar = high * cells[name]["se"] / 100
        parts.append(_line(f"M{x:.1f} {y - bar:.1f}v{2 * bar:.1f}", colour))
        parts.append(_dot(f"{x:.1f}", f"{y:.1f}", colour))
        y = top + 16 * number
        parts.append(_dot(left + wide + 16, y - 4, colour))
        parts.append(_text(left + wide + 26, y, name))
    return _end(parts)


def _choose_step(most: float, ticks: int, steps: Sequence[Any]) -> Any:
    """Return the smallest step in which `most` is covered by so many ticks."""
    return next(step for step in steps if most / step <= ticks)


def _begin(width: int, height: int) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        "<style>text {font: 11px sans-serif}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]


def _end(parts: Sequence[str]) -> str:
    return "\n".join([*parts, "</svg>\n"])


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _line(path: str, colour: str, more: str = "") -> str:
    end = f" {more}" if more else ""
    return f'<path d="{path}" stroke="{colour}"{end}/>'


def _dot(
    x: Any,
    y: Any,
    colour: str,
    radius: int = 4,
) -> str:
    return f'<circle cx="{x}" cy="{y}" r="{radius}" fill="{colour}"/>'


def _text(
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
) -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
