"""A spec survives the wire."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.positions import Named
from headgate.capture.sites import FINAL_NORM_SITE, HookPoint, Site
from headgate.capture.spec import CaptureSpec
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
