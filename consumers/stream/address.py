"""Addresses of streams, the sockets there, and the token that both sides share."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from headgate.capture.schema.errors import ConfigError, shown
from headgate.capture.schema.secret_files import read_secret

TOKEN_VARIABLE = "HEADGATE_STREAM_TOKEN"  # noqa: S105  (the name of a variable)
MIN_TOKEN = 16
"""Characters of a token, at least."""
CONNECT_S = 10.0
BACKLOG = 128
"""Connections that wait to be accepted."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a stream is: a Unix socket, or a host and a port.

    Attributes:
        text: As it was given.
        path: Of the Unix socket; None of TCP.
        host: Name or number; empty of a Unix socket.
        port: 0 lets the machine choose one.
    """

    text: str
    path: str | None = None
    host: str = ""
    port: int = 0

    @property
    def is_local(self) -> bool:
        """Whether only users of this machine can reach it."""
        if self.path is not None or self.host == "localhost":
            return True
        with suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return False

    def listen(self) -> socket.socket:
        """A listening socket. That of a Unix socket is its owner's alone; one that nobody listens on is replaced.

        Raises:
            OSError: If it is taken, or cannot be made.
        """
        if self.path is None:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            return socket.create_server((self.host, self.port), family=family, backlog=BACKLOG)
        if _is_left_over(self.path):
            os.unlink(self.path)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(listening.fileno(), 0o600)  # before `bind`, which makes the file with this mode
            listening.bind(self.path)
            listening.listen(BACKLOG)
        except OSError:
            listening.close()
            raise
        return listening

    def connect(self) -> socket.socket:
        """A connected socket.

        Raises:
            OSError: If nobody listens there.
        """
        if self.path is None:
            return socket.create_connection((self.host, self.port), CONNECT_S)
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.settimeout(CONNECT_S)
            connected.connect(self.path)
        except OSError:
            connected.close()
            raise
        return connected


def _is_left_over(path: str) -> bool:
    """Whether a Unix socket lies there that nobody listens on."""
    if not Path(path).is_socket():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probing:
        try:
            probing.connect(path)
        except ConnectionRefusedError:
            return True
    return False


def parse_address(text: object) -> Address:
    """Read ``tcp://HOST:PORT`` or ``unix:///PATH``.

    Raises:
        ConfigError: If it is neither.
    """
    wanted = f"address: expected tcp://HOST:PORT or unix:///PATH, got {shown(text)}"
    if not isinstance(text, str):
        raise ConfigError(wanted)
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{wanted}: {error}") from error
    if parts.scheme == "unix" and parts.path.startswith("/") and not parts.netloc:
        return Address(text, path=parts.path)
    if parts.scheme == "tcp" and parts.hostname and port is not None and parts.path in ("", "/"):
        return Address(text, host=parts.hostname, port=port)
    raise ConfigError(wanted)


def read_token(file: str | None, *, is_reader: bool = False) -> bytes | None:
    """The token in a file, or in the environment if none is named; None if there is none.

    Args:
        file: Its path.
        is_reader: The token is shown to a server, whose user may own the file.

    Raises:
        ConfigError: If the file cannot be read, if others may read or change it, or the token is too short.
    """
    if file is None:
        token, where = os.environ.get(TOKEN_VARIABLE, "").strip().encode(), TOKEN_VARIABLE
        if not token:
            return None
    else:
        where = f"token_file {file}"
        token = read_secret(Path(file).expanduser(), "token_file", is_reader=is_reader).strip()
    if len(token) < MIN_TOKEN:
        raise ConfigError(f"{where}: the token has {len(token)} characters; expected at least {MIN_TOKEN}")
    return token
