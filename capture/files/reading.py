"""Reading files of others: what parsers raise becomes an error of headgate, and texts are UTF-8 with or without a mark.

Every reader of a file that a user, a client or another tool may have written runs its parser in `refusing`, and opens
texts by `read_text` or `text_lines`. Keys and tokens are read by `read_secret`, which checks who else can read them.

Bytes of a file that others may change while a server uses it are read by calls of the system, never mapped
(`StoredFile`). A page of a mapped file that was cut off kills the process that touches it (SIGBUS). A read that comes
short is an error of the one request that needed it.
"""

from __future__ import annotations

import codecs
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from headgate.capture.schema.errors import ConfigError, HeadgateError

Wrong = Callable[[str], Exception]
"""Makes the error of a reader out of its message: a class of errors, or what puts a field's name before it."""

MAX_TEXT_BYTES = 256 << 20
"""Bytes of a file that is read as one text."""
_MAX_REASON = 300
_OF_WIDE_TEXT = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@contextmanager
def refusing(where: object, wrong: Wrong, what: str = "") -> Iterator[None]:
    """Turn whatever a parser raises about a file into the reader's error: ``WHERE: WHAT: REASON``.

    Parsers raise nearly everything on damaged input (numpy alone ValueError, SyntaxError, TokenError, TypeError,
    OverflowError and MemoryError), so everything is caught but errors of the system that name a file, such as one that
    is missing. Errors of headgate become the reader's, too; errors of headgate that begin with `where` stay as they
    are.

    Args:
        where: The file, and the place in it if that is known.
        wrong: Makes the error.
        what: What the error says of the file where the parser's own reason says little.
    """
    try:
        yield
    except HeadgateError as error:
        if str(error).startswith(str(where)):
            if isinstance(wrong, type) and isinstance(error, wrong):
                raise
            raise wrong(str(error)) from error
        raise wrong(f"{where}: {error}") from error
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        reason = _reason_of(error)
        raise wrong(reason if reason.startswith(str(where)) else f"{where}: {what}{what and ': '}{reason}") from error


def _reason_of(error: BaseException) -> str:
    """Return the text of a parser's error, cut short; with the error's name where the text alone says little."""
    text = " ".join(str(error).split())
    if len(text) > _MAX_REASON:
        text = f"{text[:_MAX_REASON]}..."
    says_itself = isinstance(error, ValueError | OSError | msgspec.MsgspecError | RuntimeError)
    return text if text and says_itself else f"{type(error).__name__}: {text}".removesuffix(": ")


