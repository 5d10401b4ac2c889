"""Prompts of a harvest: text, chats or tokens, from a file or a data set of Hugging Face, one after the other.

=============  ==============================================================
``.txt``       each line that is not empty is a prompt
``.jsonl``     each line is a text, a list, or an object with a field of one
``.parquet``   a column of texts or lists
any other      the name of a data set: ``datasets`` loads it
=============  ==============================================================

A list is a chat if it holds objects with ``role`` and ``content``, and a tokenized prompt if it holds integers.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import msgspec

from headgate.capture.files.reading import refusing, text_lines, text_of_line
from headgate.capture.schema.errors import ConfigError, shown

logger = logging.getLogger("headgate")

Chat = list[dict[str, Any]]
Prompt = str | Chat | list[int]
"""A text, the messages of a chat, or token ids."""

FIELDS = ("text", "messages", "prompt", "input_ids", "token_ids")
"""Fields that are looked for where none is named."""
SUFFIXES = (".txt", ".jsonl", ".parquet")
LOGGED_REFUSALS = 20
"""Records that are left out of a run, and named in the log."""
_NO_FIELD = "none"
_CHUNK = 1 << 20
_ROWS = 1024


class Record(NamedTuple):
    """A record that should be a prompt.

    Attributes:
        place: Its file and line, or the like, for messages.
        value: As it was read; a `ConfigError` if it could not be.
        field: Of the prompt in it; ``none`` if it is one itself.
    """

    place: str
    value: object
    field: str = _NO_FIELD

    def prompt(self) -> Prompt:
        """Return the prompt.

        Raises:
            ConfigError: If it is none; the message has its place.
        """
        return _prompt(_value(self.value, self.field, self.place), self.place)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSet:
    """Prompts that can be gone through more than once; `records` goes on after a bad one.

    Attributes:
        name: As the user named them.
        field: Of each record; ``none`` where records have no fields.
        sha256: Of the file; of a data set, of its prompts as JSON.
    """

    name: str
    field: str
    sha256: str
    _records: Callable[[], Iterator[tuple[str, object]]] = dataclasses.field(repr=False)

    def __iter__(self) -> Iterator[Prompt]:
        """The prompts in order.

        Raises:
            ConfigError: At a record that is no prompt; the message has its place.
        """
        return (record.prompt() for record in self.records())

    def records(self) -> Iterator[Record]:
        """Every record in order, including records that are no prompts."""
        return (Record(place, record, self.field) for place, record in self._records())


def is_chat(prompt: Prompt) -> TypeGuard[Chat]:
    """Whether a prompt is a chat."""
    return not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], dict)


def open_prompts(name: str, *, field: str | None = None, split: str = "train") -> PromptSet:
    """Open prompts; the first record is read.

    Args:
        name: A file, or the name of a data set of Hugging Face.
        field: The field of each record; the one of `FIELDS` that the first record has, if None.
        split: Of a data set.

    Raises:
        ConfigError: If they cannot be opened, or it is not clear which field is meant.
    """
    if Path(name).suffix in SUFFIXES:
        return _of_file(Path(name), name, field)
    if Path(name).exists():
        raise ConfigError(f"prompts: {name}: expected a file that ends in {', '.join(SUFFIXES)}")
    return _of_data_set(name, field, split)


def each_record(prompts: str | Iterable[Prompt]) -> Iterator[Record]:
    """Go through prompts of any kind once: prompts of a file or a data set by its name, or of a program.

    Raises:
        ConfigError: As `open_prompts`.
    """
    if isinstance(prompts, str):
        prompts = open_prompts(prompts)
    if isinstance(prompts, PromptSet):
        return prompts.records()
    return (Record(f"prompt {number}", value) for number, value in enumerate(prompts))


class Refusals:
    """Counts records that are no prompts that the model can take, and logs where the first of them are.

    Attributes:
        count: How many there were.
        first: Why the first of them was refused; empty if there was none.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first = ""

    def add(self, record: Record, error: Exception) -> None:
        """Note that a record was refused."""
        text = str(error) if record.place in str(error) else f"prompts: {record.place}: {error}"
        self.first = self.first or text
        self.count += 1
        if self.count <= LOGGED_REFUSALS:
            more = "; further ones are counted alone" if self.count == LOGGED_REFUSALS else ""
            logger.warning("harvest: left out: %s%s", text, more)


