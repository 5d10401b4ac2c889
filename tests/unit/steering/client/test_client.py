"""The client against a server of canned answers: what is sent, how answers and errors are read, by both clients."""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch

from headgate.capture.schema.results import CaptureResult
from headgate.steering import VectorFile, save
from headgate.steering.client import Answer, AsyncClient, Choice, Client, GlobalUpdate, ServerError, inline_rows
from headgate.steering.documents.request import BASE
from headgate.steering.documents.vectors import read_tier
from headgate.steering.vectors.phase_vectors import PhaseVectors
from tests.fakes.vector_forms import HIDDEN, model

ONES = np.ones(HIDDEN, np.float32)
VECTORS = {"post_mlp": {1: ONES}}
RESULT = {
    "status": "ok",
    "error": None,
    "payload": ["a.safetensors"],
    "num_rows": 3,
    "num_bytes": 12,
    "dropped_rows": 0,
}
COMPLETION = {
    "id": "cmpl-1",
    "model": "m",
    "choices": [{"index": 0, "text": "yes", "finish_reason": "stop"}],
    "capture_results": {"files": RESULT},
}
CHAT = {
    "id": "chat-1",
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "no"}, "finish_reason": "length"}],
}
STREAM = (
    ": a comment\n\n"
    'data: {"id": "c", "model": "m", "choices": [{"index": 0, "delta": {"role": "assistant"}}]}\n\n'
    'data: {"id": "c", "model": "m", "choices": [{"index": 0, "delta": {"content": "Hi"}}]}\n\n'
    f'data: {{"id": "c", "model": "m", "choices": [], "capture_results": {{"files": {json.dumps(RESULT)}}}}}\n\n'
    "data: [DONE]\n\n"
)


PHASE = {"hash": "00ff", "sites": ["1.post_mlp"]}
MODULE = {"name": "calm", "prefill": PHASE, "decode": PHASE, "version": 3}


