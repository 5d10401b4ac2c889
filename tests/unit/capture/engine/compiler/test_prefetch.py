"""Reads that are moved in front of a kernel's loops, and those that stay."""

from __future__ import annotations

import pytest

from headgate.capture.engine.compiler.rewrites import hoist_loads, prefetch_weights

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


def kernel_that_reads_late(*reads: str) -> str:
    lines = "".join(f"        tmp{number} = {read}\n" for number, read in enumerate(reads, 3))
    return kernel().replace("        tl.store(", f"{lines}        tl.store(")


def test_reads_between_the_passes_come_before_the_first_in_their_order():
    slots = "tmp2 = tl.load(in_ptr1 + (x0), xmask, eviction_policy='evict_last')"
    places = "tmp3 = tl.load(in_ptr2 + (x0), None)"

    found = hoist_loads(kernel(slots, "tmp4 = tmp1 / 2", places), {"in_ptr1", "in_ptr2"})

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
    assert hoist_loads(kernel(line), {"in_ptr1", "in_ptr2"}) == kernel(line)


def test_a_kernel_without_a_loop_stays_as_it_is():
    source = kernel("tmp2 = tl.load(in_ptr1 + (x0), xmask)").replace("for r0_offset", "if r0_offset")

    assert hoist_loads(source, {"in_ptr1"}) == source


SHARED = "tl.load(in_ptr3 + (r0_1), r0_mask, eviction_policy='evict_last', other=0.0).to(tl.float32)"


def test_what_later_passes_read_for_all_rows_alike_is_fetched_in_front_of_the_first():
    source = kernel_that_reads_late(SHARED, SHARED)

    found = prefetch_weights(source)

    start, end = source[:FIRST_LOOP], source[FIRST_LOOP:]
    assert found.startswith(start)
    assert found.endswith(end)
    added = found[len(start) : -len(end)]
    assert added.startswith("    if tl.program_id(0) == 0:\n        for r0_ahead in tl.range(0, r0_numel, R0_BLOCK):\n")
    assert added.count("prefetch.global.L2") == added.count("[in_ptr3 + r0_fetched]") == 1
    assert "tl.load" not in added
    assert "tl.store" not in added


@pytest.mark.parametrize(
    ("offset", "address"), [("4096 + ", "in_ptr3 + 4096 + r0_fetched"), ("", "in_ptr3 + r0_fetched")]
)
def test_each_part_of_what_is_read_is_fetched(offset, address):
    source = kernel_that_reads_late(f"tl.load(in_ptr3 + ({offset}r0_1), None, other=0.0)")

    assert f"[{address}]" in prefetch_weights(source)


@pytest.mark.parametrize(
    "read",
    [
        "tl.load(in_ptr3 + (r0_1 + 4096*x0), r0_mask & xmask)",  # a row's own
        "tl.load(out_ptr0 + (r0_1), r0_mask)",  # made by the kernel
        "tl.load(in_ptr3 + (x0), xmask)",
        "tl.load(in_ptr3 + (r0_1 // 2), r0_mask)",
    ],
)
def test_nothing_else_is_fetched(read):
    source = kernel_that_reads_late(read)

    assert prefetch_weights(source) == source


def test_what_the_first_pass_reads_is_not_fetched():
    source = kernel().replace("        tmp0 =", f"        tmp3 = {SHARED}\n        tmp0 =")

    assert prefetch_weights(source) == source
    assert prefetch_weights("no kernel") == "no kernel"
