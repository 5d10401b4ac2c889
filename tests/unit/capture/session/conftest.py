import pytest

from tests.fakes import capture_world


@pytest.fixture(autouse=True, params=["threads", "process"])
def delivery(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run each test with both kinds of delivery, but for those that look into one."""
    if request.param == "process" and request.node.get_closest_marker("threads_only"):
        pytest.skip("looks at the threads of one process")
    monkeypatch.setattr(capture_world, "IS_PROCESS", request.param == "process")
    return request.param
