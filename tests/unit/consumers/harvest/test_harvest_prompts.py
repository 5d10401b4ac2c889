"""Prompts out of files: every form, one field, and a place in each refusal."""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from headgate.capture.schema.errors import ConfigError
from headgate.consumers.harvest import open_prompts
from headgate.consumers.harvest.engine import _refuse_seeds_in_chunks

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


def json_lines(path: Path, *records: object) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_lines_of_text_are_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("eins\n\n zwei \r\nüber drei".encode())

    prompts = open_prompts(str(path))

    assert list(prompts) == list(prompts) == ["eins", " zwei ", "über drei"]
    assert prompts.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(ConfigError, match="have no fields"):
        open_prompts(str(path), field="text")


@pytest.mark.parametrize(
    ("records", "field", "expected"),
    [
        ([{"text": "a", "id": 1}, {"text": "b"}], None, ["a", "b"]),
        ([{"messages": CHAT}], None, [CHAT]),
        ([{"input_ids": [1, 2]}, {"input_ids": []}], None, [[1, 2], []]),
        ([{"prompt": "a", "text": "b"}], "prompt", ["a"]),
        ([{"question": "a"}], "question", ["a"]),
        (["a", CHAT, [1, 2]], None, ["a", CHAT, [1, 2]]),
    ],
)
def test_json_lines_are_prompts(tmp_path: Path, records: list[Any], field: str | None, expected: list[Any]) -> None:
    path = json_lines(tmp_path / "prompts.jsonl", *records)

    assert list(open_prompts(path, field=field)) == expected


@pytest.mark.parametrize(
    ("records", "field", "reason"),
    [
        ([], None, "is empty"),
        ([{"prompt": "a", "text": "b"}], None, "which field is meant? Name one of prompt, text"),
        ([{"question": "a"}], None, "Name one of question"),
        ([{"text": "a"}, {"other": "b"}], None, "line 2: expected an object with the field 'text'"),
        ([{"text": "a"}, {"text": 5}], None, "line 2: expected a text, a list of messages"),
        ([{"text": [{"role": "user"}]}], None, "line 1: expected a text"),
        ([{"text": [1, 2.5]}], None, "line 1: expected a text"),
        ([{"text": [True]}], None, "line 1: expected a text"),
        (["a", {"text": "b"}], None, "line 2: expected an object with the field 'none'"),
    ],
)
def test_a_record_that_is_no_prompt_is_named(
    tmp_path: Path, records: list[Any], field: str | None, reason: str
) -> None:
    path = json_lines(tmp_path / "prompts.jsonl", *records)

    with pytest.raises(ConfigError) as refused:
        list(open_prompts(path, field=field))

    assert reason in str(refused.value)


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"text": "a"}\n{"text": ')

    with pytest.raises(ConfigError, match="line 2: not JSON"):
        list(open_prompts(str(tmp_path / "prompts.jsonl")))


def test_files_that_are_not_there_or_of_another_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "prompts.csv").write_text("a,b")

    with pytest.raises(ConfigError, match="cannot be read"):
        open_prompts(str(tmp_path / "prompts.txt"))
    with pytest.raises(ConfigError, match=r"expected a file that ends in \.txt, \.jsonl, \.parquet"):
        open_prompts(str(tmp_path / "prompts.csv"))


class Table:
    """As much of a `datasets.Dataset` as is used."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.column_names = list(rows[0]) if rows else []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]

    def select_columns(self, names: list[str]) -> Table:
        return Table([{name: row[name] for name in names} for row in self.rows])


def test_a_data_set_is_loaded_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, *, split: str) -> Table:
        asked.append((name, split))
        if name == "org/gone":
            raise FileNotFoundError("no such data set")
        return Table([{"text": "a", "meta": 1}, {"text": "b", "meta": 2}])

    module: Any = ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)

    prompts = open_prompts("org/data", split="test")

    assert list(prompts) == list(prompts) == ["a", "b"]
    assert prompts.sha256 == hashlib.sha256(b'"a"\n"b"\n').hexdigest()
    assert asked == [("org/data", "test")]
    with pytest.raises(ConfigError, match="the field 'body'; it has text, meta"):
        open_prompts("org/data", field="body")
    with pytest.raises(ConfigError, match="org/gone: no file, and datasets cannot load it: no such data set"):
        open_prompts("org/gone")


def test_parquet_and_data_sets_name_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("datasets", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "prompts.parquet").write_bytes(b"PAR1")

    with pytest.raises(ConfigError, match=r"pip install 'headgate\[datasets\]'"):
        open_prompts(str(tmp_path / "prompts.parquet"))
    with pytest.raises(ConfigError, match=r"pip install 'headgate\[datasets\]'"):
        open_prompts("org/data")


def test_a_column_of_parquet_is_read(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    path = str(tmp_path / "prompts.parquet")
    parquet.write_table(pyarrow.table({"text": ["a", "b"], "messages_": [CHAT, CHAT]}), path)

    assert list(open_prompts(path)) == ["a", "b"]
    assert list(open_prompts(path, field="messages_")) == [CHAT, CHAT]
    with pytest.raises(ConfigError, match="no column 'body'; there are text, messages_"):
        list(open_prompts(path, field="body"))


def test_a_set_goes_on_behind_records_that_are_no_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": \n{"text": 5}\n{"text": "\xe9"}\n{"text": "b"}\n')

    found: list[object] = []
    for record in open_prompts(str(path)).records():
        try:
            found.append(record.prompt())
        except ConfigError as error:
            found.append(str(error).partition(": expected")[0].partition(": not JSON")[0].partition(": byte")[0])

    assert found == ["a", *(f"prompts: {path}, line {number}" for number in (2, 3, 4)), "b"]


@pytest.mark.parametrize("told", [{}, {"content": None}])
def test_a_message_may_call_tools_and_say_nothing(tmp_path: Path, told: dict[str, None]) -> None:
    chat = [CHAT[0], {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}], **told}]

    assert list(open_prompts(json_lines(tmp_path / "prompts.jsonl", chat))) == [chat]


@pytest.mark.parametrize(
    ("device", "chunked", "is_refused"), [("cpu", True, True), ("cpu", False, False), ("cuda", True, False)]
)
def test_seeds_with_prompts_in_chunks_are_refused_on_cpus(device: str, chunked: bool, is_refused: bool) -> None:
    """vLLM's worker ends with "CPU Generator does not use offset", and with it a long job."""
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=chunked),
    )

    with pytest.raises(ConfigError, match="no-enable-chunked-prefill") if is_refused else nullcontext():
        _refuse_seeds_in_chunks(config)