def read_text(path: Path, wrong: Wrong, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Read a file of text in UTF-8; a byte-order mark at its start is left out.

    Args:
        path: The file.
        wrong: Makes the error.
        max_bytes: Of the file.

    Raises:
        HeadgateError: Made by `wrong`, if it is in another encoding, with the line, or too large.
        OSError: If it cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise wrong(f"{path}: has over {max_bytes:,} bytes, which is too much for a file of this kind")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        _refuse_encoding(path, content.split(b"\n"), wrong)


def text_lines(path: Path, wrong: Wrong) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file of text in UTF-8 with their numbers, from 1; see `read_text`."""
    with path.open(encoding="utf-8-sig") as file:
        try:
            yield from enumerate(file, start=1)
        except UnicodeDecodeError:
            with path.open("rb") as again:
                _refuse_encoding(path, again, wrong)


def read_json(path: Path, wrong: Wrong, kind: Any = dict[str, Any]) -> Any:
    """Read a file of JSON as a value of a type that msgspec knows; see `read_text`.

    Raises:
        HeadgateError: Made by `wrong`, if it is no such JSON.
        OSError: If it cannot be read.
    """
    text = read_text(path, wrong)
    with refusing(path, wrong, "expected an object of JSON"):
        return msgspec.json.decode(text, type=kind)


def text_of_line(where: str, number: int, line: bytes, wrong: Wrong) -> str:
    """Return a line of a file as text, the mark at the file's start left out; `where` has the file and the line.

    Raises:
        HeadgateError: Made by `wrong`, if it is in another encoding than UTF-8; it names the line, and what to do.
    """
    if number == 1 and line.startswith(_OF_WIDE_TEXT):
        raise wrong(f"{where}: is in UTF-16 or UTF-32; save it as UTF-8: iconv -f UTF-16 -t UTF-8 OLD > NEW")
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise wrong(
            f"{where}: byte 0x{line[error.start]:02x} in column {error.start + 1} is not UTF-8; save the "
            "file as UTF-8, such as by: iconv -f LATIN1 -t UTF-8 OLD > NEW"
        ) from None


def _refuse_encoding(path: Path, lines: Iterable[bytes], wrong: Wrong) -> NoReturn:
    """Raise the error of the first line that is not in UTF-8."""
    for number, line in enumerate(lines, start=1):
        text_of_line(f"{path}: line {number}", number, line, wrong)
    raise wrong(f"{path}: is not in UTF-8; save it as UTF-8")


Bytes = npt.NDArray[np.uint8]
ReadInto = Callable[[int, Bytes], None]
"""Fills uint8 ``[n]``, contiguous, with the bytes from a position on."""


class ByteSource(Protocol):
    """Bytes that tensors are read from."""

    def opened(self) -> AbstractContextManager[ReadInto]:
        """Open them; what was read is valid if the context ends without an error."""
        ...


class StoredFile:
    """A file as it was when this object was made. Any thread; nothing is kept open between reads.

    Attributes:
        path: The file.
        size: Its bytes.

    Args:
        path: The file.
        wrong: Makes the errors of reads.

    Raises:
        HeadgateError: Made by `wrong`, if it is no regular file.
        OSError: If it is not there.
    """

    def __init__(self, path: Path, wrong: Wrong) -> None:
        self.path = path
        self._wrong = wrong
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise wrong(f"{path}: is no regular file")
        self.size = found.st_size
        self._version = _version(found)

    @contextmanager
    def opened(self) -> Iterator[ReadInto]:
        """Open the file; the context ends with an error if it is another file by then, or was written to.

        Raises:
            HeadgateError: Made by `wrong`: the file has changed, is gone, or ends before what is read.
        """
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise self._wrong(f"{self.path}: the file is gone; register it again") from error
        try:
            yield lambda offset, memory: self._read(file, offset, memory)
            self._check(file)
        finally:
            os.close(file)

    def read(self, offset: int, size: int) -> bytes:
        """Read a part; shorter than asked for where the file ends before.

        Raises:
            HeadgateError: As `opened`.
        """
        memory = np.empty(max(0, min(size, self.size - offset)), np.uint8)
        with self.opened() as read_into:
            read_into(offset, memory)
        return memory.tobytes()

    def check(self) -> None:
        """Raise the error of `opened` if the file has changed."""
        with self.opened():
            pass

    def _read(self, file: int, offset: int, memory: Bytes) -> None:
        if missing := len(memory) - read_whole(file, offset, memory):
            self._check(file)
            raise self._wrong(f"{self.path}: ends {missing} bytes before what is read of it; it is cut off")

    def _check(self, file: int) -> None:
        if _version(os.fstat(file)) != self._version:
            raise self._wrong(f"{self.path}: the file has changed since it was opened; register it again")


def read_whole(file: int, offset: int, memory: Bytes) -> int:
    """Fill memory with the bytes of an open file; return how many, fewer if it ends before."""
    view, done = memory.data, 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], offset + done)
        if not count:
            break
        done += count
    return done


def _version(found: os.stat_result) -> tuple[int, int, int, int]:
    """Return what distinguishes a file from another, and from its state before a write."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


Loaded = TypeVar("Loaded")


def load_once(load: Callable[[Path], Loaded], max_files: int) -> Callable[[str | os.PathLike[str]], Loaded]:
    """Return a function that loads a file once, and again when it has changed. `~` is the user's own folder.

    Args:
        load: Reads the file. What it raises is not kept.
        max_files: What is loaded of so many is kept.
    """

    @lru_cache(max_files)
    def loaded(path: Path, version: tuple[int, ...]) -> Loaded:
        return load(path)

    def load_current(path: str | os.PathLike[str]) -> Loaded:
        place = Path(path).expanduser()
        return loaded(place, _version(place.stat()) if place.exists() else ())

    return load_current


class StoredBytes:
    """Bytes in memory that are read as a file is.

    Args:
        content: uint8 ``[n]``, contiguous.
    """

    def __init__(self, content: Bytes) -> None:
        self._content = content

    @contextmanager
    def opened(self) -> Iterator[ReadInto]:
        """See `ByteSource.opened`."""
        yield self._read

    def _read(self, offset: int, memory: Bytes) -> None:
        memory[:] = self._content[offset : offset + len(memory)]


MAX_SECRET_BYTES = 4 << 20
"""Largest size of such a file: some ten thousand keys."""


def read_secret(path: Path, what: str, *, is_reader: bool = False) -> bytes:
    """Read a file of secrets.

    The group may read it, as volumes of secrets in Kubernetes have it; other users may do nothing.

    Args:
        path: The file; links are followed.
        what: Name of the setting, for messages.
        is_reader: The secret is shown to a server, and does not open this one: the file may belong to another user.

    Raises:
        ConfigError: If it cannot be read, is too long, belongs to another user than this one or root, others may read
            or change it, or its group may change it.
    """
    try:
        with path.open("rb") as file:
            _check(path, what, os.fstat(file.fileno()), is_reader=is_reader)
            content = file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{what} {path}: {error.strerror or error}") from error
    if len(content) > MAX_SECRET_BYTES:
        raise ConfigError(f"{what} {path}: has more than {MAX_SECRET_BYTES} bytes")
    return content


def _check(path: Path, what: str, found: os.stat_result, *, is_reader: bool) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{what} {path}: is no regular file")
    if found.st_uid not in (0, os.geteuid()) and not is_reader:
        raise ConfigError(
            f"{what} {path}: belongs to the user {found.st_uid}, who could let anybody in; run chown {os.geteuid()} "
            f"{path}"
        )
    if found.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise ConfigError(
            f"{what} {path}: its mode {stat.S_IMODE(found.st_mode):04o} lets other users read or change it; run "
            f"chmod 600 {path} (in Kubernetes: defaultMode: 0400)"
        )
