"""Attention patterns in chunks of a stream and in files: the answer's, bit for bit, and Hugging Face's; and lenses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headgate.consumers.attention import Patterns, fetch_patterns
from headgate.consumers.reader import open_capture
from tests.engine.hf_reference import own_process
from tests.engine.test_attention_patterns import TOLERANCE, expected_patterns
from tests.fakes.server import Server, serving

LAYERS = [5, 17]
PROMPT = [100 + (97 * n) % 5000 for n in range(90)]
NUM_OUTPUT = 30
COMMAND = ["-c", "from headgate.capture.cli import main; main()", "serve"]
FLAGS = [
    *("--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager", "--max-model-len", "256"),
    *("--max-num-batched-tokens", "32", "--max-num-seqs", "4"),
    *("--stream-interval", "3"),  # a chunk takes the parts of several steps
    *("--capture-sites", json.dumps({"q": LAYERS, "k": LAYERS, "post_mlp": LAYERS})),
]
READS = json.dumps({"consumer": "attention", "params": {}})

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    files = f"filesystem:root={tmp_path_factory.mktemp('files')},reads={READS}"
    with serving([*COMMAND, str(model_dir), *FLAGS, "--capture-consumers", "attention", "lens", files]) as running:
        yield running


def complete(server: Server, wanted: dict[str, Any], **fields: Any) -> Any:
    return server.post(
        "/v1/completions",
        **{"model": "tiny", "prompt": PROMPT, "max_tokens": NUM_OUTPUT, "temperature": 0, "ignore_eos": True},
        **{"return_token_ids": True, "capture": wanted, **fields},
    )


def chunks_of(server: Server, consumer: str, wanted: dict[str, Any]) -> tuple[list[tuple[int, Any]], list[int], Any]:
    """The payloads of chunks, with the number of rows of tokens that the client has by then; tokens; the answer's."""
    answer = complete(server, {consumer: wanted}, stream=True)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    chunks: list[tuple[int, Any]] = []
    tokens: list[int] = []
    last: Any = None
    for document in map(json.loads, lines):
        for choice in document["choices"]:
            tokens += choice.get("token_ids") or []
            if (found := choice.get("capture_results")) is not None:
                chunks.append((len(PROMPT) + len(tokens) - 1, found[consumer]["payload"]))
        last = document.get("capture_results") or last
    assert last[consumer]["status"] == "ok"
    return chunks, tokens, last[consumer]["payload"]


def streamed(server: Server, wanted: dict[str, Any]) -> tuple[list[Any], list[int], Patterns]:
    """The payloads of chunks, the tokens, and the patterns of the answer."""
    chunks, tokens, last = chunks_of(server, "attention", wanted)
    for num_rows, payload in chunks:
        assert fetch_patterns(payload).queries[-1] < num_rows
    return [payload for _, payload in chunks], tokens, fetch_patterns(last)


def test_chunks_of_a_stream_have_what_a_lens_reads_of_their_tokens(server: Server) -> None:
    wanted = {"layers": LAYERS, "positions": "all", "top": 4, "tokens": [5, 9]}
    chunks, tokens, whole = chunks_of(server, "lens", wanted)
    quiet = complete(server, {"lens": wanted}).json()

    assert len(chunks) >= 3
    assert whole["positions"] == list(range(len(PROMPT) + NUM_OUTPUT - 1))
    positions = [position for _, payload in chunks for position in payload["positions"]]
    assert positions == whole["positions"][: len(positions)]
    assert len(positions) > len(PROMPT)
    assert all(payload["positions"][-1] < num_rows for num_rows, payload in chunks)
    expected = quiet["capture_results"]["lens"]["payload"]
    assert quiet["choices"][0]["token_ids"] == tokens
    for layer, of_layer in whole["layers"].items():
        assert {*of_layer} == {"ids", "tokens", "logprobs", "token_logprobs", "token_ranks"}
        for name, rows in of_layer.items():
            assert [row for _, payload in chunks for row in payload["layers"][layer][name]] == rows[: len(positions)]
        assert [each[0] for each in of_layer["ids"]] == [each[0] for each in expected["layers"][layer]["ids"]]
        for name in ("logprobs", "token_logprobs"):
            found, other = (torch.tensor(each["layers"][layer][name]) for each in (whole, expected))
            torch.testing.assert_close(found, other, atol=1e-4, rtol=0)


@pytest.mark.parametrize("top", [None, 5])
def test_chunks_of_a_stream_have_the_patterns_of_their_tokens(server: Server, model_dir: Path, top: int | None) -> None:
    """A prompt in chunks of 32 tokens, and generated ones."""
    chunks, tokens, whole = streamed(server, {"layers": LAYERS, "queries": "all", "top": top})
    together = fetch_patterns(chunks)
    num_rows = len(PROMPT) + NUM_OUTPUT - 1

    assert len(chunks) >= 3
    assert fetch_patterns(chunks[0]).queries.tolist()[: len(PROMPT)] == list(range(len(PROMPT)))
    assert whole.queries.tolist() == list(range(num_rows))
    count = len(together.queries)
    assert together.queries.tolist() == list(range(count))
    assert count > len(PROMPT)
    for name in whole:
        found, expected = together[name], whole[name][:count]
        assert torch.equal(found, expected[:, :, : found.shape[2]] if found.dim() == 3 else expected)
    with own_process() as executor:
        [reference] = executor.submit(expected_patterns, model_dir, [[*PROMPT, *tokens[:-1]]]).result()
    for layer in LAYERS:
        rows = reference[layer].transpose(0, 1)
        if top is None:
            assert float((whole[f"{layer}.attention"] - rows).abs().max()) <= TOLERANCE
        else:
            assert torch.allclose(whole[f"{layer}.attention.values"], rows.topk(top).values, atol=TOLERANCE)


def test_an_answer_that_is_not_streamed_has_the_same_patterns(server: Server) -> None:
    wanted = {"layers": LAYERS, "queries": "all_generated"}
    whole = fetch_patterns(complete(server, {"attention": wanted}).json()["capture_results"]["attention"]["payload"])
    _, _, expected = streamed(server, wanted)

    assert whole.queries.tolist() == expected.queries.tolist()
    for name in expected:
        torch.testing.assert_close(whole[name], expected[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize("top", [None, 5])
def test_files_have_the_bits_of_the_answer(server: Server, top: int | None) -> None:
    wanted = {"layers": LAYERS, "queries": "all", "top": top}
    results = complete(server, {"attention": wanted, "filesystem": wanted}).json()["capture_results"]
    patterns = fetch_patterns(results["attention"]["payload"])
    assert results["filesystem"]["status"] == "ok"
    stored = open_capture(*results["filesystem"]["payload"]["paths"])

    assert stored.positions.tolist() == patterns.queries.tolist() == list(range(len(PROMPT) + NUM_OUTPUT - 1))
    for layer in LAYERS:
        found = stored.outputs(f"{layer}.q")
        assert {*found} == ({"pattern"} if top is None else {"keys", "values", "rest"})
        for name, rows in found.items():
            expected = patterns[f"{layer}.attention" + ("" if name == "pattern" else f".{name}")]
            assert torch.equal(torch.from_numpy(rows.copy()).to(expected.dtype), expected)
