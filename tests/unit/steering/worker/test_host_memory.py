"""Pinned memory as a tensor of a GPU: found out at once where that cannot be had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headgate.steering.worker import transfers


def refuse(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("the pointer resides on host memory\nand more")


def copy(array: Any, device: torch.device) -> Tensor:
    return torch.zeros(array.__cuda_array_interface__["shape"])


@pytest.mark.parametrize(("as_tensor", "reason"), [(refuse, "the pointer resides on host memory"), (copy, "it copied")])
def test_a_torch_that_has_no_such_tensors_is_found_out_at_once(
    as_tensor: Callable[..., Tensor], reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    with caplog.at_level("INFO", "headgate"):
        assert transfers.seen_by_gpu(np.zeros((2, 3)), torch.device("cpu")) is None

    assert reason in caplog.text
    assert "and more" not in caplog.text


def test_pinned_memory_is_described_as_an_array_of_the_gpu() -> None:
    pinned = np.zeros((16, 3), np.float32)

    described = transfers._PinnedArray(pinned).__cuda_array_interface__

    assert described == {
        **{"shape": (16, 3), "typestr": "<f4", "strides": None, "version": 3},
        "data": (pinned.ctypes.data, False),
    }
