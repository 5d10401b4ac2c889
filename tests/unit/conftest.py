"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from zmq.utils import garbage

from headgate.capture.links.hub import ResultHub
from headgate.capture.links.sender import ResultSender
from tests.deadlines import patience

TIMEOUT_S = patience(30.0)


@pytest.fixture(autouse=True, scope="session")
def pyzmq_collector() -> None:
    """Start the thread that pyzmq keeps for the life of a process, so that no test is blamed for it."""
    if not garbage.gc.is_alive():
        garbage.gc.start()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder for a hub's sockets."""
    (tmp_path / "hub").mkdir()
    return tmp_path / "hub"


@pytest.fixture
def hub(folder: Path) -> Iterator[ResultHub]:
    """A hub that ends cleanly."""
    hub = ResultHub(folder=str(folder))
    yield hub
    assert hub.shutdown(TIMEOUT_S)


@pytest.fixture
def sender() -> Iterator[ResultSender]:
    """A worker's sender."""
    sender = ResultSender()
    yield sender
    sender.close(0)


@pytest.fixture
def driver_consumers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumers of `tests.fakes.driver_consumers`, by their names in lower case."""
    from tests.fakes.driver_consumers import publish

    (tmp_path / "plugins").mkdir()
    publish(tmp_path / "plugins", monkeypatch)
