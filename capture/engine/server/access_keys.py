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
from functools import cached_property, lru_cache, partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from headgate.capture.engine.access.access_key import AccessKey
from headgate.capture.engine.access.caller import Caller, Usage, leave, serve_for
from headgate.capture.engine.access.key_ring import KeyRing, variable_of
from headgate.capture.engine.client_errors import as_client_error
from headgate.capture.engine.setup.cli_flags import ServerArgs, read_server_args, translate_flags
from headgate.capture.engine.vllm_types import AsgiApp, Receive, Scope, Send
from headgate.capture.schema.config import server_config
from headgate.capture.schema.errors import ForbiddenError, UnknownKeyError, shown

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.datastructures import State
    from starlette.requests import Request

HEADER = "x-headgate-key"
_PEER = "headgate.peer"
"""Key of a request's scope: the address and port at the other end of its connection."""
_MAX_FORWARDED = 200
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
        self._takes_bearer = not server.has_api_key
        self._has_socket = server.uds is not None
        self.keys = KeyRing(keys, is_counting=is_counting)
        self.usage = Usage(usage)

    def find(self, role: str, headers: Mapping[str, str]) -> AccessKey | None:
        """Find the key with which a request may do what needs `role`; see `KeyRing.find`.

        Returns:
            None if no key is needed: there is none of this role, and the server is reached from its own machine alone.
            Then requests that a web page of another site made are refused, too.

        Raises:
            ForbiddenError: If it may not.
        """
        if role not in self.keys.open_roles:
            self.keys.refresh()
            return self.keys.find(_given(headers), role)
        if not self.is_local:
            raise ForbiddenError(
                "this server listens beyond its own machine and has no key for this; the operator sets "
                f"{variable_of(role)} (one key, or several separated by commas), names a file of keys with "
                "--headgate-keys, or starts it with --host 127.0.0.1"
            )
        if not self._has_socket:
            _check_own(headers, role)
        return None

    def identify(self, headers: Mapping[str, str]) -> Caller | None:
        """Find the client that sent a request by the keys that it carries; None if none of them is known and valid."""
        given = _given(headers)
        if not given or not self.keys.has_keys:
            return None
        self.keys.refresh()
        valid = tuple(key for key in self.keys.matching(given) if not key.is_expired())
        return Caller(valid, self.usage) if valid else None

    def refuse_unknown(self, headers: Mapping[str, str], field: str) -> None:
        """Refuse a client that `identify` does not know although it has shown a key.

        Without keys on the server no client has one, and what it sends says nothing.

        Raises:
            UnknownKeyError: For `field`, if it is so.
        """
        header = "X-Headgate-Key" if headers.get(HEADER) else "Authorization"
        is_shown = header == "X-Headgate-Key" or self._takes_bearer
        if not self.keys.has_keys or not is_shown or not (given := _given(headers)):
            return
        expired = next((key for key in self.keys.matching(given) if key.is_expired()), None)
        why = "is not known to this server" if expired is None else f"({expired.name!r}) has expired"
        raise UnknownKeyError(
            f"would belong to the client of the key, and the key in the header {header} {why}: send one that is "
            "valid, or none to share it with all clients without a key",
            field,
        )

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


class HttpClient:
    """Implements `headgate.capture.engine.access.caller.RequestClient`. Event loop only.

    Args:
        scope: Of the request.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    @cached_property
    def _headers(self) -> Mapping[str, str]:
        # No `starlette.datastructures.Headers`, which looks through all of them each time. The first of a name counts.
        found = reversed(self._scope["headers"])
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in found}

    @property
    def _access(self) -> Access:
        return open_access(self._scope["app"].state)

    @cached_property
    def caller(self) -> Caller | None:
        """Implement `RequestClient`; found once, when first asked for: most requests shall not pay for it."""
        return self._access.identify(self._headers)

    def require_role(self, role: str) -> AccessKey | None:
        """Implement `RequestClient`."""
        with as_client_error():
            return self._access.find(role, self._headers)

    def owner(self, field: str) -> str | None:
        """Implement `RequestClient`."""
        if self.caller is not None:
            return self.caller.name
        self._access.refuse_unknown(self._headers, field)
        return None


def require_role(role: str, request: Request) -> AccessKey | None:
    """Let a `starlette.requests.Request` to vLLM's server do what needs `role`.

    Returns:
        The key that it carries; None if it needs none.

    Raises:
        HTTPException: With status 403, if it may not.
    """
    with as_client_error():
        return open_access(request.app.state).find(role, request.headers)


def install_clients(app: FastAPI) -> None:
    """Put `Clients` around a `fastapi.FastAPI` application that is being made, outside of whatever reads bodies."""
    app.add_middleware(Clients)
    remember_peers()


def remember_peers() -> None:
    """Let uvicorn leave the address of a connection in a request's scope, before it puts a forwarded one in its place.

    It believes the header ``X-Forwarded-For`` of every connection from this machine, a proxy or not.
    """
    from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

    original = ProxyHeadersMiddleware.__call__
    if vars(ProxyHeadersMiddleware).get(_PEER):
        return

    @wraps(original)
    async def remembering(self: ProxyHeadersMiddleware, scope: Any, receive: Any, send: Any) -> None:
        scope[_PEER] = scope.get("client")
        await original(self, scope, receive, send)

    ProxyHeadersMiddleware.__call__ = remembering  # type: ignore[method-assign]
    setattr(ProxyHeadersMiddleware, _PEER, True)


def peer_of(scope: Scope) -> str | None:
    """Return the address at the other end of a request's connection, whatever its headers say; None if it has none."""
    client = scope.get(_PEER) or scope.get("client")
    return None if client is None else str(client[0])


def forwarded_for(headers: Mapping[str, str]) -> str | None:
    """Return the header ``X-Forwarded-For``, cut short: what a proxy says, or anybody else who writes it."""
    given = headers.get("x-forwarded-for")
    return None if given is None else given[:_MAX_FORWARDED]


class Clients:
    """ASGI middleware: remembers who sent a request for as long as it is handled."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        token = serve_for(HttpClient(scope))
        try:
            await self._app(scope, receive, send)
        finally:
            leave(token)


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
