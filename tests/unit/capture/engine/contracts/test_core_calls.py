"""Calls into an engine core end when it does."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.capture.engine.contracts.core_calls import AsyncCoreClient, end_calls_with_receiving, end_waits_with_core

EngineDeadError = pytest.importorskip("vllm.v1.engine.exceptions").EngineDeadError


def _start_receiving(client: SilentClient) -> None:
    if client.resources.output_queue_task is None:
        client.resources.output_queue_task = asyncio.create_task(client.is_over.wait())


class SilentClient:
    """As an `AsyncMPClient` whose engine core takes calls and answers none."""

    core_engines = (b"0", b"1")
    _ensure_output_queue_task = end_calls_with_receiving(_start_receiving)

    def __init__(self) -> None:
        self.is_over = asyncio.Event()
        self.resources = SimpleNamespace(output_queue_task=None)
        self.utility_results: dict[int, asyncio.Future[Any]] = {}
        self.asked: asyncio.Queue[Any] = asyncio.Queue()

    async def _call_utility_async(self, *args: Any, engine: bytes) -> Any:
        call = self.utility_results[len(self.utility_results)] = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(args)
        self._ensure_output_queue_task()
        return await call


def test_open_calls_end_with_the_engine_core() -> None:
    async def ask(client: SilentClient) -> None:
        gone = asyncio.create_task(client._call_utility_async("any", engine=b"0"))
        call = asyncio.create_task(AsyncCoreClient(client, "steering").call("set", {}))  # type: ignore[arg-type]
        for _ in range(3):
            await client.asked.get()
        gone.cancel()

        client.is_over.set()

        with pytest.raises(EngineDeadError):
            await call
        with pytest.raises(EngineDeadError):
            await client._call_utility_async("any", engine=b"0")

    asyncio.run(ask(SilentClient()))


def test_what_waits_for_the_engine_core_of_an_llm_ends_with_it() -> None:
    class Client:
        def __init__(self) -> None:
            self.is_over = threading.Event()
            self.output_queue_thread = threading.Thread(target=self.is_over.wait)
            self.utility_results = {1: Future[Any](), 2: Future[Any]()}
            self.outputs_queue = Queue[Any]()

    client: Any = Client()
    client.utility_results[2].set_result("answered")
    client.output_queue_thread.start()
    end_waits_with_core(client)

    client.is_over.set()

    with pytest.raises(EngineDeadError):
        client.utility_results[1].result()
    assert client.utility_results[2].result() == "answered"
    assert isinstance(client.outputs_queue.get(), EngineDeadError)


def test_an_engine_core_in_this_process_needs_no_thread() -> None:
    class Client:
        def __init__(self) -> None:
            self.engine_core = object()

    before = threading.active_count()

    end_waits_with_core(Client())

    assert threading.active_count() == before
