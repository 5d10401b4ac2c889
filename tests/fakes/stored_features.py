"""Captured rows that a small dictionary made, and the SAE that finds its features: for tests of ``headgate sae``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.sites import Site
from headgate.consumers.feed import EXAMPLE_MODEL, ExampleRequest
from headgate.consumers.filesystem import FilesystemConsumer
from headgate.steering.features.canonical import write_coder
from headgate.steering.features.source_coder import CoderKind, SourceCoder
from tests.fakes.capturing import Capturing, spec_context
from tests.fakes.sparse_coders import Array, tensor

WIDTH, ACTIVE = 16, 3
SITE = Site.parse("3.post_mlp")
OTHER = Site.parse("1.post_mlp")
L0 = 3.0


def dictionary(site: Site) -> Array:
    """``[16, 16]``: orthonormal rows, others at each site."""
    generator = np.random.default_rng([site.layer, 7])
    found: Array = np.linalg.qr(generator.standard_normal((WIDTH, WIDTH)))[0]
    return found


def mean(site: Site) -> Array:
    """``[16]``: a row about which all rows of a site lie."""
    found: Array = np.random.default_rng([site.layer, 8]).standard_normal(WIDTH)
    return found


def activations(request: str, position: int) -> Array:
    """``[16]``: three features between 1 and 3, the others 0."""
    generator = np.random.default_rng([*request.encode(), position])
    found = np.zeros(WIDTH)
    found[generator.permutation(WIDTH)[:ACTIVE]] = generator.uniform(1, 3, ACTIVE)
    return found


class SparseRequest(ExampleRequest):
    """A request whose rows are sums of features of `dictionary`, with a little noise."""

    def rows(self, site: Site, positions: Int64Array) -> Tensor:
        """``[len(positions), 16]``."""
        found = np.stack([activations(self.info.request_id, int(position)) for position in positions])
        rows = mean(site) + found @ dictionary(site)
        rows += 0.05 * np.random.default_rng(0).standard_normal(rows.shape)
        if positions[0] == 0:
            rows[0] *= 1000  # the first token's row is a sink, as real models have it
        return torch.from_numpy(rows).to(getattr(torch, EXAMPLE_MODEL.dtype))


def store(root: Path, num_requests: int = 6, *, hooks: Any = None, **shape: Any) -> list[SparseRequest]:
    """Capture requests of 40 tokens at ``1.post_mlp`` and ``3.post_mlp``, all positions."""
    files = Capturing(root)
    requests = []
    for number in range(num_requests):
        wanted = {"hooks": hooks or {"post_mlp": [1, 3]}, "positions": "all"}
        context = spec_context(files.params, f"client-{number}")
        spec = FilesystemConsumer.validate_client_spec(wanted, context)
        request = SparseRequest(spec, f"request-{number}", prompt=30, output=10, **shape)
        files.feed.whole(request)
        requests.append(request)
    files.close()
    return requests


def trained(trained_at: float = 1.0, least: float = 0.5, **changes: Any) -> SourceCoder:
    """The SAE of `SITE`; it was trained on rows times `trained_at`, and expects them so unless it is told."""
    rows = dictionary(SITE)
    fields: dict[str, Any] = {
        "format": "test",
        "paths": (),
        "kind": CoderKind.JUMPRELU,
        "encoder": tensor(rows),
        "decoders": (tensor(rows),),
        "bias": -trained_at * rows @ mean(SITE),
        "decoder_biases": (trained_at * mean(SITE),),
        "threshold": np.full(WIDTH, least * trained_at),
        "read_site": SITE,
        "declared": {"l0": L0},
        "sha256": "0" * 64,
    }
    return SourceCoder(**(fields | changes))


def imported(folder: Path, coder: SourceCoder) -> Path:
    """Write headgate's file of a coder."""
    path = folder / "x.safetensors"
    write_coder(path, coder, name="x", path="test")
    return path
