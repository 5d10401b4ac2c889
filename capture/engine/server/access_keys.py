"""Who may change what everybody's requests are steered by, and who may capture: keys beside the server's API key.

Keys come from the environment (``HEADGATE_STEERING_KEYS``, ``HEADGATE_CAPTURE_KEYS``, ``HEADGATE_ADMIN_KEYS``, several
separated by commas) and from the operator's file (``server.keys_file``), so that they stand in no command line or log.
A client sends one as ``X-Headgate-Key: KEY`` or, where the server asks for no API key, as ``Authorization: Bearer
KEY``. Without keys a part is open to clients on the server's own machine, and closed if the server can be reached from
others.
"""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import threading
from argparse import Namespace
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from headgate.capture.engine.access.access_key import AccessKey
from headgate.capture.engine.access.caller import Caller, set_caller
from headgate.capture.engine.access.key_ring import KeyRing, variable_of
from headgate.capture.engine.access.usage import Usage
from headgate.capture.engine.setup.cli_flags import translate_flags
from headgate.capture.engine.setup.client_errors import as_client_error
from headgate.capture.engine.setup.server_args import ServerArgs, read_server_args
from headgate.capture.schema.config import server_config
from headgate.capture.schema.errors import ForbiddenError, shown

if TYPE_CHECKING:
    from starlette.datastructures import State
    from starlette.requests import Request

HEADER = "x-headgate-key"
_ACCESS = "headgate_access"
"""Attribute of an application's state: its `Access`."""


class Access:
    """The keys of one application, and what was counted for them.

    Args:
        args: The arguments that the server was started with.

    Raises:
        ConfigError: If a file that the operator named is wrong.
    """

    def __init__(self, args: Namespace) -> None:
        translate_flags(args)  # of servers without an engine, which would not see that a file of keys was named
        server = read_server_args(args)
        config = server_config(server.additional_config)
        usage = None if config.usage_file is None else Path(config.usage_file)
        is_counting = usage is not None or server.num_api_servers == 1
        keys = None if config.keys_file is None else Path(config.keys_file)
        self.is_local = is_local(server)
        self._has_socket = server.uds is not None
        self.keys = KeyRing(keys, is_counting=is_counting)
        self.usage = Usage(usage)

    def find(self, role: str, headers: Mapping[str, str]) -> AccessKey | None:
        """Find the key with which a request may do what needs `role`; see `KeyRing.find`.

        Without keys, requests that a web page of another site made are refused, too.

        Raises:
            ForbiddenError: If it may not.
        """
        self.keys.refresh()
        key = self.keys.find(_given(headers), role, is_local=self.is_local)
        if key is None and not self._has_socket:
            _check_own(headers, role)
        return key

    def read_again_on_hangup(self) -> None:
        """Read the file of keys again when this process gets SIGHUP; without a file, that ends it as before.

        On the event loop. One beside the main thread gets no signals: there the file is looked at when a key is used,
        as it is everywhere.
        """
        if self.keys.has_file and threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, partial(self.keys.refresh, is_forced=True))


def open_access(state: State) -> Access:
    """The keys of an application, read on the first call with its ``state``; see `Access`."""
    found: Access | None = getattr(state, _ACCESS, None)
    if found is None:
        found = Access(state.args)
        setattr(state, _ACCESS, found)
    return found


def require_role(role: str, request: Request) -> AccessKey | None:
    """Let a `starlette.requests.Request` to vLLM's server do what needs `role`, and remember whose it is.

    Returns:
        The key that it carries; None if it needs none.

    Raises:
        HTTPException: With status 403, if it may not.
    """
    access = open_access(request.app.state)
    with as_client_error():
        key = access.find(role, request.headers)
    set_caller(None if key is None else Caller(key, access.usage))
    return key


def is_local(server: ServerArgs) -> bool:
    """Whether a server listens on the loopback interface or a Unix socket."""
    return server.uds is not None or _is_loopback(server.host)


def _check_own(headers: Mapping[str, str], role: str) -> None:
    """Refuse what a browser on this machine was made to send by a page from elsewhere.

    Browsers name the page's site as ``Origin``, and the name that they looked up as ``Host``: a site can let its own
    name mean 127.0.0.1, and is then the same site to them.

    Raises:
        ForbiddenError: If one of them is not this machine.
    """
    for header, prefix in (("host", "//"), ("origin", "")):
        value = headers.get(header)
        if value is not None and not _names_loopback(prefix + value):
            raise ForbiddenError(
                f"this server has no key for this and lets in its own machine alone, but the header {header.title()} "
                f"names {shown(value)}; the operator sets {variable_of(role)}"
            )


@lru_cache(maxsize=64)  # clients of one server write the same; a header has 64 KiB at most
def _names_loopback(url: str) -> bool:
    try:
        return _is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _given(headers: Mapping[str, str]) -> list[str]:
    """Collect the header values of a client that could be access keys."""
    found = [key] if (key := headers.get(HEADER)) else []
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        found.append(token.strip())
    return found
