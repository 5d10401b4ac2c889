"""Pinned memory of the host as tensors of a GPU, whose kernels read and write it by themselves."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger("headgate")


class _PinnedArray:
    """An array as one of the GPU, whose address space has it at the same place.

    Args:
        array: Contiguous, in pinned memory.
    """

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.ctypes.data, False),
            "strides": None,
            "version": 3,
        }


def seen_by_gpu(array: np.ndarray[Any, Any], device: torch.device) -> Tensor | None:
    """Return a contiguous array in pinned memory as a tensor of a GPU, which keeps it alive.

    None, with a line in the log, if this torch or this GPU cannot have that.
    """
    try:
        seen: Tensor = torch.as_tensor(_PinnedArray(array), device=device)
    except (RuntimeError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
    else:
        if seen.data_ptr() == array.ctypes.data and device.index in (None, seen.device.index):
            return seen
        reason = "it copied the memory"
    logger.info("steering: torch %s cannot have the GPU use pinned memory (%s)", torch.__version__, reason)
    return None
