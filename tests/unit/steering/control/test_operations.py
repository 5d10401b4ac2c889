"""Users' calls over engine cores that are played by the real authority, without vLLM."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headgate.capture.engine.contracts.core_calls import AsyncCoreClient, CoreClient
from headgate.capture.schema.errors import EngineStateError, RequestError
from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering import ops
from headgate.steering.config import SteeringConfig
from headgate.steering.control.handle import AsyncSteering, Steering
from headgate.steering.core.steering_core import SteeringCore
from headgate.steering.probes import from_direction, save
from headgate.steering.vectors.phase_vectors import Steerable
from tests.deadlines import patience

STEERABLE = Steerable(
    num_layers=2,
    hidden_size=4,
    dtype="bfloat16",
    sites=tuple(Site(layer, HookPoint.POST_MLP) for layer in range(2)),
    max_vectors=4,
    op_sites=(Site(1, HookPoint.POST_MLP),),
    max_ops_per_site=2,
)
ONE = {"post_mlp": {0: np.ones(4, np.float32)}}
TWO = {"post_mlp": {0: np.ones(4, np.float32), 1: np.full(4, 2, np.float32)}}
ABLATION = ops.ablate([1.0, 0.0, 2.0, 0.0], "1.post_mlp")
CLAMP = ops.clamp([0.0, 1.0, 0.0, 3.0], "1.post_mlp", max=0.5)


class EngineCore:
    """The engine core's half of steering, without workers."""

    def __init__(self, capacity: int = 32) -> None:
        services = SimpleNamespace(
            call_workers=lambda method, args: [],
            prepare_change=lambda field: None,
            rekey_running=lambda: {},
            restart_running=lambda: None,
            fail=lambda reason: None,
        )
        self.part = SteeringCore("bfloat16", capacity, services, SteeringConfig())
        self.before: Callable[[str], None] = lambda method: None
        self.refused: set[str] = set()

    def headgate_call(self, part: str, method: str, args: Mapping[str, Any]) -> dict[str, Any]:
        assert part == "steering"
        self.before(method)
        if method in self.refused:
            return {"error": {"field": "module", "message": "no room", "is_forbidden": False}}
        try:
            return {"ok": self.part.call(method, args)}
        except RequestError as error:
            message = str(error).removeprefix(f"{error.field}: ")
            return {"error": {"field": error.field, "message": message, "is_forbidden": False}}


class Client:
    """As much of an `AsyncMPClient` as is called."""

    def __init__(self, *engines: EngineCore) -> None:
        self.core_engines = list(engines)

    async def _call_utility_async(self, name: str, *args: Any, engine: EngineCore) -> Any:
        assert name == "headgate_call"
        return engine.headgate_call(*args)


def several(*engines: EngineCore) -> AsyncSteering:
    return AsyncSteering(AsyncCoreClient(Client(*engines), "steering"), STEERABLE)


def one(engine: EngineCore) -> Steering:
    return Steering(CoreClient(SimpleNamespace(engine_core=engine), "steering"), STEERABLE)


def content(engine: EngineCore) -> Any:
    status = engine.part.call("status", {})
    return status["global"]["hash"], {module["name"]: module["hash"] for module in status["modules"]}


def test_one_engine_core_needs_one_call() -> None:
    engine, calls = EngineCore(), []
    engine.before = calls.append
    steering = one(engine)

    steering.register("calm", ONE)
    steering.set(TWO)
    steering.unregister("calm")
    steering.clear()

    assert calls == ["register", "set_global", "unregister", "clear_global"]


