"""Places for files: safe names made of what clients write, and the interface of a store that files are published to.

Names come from a fixed alphabet without ``/``, so that no name can leave the root.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

from headgate.capture.schema.errors import RequestError, shown
from headgate.capture.schema.sites import Site

TEMP_FOLDER = ".tmp"
"""Folder of a root that files in the making lie in."""

FILE_SUFFIX = ".safetensors"
"""Name of the one file that a request has in the layout `request`."""

TAKEN = (
    "exists and is not overwritten; give another tag or request_id, or let the operator set the parameter "
    "if_exists=number"
)
"""Second half of an error about a name that is taken."""

MAX_NAME = 180
"""Characters of a tag or request id; with every suffix a file name stays below the usual limit of 255 bytes."""
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_UNSAFE_CHARACTER = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True)
class Target:
    """Where one request's rows go, relative to the root.

    Attributes:
        folder: Names of the folders from the root down, each a safe name.
        stem: Name of the file or folder in it, without extension.
    """

    folder: tuple[str, ...]
    stem: str


def check_name(raw: object, field: str) -> str:
    """Return `raw` if it can be a file name as it is.

    The first character is a letter or a digit: hidden files, ``..`` and our own ``_shards`` and ``.tmp`` are out of
    reach, and ``/`` and NUL are not in the alphabet at all. Other characters are refused and never replaced: two names
    would become one, or a client would look for its file in vain.

    Raises:
        RequestError: Naming the field, the characters that are wrong, and the alphabet.
    """
    if not isinstance(raw, str) or not raw:
        raise RequestError(field, f"expected a text that can be a file name, got {shown(raw)}")
    if len(raw) > MAX_NAME:
        raise RequestError(field, f"at most {MAX_NAME} characters, got {len(raw)}: {shown(raw)}")
    if not _SAFE.fullmatch(raw):
        unsafe = sorted(set(_UNSAFE_CHARACTER.findall(raw)))
        wrong = f"{', '.join(map(ascii, unsafe))} cannot be in it" if unsafe else f"{raw[0]!r} cannot be the first"
        raise RequestError(
            field,
            f"{shown(raw)} cannot be a file name as it is: {wrong}. Names have the letters A to Z and a to z, digits, "
            "'.', '_' and '-', and begin with a letter or a digit; no other name is put in place of this one",
        )
    return raw


def slug(text: str) -> str:
    """A safe name for any text; different texts get different names.

    Text that is a safe name already stays as it is. Any other is cleaned and marked with ``~`` and a hash of the whole
    text; ``~`` is not in the alphabet, so no safe name equals a marked one.
    """
    if _SAFE.fullmatch(text) and len(text) <= MAX_NAME:
        return text
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{_UNSAFE_CHARACTER.sub('-', text)[:100].lstrip('._-')}~{digest}"


def stem_of(name: str, *, sample: tuple[int, int], stage: tuple[int, int]) -> str:
    """``name``, with ``-{i}`` if there are several samples and ``.pp{rank}`` if there are several stages.

    Args:
        name: The request's name.
        sample: Index and number of samples.
        stage: Rank and number of pipeline stages.
    """
    index, num_samples = sample
    rank, num_stages = stage
    if num_samples > 1 or index > 0:
        name = f"{name}-{index}"
    return f"{name}.pp{rank}" if num_stages > 1 else name


def numbered(stem: str, count: int) -> str:
    """The `count`-th name for `stem`, from 1: ``a``, ``a~2``, ``a~3``. ``~`` keeps them apart from clients' names."""
    return stem if count == 1 else f"{stem}~{count}"


def site_file(site: Site) -> str:
    """``12_post_mlp``, or ``final_norm``: a site in file names of the raw layout."""
    return site.name.replace(".", "_")


class PendingSync(Protocol):
    """A write shared by many requests that must be on the disk before their results say so.

    Hashable: equal ones are synced once for all the requests of a batch.
    """

    def sync(self) -> None:
        """Put it on the disk.

        Raises:
            OSError: If that fails: the requests that wait for it then end with an error.
        """
        ...


@dataclass(frozen=True, slots=True)
class Published:
    """Files under their final names.

    Attributes:
        paths: Where they are.
        num_bytes: What they take together.
        pending_sync: The sync that is still due before they survive a power cut.
        undo: Takes the files back if that fails, so that the same name can be written again; None if `pending_sync`
            does so itself. Raises `OSError` or `ConsumerError` if it cannot.
    """

    paths: tuple[str, ...]
    num_bytes: int
    pending_sync: PendingSync
    undo: Callable[[], None] | None = None


class Store(Protocol):
    """A place for files. Any thread may call."""

    def temp_path(self) -> Path:
        """A local path for a file of one's own."""
        ...

    def check_free(self, target: Target, suffix: str) -> None:
        """Raise `ConsumerError` if the target's name is taken."""
        ...

    def publish_file(self, target: Target, suffix: str, buffers: Iterable[memoryview]) -> Published:
        """Make ``{folder}/{stem}{suffix}`` appear, whole."""
        ...

    def publish_folder(self, target: Target, files: Mapping[str, Iterable[memoryview]]) -> Published:
        """Make ``{folder}/{stem}/`` appear with all of `files`."""
        ...

    def close(self) -> None:
        """Remove temporary files. May be called again."""
        ...
