"""Fixtures of the unit tests."""

from __future__ import annotations

import pytest
from zmq.utils import garbage


@pytest.fixture(autouse=True, scope="session")
def pyzmq_collector() -> None:
    """Start the thread that pyzmq keeps for the life of a process, so that no test is blamed for it."""
    if not garbage.gc.is_alive():
        garbage.gc.start()
