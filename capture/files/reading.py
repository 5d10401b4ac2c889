"""Reading files of others: what parsers raise becomes an error of headgate, and texts are UTF-8 with or without a mark.

Every reader of a file that a user, a client or another tool may have written runs its parser in `refusing`, and opens
texts by `read_text` or `text_lines`.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from headgate.capture.schema.errors import HeadgateError

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
