"""The studio in Chromium before a real server: it shows what the API returns, and nobody can put code into it."""

from __future__ import annotations

import base64
import http.server
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from playwright.sync_api import Browser, BrowserContext, Locator, Page, Route, expect, sync_playwright
from safetensors.torch import load, load_file, save_file

from headgate.capture.engine.access.access_key import digest_of
from headgate.capture.lens import LensKind
from headgate.capture.lens import save as save_lens
from headgate.steering import probes
from tests.deadlines import patience
from tests.fakes.server import Server, serving
from tests.source_tree import ROOT

CHROMIUM = os.environ.get("HEADGATE_CHROMIUM") or shutil.which("chromium")
SITES = json.dumps({"post_mlp": "all"})
READ_SITES = json.dumps({"post_mlp": "all", "q": [5], "k": [5]})
KEY, OTHER_KEY = "key-of-alice", "key-of-bob"
COMMAND = ["-c", "from headgate.capture.cli import main; main()", "serve"]
BODY_BYTES = 1 << 20
SERVER = json.dumps({"headgate": {"server": {"max_body_bytes": BODY_BYTES, "max_buffered_bytes": BODY_BYTES}}})
FLAGS = [
    *("--additional-config", SERVER),
    *("--served-model-name", "smollm2", "--dtype", "float32", "--enforce-eager", "--block-size", "32"),
    *("--max-model-len", "1024", "--capture-sites", READ_SITES, "--enable-steering", "--steering-op-sites", SITES),
]
LAYER = 12
QUESTION = "How was your day?"
EVIL = '<img src=x onerror="window.bad=1"><script>window.bad=1</script>'
SIZE = 576

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of the server's captures."""
    return tmp_path_factory.mktemp("captures")


@pytest.fixture(scope="module")
def server(model_dir: Path, files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = flags_in(tmp_path_factory.mktemp("studio"), files)
    with serving([*COMMAND, str(model_dir), *flags]) as running:
        yield running


def flags_in(folder: Path, root: Path) -> list[str]:
    """The server's flags, with keys, a probe, an SAE and a Jacobian lens in files of a folder; captures in `root`."""
    keys = folder / "keys.json"
    alice = {"name": "alice", "sha256": digest_of(KEY), "roles": ["capture", "steer"]}
    bob = {"name": "bob", "sha256": digest_of(OTHER_KEY), "roles": ["capture"]}
    keys.write_text(json.dumps({"keys": [alice, bob]}))
    keys.chmod(0o600)
    weight = np.random.default_rng(3).normal(size=(1, SIZE)).astype(np.float32)
    probes.save(folder / "mood.safetensors", probes.from_direction(weight[0], at=f"{LAYER}.post_mlp", name="mood"))
    sae = save_sae(folder)
    consumers = ["inline:max_bytes=4000000", "attention", "lens", f"features:saes={json.dumps({'words': str(sae)})}"]
    by_name = json.dumps({"mood": str(folder / "mood.safetensors")})
    consumers.append(f"filesystem:root={root},probes={by_name}")
    random = np.random.default_rng(5).normal(size=(SIZE, SIZE)).astype(np.float32) / 100
    matrices = {layer: np.eye(SIZE, dtype=np.float32) + random * layer for layer in range(6)}
    save_lens(folder / "j.safetensors", LensKind.JACOBIAN, matrices)
    files = ["--probes", f"mood={folder / 'mood.safetensors'}", "--saes", f"words={sae}"]
    files += ["--lenses", f"j={folder / 'j.safetensors'}"]
    return [*FLAGS, "--headgate-keys", str(keys), *files, "--capture-consumers", *consumers]


def save_sae(folder: Path) -> Path:
    """An SAE of random directions in SAELens' format, imported, with a hostile label."""
    decoder = torch.nn.functional.normalize(torch.randn(64, SIZE, generator=torch.Generator().manual_seed(0)), dim=1)
    biases = {"b_enc": torch.full((64,), -3.0), "b_dec": torch.zeros(SIZE)}
    about = {"architecture": "standard", "d_in": SIZE, "d_sae": 64, "dtype": "float32", "apply_b_dec_to_input": True}
    about |= {"normalize_activations": "none", "metadata": {"hook_name": f"blocks.{LAYER}.hook_resid_post"}}
    (folder / "words").mkdir()
    save_file(
        {"W_enc": decoder.T.contiguous(), "W_dec": decoder, **biases}, folder / "words" / "sae_weights.safetensors"
    )
    (folder / "words" / "cfg.json").write_text(json.dumps(about))
    (folder / "labels.jsonl").write_text(
        "".join(json.dumps({"id": i, "text": f"{i} {EVIL}"}) + "\n" for i in range(64))
    )
    target = folder / "words.safetensors"
    for arguments in (["import", folder / "words", "--to", target], ["labels", target, folder / "labels.jsonl"]):
        command = [sys.executable, "-c", COMMAND[1], "sae", *map(str, arguments)]
        subprocess.run(command, check=True, timeout=patience(120))
    return target


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # A test machine's root has no sandbox to enter.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def context(chromium: Browser) -> Iterator[BrowserContext]:
    found = chromium.new_context(viewport={"width": 1280, "height": 900})
    found.set_default_timeout(patience(15) * 1000)
    expect.set_options(timeout=patience(15) * 1000)
    yield found
    found.close()


@pytest.fixture
def page(context: BrowserContext, server: Server) -> Iterator[Page]:
    """The studio with the key; whatever it says on its console is an error."""
    opened = context.new_page()
    said: list[str] = []
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("console", lambda line: said.append(line.text) if "Content Security Policy" in line.text else None)
    enter(opened, server)
    yield opened
    assert opened.evaluate("window.bad") is None
    assert said == []
    for name in httpx.get(f"{server.url}/v1/steering/modules").json()["modules"]:
        call(server, "/v1/steering/modules/unregister", name=name)
    for rule in look(server, "/v1/steering/rules")["rules"]:
        call(server, "/v1/steering/rules/unregister", name=rule["name"])


def enter(page: Page, server: Server, key: str = KEY, url: str = "") -> None:
    page.goto(url or f"{server.url}/headgate/")
    page.get_by_role("button", name="Keys").click()
    page.get_by_label("headgate key").fill(key)
    page.get_by_role("button", name="Use these keys").click()
    expect(page.get_by_label("Layer", exact=True)).to_be_visible()


def call(server: Server, path: str, /, **body: Any) -> Any:
    headers = {"X-Headgate-Key": KEY}
    answer = httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=patience(60))
    assert answer.status_code == 200, answer.text
    return answer.json()


def look(server: Server, path: str) -> Any:
    return httpx.get(f"{server.url}{path}", headers={"X-Headgate-Key": KEY}, timeout=patience(60)).json()


