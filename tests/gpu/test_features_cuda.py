"""The readout of features on a GPU: the numbers of the CPU, and nothing that waits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from headgate.capture.schema.consumer import RowArguments
from headgate.steering.features.consumer import FeaturesReadout
from headgate.steering.features.source_coder import CoderKind, Norm
from headgate.steering.features.sparse_coder import coder_of
from tests.fakes.sparse_coders import rows, source

TOP, ROWS = 8, 37


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", CoderKind)
def test_features_are_read_on_a_gpu_as_on_the_host_and_nothing_waits(kind: CoderKind, dtype: str) -> None:
    readout = FeaturesReadout([coder_of(source(kind, Norm.NONE), Path("x"), "x")], TOP, dtype)
    given = torch.from_numpy(rows(ROWS)).bfloat16().double()
    host = np.full((ROWS, 1 + TOP), -1, np.int64)
    host[:, 0] = 0
    host[::3, 1:4] = 39, 0, 17
    found = []
    for name in ("cpu", "cuda"):
        device = torch.device(name)
        function = readout.on(device)
        asked = given.to(device), RowArguments(host, torch.from_numpy(host).to(device))
        function(*asked)
        if name == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            outputs = function(*asked)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append(outputs.cpu())

    torch.testing.assert_close(found[1][:, TOP:], found[0][:, TOP:], rtol=1e-5, atol=1e-6)
    is_active = found[0][:, TOP:] > 0
    assert torch.equal(found[1][:, :TOP][is_active], found[0][:, :TOP][is_active])
