"""An engine core in a process of its own: what its clients are told of requests that wait, end, or are refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate.capture.engine.contracts import core_calls
from headgate.steering.spec import SteeringSpec, from_wire, to_wire
from headgate.steering.vectors.sums import peak
from tests.fakes.steered_core import PART, engine_config, engine_request, naming, vectors

pytestmark = pytest.mark.engine

SCRIPT = list(range(500, 900))


class Client:
    """A client of an engine core, without a front end.

    Attributes:
        tokens: What each request generated so far.
        ended: Why each request ended.
    """

    def __init__(self, model_dir: Path) -> None:
        from vllm.v1.engine.core_client import EngineCoreClient
        from vllm.v1.executor import Executor

        config = engine_config(model_dir)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        self.hidden_size = config.model_config.get_hidden_size()
        self.client = EngineCoreClient.make_client(
            multiprocess_mode=True,
            asyncio_mode=False,
            vllm_config=config,
            executor_class=Executor.get_class(config),
            log_stats=False,
        )
        self.tokens: dict[str, int] = {}
        self.ended: dict[str, str] = {}

    def five(self, value: float) -> SteeringSpec:
        """Five vectors, where there is room for eight."""
        made = vectors(self.hidden_size, *range(5), value=value)
        return SteeringSpec(prefill=made, decode=made)

    def add(self, req_id: str, spec: SteeringSpec, max_tokens: int = 5) -> None:
        self.client.add_request(self.request(req_id, spec, max_tokens))

    def request(self, req_id: str, spec: SteeringSpec, max_tokens: int = 5) -> Any:
        return engine_request(req_id, [1] * 40, spec, script=SCRIPT, max_tokens=max_tokens)

    def call(self, method: str, **args: Any) -> Any:
        return self.client.call_utility("headgate_call", PART, method, args)

    def wait_for(self, *req_ids: str) -> None:
        """Take outputs until these have ended."""
        while not set(req_ids) <= set(self.ended):
            for item in self.client.get_output().outputs:
                self.tokens[item.request_id] = self.tokens.get(item.request_id, 0) + len(item.new_token_ids)
                if item.finish_reason is not None:
                    self.ended[item.request_id] = str(item.finish_reason)


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[Client]:
    client = Client(model_dir)
    yield client
    client.client.shutdown()


@pytest.fixture
def client(engine: Client) -> Iterator[Client]:
    engine.tokens.clear()
    engine.ended.clear()
    yield engine
    status = engine.call("status")["ok"]
    assert (status["slots"]["reserved"], status["waiting"]) == (0, 0)


def test_a_request_that_is_refused_ends_alone(client: Client) -> None:
    client.add("long", client.five(1.0), max_tokens=50)
    client.add("unknown", naming(("nobody", 1.0)))
    big = vectors(client.hidden_size, *range(10))
    client.add("big", SteeringSpec(prefill=big, decode=big))
    client.add("plain", SteeringSpec())
    client.wait_for("long", "unknown", "big", "plain")

    assert client.ended == {"unknown": "error", "big": "error", "plain": "length", "long": "length"}
    assert (client.tokens["long"], client.tokens["plain"]) == (50, 5)


def test_calls_cross_as_plain_values(client: Client) -> None:
    spec = to_wire(client.five(1.0))
    described = client.call("register", name="calm", spec=spec)["ok"]
    assert described["hash"] == {"prefill": spec["prefill"]["key"].hex(), "decode": spec["prefill"]["key"].hex()}
    (listed,) = client.call("modules")["ok"]
    assert listed == described
    assert client.call("names")["ok"] == [{"name": "calm", "peak": peak(client.five(1.0).prefill)}]
    assert client.call("unregister", name="clam")["error"]["field"] == "name"
    base = to_wire(SteeringSpec(prefill=vectors(client.hidden_size, 1)))
    status = client.call("set_global", tiers={"base": base, "prefill": None, "decode": None}, replace=True)["ok"]
    assert status["slots"] == {"capacity": 8, "reserved": 6}
    client.add("named", naming(("calm", 1.0)))
    client.wait_for("named")
    assert client.ended == {"named": "length"}
    client.call("clear_global")
    client.call("unregister", name="calm")


def test_a_pause_that_aborts_ends_those_that_wait_too(client: Client) -> None:
    names = [f"r{i}" for i in range(4)]
    for i, name in enumerate(names):
        client.add(name, client.five(i + 1.0), max_tokens=400)
    assert client.call("status")["ok"]["waiting"] == 3
    client.client.call_utility("pause_scheduler", "abort")
    client.wait_for(*names)
    client.client.call_utility("resume_scheduler")

    assert set(client.ended.values()) == {"abort"}
    client.add("next", client.five(9.0))
    client.wait_for("next")


def test_long_vectors_travel_in_frames_of_their_own(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_calls, "LONG", 64)
    spec = client.five(1.0)
    wire = core_calls.lift(to_wire(spec))
    assert isinstance(wire["prefill"]["payload"], core_calls.Frame)

    described = client.call("register", name="calm", spec=wire)["ok"]
    assert described["hash"]["prefill"] == wire["prefill"]["key"].hex()
    exported = client.call("export_module", name="calm")["ok"]
    assert isinstance(exported["prefill"]["payload"], core_calls.Frame)
    assert from_wire(exported) == spec
    assert bytes(exported["prefill"]["payload"]) == to_wire(spec)["prefill"]["payload"]
    client.call("unregister", name="calm")

    request = client.request("long", spec)
    request.sampling_params.extra_args = core_calls.lift(request.sampling_params.extra_args)
    client.client.add_request(request)
    client.wait_for("long")
    assert client.ended == {"long": "length"}
