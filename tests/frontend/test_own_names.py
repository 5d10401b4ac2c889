"""A request whose file could not be written is refused before it runs; names that no client chose never collide."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headgate.capture import SamplingParams
from headgate.capture.schema.errors import RequestError
from tests.fakes.server import Server, serving
from tests.frontend.conftest import ENGINE, stop
from tests.frontend.test_http import FLAGS, MODULE

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def server(model_dir: Path, root: Path) -> Iterator[Server]:
    flags = [*FLAGS[: FLAGS.index("--capture-consumers")], "--capture-sites", '{"post_mlp": [3, 5]}']
    with serving([*MODULE, str(model_dir), *flags, "--capture-consumers", f"filesystem:root={root}"]) as running:
        yield running


def ask(server: Server, request_id: str | None, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    given = {"prompt": "Hi", **body} if path.endswith("completions") else body
    named = {} if request_id is None else {"request_id": request_id}
    spec = {"hooks": {"post_mlp": [3]}, **named, **given.pop("spec", {})}
    return server.post(path, **{"model": "tiny", "max_tokens": 2, "capture": {"filesystem": spec}, **given})


def refused(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "capture.filesystem.request_id"
    return str(error["message"])


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"n": 2}], ids=["whole", "stream", "samples"])
def test_a_request_whose_file_exists_is_refused_before_it_runs(server: Server, root: Path, body: Any) -> None:
    taken = root / "default" / ("again-1.safetensors" if "n" in body else "again.safetensors")
    taken.parent.mkdir(exist_ok=True)
    taken.write_bytes(b"rows of an earlier request")

    # vLLM takes paths out of what it answers.
    assert "<path> exists and is not overwritten" in refused(ask(server, "again", **body))
    assert taken.exists()
    taken.unlink()
    assert ask(server, "again", **body).status_code == 200


def test_a_folder_of_the_layout_raw_is_looked_for(server: Server, root: Path) -> None:
    (root / "default" / "deep").mkdir(parents=True, exist_ok=True)

    assert "exists" in refused(ask(server, "deep", spec={"layout": "raw"}))
    assert ask(server, "deep", spec={"layout": "shards"}).status_code == 200


def test_a_response_is_refused_before_it_begins(server: Server, root: Path) -> None:
    (root / "default").mkdir(exist_ok=True)
    (root / "default" / "told.safetensors").write_bytes(b"")
    body = {"capture": {"filesystem": {"hooks": {"post_mlp": [3]}, "request_id": "told"}}, "max_output_tokens": 2}

    answer = server.post("/v1/responses", model="tiny", input="Hi", stream=True, **body)

    assert "exists" in refused(answer)


def test_several_prompts_cannot_share_a_request_id(server: Server) -> None:
    prompts = ["Hi", "Ho"]

    assert "all prompts of this call would write" in refused(ask(server, "both", prompt=prompts))
    assert ask(server, None, prompt=prompts).status_code == 200
    assert ask(server, "both", prompt=prompts[:1]).status_code == 200


def test_prompts_of_an_llm_cannot_share_a_request_id_and_need_none(model_dir: Path, tmp_path: Path) -> None:
    from vllm import LLM

    from headgate.capture import additional_config

    config = additional_config(consumers=[f"filesystem:root={tmp_path}"], sites={"post_mlp": [3]})
    llm = LLM(str(model_dir), additional_config=config, **ENGINE)
    try:
        spec: dict[str, Any] = {"hooks": {"post_mlp": [3]}}
        named = SamplingParams(max_tokens=1, capture={"filesystem": {**spec, "request_id": "a"}})
        plain = SamplingParams(max_tokens=1, capture={"filesystem": spec})
        with pytest.raises(RequestError, match=r"^capture\.filesystem\.request_id: .*a\.safetensors is being written"):
            llm.generate(["Hi", "Ho"], named, use_tqdm=False)
        assert len(llm.generate(["Hi", "Ho"], plain, use_tqdm=False)) == 2
        assert len(llm.generate(["Hi"], named, use_tqdm=False)) == 1
    finally:
        stop(llm.llm_engine)