@pytest.mark.parametrize("num_engines", [1, 2])
def test_zeros_take_a_global_vector_back(num_engines: int) -> None:
    engines = [EngineCore() for _ in range(num_engines)]
    steering = several(*engines)
    zeros = np.zeros(4, np.float32)

    asyncio.run(steering.set(TWO, decode_vectors=ONE))
    partly = asyncio.run(steering.set({"post_mlp": {1: zeros}}, decode_vectors={"post_mlp": {1: TWO["post_mlp"][1]}}))
    wholly = asyncio.run(steering.set({"post-mlp": {0: {"vector": zeros, "scale": 2.0}}}))

    assert partly.shared.tiers == {"base": ("0.post_mlp",), "decode": ("0.post_mlp", "1.post_mlp")}
    assert wholly.shared.tiers == {"decode": ("0.post_mlp", "1.post_mlp")}
    assert wholly.shared.prefill.hash is None


def test_an_error_of_the_engine_core_names_its_field_once() -> None:
    with pytest.raises(RequestError) as caught:
        one(EngineCore()).unregister("nobody")

    assert caught.value.field == "name"
    assert str(caught.value) == "name: unknown steering module 'nobody'; registered: none"


CHANGES: dict[str, tuple[str, Callable[[AsyncSteering], Any]]] = {
    "a new module": ("register", lambda steering: steering.register("new", TWO)),
    "another content": ("register", lambda steering: steering.register("calm", TWO)),
    "no module": ("unregister", lambda steering: steering.unregister("calm")),
    "a global vector": ("set_global", lambda steering: steering.set(TWO)),
    "no global vector": ("clear_global", lambda steering: steering.clear()),
}


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize(("method", "change"), CHANGES.values(), ids=CHANGES.keys())
def test_what_one_refuses_the_others_take_back(method: str, change: Any, which: int) -> None:
    engines = [EngineCore() for _ in range(3)]
    steering = several(*engines)
    asyncio.run(steering.register("calm", ONE))
    asyncio.run(steering.set(ONE, decode_vectors=TWO))
    before = content(engines[0])
    engines[which].refused = {method}

    with pytest.raises(RequestError, match="module: no room"):
        asyncio.run(change(steering))

    assert [content(engine) for engine in engines] == [before] * 3
    engines[which].refused = set()
    asyncio.run(change(steering))
    assert content(engines[0]) != before
    assert [content(engine) for engine in engines[1:]] == [content(engines[0])] * 2


PROBE = from_direction([1.0, 0.0, 2.0, 0.0], at="1.post_mlp", threshold=0.5, metadata={"auroc": "0.9"})


def probes_of(engine: EngineCore) -> Any:
    return engine.part.call("status", {})["probes"]


def test_a_probe_comes_as_itself_as_a_file_or_as_fields(tmp_path: Path) -> None:
    steering = one(EngineCore())
    save(tmp_path / "p.safetensors", PROBE)
    fields = {"at": "1.post_mlp", "weight": PROBE.weight[0], "threshold": np.float64(0.5)}

    found = [
        steering.register_probe(f"p{at}", source)
        for at, source in enumerate([PROBE, tmp_path / "p.safetensors", fields])
    ]

    assert [status.sha256 for status in found] == [PROBE.sha256] * 3
    assert [status.metadata for status in found] == [{"auroc": "0.9"}, {"auroc": "0.9"}, {}]
    assert list(steering.probes()) == ["p0", "p1", "p2"]
    assert steering.unregister_probe("p1") == found[1]
    assert steering.probes() == {"p0": found[0], "p2": found[2]}
    with pytest.raises(RequestError, match=r"name: unknown probe 'p1'; registered: p0, p2"):
        steering.unregister_probe("p1")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/nowhere.safetensors", "path: .*no such file"),
        (3, "probe: expected a Probe, a path or an object of its fields"),
        (from_direction([1.0] * 4, at="0.post_mlp"), "at: no probe can read at 0.post_mlp; declared sites: 1.post_mlp"),
        (from_direction([1.0] * 3, at="1.post_mlp"), "weight: expected rows of 4 values, as at"),
        ({"at": "1.post_mlp", "weight": [1.0] * 4, "wait": 1}, "wait: unknown key; a probe has at"),
    ],
)
def test_a_probe_that_cannot_be_registered_is_refused(source: Any, message: str) -> None:
    engine = EngineCore()

    with pytest.raises(RequestError, match=message):
        one(engine).register_probe("p", source)

    assert probes_of(engine) == {}


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("method", ["register_probe", "unregister_probe"])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_change_of_probes_that_one_refuses_the_others_take_back(method: str, which: int, is_there: bool) -> None:
    engines = [EngineCore() for _ in range(3)]
    steering = several(*engines)
    if is_there:
        asyncio.run(steering.register_probe("p", PROBE))
    before = probes_of(engines[0])
    engines[which].refused = {method}
    other = from_direction([0.0, 0.0, 2.0, 0.0], at="1.post_mlp")

    with pytest.raises(RequestError):
        asyncio.run(steering.register_probe("p", other) if "un" not in method else steering.unregister_probe("p"))

    assert [probes_of(engine) for engine in engines] == [before] * 3
    assert list(asyncio.run(steering.probes())) == list(before)


