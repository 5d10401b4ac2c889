"""Clients of an HTTP server, for tests that have none."""

from __future__ import annotations

from headgate.capture.engine.access.access_key import AccessKey
from headgate.capture.engine.access.caller import Caller, Usage, serve_for


class ShownKeys:
    """Implements `headgate.capture.engine.access.caller.Client`: a client that has shown these keys.

    Args:
        keys: All of them known.
        usage: Counts what it captures.
    """

    def __init__(self, *keys: AccessKey, usage: Usage | None = None) -> None:
        self.caller = Caller(keys, usage or Usage()) if keys else None
        self.roles: list[str] = []
        """Roles that were asked for, in order."""

    def require_role(self, role: str) -> AccessKey | None:
        self.roles.append(role)
        return None if self.caller is None else self.caller.key_with(role)

    def owner(self, field: str) -> str | None:
        return None if self.caller is None else self.caller.name


def show(*keys: AccessKey, usage: Usage | None = None) -> None:
    """Let this task work for a client that has shown these keys; of none for one without a key."""
    serve_for(ShownKeys(*keys, usage=usage))
