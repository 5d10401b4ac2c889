"""Who may change what everybody's requests are steered by, and who may capture: keys beside the server's API key.

Keys are read from the environment once a process, so that they stand in no command line, configuration or log:
``HEADGATE_STEERING_KEYS`` and ``HEADGATE_CAPTURE_KEYS``, several separated by commas, for rotation. A client sends one
as ``X-Headgate-Key: KEY`` or, where the server asks for no API key, as ``Authorization: Bearer KEY``. Without keys the
part is open to clients on the server's own machine, and closed if the server can be reached from others.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import secrets
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from headgate.capture.schema.errors import ForbiddenError

HEADER = "x-headgate-key"


class Keys:
    """The keys of one part. Any thread.

    Args:
        variable: Environment variable that they come from, for messages.
        keys: The keys themselves; only digests are kept.
    """

    def __init__(self, variable: str, keys: Iterable[str]) -> None:
        self.variable = variable
        self._digests = tuple(_digest(key) for key in keys)

    def __len__(self) -> int:
        return len(self._digests)

    def check(self, headers: Mapping[str, str], *, is_local: bool) -> None:
        """Let a request pass.

        Args:
            headers: The request's, with names in lower case or compared without regard to case.
            is_local: Whether the server can be reached from its own machine alone.

        Raises:
            ForbiddenError: If it may not.
        """
        if not self._digests:
            if is_local:
                return
            raise ForbiddenError(
                "this server listens beyond its own machine and has no key for this; the operator sets "
                f"{self.variable} (one key, or several separated by commas) or starts it with --host 127.0.0.1"
            )
        if not sum(self._is_known(given) for given in _given(headers)):
            raise ForbiddenError(f"this needs one of the keys in the server's {self.variable}, as X-Headgate-Key: KEY")

    def _is_known(self, given: str) -> bool:
        """Compare with every key, in a time that does not depend on which of them matches."""
        digest = _digest(given)
        return sum(secrets.compare_digest(digest, known) for known in self._digests) > 0

    def __repr__(self) -> str:
        return f"<{len(self)} keys of {self.variable}>"


@cache
def keys_of(part: str) -> Keys:
    """The keys of a part such as ``"steering"``, from the environment as it was when they were first read."""
    variable = f"HEADGATE_{part.upper()}_KEYS"
    return Keys(variable, (key for entry in os.environ.get(variable, "").split(",") if (key := entry.strip())))


def require_key(part: str, request: Any) -> None:
    """Let a `starlette.requests.Request` to vLLM's server use what needs a key of `part`.

    Raises:
        HTTPException: With status 403, if it may not.
    """
    from fastapi import HTTPException

    try:
        keys_of(part).check(request.headers, is_local=is_local(request.app.state.args))
    except ForbiddenError as error:
        raise HTTPException(403, str(error)) from None


def access_of(part: str, args: Any) -> str:
    """Who may use what needs a key of `part`, for the log."""
    keys = keys_of(part)
    if keys:
        return f"{len(keys)} keys"
    return "open, on this machine alone" if is_local(args) else f"closed, {keys.variable} is not set"


def is_local(args: Any) -> bool:
    """Whether a server that was started with these arguments listens on the loopback interface or a Unix socket."""
    if getattr(args, "uds", None):
        return True
    host = getattr(args, "host", None) or ""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _given(headers: Mapping[str, str]) -> list[str]:
    """Collect the header values of a client that could be access keys."""
    found = [key] if (key := headers.get(HEADER)) else []
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        found.append(token.strip())
    return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
