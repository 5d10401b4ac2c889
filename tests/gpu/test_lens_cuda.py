"""The lens readout on a GPU: the numbers of the CPU, and nothing that waits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from headgate.capture.lens import LensKind, load, save
from headgate.capture.schema.consumer import RowArguments
from headgate.consumers.lens import LensReadout, LensReduction, _Outputs
from tests.fakes.heads import FakeHead

HIDDEN, VOCABULARY, ROWS = 64, 5000, 37


def test_a_lens_reads_on_a_gpu_what_it_reads_on_the_host_and_nothing_waits(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    save(tmp_path / "j.safetensors", LensKind.JACOBIAN, {0: random.normal(size=(HIDDEN, HIDDEN)).astype(np.float32)})
    readout = LensReadout(0, [load(tmp_path / "j.safetensors")], LensReduction(_Outputs(5, 2)))
    rows = torch.from_numpy(random.normal(size=(ROWS, HIDDEN)))
    host = np.array([[row % 2, row % 3 == 0, 5, 7, 9 if row % 2 else -1] for row in range(ROWS)], np.int64)
    found = []
    for name in ("cpu", "cuda"):
        device = torch.device(name)
        head = FakeHead(HIDDEN, VOCABULARY)
        head.weight = head.weight.to(device)
        transport, reduce = readout.transport(device), readout.reduction.with_head(device, head)
        given, arguments = rows.to(device), RowArguments(host, torch.from_numpy(host).to(device))
        reduce(transport(given, arguments), arguments)
        if name == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            outputs = reduce(transport(given, arguments), arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append(outputs.cpu())

    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