def counted(server: Server, metric: str) -> float:
    """The sum of a metric over its labels."""
    text = httpx.get(f"{server.url}/metrics", headers={"X-Headgate-Key": KEY}, timeout=patience(60)).text
    lines = [line for line in text.splitlines() if re.match(rf"{metric}[{{ ]", line)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def number(cell: Locator, name: str = "data-value") -> float:
    return float(cell.get_attribute(name) or "nan")


def ids_of(server: Server, answer: Any, text: str = QUESTION) -> list[int]:
    """The tokens of a chat's prompt and answer."""
    prompt = call(server, "/tokenize", model="smollm2", messages=[{"role": "user", "content": text}])["tokens"]
    return [*prompt, *answer["choices"][0]["token_ids"]]


def chat(server: Server, text: str = QUESTION, **fields: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    wanted = {"temperature": 0, "max_tokens": 16, "logprobs": True, "return_token_ids": True, "messages": messages}
    return call(server, "/v1/chat/completions", model="smollm2", **{**wanted, **fields})


def rows_of(answer: Any) -> dict[str, torch.Tensor]:
    return load(base64.b64decode(answer["capture_results"]["inline"]["payload"]["data"]))


def show(page: Page, view: str) -> None:
    page.get_by_role("navigation").get_by_role("button", name=view, exact=True).click()


def prepare(page: Page, tokens: int = 16, layer: int = LAYER) -> None:
    page.get_by_label("Layer", exact=True).select_option(str(layer))
    page.get_by_text("Settings").click()
    page.get_by_label("Tokens at most").fill(str(tokens))
    page.get_by_label("Tokens at most").press("Tab")
    page.get_by_text("Settings").click()


def ask(page: Page, text: str = QUESTION, runs: int = 1) -> Locator:
    """Ask, and return the runs of the answer."""
    page.get_by_label("Your message").fill(text)
    page.get_by_label("Your message").press("Enter")
    turn = page.locator("li.turn.assistant").last
    expect(turn.locator(".run[data-status=done]")).to_have_count(runs, timeout=patience(60) * 1000)
    return turn.locator(".run")


def series_of(run: Locator, name: str) -> list[float]:
    """A run's numbers, token by token, as the card of each token shows them; NaN where it shows none."""
    found = []
    group = run.get_by_role("group").last
    group.focus()
    group.press("Escape")
    for index in range(run.locator(".token").count()):
        group.press("ArrowRight")
        expect(run.locator(".token.at")).to_have_attribute("data-i", str(index))
        cell = run.locator(f'.card [data-series="{name}"] td')
        found.append(float(cell.get_attribute("data-value") or "nan") if cell.count() else float("nan"))
    return found


def test_every_token_shows_the_numbers_that_the_api_returns(page: Page, server: Server) -> None:
    page.get_by_label("probe mood").check()
    prepare(page)
    (run,) = ask(page).all()

    answer = chat(server, capture={"inline": {"hooks": {"post_mlp": [LAYER]}, "positions": "all"}})
    (choice,) = answer["choices"]
    rows = rows_of(answer)[f"{LAYER}.post_mlp"]
    begin = answer["usage"]["prompt_tokens"]
    gate = {"name": "watch", "when": {"probe": "mood", "above": 0}, "then": "observe"}
    trace = chat(server, steering_gates=[gate], return_steering_trace=True)["choices"][0]["steering_trace"]
    rows_read = zip(trace["positions"], trace["scores"]["mood"], strict=True)
    answered = [score for position, score in rows_read if position >= begin]
    assert run.get_by_role("group").last.inner_text().strip() == choice["message"]["content"].strip()
    norms, surprise, scores = (series_of(run, name) for name in ("norm", "surprise", "score:mood"))
    assert norms[:-1] == pytest.approx(rows.norm(dim=1)[begin:].tolist(), rel=1e-4)
    assert np.isnan(norms[-1])  # the last token never passes through the model
    logprobs = [-token["logprob"] for token in choice["logprobs"]["content"]]
    assert surprise == pytest.approx(logprobs, abs=2e-3)
    assert scores[:-1] == pytest.approx(answered, rel=1e-2, abs=0.05)


def test_a_conversation_goes_on_with_the_answers_text_and_branches_stay(page: Page, server: Server) -> None:
    prepare(page)
    ask(page, "What is the capital of France?")
    (run,) = ask(page, "And of Italy?").all()

    first = chat(server, "What is the capital of France?")["choices"][0]
    assert first["finish_reason"] == "stop"  # its last token is a special one, which is shown and is no text
    texts = ["What is the capital of France?", first["message"]["content"], "And of Italy?"]
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    body = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 16}
    told = call(server, "/v1/chat/completions", **body)["choices"][0]["message"]["content"]
    assert run.get_by_role("group").last.inner_text().removesuffix("<|im_end|>").strip() == told.strip()
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edit your message").fill("Name a colour.")
    page.get_by_role("button", name="Send as a new branch").click()
    expect(page.locator(".run[data-status=done]")).to_have_count(1)
    expect(page.locator(".turn.user .text")).to_have_text("Name a colour.")
    page.get_by_role("button", name="Branch before").click()
    expect(page.locator(".turn.user .text")).to_have_text(["What is the capital of France?", "And of Italy?"])


def test_the_grid_shows_norms_and_cosines_of_all_layers(page: Page, server: Server) -> None:
    prepare(page, tokens=8)
    ask(page)
    page.get_by_role("button", name="Layer by layer").click()
    page.get_by_role("button", name="Read all layers").click()
    canvas = page.get_by_role("application")
    expect(canvas).to_be_visible()

    answer = chat(server, max_tokens=9, capture={"inline": {"hooks": {"post_mlp": "all"}, "positions": "all"}})
    rows = rows_of(answer)
    canvas.focus()
    for layer, column in ((0, 0), (1, 1), (2, 2), (3, 3)):
        for press in ("ArrowRight", "ArrowUp")[: 1 if layer == 0 else 2]:
            canvas.press(press)
        here, before = rows[f"{layer}.post_mlp"][column], rows[f"{max(0, layer - 1)}.post_mlp"][column]
        expect(page.locator(".cell b")).to_have_text(f"{layer}.post_mlp")
        shown = {
            name: page.locator(f'.cell [data-value="{name}"] td').get_attribute("data-value")
            for name in ("norm", "cosine")
        }
        assert float(shown["norm"] or "nan") == pytest.approx(float(here.norm()), rel=1e-4)
        if layer:
            cosine = float(torch.nn.functional.cosine_similarity(here, before, dim=0))
            assert float(shown["cosine"] or "nan") == pytest.approx(cosine, abs=1e-4)


def test_a_long_grid_is_read_in_parts_that_end_their_prompts(page: Page, server: Server) -> None:
    """The server computes each prompt anew; log-probabilities are asked for once."""
    text = " ".join(["sea"] * 180)
    bodies: list[Any] = []
    page.on(
        "request", lambda sent: bodies.append(sent.post_data_json) if sent.url.endswith("/v1/completions") else None
    )
    prepare(page, tokens=2)
    ask(page, text)
    page.get_by_role("button", name="Layer by layer").click()
    page.get_by_role("button", name="Read all layers").click()
    canvas = page.get_by_role("application")
    expect(canvas).to_be_visible(timeout=patience(60) * 1000)

    first, *parts = bodies
    bounds = [tuple(part["capture"]["inline"]["positions"].values()) for part in parts]
    assert len(parts) > 1
    assert ["prompt_logprobs" in body for body in bodies] == [True] + [False] * len(parts)
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
    assert [part["prompt"] for part in parts] == [first["prompt"][:stop] for _, stop in bounds]
    answer = chat(server, text, max_tokens=1, capture={"inline": {"hooks": {"post_mlp": [0]}, "positions": "all"}})
    column = bounds[1][0] + 1
    canvas.focus()
    for _ in range(column + 1):
        canvas.press("ArrowRight")
    shown = page.locator('.cell [data-value="norm"] td').get_attribute("data-value")
    assert float(shown or "nan") == pytest.approx(float(rows_of(answer)["0.post_mlp"][column].norm()), rel=1e-3)


@pytest.mark.parametrize("name", ["logit", "j"])
def test_the_lens_shows_what_its_consumer_answers(page: Page, server: Server, name: str) -> None:
    prepare(page, tokens=4)
    ask(page, "What is the capital of France?")
    page.get_by_role("button", name="Layer by layer").click()
    page.get_by_label("Lens").select_option(name)
    page.get_by_label("Rank of the token").fill(" Paris")
    page.get_by_label("Rank of the token").press("Tab")
    page.get_by_role("button", name="Read all layers").click()
    canvas = page.get_by_role("application")
    expect(canvas).to_be_visible()
    page.get_by_label("Shows").select_option("rank")

    wanted = {"lens": name, "layers": "all", "positions": "all", "top": 5, "tokens": [" Paris"]}
    told = chat(server, "What is the capital of France?", max_tokens=4, capture={"lens": wanted})
    lens = told["capture_results"]["lens"]["payload"]
    canvas.focus()
    for layer in range(6):
        canvas.press("ArrowUp" if layer else "ArrowRight")
        expect(page.locator(".cell b")).to_have_text(f"{layer}.post_mlp")
        expected = lens["layers"][str(layer)]
        shown = page.locator(".cell li")
        logprobs = [float(each.get_attribute("data-logprob") or "nan") for each in shown.all()]
        assert logprobs == pytest.approx(expected["logprobs"][0], abs=1e-3)
        assert page.locator('.cell [data-value="rank"] td').inner_text() == str(expected["token_ranks"][0][0])


def test_attention_shows_what_its_consumer_answers(page: Page, server: Server) -> None:
    prepare(page, tokens=4)
    ask(page)
    show(page, "Attention")
    page.get_by_role("button", name="Read its attention").click()
    page.get_by_role("button", name="Head 3").click()
    pattern = page.get_by_role("application")
    pattern.focus()
    for _ in range(3):
        pattern.press("ArrowDown")
    keys = page.locator("[data-key]")
    expect(keys).to_have_count(3)

    answer = chat(server, max_tokens=4)
    prompt = call(server, "/tokenize", model="smollm2", messages=[{"role": "user", "content": QUESTION}])["tokens"]
    ids = [*prompt, *answer["choices"][0]["token_ids"]]
    wanted = {"attention": {"layers": [5], "heads": "all", "queries": [2]}}
    told = call(server, "/v1/completions", model="smollm2", prompt=ids, max_tokens=1, capture=wanted, capture_wait=True)
    (weights,) = load(base64.b64decode(told["capture_results"]["attention"]["payload"]["data"]))["5.attention"]
    shown = {
        int(each.get_attribute("data-key") or -1): float(each.get_attribute("data-value") or 0) for each in keys.all()
    }
    assert shown == pytest.approx({key: float(weights[3, key]) for key in range(3)}, abs=1e-4)


def test_features_are_those_of_the_consumer_and_one_of_them_steers(page: Page, server: Server) -> None:
    page.get_by_label("Features of").select_option("words")
    prepare(page, tokens=6)
    ask(page)
    show(page, "Features")
    rows = page.locator("[data-feature]")
    found = {
        int(row.get_attribute("data-feature") or -1): float(row.locator("[data-most]").get_attribute("data-most") or 0)
        for row in rows.all()
    }

    told = chat(server, max_tokens=6, capture={"features": {"sae": "words", "positions": "all", "top": 20}})
    payload = told["capture_results"]["features"]["payload"]
    expected: dict[int, float] = {}
    for ids, values in list(zip(payload["ids"], payload["values"], strict=True))[1:]:
        for feature, value in zip(ids, values, strict=True):
            expected[feature] = max(value, expected.get(feature, 0.0))
    assert found == pytest.approx(expected, rel=1e-3)
    assert EVIL in rows.first.inner_text()
    bars = rows.first.locator("[data-bar]")
    assert max(number(bar, "data-bar") for bar in bars.all()[1:]) == pytest.approx(max(expected.values()), rel=1e-3)
    page.get_by_label("Search labels").fill("7 <img")
    expect(rows).to_have_count(sum(str(feature).endswith("7") for feature in expected))
    rows.first.get_by_role("button", name="Steer with it").click()
    page.get_by_role("slider").fill("60")
    show(page, "Chat")
    _, steered = ask(page, runs=2).all()
    feature = next(feature for feature in sorted(expected, key=expected.__getitem__, reverse=True) if feature % 10 == 7)
    edit = {"sae": "words", "feature": feature, "add": 60}
    user = {"role": "user", "content": QUESTION}
    before = {"role": "assistant", "content": told["choices"][0]["message"]["content"]}
    messages = [user, before, user]
    body = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 6, "steering_features": [edit]}
    answer = call(server, "/v1/chat/completions", **body)["choices"][0]["message"]["content"]
    assert steered.get_by_role("group").last.inner_text().strip() == answer.strip()


GLAD = [f"I feel wonderful and full of joy when I think about {topic}." for topic in ("the weather", "my work")]
SAD = [f"I feel terrible and full of sorrow when I think about {topic}." for topic in ("the weather", "my work")]


def make_vector(page: Page, name: str = "joy") -> None:
    show(page, "Steer")
    page.get_by_label("Prompts that show it, one a line").fill("\n".join(GLAD))
    page.get_by_label("Prompts that show the opposite").fill("\n".join(SAD))
    page.get_by_label("Name").fill(name)
    page.get_by_label("Site", exact=True).select_option(f"{LAYER}.post_mlp")
    page.get_by_role("button", name="Make it").click()
    expect(page.locator("svg circle").first).to_be_visible()