def test_what_cannot_be_taken_back_is_told() -> None:
    engines = [EngineCore(), EngineCore()]
    engines[0].refused, engines[1].refused = {"unregister"}, {"register"}

    with pytest.raises(EngineStateError, match=r"register succeeded on 1 of 2 .* could not be taken back on 1"):
        asyncio.run(several(*engines).register("calm", ONE))


def test_a_change_that_met_another_is_repeated() -> None:
    engines = [EngineCore(), EngineCore()]
    others = iter([{"post_mlp": {1: np.ones(4, np.float32)}}])

    def meddle(method: str) -> None:
        if method == "status" and (vectors := next(others, None)) is not None:
            one(engines[1]).set(vectors, replace=True)

    engines[0].before = meddle
    status = asyncio.run(several(*engines).set(ONE, replace=True))

    assert status.is_consistent
    assert content(engines[0]) == content(engines[1])
    assert next(others, None) is None


def test_engine_cores_that_never_agree_are_told() -> None:
    engines = [EngineCore(), EngineCore()]
    asyncio.run(several(*engines).register("calm", ONE))
    one(engines[1]).register("calm", TWO)

    assert not asyncio.run(several(*engines).status()).is_consistent
    with pytest.raises(EngineStateError, match="2 engine cores do not agree after 3 attempts"):
        asyncio.run(several(*engines).register("other", ONE))


class Waiting(dict[str, Any]):
    """Vectors that cannot be read before `go` is set; says when someone tries."""

    def __init__(self, vectors: Mapping[str, Any], on_read: Callable[[], object]) -> None:
        super().__init__(vectors)
        self.go = threading.Event()
        self._on_read = on_read

    def items(self) -> Any:
        self._on_read()
        assert self.go.wait(patience(20)), "whoever reads holds up whoever would set it"
        return super().items()


def test_reading_holds_no_event_loop_up_and_changes_keep_their_order() -> None:
    engine, calls = EngineCore(), []
    engine.before = calls.append
    steering = several(engine)

    async def change() -> None:
        is_reading, loop = asyncio.Event(), asyncio.get_running_loop()
        slow = Waiting(ONE, on_read=lambda: loop.call_soon_threadsafe(is_reading.set))
        first = asyncio.ensure_future(steering.set(slow))
        await asyncio.wait_for(is_reading.wait(), patience(20))
        others = [asyncio.ensure_future(steering.clear()), asyncio.ensure_future(steering.register("calm", TWO))]
        await asyncio.sleep(0)
        assert calls == []
        slow.go.set()
        await asyncio.gather(first, *others)

    asyncio.run(change())

    assert calls == ["set_global", "clear_global", "register"]


