"""Rows that requests have kept are found in the front end that holds them, for the client whose they are."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.capture.engine.access.access_key import AccessKey, digest_of
from headgate.capture.engine.access.caller import serve_for
from headgate.capture.engine.contracts.request_part import PartRequest
from headgate.capture.engine.requests import request_reader
from headgate.capture.engine.requests.capture_frontend import FrontEnd
from headgate.capture.engine.requests.request_reader import OpenPart, RequestReader
from headgate.capture.schema.config import CaptureConsumersConfig, CaptureConsumerSpec
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import HookPoint, Site
from headgate.consumers.memory import MemoryConsumer
from tests.fakes.clients import ShownKeys

MODEL = ModelInfo(name="tiny", num_layers=2, hidden_size=8, dtype="float32", sites=(Site(0, HookPoint.POST_MLP),))
FIELD = "ops[0].source"


class Keeper:
    """Keeps one name for one owner."""

    def __init__(self, owner: str | None, name: str) -> None:
        self.own = (owner, name)

    def find_kept(self, owner: str | None, name: str, sample_index: int, field: str) -> Any:
        if (owner, name) != self.own:
            raise RequestError(f"{field}.request", f"nothing is kept as {name} by {owner}")
        return self


@pytest.fixture
def front_end() -> Iterator[Callable[..., FrontEnd]]:
    made: list[FrontEnd] = []

    def make(*keepers: Any, num_front_ends: int = 1) -> FrontEnd:
        drivers = SimpleNamespace(consumers={str(index): keeper for index, keeper in enumerate(keepers)})
        made.append(
            FrontEnd(
                CaptureConsumersConfig(consumers=[CaptureConsumerSpec(name="memory")]),
                MODEL,
                {"memory": MemoryConsumer},
                num_stages=1,
                open_drivers=lambda hub: drivers,  # type: ignore[arg-type,return-value]
                num_front_ends=num_front_ends,
            )
        )
        made[-1].open()
        return made[-1]

    yield make
    for front in made:
        front.close()


def client(name: str | None) -> ShownKeys:
    """A client whose key, if it has one, may capture."""
    return ShownKeys(*[] if name is None else [AccessKey(name=name, sha256=digest_of(name), roles=("capture",))])


def in_call(client: ShownKeys, call: Callable[[], Any]) -> Any:
    def served() -> Any:
        serve_for(client)
        return call()

    return contextvars.copy_context().run(served)


def test_a_client_finds_its_own_and_must_be_let_in_to_capture(front_end: Callable[..., FrontEnd]) -> None:
    keeper, alice, bob = Keeper("alice", "clean"), client("alice"), client("bob")
    front = front_end(keeper)

    assert in_call(alice, lambda: front.find_kept("clean", 0, FIELD)) is keeper
    with pytest.raises(RequestError, match="by bob"):
        in_call(bob, lambda: front.find_kept("clean", 0, FIELD))
    assert alice.roles == bob.roles == ["capture"]


def test_where_there_is_no_client_rows_have_no_owner(front_end: Callable[..., FrontEnd]) -> None:
    keeper = Keeper(None, "clean")

    assert front_end(Keeper(None, "other"), object(), keeper).find_kept("clean", 0, FIELD) is keeper
    assert in_call(client(None), lambda: front_end(keeper).find_kept("clean", 0, FIELD)) is keeper


@pytest.mark.parametrize(
    ("keepers", "num_front_ends", "told"),
    [
        ([], 1, "keeps no rows: start it with the consumer 'memory'"),
        ([object()], 1, "keeps no rows"),
        ([Keeper(None, "clean")], 3, "has 3 API processes"),
    ],
)
def test_what_cannot_work_is_refused(
    front_end: Callable[..., FrontEnd], keepers: list[Any], num_front_ends: int, told: str
) -> None:
    front = front_end(*keepers, num_front_ends=num_front_ends)

    with pytest.raises(RequestError, match=told) as refusal:
        front.find_kept("clean", 0, FIELD)

    assert refusal.value.field == f"{FIELD}.request"


class Reader:
    """Fields with a source are those whose value is a name."""

    def read(self, values: Any) -> PartRequest | None:
        return PartRequest(wire={"row": values["rows"]}, field="rows", names={})

    def names(self, values: Any) -> dict[str, str]:
        return {}

    def check(self, wanted: PartRequest, known: Any) -> None:
        raise AssertionError("names nothing")

    def has_sources(self, values: Any) -> bool:
        return isinstance(values["rows"], str)

    def read_with(self, values: Any, find: Any) -> PartRequest | None:
        return PartRequest(wire={"row": find(values["rows"], 0, "rows").own}, field="rows", names={})


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> OpenPart:
    part: Any = SimpleNamespace(fields={"rows": ""}, how_to_start="")
    monkeypatch.setattr(request_reader, "request_parts", lambda: {"patching": part})
    return OpenPart("patching", part, Reader())


def test_fields_with_sources_are_read_in_the_call_of_their_client_alone(
    front_end: Callable[..., FrontEnd], part: OpenPart
) -> None:
    reader = RequestReader(front_end(Keeper("alice", "clean")), {"patching": part})

    assert reader.read_parts({"rows": "clean"}) == {}
    assert list(reader.read_parts({"rows": 3})) == ["patching"]
    wanted = in_call(client("alice"), lambda: reader._read("patching", part.part, {"rows": "clean"}))
    assert wanted.wire == {"row": ("alice", "clean")}


def test_without_capture_nothing_is_kept(part: OpenPart) -> None:
    with pytest.raises(RequestError, match="started without capture") as refusal:
        RequestReader(None, {"patching": part})._read("patching", part.part, {"rows": "clean"})

    assert refusal.value.field == "rows.request"
