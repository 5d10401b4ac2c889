"""HTML for notebooks: bounded, escaped, well formed, and right about the numbers."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import msgspec
import numpy as np
import pytest

from headgate.capture.monitoring.notebook import (
    MAX_BYTES,
    MAX_CELLS,
    MAX_SITES,
    HeatMap,
    TextTable,
    norm_table,
    norms_by_position,
    page,
)
from headgate.capture.schema.results import CaptureResult
from headgate.capture.schema.sites import HookPoint, Site

HOSTILE = '<script>alert("1")</script>&\'' * 50
SITES = [Site(layer, HookPoint.POST_MLP) for layer in range(50)]


class Parsed(HTMLParser):
    """A page's tags and texts.

    Attributes:
        cells: The colour of each cell of the heat map, row by row.
        texts: All text.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.cells: list[list[str]] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()
        assert [tag for tag in self.open if tag != "td"] == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        style = dict(attrs).get("style") or ""
        if tag == "tr":
            self.cells.append([])
        if tag == "td" and style.startswith("background:"):
            self.cells[-1].append(style.removeprefix("background:"))
        if tag not in ("td", "br", "col"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "td":
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def heat(self) -> list[list[str]]:
        return [cells for cells in self.cells if cells]


def brightness(colour: str) -> int:
    return sum(int(part, 16) for part in colour.removeprefix("#"))


def test_a_heat_map_is_brighter_where_the_norm_is_larger() -> None:
    rows = np.outer([1.0, 10.0, 100.0, 1000.0], np.ones(4))

    heat = norms_by_position(SITES[:2], np.arange(4), lambda site, index: rows[index] * (1 + 10 * site.layer))
    assert heat is not None

    np.testing.assert_allclose(heat.values, [[2, 20, 200, 2000], [22, 220, 2200, 22000]])
    shown = Parsed(page("T", {}, norm_table(heat, 2), heat))
    for line in shown.heat:
        assert [brightness(colour) for colour in line] == sorted({brightness(colour) for colour in line})
    assert brightness(shown.heat[0][0]) < brightness(shown.heat[1][0])
    text = " ".join(shown.texts)
    assert "dark 2 to light 2.2e+04" in text
    assert "position 0 to 3" in text
    assert "555.5" in text  # the mean of the first site


def test_few_rows_are_read_of_a_long_capture() -> None:
    asked: list[int] = []

    def read(site: Site, index: Any) -> Any:
        asked.append(len(index))
        return np.ones((len(index), 3)) * index[:, None]

    heat = norms_by_position(SITES, np.arange(5, 1_000_005), read)
    assert heat is not None

    assert asked == [4 * MAX_CELLS] * MAX_SITES
    assert heat.rows[0] == "0.post_mlp"
    assert heat.rows[-1] == "49.post_mlp"
    assert heat.columns == ("position 5", "1000004")
    assert "20 of 50 sites" in heat.title
    part = 1_000_000 / MAX_CELLS
    np.testing.assert_allclose(heat.values[0], np.sqrt(3) * part * (np.arange(MAX_CELLS) + 0.5), rtol=1e-4)


def test_there_is_no_heat_map_of_nothing() -> None:
    assert norms_by_position(SITES, np.zeros(0, np.int64), lambda site, index: index) is None
    assert norms_by_position([], np.arange(3), lambda site, index: index) is None


@pytest.mark.parametrize(
    ("facts", "labels"),
    [
        ({}, [f"{layer}.post_mlp" for layer in range(MAX_SITES)]),
        ({f"{number}{HOSTILE}": HOSTILE for number in range(100)}, [HOSTILE] * MAX_SITES),
        ({f"{number}" + "\U0001f600" * 500: "é" * 1000 for number in range(100)}, ["\udc80" * 500] * MAX_SITES),
    ],
    ids=["plain", "hostile", "wide"],
)
def test_a_page_is_bounded_and_escaped(facts: dict[str, str], labels: list[str]) -> None:
    values = np.random.default_rng(0).random((len(labels), 500)) + 0.1
    table = TextTable(labels, [labels] * 1000, 1000)

    made = page(labels[0], facts, table, HeatMap(labels[0], labels, (labels[0], labels[0]), values))

    assert len(made.encode()) <= MAX_BYTES
    shown = Parsed(made)
    assert shown.tags <= {"div", "b", "br", "table", "colgroup", "col", "tr", "th", "td", "span"}
    if not facts:
        assert [len(line) for line in shown.heat] == [MAX_CELLS] * MAX_SITES
        assert "the first 10 of 1000" in shown.texts


def test_values_that_are_not_finite_zero_or_not_there_are_told_apart() -> None:
    values = np.array([[np.inf, 0.0, 1.0, 2.0, np.nan]])

    made = page("T", {}, None, HeatMap("norms", ["a"], ("0", "4"), values))

    (cells,) = Parsed(made).heat
    assert len(cells) == 4  # none for the missing one
    assert cells[0] == "#f0f"
    assert cells[1] == cells[2] != cells[3]
    assert "not finite" in made
    rows = np.array([[1.0, np.nan], [3.0, 4.0]])
    heat = norms_by_position(SITES[:1], np.arange(2), lambda site, index: rows[index])
    assert heat is not None
    assert heat.values.tolist() == [[np.inf, 5.0]]


def test_a_result_shows_its_payload_as_the_payload_does() -> None:
    class Shown:
        def __init__(self, page: Any) -> None:
            self.page = page

        def _repr_html_(self) -> Any:
            return self.page

    def html(payload: Any, **fields: Any) -> str:
        return CaptureResult(status="ok", payload=payload, num_rows=3, key="memory", **fields)._repr_html_()

    assert html(Shown("<i>rows</i>")).endswith("<i>rows</i>")
    assert "memory: ok; 3 rows" in html(None)
    for payload in (Shown(None), Shown("x" * 18_001), HOSTILE, [HOSTILE] * 9):
        made = html(payload, error=HOSTILE)
        assert len(made.encode()) < 20_000
        assert Parsed(made).tags == {"div", "b", "br"}
    assert len(html(Shown("x" * 18_000), error=HOSTILE).encode()) < 20_000
    assert msgspec.json.decode(msgspec.json.encode(CaptureResult(status="ok")))["status"] == "ok"