def test_a_change_that_is_wrong_or_given_up_does_not_hold_up_the_next() -> None:
    engine = EngineCore()
    steering = several(engine)

    async def change() -> None:
        is_reading, loop = asyncio.Event(), asyncio.get_running_loop()
        slow = Waiting(ONE, on_read=lambda: loop.call_soon_threadsafe(is_reading.set))
        given_up = asyncio.ensure_future(steering.set(slow))
        await asyncio.wait_for(is_reading.wait(), patience(20))
        given_up.cancel()
        with pytest.raises(RequestError, match="vectors"):
            await steering.set({})
        await steering.register("calm", TWO)
        slow.go.set()

    asyncio.run(change())

    shared, modules = content(engine)
    assert (shared["prefill"], list(modules)) == (None, ["calm"])


def test_operations_act_on_everybody_until_their_tier_is_set_anew() -> None:
    engine = EngineCore()
    steering = one(engine)

    steering.set(ONE, ops=[ABLATION], decode_ops=[CLAMP])
    first = steering.status().shared
    steering.set(TWO)
    more_vectors = steering.status().shared
    steering.set(decode_ops=[])
    ablated = steering.status().shared
    steering.set(ops=[])
    vectors = steering.status().shared

    assert first.prefill.op_sites == first.decode.op_sites == ("1.post_mlp",)
    assert first.prefill.hash != first.decode.hash
    assert more_vectors.prefill.op_sites == ("1.post_mlp",)
    assert more_vectors.prefill.hash != first.prefill.hash
    assert ablated.prefill == more_vectors.prefill
    assert ablated.decode == ablated.prefill
    assert vectors.prefill.op_sites == vectors.decode.op_sites == ()
    steering.set(TWO, replace=True)
    assert steering.status().shared.prefill == vectors.prefill
    with pytest.raises(RequestError, match="no vector, operation or feature to set"):
        steering.set()


def test_global_operations_are_a_reason_to_take_blocks_apart() -> None:
    engine = EngineCore()
    assert engine.part.block_keys("plain") is None

    one(engine).set(decode_ops=[CLAMP])

    keys = engine.part.block_keys("plain")
    assert keys is not None
    assert keys.prefill is None
    assert keys.decode is not None


def test_global_operations_may_name_the_vector_of_a_module() -> None:
    steering = one(EngineCore())
    steering.register("axis", {"post_mlp": {1: [1.0, 0.0, 2.0, 0.0]}})

    named = steering.set(ops=[ops.ablate("axis", "1.post_mlp")]).shared
    inline = steering.set(ops=[ABLATION]).shared

    assert named.prefill == inline.prefill
    with pytest.raises(RequestError, match="unknown steering module 'nobody'"):
        steering.set(ops=[ops.ablate("nobody", "1.post_mlp")])
    assert steering.status().shared.prefill == inline.prefill


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"ops": [{**ABLATION, "positions": [0]}]}, "limits an operation to positions"),
        ({"ops": [ABLATION] * 3}, "at most 2"),
        ({"ops": [{**ABLATION, "at": "0.post_mlp"}]}, "--steering-op-sites"),
        ({"prefill_ops": "ablate"}, "expected a non-empty list"),
    ],
)
def test_global_operations_that_cannot_be_are_refused_by_name_and_nothing_changes(document: Any, reason: str) -> None:
    steering = one(EngineCore())
    before = steering.set(ONE)

    with pytest.raises(RequestError, match=reason):
        steering.set(**document)

    assert steering.status() == before


def test_a_global_operation_that_one_engine_core_refuses_is_taken_back_in_the_others() -> None:
    engines = EngineCore(), EngineCore(capacity=2)
    asyncio.run(several(*engines).set(ops=[ABLATION]))
    before = content(engines[0])

    with pytest.raises(RequestError, match="slots"):
        asyncio.run(several(*engines).set(ops=[ABLATION, ops.rotate([1, 0, 0, 0], [0, 1, 0, 0], "1.post_mlp", 90)]))

    assert content(engines[0]) == content(engines[1]) == before


def test_arguments_that_do_not_exist_are_told() -> None:
    with pytest.raises(TypeError, match="unexpected argument 'decode_opps'; expected vectors, prefill_vectors"):
        one(EngineCore()).register("calm", decode_opps=[ABLATION])  # type: ignore[call-arg]
