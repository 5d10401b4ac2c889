"""Hostile bodies against the whole HTTP application: no 5xx, no held event loop, no growth of memory.

Runs for FUZZ_SECONDS, 15 if that is not set; ``make fuzz`` runs for half an hour. A failure is shrunk by hypothesis:
put the body that it prints into `FOUND`, where it stays.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode

from headgate.steering.client import Client
from tests.deadlines import patience
from tests.fakes.server import Server, serving
from tests.frontend.test_bad_bodies import COMMAND, FLAGS
from tests.fuzz import loop_watch
from tests.fuzz.hostile import GENERATING, OURS, Body, bodies

pytestmark = pytest.mark.engine

SECONDS = float(os.environ.get("FUZZ_SECONDS", "15"))
SEED = int(os.environ.get("FUZZ_SEED", "20261123"))
LONGEST_HOLD_S = 0.05
ANSWER_S = patience(30)
DESCRIPTION_S = patience(120)
"""FastAPI makes the description when it is first asked for: 3 s of a core."""
LIMITS = httpx.Limits(keepalive_expiry=2.0)
"""uvicorn closes a connection that was idle for 5 s, which is how long hypothesis may take for a large body."""
GROWTH_MIB = 48
"""Of the API server's memory in the second half of the time, for what allocators keep."""

SURROGATE = b'{"name": "a", "vectors": {"\\ud800": {"3": [1.0]}}}'
FOUND: list[Body] = [
    Body("/v1/steering/set", SURROGATE, "application/json"),
    Body("/v1/steering/modules/unregister", b'{"name": "\\udc00"}', "application/json"),
    Body("/v1/steering/set", b"\x81\x81\xa1a\x01\x02", "application/msgpack"),
    Body("/v1/steering/set", b"[" * 300_000, "application/json"),
    Body("/v1/completions", b"\x91" * 300_000, "application/msgpack"),
    Body("/v1/chat/completions", b'{"capture": ' + b'"",' * 70_000, "application/json"),
    Body("/v1/completions", b'{"model": "tiny", "prompt": "a", "capture": ' + b"1" * 5000 + b"}", "application/json"),
]
"""Bodies that failed once, here or in a server before this one."""


class Fuzzed(NamedTuple):
    """The server, and where it notes how long its loop was held."""

    server: Server
    client: httpx.Client
    holds: Path

    def longest_hold(self) -> tuple[float, float]:
        """CPU and wall seconds of the longest hold since the last call."""
        held = [0.0, *map(float, self.holds.read_text().split())]
        os.truncate(self.holds, 0)
        return max(held[1::2], default=0.0), max(held[2::2], default=0.0)

    def send(self, body: Body) -> int:
        """The status of the answer; 0 for a connection that was cut."""
        if body.cut is not None:
            return self._cut(body)
        headers = {b"content-type": body.kind.encode()} if body.kind else {}
        answer = self.client.post(body.path, content=body.content, headers=headers)
        if answer.status_code == 503:
            assert answer.headers.get("retry-after"), answer.text
        is_right = answer.status_code < 500 or answer.status_code == 503 or is_no_object(body, answer.text)
        assert is_right, (answer.status_code, answer.text[:2000])
        return answer.status_code

    def _cut(self, body: Body) -> int:
        url = httpx.URL(self.server.url)
        head = f"POST {body.path} HTTP/1.1\r\nHost: x\r\nContent-Type: {body.kind}\r\n"
        head += f"Content-Length: {len(body.content) + 1}"
        with socket.create_connection((url.host, url.port), timeout=ANSWER_S) as connection:
            connection.sendall(head.encode("latin-1") + b"\r\n\r\n" + body.content[: body.cut])
        return 0

    def memory_mib(self) -> float:
        """Resident memory of the API server."""
        return float(psutil.Process(self.server.pid).memory_info().rss / 2**20)


@pytest.fixture(scope="module")
def fuzzed(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    site = tmp_path_factory.mktemp("watch")
    about = site / "headgate_fuzz-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: headgate-fuzz\nVersion: 0\n")
    (about / "entry_points.txt").write_text(loop_watch.ENTRY_POINTS)
    holds = site / "holds"
    holds.touch()
    flags = [
        flag.replace("tests.fakes.noting_worker.NotingWorker", "tests.fuzz.worker.ForgetfulWorker") for flag in FLAGS
    ]
    environment = {
        "LOOP_HOLDS": str(holds),
        "VLLM_PLUGINS": "headgate,fake_worker,loop_watch",
        "PYTHONPATH": os.pathsep.join([str(site), os.environ["PYTHONPATH"]]),
    }
    with (
        serving([*COMMAND, str(model_dir), *flags], **environment) as server,
        httpx.Client(base_url=server.url, timeout=ANSWER_S, trust_env=False, limits=LIMITS) as client,
    ):
        yield Fuzzed(server, client, holds)


@pytest.fixture(autouse=True)
def serves_on(fuzzed: Fuzzed) -> Iterator[None]:
    """Whatever was sent, the server serves, and nothing is left of requests that were refused."""
    yield
    for path, body in GENERATING.items():
        assert fuzzed.client.post(path, json=body).status_code == 200
    with Client(fuzzed.server.url) as client:
        client.clear()
        for name in client.status().modules:
            client.unregister(name)
        slots = client.status().slots
    assert [(one.reserved, one.waiting) for one in slots] == [(0, 0)]


