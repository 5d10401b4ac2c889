"""A spec survives the wire."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.schema.positions import Indices, Named
from headgate.capture.schema.sites import FINAL_NORM_SITE, HookPoint, Site
from headgate.capture.schema.spec import MAX_KNOWN, CaptureSpec, SpecReader
from tests.strategies import resolved, specs

PLAIN = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=4)
OPTIONS = st.dictionaries(
    st.text(max_size=4),
    st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=4),
)


@given(spec=specs(), num_prompt=st.integers(1, 24), options=OPTIONS)
def test_the_wire_returns_an_equal_spec(spec: CaptureSpec, num_prompt: int, options: dict[str, object]) -> None:
    for usable in resolved({0: spec}, num_prompt).values():
        sent = CaptureSpec(sites=usable.sites, positions=usable.positions, options=options)

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
        CaptureSpec(sites=usable.sites, positions=usable.positions, options=options)
        for spec, options in given
        for usable in resolved({0: spec}, num_prompt).values()
    ]
    own = {site for spec in sent[:1] for site in spec.sites[::2]}
    reader = SpecReader(own)

    for spec in [*sent, *sent]:
        received = reader.read(msgspec.msgpack.decode(msgspec.msgpack.encode(spec.to_wire())))

        assert received.sites == tuple(site for site in spec.sites if site in own)
        assert (received.positions, received.options) == (spec.positions, spec.options)


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