def test_a_vector_is_made_saved_registered_and_compared(page: Page, server: Server, tmp_path: Path) -> None:
    prepare(page)
    ask(page)
    make_vector(page)
    with page.expect_download() as saving:
        page.get_by_role("button", name="Save as a file").click()
    saving.value.save_as(tmp_path / "joy.safetensors")
    page.get_by_role("button", name="Register on the server").click()
    expect(page.get_by_text("registered, at")).to_be_visible()
    page.get_by_label("Scale of joy").fill("4")
    assert "relative dose" in page.locator(".dose").inner_text()
    show(page, "Chat")
    page.get_by_role("button", name="New conversation").click()
    page.get_by_label("cosine to joy").check()
    plain, steered = ask(page, runs=2).all()
    expect(steered.get_by_text("nats likelier")).to_be_visible()

    spec = {"inline": {"hooks": {"post_mlp": [LAYER]}, "positions": "last_prompt"}}
    glad, sad = (
        torch.stack([rows_of(chat(server, text, max_tokens=1, capture=spec))[f"{LAYER}.post_mlp"][0] for text in texts])
        for texts in (GLAD, SAD)
    )
    expected = glad.mean(0) - sad.mean(0)
    made = load_file(tmp_path / "joy.safetensors")[f"vectors/{LAYER}.post_mlp"]
    assert torch.allclose(made, expected, atol=2e-3)
    told = chat(server, steering_module_ref=["joy", 4.0])
    (told_plain,) = chat(server)["choices"]
    assert steered.get_by_role("group").last.inner_text().strip() == told["choices"][0]["message"]["content"].strip()
    assert plain.get_by_role("group").last.inner_text().strip() == told_plain["message"]["content"].strip()
    ids = told["choices"][0]["token_ids"]
    prompt = call(server, "/tokenize", model="smollm2", messages=[{"role": "user", "content": QUESTION}])["tokens"]
    scored = call(server, "/v1/completions", model="smollm2", prompt=[*prompt, *ids], max_tokens=1, prompt_logprobs=0)[
        "choices"
    ][0]["prompt_logprobs"][len(prompt) :]
    without = [entry[str(token)]["logprob"] for entry, token in zip(scored, ids, strict=True)]
    with_it = [token["logprob"] for token in told["choices"][0]["logprobs"]["content"]]
    assert series_of(steered, "difference") == pytest.approx(np.subtract(with_it, without), abs=5e-3)
    rows = rows_of(chat(server, capture={"inline": {"hooks": {"post_mlp": [LAYER]}, "positions": "all"}}))
    cosines = torch.nn.functional.cosine_similarity(rows[f"{LAYER}.post_mlp"], made[None])
    assert series_of(plain, "score:cosine joy")[:-1] == pytest.approx(cosines[len(prompt) :].tolist(), abs=2e-3)


def add_gate(page: Page, where: str | None = None) -> None:
    """Register a vector, and add a gate with it that fires at every token, or at those of a phase."""
    prepare(page)
    make_vector(page)
    page.get_by_role("button", name="Register on the server").click()
    expect(page.get_by_text("registered, at")).to_be_visible()
    page.get_by_role("checkbox", name="joy", exact=True).uncheck()
    show(page, "Dynamic")
    page.get_by_label("When").select_option("cosine joy")
    page.get_by_label("Threshold").fill("-1")
    if where is not None:
        page.get_by_label("where").select_option(where)
    page.get_by_label("then").select_option("joy")
    page.get_by_label("times").fill("4")
    page.get_by_role("button", name="Add the gate").click()


def test_a_gate_fires_and_its_trace_is_under_the_answer(page: Page, server: Server) -> None:
    add_gate(page)
    when = f"When the cosine to joy at {LAYER}.post_mlp is above -1 at a token"
    sentence = f"{when}, add joy \N{MULTIPLICATION SIGN} 4 for the rest of the request."
    expect(page.get_by_text(sentence)).to_be_visible()
    show(page, "Chat")
    _, gated = ask(page, runs=2).all()

    when = {"cosine": "joy", "at": f"{LAYER}.post_mlp", "above": -1}
    gate = {"name": "g", "when": when, "then": {"module": "joy", "scale": 4}, "scope": "rest_of_request"}
    told = chat(server, steering_gates=[gate], return_steering_trace=True)["choices"][0]
    assert gated.get_by_role("group").last.inner_text().strip() == told["message"]["content"].strip()
    applied = sum(value > 0 for value in told["steering_trace"]["gates"]["g"]["applied"])
    expect(gated.locator("[data-gate]")).to_contain_text(f"steered {applied}")
    assert applied > 16


def check_clauses(page: Page, server: Server) -> None:
    """Assert that phases read as clauses in the sentences of rules."""
    below = {"cosine": "joy", "at": f"{LAYER}.post_mlp", "below": 0.5}
    either, both = {"any": ["generated", below]}, {"all": ["prompt", {"not": "generated"}]}
    for name, when in (("either", either), ("both", both)):
        call(server, "/v1/steering/rules/register", name=name, when=when, then="observe", applies_to="opt_in")
    page.reload()
    reads = f"the token is in the answer or the cosine to joy at {LAYER}.post_mlp is below 0.500 at a token,"
    expect(page.locator('[data-rule="either"]')).to_contain_text(f"When {reads}")
    reads = "the token is in the prompt and the token is not in the answer,"
    expect(page.locator('[data-rule="both"]')).to_contain_text(f"When {reads}")


def test_a_gate_fires_in_its_phase_and_becomes_a_rule_that_reads_as_a_sentence(page: Page, server: Server) -> None:
    add_gate(page, where="answer")
    expect(page.get_by_text("is above -1 at a token in the answer, add joy")).to_be_visible()
    show(page, "Chat")
    _, gated = ask(page, runs=2).all()
    expect(gated.get_by_role("img", name="score of gate 1 by token")).to_be_visible()
    text = gated.get_by_role("group").last.inner_text().strip()
    show(page, "Dynamic")
    rule = page.get_by_role("form", name="New rule")
    rule.get_by_label("Name").fill("joyful")
    rule.get_by_label("only note it").uncheck()
    rule.get_by_label("For").select_option("opt_in")
    rule.get_by_role("button", name="Register the rule", exact=True).click()
    sentence = f"When the cosine to joy at {LAYER}.post_mlp is above -1.00 at a token in the answer"
    does = f"{sentence}, add joy \N{MULTIPLICATION SIGN} 4.00 for the rest of the request; for requests that name it."
    expect(page.locator('[data-rule="joyful"]')).to_contain_text(does)

    cosine = {"cosine": "joy", "at": f"{LAYER}.post_mlp", "above": -1}
    gate = {"name": "g", "when": {"all": ["generated", cosine]}, "then": {"module": "joy", "scale": 4}}
    asked = {"steering_gates": [{**gate, "scope": "rest_of_request"}], "return_steering_trace": True}
    told = chat(server, **asked)["choices"][0]
    trace, begin = told["steering_trace"], chat(server, max_tokens=1)["usage"]["prompt_tokens"]
    applied = dict(zip(trace["positions"], trace["gates"]["g"]["applied"], strict=True))
    assert {position for position, value in applied.items() if value} == set(range(begin, begin + 15))
    assert text == told["message"]["content"].strip()
    by_rule = chat(server, steering_rules=["joyful"])["choices"][0]["message"]["content"]
    assert by_rule == told["message"]["content"]
    check_clauses(page, server)


def read_cell(page: Page) -> Locator:
    """Read the row of token 2 at `LAYER` of an answer of four tokens; return its panel."""
    prepare(page, tokens=4)
    ask(page)
    page.get_by_role("button", name="Layer by layer").click()
    page.get_by_role("button", name="Read all layers").click()
    canvas = page.get_by_role("application")
    expect(canvas).to_be_visible()
    canvas.focus()
    for press in (*["ArrowRight"] * 3, *["ArrowUp"] * LAYER, "Enter"):
        canvas.press(press)
    row = page.locator(f'[data-row="{LAYER}.post_mlp@2"]')
    expect(row).to_be_visible()
    return row


def test_a_cell_gives_its_row_with_all_that_it_is_near_to_and_steers(page: Page, server: Server) -> None:
    vector = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    call(server, "/v1/steering/modules/register", name="near", vectors={"post_mlp": {str(LAYER): vector.tolist()}})
    page.reload()
    row = read_cell(page)

    ids = ids_of(server, chat(server, max_tokens=4))
    site = {"hooks": {"post_mlp": [LAYER]}, "positions": [2, 3]}
    wanted = {"inline": site, "features": {"sae": "words", "positions": [2], "top": 10}}
    wanted |= {"lens": {"layers": [LAYER], "positions": [2], "top": 10}}
    told = call(server, "/v1/completions", model="smollm2", prompt=ids, max_tokens=1, capture=wanted, capture_wait=True)
    rows = rows_of(told)[f"{LAYER}.post_mlp"]
    cosine = partial(torch.nn.functional.cosine_similarity, dim=0)
    assert number(row.locator('[data-vector="near"] td')) == pytest.approx(float(cosine(rows[0], vector)), abs=1e-3)
    features = told["capture_results"]["features"]["payload"]
    strongest = {
        number(each, "data-strongest"): number(each.locator("td")) for each in row.locator("[data-strongest]").all()
    }
    assert strongest == pytest.approx(dict(zip(features["ids"][0], features["values"][0], strict=True)), rel=1e-3)
    logprobs = told["capture_results"]["lens"]["payload"]["layers"][str(LAYER)]["logprobs"][0]
    assert [number(each, "data-logprob") for each in row.locator("li").all()] == pytest.approx(logprobs, abs=1e-3)
    assert EVIL in row.inner_text()
    row.get_by_role("button", name="Compare others with it").click()
    for press in ("ArrowRight", "Enter"):
        page.get_by_role("application").press(press)
    other = page.locator(f'[data-row="{LAYER}.post_mlp@3"]')
    compared = number(other.locator('[data-compared="cosine"] td'))
    assert compared == pytest.approx(float(cosine(rows[0], rows[1])), abs=1e-4)
    difference = number(other.locator('[data-compared="norm"] td'))
    assert difference == pytest.approx(float(rows[1].norm() - rows[0].norm()), rel=1e-3)
    other.get_by_role("button", name="Steer from here").click()
    page.get_by_label("Scale of row").fill("1")
    show(page, "Chat")
    page.get_by_role("button", name="New conversation").click()
    _, steered = ask(page, runs=2).all()
    vectors = {"post_mlp": {str(LAYER): rows[1].tolist()}}
    answer = chat(server, max_tokens=4, steering_vectors=vectors)["choices"][0]["message"]["content"]
    assert steered.get_by_role("group").last.inner_text().strip() == answer.strip()


def compare_at_another_layer(page: Page, compared: Locator) -> float:
    """Answer again with rows of layer 7, and assert that these are not compared with those of `LAYER`.

    Returns:
        The difference of the norms of the answer's second token and its first, which is pinned, at layer 7.
    """
    page.get_by_label("Layer", exact=True).select_option("7")
    page.get_by_role("button", name="Answer again").click()
    expect(page.locator(".branches")).to_contain_text("3/3")
    again = page.locator(".turn .run[data-status=done]")
    expect(again).to_have_count(1)
    page.get_by_role("button", name="Compare it").click()
    page.get_by_label("Colour by").select_option("norm")
    apart = f"Not compared: stream norm at {LAYER}.post_mlp and stream norm at 7.post_mlp."
    expect(compared.locator("caption")).to_have_text(apart)
    assert compared.locator('[data-mean="norm"]').count() == 0
    assert compared.locator('[data-mean="surprise"]').count() == 1
    expect(compared.locator('.token[style*="background"]')).to_have_count(0)
    expect(again.locator('.token[style*="background"]')).not_to_have_count(0)
    again.locator(".token").first.click()  # it is pinned, and read at layer 7
    compared.locator(".run").first.locator(".token").nth(1).hover()
    expect(compared.locator('.card [data-series="norm"] [data-difference]')).to_have_attribute("data-difference", "NaN")
    compared.locator(".run").last.locator(".token").nth(1).hover()
    difference = compared.locator('.card [data-series="norm"] [data-difference]')
    expect(difference).not_to_have_attribute("data-difference", "NaN")
    return number(difference, "data-difference")


