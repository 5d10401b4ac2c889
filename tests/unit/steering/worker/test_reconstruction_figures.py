"""How well an SAE reconstructs what it is used on: the figures of a worker, against those of ``headgate sae check``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from headgate.capture.monitoring.metrics import EngineStats
from headgate.steering.control.metrics import families
from headgate.steering.features.check import measure
from tests.fakes.encoded_worker import HIDDEN, SET, EncodedWorker
from tests.fakes.saes import NORMS, TinySae

GENERATOR = torch.Generator().manual_seed(11)
MEAN = 4 * torch.randn(HIDDEN, generator=GENERATOR)


def rows(count: int) -> torch.Tensor:
    """Rows around a mean that is longer than their distance to it, as a model's are."""
    return MEAN + torch.randn(count, HIDDEN, generator=GENERATOR)


def figures(worker: EncodedWorker) -> dict[str, float]:
    found: dict[str, float] = worker.part.headgate_stats()["steering"]["reconstructions"]["a"]
    return found


@pytest.mark.parametrize("architecture", ["jumprelu", "gated"])
@pytest.mark.parametrize("norm", NORMS)
def test_they_are_those_of_the_check_on_the_same_rows(tmp_path: Path, architecture: str, norm: str) -> None:
    worker = EncodedWorker(tmp_path, TinySae(architecture=architecture, norm=norm, width=HIDDEN))
    coder = worker.saes.find("a").coder
    worker.add("a", 3, sae_reconstruction=["a"], steering_features=[SET])
    worker.add("b", 2, decode_sae_reconstruction=["a"])
    worker.add("c", 4)
    seen = []

    for step, counted in (
        ((("a", 0, 2), ("b", 0, 2), ("c", 0, 4)), [1]),
        ((("a", 2, 1), ("b", 2, 1)), [0, 1]),
        ((("b", 3, 1), ("c", 4, 1), ("a", 3, 4)), [0, 2, 3, 4, 5]),
        ((("a", 7, 1), ("b", 4, 1), ("c", 5, 1)), [0, 1]),
    ):
        stream = rows(12)  # padded: the step has fewer
        worker.step(*step)
        worker.run(stream)
        seen.append(stream[counted].numpy())
        now, sample = figures(worker), np.concatenate(seen)
        assert now["rows"] == len(sample)
    worker.part.headgate_step_begins(None)
    worker.run(rows(12))

    total = np.square(sample - sample.mean(axis=0), dtype=np.float64).sum()
    assert figures(worker) == now
    assert now["variance"] == pytest.approx(total, rel=1e-6)
    assert now["error"] / now["variance"] == pytest.approx(measure(coder, sample, sample).fvu, rel=1e-4)


def test_a_row_that_begins_a_prompt_is_left_out_also_where_the_rows_stay_the_same(tmp_path: Path) -> None:
    worker = EncodedWorker(tmp_path, TinySae(width=HIDDEN))
    for name in ("a", "b"):
        worker.add(name, 8, sae_reconstruction=["a"])

    for (name, computed), num_rows in ((("a", 0), 2), (("a", 3), 5), (("b", 0), 7), (("b", 3), 10)):
        worker.step((name, computed, 3))
        worker.run(rows(3))
        assert sorted(worker.listed) == [0, 1, 2]
        assert figures(worker)["rows"] == num_rows


def test_very_long_rows_zeros_and_rows_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    worker = EncodedWorker(tmp_path, TinySae(width=HIDDEN))
    worker.add("a", 12, sae_reconstruction=["a"])
    stream = rows(9)
    stream[3] *= 100
    stream[5], stream[7] = 0.0, torch.nan

    worker.step(("a", 1, 9))
    worker.run(stream)

    kept = stream[[0, 1, 2, 4, 6, 8]].numpy()
    now = figures(worker)
    assert now["rows"] == 6
    assert now["variance"] == pytest.approx(np.square(kept - kept.mean(axis=0), dtype=np.float64).sum(), rel=1e-6)
    assert now["error"] / now["variance"] == pytest.approx(
        measure(worker.saes.find("a").coder, kept, kept).fvu, rel=1e-4
    )


def test_equal_rows_have_no_variance_and_it_never_falls(tmp_path: Path) -> None:
    worker = EncodedWorker(tmp_path, TinySae(width=HIDDEN))
    worker.add("a", 1, sae_reconstruction=["a"])
    stream, before = rows(1) * 1.1, -1.0

    for position in range(1, 30):
        worker.step(("a", position, 1))
        worker.run(stream)
        now = figures(worker)["variance"]
        assert now >= before
        before = now

    assert before < 1e-9


def test_the_page_tells_them_by_sae(tmp_path: Path) -> None:
    worker = EncodedWorker(tmp_path, TinySae(width=HIDDEN))
    worker.add("a", 9, sae_reconstruction=["a"])
    worker.step(("a", 0, 9))
    worker.run(rows(9))

    stats = EngineStats(workers=[None, worker.part.headgate_stats()["steering"]])
    found = {family.name: family for family in families([stats])}

    names = {name: f"headgate_sae_reconstruction_{name}" for name in ("rows", "error", "variance")}
    for name, value in figures(worker).items():
        family = found[names[name]]
        assert (family.kind, family.labels) == ("counter", ("engine", "worker", "sae"))
        assert [(sample.labels, sample.value) for sample in family.samples] == [(("0", "1", "a"), value)]
