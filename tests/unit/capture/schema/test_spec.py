"""A spec survives the wire."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.positions import Indices, Named
from headgate.capture.schema.sites import FINAL_NORM_SITE, HookPoint, Site
from headgate.capture.schema.spec import MAX_KNOWN, CaptureSpec, Memo, SpecReader
from tests.strategies import resolved, specs

PLAIN = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=4)
OPTIONS = st.dictionaries(
    st.text(max_size=4),
    st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=4),
)


@given(spec=specs(), num_prompt=st.integers(1, 24), options=OPTIONS)
def test_the_wire_returns_an_equal_spec(spec: CaptureSpec, num_prompt: int, options: dict[str, object]) -> None:
    for usable in resolved({0: spec}, num_prompt).values():
        sent = replace(usable, options=options)

        received = CaptureSpec.from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(sent.to_wire())))

        assert received == sent


def test_the_wire_is_readable_and_uses_our_own_names() -> None:
    sites = (Site(0, HookPoint.ATTN_OUT), Site(3, HookPoint.POST_MLP), Site(7, HookPoint.POST_MLP), FINAL_NORM_SITE)

    wire = CaptureSpec(sites=sites, positions=Named("last_prompt"), options={"tag": "run"}).to_wire()

    assert wire == {
        "sites": {"attn_out": [0], "post_mlp": [3, 7], "final_norm": []},
        "positions": "last_prompt",
        "options": {"tag": "run"},
    }


@given(given=st.lists(st.tuples(specs(), OPTIONS), min_size=1, max_size=4), num_prompt=st.integers(1, 24))
def test_a_reader_returns_what_was_sent_however_often_and_only_the_workers_own_sites(
    given: list[tuple[CaptureSpec, dict[str, object]]], num_prompt: int
) -> None:
    sent = [
        replace(usable, options=options)
        for spec, options in given
        for usable in resolved({0: spec}, num_prompt).values()
    ]
    own = {site for spec in sent[:1] for site in spec.sites[::2]}
    reader = SpecReader(own)

    for spec in [*sent, *sent]:
        received = reader.read(msgspec.msgpack.decode(msgspec.msgpack.encode(spec.to_wire())))

        assert received.sites == tuple(site for site in spec.sites if site in own)
        assert received == replace(spec, sites=received.sites)


def test_hook_points_may_have_positions_of_their_own() -> None:
    sites = (Site(0, HookPoint.PRE_ATTN), Site(0, HookPoint.POST_MLP), Site(3, HookPoint.POST_MLP))
    spec = CaptureSpec(sites=sites, positions=Named("all"), hook_positions={HookPoint.POST_MLP: Named("last_prompt")})

    assert spec.selections == [(sites[:1], Named("all")), (sites[1:], Named("last_prompt"))]
    assert [spec.positions_at(site) for site in sites] == [Named("all"), *[Named("last_prompt")] * 2]
    assert spec.to_wire()["hook_positions"] == {"post_mlp": "last_prompt"}
    assert spec.with_positions(lambda selector: selector) is spec
    assert [*spec.with_positions(lambda _: Indices.of([1])).selectors] == [Indices.of([1])] * 2


def test_a_reader_neither_copies_nor_keeps_a_long_list() -> None:
    reader = SpecReader([FINAL_NORM_SITE])
    wire = CaptureSpec(sites=(FINAL_NORM_SITE,), positions=Indices.of([*range(5000), 7000])).to_wire()

    first, second = reader.read(wire), reader.read(wire)

    assert isinstance(first.positions, Indices)
    assert first.positions.data is wire["positions"]
    assert first == second
    assert first.sites is not second.sites


def test_a_reader_does_not_keep_all_that_it_has_ever_read() -> None:
    reader = SpecReader([FINAL_NORM_SITE])
    first = CaptureSpec(sites=(FINAL_NORM_SITE,), positions=Named("all")).to_wire()
    read = reader.read(first)

    assert reader.read(first).sites is read.sites
    for layer in range(MAX_KNOWN):
        other = CaptureSpec(sites=(Site(layer, HookPoint.POST_MLP),), positions=Named("all"))
        assert reader.read(other.to_wire()).sites == ()
    assert reader.read(first).sites is not read.sites
    assert reader.read(first) == read


def test_what_is_written_alike_is_parsed_once_and_what_only_looks_alike_is_not() -> None:
    memo, parsed = Memo(), []

    def parse(raw: object, field: str) -> str:
        parsed.append((raw, field))
        if raw is None:
            raise RequestError(field, "nothing")
        return repr(raw)

    def read(raw: object, field: str = "f") -> str:
        return memo.parsed_alike(raw, field, parse)

    assert read({"post_mlp": [1]}) == read({"post_mlp": [1]}) == "{'post_mlp': [1]}"
    assert len(parsed) == 1
    alike: list[object] = [[1], [1.0], [True], ["1"], {1: 2}, {"1": 2}, {1: None}, [float("nan")], [None]]
    assert [read(raw) for raw in alike] == [repr(raw) for raw in alike]
    read([1], "g")
    assert len(parsed) == 2 + len(alike)
    for _ in range(2):
        with pytest.raises(RequestError):
            read(None)
        read(range(3))  # not plain: never kept
    assert len(parsed) == 6 + len(alike)


def test_of_what_calls_write_only_so_much_is_known() -> None:
    memo = Memo()

    for number in range(3 * MAX_KNOWN):
        assert memo.parsed_alike(number, "f", lambda raw, field: (raw,)) == (number,)

    assert len(memo._alike) <= MAX_KNOWN