def test_any_two_answers_are_compared_and_a_feature_colours_all(page: Page, server: Server) -> None:
    page.get_by_label("Features of").select_option("words")
    prepare(page, tokens=6)
    ask(page)
    show(page, "Features")
    chosen = page.locator("[data-feature]").first
    feature = chosen.get_attribute("data-feature")
    chosen.get_by_role("button", name="Colour by it").click()
    page.get_by_text("Settings").click()
    page.get_by_label("System message").fill("Answer like a pirate.")
    page.get_by_text("Settings").click()
    page.get_by_role("button", name="Compare it").click()
    page.get_by_role("button", name="Answer again").click()
    again = page.locator(".turn .run[data-status=done]")
    expect(page.locator(".branches")).to_contain_text("2/2")
    expect(again).to_have_count(1)
    page.get_by_role("button", name="Compare it").click()
    compared = page.get_by_role("region", name="Compared answers")
    first, second = compared.locator(".run").all()
    means = [number(cell) for cell in compared.locator('[data-mean="norm"] td').all()]
    page.get_by_label("Show the prompt").uncheck()
    activations = series_of(again.first, f"feature:words:{feature}")
    texts = [run.get_by_role("group").inner_text().strip() for run in (first, second)]
    sevens = compare_at_another_layer(page, compared)

    pirate = [{"role": "system", "content": "Answer like a pirate."}, {"role": "user", "content": QUESTION}]
    spec = {"inline": {"hooks": {"post_mlp": [LAYER]}, "positions": "all_generated"}}
    spec["features"] = {"sae": "words", "positions": "all_generated"}
    plain, other = chat(server, max_tokens=6, capture=spec), chat(server, max_tokens=6, capture=spec, messages=pirate)
    assert texts == [each["choices"][0]["message"]["content"].strip() for each in (plain, other)]
    spec = {"inline": {"hooks": {"post_mlp": [7]}, "positions": "all_generated"}}
    at_7 = rows_of(chat(server, max_tokens=6, capture=spec, messages=pirate))["7.post_mlp"].norm(dim=1)
    assert sevens == pytest.approx(float(at_7[1] - at_7[0]), rel=1e-2, abs=1e-2)
    norms = [float(rows_of(each)[f"{LAYER}.post_mlp"].norm(dim=1).mean()) for each in (plain, other)]
    assert means == pytest.approx([*norms, norms[1] - norms[0]], rel=1e-3)
    payload = other["capture_results"]["features"]["payload"]
    known = [dict(zip(*each, strict=True)) for each in zip(payload["ids"], payload["values"], strict=True)]
    expected = [each.get(int(feature or -1), 0.0) for each in known]
    assert activations[: len(expected)] == pytest.approx(expected, rel=1e-3)


def test_the_grid_shows_the_scores_of_probes(page: Page, server: Server) -> None:
    other = [0.01 * (i % 7 - 3) for i in range(SIZE)]
    for name, at in (("early", "3.post_mlp"), ("beside", f"{LAYER}.post_mlp")):
        call(server, "/v1/steering/probes/register", name=name, at=at, weight=other, threshold=0.5)
    page.reload()
    prepare(page, tokens=4)
    ask(page)
    page.get_by_role("button", name="Layer by layer").click()
    page.get_by_role("button", name="Read all layers").click()
    page.get_by_label("Shows").select_option("probe")
    page.get_by_label("Probe", exact=True).select_option("beside")
    canvas = page.get_by_role("application")
    canvas.focus()
    for press in (*["ArrowRight"] * 3, *["ArrowUp"] * 3):
        canvas.press(press)
    early = number(page.locator('[data-probe-score="early"] td'))
    for _ in range(LAYER - 3):
        canvas.press("ArrowUp")
    beside, mood = (number(page.locator(f'[data-probe-score="{name}"] td')) for name in ("beside", "mood"))

    gates = [{"name": f"g{i}", "when": {"probe": name, "above": 0}, "then": "observe"} for i, name in enumerate(PROBES)]
    ids = ids_of(server, chat(server, max_tokens=4))
    wanted = {"steering_gates": gates, "return_steering_trace": True, "prompt_logprobs": 0}
    told = call(server, "/v1/completions", model="smollm2", prompt=ids, max_tokens=1, **wanted)["choices"][0]
    trace = told["steering_trace"]
    at = trace["positions"].index(2)
    expected = [trace["scores"][name][at] for name in ("early", "beside", "mood")]
    assert [early, beside, mood] == pytest.approx(expected, rel=1e-2, abs=0.05)
    for name in ("early", "beside"):
        call(server, "/v1/steering/probes/unregister", name=name)


PROBES = ("early", "beside", "mood")


def choose_operation(page: Page, name: str, label: str, value: str) -> None:
    item = page.locator("li.item", has_text=name)
    item.get_by_label("Do", exact=True).select_option(label=label)
    item.get_by_label(f" of {name}").fill(value)


@pytest.mark.parametrize("kind", ["registered", "of this tab"])
def test_operations_remove_bound_and_set_the_part_along_a_vector(page: Page, server: Server, kind: str) -> None:
    make_vector(page)
    if kind == "registered":
        page.get_by_role("button", name="Register on the server").click()
        expect(page.get_by_text("registered, at")).to_be_visible()
        vector: Any = "joy"
    else:
        spec = {"inline": {"hooks": {"post_mlp": [LAYER]}, "positions": "last_prompt"}}
        rows = [[rows_of(chat(server, text, max_tokens=1, capture=spec))[f"{LAYER}.post_mlp"][0] for text in texts]
                for texts in (GLAD, SAD)]  # fmt: skip
        vector = (torch.stack(rows[0]).mean(0) - torch.stack(rows[1]).mean(0)).tolist()
    show(page, "Chat")
    prepare(page, tokens=8)
    for label, value, keys in (
        ("remove the part along it", "1", {"method": "ablate"}),
        ("limit p from above", "-30", {"method": "clamp", "max": -30}),
        ("set p", "-40", {"method": "set", "value": -40}),
    ):
        show(page, "Steer")
        choose_operation(page, "joy", label, value)
        page.get_by_label("Acts on").select_option("answer" if keys["method"] == "set" else "both")
        show(page, "Chat")
        if page.get_by_role("button", name="New conversation").count():
            page.get_by_role("button", name="New conversation").click()
        _, steered = ask(page, runs=2).all()
        field = "decode_steering_ops" if keys["method"] == "set" else "steering_ops"
        answer = chat(server, max_tokens=8, **{field: [{"at": f"{LAYER}.post_mlp", "vector": vector, **keys}]})
        expected = answer["choices"][0]["message"]["content"]
        assert steered.get_by_role("group").last.inner_text().strip() == expected.strip(), label


def towards_the_sea(server: Server) -> dict[str, Any]:
    """A plain answer and a steered one, with their rows."""
    direction = [{"lens": "logit", "token": " sea", "at": "20.post_mlp", "scale": 150.0}]
    capture = {"inline": {"hooks": {"post_mlp": [LAYER]}, "positions": "all_generated"}}
    return {
        "plain": chat(server, max_tokens=8, capture=capture),
        "steered": chat(server, max_tokens=8, capture=capture, steering_vectors=direction),
    }


def test_a_tokens_direction_steers_and_both_answers_are_compared(page: Page, server: Server) -> None:
    vector = torch.randn(SIZE, generator=torch.Generator().manual_seed(2)) / 10
    call(server, "/v1/steering/modules/register", name="noise", vectors={"post_mlp": {str(LAYER): vector.tolist()}})
    page.reload()
    prepare(page, tokens=8)
    show(page, "Steer")
    page.get_by_label("Token", exact=True).fill(" sea")
    page.get_by_label("After layer").select_option("20")
    page.get_by_role("button", name="Add", exact=True).click()
    page.get_by_label("Scale of “ sea”").fill("150")
    show(page, "Chat")
    plain, steered = ask(page, runs=2).all()
    texts = [run.get_by_role("group").last.inner_text().strip() for run in (plain, steered)]
    norms = {name: series_of(run, "norm")[:-1] for name, run in (("plain", plain), ("steered", steered))}
    page.get_by_text("Compare both answers").click()
    means = page.locator('[data-mean="norm"] td')
    shown = [number(cell) for cell in means.all()]
    tokens = plain.get_by_role("group").last
    tokens.focus()
    for press in ("ArrowRight", "Enter", "ArrowRight"):
        tokens.press(press)
    card = plain.locator(".card")
    pinned = number(card.locator('[data-series="norm"] .difference'), "data-difference")
    row_cosine = number(card.locator('[data-series="pinned-cosine"] td'))
    show(page, "Steer")
    dose = number(page.locator("li.item", has_text="noise").locator(".dose"), "data-dose")

    told = towards_the_sea(server)
    assert texts == [answer["choices"][0]["message"]["content"].strip() for answer in told.values()]
    rows = {name: rows_of(answer)[f"{LAYER}.post_mlp"].float() for name, answer in told.items()}
    for name, run in (("plain", 0), ("steered", 1)):
        assert norms[name] == pytest.approx(rows[name].norm(dim=1).tolist(), rel=1e-4)
        assert shown[run] == pytest.approx(float(rows[name].norm(dim=1).mean()), rel=1e-4)
    assert shown[2] == pytest.approx(shown[1] - shown[0], rel=1e-4)
    assert pinned == pytest.approx(norms["plain"][1] - norms["plain"][0], rel=1e-4)
    cosine = torch.nn.functional.cosine_similarity(rows["plain"][0], rows["plain"][1], dim=0)
    assert row_cosine == pytest.approx(float(cosine), abs=1e-4)
    assert dose == pytest.approx(2 * float(vector.norm()) / float(rows["plain"].norm(dim=1).mean()), rel=1e-3)
    content = look(server, "/v1/steering")["modules"]["noise"]["decode"]
    assert content["norms"] == {f"{LAYER}.post_mlp": pytest.approx(float(vector.norm()), rel=1e-6)}


