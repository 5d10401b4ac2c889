"""Requests that are sent away end with the cause, beside whatever else a step tells their clients."""

from __future__ import annotations

from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from headgate.capture.engine.core.part_services import after_step, send_away


def request(req_id: str, client: int = 0) -> Any:
    return SimpleNamespace(request_id=req_id, client_index=client)


def ends(outputs: EngineCoreOutputs) -> dict[str, tuple[str, Any]]:
    return {one.request_id: (str(one.finish_reason), one.stop_reason) for one in outputs.outputs}


def test_a_request_that_is_not_taken_is_told_why() -> None:
    core = SimpleNamespace(output_queue=Queue())

    send_away(core, request("r", client=2), "too many wait")  # type: ignore[arg-type]

    client, told = core.output_queue.get_nowait()
    assert client == 2
    assert ends(told) == {"r": ("error", "headgate: overloaded: too many wait")}
    assert told.finished_requests == {"r"}


@pytest.mark.parametrize("outputs", [None, {}], ids=["nothing ran", "nothing told"])
def test_a_step_without_outputs_tells_those_who_waited_too_long(outputs: Any) -> None:
    told, is_executed = after_step(
        lambda: (outputs, False), lambda: [(request("a"), "5 s"), (request("b", 1), "5 s")]
    )()

    assert not is_executed
    assert {client: ends(one) for client, one in told.items()} == {
        0: {"a": ("error", "headgate: overloaded: 5 s")},
        1: {"b": ("error", "headgate: overloaded: 5 s")},
    }


def test_what_a_step_tells_others_stays() -> None:
    running = EngineCoreOutput("runs", [7])
    ended = EngineCoreOutput("ended", [8], finish_reason=FinishReason.LENGTH)
    step = EngineCoreOutputs(outputs=[running, ended], finished_requests={"ended"})

    told, is_executed = after_step(lambda: ({0: step}, True), lambda: [(request("late"), "5 s")])()

    assert is_executed
    assert [one.request_id for one in told[0].outputs] == ["runs", "ended", "late"]
    assert told[0].finished_requests == {"ended", "late"}


def test_a_step_that_nobody_waits_for_is_as_it_was() -> None:
    step = ({0: EngineCoreOutputs()}, True)

    assert after_step(lambda: step, lambda: [])() == step
