"""A sweep over HTTP: each cell equals a Hugging Face hook, what cannot be served is a 400, and the example runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from headgate.capture.engine.access.access_key import digest_of
from headgate.steering.client import Client, PatchSweep
from tests.deadlines import patience
from tests.fakes.server import Server, serving

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "patch_sweep.py"
CLEAN, CORRUPT = "The Eiffel Tower is in the city of", "The Colosseum is in the city of"
ANSWER, FOIL = " Paris", " Rome"
LAYERS = [0, 11, 20, 29]
SITES = json.dumps({"post_mlp": "all"})
COMMAND = ["-c", "from headgate.capture.cli import main; main()", "serve"]
FLAGS = [
    *("--served-model-name", "smollm2", "--dtype", "float32", "--enforce-eager", "--block-size", "32"),
    *("--max-model-len", "512", "--capture-consumers", "memory", "--capture-sites", SITES),
    *("--enable-steering", "--steering-op-sites", SITES),
]
MAX_ERROR = 1e-3
"""Of a difference of logits of 5 and more."""

pytestmark = pytest.mark.engine


KEYS = {"alice": "capture", "bob": "capture", "eve": "steer"}


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    entries = [{"name": name, "sha256": digest_of(f"key-of-{name}"), "roles": [role]} for name, role in KEYS.items()]
    keys.write_text(json.dumps({"keys": entries}))
    keys.chmod(0o600)
    with serving([*COMMAND, str(model_dir), *FLAGS, "--headgate-keys", str(keys)]) as running:
        yield running


def post(server: Server, path: str, who: str = "alice", padding: int = 0, **body: Any) -> httpx.Response:
    headers = {"X-Headgate-Key": f"key-of-{who}", "content-type": "application/json"}
    return httpx.post(
        f"{server.url}{path}", content=json.dumps(body) + " " * padding, headers=headers, timeout=patience(60)
    )


def client_of(server: Server) -> Client:
    return Client(server.url, capture_key="key-of-alice")


@pytest.fixture(scope="module")
def kept(server: Server) -> dict[str, Any]:
    """The name under which alice's rows of layer 3 are kept, as a source."""
    keep = {"memory": {"hooks": {"post_mlp": [3]}, "keep": "here"}}
    clean = post(server, "/v1/completions", model="smollm2", prompt=CLEAN, max_tokens=1, capture=keep)
    assert clean.json()["capture_results"]["memory"]["payload"]["kept_as"] == "here"
    return {"request": "here", "position": 1}


@pytest.fixture(scope="module")
def sweep(server: Server) -> PatchSweep:
    with client_of(server) as client:
        return client.patch_sweep(CLEAN, CORRUPT, ANSWER, foil=FOIL, metric="logit_diff", layers=LAYERS)


