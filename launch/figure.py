"""Figures of a results file as pictures: differences, one figure against another, curves, a thought, a terminal.

They have a ground of their own, and other colours where the reader's screen is dark.
"""

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
    "currentColor",
    "#56B4E9",
)
_GRID = "#88888844"
_AXIS = "#888"
_STYLE = """text {font: 12px sans-serif; fill: #1F2328}
.paper {fill: #FFF}
.soft {fill: #59636E}
.mono {font-family: ui-monospace, Menlo, Consolas, monospace; white-space: pre}
.box {fill: #EEF4FB; stroke: #0072B2}
svg {color: #000}
@media (prefers-color-scheme: dark) {
text {fill: #E6EDF3}
.paper {fill: #0D1117}
.soft {fill: #9AA4AE}
.box {fill: #12304F}
svg {color: #FFF}
}"""


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
    place = along["columns"].index(column)
    cells = {row[0]: row[place] for row in up["rows"]}
    most = max(row[place]["value"] for row in along["rows"])
    last = _round_up(most)

    width = _LEFT + _WIDE + 24
    parts = _begin(width, _TOP + _HIGH + 46)
    parts += _axes(_TOP, last, titles)
    for number, row in enumerate(along["rows"]):
        name = row[0]
        colour = _colour(number)
        x = _LEFT + _WIDE * row[place]["value"] / last
        y = _TOP + _HIGH * (1 - cells[name]["value"] / 100)
        bar = _HIGH * cells[name]["se"] / 100
        parts.append(_line(f"M{x:.1f} {y - bar:.1f}v{2 * bar:.1f}", colour))
        parts.append(_dot(f"{x:.1f}", f"{y:.1f}", colour))
        # The name stands below the dot, on the side where there is more room.
        anchor = "start" if x < _LEFT + _WIDE / 2 else "end"
        parts.append(_text(x, round(y + 20, 1), name, anchor))
    return _end(parts)


def curves(panels: Mapping[str, Table], titles: Mapping[str, str]) -> str:
    """Draw lines of percent against steps, one panel below the other.

    Args:
        panels: tables of a results file; their columns are steps, and a cell is None where a line has no point.
        titles: of the panels' axes.
    """
    legend = 18
    gap = 76 + legend
    parts = _begin(_LEFT + _WIDE + 24, _TOP + len(panels) * (_HIGH + gap) - 30)
    top = _TOP + legend
    for name, table in panels.items():
        steps = list(map(int, table["columns"][1:]))
        last = _round_up(steps[-1])
        parts += _axes(top, last, ("step", ""))
        parts.append(_text(8, top - 14 - legend, titles[name], more='class="soft"'))
        x_name = float(_LEFT)
        for number, (label, *cells) in enumerate(table["rows"]):
            colour = _colour(number + 1)
            corners = []
            for step, value in zip(steps, cells, strict=True):
                if value is not None:
                    x = _LEFT + _WIDE * step / last
                    y = top + _HIGH * (1 - value / 100)
                    corners.append(f"{x:.1f} {y:.1f}")
            path = f"M{'L'.join(corners)}"
            parts.append(_line(path, colour, 'stroke-width="2" fill="none"'))
            # The names stand above, one beside the other.
            sample = f"M{x_name:.1f} {top - 14}h18"
            parts.append(_line(sample, colour, 'stroke-width="2"'))
            parts.append(_text(x_name + 24, top - 10, label))
            x_name += 44 + 6.5 * len(label)
        top += _HIGH + gap
    return _end(parts)


def thought(table: Table) -> str:
    """Draw what latents say: question, a box for each latent with its decoded step and likeliest tokens, and answer.

    Args:
        table: rows [number, step, token, probability, ..], with "question" and "answer".
    """
    width = 440
    high = 62
    gap = 18
    shown = 3  # of the likeliest tokens
    bar = 110

    parts = _begin(width, 2 * 40 + len(table["rows"]) * (high + gap) + gap)
    parts.append(_text(12, 26, "question", more='class="soft"'))
    parts.append(_text(110, 26, table["question"], more='class="mono"'))
    y = 40
    parts.append(_text(20, y + 12, "decoded step", more='class="soft"'))
    parts.append(_text(240, y + 12, "likeliest tokens", more='class="soft"'))
    for number, step, *pairs in table["rows"]:
        parts.append(_arrow(width / 2, y, gap))
        y += gap
        parts.append(
            f'<rect class="box" x="8" y="{y}" width="424" height="{high}" rx="8"/>'
        )
        parts.append(_text(20, y + 24, f"latent {number}", more='class="soft"'))
        parts.append(_text(20, y + 46, step, more='class="mono"'))
        for place in range(shown):
            token, probability = pairs[2 * place : 2 * place + 2]
            line = y + 20 + 16 * place
            wide = bar * probability
            parts.append(_text(232, line, token, "end", 'class="mono"'))
            parts.append(
                f'<rect x="240" y="{line - 10}" width="{wide:.1f}" height="10" fill="#0072B2"/>'
            )
            parts.append(
                _text(246 + wide, line, f"{probability:.2f}", more='class="soft"')
            )
        y += high
    parts.append(_arrow(width / 2, y, gap))
    parts.append(_text(12, y + gap + 22, "answer", more='class="soft"'))
    parts.append(_text(110, y + gap + 22, table["answer"], more='class="mono"'))
    return _end(parts)


