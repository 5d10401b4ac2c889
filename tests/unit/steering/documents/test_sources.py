"""Operations with rows of earlier requests are those with the rows themselves; every row that is not there is a 400."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import Columns, Site
from headgate.steering import ops
from headgate.steering.documents.operations import MODULE_FIELDS, has_sources, read_ops
from headgate.steering.programs.program import Program
from tests.fakes.op_fields import OPS, SITES, V, op
from tests.fakes.vector_forms import HIDDEN, model

DTYPE = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Kept:
    """One request that kept every site and position below 10; its values say which row it is."""

    prompt_token_ids = np.arange(8)
    columns: Mapping[Site, Columns] = {}

    def __init__(self, dtype: str = "float32", value: float | None = None) -> None:
        self.dtype, self.value, self.found = dtype, value, 0

    def find(self, name: str, sample: int, field: str) -> Kept:
        self.found += 1
        if name != "clean" or sample:
            raise RequestError(f"{field}.request", "nothing is kept")
        return self

    def row(self, site: Site, position: int, field: str) -> Tensor:
        if position >= 10:
            raise RequestError(f"{field}.position", "no row")
        row = torch.arange(1, HIDDEN + 1) / 3 + 10 * site.layer + position / 7
        if self.value is not None:
            row[1] = self.value
        return row.to(DTYPE[self.dtype])


def read(fields: dict[str, Any], kept: Kept, dtype: str = "float32") -> Program:
    found = read_ops(fields, model(dtype), SITES, 8, find=kept.find)
    assert found is not None
    assert isinstance(found.prefill, Program)
    return found.prefill


def patched(**source: Any) -> dict[str, Any]:
    given = {"request": "clean", "site": "1.post_mlp", "position": 5, **source}
    given = {key: value for key, value in given.items() if value is not None}
    return op(method="replace", vector=None, source=given)


@pytest.mark.parametrize("dtype", DTYPE)
def test_a_source_is_the_row_itself(dtype: str) -> None:
    kept = Kept(dtype)
    row = kept.row(Site.parse("1.post_mlp"), 5, "")

    taken, given = read(patched(), kept, dtype), read(op(method="replace", vector=row), kept, dtype)

    assert taken.key == given.key
    assert taken.key != read(patched(position=4), kept, dtype).key


def test_without_a_site_each_site_gets_its_own_row() -> None:
    kept = Kept()
    sites = ["0.post_mlp", "1.post_mlp"]

    together = read({OPS: [ops.patch("clean", 5, sites, positions="all")]}, kept)

    apart = [ops.patch("clean", 5, site, site=site, positions="all") for site in sites]
    assert together.key == read({OPS: apart}, kept).key
    assert together.key != read({OPS: [ops.patch("clean", 5, sites, site=sites[0], positions="all")]}, kept).key


def test_a_patch_acts_at_the_position_it_comes_from_unless_another_is_named() -> None:
    assert ops.patch("clean", -1, "0.post_mlp")["positions"] == [-1]
    assert ops.patch("clean", -1, "0.post_mlp", positions=[3])["positions"] == [3]
    assert ops.patch("clean", 4, Site.parse("0.post_mlp"), site=Site.parse("1.post_mlp"), sample=2)["source"] == {
        "request": "clean",
        "position": 4,
        "site": "1.post_mlp",
        "sample": 2,
    }


def test_a_request_is_looked_for_once() -> None:
    kept = Kept()

    read({OPS: [ops.patch("clean", position, "0.post_mlp") for position in range(6)]}, kept)

    assert kept.found == 1


@pytest.mark.parametrize(
    ("source", "field", "told"),
    [
        ({"request": "dirty"}, "source.request", "nothing is kept"),
        ({"request": None}, "source.request", "expected the name"),
        ({"request": ""}, "source.request", "expected the name"),
        ({"request": "x" * 257}, "source.request", "expected the name"),
        ({"sample": 1}, "source.request", "nothing is kept"),
        ({"sample": -1}, "source.sample", "expected an integer from 0"),
        ({"position": 10}, "source.position", "no row"),
        ({"position": None}, "source.position", "is missing"),
        ({"position": 2.0}, "source.position", "expected an integer"),
        ({"position": True}, "source.position", "expected an integer"),
        ({"position": 2**31}, "source.position", "expected an integer"),
        ({"site": "1.mid"}, "source.site", "not a site"),
        ({"site": 4}, "source.site", "not a site"),
        ({"layer": 4}, "source.layer", "unknown key; a source has request, site, position, sample"),
    ],
)
def test_sources_that_are_none_are_refused_by_their_field(source: dict[str, Any], field: str, told: str) -> None:
    with pytest.raises(RequestError, match=told) as refusal:
        read(patched(**source), Kept())

    assert refusal.value.field == f"{OPS}[0].{field}"


@pytest.mark.parametrize("source", ["clean", [], 3])
def test_a_source_is_an_object(source: object) -> None:
    with pytest.raises(RequestError, match=r"expected \{") as refusal:
        read(op(method="replace", vector=None, source=source), Kept())

    assert refusal.value.field == f"{OPS}[0].source"


def test_a_row_that_is_not_finite_is_refused() -> None:
    with pytest.raises(RequestError, match="not finite: inf at 1") as refusal:
        read(patched(), Kept(value=float("inf")))

    assert refusal.value.field == f"{OPS}[0].source"


def test_modules_take_no_rows_from_requests() -> None:
    fields = {"ops": patched()[OPS]}

    with pytest.raises(RequestError, match="only a request can take rows") as refusal:
        read_ops(fields, model(), SITES, 8, MODULE_FIELDS)

    assert refusal.value.field == "ops[0].source"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        (op(), False),
        (patched(), True),
        ({"decode_steering_ops": patched()[OPS]}, True),
        ({OPS: [3, {"vector": V}, {"source": None}]}, False),
        ({OPS: "source"}, False),
    ],
)
def test_fields_with_sources_are_told_apart(fields: dict[str, Any], expected: bool) -> None:
    assert has_sources(fields) is expected
