"""``make test-producers``: what it says where it cannot begin."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

CI = Path(__file__).resolve().parents[3] / ".ci"


def test_a_model_that_cannot_be_made_is_said_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(CI)
    # By its path: tests have a module of this name, too.
    spec = importlib.util.spec_from_file_location("producers_program", CI / "test_producers.py")
    assert spec is not None
    assert spec.loader is not None
    program: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    monkeypatch.setattr(program, "install", lambda: None)
    monkeypatch.setattr(program.setup_env, "run", lambda *_, **__: None)
    monkeypatch.setattr(program.sys, "argv", ["test_producers.py"])

    def run(command: Any, **settings: Any) -> Any:
        if settings.get("check"):
            raise subprocess.CalledProcessError(1, command)
        return SimpleNamespace(returncode=1, stdout="")

    monkeypatch.setattr(program.subprocess, "run", run)

    assert program.main() == 1
    assert capsys.readouterr().err == "\ntest-producers failed: the model could not be made: its reason is above\n"