class Canned:
    """Answers by path, and keeps what was asked."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {"/v1/models": {"data": [{"id": "m"}]}, **{f"/v1/{k}": v for k, v in answers.items()}}
        self.asked: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        found = self.answers[request.url.path]
        if isinstance(found, httpx.Response):
            return found
        return httpx.Response(200, text=found) if isinstance(found, str) else httpx.Response(200, json=found)

    @property
    def body(self) -> Any:
        """The last body, decoded."""
        content = self.asked[-1].content
        is_binary = self.asked[-1].headers["content-type"] == "application/msgpack"
        return msgspec.msgpack.decode(content) if is_binary else json.loads(content)


Caller = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest) -> Caller:
    """``call(canned, "method", *args, settings={...}, **kwargs)``: one method of either kind of client."""

    def run(canned: Canned, method: str, *args: Any, settings: Any = None, **kwargs: Any) -> Any:
        options = {"transport": httpx.MockTransport(canned), **(settings or {})}
        if request.param == "sync":
            with Client("http://server/v1/", **options) as client:
                found = getattr(client, method)(*args, **kwargs)
                return list(found) if inspect.isgenerator(found) else found

        async def awaited() -> Any:
            async with AsyncClient("http://server/v1/", **options) as client:
                found = getattr(client, method)(*args, **kwargs)
                return [item async for item in found] if inspect.isasyncgen(found) else await found

        return asyncio.run(awaited())

    return run


def test_both_clients_have_the_same_methods() -> None:
    def public(kind: type) -> dict[str, list[str]]:
        methods = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(method).parameters) for name, method in methods if name[0] != "_"}

    assert public(Client) == public(AsyncClient)


def test_a_call_has_one_implementation_for_both_clients() -> None:
    streams = {"stream_completion", "stream_chat"}  # generators of either kind
    names = {name for name, _ in inspect.getmembers(Client, inspect.isfunction) if name[0] != "_"} - {"close", *streams}

    assert len(names) > 15
    for name in names:
        assert inspect.unwrap(getattr(Client, name)) is inspect.unwrap(getattr(AsyncClient, name)), name
        assert inspect.iscoroutinefunction(getattr(AsyncClient, name)), name
        assert not inspect.iscoroutinefunction(getattr(Client, name)), name


@pytest.mark.parametrize("is_binary", [False, True], ids=["json", "msgpack"])
def test_a_completion_sends_packed_vectors_and_reads_its_results(call: Caller, is_binary: bool) -> None:
    canned = Canned(completions=COMPLETION)
    settings = {"is_binary": is_binary, "api_key": "door", "capture_key": "rows"}

    answer = call(
        canned, "complete", "Is it?", steering_vectors=VECTORS, capture={"files": {}}, max_tokens=2, settings=settings
    )

    assert isinstance(answer, Answer)
    assert (answer.text, answer.choices[0].finish_reason) == ("yes", "stop")
    assert answer.capture_results == {"files": CaptureResult(**RESULT)}
    body, headers = canned.body, canned.asked[-1].headers
    assert {name: body[name] for name in ("model", "prompt", "max_tokens", "capture")} == {
        "model": "m",
        "prompt": "Is it?",
        "max_tokens": 2,
        "capture": {"files": {}},
    }
    assert read_tier(body["steering_vectors"], model(), BASE) == read_tier(VECTORS, model(), BASE)
    assert isinstance(body["steering_vectors"]["post_mlp"]["data"], bytes) is is_binary
    assert (headers["authorization"], headers["x-headgate-key"]) == ("Bearer door", "rows")


def test_a_text_is_the_first_message_of_a_chat(call: Caller) -> None:
    canned = Canned(**{"chat/completions": CHAT})

    answer = call(canned, "chat", "Is it?", steering_name="calm", settings={"model": "mine"})

    assert answer.text == "no"
    assert answer.captures == ()
    assert canned.body == {
        "model": "mine",
        "messages": [{"role": "user", "content": "Is it?"}],
        "steering_name": "calm",
    }
    assert len(canned.asked) == 1
    assert "x-headgate-key" not in canned.asked[0].headers


def test_a_stream_gives_its_text_and_last_what_was_captured(call: Caller) -> None:
    canned = Canned(**{"chat/completions": STREAM})

    chunks = call(canned, "stream_chat", "Hello")

    assert "".join(chunk.text for chunk in chunks) == "Hi"
    assert chunks[-1].choices == ()
    assert chunks[-1].capture_results["files"].num_rows == 3
    assert canned.body["stream"] is True


def test_a_stream_is_cut_at_line_feeds_alone(call: Caller) -> None:
    text = "one\u2028two\u0085three\u2029\x1c"
    choice = {"index": 0, "text": text, "finish_reason": None}
    chunk = json.dumps({"id": "c", "model": "m", "choices": [choice]}, ensure_ascii=False)
    canned = Canned(completions=f"data: {chunk}\r\n\r\ndata: [DONE]")

    chunks = call(canned, "stream_completion", "Hello")

    assert "".join(chunk.text for chunk in chunks) == text


@pytest.mark.parametrize("method", ["complete", "stream_completion"])
def test_a_refusal_says_its_status_field_and_reason(call: Caller, method: str) -> None:
    told = {"error": {"message": "steering_vectors.post_mlp.3: too wide", "param": "steering_vectors.post_mlp.3"}}
    canned = Canned(completions=httpx.Response(400, json=told))

    with pytest.raises(ServerError, match="too wide") as caught:
        call(canned, method, "Hello")

    assert (caught.value.status, caught.value.field) == (400, "steering_vectors.post_mlp.3")


@pytest.mark.parametrize(
    ("status", "content", "reason"),
    [
        (502, {"text": "<html>bad gateway"}, "bad gateway"),
        (401, {"json": {"error": "Unauthorized"}}, "Unauthorized"),
        (404, {"json": {"detail": "Not Found"}}, "Not Found"),
        (500, {"json": [1]}, "1"),
        (200, {"json": {"id": "c"}}, "cannot read the answer"),
        (200, {"text": "hello"}, "cannot read the answer"),
    ],
)
def test_answers_that_are_none_are_errors_too(call: Caller, status: int, content: Any, reason: str) -> None:
    with pytest.raises(ServerError, match=reason) as caught:
        call(Canned(completions=httpx.Response(status, **content)), "complete", "Hello")

    assert caught.value.status == status


def test_an_error_within_a_stream_is_raised(call: Caller) -> None:
    text = 'data: {"error": {"message": "engine died", "code": 500}}\n\n'

    with pytest.raises(ServerError, match="engine died"):
        call(Canned(completions=text), "stream_completion", "Hello")


def test_global_vectors_are_set_and_cleared_with_the_key_for_it(call: Caller) -> None:
    answer = {"status": "ok", "hook_points": ["post_mlp"], "layers_updated": [1]}
    canned = Canned(**{"steering/set": answer, "steering/clear": {"status": "ok"}})
    settings = {"steering_key": "secret", "api_key": "door"}

    update = call(canned, "set", VECTORS, decode_vectors=VECTORS, replace=True, settings=settings)
    call(canned, "clear", settings=settings)

    assert update == GlobalUpdate(hook_points=("post_mlp",), layers_updated=(1,))
    sent = json.loads(canned.asked[0].content)
    assert sorted(sent) == ["decode_vectors", "replace", "vectors"]
    assert sent["replace"] is True
    assert [asked.headers["x-headgate-key"] for asked in canned.asked] == ["secret", "secret"]


def test_a_module_is_registered_from_a_file_that_lies_here(call: Caller, tmp_path: Path) -> None:
    vectors = read_tier(VECTORS, model(), BASE)
    assert isinstance(vectors, PhaseVectors)
    save(tmp_path / "calm.safetensors", VectorFile(vectors=vectors, decode_vectors=vectors))
    canned = Canned(**{"steering/modules/register": {"status": "ok", **MODULE}})

    module = call(canned, "register", "calm", path=tmp_path / "calm.safetensors")

    assert (module.name, module.decode.sites, module.version) == ("calm", ("1.post_mlp",), 3)

    assert sorted(canned.body) == ["decode_vectors", "name", "vectors"]
    assert read_tier(canned.body["vectors"], model(), BASE) == vectors


def test_a_module_is_registered_from_a_file_of_another_tool(call: Caller, tmp_path: Path) -> None:
    torch.save(torch.arange(24.0).reshape(4, 6), tmp_path / "evil_response_avg_diff.pt")
    canned = Canned(**{"steering/modules/register": {"status": "ok", **MODULE}})

    call(canned, "register", "calm", path=f"{tmp_path / 'evil_response_avg_diff.pt'}@layer=1")

    expected = read_tier({"post_mlp": {1: np.arange(12.0, 18.0)}}, model(), BASE)
    assert read_tier(canned.body["vectors"], model(), BASE) == expected


def test_a_module_is_vectors_or_a_file(call: Caller, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not both"):
        call(Canned(), "register", "calm", VECTORS, path=tmp_path / "calm.json")


def test_modules_are_listed_and_unregistered(call: Caller) -> None:
    canned = Canned(**{"steering/modules": {"modules": ["a", "b"], "count": 2}, "steering/modules/unregister": {}})

    assert call(canned, "modules") == ["a", "b"]
    call(canned, "unregister", "a")

    assert canned.body == {"name": "a"}


def test_the_status_of_the_server_is_typed(call: Caller) -> None:
    shared = {"tiers": {"base": ["1.post_mlp"]}, **{name: MODULE[name] for name in ("prefill", "decode", "version")}}
    slots = [{"capacity": 8, "reserved": 2, "waiting": 1}]
    answer = {"global": shared, "modules": {"calm": MODULE}, "slots": slots, "is_consistent": True, "new": 1}

    status = call(Canned(steering=answer), "status")

    assert status.shared.tiers == {"base": ("1.post_mlp",)}
    assert status.modules["calm"].prefill.hash == "00ff"
    assert status.slots[0].waiting == 1


def test_what_can_be_steered_is_typed(call: Caller) -> None:
    answer = {
        "hook_points": {"post_mlp": [0, 1]},
        "num_layers": 2,
        "hidden_size": 8,
        "dtype": "bfloat16",
        "max_vectors_per_request": 4,
    }
    with_operations = {**answer, "op_hook_points": {"post_mlp": [1]}, "max_ops_per_site": 8}

    older = call(Canned(**{"steering/layers": answer}), "layers")
    layers = call(Canned(**{"steering/layers": with_operations}), "layers")

    assert (older.op_hook_points, older.max_ops_per_site) == ({}, 0)
    assert (layers.hook_points, layers.hidden_size) == ({"post_mlp": [0, 1]}, 8)
    assert (layers.op_hook_points, layers.max_ops_per_site) == ({"post_mlp": [1]}, 8)


def test_consumers_are_typed_and_asked_for_with_the_key_for_captures(call: Caller) -> None:
    consumer = {"name": "files", "consumer": "filesystem", "location": "worker", "reads_client_spec": True}
    canned = Canned(
        **{
            "capture/consumers": {
                "consumers": [{**consumer, "overload": "block"}],
                "count": 1,
                "sites": {"post_mlp": [3]},
            }
        }
    )

    found = call(canned, "consumers", settings={"capture_key": "rows"})

    assert (found.consumers[0].name, found.sites) == ("files", {"post_mlp": [3]})
    assert canned.asked[0].headers["x-headgate-key"] == "rows"


def test_results_of_several_prompts_are_listed(call: Caller) -> None:
    canned = Canned(completions={**COMPLETION, "capture_results": [{"files": RESULT}, None]})

    answer = call(canned, "complete", ["One", "Two"])

    assert [captured and list(captured) for captured in answer.captures] == [["files"], None]
    with pytest.raises(ValueError, match="captures"):
        assert answer.capture_results


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_that_come_with_the_answer_are_arrays(dtype: torch.dtype) -> None:
    rows = torch.randn(3, HIDDEN).to(dtype)
    positions = torch.tensor([0, 4, 9])
    others = {name: torch.arange(4, dtype=getattr(torch, name)) for name in ("int16", "int32")}
    data = safetensors.torch.save({"12.post_mlp": rows, "positions": positions, **others}, {"any": "thing"})
    payload = {"format": "safetensors", "num_bytes": len(data), "data": base64.b64encode(data).decode()}

    found = inline_rows(CaptureResult(status="ok", payload=[None, payload]), sample=1)

    np.testing.assert_array_equal(found["12.post_mlp"], rows.float().numpy())
    np.testing.assert_array_equal(found["positions"], positions.numpy())
    assert {name: (found[name].dtype.name, found[name].tolist()) for name in others} == {
        name: (name, [0, 1, 2, 3]) for name in others
    }


def test_a_result_without_rows_says_why() -> None:
    with pytest.raises(ValueError, match="more than an answer may hold"):
        inline_rows(CaptureResult(status="error", error="12 bytes are more than an answer may hold"))
    with pytest.raises(ValueError, match="no rows in it"):
        inline_rows(CaptureResult(status="ok", payload=["a.file"]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_hidden_state_of_a_choice_is_an_array(dtype: torch.dtype) -> None:
    state = torch.randn(HIDDEN).to(dtype)
    data = base64.b64encode(state.view(torch.uint8).numpy().tobytes()).decode()
    packed = {"dtype": str(dtype).removeprefix("torch."), "shape": [HIDDEN], "data": data, "position": 4}

    for given in (packed, state.tolist()):
        choice = Choice(index=0, text="", finish_reason="stop", raw={"hidden_states": given})
        assert choice.hidden_state is not None
        np.testing.assert_array_equal(choice.hidden_state, state.float().numpy())
    assert Choice(index=0, text="", finish_reason=None, raw={}).hidden_state is None
    with pytest.raises(ValueError, match="expected a hidden state"):
        _ = Choice(index=0, text="", finish_reason=None, raw={"hidden_states": "x"}).hidden_state


def test_the_trace_of_a_choice_is_as_the_server_sent_it() -> None:
    trace = {"positions": [3], "scores": {"anger": [0.5]}, "gates": {}, "actions": []}

    choice = Choice(index=0, text="", finish_reason=None, raw={"steering_trace": trace})

    assert choice.steering_trace == trace
    assert Choice(index=0, text="", finish_reason=None, raw={}).steering_trace is None


def test_the_client_needs_neither_vllm_nor_torch_nor_fastapi() -> None:
    program = (
        "import sys\n"
        "for name in ('vllm', 'torch', 'fastapi', 'pydantic', 'starlette', 'transformers'): sys.modules[name] = None\n"
        "from headgate.steering.client import Client, extra_body\n"
        "extra_body(steering_vectors={'post_mlp': {1: [1.0, 2.0]}})\n"
        "Client('http://localhost:1').close()\n"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_without_httpx_the_client_says_what_to_install() -> None:
    program = "import sys; sys.modules['httpx'] = None; import headgate.steering.client"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert "pip install 'headgate[client]'" in done.stderr
