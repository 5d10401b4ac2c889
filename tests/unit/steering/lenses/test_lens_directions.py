"""Directions of tokens, wherever a vector may be given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headgate.capture.lens import LensKind, save
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.errors import ConfigError, RequestError, UnsupportedError
from headgate.capture.schema.sites import Site, sort_sites
from headgate.steering.documents.gates import read_gate_fields
from headgate.steering.documents.request import BASE, read_steering
from headgate.steering.documents.vectors import read_tier
from headgate.steering.lenses.directions import LensDirections
from headgate.steering.vectors.phase_vectors import Steerable
from tests.fakes.heads import Letters

HIDDEN = 4
SITES = tuple(Site.parse(f"{layer}.post_mlp") for layer in range(3))
MODEL = ModelInfo(name="m", num_layers=3, hidden_size=HIDDEN, dtype="float32", sites=SITES)
RNG = np.random.default_rng(1)
HEAD = RNG.normal(size=(30, HIDDEN)).astype(np.float32)
MATRICES = {layer: RNG.normal(size=(HIDDEN, HIDDEN)).astype(np.float32) for layer in (0, 2)}


class Tokens(Letters):
    def head_row(self, token: int) -> Any:
        return HEAD[token]


@pytest.fixture
def steerable(tmp_path: Path) -> Steerable:
    path = tmp_path / "j.safetensors"
    save(path, LensKind.JACOBIAN, MATRICES)
    return Steerable(
        num_layers=3,
        hidden_size=HIDDEN,
        dtype="float32",
        sites=SITES,
        max_vectors=6,
        op_sites=SITES,
        max_ops_per_site=4,
        max_gates=4,
        directions=LensDirections({"j": str(path)}, MODEL, Tokens(30)),
    )


def direction(token: Any, at: str = "2.post_mlp", lens: str = "j", **more: Any) -> dict[str, Any]:
    return {"lens": lens, "token": token, "at": at, **more}


def by_definition(token: int, layer: int) -> Any:
    return MATRICES[layer].astype(float).T @ HEAD[token]


def test_a_list_of_directions_steers_and_those_of_one_site_add_up(steerable: Steerable) -> None:
    given = [direction("b", scale=4.0), direction(7, scale=-1.5), direction(5, "1.post_mlp", "logit")]

    found = read_tier(given, steerable, BASE)

    assert found is not None
    assert found.sites == (SITES[1], SITES[2])
    np.testing.assert_allclose(found.float32()[0], HEAD[5], rtol=1e-6)
    expected = 4.0 * by_definition(1, 2) - 1.5 * by_definition(7, 2)
    np.testing.assert_allclose(found.float32()[1], expected, rtol=1e-5)


def test_operations_and_gates_take_a_direction_for_a_vector(steerable: Steerable) -> None:
    row = by_definition(1, 2).astype(np.float32)
    ops = [{"at": "1.post_mlp", "method": "ablate", "vector": direction("b")}]
    plain = [{"at": "1.post_mlp", "method": "ablate", "vector": row}]
    assert read_steering({"steering_ops": ops}, steerable)[0] == read_steering({"steering_ops": plain}, steerable)[0]

    def gate(vector: Any) -> Any:
        effect = {"vectors": {"post_mlp": {2: row}}}
        return {"steering_gates": [{"when": {"cosine": vector, "at": "2.post_mlp", "above": 0.5}, "then": effect}]}

    read = [read_gate_fields(gate(vector), steerable) for vector in (direction("b"), row)]
    assert len(read[0]) == 1
    assert repr(read[0]) == repr(read[1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "expected a non-empty object of hook point to vectors, or a list of directions"),
        ([direction("b"), [1.0] * HIDDEN], r"steering_vectors\[1\]: expected \{\"lens\""),
        ([direction("b", lens="x")], r"steering_vectors\[0\]\.lens: no such lens 'x'; configured: logit, j"),
        ([direction("bcd")], r"steering_vectors\[0\]\.token: 'bcd' is 3 tokens"),
        ([direction(30)], r"\.token: expected a token, as a text or an id below 30; got 30"),
        ([direction("b", at="1.post_mlp")], r"\.at: the lens 'j' has the layers \[0, 2\] alone"),
        ([direction("b", at="2.pre_attn")], r"\.at: a lens reads post_mlp of a layer below 3, not 2\.pre_attn"),
        ([direction("b", at="post")], r"\.at: expected a site such as 12\.post_mlp"),
        ([direction("b", scale="much")], r"\.scale: expected a finite number, got 'much'"),
        ([direction("b", scale=10**400)], r"\.scale: expected a finite number, got 1000"),
        ([direction("b", layer=2)], "expected the keys 'lens', 'token', 'at' and 'scale'"),
        ([{"lens": "j", "token": "b"}], "expected the keys"),
    ],
)
def test_what_is_wrong_is_refused_by_its_key(steerable: Steerable, given: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_tier(given, steerable, BASE)


def test_a_head_that_cannot_be_read_is_the_fields_error(steerable: Steerable) -> None:
    class Quantized(Letters):
        def head_row(self, token: int) -> Any:
            raise UnsupportedError("its safetensors have no plain head")

    blind = replace(steerable, directions=LensDirections({}, MODEL, Quantized(30)))
    with pytest.raises(RequestError, match=r"steering_vectors\[0\]: its safetensors have no plain head"):
        read_tier([direction("b", lens="logit")], blind, BASE)
    with pytest.raises(RequestError, match="in requests to a server or LLM alone"):
        read_tier([direction("b")], replace(steerable, directions=None), BASE)


def test_a_lens_of_another_model_is_refused_at_the_start(steerable: Steerable, tmp_path: Path) -> None:
    lenses = {"j": str(tmp_path / "j.safetensors")}
    with pytest.raises(ConfigError, match=r"steering\.lenses\.j: reads rows of 4 values; the model has 8"):
        LensDirections(lenses, replace(MODEL, hidden_size=8), Tokens(30))
    with pytest.raises(ConfigError, match=r"steering\.lenses\.j: has the layers \[2\]; the model has 2"):
        LensDirections(lenses, replace(MODEL, num_layers=2), Tokens(30))
    with pytest.raises(ConfigError, match="the name of the lens without a file"):
        LensDirections({"logit": "x"}, MODEL, Tokens(30))
    with pytest.raises(ConfigError, match=r"steering\.lenses\.x: nowhere: no such file"):
        LensDirections({"x": "nowhere"}, MODEL, Tokens(30))


def test_a_direction_is_refused_where_rows_are_as_wide_and_not_of_the_stream(steerable: Steerable) -> None:
    heads = Site.parse("1.hook_z")
    sites = tuple(sort_sites((heads, *SITES)))
    steerable = replace(steerable, sites=sites, op_sites=sites)
    with pytest.raises(RequestError, match=r"rows of 1\.hook_z are no rows of the stream") as refused:
        read_steering({"steering_ops": [{"at": "1.hook_z", "method": "ablate", "vector": direction("b")}]}, steerable)
    assert refused.value.field == "steering_ops[0].vector"
    effect = {"vectors": {"post_mlp": {2: [1.0] * HIDDEN}}}
    when = {"at": "1.hook_z", "cosine": direction("b"), "above": 0.5}
    with pytest.raises(RequestError, match="no rows of the stream") as refused:
        read_gate_fields({"steering_gates": [{"when": when, "then": effect}]}, steerable)
    assert refused.value.field == "steering_gates[0].when.cosine"
