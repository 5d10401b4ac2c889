"""Labels of features: public exports, the file beside an SAE, and searches."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from headgate.steering.features import labels
from headgate.steering.features.labels import NO_LABELS, Labels, labels_of, read_export, write_labels
from headgate.steering.features.tensors import FeatureFileError

NEURONPEDIA = [
    {"modelId": "gemma-2-2b", "layer": "20-res", "index": "12", "description": " cats\n and dogs"},
    {"modelId": "gemma-2-2b", "layer": "20-res", "index": "3", "description": "the sea"},
    {"modelId": "gemma-2-2b", "layer": "20-res", "index": "3", "description": "waves"},
    {"modelId": "gemma-2-2b", "layer": "20-res", "index": 7, "description": None},
]


def lines(path: Path, documents: list[Any]) -> Path:
    content = "".join(json.dumps(document) + "\n" for document in documents).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_neuronpedias_export_of_which_the_first_label_counts(suffix: str, tmp_path: Path) -> None:
    found = read_export([lines(tmp_path / f"batch-0{suffix}", NEURONPEDIA)], num_features=13)

    assert found.texts == {12: "cats and dogs", 3: "the sea"}
    assert (found.num_further, found.sources) == (1, ("gemma-2-2b/20-res",))


@pytest.mark.parametrize(
    "text",
    ['3,the sea\n12,"cats, dogs"\n', 'text,layer,index\nthe sea,5,3\n"cats, dogs",5,12\n'],
    ids=["bare", "named"],
)
def test_csv_with_and_without_names_of_columns(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(text, encoding="utf-8-sig")

    assert read_export([path]).texts == {3: "the sea", 12: "cats, dogs"}


def test_of_several_saes_one_is_chosen(tmp_path: Path) -> None:
    other = {"modelId": "gemma-2-2b", "layer": "5-res", "index": "1", "description": "other"}
    path = lines(tmp_path / "x.jsonl", [*NEURONPEDIA, other])

    with pytest.raises(FeatureFileError, match=r"x\.jsonl: line 5: labels of several SAEs, .*20-res and .*5-res"):
        read_export([path])
    assert read_export([path], source="5-res").texts == {1: "other"}


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("x.jsonl", b'{"index": 13, "description": "x", "layer": "1"}', r"line 1: feature 13; .* 0 to 12"),
        ("x.jsonl", b'{"id": -1, "text": "x"}', "line 1: expected the id of a feature, got -1"),
        ("x.jsonl", b'{"id": 1}\n', "line 1: expected index and description, or id and text"),
        ("x.jsonl", b"\n{oops\n", "line 2: expected an object of JSON"),
        ("x.jsonl", b'{"id": 1, "text": "\xff"}', "line 1: byte 0xff in column"),
        ("x.jsonl", b'{"id": 1, "text": "' + b"x" * 2001 + b'"}', "a text of at most 2000 characters"),
        ("x.jsonl.gz", b"not gzip", "x.jsonl.gz"),
        ("x.csv", b"name,what\n1,2\n", "line 1: expected columns named"),
        ("x.csv", b"1\n", "line 1: expected an id and a text"),
        ("x.csv", b'1,"a\n', "not CSV"),
        ("x.txt", b"", "expected labels as"),
    ],
)
def test_wrong_files_are_refused_with_the_line(name: str, content: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(FeatureFileError, match=why):
        read_export([tmp_path / name], num_features=13)


def test_a_packed_file_is_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "MAX_TEXT_BYTES", 1000)
    path = lines(tmp_path / "x.jsonl.gz", [{"id": 1, "text": "x" * 100}] * 50)

    with pytest.raises(FeatureFileError, match="over 1,000 bytes of labels"):
        read_export([path])


def test_labels_lie_beside_the_sae_and_are_read_again_when_they_change(tmp_path: Path) -> None:
    coder = tmp_path / "gs20.safetensors"
    assert labels_of(coder) is NO_LABELS

    path = write_labels(coder, {12: "cats", 3: "sea"})
    assert (path.name, list(labels_of(coder))) == ("gs20.safetensors.labels.jsonl", [3, 12])
    assert labels_of(coder) is labels_of(coder)
    write_labels(coder, {12: "dogs"})
    assert dict(labels_of(coder)) == {12: "dogs"}
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    path.write_text("[]")
    with pytest.raises(FeatureFileError, match=r"labels\.jsonl: line 1"):
        labels_of(coder)


def test_searches_find_every_word_in_any_case_and_the_shortest_first() -> None:
    found = Labels({1: "Words about the Sea and ships", 2: "sea", 3: "ship in the SEA", 4: "land"})

    assert [one for one, _ in found.search("sea", 10)] == [2, 3, 1]
    assert [one for one, _ in found.search("SHIP sea", 10)] == [3, 1]
    assert [one for one, _ in found.search("sea", 1)] == [2]
    assert len(found.search("", 10)) == 4
    assert found.of([4, 9, 1]) == {"1": "Words about the Sea and ships", "4": "land"}
