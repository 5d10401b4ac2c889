"""The real engine core and scheduler, steered: whose KV is shared with whom, who waits, and what a change costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.frontend.steered_core import BLOCK, Core

pytestmark = pytest.mark.engine

PROMPT = list(range(100, 100 + 3 * BLOCK + 4))
"""Three full blocks; the fourth is filled with what is generated."""

COLD, WARM = len(PROMPT), len(PROMPT) - 3 * BLOCK


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Core]:
    core = Core(model_dir, asynchronous=request.param)
    yield core
    core.close()


@pytest.fixture
def core(engine: Core) -> Iterator[Core]:
    """The engine with an empty cache, and nothing left in it afterwards."""
    assert engine.core.reset_prefix_cache()
    yield engine
    engine.check_empty()


def test_steered_then_plain_and_the_other_way_round(core: Core) -> None:
    assert core.serve("a1", PROMPT, core.both(0)) == COLD
    assert core.serve("p1", PROMPT) == COLD
    assert core.serve("a2", PROMPT, core.both(0)) == WARM
    assert core.serve("p2", PROMPT) == WARM
