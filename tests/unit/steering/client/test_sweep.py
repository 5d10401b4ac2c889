"""Sweeps by both clients against a server of canned answers: what is sent, the grid, and how failures are told."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import numpy as np
import pytest

from headgate.capture.schema.errors import RequestError
from headgate.steering import ops
from headgate.steering.client import AsyncClient, Cell, Client, PatchSweep, ServerError

GRID = {
    "metric": "recovered",
    "sites": ["0.post_mlp", "1.post_mlp"],
    "positions": [0, 2, 3],
    "source_positions": [0, 3, 4],
    "tokens": ["The", " $a", " b"],
    "skipped": [1],
    "clean": -0.5,
    "corrupt": -4.0,
    "num_cells": 6,
}
VALUES = [[0.0, 0.25, None], [1.0, -0.5, 0.125]]
CELLS = [
    {"site": site, "position": position, "value": VALUES[row][column]}
    for column, position in reversed(list(enumerate((0, 2, 3))))
    for row, site in enumerate(("0.post_mlp", "1.post_mlp"))
]
KEPT = {"status": "ok", "payload": {"kept_as": "x"}, "num_rows": 5, "num_bytes": 1}


class Server:
    """Answers a clean run and then a sweep; remembers what it was sent."""

    def __init__(self, *events: Any, kept: Any = KEPT, status: int = 200) -> None:
        self.events, self.kept, self.status = events, kept, status
        self.bodies: list[tuple[str, dict[str, Any], str | None]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.bodies.append((request.url.path, body, request.headers.get("x-headgate-key")))
        if request.url.path == "/v1/completions":
            choice = {"index": 0, "text": "", "finish_reason": "length"}
            results = dict.fromkeys(body.get("capture", {}), self.kept)
            return httpx.Response(200, json={"id": "c", "model": "m", "choices": [choice], "capture_results": results})
        if self.status != 200:
            error = {"message": "source.request: gone", "param": "source.request", "code": 400}
            return httpx.Response(self.status, json={"error": error})
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in self.events) + "data: [DONE]\n\n"
        return httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})


def sweep_of(server: Server, **fields: Any) -> PatchSweep:
    with Client("http://s", model="m", capture_key="k", transport=httpx.MockTransport(server)) as client:
        return client.patch_sweep("clean", "corrupt", " a", **fields)


async def sweep_async(server: Server, **fields: Any) -> PatchSweep:
    async with AsyncClient("http://s", model="m", capture_key="k", transport=httpx.MockTransport(server)) as client:
        return await client.patch_sweep("clean", "corrupt", " a", **fields)


@pytest.mark.parametrize("run", [sweep_of, lambda *given, **fields: asyncio.run(sweep_async(*given, **fields))])
def test_the_clean_run_is_kept_and_swept_into_the_corrupted_prompt(run: Any) -> None:
    server = Server(GRID, *CELLS)

    found = run(server, foil=" b", layers=[0, 1], positions=[0, 1, 2, 3])

    (first, clean, key), (second, sweep, same_key) = server.bodies
    name = clean["capture"]["memory"].pop("keep")
    assert (first, second, key, same_key) == ("/v1/completions", "/v1/patch_sweep", "k", "k")
    assert clean == {
        "model": "m",
        "prompt": "clean",
        "max_tokens": 1,
        "capture": {"memory": {"hooks": {"post_mlp": [0, 1]}, "positions": "all_prompt"}},
    }
    assert sweep == {
        "model": "m",
        "source": name,
        "prompt": "corrupt",
        "answer": " a",
        "foil": " b",
        "metric": "recovered",
        "at": {"hook": "post_mlp", "layers": [0, 1]},
        "positions": [0, 1, 2, 3],
    }
    np.testing.assert_array_equal(found.values, np.array(VALUES, float))
    assert (found.grid.skipped, found.grid.clean, found.grid.corrupt) == ((1,), -0.5, -4.0)
    assert found.best(2) == [Cell("1.post_mlp", 0, 1.0), Cell("0.post_mlp", 2, 0.25)]


def test_a_request_with_a_source_is_sent_with_the_key_to_capture() -> None:
    server = Server()
    with Client("http://s", model="m", capture_key="k", transport=httpx.MockTransport(server)) as client:
        client.complete("corrupt", steering_ops=[ops.patch("clean", 3, "0.post_mlp")])
        client.complete("corrupt", steering_ops=[ops.ablate([1.0], "0.post_mlp")])

    assert [key for _, _, key in server.bodies] == ["k", None]


def test_the_heat_map_in_letters_has_the_last_site_at_the_top() -> None:
    lines = sweep_of(Server(GRID, *CELLS)).text().splitlines()

    assert lines == [
        "1.post_mlp |@ =|",
        "0.post_mlp |-=?|",
        "0:'The' 2:' $a' 3:' b'",
        "recovered: ' ' -0.5 to '@' 1",
    ]


def test_the_heat_map_is_drawn() -> None:
    pytest.importorskip("matplotlib")

    figure = sweep_of(Server(GRID, *CELLS)).plot()

    figure.draw_without_rendering()
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["0.post_mlp", "1.post_mlp"]
    np.testing.assert_array_equal(np.ma.filled(figure.axes[0].images[0].get_array(), np.nan), np.array(VALUES, float))


@pytest.mark.parametrize(
    ("server", "told"),
    [
        (Server(GRID, *CELLS[:4]), "after 4 of 6 cells"),
        (Server(), "before it began"),
        (Server(GRID, CELLS[0], {"error": {"message": "too many", "code": 503}}), "too many"),
        (Server(status=400), "gone"),
        (Server(kept={"status": "error", "error": "do not fit"}), "was not captured: do not fit"),
    ],
)
def test_a_sweep_that_is_not_whole_is_an_error(server: Server, told: str) -> None:
    with pytest.raises(ServerError, match=told):
        sweep_of(server)


def test_the_field_of_a_refusal_is_told() -> None:
    with pytest.raises(ServerError) as refusal:
        sweep_of(Server(status=400))

    assert (refusal.value.field, refusal.value.status) == ("source.request", 400)
    assert not isinstance(refusal.value, RequestError)
