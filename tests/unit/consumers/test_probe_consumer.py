"""The probe consumer: its scores, what it refuses, and what becomes of lost rows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headgate.capture.probe import HiddenLayer, Probe, save
from headgate.capture.schema.consumer import ConsumerContext, SpecContext
from headgate.capture.schema.errors import ConfigError, ConsumerError, RequestError
from headgate.capture.schema.sites import Site
from headgate.consumers.feed import EXAMPLE_MODEL, ExampleRequest, Feed
from headgate.consumers.probe import ProbeConsumer

HIDDEN = EXAMPLE_MODEL.hidden_size
CONTEXT = ConsumerContext(instance_name="probe", model=EXAMPLE_MODEL)
RNG = np.random.default_rng(1)
ANGER = Probe(site=Site.parse("3.post_mlp"), weight=RNG.normal(size=(1, HIDDEN)), bias=[0.5], threshold=0.25)  # type: ignore[arg-type]
MOODS = Probe(
    site=Site.parse("1.post_mlp"),
    kind="cosine",
    weight=RNG.normal(size=(3, HIDDEN)),
    classes=("a", "b", "c"),  # type: ignore[arg-type]
)
ALSO = Probe(site=ANGER.site, weight=RNG.normal(size=(1, HIDDEN)), classes=("calm",))  # type: ignore[arg-type]


@pytest.fixture
def params(tmp_path: Path) -> dict[str, Any]:
    for name, probe in {"anger": ANGER, "moods": MOODS, "also": ALSO}.items():
        save(tmp_path / f"{name}.safetensors", probe)
    return {"probes": {name: tmp_path / f"{name}.safetensors" for name in ("anger", "moods", "also")}}


def request(params: dict[str, Any], raw: Any = None, name: str = "r", **shape: Any) -> ExampleRequest:
    context = SpecContext(instance_name="probe", model=EXAMPLE_MODEL, params=params, client_request_id=name)
    return ExampleRequest(ProbeConsumer.validate_client_spec(raw or {}, context), name, **shape)


def by_definition(probe: Probe, asked: ExampleRequest) -> Any:
    rows = asked.rows(probe.site, asked.wanted()).double().numpy()
    weight, bias = probe.weight.astype(np.float64), probe.biases.astype(np.float64)
    scores = rows @ weight.T + bias
    if probe is MOODS:
        scores = rows @ weight.T / np.linalg.norm(rows, axis=1)[:, None] / np.linalg.norm(weight, axis=1)
    return scores[:, 0] if len(probe.classes) == 1 else scores


@pytest.mark.parametrize("positions", ["all", "all_generated", [0, 3, -1], {"start": 1, "step": 2}], ids=str)
def test_scores_are_those_of_the_definition(params: dict[str, Any], positions: Any) -> None:
    asked = request(params, {"positions": positions}, prompt=5, output=6)

    payload = Feed(ProbeConsumer(params, CONTEXT)).whole(asked)

    assert json.loads(json.dumps(payload)) == payload
    assert payload["positions"] == asked.wanted().tolist()
    assert payload["num_prompt_tokens"] == 5
    assert list(payload["probes"]) == ["anger", "moods", "also"]
    for name, probe in {"anger": ANGER, "moods": MOODS, "also": ALSO}.items():
        told = payload["probes"][name]
        np.testing.assert_allclose(told.pop("scores"), by_definition(probe, asked), rtol=1e-7)
        assert told == {
            "site": probe.site.name,
            "kind": probe.kind.value,
            "classes": list(probe.classes),
            "threshold": probe.threshold,
        }


def test_requests_of_one_batch_get_the_probes_that_they_chose(params: dict[str, Any]) -> None:
    feed = Feed(ProbeConsumer(params, CONTEXT))
    chosen = {"one": ["anger"], "two": ["also", "anger"], "three": ["moods"]}
    requests = {name: request(params, {"probes": probes}, name) for name, probes in chosen.items()}

    feed.begin(*requests.values())
    for start in range(0, 8, 3):
        feed.step({one: (start, min(start + 3, 8)) for one in requests.values()}, sites_per_block=1)
    payloads = {name: feed.finish(one) for name, one in requests.items()}

    assert {name: list(payload["probes"]) for name, payload in payloads.items()} == chosen
    for name in ("one", "two"):
        found = payloads[name]["probes"]["anger"]["scores"]
        np.testing.assert_allclose(found, by_definition(ANGER, requests[name]), rtol=1e-7)


def test_only_positions_that_every_probe_has_are_told_where_rows_were_lost(params: dict[str, Any]) -> None:
    feed = Feed(ProbeConsumer(params, CONTEXT))
    asked = request(params, {"probes": ["anger", "moods"]})
    alone = ExampleRequest(
        type(asked.info.spec)(
            sites=(ANGER.site,), positions=asked.info.spec.positions, options=asked.info.spec.options
        ),
        "r",
    )
    feed.begin(asked)
    feed.step({alone: (0, 3)})  # of the other site, these were lost
    feed.step({asked: (3, 6)})

    payload = feed.finish(asked, dropped_rows=3)

    assert payload["positions"] == [3, 4, 5]
    np.testing.assert_allclose(payload["probes"]["anger"]["scores"], by_definition(ANGER, asked)[3:6], rtol=1e-7)
    nothing = request(params, name="n")
    feed.begin(nothing)
    assert feed.finish(nothing)["positions"] == []


def test_rows_that_are_not_finite_have_no_score(params: dict[str, Any]) -> None:
    class Broken(ExampleRequest):
        def rows(self, site: Any, positions: Any) -> torch.Tensor:
            rows = super().rows(site, positions)
            rows[positions == 2] = torch.nan
            return rows

    spec = request(params, {"probes": ["anger", "moods"], "positions": [1, 2]}).info.spec
    payload = Feed(ProbeConsumer(params, CONTEXT)).whole(Broken(spec, "broken"))

    assert payload["probes"]["anger"]["scores"][1] is None
    assert payload["probes"]["moods"]["scores"][1] == [None] * 3
    assert isinstance(payload["probes"]["anger"]["scores"][0], float)


def test_a_result_is_bounded_and_the_next_request_is_not_concerned(params: dict[str, Any]) -> None:
    params["max_scores"] = 10
    feed = Feed(ProbeConsumer(params, CONTEXT))
    long, short = (request(params, {"probes": ["anger"]}, name, output=n) for name, n in (("long", 7), ("short", 6)))

    with pytest.raises(ConsumerError, match=r"10 numbers \(parameter max_scores\)"):
        feed.whole(long)

    assert len(feed.whole(short)["positions"]) == 10


def test_a_file_that_changed_under_the_engine_ends_the_request(params: dict[str, Any]) -> None:
    feed = Feed(ProbeConsumer(params, CONTEXT))
    save(params["probes"]["anger"], ALSO)
    os.utime(params["probes"]["anger"], ns=(1, 1))

    with pytest.raises(ConsumerError, match="'anger': its file has changed since the engine started"):
        feed.whole(request(params))

    assert feed.whole(request(params, {"probes": ["moods"]}, "other"))["positions"]


def test_scores_of_weights_that_the_worker_does_not_have_are_refused(params: dict[str, Any]) -> None:
    """The consumer was opened anew after its file had changed, in the process in place of one that died."""
    feed = Feed(ProbeConsumer(params, CONTEXT))
    save(params["probes"]["anger"], ALSO)
    os.utime(params["probes"]["anger"], ns=(1, 1))
    fresh, asked = ProbeConsumer(params, CONTEXT), request(params)
    others = [request(params, {"probes": [name]}, name) for name in ("moods", "also")]
    feed.begin(*others)

    asked.info = replace(asked.info, readouts=readouts_of(feed, asked))
    with pytest.raises(ConsumerError, match="'anger': its file has changed since the engine started"):
        fresh.begin(asked.info)
    asked.info = replace(asked.info, readouts={})
    with pytest.raises(ConsumerError, match="'anger'"):
        fresh.begin(asked.info)
    for other in others:  # "also" is of the same site
        fresh.begin(other.info)


def readouts_of(feed: Feed, asked: ExampleRequest) -> Any:
    """The readouts of a request, as the worker that `feed` stands for tells them."""
    known = ExampleRequest(replace(asked.info.spec, options={"probes": {}}), "known")
    feed.begin(known)
    return known.info.readouts


@pytest.mark.parametrize(
    ("raw", "field", "message"),
    [
        ([], "", "expected an object such as"),
        ({"hooks": {"post_mlp": [1]}}, ".hooks", "has probes, positions"),
        ({"probes": []}, ".probes", "expected a list of up to 3 names"),
        ({"probes": "anger"}, ".probes", "expected a list of up to 3 names"),
        ({"probes": ["anger", "rage"]}, ".probes[1]", "no such probe 'rage'; configured: also, anger, moods"),
        ({"probes": ["anger", "anger"]}, ".probes", "each name once"),
        ({"positions": "some"}, ".positions", "unknown selector"),
    ],
)
def test_bad_specs_are_refused_by_name(params: dict[str, Any], raw: Any, field: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        ProbeConsumer.validate_client_spec(
            raw, SpecContext(instance_name="probe", model=EXAMPLE_MODEL, params=params, client_request_id="r")
        )

    assert caught.value.field == f"capture.probe{field}"
    assert message in str(caught.value)


def test_an_mlp_is_scored_beside_others_of_its_site(params: dict[str, Any], tmp_path: Path) -> None:
    hidden = HiddenLayer(weight=RNG.normal(size=(5, HIDDEN)), bias=np.ones(5), activation="gelu")  # type: ignore[arg-type]
    network = Probe(site=ANGER.site, kind="mlp", weight=RNG.normal(size=(1, 5)), hidden=hidden)  # type: ignore[arg-type]
    save(tmp_path / "network.safetensors", network)
    params["probes"] = {"network": tmp_path / "network.safetensors", **params["probes"]}
    asked = request(params, {"probes": ["also", "network"]})

    payload = Feed(ProbeConsumer(params, CONTEXT)).whole(asked)

    rows = asked.rows(ANGER.site, asked.wanted()).double().numpy()
    np.testing.assert_allclose(payload["probes"]["network"]["scores"], network.scores(rows)[:, 0], rtol=1e-7)
    np.testing.assert_allclose(payload["probes"]["also"]["scores"], by_definition(ALSO, asked), rtol=1e-7)


BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, r"probes.p: .*no such file"),
    "damaged": (lambda path: path.write_bytes(b"x" * 40), r"probes.p: .*cut off or damaged"),
}


@pytest.mark.parametrize(("make", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_files_that_are_no_probes_are_refused(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    make(tmp_path / "p.safetensors")

    with pytest.raises(ConfigError, match=message):
        ProbeConsumer.check_params({"probes": {"p": str(tmp_path / "p.safetensors")}})


def test_probes_of_other_models_are_refused(tmp_path: Path) -> None:
    narrow, deep = Probe(site=ANGER.site, weight=[[1.0]]), Probe(site=Site.parse("9.post_mlp"), weight=ANGER.weight)  # type: ignore[arg-type]
    for probe, message in ((narrow, "rows of 1 values; the model has 16"), (deep, "site 9.post_mlp is not captured")):
        save(tmp_path / "p.safetensors", probe)
        with pytest.raises(ConfigError, match=message):
            ProbeConsumer({"probes": {"p": str(tmp_path / "p.safetensors")}}, CONTEXT)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "missing required field `probes`"),
        ({"probes": {}}, "name at least one"),
        ({"probes": {"a": 1}}, "probes"),
        ({"probes": {"a": "a.safetensors"}, "max_scores": 0}, "max_scores must be at least 1"),
        ({"probes": {"a": "a.safetensors"}, "threshold": 1}, "unknown field `threshold`"),
    ],
)
def test_bad_parameters_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ProbeConsumer.check_params(params)
