"""A whole session on the CPU: requests in, steps of a model that writes known values, rows and results out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headgate.capture.schema.batch import NewRequest, RequestWire
from headgate.capture.schema.positions import Named
from headgate.capture.schema.results import CaptureResult
from tests.fakes.capture_world import Keeper, make_staging, want, world
from tests.fakes.pipeline import ROW_BYTES, SITES, Gate, Recorder, at_gate, final_state, row_values


def test_a_request_gets_its_rows_and_its_result() -> None:
    keeper = Keeper()

    with world((keeper, {})) as it:
        it.add("a", {"c0": want(sites=SITES[1:])}, number=7)
        it.step(a=(0, 3))
        it.step(a=(3, 4))
        it.step(a=(4, 5))
        it.session.request_finished("a", final_state(4, num_tokens=6))
        it.sender.wait()

    (captured,) = keeper.captured
    assert captured.request.client_request_id == "client-a"
    assert captured.request.spec.options == {"tag": "t"}
    assert captured.positions.tolist() == [0, 1, 2, 3, 4]
    assert captured.token_ids.tolist() == [100, 101, 102, 103, 104]
    for index in (1, 2):
        assert torch.equal(captured.rows[SITES[index]], row_values(7, np.arange(5), index))
    assert it.sender.sent == [
        {
            "reply": "ipc://hub",
            "key": "key-a",
            "req_id": "a",
            "sample_index": 0,
            "instance": "c0",
            "stage": 0,
            "num_stages": 1,
            "result": CaptureResult(status="ok", payload=5, num_rows=5, num_bytes=5 * 2 * ROW_BYTES),
            "num_rows": 0,  # it is no part of a result
        }
    ]


def test_the_row_that_async_scheduling_computes_in_vain_is_not_captured() -> None:
    keeper = Keeper()

    with world((keeper, {})) as it:
        it.add("a", {"c0": want()})
        it.step(a=(0, 4))
        it.step(a=(4, 5))
        it.session.request_finished("a", final_state(4))
        it.sender.wait()

    assert keeper.captured[0].positions.tolist() == [0, 1, 2, 3]


def test_positions_that_came_from_the_prefix_cache_make_the_result_partial() -> None:
    keeper = Keeper()

    with world((keeper, {})) as it:
        it.add("a", {"c0": want(Named("all_prompt"))}, num_prompt=8)
        it.step(a=(6, 8))
        it.session.request_finished("a", final_state(8))
        (result,) = it.sender.wait()

    assert (result.status, result.num_rows, result.payload) == ("partial_error", 2, 2)
    assert "6 of 8 wanted positions are missing" in str(result.error)


def test_a_request_without_a_known_end_gets_an_error() -> None:
    with world((Keeper(), {})) as it:
        it.add("a", {"c0": want()})
        it.step(a=(0, 4))
        it.session.request_finished("a", None)
        (result,) = it.sender.wait()

    assert result.status == "error"
    assert "but not its tokens and why it stopped" in str(result.error)


def test_requests_that_ask_for_nothing_and_ids_that_nobody_knows_cost_nothing() -> None:
    with world((Keeper(), {})) as it:
        it.session.request_added(NewRequest(req_id="a", prompt_token_ids=np.arange(3), wire=None))
        it.numbers["a"] = 1
        it.step(a=(0, 3))
        it.session.request_finished("a", final_state(3))
        it.session.request_finished("never-seen", None)
        it.session.step_begins(None)
        it.session.step_ends()

    assert it.sender.sent == []
    assert it.session.stats().steps == 0


def test_samples_are_numbered_by_their_internal_ids() -> None:
    keeper = Keeper()

    with world((keeper, {})) as it:
        for req_id in ("0_chat_9", "12_chat_9"):
            it.add(req_id, {"c0": want()}, n=13)
            it.session.request_finished(req_id, final_state(4))
        it.sender.wait(2)

    assert [message["sample_index"] for message in it.sender.sent] == [0, 12]
    assert [captured.request.num_samples for captured in keeper.captured] == [13, 13]


def test_an_id_with_an_underscore_is_no_sample_number() -> None:
    with world((Keeper(), {})) as it:
        it.add("7_days", {"c0": want()})
        it.session.request_finished("7_days", final_state(4))
        it.sender.wait()

    assert it.sender.sent[0]["sample_index"] == 0


def test_a_later_stage_sees_its_own_sites_and_answers_blank_for_the_others() -> None:
    keeper, recorder = Keeper(), Recorder()
    here, elsewhere = SITES[2:], SITES[:2]

    with world((keeper, {}), (recorder, {}), sites=here, pp_rank=1, pp_size=2) as it:
        it.add("a", {"c0": want(), "c1": want(sites=elsewhere)})
        it.step(a=(0, 4))
        it.session.request_finished("a", final_state(4))
        results = it.sender.wait(2)

    assert keeper.captured[0].sites == here
    assert recorder.names() == ["close"]
    assert sorted((message["instance"], message["stage"], message["num_stages"]) for message in it.sender.sent) == [
        ("c0", 1, 2),
        ("c1", 1, 2),
    ]
    assert {result.status for result in results} == {"ok"}


class StandIn(Recorder):
    """In a worker, of a driver-located consumer."""

    location = "driver"


def test_a_stand_in_hears_of_every_request_so_that_the_driver_can_count_stages() -> None:
    stand_in = StandIn()

    with world((stand_in, {}), sites=SITES[2:], pp_rank=1, pp_size=2) as it:
        it.add("a", {"c0": want(sites=SITES[:2])})
        it.session.request_finished("a", final_state(4))
        it.sender.wait()

    assert stand_in.names() == ["begin", "finish", "close"]


@pytest.mark.parametrize(
    ("version", "instance", "message"),
    [
        (1, "files", "names the consumer 'files', which this worker does not have; it has"),
        (2, "c0", "expected wire version 1"),
    ],
    ids=["consumer", "version"],
)
def test_a_request_that_the_front_end_should_not_have_let_through_is_a_loud_bug(
    version: int, instance: str, message: str
) -> None:
    specs = {instance: want().to_wire()}
    wire: RequestWire = {
        "v": version,
        "capture": {"id": "a", "n": 1, "key": "k", "reply": None, "wait": False, "specs": specs},
    }

    with world((Keeper(), {})) as it, pytest.raises(RuntimeError, match=message):
        it.session.request_added(NewRequest(req_id="a", prompt_token_ids=np.arange(3), wire=wire))


def test_an_id_that_begins_again_with_new_input_starts_afresh() -> None:
    keeper = Keeper()

    with world((keeper, {})) as it:
        it.add("a", {"c0": want()}, number=1)
        it.step(a=(0, 4))
        it.add("a", {"c0": want()}, num_prompt=6, number=2)
        it.step(a=(0, 6))
        it.session.request_finished("a", final_state(6))
        (result,) = it.sender.wait()

    (captured,) = keeper.captured
    assert result.status == "ok"
    assert torch.equal(captured.rows[SITES[0]], row_values(2, np.arange(6), 0))


def test_a_request_whose_id_another_client_takes_over_gets_an_error() -> None:
    with world((Keeper(), {})) as it:
        it.add("a", {"c0": want()}, key="first")
        it.add("a", {"c0": want()}, key="second")
        it.session.request_finished("a", final_state(4))
        it.sender.wait(2)

    statuses = {message["key"]: message["result"].status for message in it.sender.sent}
    assert statuses == {"first": "error", "second": "partial_error"}


def test_an_id_that_begins_again_and_asks_for_nothing_ends_the_capture_of_the_one_before() -> None:
    keeper = Keeper()

    with world((keeper, {})) as it:
        it.add("a", {"c0": want()})
        it.session.request_added(NewRequest(req_id="a", prompt_token_ids=np.arange(3), wire=None))
        it.step(a=(0, 3))
        it.session.request_finished("a", final_state(3))
        (result,) = it.sender.wait()

    assert "another request took over the id" in str(result.error)
    assert keeper.captured == []
    assert it.session.stats().steps == 0


def test_rows_that_are_not_of_the_requests_own_tokens_are_an_error_and_go_nowhere() -> None:
    keeper = Keeper()

    with world((keeper, {})) as it:
        for req_id in ("a", "b"):
            it.add(req_id, {"c0": want()})
        tokens = torch.tensor([100, 101, 102, 103, 100, 101, 7, 103], dtype=torch.int32)
        it.step(token_ids=tokens, a=(0, 4), b=(0, 4))
        for req_id in ("a", "b"):
            it.session.request_finished(req_id, final_state(4))
        it.sender.wait(2)

    results = {message["req_id"]: message["result"] for message in it.sender.sent}
    assert results["a"].status == "ok"
    assert results["b"].status == "error"
    assert "1 captured rows were not computed from the request's own tokens (position 2: token 7, expected 102)" in (
        results["b"].error
    )
    assert [captured.request.request_id for captured in keeper.captured] == ["a"]


def test_the_plan_of_a_step_says_where_each_wanted_row_is() -> None:
    with world((Keeper(), {}), (Keeper(), {})) as it:
        it.add("a", {"c0": want(Named("last_prompt")), "c1": want(sites=SITES[:1])})
        it.add("b", {"c0": want()}, num_prompt=2)
        it.step(b=(0, 2))
        it.session.step_begins(it.view(x=(0, 3), a=(2, 4), b=(2, 3)))
        found = it.session.describe_step()
        it.session.step_begins(it.view(x=(3, 4)))
        idle = it.session.describe_step()

    assert found is not None
    assert idle is None
    assert found["ring_rows"].startswith("64:67,")  # of x, which is not captured: trash rows
    ring_rows = [int(number) for number in found["ring_rows"].split(",")[1].split(":")]
    assert ring_rows[1] - ring_rows[0] == 3
    rows = {
        (site, each["request"], *each["consumers"]): (each["positions"], each["rows"], each["ring_rows"])
        for group in found["groups"]
        for each in group["rows"]
        for site in group["sites"]
    }
    first = ring_rows[0]
    for site in (each.name for each in SITES):
        assert rows[site, "b", "c0"] == ("2", "5", str(first + 2))
    assert rows[SITES[0].name, "a", "c1"] == ("2", "3", str(first))
    assert rows[SITES[0].name, "a", "c0", "c1"] == ("3", "4", str(first + 1))
    assert rows[SITES[2].name, "a", "c0"] == ("3", "4", str(first + 1))
    assert len(rows) == 7


def test_a_step_larger_than_the_staging_memory_is_captured_whole() -> None:
    keeper = Keeper()

    with world((keeper, {}), staging=make_staging(staging_rows=32)) as it:
        it.add("a", {"c0": want()}, num_prompt=60)
        it.step(a=(0, 60))
        it.session.request_finished("a", final_state(60))
        (result,) = it.sender.wait()

    assert result.status == "ok"
    assert torch.equal(keeper.captured[0].rows[SITES[2]], row_values(1, np.arange(60), 2))
    assert it.session.stats().staged_bytes == 0


def test_consumers_that_raise_hang_or_are_slow_do_not_touch_the_others() -> None:
    gate, keeper = Gate(), Keeper()

    def explode(name: str, _detail: Any) -> None:
        if name == "write":
            raise ValueError("boom")

    hanging = Recorder(at_gate(gate, "write"))
    with world((Recorder(explode), {}), (hanging, {"max_stall_s": 0.05}), (keeper, {})) as it:
        it.add("a", {f"c{bit}": want() for bit in range(3)})
        it.step(a=(0, 4))
        it.session.request_finished("a", final_state(4))
        it.sender.wait(3)  # though nothing else happens: the dispatch thread watches
        gate.opened.set()

    results = {message["instance"]: message["result"] for message in it.sender.sent}
    assert results["c0"].error == "c0: ValueError: boom"
    assert results["c1"].error == "c1: hung: one call took longer than 0.05 s"
    assert (results["c2"].status, results["c2"].payload) == ("ok", 4)
    assert [consumer.errors for consumer in it.session.stats().consumers] == [1, 1, 0]


def test_three_consumers_of_one_row_share_one_copy(delivery: str) -> None:
    if delivery == "spread":
        pytest.skip("each of several readers has a copy of its own")
    recorders = [Recorder() for _ in range(3)]

    with world(*((recorder, {}) for recorder in recorders)) as it:
        it.add("a", {f"c{bit}": want() for bit in range(3)})
        it.step(a=(0, 4))
        it.session.request_finished("a", final_state(4))
        it.sender.wait(3)

    first, second, third = (recorder.blocks[0].rows for recorder in recorders)
    assert first is second is third
    assert it.session.stats().bytes == 4 * len(SITES) * ROW_BYTES


def test_what_was_counted_is_told() -> None:
    with world((Keeper(), {}), (Recorder(), {})) as it:
        it.add("a", {"c0": want(), "c1": want(Named("last_prompt"), SITES[:1])})
        it.step(a=(0, 4))
        it.session.request_finished("a", final_state(4))
        it.sender.wait(2)

    stats = it.session.stats()
    assert (stats.steps, stats.rows, stats.bytes) == (1, 4, 4 * len(SITES) * ROW_BYTES)
    assert [(each.instance, each.rows, each.bytes, each.requests, each.queued_bytes) for each in stats.consumers] == [
        ("c0", 4, 4 * len(SITES) * ROW_BYTES, 1, 0),
        ("c1", 1, ROW_BYTES, 1, 0),
    ]
