"""``headgate serve``: which plugins of vLLM it lets load, and its help."""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from headgate.capture.cli import app
from headgate.capture.engine.commands import serve
from headgate.capture.engine.commands.serve import plugins_to_load

INSTALLED = {
    "vllm.general_plugins": ["headgate", "models", "both"],
    "vllm.platform_plugins": ["board"],
    "vllm.endpoint_plugins": ["headgate", "both", "routes"],
}


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry_points(*, group: str) -> Any:
        return EntryPoints(EntryPoint(name, "a:b", group) for name in INSTALLED.get(group, ()))

    monkeypatch.setattr(serve, "entry_points", entry_points)


@pytest.mark.usefixtures("_installed")
def test_every_plugin_that_vllm_loads_by_itself_is_named_and_headgate(capsys: pytest.CaptureFixture[str]) -> None:
    assert plugins_to_load(None) == ["board", "headgate", "models"]
    assert "'both' is not loaded" in capsys.readouterr().err


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    ("allowed", "names"),
    [("", ["headgate"]), ("models", ["models", "headgate"]), ("headgate,both", ["headgate", "both"])],
)
def test_what_the_operator_allows_stays_as_it_is_beside_headgate(allowed: str, names: list[str]) -> None:
    assert plugins_to_load(allowed) == names


@pytest.mark.parametrize("arguments", [["serve"], ["serve", "--help"], ["serve", "-h"]])
def test_help_shows_the_flags_of_capture_and_steering(arguments: list[str]) -> None:
    shown = CliRunner().invoke(app, arguments).output

    for flag in ("--capture-consumers", "--enable-steering", "--steering-modules", "--max-steering-slots"):
        assert flag in shown


def test_help_does_not_wait_for_vllm() -> None:
    program = "import sys; sys.modules['vllm'] = None; from headgate.capture.cli import main; main(['serve', '--help'])"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert "--enable-steering" in done.stdout, done.stderr


def test_a_wrong_file_of_keys_ends_the_command_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.json"
    path.write_text('{"keys": []}')
    path.chmod(0o644)

    with pytest.raises(typer.Exit) as raised:
        serve._prepare_keys(str(path))

    assert raised.value.exit_code == 1
    assert f"chmod 600 {path}" in capsys.readouterr().err


def test_the_signal_that_reads_keys_again_ends_no_process(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text('{"keys": []}')
    path.chmod(0o600)
    before = signal.getsignal(signal.SIGHUP)
    try:
        serve._prepare_keys(None)
        assert signal.getsignal(signal.SIGHUP) == before
        serve._prepare_keys(str(path))
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
