"""The keys that a server knows: those of its environment, and those of the operator's file, as the file is now."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from headgate.capture.engine.access.access_key import ADMIN, ENVIRONMENT, ROLES, AccessKey, digest_of, role_of
from headgate.capture.engine.access.keys_file import Version, read_keys, version_of
from headgate.capture.engine.contracts.parts import collect
from headgate.capture.schema.errors import ConfigError, ForbiddenError

logger = logging.getLogger("headgate")

CAPTURE, STEERING = "capture", "steering"


def known_roles() -> frozenset[str]:
    """Roles that a key can have: one for each installed part with routes, and `ADMIN`."""
    parts = collect(lambda part: part.implements("headgate_routes") or None)
    return frozenset({role_of(part) for part in (CAPTURE, STEERING, *parts)} | {ADMIN})


def variable_of(role: str) -> str:
    """Environment variable with the keys of a role."""
    part = next((part for part, its_role in ROLES.items() if its_role == role), role)
    return f"HEADGATE_{part.upper()}_KEYS"


class KeyRing:
    """The keys of one API server process. Event loop only.

    Args:
        path: The operator's file of keys; None if there is none.
        is_counting: Whether requests can be counted here over all processes of the server: see `Usage`.

    Raises:
        ConfigError: If the file is wrong.
    """

    def __init__(self, path: Path | None = None, *, is_counting: bool = True) -> None:
        self._path = path
        self._is_counting = is_counting
        self._roles = known_roles()
        self._of_environment = tuple(key for role in sorted(self._roles) for key in _keys_of_environment(role))
        self._of_file: Sequence[AccessKey] = ()
        self._version: Version | None = None
        if path is not None:
            self._read(path)

    def find(self, given: Iterable[str], role: str, *, is_local: bool) -> AccessKey | None:
        """Find the key that lets a client do what needs `role`.

        Args:
            given: What the client sent that may be a key.
            role: The role.
            is_local: Whether the server can be reached from its own machine alone.

        Returns:
            None if no key is needed: there is no file of keys and none of this role in the environment, and the server
            is reached from its own machine alone.

        Raises:
            ForbiddenError: If there is no such key.
        """
        if not self.needs_key(role):
            if is_local:
                return None
            raise ForbiddenError(
                "this server listens beyond its own machine and has no key for this; the operator sets "
                f"{variable_of(role)} (one key, or several separated by commas), names a file of keys with "
                "--headgate-keys, or starts it with --host 127.0.0.1"
            )
        known = self.matching(given)
        for key in known:
            if key.has_role(role) and not key.is_expired():
                return key
        raise ForbiddenError(self._why(role, known))

    def matching(self, given: Iterable[str]) -> list[AccessKey]:
        """Find the keys among what a client sent, those that have expired included, in the order in which it sent them.

        All are compared, in a time that does not depend on which of them matches.
        """
        digests = [digest_of(text) for text in given]
        keys = self._keys()
        return [key for digest in digests for key in keys if _has_digest(key, digest)]

    @property
    def has_keys(self) -> bool:
        """Whether any client can have a key here."""
        return self._path is not None or bool(self._of_environment)

    @property
    def has_file(self) -> bool:
        """Whether there is a file of keys."""
        return self._path is not None

    def needs_key(self, role: str) -> bool:
        """Whether a key is needed even from the server's own machine."""
        return self._path is not None or any(role in key.roles for key in self._of_environment)

    def described(self, role: str, *, is_local: bool) -> str:
        """Describe for the log who may do what needs `role`."""
        if self.needs_key(role):
            return f"{sum(key.has_role(role) for key in self._keys())} keys"
        return "open, on this machine alone" if is_local else f"closed, {variable_of(role)} is not set"

    def refresh(self, *, is_forced: bool = False) -> None:
        """Read the file again if it has changed; a file that is wrong changes nothing, and is logged once.

        Args:
            is_forced: Read it whether it seems to have changed or not.
        """
        if self._path is None:
            return
        try:
            if not is_forced and version_of(self._path) == self._version:
                return
            self._read(self._path)
        except ConfigError as error:
            logger.error("headgate: the keys stay as they were: %s", error)  # noqa: TRY400  (the message says all)
        except OSError as error:
            if is_forced or self._version is not None:
                logger.error(  # noqa: TRY400
                    "headgate: the keys stay as they were: keys file %s: %s", self._path, error.strerror or error
                )
            self._version = None
        else:
            logger.info("headgate: read %d keys from %s", len(self._of_file), self._path)

    def _read(self, path: Path) -> None:
        try:
            self._version = version_of(path)
        except OSError as error:
            raise ConfigError(f"keys file {path}: {error.strerror or error}") from error
        found = read_keys(path, lambda: self._roles)
        for key in found:
            if key.is_of_environment:
                raise ConfigError(f"keys file {path}: {key.name!r} names a key of the environment; choose another name")
            if key.limits.are_counted and not self._is_counting:
                raise ConfigError(
                    f"keys file {path}: limits of {key.name!r} are counted over all API servers: name a file for that "
                    "with --headgate-usage FILE, or start one API server (--api-server-count 1)"
                )
        self._of_file = found

    def _keys(self) -> Sequence[AccessKey]:
        return *self._of_environment, *self._of_file

    def _why(self, role: str, known: Collection[AccessKey]) -> str:
        if (expired := next((key for key in known if key.is_expired()), None)) is not None:
            return f"the key {expired.name!r} has expired"
        if self._path is None:
            return f"this needs one of the keys in the server's {variable_of(role)}, as X-Headgate-Key: KEY"
        if known:
            key = next(iter(known))
            return f"this needs a key with the role {role!r}; {key.name!r} has {', '.join(key.roles)}"
        return (
            f"this needs a key with the role {role!r}, as X-Headgate-Key: KEY; the operator makes one with "
            f"`headgate keys add`, or sets {variable_of(role)}"
        )

    def __repr__(self) -> str:
        return f"<{len(self._of_environment)} keys of the environment, {len(self._of_file)} of {self._path}>"


def _has_digest(key: AccessKey, digest: str) -> bool:
    return sum(secrets.compare_digest(digest, known) for known in key.digests) > 0


def _keys_of_environment(role: str) -> Iterable[AccessKey]:
    texts = [text.strip() for text in os.environ.get(variable_of(role), "").split(",") if text.strip()]
    for number, text in enumerate(texts, 1):
        yield AccessKey(name=f"{ENVIRONMENT}{role}.{number}", sha256=digest_of(text), roles=(role,))