def test_a_gate_becomes_a_rule_whose_rows_are_counted_while_one_looks(page: Page, server: Server) -> None:
    make_vector(page, name="cheer")
    page.get_by_role("button", name="Register the direction as a probe").click()
    expect(page.get_by_text("The probe cheer is registered")).to_be_visible()
    show(page, "Dynamic")
    expect(page.locator('[data-probe="cheer"]')).to_contain_text(f"linear, at {LAYER}.post_mlp")
    page.get_by_label("When").select_option("probe cheer")
    page.get_by_label("Threshold").fill("-1000")
    page.get_by_role("button", name="Add the gate").click()
    rule = page.get_by_role("form", name="New rule")
    rule.get_by_label("Name").fill("watch")
    rule.get_by_role("button", name="Register the rule", exact=True).click()
    found = page.locator('[data-rule="watch"]')
    expect(found).to_contain_text("only note it for the rest of the request")
    made = probes_of(server)["cheer"]
    chat(server, max_tokens=4)
    counted = {each["name"]: each["rows"] for each in look(server, "/v1/steering/dynamic")["rules"]}["watch"]
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # figures are asked for at once
    expect(found.locator("small")).to_have_attribute("data-rows", str(counted))
    expect(found.locator("small")).to_have_attribute("data-lately", str(counted))
    assert counted > 4
    page.get_by_role("button", name="Unregister the rule watch").click()
    expect(found).to_have_count(0)
    page.get_by_role("button", name="Unregister the probe cheer").click()
    expect(page.locator('[data-probe="cheer"]')).to_have_count(0)

    spec = {"inline": {"hooks": {"post_mlp": [LAYER]}, "positions": "last_prompt"}}
    glad, sad = (
        torch.stack([rows_of(chat(server, text, max_tokens=1, capture=spec))[f"{LAYER}.post_mlp"][0] for text in texts])
        for texts in (GLAD, SAD)
    )
    direction = torch.nn.functional.normalize(glad.mean(0) - sad.mean(0), dim=0)
    middle = float((glad @ direction).mean() + (sad @ direction).mean()) / 2
    assert made["threshold"] == pytest.approx(middle, rel=1e-2, abs=0.05)
    assert look(server, "/v1/steering/rules")["rules"] == []


def probes_of(server: Server) -> dict[str, Any]:
    return {probe["name"]: probe for probe in look(server, "/v1/steering/probes")["probes"]}


def test_figures_are_those_of_the_server_and_the_sizer_says_which_sites_fit(page: Page, server: Server) -> None:
    show(page, "Server")
    expect(page.locator('[data-figure="Captured rows"] b')).to_have_text(re.compile(r"\d"))
    figures = {
        name: page.locator(f'[data-figure="{name}"] b').inner_text().split()[0]
        for name in ("Captured rows", "Dropped rows", "Requests running", "Modules")
    }
    metrics = (
        *("headgate_capture_rows_total", "headgate_capture_dropped_rows_total"),
        *("vllm:num_requests_running", "headgate_steering_modules"),
    )
    told = [counted(server, name) for name in metrics]
    assert [float(value) for value in figures.values()] == told
    memory = look(server, "/v1/capture/consumers")["memory"]
    stream = memory["hooks"]["post_mlp"]
    page.get_by_label("Memory to spend, MiB").fill(str(4 * stream["site_bytes"] / 2**20))
    row = page.locator('[data-hook="post_mlp"]')

    assert stream == {"layers": 30, "width": SIZE, "dtype": "float32", "site_bytes": memory["step_rows"] * 4 * SIZE}
    assert number(row.locator("[data-value]")) == stream["site_bytes"]
    expect(row.locator("[data-fits]")).to_have_text("4 of 30")
    neurons = page.locator('[data-hook="mlp_act"]')
    assert number(neurons.locator("[data-value]")) == memory["step_rows"] * 4 * 1536
    expect(neurons.locator("[data-fits]")).to_have_text("1 of 30")


CAPTURES = "/v1/capture/filesystem/captures"


def store(server: Server) -> None:
    """Store three captures of Alice's, the first with a message of a hostile role."""
    messages = [{"role": EVIL, "start": 0, "stop": 4}]
    for name, tag, layers in (("first", "studio", [3, LAYER]), ("second", "studio", [LAYER]), ("third", "other", [3])):
        wanted = {"hooks": {"post_mlp": layers}, "positions": "all", "request_id": name, "tag": tag}
        wanted |= {"messages": messages} if name == "first" else {}
        chat(server, capture={"filesystem": wanted}, capture_wait=True)


def press_all(at: Locator, *keys: str) -> None:
    """Press keys one after the other."""
    for key in keys:
        at.press(key)


def check_reloaded(page: Page) -> None:
    """Assert that an opened capture has a link, whose page offers no numbers to read."""
    begins = base64.urlsafe_b64encode(b'{"v":"grid","').decode().rstrip("=")[:-2]
    expect(page).to_have_url(re.compile(f"#{begins}"))
    page.reload()
    show(page, "Chat")
    expect(page.locator(".turn.assistant .text")).to_have_text("studio/first")
    assert page.get_by_role("button", name="Read its numbers").count() == 0  # a capture has no question to read


def test_captures_of_the_server_are_listed_filtered_opened_and_downloaded(
    page: Page, server: Server, tmp_path: Path
) -> None:
    store(server)
    show(page, "Captures")
    rows = page.locator("[data-capture]")
    expect(rows.nth(2)).to_be_visible()
    listed = [row.get_attribute("data-capture") for row in rows.all()[:3]]
    filters = page.get_by_role("form", name="Filter captures")
    for label, value, expected in (("Tag", "studio", 2), ("Site", "3.post_mlp", 1), ("Role", EVIL, 1)):
        filters.get_by_label(label).fill(value)
        filters.get_by_label(label).press("Enter")
        expect(rows).to_have_count(expected)
    assert EVIL in rows.first.inner_text()
    page.get_by_role("button", name="Open first").click()
    opened = page.locator("[data-opened]")
    opened.get_by_label("Site").select_option("3.post_mlp")
    expect(opened.locator("figcaption")).to_contain_text("norm at 3.post_mlp")
    norms = series_of(opened, "norm")
    caption = opened.locator("figcaption").inner_text()
    with page.expect_download() as saving:
        opened.get_by_role("button", name="Download").click()
    saving.value.save_as(tmp_path / "first.safetensors")
    opened.get_by_role("button", name="Show layer by layer").click()
    canvas = page.get_by_role("application")
    canvas.focus()
    press_all(canvas, "ArrowRight", "ArrowRight", "ArrowUp")

    assert listed == ["other/third.safetensors", "studio/second.safetensors", "studio/first.safetensors"]
    path = f"{CAPTURES}/studio/first.safetensors"
    stored = load(content := httpx.get(f"{server.url}{path}/rows", headers={"X-Headgate-Key": KEY}).content)
    assert (tmp_path / "first.safetensors").read_bytes() == content
    assert norms == pytest.approx(stored["3.post_mlp"].norm(dim=1).tolist(), rel=1e-4)
    expect(page.locator(".cell b")).to_have_text(f"{LAYER}.post_mlp")
    shown = page.locator('.cell [data-value="norm"] td').get_attribute("data-value")
    assert float(shown or "nan") == pytest.approx(float(stored[f"{LAYER}.post_mlp"][1].norm()), rel=1e-4)
    said = re.fullmatch(r"norm at 3\.post_mlp by token: ([\d.]+) to ([\d.]+) without the first token", caption)
    assert said is not None, caption
    assert list(map(float, said.groups())) == pytest.approx([min(norms[1:]), max(norms[1:])], rel=1e-2)
    check_reloaded(page)


def scores_of(server: Server, text: str, **fields: Any) -> list[float]:
    """The scores of all rows of a chat but the first, by the rows that the API returns."""
    answer = chat(server, text, capture={"inline": {"hooks": {"post_mlp": [LAYER]}, "positions": "all"}}, **fields)
    return mood_of(rows_of(answer)[f"{LAYER}.post_mlp"])[1:]


def mood_of(rows: torch.Tensor) -> list[float]:
    """The scores of rows by the probe `mood`."""
    weight = np.random.default_rng(3).normal(size=SIZE).astype(np.float32)
    found: list[float] = (rows.double().numpy() @ weight.astype(np.float64)).tolist()
    return found


def record_above(page: Page, above: float) -> None:
    """Have the page's next messages recorded if `mood` is above a threshold."""
    show(page, "Captures")
    recording = page.get_by_label("Recording")
    recording.get_by_label("Record messages on which fires").select_option("filesystem:mood")
    recording.get_by_label("Above").fill(repr(above))
    show(page, "Chat")


def stored_names(server: Server) -> set[str]:
    return {each["name"] for each in look(server, f"{CAPTURES}?probe=mood")["captures"]}


def test_only_messages_on_which_a_probe_fires_are_recorded(page: Page, server: Server, files: Path) -> None:
    by_text = {text: scores_of(server, text, max_tokens=8) for text in (QUESTION, "Name a colour.")}
    quiet, loud = sorted(by_text, key=lambda text: max(by_text[text]))
    scores = by_text[loud]
    above = (max(scores) + max(by_text[quiet])) / 2
    before = stored_names(server), sorted(files.rglob("*"))
    prepare(page, tokens=8)
    record_above(page, above)
    (run,) = ask(page, quiet).all()
    expect(run.locator("[data-stored]")).to_have_attribute("data-stored", "false")
    left = stored_names(server), sorted(files.rglob("*"))
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edit your message").fill(loud)
    page.get_by_role("button", name="Send as a new branch").click()
    run = page.locator(".run[data-status=done]")
    expect(run.locator("[data-stored]")).to_have_attribute("data-stored", "true", timeout=patience(60) * 1000)
    show(page, "Captures")
    (name,) = stored_names(server) - before[0]
    row = page.locator("tr[data-recorded=true]")
    expect(row).to_contain_text(loud)
    listed = page.locator(f'[data-capture="default/{name}"] [data-fired]')
    row.get_by_role("button", name="Open").click()
    expect(page.locator("[data-opened]")).to_be_visible()
    fired = series_of(page.locator("[data-opened]"), "fired")

    stored = look(server, f"{CAPTURES}/default/{name}")
    decision = stored["metadata"]["if_probe"]
    expected = [1 + at for at, score in enumerate(scores) if score > above]
    assert left == before
    assert decision["positions"] == expected
    assert decision["highest"] == pytest.approx(max(scores), rel=1e-4)
    positions = ",".join(map(str, expected))
    assert row.locator("[data-positions]").get_attribute("data-positions") == positions
    assert listed.get_attribute("data-fired") == positions
    assert number(row.locator("[data-value]")) == decision["highest"]
    assert [fired[at] for at in expected] == decision["scores"]
    assert np.isnan(fired).sum() == len(fired) - len(expected)
    (file,) = files.rglob(name)
    rows = load_file(file)[f"{LAYER}.post_mlp"]
    assert [mood_of(rows)[at] for at in expected] == pytest.approx(decision["scores"], rel=1e-6)


