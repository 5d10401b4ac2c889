"""Raw values that come again are known, unless what they hold has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headgate.steering.documents.request import IdentityCache

VALUES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "an array": (lambda: np.ones(4, np.float32), lambda array: array.__imul__(2)),
    "the bits of an array": (lambda: np.ones(4, np.float32), lambda array: array.view(np.uint8).__ixor__(1)),
    "a list": (lambda: [1.0, 2.0], lambda numbers: numbers.__setitem__(1, 3.0)),
    "a longer list": (lambda: [1.0, 2.0], lambda numbers: numbers.append(3.0)),
    "a reference": (lambda: [["calm", 1.0]], lambda refs: refs[0].__setitem__(1, 2.0)),
    "a dict": (lambda: {"post_mlp": {3: [1.0]}}, lambda hooks: hooks["post_mlp"].update({4: [1.0]})),
    "a scale": (lambda: {3: {"vector": [1.0], "scale": 1.0}}, lambda hook: hook[3].update(scale=2.0)),
    "packed text": (lambda: {"data": "AAAA"}, lambda form: form.update(data="AAAB")),
    "packed bytes": (lambda: {"data": b"1234"}, lambda form: form.update(data=b"1235")),
    "a buffer": (lambda: {"data": bytearray(b"1234")}, lambda form: form["data"].__setitem__(0, 0)),
}


@pytest.mark.parametrize(("make", "change"), VALUES.values(), ids=VALUES.keys())
def test_values_are_known_until_they_change(make: Callable[[], Any], change: Callable[[Any], object]) -> None:
    cache: IdentityCache[str] = IdentityCache()
    value = make()
    assert cache.find({"field": value}) is None
    cache.keep({"field": value}, "result")

    found = cache.find({"field": value})
    assert found is not None
    assert found.result == "result"
    assert cache.find({"other": value}) is None
    assert cache.find({"field": make()}) is None  # an equal value, but another object
    change(value)
    assert cache.find({"field": value}) is None


def test_tensors_are_known_until_they_change() -> None:
    torch = pytest.importorskip("torch")
    cache: IdentityCache[int] = IdentityCache()
    tensor = torch.ones(4, dtype=torch.bfloat16)
    cache.keep({"field": tensor}, 1)
    assert cache.find({"field": tensor}) is not None

    tensor.view(torch.int16).numpy()[0] += 1  # not seen by the tensor's own counter of changes
    assert cache.find({"field": tensor}) is None


def test_nothing_is_a_result_too() -> None:
    cache: IdentityCache[None] = IdentityCache()
    value = [1.0]
    cache.keep({"field": value}, None)

    found = cache.find({"field": value})
    assert found is not None
    assert found.result is None


def test_the_oldest_is_forgotten() -> None:
    cache: IdentityCache[int] = IdentityCache(capacity=2)
    values = [[float(i)] for i in range(3)]
    cache.keep({"field": values[0]}, 0)
    cache.keep({"field": values[1]}, 1)
    cache.find({"field": values[0]})
    cache.keep({"field": values[2]}, 2)

    assert [cache.find({"field": value}) is not None for value in values] == [True, False, True]
