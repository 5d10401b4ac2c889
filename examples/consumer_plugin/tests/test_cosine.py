"""The consumer holds to headgate's contract, and its numbers are right."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from headgate_cosine import CosineConsumer

from headgate.capture import CapturedRequest, ConfigError, ConsumerContext, ConsumerError, Site, SpecContext
from headgate.consumers.feed import EXAMPLE_MODEL, ExampleRequest, Feed
from headgate.consumers.testing import ConsumerContract

SITE = Site.parse("1.post_mlp")
DIRECTION = np.random.default_rng(0).normal(size=EXAMPLE_MODEL.hidden_size)
CONTEXT = ConsumerContext(instance_name="cosine", model=EXAMPLE_MODEL)


def params_in(folder: Path, direction: Any = DIRECTION) -> Mapping[str, Any]:
    np.save(folder / "direction.npy", direction)
    return {"direction": str(folder / "direction.npy"), "site": SITE.name}


class TestCosineHoldsToTheContract(ConsumerContract):
    consumer_class = CosineConsumer

    def params(self, folder: Path) -> Mapping[str, Any]:
        return params_in(folder)

    def client_spec(self) -> Any:
        return {"top": 100, "positions": "all"}

    def bad_specs(self) -> Mapping[str, Any]:
        return {"top": {"top": "many"}, "hooks": {"hooks": {"post_mlp": [1]}}}

    def check_payload(self, payload: Any, expected: CapturedRequest) -> None:
        direction = torch.from_numpy(DIRECTION)
        cosines = torch.nn.functional.cosine_similarity(expected.rows[SITE].double(), direction[None], dim=1)
        assert payload["mean"] == (pytest.approx(cosines.mean().item(), abs=1e-6) if len(cosines) else None)
        by_position = {entry["position"]: entry for entry in payload["top"]}
        assert sorted(by_position) == expected.positions.tolist()
        for position, token_id, cosine in zip(expected.positions, expected.token_ids, cosines, strict=True):
            assert by_position[position]["token_id"] == token_id
            assert by_position[position]["cosine"] == pytest.approx(cosine.item(), abs=1e-6)


def request(params: Mapping[str, Any], raw: Any) -> ExampleRequest:
    context = SpecContext(instance_name="cosine", model=EXAMPLE_MODEL, params=params, client_request_id="r1")
    return ExampleRequest(CosineConsumer.validate_client_spec(raw, context), "r1")


def test_the_highest_come_first_and_no_more_than_were_asked_for(tmp_path: Path) -> None:
    params = params_in(tmp_path)
    consumer = Feed(CosineConsumer(params, CONTEXT))

    top = consumer.whole(request(params, {"top": 3}))["top"]

    everything = consumer.whole(request(params, {"top": 100}))["top"]
    assert top == everything[:3]
    assert [entry["cosine"] for entry in everything] == sorted((e["cosine"] for e in everything), reverse=True)


def test_activations_that_are_not_finite_are_an_error_and_not_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = params_in(tmp_path)
    broken = request(params, {})
    monkeypatch.setattr(broken, "rows", lambda site, positions: torch.full((len(positions), 16), torch.nan).bfloat16())

    with pytest.raises(ConsumerError, match="not finite"):
        Feed(CosineConsumer(params, CONTEXT)).whole(broken)


@pytest.mark.parametrize("direction", [np.zeros(16), np.ones(8), np.ones((1, 16)), np.full(16, np.nan)])
def test_a_direction_that_makes_no_sense_is_refused_at_start(tmp_path: Path, direction: Any) -> None:
    with pytest.raises(ConfigError, match="expected a finite vector of 16 values"):
        CosineConsumer(params_in(tmp_path, direction), CONTEXT)


@pytest.mark.parametrize(
    "params", [{}, {"direction": 3, "site": "1.post_mlp"}, {"direction": "a.npy"}, {"direction": "a.npy", "site": "1"}]
)
def test_wrong_parameters_are_refused(params: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cosine: "):
        CosineConsumer.check_params(params)


def test_headgate_finds_it_by_name() -> None:
    (point,) = entry_points(group="vllm.capture_consumers", name="cosine")

    assert point.load() is CosineConsumer
