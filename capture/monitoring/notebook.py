"""Objects as HTML in a notebook: a few facts, a small table, and a heat map of norms. Needs numpy alone.

Everything is inline, so that it looks alike wherever a notebook is shown; all text is escaped; and no page is longer
than `MAX_BYTES`, whatever it shows: texts are cut short, and heat maps drawn with fewer cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

MAX_BYTES = 18_000
"""UTF-8 bytes of a page, at most; a frame around it may add some."""

MAX_SITES = 20
"""Rows of a heat map, at most."""

MAX_CELLS = 28
"""Cells of a row of a heat map, at most."""

_SAMPLES = 4
"""Captured rows whose norms one cell shows the mean of, at most."""

_MAX_FACTS = 12
_MAX_TABLE = 10
_MAX_COLUMNS = 5
_MAX_TEXT = 96

_BOX = "font:12px monospace;border-collapse:collapse"
_NOT_FINITE = "#f0f"
_STOPS = np.array([(4, 0, 8), (6, 2, 10), (11, 4, 8), (15, 8, 3), (15, 14, 9)], np.float64)
"""Colours from the smallest to the largest value, each part from 0 to 15: dark to light, distinct without colours."""


class HeatMap(NamedTuple):
    """Numbers by row and column.

    Attributes:
        title: The meaning of the numbers.
        rows: Labels of the rows.
        columns: Labels of the first and the last column.
        values: float64 ``[rows, columns]``; NaN where there is none, infinite where a value was not finite.
        by_row: Each row is drawn on a linear scale of its own, from its smallest to its largest value; otherwise all
            are on one logarithmic scale, for positive numbers.
    """

    title: str
    rows: Sequence[str]
    columns: tuple[str, str]
    values: npt.NDArray[np.float64]
    by_row: bool = False


class TextTable(NamedTuple):
    """A small table of texts.

    Attributes:
        header: Of the columns.
        rows: The first ones are shown.
        num_rows: How many there are; None if that is not known.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    num_rows: int | None = None


def page(title: str, facts: Mapping[str, object], table: TextTable | None = None, heat: HeatMap | None = None) -> str:
    """Return an object as HTML of at most `MAX_BYTES` bytes.

    Args:
        title: Its kind.
        facts: Values by name; the first ones are shown.
        table: Shown below.
        heat: Shown below that, as far as there is room for it.
    """
    shown = list(facts.items())[:_MAX_FACTS]
    head = f"<b>{_text(title)}</b><br>" + "<br>".join(f"{_text(name)}: {_text(value)}" for name, value in shown)
    parts = [f'<div style="font:12px monospace">{head}</div>']
    if table is not None and table.rows:
        parts.append(_fitting(parts, lambda count: _table(table, count), (_MAX_TABLE, 3, 1)))
    if heat is not None and heat.values.size:
        parts.append(_fitting(parts, lambda count: _heat_map(heat, count), (MAX_CELLS, 14, 7)))
    return "".join(parts)


def _fitting(parts: Sequence[str], draw: Callable[[int], str], counts: Sequence[int]) -> str:
    """Return the first of several drawings, from the largest to the smallest, that there is room for."""
    room = MAX_BYTES - sum(len(part.encode()) for part in parts)
    return next((drawn for count in counts if len((drawn := draw(count)).encode()) <= room), "")


def norms_by_position(
    sites: Sequence[Any],
    positions: npt.NDArray[np.int64],
    read: Callable[[Any, npt.NDArray[np.int64]], npt.NDArray[Any]],
) -> HeatMap | None:
    """Return the norms of captured rows, by site and position; None if there are none.

    Few rows are read, however many there are: at most `MAX_SITES` sites, in each of `MAX_CELLS` parts of the positions
    at most four rows.

    Args:
        sites: The sites, which have names.
        positions: int64 ``[n]``, ascending.
        read: Returns the rows ``[k, hidden]`` of a site with the given numbers.
    """
    chosen = [sites[index] for index in _evenly(len(sites), MAX_SITES)]
    parts = np.array_split(np.arange(len(positions)), min(len(positions), MAX_CELLS)) if len(positions) else []
    if not chosen or not parts:
        return None
    sampled = [part[_evenly(len(part), _SAMPLES)] for part in parts]
    index = np.concatenate(sampled)
    starts = np.cumsum([0, *(len(part) for part in sampled[:-1])])
    counts = np.array([len(part) for part in sampled])
    values = np.empty((len(chosen), len(parts)))
    for row, site in enumerate(chosen):
        values[row] = np.add.reduceat(norms(read(site, index)), starts) / counts
    several = "" if len(positions) <= MAX_CELLS else ", mean of up to 4 in each cell"
    left_out = "" if len(chosen) == len(sites) else f"; {len(chosen)} of {len(sites)} sites"
    columns = f"position {int(positions[0])}", f"{int(positions[-1])}"
    return HeatMap(f"norms{several}{left_out}", [site.name for site in chosen], columns, values)


