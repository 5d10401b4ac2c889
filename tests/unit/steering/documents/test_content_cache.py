"""Vectors and operations that are equal are read once; what is not quite equal is read by itself."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.config import SteeringConfig
from headgate.steering.documents.request import MAX_ENTRY_BYTES, SteeringReader, content_of
from headgate.steering.lru_cache import LruCache

HIDDEN = 8
CONFIG = SteeringConfig(op_sites={"post_mlp": "all"})
STEERABLE = CONFIG.steerable(num_layers=4, hidden_size=HIDDEN, dtype="bfloat16")
VECTOR = [1.0, -2.0, 0.5, 0.0, 3.0, 0.25, 1.0, 2.0]


def fields(vector=None, at="2.post_mlp", **keys):
    return {"steering_ops": [{"at": at, "method": "ablate", "vector": [*VECTOR] if vector is None else vector, **keys}]}


def test_equal_operations_are_read_once():
    reader = SteeringReader(STEERABLE)

    first, again = reader.read(fields()), reader.read(fields())

    assert first is not None
    assert again is first


@pytest.mark.parametrize(
    "vectors",
    [
        lambda: {"post_mlp": {"2": [*VECTOR]}},
        lambda: {"post_mlp": {2: np.array(VECTOR)}},
        lambda: {"post_mlp": packed(np.array([VECTOR, VECTOR[::-1]], np.float32))},
    ],
    ids=["list", "array", "packed"],
)
def test_equal_vectors_are_read_once(vectors):
    reader = SteeringReader(STEERABLE)

    first, again = (reader.read({"steering_vectors": vectors(), "steering_name": "calm"}) for _ in range(2))

    assert first is not None
    assert again is first


def packed(rows):
    about = {"dtype": "float32", "shape": [*rows.shape], "layer_indices": [*range(len(rows))]}
    return {**about, "data": base64.b64encode(rows.tobytes()).decode()}


def test_arrays_of_other_types_and_shapes_with_the_same_bytes_have_other_keys():
    zeros = [np.zeros(shape, kind) for shape in (8, (8, 1), (2, 4)) for kind in ("<f4", ">f4", "<i4")]
    keys = [content_of({"steering_vectors": given}) for given in (*zeros, zeros[0].tobytes(), [*zeros[0].tobytes()])]

    assert None not in keys
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "other",
    [
        fields([1.0, -2.0, 0.5, -0.0, 3.0, 0.25, 1.0, 2.0]),
        fields([*VECTOR[:-1], 2.5]),
        fields(at="1.post_mlp"),
        fields(scale=0.5),
        {"decode_steering_ops": fields()["steering_ops"]},
        {**fields(), "steering_name": "calm"},
        {**fields(), "steering_vectors": {"post_mlp": {1: [*VECTOR]}}},
    ],
    ids=["zero-below", "value", "site", "scale", "field", "with-a-module", "with-a-vector"],
)
def test_others_are_read_by_themselves(other):
    known, alone = SteeringReader(STEERABLE), SteeringReader(STEERABLE)
    known.read(fields())

    read, expected = known.read(other), alone.read(other)

    assert read is not None
    assert expected is not None
    assert (read.wire, read.field, read.names) == (expected.wire, expected.field, expected.names)


def test_what_reads_alike_and_is_none_is_refused_all_the_same():
    reader = SteeringReader(STEERABLE)
    site = Site(2, HookPoint.POST_MLP)
    assert reader.read(fields(at=site)) is not None
    assert reader.read(fields(at={"hook": "post_mlp", "layers": [1]})) is not None

    with pytest.raises(RequestError, match="at"):
        reader.read(fields(at=[2, "post_mlp"]))
    with pytest.raises(RequestError, match="layers"):
        reader.read(fields(at={"hook": "post_mlp", "layers": [True]}))
    with pytest.raises(RequestError, match="layers"):
        reader.read(fields(at={"hook": "post_mlp", "layers": [1.0]}))


@pytest.mark.parametrize(
    "vector",
    [
        np.ma.array(VECTOR, mask=False),
        np.array(VECTOR, object),
        np.zeros(MAX_ENTRY_BYTES),
        tuple(VECTOR),
        [np.float64(1), *VECTOR[1:]],
        [2**70, *VECTOR[1:]],
        [*VECTOR] * MAX_ENTRY_BYTES,
    ],
    ids=["masked", "objects", "too-long-an-array", "tuple", "subclass", "too-large-a-number", "too-long"],
)
def test_values_that_are_not_plain_have_no_key(vector):
    assert content_of(fields(vector)) is None


def test_an_array_that_was_changed_in_place_is_read_anew():
    reader, vector = SteeringReader(STEERABLE), np.array(VECTOR)
    given = fields(vector)
    first = reader.read(given)
    vector[0] = 7

    again = reader.read(given)

    assert first is not None
    assert again is not None
    assert again.wire != first.wire


def test_the_cache_keeps_what_was_used_last():
    cache = LruCache(max_bytes=250)
    keys = [content_of({"steering_ops": "x" * 100 + str(number)}) for number in range(3)]
    first, second, third = (key for key in keys if key is not None)
    cache.keep(first, "first", first.num_bytes)
    cache.keep(second, "second", second.num_bytes)
    cache.keep(second, "second", second.num_bytes)
    assert cache.find(first) == "first"

    cache.keep(third, "third", third.num_bytes)

    assert [cache.find(key) for key in (first, second, third)] == ["first", None, "third"]


def test_a_list_that_is_inside_of_itself_has_no_key():
    endless: list[object] = [1.0]
    endless.append(endless)

    assert content_of({"steering_gates": endless}) is None
    assert content_of({"steering_gates": [{"when": endless}]}) is None


@pytest.mark.parametrize(
    ("value", "is_plain"),
    [
        ([1, 2.5, "a", None, True, b"c"], True),
        ([{"a": [1, [2, {"b": None}]]}, 3], True),
        ([1, (2, 3)], False),
        ({"a": [{"b": np.float32(1)}]}, False),
        ({1: {"b": Site(1, HookPoint.POST_MLP)}}, False),
        ([[1.0, np.ones(2)]], True),
    ],
)
def test_plain_values_alone_have_a_key(value, is_plain):
    assert (content_of({"steering_ops": value}) is not None) == is_plain
