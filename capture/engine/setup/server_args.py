"""vLLM's parsed command line: what headgate reads of it, and takes out of it.

Servers parse different command lines (with an engine or without, one or several), and programs make such arguments
themselves: whatever is not there was not given.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headgate.capture.engine.contracts.plain_values import Document
from headgate.capture.schema.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerArgs:
    """The arguments that a server was started with.

    Attributes:
        additional_config: The operator's configuration, in which headgate's stands under a key of its own.
        host: Name or address that it listens on, without brackets; empty for all of the machine's.
        uds: Path of the Unix socket that it listens on instead; None if it does not.
        num_api_servers: Processes that answer requests.
        has_api_key: Whether clients send the server's own key, as ``Authorization: Bearer``.
    """

    additional_config: Document
    host: str
    uds: str | None
    num_api_servers: int
    has_api_key: bool


def read_server_args(args: Namespace) -> ServerArgs:
    """Read what headgate needs to know of a server.

    Raises:
        ConfigError: If ``additional_config`` is not an object.
    """
    given = vars(args)
    config = given.get("additional_config") or {}
    if not isinstance(config, Mapping):
        raise ConfigError(f"additional_config: expected an object, got {config!r}")
    return ServerArgs(
        additional_config=config,
        host=(given.get("host") or "").strip("[]"),
        uds=given.get("uds") or None,
        num_api_servers=given.get("api_server_count") or 1,
        has_api_key=any(given.get("api_key") or [os.environ.get("VLLM_API_KEY")]),
    )


def take_flag(args: Namespace, name: str) -> Any:
    """Return the value of a flag and leave None in its place, so that nobody reads it again; None if not given."""
    value = vars(args).get(name)
    if value is not None:
        setattr(args, name, None)
    return value
