"""What headgate says is seen where vLLM's lines are, and an application's own set-up is left alone."""

from __future__ import annotations

import logging

import pytest

from headgate.capture.monitoring.logs import REASON_S, ReasonLog, RefusalFilter, speak_through_vllm
from headgate.capture.schema.errors import OverloadedError, RequestError


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


def test_a_refused_request_is_one_line_and_the_same_again_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = 5.0
    shown = RefusalFilter(ReasonLog("refused", lambda: now))
    theirs = logging.getLogger("vllm.entrypoints")

    def failed(error: Exception) -> bool:
        about = (type(error), error, None)
        return bool(shown.filter(theirs.makeRecord("vllm", logging.ERROR, "f", 1, "Error in stream", (), about)))

    with caplog.at_level(logging.INFO, "headgate"):
        answers = [failed(RequestError(f"capture.f.request_id[{number}]", "exists")) for number in range(40)]
        answers.append(failed(OverloadedError("wait")))
        now += REASON_S
        answers.append(failed(RequestError("capture.f.request_id", "exists")))

    assert not any(answers)
    assert caplog.messages == [
        "refused: capture.f.request_id[0]: exists",
        "refused: wait",
        "refused: capture.f.request_id: exists (39 more for that reason since the last line)",
    ]
    assert failed(ValueError("of vLLM"))
    assert shown.filter(theirs.makeRecord("vllm", logging.ERROR, "f", 1, "no error", (), None))


def test_vllm_shows_no_traceback_of_a_refused_request(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, written = logging.getLogger("vllm"), list[logging.LogRecord]()
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", written.append)
    monkeypatch.setattr(theirs, "handlers", [handler])

    speak_through_vllm()
    speak_through_vllm()
    try:
        raise RequestError("capture", "no")
    except RequestError:
        logging.getLogger("vllm.entrypoints.openai.completion.serving").exception("Error in completion stream")

    assert len(handler.filters) == 1
    assert [record.name for record in written if record.name.startswith("vllm")] == []
