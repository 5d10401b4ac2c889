"""Reads that are moved in front of a kernel's loops, and those that stay."""

from __future__ import annotations

import pytest

from headgate.capture.engine.early import read_early

KERNEL = """\
@triton.jit
def triton_red(in_ptr0, in_ptr1, in_ptr2, out_ptr0, xnumel, r0_numel, XBLOCK : tl.constexpr, R0_BLOCK : tl.constexpr):
    RBLOCK: tl.constexpr = R0_BLOCK
    xindex = tl.arange(0, XBLOCK)[:, None]
    xmask = xindex < xnumel
    x0 = xindex
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp0 = tl.load(in_ptr0 + (r0_offset + x0), xmask)
    tmp1 = tl.sum(tmp0, 1)[:, None]
{between}
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tl.store(out_ptr0 + (x0), tmp1 + tmp2, xmask)
"""
FIRST_LOOP = KERNEL.index("    for r0_offset")


def kernel(*between: str) -> str:
    return KERNEL.replace("{between}", "\n".join(f"    {line}" for line in between))


def test_reads_between_the_passes_come_before_the_first_in_their_order():
    slots = "tmp2 = tl.load(in_ptr1 + (x0), xmask, eviction_policy='evict_last')"
    places = "tmp3 = tl.load(in_ptr2 + (x0), None)"

    found = read_early(kernel(slots, "tmp4 = tmp1 / 2", places), {"in_ptr1", "in_ptr2"})

    rest = kernel("tmp4 = tmp1 / 2")
    assert found == f"{rest[:FIRST_LOOP]}    {slots}\n    {places}\n{rest[FIRST_LOOP:]}"


@pytest.mark.parametrize(
    "line",
    [
        "tmp2 = tl.load(in_ptr0 + (x0), xmask)",  # of another buffer
        "tmp2 = tl.load(in_ptr1 + (x1), xmask)",  # at an index that is made later, as far as is known
        "tmp2 = tl.load(in_ptr1 + (x0), tmp1)",
        "tmp2 = tl.load(in_ptr1 + (2*x0), xmask)",
        "tmp2 = tl.load(in_ptr1 + (x0), xmask, other=0.0)",
        "tmp2 = tl.load(in_ptr1 + (x0), xmask).to(tl.float32)",
        "    tmp2 = tl.load(in_ptr1 + (x0), xmask)",  # in a block of its own
    ],
)
def test_everything_else_stays_where_it_is(line):
    assert read_early(kernel(line), {"in_ptr1", "in_ptr2"}) == kernel(line)


def test_a_kernel_without_a_loop_stays_as_it_is():
    source = kernel("tmp2 = tl.load(in_ptr1 + (x0), xmask)").replace("for r0_offset", "if r0_offset")

    assert read_early(source, {"in_ptr1"}) == source
