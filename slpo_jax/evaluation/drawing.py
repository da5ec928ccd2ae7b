"""What the report's figures are made of: a row's look, panels, bars side by side, notes and legends.

Colours are Okabe and Ito's, which stay apart under colour blindness; lines also differ in dash and marker.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from slpo_jax.evaluation.rows import Rows

_COLOURS = ("#000000", "#56B4E9", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#0072B2", "#7F7F7F")
_MARKERS = ("o", "s", "^", "D", "o", "v", "P", "X", "*")  # nine, so that a colour that comes again has another
_DASHES = ("-", "--", "-.", "--", "-", ":", (0, (5, 1)))
_LINE = 12  # points from one line of a note to the next
LOOK: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E5E5E5",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "axes.titlesize": 11,
}


@dataclasses.dataclass(frozen=True)
class Style:
    """How a row is drawn: its label, colour, marker and dash, by its place in the report."""

    label: str
    colour: str
    marker: str
    dash: Any

    @property
    def line(self) -> dict[str, Any]:
        """Keywords of a line."""
        return {"color": self.colour, "marker": self.marker, "ls": self.dash, "label": self.label}


Styles = dict[str, Style]
"""By row."""


def styles_of(rows: Rows) -> Styles:
    """Each row's style by its place; the same in all figures of a report."""
    return {name: style_at(place, row.label) for place, (name, row) in enumerate(rows.items())}


def style_at(place: int, label: str) -> Style:
    """The style of the place'th row."""
    colour, marker, dash = (look[place % len(look)] for look in (_COLOURS, _MARKERS, _DASHES))
    return Style(label, str(colour), str(marker), dash)


def set_title(axis: Axes, text: str, notes: Sequence[tuple[str, str]]) -> None:
    """A title, and below it, outside the axes, a line for each (note, colour)."""
    axis.set_title(text, pad=6 + _LINE * len(notes))
    for place, (note, colour) in enumerate(reversed(notes)):
        at = (2, 4 + _LINE * place)
        axis.annotate(note, (0, 1), at, "axes fraction", "offset points", color=colour, fontsize=9)


def within(axis: Axes, most: float) -> None:
    """Cuts the axis of a share, whose range goes a little beyond the data, to what a share can be."""
    low, high = axis.get_ylim()
    axis.set_ylim(max(low, 0), min(high, most))


def grouped(rows: Sequence[Any], total: float) -> Iterator[tuple[float, float, Any]]:
    """Offset and width of each row's bars, so that they stand side by side within `total`."""
    width = total / len(rows)
    for place, row in enumerate(rows):
        yield (place - (len(rows) - 1) / 2) * width, width, row


def open_panels(count: int, columns: int = 4, height: float = 3.3) -> tuple[Figure, list[Axes]]:
    """A figure of as many panels, each 3.7 inches wide.

    Args:
        columns: panels in a line, at most.
        height: of a panel, in inches.
    """
    columns = min(count, columns)
    rows = -(-count // columns)
    figure = Figure(figsize=(3.7 * columns + 0.4, height * rows + 0.2), dpi=130, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for spare in grid[count:]:
        spare.remove()
    return figure, list(grid[:count])


def legend_below(figure: Figure, axes: Sequence[Axes]) -> Figure:
    """One legend for all panels, each row once."""
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    per_line = max(2, int(figure.get_figwidth() // 2.2))
    figure.set_figheight(figure.get_figheight() + 0.22 * -(-len(handles) // per_line))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(per_line, len(handles)), columnspacing=1
    )
    return figure
