"""Vectors that the client packs read back as the same vectors; values that it cannot read are named."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given

from headgate.capture.schema.errors import RequestError
from headgate.steering import ops
from headgate.steering.client import extra_body
from headgate.steering.client.calls import pack, packed_fields
from headgate.steering.documents.gates import read_gate_fields
from headgate.steering.documents.request import BASE
from headgate.steering.documents.vectors import read_tier
from tests.fakes.gate_forms import PACKED, gate, gated, old_gate, plain
from tests.fakes.op_fields import V, W
from tests.fakes.vector_forms import HIDDEN, Rows, exact_rows, forms, model


@given(case=exact_rows())
def test_packed_as_text_or_as_bytes_every_form_reads_back_as_the_same_vectors(case: tuple[Rows, str]) -> None:
    for name, form in forms(*case).items():
        expected = read_tier(form, model(), BASE)

        text = json.loads(json.dumps(pack(form, BASE, as_text=True)))
        binary = msgspec.msgpack.decode(msgspec.msgpack.encode(pack(form, BASE, as_text=False)))

        assert read_tier(text, model(), BASE) == expected, name
        assert read_tier(binary, model(), BASE) == expected, name


@given(case=exact_rows())
def test_vectors_that_were_read_pack_as_themselves(case: tuple[Rows, str]) -> None:
    vectors = read_tier(forms(*case)["list"], model(), BASE)

    if vectors is not None:
        assert read_tier(pack(vectors, BASE, as_text=True), model(), BASE) == vectors


def test_scales_travel_beside_the_vectors_and_mixed_types_as_float32() -> None:
    half, single = np.full(HIDDEN, 0.5, np.float16), np.full(HIDDEN, 0.1, np.float32)
    given = {"post_mlp": {0: {"vector": half, "scale": 3}, 2: single}}

    packed = pack(given, BASE, as_text=False)["post_mlp"]

    assert (packed["dtype"], packed["scales"], packed["layer_indices"]) == ("float32", [3.0, 1.0], [0, 2])
    assert read_tier({"post_mlp": packed}, model(), BASE) == read_tier(given, model(), BASE)


def test_a_body_for_the_openai_client_packs_vectors_and_keeps_the_rest() -> None:
    body = extra_body(steering_vectors={"post_mlp": {1: torch.ones(HIDDEN)}}, capture={"files": {}}, steering_name=None)

    assert body["capture"] == {"files": {}}
    assert "steering_name" not in body
    assert body["steering_vectors"]["post_mlp"]["shape"] == [1, HIDDEN]
    assert json.dumps(body)


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ([1.0], BASE),
        ({"post_lunch": {1: [1.0]}}, f"{BASE}.post_lunch"),
        ({"post_mlp": {}}, f"{BASE}.post_mlp"),
        ({"post_mlp": [1.0]}, f"{BASE}.post_mlp"),
        ({"post_mlp": {1: [1.0], 2: [1.0, 2.0]}}, f"{BASE}.post_mlp"),
        ({"post_mlp": {1: []}}, f"{BASE}.post_mlp"),
        ({"post_mlp": {1: 3.0}}, f"{BASE}.post_mlp.1"),
        ({"post_mlp": {1: "text"}}, f"{BASE}.post_mlp.1"),
        ({"post_mlp": {1: [1.0, None]}}, f"{BASE}.post_mlp.1"),
        ({"post_mlp": {1: np.ones((2, 2))}}, f"{BASE}.post_mlp.1"),
        ({"post_mlp": {1: np.ones(2, np.int64)}}, f"{BASE}.post_mlp.1"),
        ({"post_mlp": {1: {"vector": [1.0], "scale": float("nan")}}}, f"{BASE}.post_mlp.1.scale"),
        ({"post_mlp": {1: {"scale": 2.0}}}, f"{BASE}.post_mlp.1"),
    ],
)
def test_vectors_that_cannot_be_read_are_named(given: Any, where: str) -> None:
    with pytest.raises(RequestError) as caught:
        pack(given, BASE, as_text=True)

    assert caught.value.field == where


def test_arrays_in_operations_are_packed_and_all_else_stays() -> None:
    row = np.arange(HIDDEN, dtype=np.float32)
    operations = [
        ops.ablate(row, {"hook": "post_mlp", "layers": np.array([1, 2])}, positions=np.array([0, 3])),
        ops.rotate(torch.from_numpy(row).to(torch.bfloat16), row[::-1], "1.post_mlp", 90.0),
        ops.replace("clean", "1.post_mlp", mask=np.ones(HIDDEN, bool)),
        ops.clamp([1.0] * HIDDEN, "1.post_mlp", max=1.0),
    ]

    body = packed_fields({"steering_ops": operations, "prefill_ops": None}, as_text=True)

    ablation, rotation, replacement, clamp = json.loads(json.dumps(body))["steering_ops"]
    assert ablation["vector"] == {"dtype": "float32", "shape": [HIDDEN], "data": b64encode(row.tobytes()).decode()}
    assert (ablation["at"]["layers"], ablation["positions"]) == ([1, 2], [0, 3])
    assert [packed["dtype"] for packed in rotation["plane"]] == ["bfloat16", "float32"]
    assert b64decode(rotation["plane"][1]["data"]) == row[::-1].tobytes()
    assert (replacement["vector"], replacement["mask"]) == ("clean", [True] * HIDDEN)
    assert clamp["vector"] == [1.0] * HIDDEN


def test_clamps_are_packed_vector_by_vector_and_as_bytes_for_msgpack() -> None:
    row = np.ones(HIDDEN, np.float32)

    body = packed_fields({"steering_clamps": {"post_mlp": {3: [{"vector": row, "max": 1.0}]}}}, as_text=False)

    assert body["steering_clamps"]["post_mlp"][3][0]["vector"]["data"] == row.tobytes()


def test_an_array_that_is_no_vector_is_named() -> None:
    with pytest.raises(RequestError) as caught:
        packed_fields({"ops": [ops.ablate(np.ones((2, HIDDEN)), "1.post_mlp")]}, as_text=True)

    assert caught.value.field == "ops[0].vector"


ROW = np.array(V, np.float32)


@pytest.mark.parametrize(
    "fields",
    [
        {
            "steering_gates": [
                gate(when={"probe": {"at": "1.post_mlp", "weight": ROW, "bias": np.float32(1)}, "above": 1})
            ]
        },
        {
            "steering_gates": [
                gate(when={"any": ["always", {"cosine": torch.from_numpy(ROW), "at": "0.post_mlp", "below": 0}]})
            ]
        },
        {"steering_gates": [gate(then={"vectors": {"post_mlp": {1: ROW, 2: {"vector": np.array(W), "scale": 2}}}})]},
        {"steering_gates": (gate(then={"vectors": read_tier({"post_mlp": {1: V}}, gated(), BASE)}), gate())},
        {"steering_gates": [gate(then={"ops": [ops.ablate(ROW, "1.post_mlp")]}), gate(then="observe")]},
        {"steering": [old_gate(apply={"kind": "add", "steer": {"kind": "inline", "packed": {"post_mlp": PACKED}}})]},
    ],
    ids=["probe", "cosine", "vectors", "phase-vectors", "ops", "predecessor"],
)
def test_gates_with_arrays_read_back_as_the_same_gates(fields: dict[str, Any]) -> None:
    expected = plain(read_gate_fields(fields, gated()))

    text = json.loads(json.dumps(packed_fields(fields, as_text=True)))
    binary = msgspec.msgpack.decode(msgspec.msgpack.encode(packed_fields(fields, as_text=False)))

    assert plain(read_gate_fields(text, gated())) == expected
    assert plain(read_gate_fields(binary, gated())) == expected


@pytest.mark.parametrize(
    "gates", ["calm", {"when": "always"}, [None], [gate(then="observe")], [{"then": {"vectors": None}}]]
)
def test_gates_that_are_none_are_left_to_the_server(gates: Any) -> None:
    assert packed_fields({"steering_gates": gates}, as_text=True) == {"steering_gates": gates}


def test_vectors_of_a_gate_that_cannot_be_read_are_named() -> None:
    with pytest.raises(RequestError) as caught:
        packed_fields({"steering_gates": [gate(), gate(then={"vectors": [1.0]})]}, as_text=True)

    assert caught.value.field == "steering_gates[1].then.vectors"
