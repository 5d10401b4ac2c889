"""Vectors that the client packs read back as the same vectors; values that it cannot read are named."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given

from headgate.capture.schema.errors import RequestError
from headgate.steering.client import extra_body
from headgate.steering.client.packing import pack
from headgate.steering.requests.request_fields import BASE, read_tier
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