def _of_file(path: Path, name: str, field: str | None) -> PromptSet:
    try:
        digest = sha256()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise ConfigError(f"prompts: {name} cannot be read: {error}") from error
    if path.suffix == ".txt":
        if field is not None:
            raise ConfigError(f"prompts: {name}: lines of text have no fields; leave out the field {field!r}")
        return PromptSet(name=name, field=_NO_FIELD, sha256=digest.hexdigest(), _records=lambda: _lines(path))
    if path.suffix == ".jsonl":
        found = _field_of(next(_json_lines(path), None), name, field)
        return PromptSet(name=name, field=found, sha256=digest.hexdigest(), _records=lambda: _json_lines(path))
    column = _field_of(next(_parquet(path, field), None), name, field)
    return PromptSet(name=name, field=column, sha256=digest.hexdigest(), _records=lambda: _parquet(path, column))


def _wrong(message: str) -> ConfigError:
    return ConfigError(f"prompts: {message}")


def _lines(path: Path) -> Iterator[tuple[str, object]]:
    for number, line in text_lines(path, _wrong):
        if text := line.rstrip("\r\n"):
            yield f"{path}, line {number}", text


def _json_lines(path: Path) -> Iterator[tuple[str, object]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}, line {number}"
            if line.strip():
                record: object
                try:
                    text = text_of_line(place, number, line, _wrong)
                    with refusing(place, _wrong, "not JSON"):
                        record = msgspec.json.decode(text)
                except ConfigError as error:
                    record = error
                yield place, record


def _parquet(path: Path, column: str | None) -> Iterator[tuple[str, object]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"prompts: {path}: {error}: pip install 'headgate[datasets]'") from error
    with refusing(path, _wrong, "not a Parquet file, or damaged"):
        file = pyarrow.parquet.ParquetFile(path)
    if column is not None and column not in file.schema_arrow.names:
        raise ConfigError(f"prompts: {path}: no column {column!r}; there are {', '.join(file.schema_arrow.names)}")
    number = 0
    batches = file.iter_batches(batch_size=_ROWS, columns=None if column is None else [column])
    while True:
        with refusing(f"{path}, row {number}", _wrong, "damaged"):
            batch = next(batches, None)
            records = [] if batch is None else batch.to_pylist()
        if batch is None:
            return
        for record in records:
            yield f"{path}, row {number}", record
            number += 1


def _of_data_set(name: str, field: str | None, split: str) -> PromptSet:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"prompts: {name} is no file; as the name of a data set it needs: pip install 'headgate[datasets]'"
        ) from error
    try:
        rows = datasets.load_dataset(name, split=split)
    except Exception as error:
        raise ConfigError(f"prompts: {name}: no file, and datasets cannot load it: {error}") from error
    column = _field_of(("the data set", rows[0]) if len(rows) else None, name, field)
    chosen = rows.select_columns([column])

    def records() -> Iterator[tuple[str, object]]:
        return _numbered(chosen, f"{name}, row")

    return PromptSet(name=name, field=column, sha256=_digest(row[column] for row in chosen), _records=records)


def _numbered(records: Iterable[object], what: str) -> Iterator[tuple[str, object]]:
    return ((f"{what} {number}", record) for number, record in enumerate(records))


def _digest(values: Iterable[object]) -> str:
    digest = sha256()
    for value in values:
        digest.update(msgspec.json.encode(value) + b"\n")
    return digest.hexdigest()


def _field_of(first: tuple[str, object] | None, name: str, asked: str | None) -> str:
    """The field of the first record that prompts are in; `_NO_FIELD` if it has no fields."""
    if first is None:
        raise ConfigError(f"prompts: {name} is empty")
    place, record = first
    if asked is not None:
        _value(record, asked, place)
        return asked
    if isinstance(record, ConfigError):
        raise record
    if not isinstance(record, Mapping):
        return _NO_FIELD
    found = [known for known in FIELDS if known in record]
    if len(found) != 1:
        raise ConfigError(f"prompts: {place}: which field is meant? Name one of {', '.join(map(str, record))}")
    return found[0]


def _value(record: object, name: str, place: str) -> object:
    if isinstance(record, ConfigError):
        raise record
    if name == _NO_FIELD and not isinstance(record, Mapping):
        return record
    if not isinstance(record, Mapping) or name not in record:
        have = f"has {', '.join(map(str, record))}" if isinstance(record, Mapping) else f"is {shown(record)}"
        raise ConfigError(f"prompts: {place}: expected an object with the field {name!r}; it {have}")
    return record[name]


def _prompt(value: object, place: str) -> Prompt:
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        items: list[Any] = list(value)
        if items and all(map(_is_message, items)):
            return [dict(item) for item in items]
        if all(type(item) is int for item in items):
            return items
    raise ConfigError(
        f"prompts: {place}: expected a text, a list of messages with role and content, or a list of token ids, got "
        f"{shown(value)}"
    )


def _is_message(item: object) -> bool:
    """Whether it has the fields of a message; one that calls tools may say nothing else."""
    return isinstance(item, Mapping) and "role" in item and ("content" in item or "tool_calls" in item)
