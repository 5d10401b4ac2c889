"""The reward consumer: its numbers, its directions, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headgate.capture.schema.consumer import ConsumerContext, SpecContext
from headgate.capture.schema.errors import ConfigError, ConsumerError, RequestError
from headgate.consumers.feed import EXAMPLE_MODEL, ExampleRequest, Feed
from headgate.consumers.memory import MemoryConsumer
from headgate.consumers.reward import RewardConsumer, read_direction

HIDDEN = EXAMPLE_MODEL.hidden_size
SITE = EXAMPLE_MODEL.sites[5]
assert SITE.name == "2.post_mlp"
ALONG = np.random.default_rng(3).normal(size=HIDDEN)
CONTEXT = ConsumerContext(instance_name="reward", model=EXAMPLE_MODEL)


@pytest.fixture
def direction(tmp_path: Path) -> str:
    np.save(tmp_path / "along.npy", ALONG)
    return str(tmp_path / "along.npy")


def request(params: dict[str, Any], name: str = "r", raw: Any = None, **shape: Any) -> ExampleRequest:
    context = SpecContext(instance_name="reward", model=EXAMPLE_MODEL, params=params, client_request_id=name)
    return ExampleRequest(RewardConsumer.validate_client_spec(raw or {}, context), name, **shape)


def rows_by_memory(asked: ExampleRequest) -> np.ndarray[Any, Any]:
    """The same request's rows, captured by the consumer `memory`: float64 ``[num_rows, hidden]``."""
    feed = Feed(MemoryConsumer({}, ConsumerContext(instance_name="memory", model=EXAMPLE_MODEL)))
    captured = feed.whole(ExampleRequest(asked.info.spec, asked.info.request_id, prompt=5, output=9))
    return np.asarray(captured[SITE].double().numpy())


FUNCTIONS = {"identity": lambda x: x, "tanh": math.tanh, "sigmoid": lambda x: 1 / (1 + math.exp(-x))}


