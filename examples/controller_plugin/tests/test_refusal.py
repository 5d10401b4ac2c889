"""The controller by itself: the contract of all controllers, and when it stops a request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from headgate_refusal import RefusalController

from headgate.capture.schema.sites import Site
from headgate.steering.controllers import Controller, Probe, Stop
from headgate.steering.controllers.testing import ControllerContract, ControllerFeed
from headgate.steering.probes import save


@pytest.fixture
def path(tmp_path: Path) -> str:
    weight = np.ones((1, 8), np.float32)
    save(tmp_path / "probe.safetensors", Probe(site=Site.parse("1.post_mlp"), weight=weight, threshold=0.5))
    return str(tmp_path / "probe.safetensors")


class TestContract(ControllerContract):
    @pytest.fixture(autouse=True)
    def with_probe(self, path: str) -> None:
        self.path = path

    def make(self) -> Controller:
        return RefusalController(probe=self.path)


def test_it_stops_a_request_after_three_rows_in_a_row_behind_its_prompt(path: str) -> None:
    feed = ControllerFeed(RefusalController(probe=path))
    feed.begin("a", [1, 2, 3])

    assert feed.step({"a": [9.0, 9.0, 9.0]}) == []
    assert [feed.step({"a": score}) for score in (1.0, 1.0, 0.1, 1.0, 1.0)] == [[]] * 5
    assert feed.step({"a": 1.0}) == [Stop("a", "forbidden subject")]
    assert feed.step({"a": 1.0}) == []


def test_a_probe_without_a_threshold_needs_one(tmp_path: Path) -> None:
    save(tmp_path / "probe.safetensors", Probe(site=Site.parse("1.post_mlp"), weight=np.ones((1, 8), np.float32)))

    with pytest.raises(ValueError, match="threshold"):
        RefusalController(probe=str(tmp_path / "probe.safetensors"))
