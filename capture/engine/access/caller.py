"""The client behind the HTTP request at hand: whose keys it has shown, and what was counted for it.

Who asks is found once for each request, from its headers, by its `Client`: `server.clients` puts one around the whole
handling of a request, before its body is received. Whatever belongs to a client (kept rows, conversations, quotas,
modules, the audit) asks that one, on the event loop. Threads that read bodies have no client, and read nothing that
belongs to one.
"""

from __future__ import annotations

import contextvars
from dataclasses import dataclass
from typing import Protocol

from headgate.capture.engine.access.access_key import AccessKey
from headgate.capture.engine.access.usage import Usage


@dataclass(frozen=True, slots=True)
class Caller:
    """A client that has shown a key.

    Attributes:
        keys: The keys that it has shown, at least one. Several if it sends two, or if a text is known for two roles.
        usage: Counts what it captures.
    """

    keys: tuple[AccessKey, ...]
    usage: Usage

    @property
    def name(self) -> str:
        """The name of the client: that of its first key, whatever it asks for."""
        return self.keys[0].name

    def key_with(self, role: str) -> AccessKey | None:
        """Return its key that has a role; None if none has."""
        return next((key for key in self.keys if key.has_role(role)), None)


class Client(Protocol):
    """Whoever sent an HTTP request to the server."""

    @property
    def caller(self) -> Caller | None:
        """The client, if it has shown a key that is known."""
        ...

    def require_role(self, role: str) -> AccessKey | None:
        """Return its key for what needs `role`; None if that needs no key.

        Raises:
            fastapi.HTTPException: With status 403, if it may not.
        """
        ...

    def owner(self, field: str) -> str | None:
        """Return the name of the client, for what is to belong to it; None if it has shown no key.

        Raises:
            UnknownKeyError: For `field`, if it has shown a key that is not known, or not any more.
        """
        ...


_client: contextvars.ContextVar[Client | None] = contextvars.ContextVar("headgate_client", default=None)


def current_client() -> Client | None:
    """Return who sent the HTTP request being handled; None for requests that Python code makes."""
    return _client.get()


def current_caller() -> Caller | None:
    """Return the client whose request is being handled, if it has shown a key; None for `LLM` and `AsyncLLM`."""
    client = _client.get()
    return None if client is None else client.caller


def owner_of_request(field: str) -> str | None:
    """Return the name of the client whose request is being handled; None without a key, and for Python code.

    Raises:
        UnknownKeyError: For `field`, if it has shown a key that is not known.
    """
    client = _client.get()
    return None if client is None else client.owner(field)


def serve_for(client: Client) -> contextvars.Token[Client | None]:
    """Make `client` the one for whom this task works, until `leave`."""
    return _client.set(client)


def leave(token: contextvars.Token[Client | None]) -> None:
    """Restore the state from before `serve_for`."""
    _client.reset(token)
