"""The keys that a server knows: those of its environment, and those of the operator's file, as the file is now.

The operator's file is read and checked when the server starts, and again whenever it changes::

    {"keys": [{"name": "alice", "sha256": "9f86d081...", "roles": ["capture"], "tags": ["alice-*"],
               "default_tag": "alice-runs", "limits": {"max_bytes_per_day": 10737418240}}]}
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
import tempfile
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from headgate.capture.engine.access.access_key import ADMIN, ENVIRONMENT, ROLES, AccessKey, digest_of, role_of
from headgate.capture.engine.contracts.parts import collect
from headgate.capture.files.reading import read_secret, refusing
from headgate.capture.schema.errors import ConfigError, ForbiddenError

Version = tuple[int, int, int]
"""A file's modification time in nanoseconds, inode and size: if none has changed, neither has the content."""


class _Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    keys: tuple[AccessKey, ...]


def version_of(path: Path) -> Version:
    """The version of the file that is there now.

    Raises:
        OSError: If there is none.
    """
    found = path.stat()
    return found.st_mtime_ns, found.st_ino, found.st_size


def read_keys(path: Path, roles: Callable[[], Collection[str]]) -> tuple[AccessKey, ...]:
    """Read a file of keys.

    Args:
        path: The file.
        roles: Gives the roles that there are.

    Raises:
        ConfigError: If it cannot be read, others than its owner could change it or everybody could read it, or if
            anything in it is wrong.
    """
    content = read_secret(path, "keys file")
    return parse_keys(path, content, roles)


def parse_keys(path: Path, content: bytes, roles: Callable[[], Collection[str]]) -> tuple[AccessKey, ...]:
    """Read the content of the file of keys at `path`; see `read_keys`."""
    with refusing(f"keys file {path}", ConfigError):
        keys = msgspec.json.decode(content.removeprefix(BOM_UTF8), type=_Document).keys
    _check_keys(path, keys, roles())
    return keys


def _check_keys(path: Path, keys: Collection[AccessKey], roles: Collection[str]) -> None:
    names = [key.name for key in keys]
    digests = [digest for key in keys for digest in key.digests]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"keys file {path}: several keys have the name {twice[0]!r}; sha256 takes a list of digests")
    if len(set(digests)) < len(digests):
        twice = sorted(key.name for key in keys if any(digests.count(digest) > 1 for digest in key.digests))
        raise ConfigError(f"keys file {path}: the keys {', '.join(twice)} have the same sha256")
    for key in keys:
        for role in key.roles:
            if role not in roles:
                raise ConfigError(
                    f"keys file {path}: key {key.name!r} has an unknown role {role!r}; known: "
                    f"{', '.join(sorted(roles))}"
                )
        if not key.roles:
            raise ConfigError(f"keys file {path}: key {key.name!r} has no role; known: {', '.join(sorted(roles))}")


def add_entry(path: Path, entry: Mapping[str, object], roles: Callable[[], Collection[str]]) -> None:
    """Add one key to the file, which is made if there is none, and replaced as a whole.

    Raises:
        ConfigError: If the file or the entry is wrong; then the file stays as it is.
    """
    entries: list[object] = []
    before = path.stat() if path.exists() else None
    if before is not None:
        read_keys(path, roles)
        entries = msgspec.json.decode(path.read_bytes().removeprefix(BOM_UTF8))["keys"]
    content = msgspec.json.format(msgspec.json.encode({"keys": [*entries, entry]}), indent=2) + b"\n"
    parse_keys(path, content, roles)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            if before is not None:
                os.fchown(descriptor, before.st_uid, before.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


logger = logging.getLogger("headgate")

CAPTURE, STEERING = "capture", "steering"


def known_roles() -> frozenset[str]:
    """Roles that a key can have: one for each part with routes, and `ADMIN`."""
    parts = collect(lambda part: part.brings("routes") or None)
    return frozenset({role_of(part) for part in (CAPTURE, STEERING, *parts)} | {ADMIN})


def variable_of(role: str) -> str:
    """Environment variable with the keys of a role."""
    part = next((part for part, its_role in ROLES.items() if its_role == role), role)
    return f"HEADGATE_{part.upper()}_KEYS"


class KeyRing:
    """The keys of one API server process. Event loop only.

    Attributes:
        has_keys: Whether any client can have a key here.
        open_roles: The roles that need no key: there is no file of keys, and none of these in the environment.

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
        self.has_keys = path is not None or bool(self._of_environment)
        kept = {role for key in self._of_environment for role in key.roles}
        self.open_roles = self._roles - kept if path is None else frozenset[str]()
        if path is not None:
            self._read(path)

    def find(self, given: Iterable[str], role: str) -> AccessKey:
        """Find the key that lets a client do what needs `role`, which is none of `open_roles`.

        Args:
            given: What the client sent that may be a key.
            role: The role.

        Raises:
            ForbiddenError: If there is no such key.
        """
        known = self.matching(given)
        for key in known:
            if key.has_role(role) and not key.is_expired():
                return key
        raise ForbiddenError(self._why(role, known))

    def matching(self, given: Iterable[str]) -> list[AccessKey]:
        """Find the keys among what a client sent, expired ones included, in the order in which it sent them.

        All are compared, in a time that does not depend on which of them matches.
        """
        digests = [digest_of(text) for text in given]
        keys = self._keys()
        return [key for digest in digests for key in keys if _has_digest(key, digest)]

    @property
    def has_file(self) -> bool:
        """Whether there is a file of keys."""
        return self._path is not None

    def described(self, role: str, *, is_local: bool) -> str:
        """Describe for the log who may do what needs `role`."""
        if role not in self.open_roles:
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
