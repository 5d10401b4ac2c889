"""A plug-in of pytest for ``make quick``: the tests must not import vLLM, which alone takes longer than all of them."""

from __future__ import annotations

import sys

import pytest


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if vLLM was imported."""
    if "vllm" in sys.modules:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print("\nmake quick: a test imported vLLM; it belongs to another folder of tests/unit")
