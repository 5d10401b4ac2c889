"""Our client against the server: every call, and two hundred requests at once of which nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headgate.steering.client import AsyncClient, Client, ServerError
from tests.fakes.server import Server, serving
from tests.fakes.steering_forms import HIDDEN, LAYERS
from tests.frontend.test_bad_bodies import COMMAND, FLAGS
from tests.fuzz.hostile import GENERATING

pytestmark = pytest.mark.engine

CAPTURE = {"capture": {"rows": {"hooks": {"post_mlp": [3, 5]}}}, "capture_wait": True}
NUM_REQUESTS = 200


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[Server]:
    with serving([*COMMAND, str(model_dir), *FLAGS]) as running:
        yield running


@pytest.fixture(params=[False, True], ids=["json", "msgpack"])
def client(server: Server, request: pytest.FixtureRequest) -> Iterator[Client]:
    with Client(server.url, is_binary=request.param) as client:
        yield client
        client.clear()
        for name in client.modules():
            client.unregister(name)


def test_modules_are_registered_used_and_forgotten(client: Client) -> None:
    row = np.random.default_rng(0).standard_normal(HIDDEN).astype(np.float32)
    forms = {"array": row, "tensor": torch.tensor(row), "list": row.tolist(), "double": row.astype(np.float64)}

    hashes = {client.register(name, {"post_mlp": {3: form}}).prefill.hash for name, form in forms.items()}

    assert len(hashes) == 1
    assert client.modules() == sorted(forms)
    assert client.complete("Hi", steering_name="array", max_tokens=2).choices[0].finish_reason == "length"
    client.unregister("array")
    with pytest.raises(ServerError, match="unknown steering module") as caught:
        client.complete("Hi", steering_name="array")
    assert (caught.value.status, caught.value.field) == (400, "steering_name")


@pytest.mark.parametrize("path", GENERATING)
def test_a_stream_with_a_name_that_is_gone_is_a_400(server: Server, path: str) -> None:
    """The front end still knows the name; the engine core says no when the stream has begun."""
    with Client(server.url) as client:
        client.register("brief", {"post_mlp": {3: vectors(1)["post_mlp"][3]}})
        assert server.post(path, **GENERATING[path], steering_name="brief").status_code == 200
        client.unregister("brief")

    answers = [server.post(path, **GENERATING[path], steering_name="brief", stream=True) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [400, 400]
    assert [answer.json()["error"]["param"] for answer in answers] == ["steering_name"] * 2


def test_global_vectors_are_set_and_cleared(client: Client) -> None:
    update = client.set(vectors(1), decode_vectors={"post_block": {7: vectors(2)["post_mlp"][0]}})

    assert (update.hook_points, update.layers_updated) == (("post_mlp",), tuple(range(12)))
    assert client.status().shared.tiers["decode"] == ("7.post_mlp",)
    client.clear()
    assert client.status().shared.tiers == {}


def test_what_the_server_can_do_is_said(client: Client) -> None:
    layers, capturable = client.layers(), client.consumers()

    assert (layers.hidden_size, layers.hook_points["post_mlp"][-1]) == (HIDDEN, LAYERS - 1)
    assert [consumer.name for consumer in capturable.consumers] == ["rows", "everything"]
    assert capturable.sites == {"post_mlp": [3, 5]}


@pytest.mark.parametrize("field", ["steering_vectors", "prefill_steering_vectors", "decode_steering_vectors"])
def test_requests_steer_and_capture(client: Client, field: str) -> None:
    whole = client.chat("Hello", max_tokens=3, **{field: vectors(3)}, **CAPTURE)
    chunks = list(client.stream_completion("Hello", max_tokens=3, **{field: vectors(3)}, **CAPTURE))

    assert whole.capture_results["rows"].status == "ok"
    assert chunks[-1].capture_results["rows"].status == "ok"
    assert sum(len(chunk.choices) for chunk in chunks) >= 1


def test_a_wrong_vector_is_named(client: Client) -> None:
    for send in (client.complete, client.stream_chat):
        with pytest.raises(ServerError) as caught:
            list(send("Hello", steering_vectors={"post_mlp": {3: [1.0, 2.0]}}))  # type: ignore[arg-type]

        assert (caught.value.status, caught.value.field) == (400, "steering_vectors.post_mlp.shape")


def vectors(seed: int) -> dict[str, Any]:
    rows = np.random.default_rng(seed).standard_normal((12, HIDDEN)).astype(np.float32)
    return {"post_mlp": dict(enumerate(rows))}


def fields_of(number: int) -> dict[str, Any]:
    """What request `number` asks for: nothing, vectors of its own, a module, rows, or several of these."""
    fields: dict[str, Any] = {}
    if number % 2:
        fields["steering_vectors"] = vectors(number)
    if number % 3 == 0:
        fields["steering_module_ref"] = ("calm", 0.5)
    if number % 5 < 2:
        fields |= CAPTURE
    return fields


async def one(client: AsyncClient, number: int, *, reads_slowly: bool, gives_up: bool) -> str:
    """Send request `number`; say how it ended."""
    prompt, fields = f"Number {number % 7} of", {**fields_of(number), "max_tokens": 40, "ignore_eos": True}
    if not (gives_up or reads_slowly or number % 4 == 0):
        answer = await client.complete(prompt, **fields)
        return "captured" if answer.captures else "answered"
    num_chunks = 0
    async with aclosing(client.stream_completion(prompt, **fields)) as chunks:
        async for chunk in chunks:
            num_chunks += 1
            if chunk.captures:
                return "captured"
            if gives_up and num_chunks == 1 + number % 5:
                return "given up"
            if reads_slowly:
                await asyncio.sleep(0.02)  # the reader's own pace, not a wait for the server
    return "answered"


async def storm(url: str, seed: int) -> list[str]:
    draw = random.Random(seed)
    async with AsyncClient(url) as client:
        jobs = [
            one(client, number, reads_slowly=draw.random() < 0.1, gives_up=draw.random() < 0.2)
            for number in range(NUM_REQUESTS)
        ]
        return await asyncio.gather(*jobs)


def is_idle(client: Client) -> bool:
    (slots,) = client.status().slots
    return (slots.reserved, slots.waiting) == (1, 0)  # what is reserved is the module


POOLED = {"threads": (os.cpu_count() or 1) + 4}
"""asyncio's pool of threads grows to this when it is busy, and stays; a leak is as many as there are requests."""


def grown(before: dict[str, int], server: Server) -> dict[str, int]:
    """By how much the server holds more of anything than before, if that is more than pools may."""
    more = {kind: count - before[kind] for kind, count in server.resources().items()}
    return {kind: count for kind, count in more.items() if count > POOLED.get(kind, 0)}


def test_nothing_is_left_of_two_hundred_requests_at_once(server: Server) -> None:
    with Client(server.url) as client:
        client.register("calm", {"post_mlp": {3: vectors(0)["post_mlp"][0]}})
        asyncio.run(storm(server.url, 0))  # makes whatever is made once
        assert any(is_idle(client) for _ in range(2000))
        before = server.resources()

        ends = asyncio.run(storm(server.url, 1))

        assert len(ends) == NUM_REQUESTS
        assert min(ends.count(kind) for kind in ("answered", "captured", "given up")) >= 10
        assert any(is_idle(client) for _ in range(2000))
        # Connections that were given up are closed a moment later than their requests.
        assert any(is_idle(client) and not grown(before, server) for _ in range(2000)), grown(before, server)
        assert not [line for line in server.log if "ERROR" in line or "Traceback" in line]