def norms(rows: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the lengths ``[n]`` of rows ``[n, hidden]`` in float64; infinite where a value is not finite."""
    lengths: npt.NDArray[np.float64] = np.linalg.norm(rows.astype(np.float64), axis=1)
    return np.where(np.isfinite(lengths), lengths, np.inf)


def norm_table(heat: HeatMap, num_rows: int) -> TextTable:
    """Return the smallest, mean and largest number of each row of a heat map; `num_rows` is how many rows there are."""
    lines = [
        (label, *(f"{value:.5g}" for value in (row.min(), row.mean(), row.max())))
        for label, row in zip(heat.rows, heat.values, strict=True)
    ]
    return TextTable(("site", "smallest norm", "mean", "largest"), lines, num_rows)


def _evenly(length: int, most: int) -> npt.NDArray[np.int64]:
    return np.linspace(0, length - 1, min(length, most)).round().astype(np.int64)


def _text(value: object) -> str:
    """Return a value as escaped text, cut short."""
    text = str(value).encode("utf-8", "backslashreplace").decode()
    return escape(text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}...")


def _table(table: TextTable, count: int) -> str:
    def line(cells: Sequence[object], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{_text(cell)}</{tag}>" for cell in cells[:_MAX_COLUMNS]) + "</tr>"

    rows = "".join(line(row, "td") for row in table.rows[:count])
    is_whole = table.num_rows == len(table.rows[:count])
    more = "" if is_whole else f"<div>the first {len(table.rows[:count])} of {table.num_rows or 'more'}</div>"
    return f'<table style="{_BOX}">{line(table.header, "th")}{rows}</table>{more}'


def _heat_map(heat: HeatMap, most: int) -> str:
    """Return a table of coloured cells on a logarithmic scale, neighbouring columns put together to at most `most`."""
    values = heat.values[:MAX_SITES]
    starts = np.array([part[0] for part in np.array_split(np.arange(values.shape[1]), min(most, values.shape[1]))])
    cells = np.fmax.reduceat(values, starts, axis=1)  # NaN gives way
    known = cells[np.isfinite(cells) & (cells > 0)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
    lines = "".join(
        f"<tr><td>{_text(label)}</td>{''.join(map(_cell, _colours(row, places)))}</tr>"
        for label, row, places in zip(heat.rows, cells, _places(cells, heat.by_row, low, high), strict=False)
    )
    first, last = (_text(label) for label in heat.columns)
    span = cells.shape[1]
    widths = f"<colgroup><col><col span={span} style=width:14px></colgroup>"  # cells are empty, so they have none
    head = f"{widths}<tr><td></td><td colspan={span}>{first} to {last}</td></tr>"
    scale = "each row from its smallest, dark, to its largest, light" if heat.by_row else None
    legend = f"{_text(heat.title)}: {scale or f'dark {low:.4g} to light {high:.4g}, logarithmic'}"
    odd = f'; <span style="color:{_NOT_FINITE}">this colour</span>: not finite' if np.isinf(cells).any() else ""
    return f'<div style="font:12px monospace">{legend}{odd}</div><table style="{_BOX}">{head}{lines}</table>'


def _cell(colour: str) -> str:
    return f"<td style=background:{colour}>" if colour else "<td>"


def _places(cells: npt.NDArray[np.float64], by_row: bool, low: float, high: float) -> Iterator[npt.NDArray[np.float64]]:
    """Yield the places of each row's values on the scale, from 0 to 1; any where a value is not finite."""
    for row in cells:
        if by_row:
            known = row[np.isfinite(row)]
            least, most = (known.min(), known.max()) if known.size else (0.0, 0.0)
            places = (row - least) / (most - least) if least < most else np.full_like(row, float(most > 0))
        else:
            with np.errstate(divide="ignore", invalid="ignore"):
                places = np.log(row / low) / np.log(high / low) if 0 < low < high else np.ones_like(row)
            places = np.where(row > 0, places, 0.0)
        yield np.clip(np.where(np.isfinite(row), places, 0.0), 0.0, 1.0)


def _colours(row: npt.NDArray[np.float64], places: npt.NDArray[np.float64]) -> list[str]:
    """Return the colour of each value; an empty text where there is none."""
    found = []
    for value, place in zip(row.tolist(), places.tolist(), strict=True):
        if value != value or np.isinf(value):
            found.append(_NOT_FINITE if np.isinf(value) else "")
        else:
            found.append(_colour(place))
    return found


def _colour(place: float) -> str:
    """Return the colour ``#rgb`` of a place from 0 to 1 of the scale."""
    exact = place * (len(_STOPS) - 1)
    lower = min(int(exact), len(_STOPS) - 2)
    mixed = _STOPS[lower] + (exact - lower) * (_STOPS[lower + 1] - _STOPS[lower])
    return "#" + "".join(f"{round(part):x}" for part in mixed.tolist())
