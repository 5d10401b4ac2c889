"""What headgate says is seen where vLLM's lines are, and an application's own set-up is left alone."""

from __future__ import annotations

import logging

import pytest

from headgate.capture.monitoring.logs import speak_through_vllm


@pytest.fixture
def loggers(monkeypatch):
    """Headgate's, vLLM's and the root logger without handlers, as in a fresh server."""
    found = {name: logging.getLogger(name) for name in ("headgate", "vllm", "")}
    for logger in found.values():
        monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(found["vllm"], "level", logging.INFO)
    monkeypatch.setattr(found["headgate"], "level", logging.NOTSET)
    return found


def test_a_fresh_server_shows_our_lines_once(loggers):
    handler = logging.Handler()
    loggers["vllm"].handlers.append(handler)
    loggers[""].handlers.clear()  # pytest puts its own there for the call of a test

    speak_through_vllm()
    speak_through_vllm()

    assert loggers["headgate"].handlers == [handler]
    assert loggers["headgate"].isEnabledFor(logging.INFO)


@pytest.mark.parametrize("name", ["headgate", ""])
def test_a_set_up_of_the_applications_own_is_left_alone(loggers, name):
    own = logging.Handler()
    loggers[name].handlers.append(own)
    loggers["vllm"].handlers.append(logging.Handler())

    speak_through_vllm()

    assert loggers["headgate"].handlers == ([own] if name else [])
