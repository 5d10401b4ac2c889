"""Ray Data reads an export as plain Parquet. Ray is not among the test tools: ``make test-producers`` installs it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headgate.consumers.datasets import open_dataset
from headgate.consumers.datasets.export import export, export_parquet
from tests.deadlines import patience
from tests.fakes.captured_roots import SITE, write_root

PROGRAM = """
import json, sys
import numpy as np, ray

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
data = ray.data.read_parquet(sys.argv[1])
found = []
for batch in data.random_shuffle(seed=0).iter_batches(batch_size=32, batch_format="numpy"):
    rows = np.stack(batch[sys.argv[2]])
    found += zip(batch["request_id"].tolist(), batch["position"].tolist(), (row.tobytes().hex() for row in rows))
print(json.dumps(found))
"""


@pytest.mark.extended
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_ray_has_every_row_once(tmp_path: Path) -> None:
    write_root(tmp_path / "root", [f"r{number}" for number in range(20)])
    data = open_dataset(tmp_path / "root", sites=SITE)
    export(data, str(tmp_path / "out"), export_parquet)

    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "out"), SITE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=patience(300))

    assert done.returncode == 0, done.stderr
    expected = [
        [name, position, row.astype(np.float32).tobytes().hex()]
        for batch in data.batches()
        for name, position, row in zip(batch.request_ids, batch.positions.tolist(), batch.numpy(), strict=True)
    ]
    assert sorted(json.loads(done.stdout.splitlines()[-1])) == sorted(expected)