def test_the_probes_of_all_consumers_that_record_are_offered(page: Page) -> None:
    def with_another(route: Route) -> None:
        found = route.fetch().json()
        (one,) = (each for each in found["consumers"] if each["name"] == "filesystem")
        route.fulfill(json={**found, "consumers": [*found["consumers"], {**one, "name": "archive"}]})

    page.route("**/v1/capture/consumers", with_another)
    page.route("**/v1/chat/completions", lambda _: None)  # it never answers
    page.reload()
    show(page, "Captures")
    choice = page.get_by_label("Record messages on which fires")
    expect(choice.locator("option")).to_have_text(
        ["nothing: record none", "probe mood (filesystem)", "probe mood (archive)"]
    )
    choice.select_option("archive:mood")
    show(page, "Chat")
    page.get_by_label("Your message").fill(QUESTION)
    with page.expect_request("**/v1/chat/completions") as asking:
        page.get_by_label("Your message").press("Enter")
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.get_by_text("stopped; it may be recorded all the same")).to_be_visible()

    capture = json.loads(asking.value.post_data or "")["capture"]
    assert capture["archive"]["if_probe"] == {"probe": "mood"}
    assert "filesystem" not in capture


def test_captures_of_another_client_are_not_there(context: BrowserContext, server: Server) -> None:
    wanted = {"filesystem": {"hooks": {"post_mlp": [3]}, "request_id": "alices"}}
    chat(server, max_tokens=2, capture=wanted, capture_wait=True)
    other = context.new_page()
    enter(other, server, OTHER_KEY)
    show(other, "Captures")
    expect(other.get_by_text("None is here")).to_be_visible()

    path = f"{server.url}{CAPTURES}/default/alices.safetensors"
    assert [httpx.get(path, headers={"X-Headgate-Key": key}).status_code for key in (KEY, OTHER_KEY)] == [200, 404]


def test_prompts_answers_and_names_are_never_html(page: Page, server: Server) -> None:
    row = [1.0] * SIZE
    call(server, "/v1/steering/modules/register", name=EVIL, vectors={"post_mlp": {str(LAYER): row}})
    page.reload()
    prepare(page, tokens=4)
    ask(page, EVIL)
    assert page.locator(".turn.user .text").inner_text() == EVIL
    page.get_by_label("Show the prompt").check()
    for view in ("Features", "Steer", "Dynamic", "Server", "Grid", "Chat"):
        show(page, view)
        assert page.locator("main img, main script").count() == 0
    page.get_by_role("button", name="Take it home").click()
    assert EVIL in page.locator("dialog pre").inner_text().replace('\\"', '"')
    page.keyboard.press("Escape")
    error = {"error": {"message": f"no {EVIL}", "type": "x", "param": EVIL, "code": 400}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json=error))
    page.get_by_role("button", name="Answer again").click()
    expect(page.get_by_role("alert")).to_contain_text(EVIL)


def test_a_long_name_fits_the_width_of_a_phone(page: Page, server: Server) -> None:
    row = [1.0] * SIZE
    call(server, "/v1/steering/modules/register", name="long" * 60, vectors={"post_mlp": {str(LAYER): row}})
    page.reload()
    prepare(page, tokens=4)
    page.get_by_label("cosine to long").check()
    ask(page)
    page.set_viewport_size({"width": 375, "height": 700})
    wider = {}
    for view in VIEWS:
        show(page, view)
        wider[view] = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert max(wider.values()) <= 0, wider


def test_a_canvas_follows_the_colours_of_the_system(page: Page) -> None:
    prepare(page, tokens=4)
    ask(page)
    page.get_by_role("button", name="Layer by layer").click()
    page.get_by_role("button", name="Read all layers").click()
    expect(page.get_by_role("application")).to_be_visible()
    axis = page.locator("canvas.axis")
    drawn = "(axis) => [...axis.getContext('2d').getImageData(0, 0, axis.width, axis.height).data]"
    light = axis.evaluate(drawn)
    page.emulate_media(color_scheme="dark")
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    dark = axis.evaluate(drawn)
    assert max(light[0::4]) < 128 < max(dark[0::4])  # dark digits, then light ones


def test_a_token_that_is_a_part_of_a_character_can_be_pointed_at(page: Page, server: Server) -> None:
    text = "Write a poem with emoji \N{GRINNING FACE}"
    prepare(page)
    (run,) = ask(page, text).all()
    content = chat(server, text)["choices"][0]["logprobs"]["content"]
    parts = [index for index, token in enumerate(content) if not token["token"]]
    assert parts, content
    part = run.locator(f'.token[data-i="{parts[0]}"]')
    assert part.inner_text() == ""
    part.hover()
    shown = number(run.locator(".card [data-series=surprise] td"))
    assert shown == pytest.approx(-content[parts[0]]["logprob"], abs=2e-3)


def refused(page: Page, text: str) -> Locator:
    """Ask what is refused; return the sentence."""
    page.get_by_label("Your message").fill(text)
    page.get_by_label("Your message").press("Enter")
    return page.get_by_role("alert")


def test_what_the_server_refuses_is_a_sentence(page: Page) -> None:
    prepare(page, tokens=5000)
    alert = refused(page, "Hi")
    expect(alert).to_contain_text("The server refuses this request")
    expect(alert).to_contain_text("1024")


