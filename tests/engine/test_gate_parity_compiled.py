"""Gates on a compiled engine are what `gate_reference` says, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import stop_llm
from tests.engine.gate_runs import check, made_cases, serve, start
from tests.engine.hf_reference import own_process


@pytest.mark.extended
def test_a_compiled_engine_does_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    with own_process() as references:
        cases = made_cases(references)
        llm = start(tmp_path, enforce_eager=False)
        try:
            check(serve(llm, cases, references), captures=True)
        finally:
            stop_llm(llm)
