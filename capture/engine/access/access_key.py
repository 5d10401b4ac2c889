"""One client's key: its roles, and the limits of what it may capture."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from typing import Literal

import msgspec

from headgate.capture.schema.errors import ForbiddenError
from headgate.capture.schema.sites import HookPoint, Site, parse_hook

ADMIN = "admin"
"""Role that includes every other one."""
ENVIRONMENT = "env."
"""Beginning of the names of keys from the environment; entries of a file have others."""
ROLES = {"steering": "steer"}
"""Roles of parts that are not called after their part."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PATTERN = re.compile(r"[A-Za-z0-9_*-][A-Za-z0-9._*-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of what one key captures; each is off if None. Days are days of UTC.

    Attributes:
        max_bytes_per_day: Bytes of captured rows, over all sites. A prompt is admitted if all that it could capture
            fits, and counts with what it did capture, or with all it could if its client disconnected before its end.
        max_requests_per_day: Prompts that capture anything.
        max_concurrent_requests: Prompts that capture anything at the same time.
        max_request_rows: Positions that one HTTP request captures for one consumer, all its prompts and samples
            together.
        max_request_bytes: Bytes of rows that one HTTP request captures, at all sites and for all consumers together.
        max_inline_bytes: The same for consumers whose rows are part of the answer (``inline``).
    """

    max_bytes_per_day: int | None = None
    max_requests_per_day: int | None = None
    max_concurrent_requests: int | None = None
    max_request_rows: int | None = None
    max_request_bytes: int | None = None
    max_inline_bytes: int | None = None

    @property
    def are_set(self) -> bool:
        """Whether there is any."""
        return self != KeyLimits()

    @property
    def are_counted(self) -> bool:
        """Whether requests must be counted, beyond looking at each by itself."""
        counted = (self.max_bytes_per_day, self.max_requests_per_day, self.max_concurrent_requests)
        return any(limit is not None for limit in counted)


class AccessKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of a file of keys.

    Attributes:
        name: The client's name in the audit, quotas and messages: letters, digits, ``._-``.
        sha256: Hexadecimal digest of the key, or several while a key is being replaced. Never the key itself.
        roles: ``capture``, ``steer``, ``admin``, or the name of another part that has routes. ``admin`` includes all.
        expires: Time at which the key expires, such as ``"2027-01-31T00:00:00Z"``.
        tags: Tags that its captures may have; ``*`` matches any characters; any tag if None.
        default_tag: The tag of captures that name none; the consumer's own if None.
        consumers: Consumers that it may name, including ``hidden_states``; all if None.
        sites: ``{hook point: layers}`` that it may capture; layers are ``"all"`` or a list; all if None.
        limits: How much it may capture.
    """

    name: str
    sha256: str | tuple[str, ...]
    roles: tuple[str, ...]
    expires: datetime | None = None
    tags: tuple[str, ...] | None = None
    default_tag: str | None = None
    consumers: tuple[str, ...] | None = None
    sites: dict[str, Literal["all"] | frozenset[int]] | None = None
    limits: KeyLimits = KeyLimits()

    def __post_init__(self) -> None:
        """Check the values; msgspec names the place in the file.

        Raises:
            ValueError: If one is wrong.
        """
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"name {self.name!r}: expected 1 to 64 letters, digits or ._-, the first no sign")
        for digest in self.digests or ("",):
            if not _DIGEST.fullmatch(digest):
                raise ValueError(
                    f"key {self.name!r}: sha256 must be 64 hexadecimal digits in lower case; `headgate keys hash` "
                    "makes them of a key"
                )
        if self.expires is not None and self.expires.tzinfo is None:
            raise ValueError(f"key {self.name!r}: expires needs a time zone, such as Z at its end")
        for pattern in self.tags or ():
            if not _PATTERN.fullmatch(pattern):
                raise ValueError(f"key {self.name!r}: {pattern!r} is no pattern of tags: letters, digits, ._- and *")
        if self.default_tag is not None and not self.allows_tag(self.default_tag):
            raise ValueError(f"key {self.name!r}: default_tag {self.default_tag!r} is not among its tags")
        for hook in self.sites or ():
            if parse_hook(hook, "sites").value != hook:
                raise ValueError(f"key {self.name!r}: write {hook!r} in sites as {parse_hook(hook, 'sites').value!r}")
        for limit, value in msgspec.structs.asdict(self.limits).items():
            if value is not None and value < 0:
                raise ValueError(f"key {self.name!r}: limits.{limit} must not be negative, got {value}")

    @property
    def digests(self) -> tuple[str, ...]:
        """Digests of the keys that are let in under this name."""
        return (self.sha256,) if isinstance(self.sha256, str) else self.sha256

    @property
    def is_of_environment(self) -> bool:
        """Whether it stands in the server's environment, where keys are the operator's."""
        return self.name.startswith(ENVIRONMENT)

    def has_role(self, role: str) -> bool:
        """Whether the key may do what needs `role`."""
        return role in self.roles or ADMIN in self.roles

    def is_expired(self) -> bool:
        """Whether its time is over."""
        return self.expires is not None and datetime.now(timezone.utc) >= self.expires

    def allows_tag(self, tag: str) -> bool:
        """Whether captures may have this tag."""
        return self.tags is None or any(fnmatchcase(tag, pattern) for pattern in self.tags)

    def allows_consumer(self, instance: str) -> bool:
        """Whether captures may go to this consumer."""
        return self.consumers is None or instance in self.consumers

    def allows_site(self, site: Site) -> bool:
        """Whether rows of this site may be captured."""
        if self.sites is None:
            return True
        layers = self.sites.get(site.hook.value, frozenset())
        return layers == "all" or site.layer in layers or (site.hook is HookPoint.FINAL_NORM and bool(layers))

    def check_sites(self, sites: Iterable[Site], field: str, site_fields: Mapping[Site, str]) -> None:
        """Refuse a capture of sites that the key does not allow.

        Args:
            sites: That are captured.
            field: Path of the spec, for errors.
            site_fields: See `CaptureSpec.site_fields`.

        Raises:
            ForbiddenError: Naming the first.
        """
        for site in sites:
            if not self.allows_site(site):
                raise ForbiddenError(
                    f"the key {self.name!r} may not capture the site {site.name}; it may capture "
                    f"{', '.join(self.sites or ()) or 'none'}",
                    f"{field}.{site_fields.get(site, f'hooks.{site.hook}')}",
                )


def digest_of(key: str) -> str:
    """Hexadecimal SHA-256 of a key as a client sends it."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def make_key() -> str:
    """Make a new key of 256 random bits."""
    return f"hg_{secrets.token_urlsafe(32)}"


def role_of(part: str) -> str:
    """The role that lets a key do what needs a key of this part."""
    return ROLES.get(part, part)
