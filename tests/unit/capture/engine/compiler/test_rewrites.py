"""The switch for rewriting kernels, and its counts."""

from __future__ import annotations

import logging

import pytest

from headgate.capture.engine.compiler.rewrites import Rewrites
from headgate.capture.schema.config import parse_compiler
from headgate.capture.schema.errors import ConfigError

KERNEL = """\
def kernel(in_ptr0, in_ptr1, in_ptr2, out_ptr0, xnumel, r0_numel, XBLOCK : tl.constexpr, R0_BLOCK : tl.constexpr):
    x0 = tl.program_id(0)
    xmask = x0 < xnumel
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp0 = tl.load(in_ptr0 + (r0_1), r0_mask)
    tmp4 = tl.load(in_ptr1 + (x0), xmask)
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp7 = tl.load(in_ptr2 + (r0_1), r0_mask, eviction_policy='evict_last')
"""


def test_loads_are_moved_and_weights_prefetched_and_both_are_counted() -> None:
    rewrites = Rewrites()

    result = rewrites.apply(KERNEL, {"in_ptr1"}, understands_ptx=True)

    assert result.index("tmp4 = tl.load") < result.index("for r0_offset")
    assert "prefetch.global.L2" in result
    assert rewrites.stats() == {"rewrites": True, "kernels": 1, "hoisted": 1, "prefetched": 1, "unchanged": 0}


def test_a_compiler_without_ptx_gets_no_prefetch() -> None:
    rewrites = Rewrites()

    result = rewrites.apply(KERNEL, {"in_ptr1"}, understands_ptx=False)

    assert "prefetch" not in result
    assert (rewrites.counts.hoisted, rewrites.counts.prefetched) == (1, 0)


def test_switched_off_the_kernel_stays_as_it_is() -> None:
    rewrites = Rewrites()
    rewrites.is_on = False

    assert rewrites.apply(KERNEL, {"in_ptr1"}, understands_ptx=True) == KERNEL
    assert rewrites.stats() == {"rewrites": False, "kernels": 1, "hoisted": 0, "prefetched": 0, "unchanged": 0}


def test_kernels_in_which_nothing_matches_are_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    rewrites, other = Rewrites(), KERNEL.replace("tl.load(", "tl.load_tensor_descriptor(")

    with caplog.at_level(logging.WARNING, "headgate"):
        results = [rewrites.apply(other, {"in_ptr1"}, understands_ptx=True) for _ in range(2)]

    assert results == [other, other]
    assert rewrites.counts.unchanged == 2
    assert [record.message for record in caplog.records if "no load to move" in record.message] != []
    assert len(caplog.records) == 1


def test_a_kernel_of_one_loop_is_not_expected_to_change(caplog: pytest.LogCaptureFixture) -> None:
    rewrites = Rewrites()

    rewrites.apply("def kernel():\n    tmp0 = 1\n", {"in_ptr1"}, understands_ptx=True)

    assert rewrites.counts.unchanged == 0
    assert caplog.records == []


def test_the_section_is_checked() -> None:
    assert parse_compiler(None).rewrites
    assert not parse_compiler({"rewrites": False}).rewrites
    with pytest.raises(ConfigError, match=r"\['compiler'\].*unknown field `rewrite`"):
        parse_compiler({"rewrite": False})
