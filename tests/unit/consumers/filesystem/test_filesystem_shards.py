"""What a reader makes of shards that are still written to, cut off, or damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headgate.capture.schema.errors import CaptureFileError
from headgate.capture.schema.sites import Site
from headgate.consumers.feed import ExampleRequest
from headgate.consumers.reader import open_captures
from tests.fakes.capturing import capturing

SITE = Site.parse("final_norm")


def write_three(root: Path) -> tuple[Path, list[ExampleRequest]]:
    """One shard with three requests."""
    with capturing(root, layout="shards", threads=1) as files:
        requests = [files.request(client_id=f"r{index}") for index in range(3)]
        for request in requests:
            files.feed.whole(request)
    (shard,) = (root / "default" / "_shards").iterdir()
    return shard, requests


def test_a_shard_can_be_read_while_it_grows(tmp_path: Path) -> None:
    with capturing(tmp_path, layout="shards", threads=1) as files:
        for index in range(3):
            request = files.request(client_id=f"r{index}")
            files.feed.whole(request)

            folder = open_captures(tmp_path)
            assert len(list(folder)) == index + 1
            assert torch.equal(folder[f"r{index}"][SITE], request.expected().rows[SITE])


@pytest.mark.parametrize("cut", [1, 2, 20, 200])
def test_a_line_that_was_cut_off_is_not_there(tmp_path: Path, cut: int) -> None:
    shard, requests = write_three(tmp_path)
    index = shard / "index.jsonl"
    index.write_bytes(index.read_bytes()[:-cut])

    found = {capture.request_id: capture for capture in open_captures(tmp_path)}

    assert sorted(found) == ["r0", "r1"]
    for request in requests[:2]:
        assert torch.equal(found[request.info.client_request_id][SITE], request.expected().rows[SITE])


@pytest.mark.parametrize("line", [0, 1])
def test_a_damaged_line_is_refused(tmp_path: Path, line: int) -> None:
    shard, _ = write_three(tmp_path)
    index = shard / "index.jsonl"
    lines = index.read_bytes().splitlines(keepends=True)
    lines[line] = lines[line].replace(b'"status":"stop"', b'"status":"stip"')
    index.write_bytes(b"".join(lines))

    with pytest.raises(CaptureFileError, match=f"line {line + 1} is damaged"):
        list(open_captures(tmp_path))


@pytest.mark.parametrize("name", ["final_norm.bin", "3_post_mlp.bin", "positions.bin", "token_ids.bin"])
def test_rows_that_the_index_speaks_of_and_are_not_there_are_refused(tmp_path: Path, name: str) -> None:
    shard, _ = write_three(tmp_path)
    data = (shard / name).read_bytes()
    (shard / name).write_bytes(data[:-1])

    with pytest.raises(CaptureFileError, match="partial"):
        list(open_captures(tmp_path))


def test_damage_can_be_left_out_and_noted(tmp_path: Path) -> None:
    shard, _ = write_three(tmp_path)
    (shard / "shard.json").write_text("{")
    with capturing(tmp_path) as files:
        files.feed.whole(files.request(client_id="healthy"))

    folder = open_captures(tmp_path, strict=False)

    assert [capture.request_id for capture in folder] == ["healthy"]
    assert ["shard.json" in str(error) for error in folder.damaged] == [True]


def test_requests_with_other_sites_or_tags_have_shards_of_their_own(tmp_path: Path) -> None:
    wishes: list[dict[str, Any]] = [
        {"hooks": {"post_mlp": [1]}},
        {"hooks": {"post_mlp": [2]}},
        {"hooks": {"post_mlp": [1]}, "tag": "other"},
        {"hooks": {"post_mlp": [1]}},
    ]
    with capturing(tmp_path, layout="shards", threads=1) as files:
        requests = [files.request(wish, client_id=f"r{index}") for index, wish in enumerate(wishes)]
        shards = [files.feed.whole(request)["paths"][0] for request in requests]

    assert shards[0] == shards[3]
    assert len(set(shards)) == 3
    captures = {capture.request_id: capture for capture in open_captures(tmp_path)}
    for request in requests:
        ((site, rows),) = request.expected().rows.items()
        assert torch.equal(captures[request.info.client_request_id][site], rows)


def test_what_the_requests_of_a_shard_share_is_written_once(tmp_path: Path) -> None:
    shard, _ = write_three(tmp_path)

    shared = json.loads((shard / "shard.json").read_text())
    own = json.loads((shard / "index.jsonl").read_text().splitlines()[0])

    assert (shared["model"], shared["dtype"], shared["hidden_size"]) == ("example-model", "bfloat16", 16)
    assert shared["sites"] == ["1.post_mlp", "3.post_mlp", "final_norm"]
    assert not set(shared) & set(own)
