"""What the operator configures of the HTTP server: ``additional_config["headgate"]["server"]``.

These settings concern the API servers alone; an engine without capture and steering stays stock with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headgate.capture.errors import ConfigError

MIB = 1 << 20


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the HTTP server.

    Attributes:
        max_body_bytes: Of one request; longer ones are answered with status 413. Uploads of files
            (``multipart/form-data``) have vLLM's own limits.
    """

    max_body_bytes: int = 128 * MIB


def parse_server(document: object) -> ServerConfig:
    """Read the section; None gives the defaults.

    Raises:
        ConfigError: On an unknown key, a wrong type or a value out of range.
    """
    if document is not None and not isinstance(document, Mapping):
        raise ConfigError(f"{_SERVER_WHERE}: expected an object, got {document!r}")
    try:
        config = msgspec.convert(dict(document or {}), ServerConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{_SERVER_WHERE}: {error}") from error
    if config.max_body_bytes < 1:
        raise ConfigError(f"{_SERVER_WHERE}: max_body_bytes must be at least 1, got {config.max_body_bytes}")
    return config


def server_config(additional_config: Any) -> ServerConfig:
    """The section of vLLM's ``additional_config``; see `parse_server`."""
    ours = additional_config.get("headgate") if isinstance(additional_config, Mapping) else None
    return parse_server(ours.get("server") if isinstance(ours, Mapping) else None)


_SERVER_WHERE = "additional_config['headgate']['server']"
