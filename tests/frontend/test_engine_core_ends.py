"""Waiting for an engine core ends with it: a server that is told to end, and an `LLM`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.fakes.server import Server, serving
from tests.frontend.conftest import ENGINE, stop
from tests.frontend.test_steering_http import FLAGS, MODULE

pytestmark = pytest.mark.engine

ONE = {"post_mlp": {"3": [1.0] * 576}}


def engine_core(server: int) -> int:
    """The process of a server's engine core."""
    (found,) = (one.pid for one in psutil.Process(server).children(True) if one.name().startswith("VLLM::EngineCor"))
    return found


def has_client(server: Server) -> bool:
    """Whether a client is connected."""
    port = int(server.url.rpartition(":")[2])
    connections = psutil.Process(server.pid).net_connections("tcp")
    return any(one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED for one in connections)


def test_a_server_ends_while_a_call_waits_for_its_engine_core(model_dir: Path) -> None:
    """`serving` fails if it does not."""
    with serving([*MODULE, str(model_dir), *FLAGS], VLLM_PLUGINS="headgate,fake_worker") as server:
        core = engine_core(server.pid)
        os.kill(core, signal.SIGSTOP)
        answers: list[httpx.Response | Exception] = []

        def set_vectors() -> None:
            try:
                answers.append(httpx.post(f"{server.url}/v1/steering/set", json={"vectors": ONE}, timeout=None))
            except httpx.HTTPError as error:
                answers.append(error)

        calling = threading.Thread(target=set_vectors)
        calling.start()
        while not has_client(server):
            calling.join(0.05)
        os.kill(server.pid, signal.SIGTERM)
    calling.join()

    (answer,) = answers
    assert isinstance(answer, Exception) or answer.status_code == 500, answer


@pytest.fixture
def llm(model_dir: Path) -> Iterator[Any]:
    from vllm import LLM

    from headgate.capture.engine.plugin import register
    from headgate.steering import additional_config

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    register()
    worker = "tests.fakes.noting_worker.NotingWorker"
    config = additional_config(steering={"max_steering_slots": 20, "sites": {"post_mlp": [3]}})
    llm = LLM(str(model_dir), **{**ENGINE, "worker_cls": worker, "additional_config": config})
    yield llm
    stop(llm.llm_engine)


def generate(llm: Any) -> None:
    llm.generate({"prompt_token_ids": [5, 6, 7]}, use_tqdm=False)


def set_vectors(llm: Any) -> None:
    llm.steering.set({"post_mlp": {3: [1.0] * 576}})


@pytest.mark.parametrize("wait", [generate, set_vectors])
def test_an_llm_whose_engine_core_is_killed_raises(llm: Any, wait: Callable[[Any], None]) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    (core,) = (child for child in multiprocessing.active_children() if "EngineCore" in child.name)
    os.kill(core.pid, signal.SIGSTOP)
    killing = threading.Timer(0.5, core.kill)
    killing.start()

    with pytest.raises(EngineDeadError):
        wait(llm)
    killing.join()
