"""The tensors of gates of which programs make no use."""

from __future__ import annotations

import torch
from torch import Tensor

from headgate.steering.programs.gate_codes import TOLD_ROWS


def nothing_told(slots: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """`told` and `told_counts` of programs that tell nothing."""
    told = torch.zeros(slots, TOLD_ROWS, 0, dtype=torch.int64, device=device)
    return told, told[:, 0].int()


def nothing_heard(slots: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """`heard` and `hearing` of programs that hear nothing."""
    hearing = torch.zeros(slots, 0, 2, dtype=torch.int32, device=device)
    return hearing[:, :, 0].long(), hearing