def is_no_object(body: Body, text: str) -> bool:
    """Whether an error is the one that vLLM 0.26 itself answers to JSON that is no object, such as ``false``."""
    try:
        return not isinstance(json.loads(body.content), Mapping) and "object has no attribute 'get'" in text
    except ValueError:
        return False


def check(fuzzed: Fuzzed, body: Body) -> int:
    """Send `body`; how long the loop was held is measured again before it counts."""
    status = fuzzed.send(body)
    cpu, wall = fuzzed.longest_hold()
    if cpu > LONGEST_HOLD_S or wall > 5:
        again = []
        for _ in range(3):
            fuzzed.send(body)
            again.append(fuzzed.longest_hold()[0])
        assert min(cpu, *again) <= LONGEST_HOLD_S, (
            f"the loop was held for {cpu} and again {again} s of CPU, {wall} s in all"
        )
    return status


@pytest.mark.parametrize("body", FOUND, ids=range(len(FOUND)))
def test_what_once_failed(fuzzed: Fuzzed, body: Body) -> None:
    check(fuzzed, body)


def batches(share: float, size: int, *, least: int = 1) -> Iterator[Callable[[Any], Any]]:
    """Decorators of `size` examples, each with its own seed: `least`, and more until `share` of the time is over."""
    until, number = time.monotonic() + SECONDS * share, SEED
    made = settings(
        max_examples=size,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    while time.monotonic() < until or number < SEED + least:
        yield lambda function, number=number: seed(number)(made(function))
        number += 1


@pytest.mark.timeout(SECONDS * 2 + 600)
def test_hostile_bodies(fuzzed: Fuzzed) -> None:
    statuses: Counter[int] = Counter()
    memory = [fuzzed.memory_mib()]
    for decorated in batches(0.7, 100, least=20):

        @decorated
        @given(body=bodies())
        def is_answered(body: Body) -> None:
            statuses[check(fuzzed, body)] += 1

        is_answered()
        memory.append(fuzzed.memory_mib())
    print(f"{sum(statuses.values())} bodies: {dict(statuses)}; MiB {memory[0]:.0f} to {memory[-1]:.0f}")
    assert statuses[200] > 10
    assert statuses[400] > 100
    assert statuses[0] > 10
    assert memory[-1] - memory[len(memory) // 2] < GROWTH_MIB, [round(one) for one in memory]


@pytest.mark.timeout(SECONDS * 2 + 600)
def test_bodies_by_the_servers_own_description(fuzzed: Fuzzed) -> None:
    description = schemathesis.openapi.from_url(f"{fuzzed.server.url}/openapi.json", timeout=DESCRIPTION_S)
    operations = [found.ok() for found in description.get_all_operations()]
    statuses: Counter[str] = Counter()
    assert {path for path, _ in OURS} | set(GENERATING) <= {operation.path for operation in operations}
    for decorated in batches(0.3, 4):
        for operation in operations:
            is_answered_by(fuzzed, operation, GenerationMode.POSITIVE, decorated, statuses)
            if operation.body:
                is_answered_by(fuzzed, operation, GenerationMode.NEGATIVE, decorated, statuses)
    print(dict(statuses))


OWN = {
    "POST /v1/systemone 501": ("",),
    "POST /v1/decisions 501": ("",),
    # Of an earlier message of the assistant it reads the first part's text: there may be no part, or it is a refusal.
    "POST /v1/responses 500": (
        '"message":"list index out of range"',
        """"message":"'ResponseOutputRefusal' object has no attribute 'text'\"""",
        """"message":"'role'\"""",
    ),
}
"""What vLLM answers by itself where a model or a body lacks something: the status, and what the text holds."""


def is_own(told: str, text: str, body: object) -> bool:
    """Whether an error is one of `OWN`, or that of a number which vLLM's messages to its engine core cannot hold, or of
    structured outputs that are no object.
    """
    if told.endswith(" 500") and '"message":""' in text and has_endless_integer(body):
        return True
    asked = body.get("structured_outputs") if isinstance(body, Mapping) else None
    if told.endswith(" 500") and "object has no attribute 'get'" in text and not isinstance(asked, Mapping | None):
        return True
    return any(own in text for own in OWN.get(told, ()))


def has_endless_integer(value: object) -> bool:
    """Whether there is an integer of more than 64 bits in a document, such as a `top_k` without an upper limit."""
    if isinstance(value, Mapping):
        return any(map(has_endless_integer, value.values()))
    if isinstance(value, list):
        return any(map(has_endless_integer, value))
    return isinstance(value, int) and not -(2**63) <= value < 2**64


def is_answered_by(
    fuzzed: Fuzzed, operation: Any, mode: GenerationMode, decorated: Callable[[Any], Any], statuses: Counter[str]
) -> None:
    """Send some requests as the description has them, or (negative) as it does not."""

    @decorated
    @given(case=operation.as_strategy(generation_mode=mode))
    def is_answered(case: schemathesis.Case[Any]) -> None:
        answer = case.call(timeout=ANSWER_S)
        told = f"{operation.label} {answer.status_code}"
        is_right = answer.status_code < 500 or answer.headers.get("retry-after") or is_own(told, answer.text, case.body)
        assert is_right, f"{told}: {case.body!r}: {answer.text[:2000]}"
        statuses[told] += 1

    is_answered()
