"""vLLM waits for its processes as long as consumers may take to close."""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from typing import Any

import pytest

from headgate.capture.engine.frontends import startup
from headgate.capture.engine.frontends.startup import GRACE, let_consumers_close, shutdown

CAPTURE = {"consumers": [{"name": "memory"}], "close_timeout_s": 7.5}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_grace", startup._Grace())
    monkeypatch.setenv(GRACE, "")  # so that it is taken back
    monkeypatch.delenv(GRACE)


def test_consumers_get_their_time_and_the_rest_of_the_process_some_more() -> None:
    let_consumers_close(10.5)

    assert os.environ[GRACE] == "16"


def test_of_several_engines_the_longest_closing_time_holds(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "headgate"):
        for timeout_s in (10.0, 30.0, 20.0):
            let_consumers_close(timeout_s)

    assert os.environ[GRACE] == "35"
    assert not caplog.records


@pytest.mark.parametrize(("given", "warns"), [("3", True), ("60", False)])
def test_a_user_s_own_value_stays_and_is_warned_of_if_it_is_too_short(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, given: str, warns: bool
) -> None:
    monkeypatch.setenv(GRACE, given)

    with caplog.at_level(logging.WARNING, "headgate"):
        let_consumers_close(10.0)

    assert os.environ[GRACE] == given
    assert (f"{GRACE}=3 ends consumers before capture.close_timeout_s, which is 10" in caplog.text) == warns


@pytest.mark.parametrize(("timeout", "waited"), [(None, 15.0), (0.0, 15.0), (20.0, 35.0)])
def test_engine_cores_are_killed_when_their_consumers_have_had_their_time(timeout: float | None, waited: float) -> None:
    waits: list[float | None] = []
    end = shutdown(lambda procs, timeout: waits.append(timeout))

    end([], timeout)  # before any engine captures, as vLLM has it
    let_consumers_close(10.0)
    end([], timeout)

    assert waits == [timeout, waited]


@pytest.mark.parametrize(("sections", "wanted"), [({"capture": CAPTURE}, "13"), ({"steering": {}}, None), ({}, None)])
def test_a_process_without_a_front_end_tells_the_engine_cores_that_it_starts(
    sections: dict[str, Any], wanted: str | None
) -> None:
    known: list[str | None] = []
    config: Any = Namespace(additional_config={"headgate": sections} if sections else {})
    start = startup.open_manager(lambda manager, *, vllm_config: known.append(os.environ.get(GRACE)))

    start(object(), vllm_config=config)

    assert known == [wanted]
