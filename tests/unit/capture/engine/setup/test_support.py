"""Which vLLM works."""

from __future__ import annotations

import pytest

from headgate.capture.engine.vllm_names import check_version
from headgate.capture.schema.errors import UnsupportedError


@pytest.mark.parametrize("found", ["0.26.0", "0.32.0+cpu", "0.33.1.dev4+g0123abc", "0.33"])
def test_tested_releases_are_accepted(found: str) -> None:
    check_version(found)


@pytest.mark.parametrize("found", ["0.25.1", "0.34.0", "1.0.0", "0.6.3"])
def test_others_are_refused_with_the_versions_that_work(found: str) -> None:
    with pytest.raises(UnsupportedError, match=r"works with vLLM 0\.26 to 0\.33, found " + found):
        check_version(found)


def test_a_version_that_is_none_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="cannot tell"):
        check_version("unknown")