def terminal(table: Table, command: str, columns: int = 134) -> str:
    """Draw a recorded terminal, whose time runs faster here; where nothing moves, its end is seen.

    Args:
        table: rows [line, text, from, until], in seconds; until is None of what is there at the end.
        command: what was typed.
    """
    seconds = 14
    rest = 0.3  # of them, for its end
    line_height = 17
    character = 7.25
    left = 12
    top = 44

    rows = table["rows"]
    whole = max(begin for _, _, begin, _ in rows)
    lines = max(int(line) for line, *_ in rows) + 2
    rules = ["text {font-size: 12px}"]
    texts = [_text(left, top - 18, f"$ {command}", more='class="mono"')]
    for number, (line, text, begin, until) in enumerate(rows):
        if not text:
            continue
        # It is seen from its time on, until another text takes its line.
        first = 100 * (1 - rest) * begin / whole
        last = 100.0 if until is None else 100 * (1 - rest) * until / whole
        frames = f"0% {{opacity: 0}} {first:.2f}% {{opacity: 1}} {last:.2f}% {{opacity: {int(until is None)}}}"
        rules.append(f"@keyframes k{number} {{{frames}}}")
        rules.append(f"#t{number} {{animation: k{number} {seconds}s step-end 3}}")
        if until is not None:
            rules.append(f"#t{number} {{opacity: 0}}")
        y = top + line_height * int(line)
        wide = character * len(text)
        more = f'id="t{number}" class="mono" textLength="{wide:.0f}" lengthAdjust="spacingAndGlyphs"'
        texts.append(_text(left, y, text, more=more))
    rules.append(
        "@media (prefers-reduced-motion: reduce) {text {animation: none !important}}"
    )
    width = round(2 * left + character * columns)
    parts = _begin(width, top + line_height * lines - 20)
    return _end([*parts, f"<style>{chr(10).join(rules)}</style>", *texts])


_LEFT = 40
_TOP = 30
_WIDE = 400
_HIGH = 200


def _axes(top: int, last: int, titles: tuple[str, str]) -> list[str]:
    """Draw the grid of a panel: from 0 to `last` along, and percent up.

    Args:
        titles: of the two axes.
    """
    step = _choose_step(last, 8, _STEPS)
    parts = [_text(8, top - 14, titles[1], more='class="soft"')]
    middle = _LEFT + _WIDE / 2
    parts.append(_text(middle, top + _HIGH + 36, titles[0], "middle", 'class="soft"'))
    for tick in range(0, 101, 20):
        y = top + _HIGH * (1 - tick / 100)
        parts.append(_line(f"M{_LEFT} {y:.1f}h{_WIDE}", _GRID))
        parts.append(_text(_LEFT - 6, round(y + 4, 1), str(tick), "end"))
    for tick in range(0, last + 1, step):
        x = _LEFT + _WIDE * tick / last
        parts.append(_line(f"M{x:.1f} {top}v{_HIGH}", _GRID))
        parts.append(_text(x, top + _HIGH + 18, str(tick), "middle"))
    return parts


_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def _round_up(most: float) -> int:
    """Return the first tick that is not below `most`."""
    step = _choose_step(most, 8, _STEPS)
    return step * int(-(-most // step))


def _choose_step(most: float, ticks: int, steps: Sequence[Any]) -> Any:
    """Return the smallest step in which `most` is covered by so many ticks."""
    return next(step for step in steps if most / step <= ticks)


def _begin(width: int, height: int) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
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


def _arrow(x: float, y: float, length: int) -> str:
    """Draw an arrow that leads down."""
    path = f"M{x} {y + 3}v{length - 6}m-4 -5l4 5l4 -5"
    return _line(path, _AXIS, 'stroke-width="1.5" fill="none"')


def _text(
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    more: str = "",
) -> str:
    end = f" {more}" if more else ""
    return (
        f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}"{end}>{escape(text)}</text>'
    )
