"""The memory in which forwards and the process of the controllers tell each other numbers, as the worker has it.

On a GPU it is pinned memory of the host, which kernels read and write by themselves: no step launches a copy for it.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headgate.steering.controllers.hosting.told_words import ToldPlace
from headgate.steering.worker.gates.host_memory import seen_by_gpu

logger = logging.getLogger("headgate")


class ToldMemory:
    """Anonymous memory that another process may map; it is gone when both are.

    Args:
        num_slots: Q: slots of requests.
        num_told: K: told numbers of each.
        device: Where the forward runs.

    Attributes:
        place: Where other processes of this host find it.
        words: int64 ``[Q, TOLD_ROWS, K]`` on the device: `GateTensors.told`. None if the forward cannot write there,
            with a line in the log.
        heard: int64 ``[Q, HEARD_WORDS + HEARD_ROWS]`` on the device: `GateTensors.heard`; None likewise.
        heard_here: The same as the host has it.
    """

    def __init__(self, num_slots: int, num_told: int, device: torch.device) -> None:
        fd = os.memfd_create("headgate-told")
        self.place = ToldPlace(f"/proc/{os.getpid()}/fd/{fd}", secrets.randbits(62), num_slots, num_told)
        os.ftruncate(fd, self.place.num_bytes)
        mapped = mmap.mmap(fd, self.place.num_bytes)
        np.frombuffer(mapped, np.int64, 1)[0] = self.place.number
        words, self.heard_here = self.place.parts(mapped)
        # Two tensors that share no storage: what is compiled may not be told that one is a view of the other.
        self.words, self.heard = (_on_device(each, device) for each in (words, self.heard_here))
        weakref.finalize(self, os.close, fd)


def _on_device(words: np.ndarray[Any, Any], device: torch.device) -> Tensor | None:
    """Return memory of the host as a tensor of the device, which keeps it; None if that cannot be had."""
    if device.type != "cuda":
        return torch.from_numpy(words)
    address, size = words.ctypes.data, words.nbytes
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(cudart.cudaHostRegister(address, size, 0))
    if error != 0:
        logger.warning("steering: CUDA cannot pin %d bytes of shared memory (error %d)", size, error)
        return None
    found = seen_by_gpu(words, device)
    if found is None:
        cudart.cudaHostUnregister(address)
    else:
        weakref.finalize(found, cudart.cudaHostUnregister, address)
    return found
