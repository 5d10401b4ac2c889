"""Captured requests of two classes whose rows lie apart along one direction: for tests of ``headgate probe``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.sites import Site
from headgate.consumers.feed import EXAMPLE_MODEL, ExampleRequest
from headgate.consumers.filesystem import FilesystemConsumer
from tests.fakes.capturing import Capturing, spec_context

WIDTH = 16
SITE = Site.parse("3.post_mlp")
PROMPT, OUTPUT = 6, 4


def direction() -> Any:
    """``[16]``, of length 1."""
    found = np.random.default_rng(5).standard_normal(WIDTH)
    return found / np.linalg.norm(found)


class ClassRequest(ExampleRequest):
    """A request with rows at ``gap`` or ``-gap`` along `direction`; the first row is a sink, as real models have it."""

    gap = 2.0

    def rows(self, site: Site, positions: Int64Array) -> Tensor:
        """``[len(positions), 16]``."""
        number = int(self.info.request_id.rpartition("-")[2])
        rows = np.stack([np.random.default_rng([number, int(p)]).standard_normal(WIDTH) for p in positions])
        if site == SITE:
            rows += (self.gap if number % 2 else -self.gap) * direction()
        if positions[0] == 0:
            rows[0] *= 1000
        return torch.from_numpy(rows).to(getattr(torch, EXAMPLE_MODEL.dtype))


def store(root: Path, num_requests: int = 40, positions: Any = "all", num_samples: int = 1) -> dict[str, int]:
    """Capture requests ``client-0``, ``client-1``, ...; return their labels: 1 of odd numbers."""
    files = Capturing(root)
    for number in range(num_requests):
        wanted = {"hooks": {"post_mlp": [1, 3]}, "positions": positions}
        spec = FilesystemConsumer.validate_client_spec(wanted, spec_context(files.params, f"client-{number}"))
        for sample in range(num_samples):
            request = ClassRequest(spec, f"request-{number}", prompt=PROMPT, output=OUTPUT)
            request.info = replace(request.info, sample_index=sample, num_samples=num_samples)
            files.feed.whole(request)
    files.close()
    return {f"client-{number}": number % 2 for number in range(num_requests)}
