"""Samples of one prompt bring what they share once to each engine core, which forgets it when all have come."""

from __future__ import annotations

import asyncio
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from headgate.capture.engine.contracts.core_calls import LONG, enc_hook, ext_hook, frame_of
from headgate.capture.engine.core.fan_out import SharedWires, fan_out, fan_out_async, send_input
from headgate.capture.engine.core.request_ends import split_marks
from headgate.capture.schema.errors import RequestError

ROWS = np.random.default_rng(0).bytes(16 * LONG)


class Encoder(MsgpackEncoder):
    enc_hook = enc_hook(MsgpackEncoder.enc_hook)


class Decoder(MsgpackDecoder):
    ext_hook = ext_hook(MsgpackDecoder.ext_hook)


class Client:
    """A client whose engine cores decode what they are sent.

    Attributes:
        wires: Of each engine core: what it keeps.
        received: Of each engine core: wire dicts of samples, restored.
        num_bytes: That were sent.
    """

    def __init__(self, num_engines: int = 1) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self.wires = [SharedWires() for _ in range(num_engines)]
        self.received: list[list[Any]] = [[] for _ in range(num_engines)]
        self.num_bytes = 0

    def _deliver(self, request_type: EngineCoreRequestType, request: Any, engine: int | None = None) -> Any:
        number = engine or 0
        if request_type is EngineCoreRequestType.ABORT:
            for key in split_marks(request).sent:
                self.wires[number].forget(key)
        else:
            frames = Encoder().encode(request)
            self.num_bytes += sum(memoryview(frame).nbytes for frame in frames)
            arrived = Decoder(EngineCoreRequest).decode([bytes(frame) for frame in frames])
            wire = self.wires[number].restore(arrived.sampling_params.extra_args["headgate"])
            self.received[number].append((arrived.request_id, wire))
        return asyncio.sleep(0) if engine is not None else None

    _send_input = send_input(_deliver)

    @property
    def num_kept(self) -> int:
        return sum(map(len, self.wires))


def samples(count: int, *, section: str = "steering") -> list[EngineCoreRequest]:
    """Samples as vLLM makes them: parameters of their own, whose extra arguments are one object."""
    content = {"prefill": {"key": b"k", "payload": frame_of(ROWS)}}
    wire = {"v": 1, "capture": content} if section == "capture" else {"v": 1, "parts": {section: content}}
    extra = {"mine": 1, "headgate": wire}
    return [
        EngineCoreRequest(
            request_id=f"{index}_r",
            prompt_token_ids=[1, 2],
            mm_features=None,
            sampling_params=SamplingParams(seed=index, extra_args=extra),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        for index in range(count)
    ]


def payload_of(wire: Any) -> Any:
    return wire.get("capture", wire.get("parts", {}).get("steering"))["prefill"]["payload"]


def send(client: Client, requests: list[EngineCoreRequest], num_samples: int | None = None) -> None:
    with fan_out(client, len(requests) if num_samples is None else num_samples):
        for request in requests:
            client._send_input(EngineCoreRequestType.ADD, request)


def test_sixty_four_samples_bring_the_vectors_once() -> None:
    client = Client()

    send(client, samples(64))

    assert client.num_bytes < len(ROWS) + 64 * 1024
    (received,) = client.received
    assert [req_id for req_id, _ in received] == [f"{index}_r" for index in range(64)]
    assert {id(payload_of(wire)) for _, wire in received} == {id(payload_of(received[0][1]))}
    assert payload_of(received[63][1]).tobytes() == ROWS
    assert "fan_out" not in received[0][1]


def test_nothing_is_left_when_the_samples_are_gone() -> None:
    client = Client()
    send(client, samples(3))
    payload = weakref.ref(payload_of(client.received[0][0][1]))

    assert client.num_kept == 0
    assert payload() is not None
    client.received[0].clear()
    gc.collect()
    assert payload() is None


def test_each_engine_core_gets_the_vectors_once_and_forgets_them() -> None:
    client = Client(num_engines=3)

    async def send_all() -> None:
        async with fan_out_async(client, 2):
            for index, request in enumerate(samples(8)):
                await client._send_input(EngineCoreRequestType.ADD, request, index % 2)

    asyncio.run(send_all())

    assert [len(received) for received in client.received] == [4, 4, 0]
    assert 2 * len(ROWS) < client.num_bytes < 2 * len(ROWS) + 8 * 1024
    assert all(payload_of(wire).tobytes() == ROWS for part in client.received for _, wire in part)
    assert client.num_kept == 0


def test_prompts_that_are_sent_at_the_same_time_do_not_mix() -> None:
    client = Client(num_engines=1)

    async def send_all(requests: list[EngineCoreRequest]) -> None:
        async with fan_out_async(client, 2):
            for request in requests:
                await client._send_input(EngineCoreRequestType.ADD, request, 0)

    async def send_both() -> None:
        await asyncio.gather(send_all(samples(4)), send_all(samples(4)))

    asyncio.run(send_both())

    assert len({id(wire) for _, wire in client.received[0]}) == 2
    assert client.num_kept == 0


@pytest.mark.parametrize("error", [RuntimeError, asyncio.CancelledError])
def test_a_call_that_ends_between_two_samples_leaves_nothing(error: type[BaseException]) -> None:
    client = Client()

    def send_some() -> None:
        with fan_out(client, 3):
            client._send_input(EngineCoreRequestType.ADD, samples(1)[0])
            assert client.num_kept == 1
            raise error

    with pytest.raises(error):
        send_some()

    assert client.num_kept == 0


def test_an_engine_that_is_dead_is_told_nothing() -> None:
    client = Client()

    with fan_out(client, 2):
        client._send_input(EngineCoreRequestType.ADD, samples(1)[0])
        client.resources.engine_dead = True

    assert client.num_kept == 1


@pytest.mark.parametrize(("num_samples", "section"), [(1, "steering"), (2, "capture")])
def test_what_is_not_shared_goes_as_it_always_did(num_samples: int, section: str) -> None:
    client = Client()

    send(client, samples(num_samples, section=section))

    assert client.num_bytes > num_samples * len(ROWS)
    assert len({id(wire) for _, wire in client.received[0]}) == num_samples
    assert all(payload_of(wire).tobytes() == ROWS for _, wire in client.received[0])


def test_the_requests_of_the_front_end_stay_as_they_are() -> None:
    requests = samples(3)
    before = [request.sampling_params.extra_args for request in requests]  # type: ignore[union-attr]

    send(Client(), requests)

    assert all(
        request.sampling_params.extra_args is extra  # type: ignore[union-attr]
        for request, extra in zip(requests, before, strict=True)
    )


def test_a_sample_whose_vectors_are_lost_is_refused() -> None:
    client = Client()

    with fan_out(client, 2):
        first, second = samples(2)
        client._send_input(EngineCoreRequestType.ADD, first)
        client.wires[0] = SharedWires()
        with pytest.raises(RequestError, match="n: what this sample shares with the first one is lost"):
            client._send_input(EngineCoreRequestType.ADD, second)
