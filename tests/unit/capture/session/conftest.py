import pytest

from tests.fakes import capture_world


@pytest.fixture(autouse=True, params=["threads", "process", "spread"])
def delivery(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run each test with every kind of delivery, but for those that look into one."""
    if request.param != "threads" and request.node.get_closest_marker("threads_only"):
        pytest.skip("looks at the threads of one process")
    monkeypatch.setattr(capture_world, "NUM_READERS", {"threads": 0, "process": 1, "spread": 3}[request.param])
    return request.param