def test_a_question_above_the_servers_limit_of_bytes_is_a_sentence(page: Page) -> None:
    alert = refused(page, "word " * (BODY_BYTES // 4))
    expect(alert).to_have_text(
        f"The request is too large for this server: the body has more than {BODY_BYTES} bytes (the server's "
        "max_body_bytes)."
    )


def test_a_server_that_is_too_busy_is_a_sentence_that_says_when_to_try_again(page: Page, server: Server) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += f"X-Headgate-Key: {KEY}\r\n"  # another client's body would make way
    page.get_by_label("Your message").fill("word " * 40_000)
    with socket.create_connection((host, int(port))) as other:
        # A body that fills the server's room for bodies, but for its last bytes, which do not come.
        other.sendall(f"{head}Content-Length: {BODY_BYTES}\r\n\r\n".encode() + b" " * (BODY_BYTES - 1024))
        page.get_by_label("Your message").press("Enter")
        alert = page.get_by_role("alert")
        expect(alert).to_have_text(
            f"The server is too busy to answer now: {BODY_BYTES} bytes of requests are on their way at this moment "
            "(the server's max_buffered_bytes): send it again in a moment. Try again in 1 s."
        )


def test_an_open_page_asks_for_nothing_but_figures_that_are_looked_at(page: Page) -> None:
    ask(page, "Hi")
    page.clock.install()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    counts = {}
    for view in VIEWS:
        asked.clear()
        show(page, view)
        page.clock.run_for(1_000)
        for _ in range(4):
            page.evaluate("async () => { await fetch('/health'); }")  # what was asked before is answered meanwhile
            page.clock.run_for(60_000)
        counts[view] = sum(not url.endswith("/health") for url in asked)

    # Captures asks for its list when it opens.
    assert {view for view, count in counts.items() if count > 1} == {"Dynamic", "Server"}, counts
    assert {view for view, count in counts.items() if count} == {"Dynamic", "Server", "Captures"}, counts

    page.route("**/metrics", lambda _: None)  # it never answers: the tab is hidden and shown meanwhile
    show(page, "Chat")
    asked.clear()
    with page.expect_request("**/metrics"):
        show(page, "Server")
    for _ in range(3):
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.evaluate("async () => { await fetch('/health'); }")
    assert sum(url.endswith("/metrics") for url in asked) == 1


def test_without_a_key_the_page_chats_and_says_what_is_not_allowed(context: BrowserContext, server: Server) -> None:
    page = context.new_page()
    page.goto(f"{server.url}/headgate/")
    expect(page.get_by_role("button", name=QUESTION)).to_be_enabled()
    assert page.get_by_label("Read rows").count() == 0
    ask(page, "Hi")
    show(page, "Server")
    expect(page.get_by_text("Your key does not allow this, or you have entered none")).to_be_visible()
    show(page, "Dynamic")
    expect(page.get_by_text("Your key does not allow this, or you have entered none")).to_be_visible()
    enter(page, server)
    other = context.new_page()  # the key stays in its tab
    other.goto(f"{server.url}/headgate/")
    expect(other.get_by_role("button", name=QUESTION)).to_be_enabled()
    assert other.get_by_label("Read rows").count() == 0
    assert KEY not in page.url


def test_a_page_of_another_origin_can_neither_frame_it_nor_use_what_needs_a_role(
    context: BrowserContext, server: Server, tmp_path: Path
) -> None:
    (tmp_path / "index.html").write_text(f"<iframe src='{server.url}/headgate/'></iframe>")
    handler = partial(_Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as elsewhere:
        serve = threading.Thread(target=elsewhere.serve_forever)
        serve.start()
        try:
            page = context.new_page()
            enter(page, server)
            stranger = context.new_page()
            stranger.goto(f"http://127.0.0.1:{elsewhere.server_port}/")
            got = stranger.evaluate(
                """async (url) => {
                  const status = async (path, options) => {
                    try { return (await fetch(url + path, options)).status; } catch { return "blocked"; }
                  };
                  const body = JSON.stringify({ name: "strange", vectors: { post_mlp: { 12: Array(576).fill(1) } } });
                  const json = { method: "POST", headers: { "Content-Type": "application/json" }, body };
                  return [await status("/v1/capture/consumers"), await status("/v1/steering/modules/register", json)];
                }""",
                server.url,
            )
            frame = stranger.frames[1]
            framed = frame.locator("#page").count()
        finally:
            elsewhere.shutdown()
            serve.join()

    assert set(got) <= {403, "blocked"}
    assert httpx.get(f"{server.url}/v1/steering/modules").json()["modules"] == []
    assert framed == 0


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def test_a_link_and_a_reload_restore_the_view(page: Page, context: BrowserContext, server: Server) -> None:
    prepare(page, tokens=4, layer=7)
    (run,) = ask(page, "Name a colour.").all()
    page.get_by_label("Colour by").select_option("norm")
    record_above(page, 1e9)
    expect(page.get_by_role("button", name="Stop recording")).to_be_visible()
    before = {name: series_of(run, name) for name in ("surprise", "norm")}
    page.get_by_text("Settings").click()
    page.get_by_label("System message").fill("Answer like a pirate.")  # the answer was made without it
    show(page, "Dynamic")
    begins = base64.urlsafe_b64encode(b'{"v":"dynamic","').decode().rstrip("=")[:-2]
    expect(page).to_have_url(re.compile(f"#{begins}"))  # the address follows the view
    for opened in (page, context.new_page()):
        opened.goto("about:blank") if opened is not page else None
        opened.goto(page.url)
        opened.reload()
        expect(opened.get_by_role("navigation").get_by_role("button", name="Dynamic")).to_have_attribute(
            "aria-current", "page"
        )
        show(opened, "Chat")
        expect(opened.locator(".turn.user .text")).to_have_text("Name a colour.")
        expect(opened.get_by_role("button", name="Stop recording")).to_have_count(0)  # no link has messages recorded
        expect(opened.locator(".turn.assistant .text")).to_be_visible()
    record_above(page, 1e9)
    show(page, "Grid")
    with page.expect_request("**/v1/completions") as reading:
        page.get_by_role("button", name="Read the numbers of the restored answer").click()
    expect(page.get_by_role("button", name="Read all layers")).to_be_visible()
    show(page, "Chat")
    (again,) = page.locator(".turn .run[data-status=done]").all()
    for name, values in before.items():
        # The last token had no row when it was an answer; read as a prompt, it has one.
        assert series_of(again, name)[:-1] == pytest.approx(values[:-1], rel=1e-2, abs=5e-3)
    body = json.loads(reading.value.post_data or "")
    assert body["prompt"] == ids_of(server, chat(server, "Name a colour.", max_tokens=4), "Name a colour.")
    assert set(body["capture"]) == {"inline"}  # nothing is recorded a second time
    page.get_by_label("Show the prompt").check()
    expect(again.get_by_role("group").first.locator(".token").first).to_have_text("<|im_start|>")


def test_a_link_holds_the_vectors_of_the_tab(page: Page, context: BrowserContext, server: Server) -> None:
    prepare(page, tokens=8)
    make_vector(page)
    page.get_by_label("Scale of joy").fill("4")
    page.get_by_label("Token", exact=True).fill(" sea")
    page.get_by_role("button", name="Add", exact=True).click()
    page.get_by_role("checkbox", name="“ sea” by logit").uncheck()
    show(page, "Chat")
    _, steered = ask(page, runs=2).all()
    text = steered.get_by_role("group").last.inner_text()
    address = copied_link(page)
    assert page.get_by_role("dialog").get_by_text("leaves out").count() == 0

    other = context.new_page()
    other.goto(address)
    enter(other, server, url=address)
    show(other, "Steer")
    item = other.locator("li.item", has_text="joy")
    expect(item).to_contain_text(f"in this tab only, at {LAYER}.post_mlp; of 2 and 2 prompts, norm ")
    expect(item.get_by_role("checkbox")).to_be_checked()
    expect(item.get_by_label("Scale of joy")).to_have_value("4")
    expect(other.get_by_role("checkbox", name="“ sea” by logit")).not_to_be_checked()
    show(other, "Chat")
    other.get_by_role("button", name="New conversation").click()
    with other.expect_request(lambda request: "steering_vectors" in (request.post_data or "")) as asking:
        _, again = ask(other, runs=2).all()
    assert again.get_by_role("group").last.inner_text() == text
    spec = {"inline": {"hooks": {"post_mlp": [LAYER]}, "positions": "last_prompt"}}
    rows = [[rows_of(chat(server, text, max_tokens=1, capture=spec))[f"{LAYER}.post_mlp"][0] for text in texts]
            for texts in (GLAD, SAD)]  # fmt: skip
    vector = torch.stack(rows[0]).mean(0) - torch.stack(rows[1]).mean(0)
    sent = json.loads(asking.value.post_data or "")["steering_vectors"]["post_mlp"]
    assert sent["layer_indices"] == [LAYER]
    assert np.frombuffer(base64.b64decode(sent["data"]), np.float32) == pytest.approx(4 * vector.numpy(), abs=1e-2)


def copied_link(page: Page) -> str:
    """The link that *Take it home* copies."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Take it home").click()
    page.get_by_role("button", name="Copy a link to this view").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    found: str = page.evaluate("navigator.clipboard.readText()")
    return found


def test_a_link_names_the_vectors_for_which_it_has_no_room(page: Page, tmp_path: Path) -> None:
    rows = {f"vectors/{layer}.post_mlp": torch.full((SIZE,), float(layer)) for layer in range(30)}
    save_file(rows, tmp_path / "many.safetensors")
    show(page, "Steer")
    page.get_by_label("Open a file of vectors").set_input_files(tmp_path / "many.safetensors")
    expect(page.locator("li.item")).to_have_count(30)
    names = page.locator("li.item b").all_inner_texts()
    address = copied_link(page)
    room = 64 * 1024 // (4 * SIZE)
    expect(page.get_by_role("dialog")).to_contain_text(
        f"It leaves out {', '.join(f'“{name}”' for name in names[room:])}: it has room for 64 KiB of vectors"
    )

    page.goto("about:blank")
    page.goto(address)
    expect(page.locator("li.item b")).to_have_text(names[:room])


def test_a_vector_of_another_model_neither_opens_nor_steers(page: Page, tmp_path: Path) -> None:
    save_file({f"vectors/{LAYER}.post_mlp": torch.ones(SIZE + 1)}, tmp_path / "wide.safetensors")
    save_file({f"vectors/{LAYER}.post_mlp": torch.full((SIZE,), torch.nan)}, tmp_path / "nan.safetensors")
    save_file({f"vectors/{LAYER}.post_mlp": torch.ones(SIZE)}, tmp_path / "damaged.safetensors")
    content = (tmp_path / "damaged.safetensors").read_bytes()
    (tmp_path / "damaged.safetensors").write_bytes(content.replace(b"[576]", b"[577]"))
    show(page, "Steer")
    for name, said in (
        ("wide", f"It has {SIZE + 1} values, and the rows of this model {SIZE}."),
        ("nan", "has values that are no finite floating-point numbers."),
        ("damaged", f"has {SIZE} values and the shape [{SIZE + 1}]."),
    ):
        page.get_by_label("Open a file of vectors").set_input_files(tmp_path / f"{name}.safetensors")
        expect(page.get_by_role("alert")).to_contain_text(said)
    expect(page.locator("li.item")).to_have_count(0)

    row = base64.b64encode(np.ones(SIZE + 1, np.float32).tobytes()).decode()
    wide = {"name": "wide", "kind": "local", "isOn": True, "scale": 1, "site": f"{LAYER}.post_mlp", "row": row}
    go_to_link(page, {"v": "steer", "i": [wide]})
    item = page.locator("li.item")
    expect(item).to_contain_text(f"It has {SIZE + 1} values, and the rows of this model {SIZE}.")
    expect(item.get_by_role("checkbox")).to_be_disabled()
    item.get_by_role("slider").fill("3")
    expect(item.get_by_role("checkbox")).not_to_be_checked()


def go_to_link(page: Page, content: Any) -> None:
    """Load the page with a link of any content."""
    url = page.url.partition("#")[0]
    page.goto("about:blank")
    page.goto(f"{url}#{base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip('=')}")
    expect(page.get_by_role("navigation")).to_be_visible()


def turn(number: int, parent: int, **fields: Any) -> dict[str, Any]:
    return {"id": number, "parent": parent, "role": "user", "text": "Hi", **fields}


@pytest.mark.parametrize(
    "content",
    [
        {"t": [turn(0, 0)]},
        {"t": [turn(1, 0), turn(0, 1)]},
        {"t": [turn(1, 0), turn(1, 0)]},
        {"t": [turn(1, 0, text={"__html": EVIL})]},
        {"t": [turn(1, 0, role=EVIL)]},
        {"i": [{"name": "a", "kind": "local", "scale": 1, "site": "3.post_mlp", "row": "AAAA"}]},
        {"i": [{"name": "a", "kind": "local", "scale": 1, "site": "3.post_mlp", "row": "AADAfw=="}]},
        {"i": [{"name": "a", "kind": "lens", "scale": None}]},
        {"g": [{"name": "a", "reads": {"kind": "probe", "name": "mood", "site": ""}, "then": {}}]},
        {"s": {"seed": "9" * 40}},
        {"w": 3},
        {"w": [{"kind": "constructor", "name": "mood"}]},
        {"b": {"0": EVIL}},
        {"b": {EVIL: 1}},
        {"v": "constructor"},
        "text",
        None,
    ],
)  # fmt: skip
def test_a_damaged_or_hostile_link_restores_nothing_and_the_page_says_so(page: Page, content: Any) -> None:
    go_to_link(page, content)
    expect(page.get_by_role("alert")).to_contain_text("This link cannot be read, so nothing was restored")
    expect(page.get_by_role("button", name=QUESTION)).to_be_enabled()
    show(page, "Steer")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_link_that_names_what_every_object_has_blanks_no_view(page: Page, server: Server) -> None:
    name = "constructor"  # of JavaScript's objects, a function
    vector = base64.b64encode(np.ones(SIZE, np.float32).tobytes()).decode()
    items = [
        {"name": "own", "isOn": True, "scale": 1, "kind": "local", "site": f"3.{name}", "row": vector},
        {"name": name, "isOn": True, "scale": 1, "kind": "module"},
    ]
    followed = [{"sae": name, "id": 1, "label": ""}]
    go_to_link(page, {"s": {"colourBy": name, "readHook": name, "lens": name, "sae": name}, "i": items, "f": followed})
    expect(page.get_by_role("alert")).to_have_count(0)
    for view in VIEWS:
        show(page, view)
    show(page, "Chat")
    ask(page)
    expect(page.locator(".token").first).to_be_visible()


def test_a_bound_is_typed_with_its_sign(page: Page) -> None:
    make_vector(page)
    item = page.locator("li.item", has_text="joy")
    item.get_by_label("Do", exact=True).select_option(label="limit p from above")
    bound = item.get_by_label("p at most of joy")
    bound.press("Control+a")
    bound.press_sequentially("-12.5")
    expect(bound).to_have_value("-12.5")
    show(page, "Chat")
    with page.expect_request(lambda request: "steering_ops" in (request.post_data or "")) as asking:
        ask(page, "Hi", runs=2)
    (operation,) = json.loads(asking.value.post_data or "")["steering_ops"]
    assert operation["max"] == -12.5


def test_a_key_that_no_header_can_hold_is_not_taken(page: Page) -> None:
    page.get_by_role("button", name="Keys").click()
    page.get_by_label("headgate key").fill("ключ")
    page.get_by_role("button", name="Use these keys").click()
    expect(page.get_by_label("headgate key")).to_be_focused()
    page.keyboard.press("Escape")
    page.reload()
    expect(page.get_by_label("Layer", exact=True)).to_be_visible()  # the key from before is kept


def answer_with(answer: dict[str, Any], route: Route) -> None:
    route.fulfill(**answer)


def test_what_the_server_cannot_compute_is_no_number(page: Page) -> None:
    """Its JSON has null for log-probabilities of NaN."""
    listed = {"token": "Hi", "logprob": None, "bytes": None, "top_logprobs": [{"token": EVIL, "logprob": None}]}
    choice = {"index": 0, "delta": {"content": "Hi"}, "logprobs": {"content": [listed]}, "finish_reason": "stop"}
    body = f"data: {json.dumps({'choices': [choice]})}\n\n"
    for end, status in (("data: [DONE]\n\n", "done"), ("", "failed")):
        answer = {"body": body + end, "headers": {"content-type": "text/event-stream"}}
        page.route("**/v1/chat/completions", partial(answer_with, answer))
        page.get_by_label("Your message").fill("Hi")
        page.get_by_label("Your message").press("Enter")
        run = page.locator("li.turn.assistant").last.locator(".run")
        expect(run).to_have_attribute("data-status", status)
        run.locator(".token").hover()
        expect(run.locator(".card .alternatives small")).to_have_text("\N{EN DASH}")
        expect(run.locator(".card [data-series=surprise]")).to_have_count(0)
    expect(page.get_by_role("alert")).to_have_text(
        "The connection to the server broke off in the middle of the answer."
    )


def test_a_recording_is_one_file_that_calls_nobody(page: Page, context: BrowserContext, tmp_path: Path) -> None:
    prepare(page, tokens=6)
    (run,) = ask(page).all()
    before = run.get_by_role("group").last.inner_text()
    norms = series_of(run, "norm")
    page.get_by_role("button", name="Take it home").click()
    with page.expect_download() as saving:
        page.get_by_role("button", name="Save as one HTML file").click()
    saving.value.save_as(tmp_path / "recording.html")

    assert KEY not in (tmp_path / "recording.html").read_text()
    recorded = context.new_page()
    asked: list[str] = []
    recorded.on("request", lambda request: asked.append(request.url))
    recorded.goto(f"file://{tmp_path / 'recording.html'}")
    (again,) = recorded.locator(".run").all()
    assert again.get_by_role("group").last.inner_text() == before
    assert series_of(again, "norm") == pytest.approx(norms, rel=1e-4, nan_ok=True)
    assert [url for url in asked if not url.startswith("file:")] == []


def test_a_server_that_is_gone_and_back_is_noticed(page: Page, server: Server) -> None:
    def gone(route: Route) -> None:
        route.abort()

    page.route("**/v1/**", gone)
    page.get_by_label("Your message").fill("Hi")
    page.get_by_label("Your message").press("Enter")
    expect(page.get_by_role("alert").last).to_contain_text("The server does not answer")
    expect(page.locator("main > [role=alert]")).to_contain_text("the page asks again every few seconds")
    call(server, "/v1/steering/modules/register", name="new", vectors={"post_mlp": {str(LAYER): [1.0] * SIZE}})
    page.unroute("**/v1/**", gone)
    expect(page.locator("main > [role=alert]")).to_have_count(0, timeout=patience(20) * 1000)
    expect(page.get_by_label("cosine to new")).to_be_visible()  # what it has is asked again
    page.route("**/v1/**", gone)
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("The server does not answer")
    page.unroute("**/v1/**", gone)
    expect(page.get_by_role("alert")).to_have_count(0, timeout=patience(20) * 1000)
    expect(page.get_by_label("Layer", exact=True)).to_be_visible()


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    if shutil.which("npm") is None:
        pytest.skip("there is no npm to install axe-core with")
    folder = tmp_path_factory.mktemp("axe")
    for name in ("package.json", "package-lock.json"):
        shutil.copy(ROOT / "studio" / name, folder)
    command = ["npm", "ci", "--silent", "--ignore-scripts", "--no-audit", "--no-fund"]
    subprocess.run(command, cwd=folder, check=True, timeout=patience(120))
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text()


VIEWS = ("Chat", "Grid", "Attention", "Features", "Steer", "Dynamic", "Captures", "Server")


def fill(page: Page, server: Server) -> None:
    """Give every view something to show: an answer with features, its grid and attention, a vector, a gate, a rule."""
    chat(server, max_tokens=2, capture={"filesystem": {"hooks": {"post_mlp": [3]}, "positions": "all"}})
    page.get_by_label("probe mood").check()
    page.get_by_label("Features of").select_option("words")
    prepare(page, tokens=6)
    ask(page)
    page.get_by_role("button", name="Layer by layer").click()
    page.get_by_label("Lens").select_option("logit")
    page.get_by_role("button", name="Read all layers").click()
    page.get_by_role("application").focus()
    for press in ("ArrowRight", "ArrowRight", "Enter"):
        page.get_by_role("application").press(press)
    expect(page.locator("[data-row*='@']")).to_be_visible()
    show(page, "Attention")
    page.get_by_role("button", name="Read its attention").click()
    page.get_by_role("application").press("ArrowDown")
    make_vector(page)
    page.get_by_role("button", name="Register on the server").click()
    expect(page.get_by_text("registered, at")).to_be_visible()
    show(page, "Dynamic")
    page.get_by_label("When").select_option("cosine joy")
    page.get_by_role("button", name="Add the gate").click()
    page.get_by_role("button", name="Register the rule", exact=True).click()
    expect(page.locator("[data-rule]")).to_be_visible()
    show(page, "Captures")
    page.get_by_role("button", name=re.compile("^Open ")).first.click()
    expect(page.locator("[data-opened] figcaption")).to_be_visible()


def test_nothing_serious_stands_in_the_way_of_screen_readers_and_a_phone_can_read(
    page: Page, server: Server, axe: str
) -> None:
    fill(page, server)
    page.evaluate(axe)
    look = "async () => (await axe.run(document)).violations.filter((v) => ['serious', 'critical'].includes(v.impact))"
    found: dict[str, Any] = {}
    visits: dict[str, Callable[[], None]] = {view: partial(show, page, view) for view in VIEWS}
    visits["take it home"] = lambda: page.get_by_role("button", name="Take it home").click()
    visits["keys"] = lambda: page.get_by_role("button", name="Keys").click()
    schemes: tuple[Any, ...] = ("light", "dark")
    for scheme in schemes:
        page.emulate_media(color_scheme=scheme)
        for name, visit in visits.items():
            visit()
            if violations := page.evaluate(look):
                found[f"{name}, {scheme}"] = [
                    (each["id"], [node["html"] for node in each["nodes"]][:3]) for each in violations
                ]
            page.keyboard.press("Escape")
    page.set_viewport_size({"width": 375, "height": 700})
    wider = "document.documentElement.scrollWidth - innerWidth"
    too_wide = {}
    for view in VIEWS:
        show(page, view)
        if page.evaluate(wider) > 0:
            too_wide[view] = page.evaluate(wider)

    assert found == {}
    assert too_wide == {}


RUN_ALL = """
import contextlib, io, json, sys
said = {}
for name, code in json.load(sys.stdin).items():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {"__name__": name})
    said[name] = out.getvalue()
print(json.dumps(said))
"""


def codes_of(page: Page) -> dict[str, dict[str, str]]:
    """What *Take it home* gives in every view, by language and by view and title."""
    codes: dict[str, dict[str, str]] = {"curl": {}, "openai client": {}, "headgate client": {}}
    for view in VIEWS:
        show(page, view)
        page.get_by_role("button", name="Take it home").click()
        for language, of_views in codes.items():
            page.get_by_role("button", name=language, exact=True).click()
            for section in page.locator("dialog section.code").all():
                title = section.locator("pre").get_attribute("aria-label")
                of_views[f"{view}: {title}"] = section.locator("pre").inner_text()
        page.keyboard.press("Escape")
    return codes


def run_code(command: list[str], code: str, folder: Path) -> str:
    """Run a program on a standard input, with the key in its environment; return what it says."""
    environment = {**os.environ, "HEADGATE_KEY": KEY}
    done = subprocess.run(
        command, input=code, cwd=folder, env=environment, capture_output=True, text=True, timeout=patience(180)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_code_of_every_view_runs(page: Page, server: Server, tmp_path: Path) -> None:
    fill(page, server)
    codes = codes_of(page)
    show(page, "Chat")
    answer = page.locator(".turn .run").first.get_by_role("group").last.inner_text().strip()

    assert {name.partition(":")[0] for name in codes["curl"]} == set(VIEWS)
    assert codes["curl"].keys() == codes["openai client"].keys() == codes["headgate client"].keys()
    said = {"curl": {name: run_code(["bash"], code, tmp_path) for name, code in codes["curl"].items()}}
    for language in ("openai client", "headgate client"):
        said[language] = json.loads(run_code([sys.executable, "-c", RUN_ALL], json.dumps(codes[language]), ROOT))
    (rows,) = (name for name in said["curl"] if "rows" in name)
    said["curl"][rows] = str(load_file(tmp_path / "rows.safetensors").keys())
    for language, outputs in said.items():
        refused = {name: text for name, text in outputs.items() if not text.strip() or re.search('"error": ?{', text)}
        assert refused == {}, language
    assert said["headgate client"]["Chat: The plain answer"].strip() == answer
    (figures,) = (text for name, text in said["curl"].items() if name.startswith("Server"))
    assert "headgate_capture_rows_total" in figures


LONG, DEEP = 4000, 80


def test_a_grid_of_4000_tokens_and_80_layers_is_fluid(page: Page, context: BrowserContext, tmp_path: Path) -> None:
    prepare(page, tokens=2)
    ask(page)
    page.get_by_role("button", name="Take it home").click()
    with page.expect_download() as saving:
        page.get_by_role("button", name="Save as one HTML file").click()
    saving.value.save_as(tmp_path / "short.html")
    html = (tmp_path / "short.html").read_text()
    begin = html.index('id="recording">') + len('id="recording">')
    state = json.loads(html[begin : html.index("</script>", begin)])
    norms = np.random.default_rng(0).normal(100, 20, size=(DEEP, LONG)).round(3)
    token = {"text": " word", "id": 1, "logprob": -1.0, "top": []}
    run = next(turn["runs"][0] for turn in state["turns"] if turn["runs"])
    run |= {"prompt": [token] * (LONG - 100), "answer": [token] * 100, "series": {}}
    run["grid"] = {"hook": "post_mlp", "layers": list(range(DEEP)), "numTokens": LONG, "probes": [], "lens": None}
    run["grid"] |= {"norms": norms.tolist(), "cosines": norms.tolist()}
    state["view"] = "chat"
    long = json.dumps(state).replace("<", "\\u003c")
    (tmp_path / "long.html").write_text(html[:begin] + long + html[html.index("</script>", begin) :])
    opened = context.new_page()
    opened.goto(f"file://{tmp_path / 'long.html'}")
    timed = """async (presses) => {
      const frame = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
      const began = performance.now();
      [...document.querySelectorAll("nav button")].find((each) => each.textContent === "Grid").click();
      await frame();
      const box = document.querySelector(".canvas");
      const drawn = performance.now();
      for (const key of presses) {
        box.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
        await frame();
      }
      return [drawn - began, (performance.now() - drawn) / presses.length];
    }"""
    drawn_ms, step_ms = opened.evaluate(timed, ["ArrowRight", "ArrowUp"] * 10)

    assert opened.locator(".cell b").inner_text() == "10.post_mlp"
    assert number(opened.locator('.cell [data-value="norm"] td')) == norms[10, 9]
    assert drawn_ms < patience(2) * 1000
    assert step_ms < patience(0.3) * 1000
