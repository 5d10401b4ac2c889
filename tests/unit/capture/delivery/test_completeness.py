"""The totals of a request: what is wanted, what came, what is missing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.delivery.completeness import ConsumerRequest, DeliveryAudit, RowTotals, result_of
from headgate.capture.schema.positions import Indices, Named
from headgate.capture.schema.sites import HookPoint, Site
from headgate.capture.schema.spec import CaptureSpec
from tests.fakes.pipeline import MODEL, ROW_BYTES, SITES, consumer_request, final_state, info
from tests.strategies import selectors


def positions(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_everything_wanted_and_delivered_balances() -> None:
    audit = DeliveryAudit(info(num_prompt=4))

    audit.deliver(positions(0, 1, 2), len(SITES))
    audit.deliver(positions(3), len(SITES))

    assert audit.close(final_state(4)) == RowTotals(wanted=4, complete=4, dropped=0, surplus=0)


def test_rows_after_the_end_count_for_nothing() -> None:
    audit = DeliveryAudit(info(num_prompt=2))

    audit.deliver(np.arange(200, dtype=np.int64), len(SITES))

    assert audit.close(final_state(2, num_tokens=5)) == RowTotals(wanted=4, complete=4, dropped=0, surplus=0)


def test_a_position_without_one_of_its_sites_is_missing() -> None:
    audit = DeliveryAudit(info(num_prompt=3))

    audit.deliver(positions(0, 1, 2), 2)
    audit.deliver(positions(0, 2), 1)

    assert audit.close(final_state(3)) == RowTotals(wanted=3, complete=2, dropped=0, surplus=0)


def test_sites_with_positions_of_their_own_are_expected_there_alone() -> None:
    sites = (*SITES, Site(0, HookPoint.PRE_ATTN))
    request = consumer_request(num_prompt=4, sites=sites)
    own = {HookPoint.PRE_ATTN: Indices.of((1, 3))}
    request.info = replace(request.info, spec=CaptureSpec(sites=sites, positions=Named("all"), hook_positions=own))
    audit = DeliveryAudit(request.info)

    audit.deliver(positions(0, 1, 2, 3), len(SITES))
    audit.deliver(positions(1), 1)
    totals = audit.close(final_state(4))

    assert totals == RowTotals(wanted=4, complete=3, dropped=0, surplus=0)
    result = result_of(request, totals, final_state(4), instance="c", model=MODEL)
    assert (result.status, result.num_bytes) == ("partial_error", ROW_BYTES * (3 * len(SITES) + 1))


def test_a_position_that_was_never_computed_is_missing() -> None:
    audit = DeliveryAudit(info(num_prompt=10, positions=Named("all_prompt")))

    audit.deliver(positions(8, 9), len(SITES))

    assert audit.close(final_state(10)).missing == 8


def test_listed_positions_beyond_the_end_are_not_wanted() -> None:
    audit = DeliveryAudit(info(num_prompt=2, positions=Indices.of((1, 50))))

    audit.deliver(positions(1), len(SITES))

    assert audit.close(final_state(2)) == RowTotals(wanted=1, complete=1, dropped=0, surplus=0)


@pytest.mark.parametrize(
    ("selector", "delivered"),
    [(Named("all"), (0, 0)), (Named("last_prompt"), (0, 3))],
    ids=["twice", "unasked"],
)
def test_rows_delivered_twice_or_unasked_for_are_surplus(selector: Named, delivered: tuple[int, ...]) -> None:
    audit = DeliveryAudit(info(num_prompt=4, positions=selector))

    for position in delivered:
        audit.deliver(positions(position), len(SITES))

    assert audit.close(final_state(4)).surplus == len(SITES)


@given(selectors(), st.integers(1, 20), st.integers(0, 20), st.data())
def test_the_account_is_that_of_a_slow_loop(selector, num_prompt: int, num_generated: int, data: st.DataObject) -> None:
    selector = (
        data.draw(st.just(selector.resolve(num_prompt, "f"))) if _resolves(selector, num_prompt) else Named("all")
    )
    request = info(num_prompt=num_prompt, positions=selector)
    final = final_state(num_prompt, num_tokens=num_prompt + num_generated)
    fates = data.draw(st.lists(st.sampled_from(["came", "dropped", "lost"]), min_size=45, max_size=45))
    audit = DeliveryAudit(request)
    wanted = [position for position in range(45) if selector.mask(positions(position), positions(num_prompt))[0]]

    for position in wanted:
        if fates[position] == "came":
            audit.deliver(positions(position), 1)
            audit.deliver(positions(position), len(SITES) - 1)
        elif fates[position] == "dropped":
            audit.drop(positions(position))
            audit.drop(positions(position))

    inside = [fates[position] for position in wanted if position < final.num_rows]
    expected = RowTotals(wanted=len(inside), complete=inside.count("came"), dropped=inside.count("dropped"), surplus=0)
    assert audit.close(final) == expected


def _resolves(selector, num_prompt: int) -> bool:
    try:
        selector.resolve(num_prompt, "f")
    except ValueError:
        return False
    return True


def status_and_error(totals: RowTotals, **request_attributes: str) -> tuple[str, str | None]:
    request = ConsumerRequest(info())
    for name, value in request_attributes.items():
        setattr(request, name, value)
    result = result_of(request, totals, final_state(4, status="abort"), instance="files", model=MODEL)
    return result.status, result.error


def test_a_result_is_ok_only_if_nothing_is_missing() -> None:
    assert status_and_error(RowTotals(wanted=4, complete=4, dropped=0, surplus=0, by_selection=(4,))) == ("ok", None)


def test_a_result_says_how_many_rows_are_missing_and_why() -> None:
    status, error = status_and_error(
        RowTotals(wanted=9, complete=4, dropped=3, surplus=0, by_selection=(4,)), drop_reason="its queue was full"
    )

    assert status == "partial_error"
    assert error == (
        "files: 5 of 9 wanted positions are missing: 3 dropped (its queue was full); 2 never captured: not computed "
        "before the request ended (status 'abort') or read from the prefix cache"
    )


def test_rows_that_should_not_be_there_make_the_result_an_error() -> None:
    status, error = status_and_error(RowTotals(wanted=4, complete=3, dropped=0, surplus=2, by_selection=(3,)))

    assert status == "error"
    assert error is not None
    assert "twice or unasked for" in error


def test_rows_of_a_prompt_that_was_computed_again_under_something_else_make_the_result_an_error() -> None:
    status, error = status_and_error(
        RowTotals(wanted=4, complete=4, dropped=0, surplus=0, outdated=3, by_selection=(4,))
    )

    assert status == "error"
    assert error == (
        "files: 3 rows of the prompt were captured before the global vectors or the weights changed, and the answer is "
        "of the prompt as it was computed again; send the request again"
    )


def test_rows_that_were_delivered_of_an_outdated_part_of_the_prompt_are_counted() -> None:
    audit = DeliveryAudit(info(num_prompt=4))
    audit.deliver(positions(1, 2, 3), len(SITES))

    assert [audit.close(replace(final_state(4), num_outdated=count)).outdated for count in (0, 1, 3)] == [0, 0, 2]


def test_a_result_counts_positions_and_the_bytes_of_all_sites() -> None:
    totals = RowTotals(wanted=4, complete=4, dropped=0, surplus=0, by_selection=(4,))

    result = result_of(ConsumerRequest(info()), totals, final_state(4), instance="files", model=MODEL)

    assert (result.num_rows, result.num_bytes, result.dropped_rows) == (4, 4 * len(SITES) * ROW_BYTES, 0)
