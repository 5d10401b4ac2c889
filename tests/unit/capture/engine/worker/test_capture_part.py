"""Capture as a part of a worker, without a model."""

from __future__ import annotations

import logging
import re

import pytest
import torch

from headgate.capture.engine.contracts.worker_hooks import WorkerFacts
from headgate.capture.engine.worker.capture_part import CapturePart
from headgate.capture.schema.config import CaptureConsumersConfig, CaptureConsumerSpec
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.sites import HookPoint, Site, SiteShape

MIB = 1 << 20
SITES = tuple(Site(layer, HookPoint.POST_MLP) for layer in range(3))


def test_start_up_says_all_the_memory_that_capture_takes(caplog: pytest.LogCaptureFixture) -> None:
    config = CaptureConsumersConfig(consumers=(CaptureConsumerSpec(name="logging"),), staging_bytes=3 * MIB)
    neurons = Site(1, HookPoint.MLP_ACT)
    shapes = {neurons: SiteShape(640, "float32")}
    model = ModelInfo(name="m", num_layers=3, hidden_size=64, dtype="float32", sites=(*SITES, neurons), shapes=shapes)
    facts = WorkerFacts(
        model=model,
        owned_layers=(0, 1, 2),
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_tokens=4096,
        max_num_seqs=8,
        is_compiled=False,
    )
    part = CapturePart(config)
    with caplog.at_level(logging.INFO, logger="headgate"):
        held = part.headgate_allocate(facts) / MIB
    actions = part.headgate_actions(facts)
    part.headgate_close()

    said = re.search(
        r"capture: ([\d.]+) MiB of cpu memory, of which the staging ring has (.*) = ([\d.]+) MiB", caplog.text
    )
    assert said is not None, caplog.text
    assert actions.keys() == {*SITES, neurons}
    assert float(said[1]) == pytest.approx(held, abs=0.05)
    assert said[2] == "3 sites x 4160 rows x 256 bytes + 1 sites of mlp_act x 4160 rows x 2560 bytes"
    assert float(said[3]) == pytest.approx(4160 * (3 * 256 + 2560) / MIB, abs=0.05)
    assert "; 3 MiB of host memory" in caplog.text
