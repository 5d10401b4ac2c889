"""``headgate studio MODEL``: `headgate serve` with everything that the page at ``/headgate/`` shows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from headgate.capture.engine.commands.demo_model import ModelError, ensure_model
from headgate.capture.engine.commands.serve import serve_model

INLINE_BYTES = 64 << 20
DEFAULTS = {
    "--host": ["127.0.0.1"],
    "--capture-consumers": [f"inline:max_bytes={INLINE_BYTES}", "lens"],
    "--steering-op-sites": ['{"post_mlp": "all"}'],
}
"""Flags of `headgate serve` that the studio sets where the user has not."""

DEMO = {**DEFAULTS, "--served-model-name": ["smollm2"], "--dtype": ["float32"], "--max-model-len": ["4096"]}
"""Flags that `--demo` sets; its model is small enough for any CPU."""

HELP = f"""Serve a model with the studio, a page in the browser: headgate studio MODEL, or headgate studio --demo.

Takes every flag of `headgate serve`, and sets these unless they are given: {", ".join(DEFAULTS)}. --demo serves
SmolLM2-135M-Instruct, made of a package of 93 MB (it needs accelerate and gguf), without compilation.
"""

studio = typer.Typer(add_completion=False)


@studio.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def run(context: typer.Context) -> None:
    """Serve MODEL with the studio."""
    if not context.args or context.args[-1] in ("-h", "--help"):
        typer.echo(HELP)
        return
    try:
        arguments = arguments_of(context.args)
    except ModelError as error:
        typer.secho(f"headgate studio: {error}", err=True, fg="red")
        raise typer.Exit(1) from None
    serve_model(arguments)


def arguments_of(given: Sequence[str]) -> list[str]:
    """Return the arguments of `headgate serve`.

    Raises:
        ModelError: If the demo's model cannot be made.
    """
    if "--demo" not in given:
        return with_defaults(given, DEFAULTS)
    rest = [argument for argument in given if argument != "--demo"]
    return with_defaults([str(ensure_model(cache_folder())), *rest, "--enforce-eager"], DEMO)


def with_defaults(given: Sequence[str], defaults: Mapping[str, Sequence[str]]) -> list[str]:
    """Return arguments with those of `defaults` whose flags are not among them, in any of their spellings."""
    flags = {argument.partition("=")[0].replace("_", "-") for argument in given if argument.startswith("--")}
    return [*given, *(part for flag, values in defaults.items() if flag not in flags for part in (flag, *values))]


def cache_folder() -> Path:
    """Return the folder for the demo's model: ``HEADGATE_CACHE``, else ``headgate`` in the user's own cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HEADGATE_CACHE") or Path(cache) / "headgate")
