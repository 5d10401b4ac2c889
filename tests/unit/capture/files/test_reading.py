"""Texts of files and errors of parsers, as every reader has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headgate.capture.files.reading import load_once, read_json, read_text, refusing, text_lines
from headgate.capture.schema.errors import ConfigError, RequestError
from headgate.consumers.harvest.prompts import open_prompts
from headgate.steering import load
from headgate.steering.probes.examples import read_labels

TEXT = "Grüße\nzweite Zeile\n"


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8-sig")
    (tmp_path / "a.json").write_text('{"a": 1}', encoding="utf-8-sig")

    assert read_text(tmp_path / "a.txt", ConfigError) == TEXT
    assert list(text_lines(tmp_path / "a.txt", ConfigError)) == [(1, "Grüße\n"), (2, "zweite Zeile\n")]
    assert read_json(tmp_path / "a.json", ConfigError) == {"a": 1}


@pytest.mark.parametrize(
    ("encoding", "reason"),
    [
        ("latin-1", r"line 1: byte 0xfc in column 3 is not UTF-8; save the file as UTF-8, such as by: iconv -f LATIN1"),
        ("utf-16", r"line 1: is in UTF-16 or UTF-32; save it as UTF-8: iconv"),
    ],
)
def test_another_encoding_is_named_with_its_place(encoding: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding=encoding)

    with pytest.raises(ConfigError, match=rf"a\.txt: {reason}"):
        read_text(tmp_path / "a.txt", ConfigError)
    with pytest.raises(ConfigError, match=rf"a\.txt: {reason}"):
        list(text_lines(tmp_path / "a.txt", ConfigError))


def test_a_line_far_down_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"line\n" * 99_999 + b"caf\xe9\n")

    with pytest.raises(ConfigError, match=r"line 100000: byte 0xe9 in column 4"):
        list(text_lines(tmp_path / "a.txt", ConfigError))


def test_a_text_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)

    with pytest.raises(ConfigError, match="has over 5 bytes"):
        read_text(tmp_path / "a.txt", ConfigError, 5)


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (ValueError("no"), "x: damaged: no"),
        (KeyError("k"), "x: damaged: KeyError: 'k'"),
        (MemoryError(), "x: damaged: MemoryError"),
        (OSError(22, "Invalid argument"), "x: damaged: [Errno 22] Invalid argument"),
        (RequestError("vectors", "too many"), "x: vectors: too many"),
        (ConfigError("x: it has holes"), "x: it has holes"),
        (ValueError("y" * 900), f"x: damaged: {'y' * 300}..."),
    ],
)
def test_whatever_a_parser_raises_becomes_the_readers_error(raised: Exception, message: str) -> None:
    with pytest.raises(ConfigError) as found, refusing("x", ConfigError, "damaged"):
        raise raised

    assert str(found.value) == message


def test_a_missing_file_stays_what_it_is() -> None:
    with pytest.raises(FileNotFoundError), refusing("x", ConfigError):
        Path("/no/such/file").read_bytes()


def labels(path: Path) -> Any:
    return read_labels(path)


def prompts(path: Path) -> Any:
    return list(open_prompts(str(path)))


READERS: list[tuple[str, str, Callable[[Path], Any]]] = [
    ("labels.json", json.dumps({"a": "é"}, ensure_ascii=False), labels),
    ("labels.csv", "request_id,label\na,é\n", labels),
    ("labels.jsonl", '{"request_id": "a", "label": "é"}\n', labels),
    ("prompts.txt", "é\n", prompts),
    ("prompts.jsonl", '{"text": "é"}\n', prompts),
    ("v.json", '{"vectors": {"post_mlp": {"1": [1.0]}}, "metadata": {"a": "é"}}', load),
    ("v.svec", '{"directions": {"1": [1.0]}, "model_type": "é"}', load),
]


@pytest.mark.parametrize(("name", "text", "read"), READERS, ids=[name for name, _, _ in READERS])
def test_every_reader_of_texts_takes_a_mark_and_names_another_encoding(
    name: str, text: str, read: Callable[[Path], Any], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    plain = read(path)
    path.write_text(text, encoding="utf-8-sig")
    assert read(path) == plain

    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=rf"{name}[:,] line \d: byte 0xe9 in column \d+ is not UTF-8"):
        read(path)


def test_a_file_is_loaded_once_and_again_when_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Path] = []

    def load(path: Path) -> str:
        loaded.append(path)
        return path.read_text()

    load_current = load_once(load, 2)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "file"
    path.write_text("one")

    assert [load_current(path), load_current("~/file"), load_current(str(path))] == ["one"] * 3
    path.write_text("three")
    assert (load_current(path), loaded) == ("three", [path, path])
    path.unlink()
    with pytest.raises(FileNotFoundError):
        load_current(path)
