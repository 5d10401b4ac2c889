"""Readouts through a whole session: each consumer has what it declared, whoever delivers, and no row beyond it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from headgate.capture.schema.consumer import ReadoutFacts
from headgate.capture.schema.positions import Indices, Named
from headgate.capture.schema.results import CaptureResult
from headgate.capture.schema.sites import Site
from headgate.capture.schema.spec import CaptureSpec
from tests.fakes.capture_world import Keeper, World, make_staging, want, world
from tests.fakes.pipeline import ROW_BYTES, SITES, Recorder, final_state, row_values
from tests.fakes.readouts import Declared, Failing, Multiples, Shifted

DECLARED: list[Declared] = [(1, SITES[0], Multiples(2)), (1, SITES[2], Multiples(7)), (2, SITES[0], Multiples(2, 3.0))]


def rows_of(bit: int, site: Site, number: int, positions: Sequence[int], declared: Sequence[Declared]) -> Tensor:
    rows = row_values(number, np.array(positions), SITES.index(site))
    found = [readout for other, place, readout in declared if (other, place) == (bit, site)]
    return found[0].expected(rows) if found else rows


def results_of(it: World, count: int) -> dict[str, CaptureResult]:
    it.sender.wait(count)
    return {message["instance"]: message["result"] for message in it.sender.sent}


def test_consumers_of_one_request_get_rows_and_outputs_side_by_side() -> None:
    keepers = [Keeper() for _ in range(3)]

    with world(*((keeper, {}) for keeper in keepers), declared=DECLARED) as it:
        it.add("a", {f"c{bit}": want() for bit in range(3)}, number=7)
        it.step(a=(0, 3))
        it.step(a=(3, 4))
        it.step(a=(4, 5))
        it.session.request_finished("a", final_state(4, num_tokens=6))
        sent = results_of(it, 3)

        assert it.session.stats().bytes == 5 * (3 * ROW_BYTES + 4 * (2 + 7 + 2))
    for bit, keeper in enumerate(keepers):
        (captured,) = keeper.captured
        facts = {site: ReadoutFacts(each.num_outputs, each.key) for b, site, each in DECLARED if b == bit}
        assert captured.request.readouts == facts
        assert captured.positions.tolist() == [0, 1, 2, 3, 4]
        for site in SITES:
            assert torch.equal(captured.rows[site], rows_of(bit, site, 7, range(5), DECLARED)), (bit, site)
        widths = [4 * facts[site].num_outputs if site in facts else ROW_BYTES for site in SITES]
        assert (sent[f"c{bit}"].status, sent[f"c{bit}"].num_bytes) == ("ok", 5 * sum(widths))


def test_where_one_consumer_has_outputs_alone_no_row_leaves_the_device() -> None:
    keeper = Keeper()
    declared: list[Declared] = [(0, site, Multiples(1)) for site in SITES]

    with world((keeper, {}), declared=declared) as it:
        it.add("a", {"c0": want()}, num_prompt=9)
        it.step(a=(0, 9))
        it.session.request_finished("a", final_state(9))
        it.sender.wait()

        assert it.session.stats().bytes == 9 * 3 * 4
    assert torch.equal(keeper.captured[0].rows[SITES[1]], rows_of(0, SITES[1], 1, range(9), declared))


def test_an_aborted_request_has_outputs_of_no_row() -> None:
    keeper = Keeper()

    with world((Keeper(), {}), (keeper, {}), declared=DECLARED) as it:
        it.add("a", {"c1": want()})
        it.session.request_finished("a", final_state(4, num_tokens=4, status="abort"))
        it.sender.wait()

    rows = keeper.captured[0].rows
    assert {site: (rows[site].shape[1], rows[site].dtype) for site in SITES} == {
        site: (width, torch.float32) for site, width in zip(SITES, (2, 4, 7), strict=True)
    }


def test_blocks_have_rows_of_one_width() -> None:
    recorder = Recorder()

    with world((Keeper(), {}), (recorder, {}), declared=DECLARED) as it:
        it.add("a", {"c1": want()})
        it.step(a=(0, 4))
        it.session.request_finished("a", final_state(4))
        it.sender.wait()

    assert {block.sites: tuple(block.rows.shape) for block in recorder.blocks} == {
        (SITES[0],): (1, 4, 2),
        (SITES[1],): (1, 4, 4),
        (SITES[2],): (1, 4, 7),
    }


def test_a_failing_readout_makes_its_own_requests_partial() -> None:
    declared: list[Declared] = [(1, SITES[0], Failing(2))]
    keepers = [Keeper(), Keeper()]

    with world(*((keeper, {}) for keeper in keepers), declared=declared) as it:
        it.add("a", {"c0": want(sites=SITES[:1]), "c1": want(sites=SITES[:1])})
        it.step(a=(0, 4))
        it.session.request_finished("a", final_state(4))
        sent = results_of(it, 2)

    assert sent["c0"].status == "ok"
    assert (sent["c1"].status, sent["c1"].num_rows) == ("partial_error", 0)
    assert "4 of 4 wanted positions are missing" in sent["c1"].error


SELECTORS = st.sampled_from([Named("all"), Named("all_generated"), Named("last_prompt"), Indices.of([0, 3, 6])])
WANTED = st.dictionaries(
    st.integers(0, 2),
    st.builds(
        lambda sites, positions: CaptureSpec(sites=tuple(sorted(sites)), positions=positions),
        st.sets(st.sampled_from(SITES), min_size=1),
        SELECTORS,
    ),
    min_size=1,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    wanted=st.lists(WANTED, min_size=1, max_size=4),
    chunks=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    linger_s=st.sampled_from([0.0, 1.0]),
    staging_rows=st.sampled_from([128, 1000]),
)
def test_any_requests_in_any_chunks_get_what_they_want(
    wanted: list[dict[int, CaptureSpec]], chunks: list[int], linger_s: float, staging_rows: int
) -> None:
    """Prompts of 6 in several chunks, then four tokens each; steps held together or not; little memory or enough."""
    keepers = [Keeper() for _ in range(3)]
    staging = make_staging(declared=DECLARED, staging_rows=staging_rows)
    with world(*((keeper, {}) for keeper in keepers), declared=DECLARED, linger_s=linger_s, staging=staging) as it:
        names = [f"r-{number}" for number in range(len(wanted))]
        for number, (name, specs) in enumerate(zip(names, wanted, strict=True)):
            resolved = {bit: CaptureSpec(sites=spec.sites, positions=spec.positions.resolve(6, "p"))
                        for bit, spec in specs.items()}  # fmt: skip
            it.add(name, {f"c{bit}": spec for bit, spec in resolved.items()}, num_prompt=6, number=number)
        at, size = dict.fromkeys(names, 0), iter(chunks * 100)
        while any(start < 9 for start in at.values()):
            spans = {name: (start, min(start + next(size), 6) if start < 6 else start + 1)
                     for name, start in at.items() if start < 9}  # fmt: skip
            it.step(**spans)
            at |= {name: stop for name, (_, stop) in spans.items()}
        for name in names:
            it.session.request_finished(name, final_state(6, num_tokens=10))
        results = it.sender.wait(sum(len(specs) for specs in wanted))

    assert {result.status for result in results} == {"ok"}
    for bit, keeper in enumerate(keepers):
        for captured in keeper.captured:
            number = int(captured.request.request_id.removeprefix("r-"))
            for site in wanted[number][bit].sites:
                expected = rows_of(bit, site, number, captured.positions.tolist(), DECLARED)
                assert torch.equal(captured.rows[site], expected)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    given=st.lists(st.lists(st.integers(0, 1 << 20), max_size=3), min_size=1, max_size=5),
    linger_s=st.sampled_from([0.0, 1.0]),
    staging_rows=st.sampled_from([128, 1000]),
)
def test_each_row_is_read_out_with_the_arguments_of_its_own_request(
    given: list[list[int]], linger_s: float, staging_rows: int
) -> None:
    """Two sites of one consumer take arguments, of requests that share steps; one of another consumer takes none."""
    shifted = Shifted(3)
    declared: list[Declared] = [(0, SITES[0], Multiples(2)), (1, SITES[0], shifted), (1, SITES[2], shifted)]
    keepers = [Keeper(), Keeper()]
    staging = make_staging(declared=declared, staging_rows=staging_rows)
    names = [f"r-{number}" for number in range(len(given))]
    with world(*((keeper, {}) for keeper in keepers), declared=declared, linger_s=linger_s, staging=staging) as it:
        for number, (name, arguments) in enumerate(zip(names, given, strict=True)):
            asked = replace(want(sites=(SITES[0], SITES[2])), arguments=tuple(arguments))
            it.add(name, {"c0": want(sites=SITES[:1]), "c1": asked}, number=number)
        it.step(**dict.fromkeys(names, (0, 3)))
        it.step(**dict.fromkeys(names, (3, 4)))
        it.step(**dict.fromkeys(names, (4, 5)))
        for name in names:
            it.session.request_finished(name, final_state(4, num_tokens=6))
        results = it.sender.wait(2 * len(names))
        assert not staging.readouts.arguments

    assert {result.status for result in results} == {"ok"}
    assert len(keepers[1].captured) == len(names)
    for captured in keepers[1].captured:
        number = int(captured.request.request_id.removeprefix("r-"))
        for site in (SITES[0], SITES[2]):
            rows = row_values(number, captured.positions, SITES.index(site))
            assert torch.equal(captured.rows[site], shifted.expected(rows, given[number]))
        assert captured.request.spec.arguments == tuple(given[number])


pytestmark = pytest.mark.timeout(300)
