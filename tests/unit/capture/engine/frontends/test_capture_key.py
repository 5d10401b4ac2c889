"""The key to capture is asked for where an engine is asked, unless the route has done so."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.capture.engine.access.access_key import AccessKey
from headgate.capture.engine.access.caller import leave, serve_for
from headgate.capture.engine.frontends.async_llm import generate
from headgate.capture.engine.requests.call_context import HttpCall, enter
from headgate.capture.schema.errors import ForbiddenError, RequestError
from tests.fakes.clients import ShownKeys


class Params:
    """As much of a `SamplingParams` as is looked at here."""

    __slots__ = ("__dict__", "extra_args")

    def __init__(self, **extra_args: Any) -> None:
        self.extra_args = extra_args


class Stranger(ShownKeys):
    """A client without a key."""

    def require_role(self, role: str) -> AccessKey | None:
        super().require_role(role)
        raise ForbiddenError("no key")


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    client = Stranger()
    token = serve_for(client)
    yield client
    leave(token)


def ask(**extra_args: Any) -> None:
    """Call an engine that nothing is configured for; it refuses what reaches it."""
    engine = SimpleNamespace(input_processor=SimpleNamespace(), engine_core=None)
    generate(lambda *args: "outputs")(engine, "Hi", Params(**extra_args), "r")


@pytest.mark.parametrize("fields", [{"return_hidden_states": True}, {"capture": {"rows": {}}}, {"capture_wait": True}])
def test_a_client_that_no_route_has_let_in_needs_the_key(stranger: Stranger, fields: Any) -> None:
    with pytest.raises(Exception, match="no key") as caught:
        ask(**fields)

    assert getattr(caught.value, "status_code", None) == 403

    assert stranger.roles == ["capture"]


def test_a_client_that_a_route_has_let_in_is_not_asked_again(stranger: Stranger) -> None:
    def let_in() -> None:
        enter(HttpCall())
        ask(capture={"rows": {}})

    with pytest.raises(RequestError, match="without capture"):
        contextvars.copy_context().run(let_in)

    assert stranger.roles == []


def test_nobody_else_is_asked(stranger: Stranger) -> None:
    ask()
    ask(return_hidden_states=False)
    with pytest.raises(RequestError, match="without steering"):
        ask(steering_name="calm")

    assert stranger.roles == []


def test_python_code_needs_no_key() -> None:
    with pytest.raises(RequestError, match="without capture"):
        ask(capture={"rows": {}})
