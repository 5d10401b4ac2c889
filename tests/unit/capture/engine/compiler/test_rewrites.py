"""The switch for rewriting kernels, and its counts."""

from __future__ import annotations

import logging

import pytest

from headgate.capture.engine.compiler.inductor_heuristics import unroll_sum
from headgate.capture.engine.compiler.rewrites import Rewrites
from headgate.capture.schema.config import parse_compiler
from headgate.capture.schema.errors import ConfigError
from tests.fresh_python import run_python

COUNTS = dict.fromkeys(("excluded", "kernels", "norms", "hoisted", "prefetched", "unmatched"), 0)

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

    result = rewrites.apply(KERNEL, {"in_ptr1"}, is_looped=True, understands_ptx=True)

    assert result.index("tmp4 = tl.load") < result.index("for r0_offset")
    assert "prefetch.global.L2" in result
    assert rewrites.stats() == {
        **COUNTS,
        "rewrites": True,
        "kernels": 1,
        "norms": 1,
        "hoisted": 1,
        "prefetched": 1,
    }


def test_a_compiler_without_ptx_gets_no_prefetch() -> None:
    rewrites = Rewrites()

    result = rewrites.apply(KERNEL, {"in_ptr1"}, is_looped=True, understands_ptx=False)

    assert "prefetch" not in result
    assert (rewrites.counts.hoisted, rewrites.counts.prefetched) == (1, 0)


def test_switched_off_the_kernel_stays_as_it_is() -> None:
    rewrites = Rewrites()
    rewrites.is_on = False

    assert rewrites.apply(KERNEL, {"in_ptr1"}, is_looped=True, understands_ptx=True) == KERNEL
    assert rewrites.stats() == {**COUNTS, "rewrites": False, "kernels": 1, "norms": 1}


def test_kernels_in_which_nothing_matches_are_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    rewrites, other = Rewrites(), KERNEL.replace("tl.load(", "tl.load_tensor_descriptor(")

    with caplog.at_level(logging.WARNING, "headgate"):
        results = [rewrites.apply(other, {"in_ptr1"}, is_looped=True, understands_ptx=True) for _ in range(2)]

    assert results == [other, other]
    assert rewrites.counts.unmatched == 2
    assert [record.message for record in caplog.records if "no load of weights" in record.message] != []
    assert len(caplog.records) == 1


def test_a_kernel_of_one_loop_is_not_expected_to_change(caplog: pytest.LogCaptureFixture) -> None:
    rewrites = Rewrites()

    rewrites.apply("def kernel():\n    tmp0 = 1\n", {"in_ptr1"}, is_looped=False, understands_ptx=True)

    assert rewrites.counts.unmatched == 0
    assert caplog.records == []


def test_the_first_of_two_passes_over_two_blocks_is_unrolled() -> None:
    sized = KERNEL.replace("    x0 =", "    r0_numel = 4096\n    x0 =", 1)
    three = sized + "    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):\n        tmp9 = 0\n"

    result = unroll_sum(sized)

    first, *rest = (line for line in result.splitlines() if "for r0_offset" in line)
    factor = first[first.index("loop_unroll_factor=") :].removeprefix("loop_unroll_factor=").removesuffix("):")
    assert [eval(factor, {"R0_BLOCK": block}) for block in (1024, 2048, 4096)] == [1, 2, 1]
    assert rest == ["    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):"]
    assert [unroll_sum(each) for each in (KERNEL, three)] == [KERNEL, three]  # of unknown width, and Gemma's form


@pytest.mark.extended
def test_squares_are_added_up_as_in_stocks_kernels() -> None:
    """An unrolled loop multiplies the squares of one block and adds those of the other; no GPU is needed."""
    ways = ["stock", "ahead", "both", "ops_end"]
    done = run_python(["-m", "tests.benchmarks.codegen", "--squares", *ways], environment={}, may_fork=False)

    found = [line.split() for line in done.stdout.splitlines() if line.startswith("llama ")]
    squares = {way: [int(number) for _, name, _, number in found if name == way] for way in ways}
    assert squares["stock"] == [4, 4], done.stderr
    assert all(numbers == [4, 4] for numbers in squares.values()), squares


def test_the_section_is_checked() -> None:
    assert parse_compiler(None).rewrites
    assert not parse_compiler({"rewrites": False}).rewrites
    with pytest.raises(ConfigError, match=r"\['compiler'\].*unknown field `rewrite`"):
        parse_compiler({"rewrite": False})


def test_a_norm_in_an_unknown_form_is_counted_although_no_loop_is_found() -> None:
    rewrites, other = Rewrites(), KERNEL.replace("for r0_offset", "for r0_start")

    assert rewrites.apply(other, {"in_ptr1"}, is_looped=True, understands_ptx=True) == other
    assert (rewrites.counts.norms, rewrites.counts.unmatched) == (1, 1)


def test_switched_off_kernels_for_a_gpu_keep_their_blocks_and_load_late() -> None:
    """The code is generated by `tests.benchmarks.codegen`, which needs no GPU."""
    rewritten, plain = (generated(*flags) for flags in ((), ("--no-rewrites",)))

    assert [line[:10] for line in plain[:-1]] == [line[:10] for line in rewritten[:-1]]  # loads to blocks
    assert [line[line.index("fetched") + 1] for line in rewritten[:-1]] == ["0", "3", "0", "1"]
    assert [line[line.index("fetched") + 1] for line in plain[:-1]] == ["0"] * 4
    assert " ".join(rewritten[-1]) == "rewrites=True excluded=8 kernels=2 norms=2 hoisted=1 prefetched=2 unmatched=0"
    assert " ".join(plain[-1]) == "rewrites=False excluded=8 kernels=2 norms=2 hoisted=0 prefetched=0 unmatched=0"


def generated(*flags: str) -> list[list[str]]:
    """Words of the lines on the kernels of norms in front of attention and of MLPs, and of the counts."""
    command = ["-m", "tests.benchmarks.codegen", "--counts", *flags, "both"]
    done = run_python(command, environment={}, may_fork=True)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines() if " both " in line or line.startswith("rewrites=")]