@torch.no_grad()
def expected(model_dir: Path) -> np.ndarray[Any, Any]:
    """``[layers, positions]``: the logit of the answer less the foil's, by Hugging Face."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    clean, corrupt = (torch.tensor([tokenizer.encode(text)]) for text in (CLEAN, CORRUPT))
    (answer,), (foil,) = tokenizer.encode(ANSWER), tokenizer.encode(FOIL)
    states = model(clean, output_hidden_states=True).hidden_states
    rows: dict[int, torch.Tensor] = {}
    for layer in LAYERS:
        handle = model.model.layers[layer].register_forward_hook(
            lambda _, __, output, layer=layer: rows.__setitem__(layer, output[0].clone())
        )
        model(clean)
        handle.remove()
    assert torch.allclose(rows[LAYERS[1]], states[LAYERS[1] + 1][0])

    def score(layer: int, position: int) -> float:
        def patch(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
            output = output.clone()
            output[0, position] = rows[layer][position]
            return output

        handle = model.model.layers[layer].register_forward_hook(patch)
        logits = model(corrupt).logits[0, -1]
        handle.remove()
        return float(logits[answer] - logits[foil])

    return np.array([[score(layer, position) for position in range(corrupt.shape[1])] for layer in LAYERS])


def test_every_cell_is_what_a_hugging_face_hook_makes_of_it(sweep: PatchSweep, model_dir: Path) -> None:
    wanted = expected(model_dir)

    assert sweep.grid.sites == tuple(f"{layer}.post_mlp" for layer in LAYERS)
    assert sweep.grid.tokens == ("The", " Col", "osse", "um", " is", " in", " the", " city", " of")
    np.testing.assert_allclose(sweep.values, wanted, atol=MAX_ERROR)
    assert wanted.max() - wanted.min() > 1000 * MAX_ERROR
    # After the last layer, the row of the last position is all that the answer sees.
    assert abs(sweep.values[-1, -1] - sweep.grid.clean) <= MAX_ERROR
    np.testing.assert_allclose(sweep.values[-1, :-1], sweep.grid.corrupt, atol=MAX_ERROR)


def test_positions_are_aligned_where_the_prompts_differ_in_length(server: Server) -> None:
    with client_of(server) as client:
        found = client.patch_sweep("The Louvre is in the city of", CORRUPT, ANSWER, metric="recovered", layers=[29])

    assert (found.grid.positions, found.grid.skipped) == ((0, 4, 5, 6, 7, 8), (1, 2, 3))
    assert found.grid.source_positions == (0, 3, 4, 5, 6, 7)
    assert abs(found.values[0, -1] - 1) <= MAX_ERROR


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"source": "nobody"}, "source.request"),
        ({"at": "3.mlp_out"}, "at"),
        ({"answer": " Paris Rome"}, "answer"),
        ({"positions": [9]}, "positions"),
        ({"layers": [3]}, "layers"),
    ],
)
def test_what_cannot_be_swept_is_a_400_that_names_its_field(
    server: Server, kept: dict[str, Any], changes: dict[str, Any], field: str
) -> None:
    body = {"prompt": CORRUPT, "source": kept["request"], "at": "3.post_mlp", "answer": ANSWER}

    refused = post(server, "/v1/patch_sweep", **{**body, **changes})

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert post(server, "/v1/patch_sweep", **body).status_code == 200


@pytest.mark.parametrize("padding", [0, 40_000], ids=["short body", "long body"])
@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_rows_are_their_clients_alone_on_every_route(
    server: Server, kept: dict[str, Any], route: str, padding: int
) -> None:
    def ask(who: str, **changes: Any) -> tuple[int, str | None]:
        operation = {"at": "3.post_mlp", "method": "replace", "source": {**kept, **changes}}
        prompt = {"prompt": CORRUPT} if route == "completions" else {"messages": [{"role": "user", "content": CORRUPT}]}
        body = {"model": "smollm2", **prompt, "max_tokens": 1, "steering_ops": [operation]}
        answer = post(server, f"/v1/{route}", who, padding, **body)
        return answer.status_code, answer.json().get("error", {}).get("param")

    assert ask("alice") == (200, None)
    assert ask("bob") == (400, "steering_ops[0].source.request")
    assert ask("alice", request="nobody") == (400, "steering_ops[0].source.request")
    assert ask("alice", position=99) == (400, "steering_ops[0].source.position")
    assert ask("alice", site="4.post_mlp") == (400, "steering_ops[0].source.site")
    assert ask("eve")[0] == 403


@pytest.mark.parametrize(("who", "status"), [("bob", 400), ("eve", 403)])
def test_a_sweep_needs_its_own_clients_rows(server: Server, kept: dict[str, Any], who: str, status: int) -> None:
    body = {"prompt": CORRUPT, "source": kept["request"], "at": "3.post_mlp", "answer": ANSWER}

    assert post(server, "/v1/patch_sweep", who, **body).status_code == status


def test_the_example_finds_where_the_fact_is(server: Server, tmp_path: Path) -> None:
    picture = tmp_path / "sweep.png"

    done = subprocess.run(
        [sys.executable, str(EXAMPLE), server.url, str(picture)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HEADGATE_KEY": "key-of-alice"},
    )
    print(done.stdout)

    assert done.returncode == 0, done.stderr
    assert "29.post_mlp |" in done.stdout
    assert "position  8 ' of'" in done.stdout
    assert picture.stat().st_size > 10_000
    assert len(EXAMPLE.read_text().splitlines()) < 60
