"""Our families on the server's metrics page: fetched from the engine, appended to what the server has."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headgate.capture.engine.client_errors import as_client_error
from headgate.capture.engine.requests.capture_frontend import FRONT_END
from headgate.capture.engine.server import metrics_page
from headgate.capture.engine.server.metrics_page import Counters, MetricsPage, refused, render
from headgate.capture.links.driver import DriverStats
from headgate.capture.links.hub import HubStats
from headgate.capture.monitoring.metrics import EngineStats, Family, Sample
from headgate.capture.monitoring.stats import RESULT_BOUNDS_S, CaptureStats, ConsumerStats, Figure, QueueCounters
from headgate.capture.schema.errors import RequestError
from headgate.steering.control import metrics as steering_metrics

CAPTURE = asdict(
    CaptureStats(
        steps=3,
        rows=40,
        bytes=4000,
        stall_s=0.5,
        lost_results=6,
        staged_bytes=7,
        consumers=(
            ConsumerStats(
                instance="files",
                rows=40,
                requests=5,
                errors=1,
                is_hung=True,
                result_s=3.5,
                figures=(
                    Figure(name="upload_done", kind="counter", about="Files.", value=12),
                    Figure(name="upload_waiting", kind="gauge", about="Files.", value=3),
                ),
            ),
            ConsumerStats(instance='a "name"', rows=2),
        ),
    )
)
COUNTS = {
    "slots": 149,
    "slots_reserved": 12,
    "rule_rows": {"calm": 7},
    "gate_rows": {},
    "controllers": {"pid": {"actions": {"submitted": 6, "applied": 5, "rejected": 1, "dropped": 0}, "seconds": 0.25}},
    "configs": 3,
    "requests_running": 2,
    "requests_waiting": 1,
    "modules": 2,
    "global_vectors": 3,
}


class Client:
    """An engine client with two engine cores of one worker each."""

    core_engines = (b"0", b"1")

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.go = asyncio.Event()
        self.go.set()
        self.failing = False

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        self.calls.append(method)
        await self.go.wait()
        if self.failing:
            raise RuntimeError("no engine")
        if method == "collective_rpc":
            return [
                {
                    "capture": CAPTURE if engine == b"0" else None,
                    "steering": {"slots_live": 4, "slots_used": 5, "reconstructions": {}},
                }
            ]
        return {"ok": COUNTS}


def engine_of(client: Client, *sections: str) -> Any:
    section = {"headgate": {name: {} for name in sections}}
    config = Namespace(additional_config=section, parallel_config=Namespace(_api_process_rank=-1))
    return Namespace(vllm_config=config, engine_core=client, input_processor=Namespace())


def parsed(text: bytes) -> dict[str, dict[tuple[str, ...], float]]:
    return {
        family.name: {(sample.name, *in_order(sample.labels)): sample.value for sample in family.samples}
        for family in text_string_to_metric_families(text.decode())
    }


def in_order(labels: dict[str, str]) -> list[str]:
    ordered = ("engine", "worker", "rule", "controller", "outcome", "api_server", "consumer", "le")
    return [labels[name] for name in ordered if name in labels]


def values(families: dict[str, Any], name: str) -> dict[tuple[str, ...], float]:
    return {labels[1:]: value for labels, value in families[name].items()}


def test_both_parts_say_what_they_count() -> None:
    client = Client()

    async def ask() -> Any:
        return await Counters(lambda: engine_of(client, "capture", "steering")).families()

    found = parsed(render(asyncio.run(ask())))

    assert values(found, "headgate_capture_rows") == {("0", "0"): 40}
    assert values(found, "headgate_capture_stall_seconds") == {("0", "0"): 0.5}
    assert values(found, "headgate_capture_lost_results") == {("0", "0"): 6}
    assert values(found, "headgate_capture_consumer_rows") == {("0", "0", "files"): 40, ("0", "0", 'a "name"'): 2}
    assert values(found, "headgate_capture_consumer_errors") == {("0", "0", "files"): 1, ("0", "0", 'a "name"'): 0}
    assert values(found, "headgate_capture_consumer_hung") == {("0", "0", "files"): 1, ("0", "0", 'a "name"'): 0}
    assert values(found, "headgate_capture_consumer_own_upload_done") == {("0", "0", "files"): 12}
    assert values(found, "headgate_capture_consumer_own_upload_waiting") == {("0", "0", "files"): 3}
    assert values(found, "headgate_steering_slots_reserved") == {("0",): 12, ("1",): 12}
    assert values(found, "headgate_steering_global_vectors") == {("0",): 3, ("1",): 3}
    assert values(found, "headgate_steering_requests_waiting") == {("0",): 1, ("1",): 1}
    assert values(found, "headgate_steering_rule_rows") == {("0", "calm"): 7, ("1", "calm"): 7}
    assert values(found, "headgate_steering_actions")["1", "pid", "applied"] == 5
    assert values(found, "headgate_steering_controller_seconds") == {("0", "pid"): 0.25, ("1", "pid"): 0.25}
    assert values(found, "headgate_steering_worker_slots_live") == {("0", "0"): 4, ("1", "0"): 4}
    assert 0 <= found["headgate_stats_age_seconds"][("headgate_stats_age_seconds",)] < 60
    assert client.calls.count("collective_rpc") == 2


def test_the_api_server_tells_of_its_own_process_without_asking_the_engine() -> None:
    hub = HubStats(results=9, unknown=2, malformed=1, waiting=3, problem="no thread")
    drivers = DriverStats(consumers=(ConsumerStats(instance="here", rows=70),), unknown=4, malformed=5)
    engine = engine_of(Client(), "capture")
    engine.vllm_config.parallel_config = Namespace(_api_process_rank=1)
    engine.engine_core.failing = True
    setattr(engine.input_processor, FRONT_END, Namespace(stats=lambda: (hub, drivers)))

    async def ask() -> Any:
        return await Counters(lambda: engine).families()

    found = parsed(render(asyncio.run(ask())))

    names = {"results": 9, "unknown": 6, "malformed": 6, "waiting": 3, "failed": 1}
    for name, value in names.items():
        assert values(found, f"headgate_capture_server_{name}") == {("1",): value}
    assert values(found, "headgate_capture_server_consumer_rows") == {("1", "here"): 70}
    assert "headgate_capture_rows" not in found


def test_every_counter_of_a_front_end_is_shown() -> None:
    front: Any = Namespace(stats=lambda: (HubStats(), DriverStats()))
    shown = {
        family.name.removeprefix("headgate_capture_server_") for family in metrics_page.front_end_families(front, 0)
    }
    told = {*HubStats.__slots__, *DriverStats.__slots__, "failed"} - {"consumers", "problem"}

    assert {name for name in shown if not name.startswith("consumer")} == told


def test_every_counter_of_a_consumer_and_a_worker_is_shown() -> None:
    told = set(CAPTURE) - {"consumers"}
    assert {key for _, _, key, _ in metrics_page._STAGING} == told
    consumer = set(CAPTURE["consumers"][0]) - {"instance", "result_s", "result_counts", "figures"}
    assert {key for _, _, key, _ in metrics_page._CONSUMERS} == consumer


def test_a_histogram_is_cumulative() -> None:
    counters = QueueCounters()
    for seconds in (0.0005, 0.002, 0.002, 5.0, 100.0):
        counters.note_result(seconds)
    consumer = {**CAPTURE["consumers"][0], "result_s": counters.result_s, "result_counts": counters.result_counts}
    engines = [EngineStats(workers=[{**CAPTURE, "consumers": [consumer]}])]

    (family,) = (family for family in metrics_page.families(engines) if family.kind == "histogram")
    found = parsed(render([family]))["headgate_capture_consumer_result_seconds"]
    buckets = {key[-1]: value for key, value in found.items() if key[0].endswith("_bucket")}

    assert len(counters.result_counts) == len(RESULT_BOUNDS_S) + 1
    assert (buckets["0.001"], buckets["0.003"], buckets["3.0"], buckets["10.0"], buckets["+Inf"]) == (1, 3, 3, 4, 5)
    assert next(value for key, value in found.items() if key[0].endswith("_sum")) == pytest.approx(105.0045)


def test_a_part_that_is_not_configured_is_not_asked() -> None:
    client = Client()

    async def ask(*sections: str) -> set[str]:
        families = await Counters(lambda: engine_of(client, *sections)).families()
        return {family.name.split("_")[1] for family in families}

    assert asyncio.run(ask("capture")) == {"capture", "stats", "refusals"}
    assert client.calls == ["collective_rpc"] * 2
    assert asyncio.run(ask()) == set()
    assert client.calls == ["collective_rpc"] * 2


def test_an_engine_is_asked_once_for_many_scrapes() -> None:
    client = Client()

    async def ask() -> None:
        counters = Counters(lambda: engine_of(client, "capture"))
        await asyncio.gather(*(counters.families() for _ in range(10)))
        await counters.families()

    asyncio.run(ask())
    assert client.calls == ["collective_rpc"] * 2


def test_a_slow_engine_holds_no_page_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_page, "PATIENCE_S", 0.01)
    monkeypatch.setattr(metrics_page, "FRESH_S", 0.0)
    client = Client()

    async def ask() -> list[int]:
        counters = Counters(lambda: engine_of(client, "capture"))
        client.go.clear()
        before = await counters.families()
        client.go.set()
        fresh = await counters.families()
        client.go.clear()
        stale = await counters.families()
        client.go.set()
        await counters.families()
        return [len(before), len(fresh), len(stale)]

    before, fresh, stale = asyncio.run(ask())
    assert before == 1  # what this process itself has refused
    assert fresh == stale > 1


def test_a_busy_engine_is_not_asked_again_before_it_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_page, "PATIENCE_S", 0.0)
    monkeypatch.setattr(metrics_page, "FRESH_S", 0.0)
    client = Client()
    client.go.clear()

    async def ask() -> None:
        counters = Counters(lambda: engine_of(client, "capture", "steering"))
        for _ in range(20):
            await asyncio.gather(*(counters.families() for _ in range(5)))
        assert sorted(client.calls) == ["collective_rpc"] * 2 + ["headgate_call"] * 2
        client.go.set()
        while len(await counters.families()) == 1:
            pass

    asyncio.run(ask())


def test_an_engine_that_fails_leaves_the_page(caplog: pytest.LogCaptureFixture) -> None:
    client = Client()
    client.failing = True

    async def ask() -> Any:
        return await Counters(lambda: engine_of(client, "capture")).families()

    assert [family.name for family in asyncio.run(ask())] == ["headgate_refusals"]
    assert "no engine" in caplog.text


def asked(app: Callable[..., Any], path: str, method: str = "GET") -> httpx.Response:
    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x") as client:
            return await client.request(method, path)

    return asyncio.run(ask())


class Ours(Counters):
    def __init__(self) -> None:
        super().__init__(lambda: None)
        self.num_asked = 0

    async def families(self) -> tuple[Family, ...]:
        self.num_asked += 1
        family = Family(name="ours", kind="gauge", about="Ours.", labels=(), samples=(Sample(labels=(), value=1),))
        return (family,)


def app_of(content: str, kind: str, **headers: str) -> Any:
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    async def answer(request: Any) -> Any:
        status = 500 if "broken" in content else 200
        return Response(content, status, {**headers}, media_type=kind)

    return Starlette(routes=[Route(path, answer) for path in ("/metrics", "/v1/models")])


def test_our_text_follows_the_servers() -> None:
    theirs = "# HELP theirs Theirs.\n# TYPE theirs gauge\ntheirs 2.0\n"
    answer = asked(MetricsPage(app_of(theirs, "text/plain; version=0.0.4"), Ours()), "/metrics")

    assert answer.text.startswith(theirs)
    assert parsed(answer.content) == {"theirs": {("theirs",): 2.0}, "ours": {("ours",): 1.0}}
    assert int(answer.headers["content-length"]) == len(answer.content)


@pytest.mark.parametrize(
    "app",
    [
        app_of("broken", "text/plain"),
        app_of("# EOF", "application/openmetrics-text"),
        app_of("zipped", "text/plain", **{"content-encoding": "identity"}),
    ],
)
def test_other_answers_stay_as_they_are(app: Any) -> None:
    assert "ours" not in asked(MetricsPage(app, Ours()), "/metrics").text


def test_other_pages_are_not_touched() -> None:
    ours = Ours()
    answer = asked(MetricsPage(app_of("models", "text/plain"), ours), "/v1/models")

    assert (answer.text, ours.num_asked) == ("models", 0)


def test_steering_names_are_unique() -> None:
    names = [family.name for family in steering_metrics.families([])]

    assert len(set(names)) == len(names) == 16


def test_refusals_are_counted_by_what_they_are_about() -> None:
    def counted() -> dict[str, int]:
        return {sample.labels[1]: int(sample.value) for sample in refused(3).samples}

    before = counted()
    fields = ["capture.files.hooks", "return_hidden_states", "decode_steering_ops[0].at", "sae_reconstruction", "x"]
    for field in fields:
        with pytest.raises(RequestError) as raised, as_client_error():
            raise RequestError(field, "is wrong")
        with pytest.raises(RequestError), as_client_error():
            raise raised.value  # on its way out it is counted once

    assert {about: count - before[about] for about, count in counted().items()} == {
        "capture": 2,
        "steering": 2,
        "other": 1,
    }