@pytest.mark.parametrize("chosen", [{}, {"start": 2}, {"start": -3}, {"start": 1, "stop": -1, "step": 2}], ids=str)
@pytest.mark.parametrize("transform", FUNCTIONS)
@pytest.mark.parametrize("measure", ["cos", "projection"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numbers_are_those_of_numpy_on_rows_that_memory_captures(
    direction: str, chosen: dict[str, int], transform: str, measure: str, dtype: str
) -> None:
    params = {
        **{"layer": -2, "direction": direction, "positions": chosen, "transform": transform},
        **{"measure": measure, "scale": 0.7, "dtype": dtype},
    }
    asked = request(params, prompt=5, output=9)

    payload = Feed(RewardConsumer(params, CONTEXT)).whole(asked)

    rows = rows_by_memory(asked)[slice(chosen.get("start"), chosen.get("stop"), chosen.get("step"))]
    dots, norms = rows @ (ALONG / np.linalg.norm(ALONG)), np.linalg.norm(rows, axis=1)
    value = (dots / norms).mean() if measure == "cos" else dots.mean()
    near = {"abs": 1e-6 if dtype == "float32" else 1e-14}
    assert payload == {
        "reward": pytest.approx(FUNCTIONS[transform](0.7 * value), **near),
        "cos": pytest.approx((dots / norms).mean(), **near),
        "act_norm": pytest.approx(norms.mean(), rel=1e-7 if dtype == "float32" else 1e-12),
        "num_positions": len(rows),
        "status": "ok",
    }


def test_a_request_chooses_among_the_directions(tmp_path: Path, direction: str) -> None:
    np.save(tmp_path / "against.npy", -ALONG)
    params = {
        **{"layer": 2, "directions": {"along": direction, "against": str(tmp_path / "against.npy")}},
        "default": "against",
    }
    feed = Feed(RewardConsumer(params, CONTEXT))

    requests = [request(params, "r", raw, output=6) for raw in ({}, {"direction": "along"}, {"direction": "against"})]
    default, along, against = (feed.whole(one)["reward"] for one in requests)

    assert default == against == pytest.approx(-along)
    assert along != 0


def test_rows_that_were_lost_and_rows_that_are_not_finite_are_told(direction: str) -> None:
    class Broken(ExampleRequest):
        def rows(self, site: Any, positions: Any) -> torch.Tensor:
            rows = super().rows(site, positions)
            rows[positions == 7] = torch.nan
            return rows

    params: dict[str, Any] = {"layer": 2, "direction": direction}
    feed = Feed(RewardConsumer(params, CONTEXT))
    lossy, broken, short = (request(params, name, output=6) for name in ("lossy", "broken", "short"))
    broken = Broken(broken.info.spec, "broken", prompt=5, output=6)
    feed.begin(lossy)
    feed.step({lossy: (0, 7)})

    told = feed.finish(lossy, dropped_rows=3)
    empty = feed.whole(ExampleRequest(short.info.spec, "short", prompt=5, output=1))
    nan = feed.whole(broken)

    assert (told["status"], told["num_positions"]) == ("incomplete", 2)
    assert told["reward"] is not None
    assert empty == {"reward": None, "cos": None, "act_norm": None, "num_positions": 0, "status": "no_rows"}
    assert (nan["status"], nan["reward"], nan["num_positions"]) == ("not_finite", None, 5)


def test_directions_that_the_worker_does_not_have_are_refused(direction: str) -> None:
    params: dict[str, Any] = {"layer": 2, "direction": direction}
    feed = Feed(RewardConsumer(params, CONTEXT))
    np.save(direction, -ALONG)
    fresh, asked = RewardConsumer(params, CONTEXT), request(params)

    feed.begin(asked)  # whose readout is of the file as it was

    with pytest.raises(ConsumerError, match="has changed since the engine started"):
        fresh.begin(asked.info)


def test_a_row_of_zeros_counts_as_one_at_a_right_angle(direction: str) -> None:
    class Zeros(ExampleRequest):
        def rows(self, site: Any, positions: Any) -> torch.Tensor:
            return torch.zeros_like(super().rows(site, positions))

    params: dict[str, Any] = {"layer": 2, "direction": direction, "transform": "sigmoid"}
    asked = Zeros(request(params).info.spec, "zeros")

    payload = Feed(RewardConsumer(params, CONTEXT)).whole(asked)

    assert (payload["reward"], payload["cos"], payload["status"]) == (0.5, 0.0, "ok")


def test_a_stage_without_the_site_has_nothing_to_say(direction: str) -> None:
    params: dict[str, Any] = {"layer": 2, "direction": direction}
    asked = request(params)
    elsewhere = type(asked.info.spec)(sites=(), positions=asked.info.spec.positions, options=asked.info.spec.options)

    feed, there = Feed(RewardConsumer(params, CONTEXT)), ExampleRequest(elsewhere, "r")
    feed.begin(there)

    assert feed.finish(there) is None


@pytest.mark.parametrize(
    "tensors",
    [
        {"vectors/2.post_mlp": ALONG},
        {"2.post_mlp": ALONG, "1.post_mlp": -ALONG},
        {
            "vectors/2.post_mlp": 0.25 * ALONG,
            "decode_vectors/2.post_mlp": 0.75 * ALONG,
            "prefill_vectors/2.post_mlp": -ALONG,
        },
    ],
    ids=lambda tensors: " ".join(tensors),
)
def test_files_of_steering_vectors_are_read(tmp_path: Path, tensors: dict[str, Any]) -> None:
    path = tmp_path / "joy.safetensors"
    save_file({name: torch.from_numpy(row) for name, row in tensors.items()}, path)

    np.testing.assert_allclose(read_direction(path, SITE, HIDDEN), ALONG / np.linalg.norm(ALONG))


def test_what_steering_saves_is_read(tmp_path: Path) -> None:
    from headgate.steering import PhaseVectors, save

    path = tmp_path / "joy.safetensors"
    save(path, PhaseVectors.from_rows({SITE: ALONG.astype(np.float32)}))

    np.testing.assert_allclose(read_direction(path, SITE, HIDDEN), ALONG / np.linalg.norm(ALONG), rtol=1e-6)


def write(folder: Path, kind: str) -> str:
    path = folder / {"text": "d.txt", "vectors of another site": "d.safetensors", "damaged": "d.safetensors"}.get(
        kind, "d.npy"
    )
    if kind == "vectors of another site":
        save_file({"vectors/1.post_mlp": torch.ones(HIDDEN), "prefill_vectors/2.post_mlp": torch.ones(HIDDEN)}, path)
    elif kind in ("text", "damaged"):
        path.write_bytes(b"nonsense")
    elif kind != "missing":
        np.save(path, {"wide": np.ones(HIDDEN + 1), "zero": np.zeros(HIDDEN), "whole": np.ones(HIDDEN, int)}[kind])
    return str(path)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("missing", "No such file"),
        ("text", r"unknown suffix '\.txt'"),
        ("damaged", "d.safetensors"),
        ("vectors of another site", "no vector for generated tokens at 2.post_mlp, but prefill_vectors/2.post_mlp"),
        ("wide", r"its shape is \[17\], expected \[16\]"),
        ("zero", "its length is 0.0"),
        ("whole", "expected an array of floats"),
    ],
)
def test_a_direction_that_cannot_be_read_is_refused_by_its_file(tmp_path: Path, kind: str, reason: str) -> None:
    path = write(tmp_path, kind)

    with pytest.raises(ConfigError, match=reason) as caught:
        RewardConsumer({"layer": 2, "direction": path}, CONTEXT)

    assert path in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"direction": None}, "direction"),
        ({"directions": {"a": "x"}}, "either direction"),
        ({"default": "joy"}, "default"),
        ({"hook": "nowhere"}, "hook"),
        ({"transform": "relu"}, "transform"),
        ({"positions": {"step": 0}}, "positions.step"),
        ({"positions": {"first": 0}}, "first"),
        ({"scale": math.inf}, "scale"),
        ({"dtype": "bfloat16"}, "dtype"),
    ],
    ids=str,
)
def test_wrong_parameters_are_named(direction: str, wrong: dict[str, Any], named: str) -> None:
    params = {"layer": 2, "direction": direction, **wrong}

    with pytest.raises(ConfigError, match=named):
        RewardConsumer.check_params({name: value for name, value in params.items() if value is not None})


def test_the_layer_must_be_given_and_captured(direction: str) -> None:
    with pytest.raises(ConfigError, match="layer is required"):
        RewardConsumer.check_params({"direction": direction})
    RewardConsumer.check_params({"direction": direction, "hook": "final_norm"})
    with pytest.raises(ConfigError, match=r"2\.mlp_out is not captured here"):
        RewardConsumer({"layer": 2, "hook": "mlp_out", "direction": direction}, CONTEXT)


def test_the_last_norm_needs_no_layer(direction: str) -> None:
    params = {"direction": direction, "hook": "final_norm"}

    payload = Feed(RewardConsumer(params, CONTEXT)).whole(request(params))

    assert payload["status"] == "ok"


def test_requests_choose_a_direction_and_nothing_else(direction: str) -> None:
    params: dict[str, Any] = {"layer": 2, "direction": direction}
    for raw, field in (({"direction": "joy"}, "direction"), ({"layer": 3}, "layer"), ({"direction": 3}, "direction")):
        with pytest.raises(RequestError) as caught:
            request(params, raw=raw)
        assert caught.value.field == f"capture.reward.{field}"
