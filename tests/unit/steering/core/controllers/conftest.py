"""Cores with the controller `Listed`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from headgate.capture.schema.sites import Site
from headgate.steering.controllers import (
    Probe,
    loading,
)
from tests.fakes.controller_core import HIDDEN, Core, Listed
from tests.fakes.controllers import EntryPoint, Scripted


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Core]]:
    monkeypatch.setattr(loading, "entry_points", lambda group: [EntryPoint("listed", Listed)])
    monkeypatch.setattr(Listed, "needed", ())
    Scripted.probe = Probe(site=Site.parse("0.post_mlp"), weight=np.ones((1, HIDDEN), np.float32))
    yield Core
    gc.collect()  # threads end with their controllers
