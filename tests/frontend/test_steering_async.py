"""`AsyncLLM` that steers, over the model-free worker: checks in the call, names inside the stream, two engine cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate.capture.schema.errors import EngineStateError, RequestError
from headgate.steering import probes
from tests.fakes.async_engine import AsyncEngine
from tests.fakes.steering_forms import HIDDEN, ROW
from tests.frontend.conftest import ENGINE
from tests.frontend.test_async_llm import last_of

pytestmark = pytest.mark.engine

WORKER = "tests.fakes.noting_worker.NotingWorker"
ONE = {"post_mlp": {3: ROW}}
PROMPT = list(range(100, 120))


class Engine(AsyncEngine):
    """An `AsyncLLM` that steers, over the fake worker."""

    def __init__(self, model_dir: Path, **settings: Any) -> None:
        from headgate.steering import additional_config

        config = additional_config(steering={"max_steering_slots": 20, "op_sites": {"post_mlp": [3]}})
        super().__init__(model_dir, **{**ENGINE, "worker_cls": WORKER, "additional_config": config, **settings})
        self.steering = self.llm.steering

    def close(self) -> None:
        del self.steering
        super().close()

    def generate(self, request_id: str, prompt: Any = None, **fields: Any) -> Any:
        from headgate.steering import SamplingParams

        params = SamplingParams(**{"max_tokens": 3, **fields})
        return self.llm.generate(prompt or {"prompt_token_ids": PROMPT}, params, request_id)

    def finish(self, request_id: str, **fields: Any) -> Any:
        return self.run(last_of(self.generate(request_id, **fields)))


@pytest.fixture(scope="module", params=[1, 2], ids=["one-engine-core", "two-engine-cores"])
def engine(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Engine]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    engine = Engine(model_dir, data_parallel_size=request.param)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def left_clean(engine: Engine) -> Iterator[None]:
    """Whatever a test did, every engine core goes on and holds nothing."""
    yield
    engine.run(engine.steering.clear())
    for name in engine.run(engine.steering.modules()):
        engine.run(engine.steering.unregister(name))
    assert engine.finish("last").outputs[0].finish_reason == "length"
    status = engine.run(engine.steering.status())
    assert status.is_consistent
    assert {slots.reserved for slots in status.slots} == {0}


def test_a_steered_request_is_served(engine: Engine) -> None:
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.FINAL_ONLY
    output = engine.finish("a", steering_vectors=ONE, n=2, temperature=1.0, output_kind=kind)

    assert [len(completion.token_ids) for completion in output.outputs] == [3, 3]
    assert output.capture_results == output.outputs[0].capture_results == {}


def test_samples_bring_their_vectors_to_each_engine_core_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.sampling_params import RequestOutputKind

    client, num_bytes = engine.llm.engine_core, 0
    original = client._send_input_message

    def send(message: Any, *args: Any) -> Any:
        nonlocal num_bytes
        num_bytes += sum(memoryview(frame).nbytes for frame in message)
        return original(message, *args)

    monkeypatch.setattr(client, "_send_input_message", send)
    many = {"post_mlp": {layer: (ROW + layer) / 3 for layer in range(18)}}
    payload = 18 * HIDDEN * 4
    kind = RequestOutputKind.FINAL_ONLY

    output = engine.finish("many", steering_vectors=many, n=16, temperature=1.0, output_kind=kind)

    assert [len(completion.token_ids) for completion in output.outputs] == [3] * 16
    assert payload < num_bytes < engine.steering._cores.num_engines * payload + 16 * 2000


def test_bad_vectors_are_refused_in_the_call_itself(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"steering_vectors\.post_mlp\.3: expected 576 numbers"):
        engine.generate("b", steering_vectors={"post_mlp": {3: [1.0]}})


def test_a_stream_of_inputs_is_refused(engine: Engine) -> None:
    async def inputs() -> Any:
        yield None

    with pytest.raises(RequestError, match="steering_vectors: a session with streamed input"):
        engine.generate("c", inputs(), steering_vectors=ONE)


def test_an_unknown_name_is_refused_when_the_stream_begins(engine: Engine) -> None:
    outputs = engine.generate("d", steering_name="nobody")

    with pytest.raises(RequestError, match="steering_name: unknown steering module 'nobody'; registered: none"):
        engine.run(anext(outputs))


def test_a_name_that_was_registered_later_is_found(engine: Engine) -> None:
    engine.run(engine.steering.register("calm", ONE))
    assert engine.finish("e", steering_name="calm").outputs[0].finish_reason == "length"
    engine.run(engine.steering.register("other", ONE))

    for i in range(8):  # on every engine core
        output = engine.finish(f"f{i}", steering_name="calm", steering_module_ref=("other", -0.5))
        assert output.outputs[0].finish_reason == "length"


def test_a_name_that_is_gone_is_the_same_error_as_one_that_never_was(engine: Engine) -> None:
    engine.run(engine.steering.register("calm", ONE))
    engine.finish("g", steering_module_ref=["calm"])
    engine.run(engine.steering.unregister("calm"))

    for i in range(2):  # first by the engine core, since the front end still knows the name
        with pytest.raises(RequestError, match="steering_module_ref: unknown steering module 'calm'"):
            engine.finish(f"h{i}", steering_module_ref=["calm"])


def test_every_engine_core_has_what_was_set_and_registered(engine: Engine) -> None:
    status = engine.run(engine.steering.set(ONE))
    assert status.shared.tiers == {"base": ("3.post_mlp",)}
    engine.run(engine.steering.register("calm", decode_vectors=ONE))
    engine.run(engine.steering.register("calm", decode_vectors={"post_mlp": {3: 2 * ROW, 4: ROW}}))
    status = engine.run(engine.steering.status())

    assert len(status.slots) == engine.steering._cores.num_engines
    assert status.is_consistent
    assert status.modules["calm"].decode.sites == ("3.post_mlp", "4.post_mlp")
    assert engine.run(engine.steering.set({"post_mlp": {5: ROW}}, replace=True)).shared.decode.sites == ("5.post_mlp",)


def full(engine: Engine, which: int) -> Any:
    """Take 15 of the 19 slots of one engine core."""
    from headgate.steering.documents.request import read_module
    from headgate.steering.spec import to_wire

    spec = read_module({"vectors": {"post_mlp": {i: ROW + i for i in range(15)}}}, engine.steering.steerable)
    client = engine.llm.engine_core
    args = ("steering", "register", {"name": "full", "spec": to_wire(spec)})
    return client._call_utility_async("headgate_call", *args, engine=client.core_engines[which])


MANY = {"post_mlp": {i: 2 * ROW + i for i in range(6)}}


def test_what_one_engine_core_refuses_none_of_them_has(engine: Engine) -> None:
    if engine.steering._cores.num_engines == 1:
        pytest.skip("one engine core agrees with itself")
    before = engine.run(engine.steering.register("calm", ONE))
    shared = engine.run(engine.steering.set(ONE)).shared
    engine.run(full(engine, 1))

    for change in (
        lambda: engine.steering.register("new", MANY),
        lambda: engine.steering.register("calm", MANY),
        lambda: engine.steering.set(MANY),
    ):
        with pytest.raises(RequestError, match="slots"):
            engine.run(change())
    client = engine.llm.engine_core
    engine.run(
        client._call_utility_async(
            "headgate_call", "steering", "unregister", {"name": "full"}, engine=client.core_engines[1]
        )
    )

    status = engine.run(engine.steering.status())
    assert status.is_consistent
    assert {name: module.prefill for name, module in status.modules.items()} == {"calm": before.prefill}
    assert (status.shared.prefill, status.shared.decode) == (shared.prefill, shared.decode)


def test_engine_cores_that_differ_are_told(engine: Engine) -> None:
    if engine.steering._cores.num_engines == 1:
        pytest.skip("one engine core agrees with itself")
    engine.run(full(engine, 0))
    assert not engine.run(engine.steering.status()).is_consistent
    with pytest.raises(EngineStateError, match="2 engine cores do not agree"):
        engine.run(engine.steering.register("calm", ONE))
    with pytest.raises(RequestError, match="steering_name: unknown steering module 'full'"):
        engine.finish("i", steering_name="full")
    engine.run(full(engine, 1))

    assert engine.run(engine.steering.status()).is_consistent


def test_what_can_be_steered(engine: Engine) -> None:
    assert list(engine.steering.layers()) == ["pre_attn", "post_attn", "post_mlp"]
    assert engine.steering.steerable.hidden_size == HIDDEN


def test_a_probe_is_registered_listed_and_forgotten(engine: Engine, tmp_path: Path) -> None:
    steering = engine.steering
    probe = probes.from_direction(range(HIDDEN), at="3.post_mlp", threshold=0.5, metadata={"auroc": "0.9"})
    probes.save(tmp_path / "p.safetensors", probe)

    registered = engine.run(steering.register_probe("anger", tmp_path / "p.safetensors"))

    assert (registered.sha256, registered.metadata, registered.at) == (probe.sha256, {"auroc": "0.9"}, "3.post_mlp")
    assert engine.run(steering.probes()) == {"anger": registered}
    assert engine.run(steering.audit())[-1]["action"] == "register_probe"
    with pytest.raises(RequestError, match=r"at: no probe can read at 2\.post_mlp"):
        engine.run(steering.register_probe("other", {"at": "2.post_mlp", "weight": ROW}))
    assert engine.run(steering.unregister_probe("anger")) == registered
    assert engine.run(steering.probes()) == {}
