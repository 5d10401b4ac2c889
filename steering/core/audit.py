"""Changes of steering that acts on other clients, with actor and time; and owners of named modules."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from headgate.capture.schema.errors import ConfigError, ForbiddenError
from headgate.steering.documents.schema import Count

logger = logging.getLogger("headgate")

SIZE = 1000
"""Changes that are remembered; a file keeps all."""
BY = "by"
"""Argument of a call in which its `Actor` travels."""
ACTIONS = {
    **{"set_global": "set", "clear_global": "clear", "register": "register", "unregister": "unregister"},
    **{name: name for name in ("register_sae", "unregister_sae", "register_probe", "unregister_probe")},
    **{name: name for name in ("register_rule", "unregister_rule")},
}
"""Methods of an engine core that change what acts on others, as the audit calls them."""
OWNED = {
    **dict.fromkeys(("register", "unregister"), "module"),
    **dict.fromkeys(("register_probe", "unregister_probe"), "probe"),
    **dict.fromkeys(("register_rule", "unregister_rule"), "rule"),
}
"""Methods that change what belongs to the client that registered it, with what that is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Actor:
    """The client that asks for a change.

    Attributes:
        key: Name of its key; None if it needed none, and for the operator's own process.
        address: At the other end of its connection; None if it has none.
        forwarded: What its request says of whom it was forwarded for; anybody can write that.
        is_bound: Whether it may only replace and remove modules and probes that its own key registered.
        is_undo: Whether the change takes back one that another engine core refused.
        owner: Of an undone change: the key that the module or probe belonged to before.
    """

    key: str | None = None
    address: str | None = None
    forwarded: str | None = None
    is_bound: bool = False
    is_undo: bool = False
    owner: str | None = None

    def to_wire(self) -> dict[str, Any]:
        """Return plain values."""
        return dataclasses.asdict(self)

    def undo(self, owner: str | None) -> Actor:
        """The actor of the call that undoes a change of this one."""
        return dataclasses.replace(self, is_bound=False, is_undo=True, owner=owner)


OPERATOR = Actor()
"""Who calls in the process that owns the engine."""


class AuditEntry(TypedDict):
    """One change.

    Attributes:
        time: Date and time of ISO 8601, in UTC.
        engine: Index of the engine core.
        action: One of the values of `ACTIONS`.
        key: Name of the client's key; null if it needed none.
        address: The other end of the connection.
        forwarded_for: The header X-Forwarded-For, as a proxy or the client itself wrote it.
        name: The module, SAE, probe or rule; null for global vectors.
        prefill: Hash of the content that acts afterwards at prompt positions, or that was removed.
        decode: The same for generated positions.
        version: Grows with every change in the engine core.
        is_undo: Whether it takes back what another engine core refused.
    """

    time: str
    engine: Count
    action: str
    key: str | None
    address: str | None
    forwarded_for: str | None
    name: str | None
    prefill: str | None
    decode: str | None
    version: Count
    is_undo: bool


class Audit:
    """The changes of one engine core. Engine thread only.

    Args:
        engine: Index of the engine core, for the lines of a file that several share.
        path: File to which each change is added; None for none. Opened for each line, so that it can be rotated.

    Raises:
        ConfigError: If the file cannot be written.
    """

    def __init__(self, engine: int = 0, path: Path | None = None) -> None:
        self._engine = engine
        self._path = path
        self._entries: deque[AuditEntry] = deque(maxlen=SIZE)
        self._owners: dict[tuple[str, str], str | None] = {}
        """The owner of each thing, by its kind and name."""
        if path is not None:
            try:
                _append(path, b"")
            except OSError as error:
                raise ConfigError(f"steering.audit_file {path}: {error.strerror or error}") from error

    def check(self, method: str, name: str | None, by: Actor, *, is_registered: bool) -> None:
        """Refuse a change of a module or a probe that belongs to another client.

        Raises:
            ForbiddenError: If it is so.
        """
        of = OWNED.get(method)
        if of is None or not by.is_bound or not is_registered:
            return
        if self.owner_of(name, of) != by.key:
            raise ForbiddenError(
                f"the {of} {name!r} was not registered with the key {by.key!r}: only the key that did, or one with "
                "the role admin, may replace or remove it; use another name",
                "name",
            )

    def owner_of(self, name: str | None, of: str = "module") -> str | None:
        """The key that registered a module, or a probe; None if none did."""
        return None if name is None else self._owners.get((of, name))

    def note(self, method: str, name: str | None, by: Actor, answer: Mapping[str, Any]) -> None:
        """Note a change that was made.

        Args:
            method: One of `ACTIONS`.
            name: Name of the module, SAE or probe.
            by: The client.
            answer: The method's.
        """
        of = OWNED.get(method)
        if of is not None and name is not None:
            self._owners.pop((of, name), None)
            if method.startswith("register"):
                self._owners[of, name] = by.owner if by.is_undo else by.key
        content = answer["global"] if name is None else answer
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        entry = AuditEntry(
            time=now.replace("+00:00", "Z"),
            engine=self._engine,
            action=ACTIONS[method],
            key=by.key,
            address=by.address,
            forwarded_for=by.forwarded,
            name=name,
            prefill=content["hash"]["prefill"],
            decode=content["hash"]["decode"],
            version=content["version"],
            is_undo=by.is_undo,
        )
        self._entries.append(entry)
        if self._path is not None:
            try:
                _append(self._path, msgspec.json.encode(entry) + b"\n")
            except OSError:
                logger.exception("steering: audit_file %s lacks %s", self._path, entry)

    def entries(self) -> list[AuditEntry]:
        """Return the last changes, the newest last."""
        return list(self._entries)


def _append(path: Path, line: bytes) -> None:
    """Add a line in one piece: other engine cores may write the same file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)
