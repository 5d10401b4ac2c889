"""The filesystem consumer: what requests may ask for, and what is in the files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from headgate.capture.schema.consumer import RowBlock
from headgate.capture.schema.errors import ConfigError, ConsumerError
from headgate.capture.schema.sites import Site
from headgate.consumers.feed import EXAMPLE_MODEL, make_block
from headgate.consumers.filesystem import FilesystemConsumer
from headgate.consumers.filesystem.request_writer import MAX_BLOCKS
from headgate.consumers.reader import open_captures
from tests.fakes.capturing import capturing, spec_context

SITE = Site.parse("final_norm")


def test_a_request_is_one_safetensors_file_that_others_can_read(tmp_path: Path) -> None:
    with capturing(tmp_path) as files:
        request = files.request({"tag": "run-1", "request_id": "first"}, prompt=4, output=3)
        payload = files.feed.whole(request)

    expected = request.expected()
    with safe_open(tmp_path / "run-1" / "first.safetensors", framework="pt") as file:
        assert set(file.keys()) == {"1.post_mlp", "3.post_mlp", "final_norm", "positions", "token_ids"}
        for site in expected.sites:
            assert file.get_tensor(site.name).dtype == torch.bfloat16
            assert torch.equal(file.get_tensor(site.name), expected.rows[site])
        assert file.get_tensor("positions").tolist() == [0, 1, 2, 3, 4, 5]
        assert file.get_tensor("token_ids").tolist() == expected.token_ids.tolist()
        metadata = file.metadata()
    assert payload["paths"] == [str(tmp_path / "run-1" / "first.safetensors")]
    assert payload["num_bytes"] == (tmp_path / "run-1" / "first.safetensors").stat().st_size
    assert payload["durable"] is True
    assert metadata["request_id"] == "first"
    assert metadata["client_request_id"] == "client-1"
    assert metadata["engine_request_id"] == request.info.request_id
    assert metadata["model"] == "example-model"
    assert json.loads(metadata["versions"]) == {"headgate": "0.0", "vllm": "0.32.0"}
    assert json.loads(metadata["phases"]) == {"prefill": [0, 4], "decode": [4, 6]}
    assert (metadata["num_prompt_tokens"], metadata["num_tokens"], metadata["status"]) == ("4", "7", "stop")


def test_raw_files_hold_the_bytes_of_the_rows_and_a_sidecar_each(tmp_path: Path) -> None:
    with capturing(tmp_path, layout="raw") as files:
        request = files.request({"positions": "all_prompt"}, prompt=3)
        payload = files.feed.whole(request)

    folder = tmp_path / "default" / "client-1"
    expected = request.expected()
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{stem}.{suffix}" for stem in ("1_post_mlp", "3_post_mlp", "final_norm") for suffix in ("bin", "json")
    )
    assert sorted(payload["paths"]) == sorted(str(path) for path in folder.iterdir())
    rows = np.fromfile(folder / "3_post_mlp.bin", dtype=np.uint16).reshape(3, -1)
    assert np.array_equal(rows, expected.rows[Site.parse("3.post_mlp")].view(torch.uint16).numpy())
    sidecar = json.loads((folder / "3_post_mlp.json").read_text())
    assert (sidecar["site"], sidecar["shape"], sidecar["positions"]) == ("3.post_mlp", [3, 16], [0, 1, 2])
    assert sidecar["token_ids"] == expected.token_ids.tolist()


def test_shards_are_flat_arrays_with_an_index(tmp_path: Path) -> None:
    with capturing(tmp_path, layout="shards", threads=1) as files:
        requests = [files.request(client_id=f"r{index}", prompt=index + 1) for index in range(3)]
        payloads = [files.feed.whole(request) for request in requests]

    (shard,) = (tmp_path / "default" / "_shards").iterdir()
    expected = [request.expected() for request in requests]
    ends = np.cumsum([len(each.positions) for each in expected]).tolist()
    assert [payload["rows"] for payload in payloads] == [[0, ends[0]], [ends[0], ends[1]], [ends[1], ends[2]]]
    assert {path for payload in payloads for path in payload["paths"]} == {str(shard)}
    whole = torch.cat([each.rows[Site.parse("final_norm")] for each in expected])
    rows = np.fromfile(shard / "final_norm.bin", dtype=np.uint16).reshape(ends[2], 16)
    assert np.array_equal(rows, whole.view(torch.uint16).numpy())
    positions = np.fromfile(shard / "positions.bin", dtype=np.int64)
    assert np.array_equal(positions, np.concatenate([each.positions for each in expected]))
    lines = [json.loads(line) for line in (shard / "index.jsonl").read_text().splitlines()]
    assert [line["request_id"] for line in lines] == ["r0", "r1", "r2"]


@pytest.mark.parametrize("layout", ["request", "raw", "shards"])
def test_files_tell_what_was_noted_of_their_rows(tmp_path: Path, layout: str) -> None:
    trace = {
        "positions": [1, 2, 3, 4, 5, 6],
        "scores": {"anger": [0.1, 0.2, None, 0.4, 0.5, 0.6]},
        "gates": {"calm": {"strength": [0, 0, 1.0, 1.0, 0.5, 1.0], "applied": [0, 0, 0, 1.0, 0.5, 1.0]}},
        "actions": [{"position": at} for at in range(6)],
    }
    with capturing(tmp_path, layout=layout) as files:
        noted, plain = (files.request({"positions": [0, 3, 5], "request_id": name}) for name in ("noted", "plain"))
        noted.final = replace(noted.final, notes={"steering": trace, "other": "told"})
        for request in (noted, plain):
            files.feed.whole(request)

    captures = {capture.name: capture for capture in open_captures(tmp_path)}
    assert captures["plain"].metadata["notes"] == {}
    assert captures["noted"].positions.tolist() == [0, 3, 5]
    assert captures["noted"].metadata["notes"] == {
        "steering": {
            "positions": [3, 5],  # the row at 0 came from the prefix cache, where nobody was asked
            "scores": {"anger": [None, 0.5]},
            "gates": {"calm": {"strength": [1.0, 0.5], "applied": [0, 0.5]}},
            "actions": trace["actions"],
        },
        "other": "told",
    }


def test_a_full_shard_is_followed_by_another(tmp_path: Path) -> None:
    with capturing(tmp_path, layout="shards", threads=1, shard_bytes=2000) as files:
        requests = [files.request(client_id=f"r{index}") for index in range(6)]
        paths = [files.feed.whole(request)["paths"][0] for request in requests]

    # A request's 8 rows of 3 sites and 16 values, with positions and tokens, take 896 bytes.
    assert paths[0] == paths[1] == paths[2] != paths[3] == paths[4] == paths[5]
    captures = {capture.request_id: capture for capture in open_captures(tmp_path)}
    for request in requests:
        assert torch.equal(captures[request.info.client_request_id]["final_norm"], request.expected().rows[SITE])


@pytest.mark.parametrize("layout", ["request", "raw", "shards"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rows_keep_their_dtype_to_the_bit(tmp_path: Path, layout: str, dtype: str) -> None:
    with capturing(tmp_path, layout=layout, model=replace(EXAMPLE_MODEL, dtype=dtype)) as files:
        request = files.request()
        files.feed.whole(request)

    capture = open_captures(tmp_path)["client-1"]
    expected = request.expected().rows[SITE]
    assert capture.tensor(SITE).dtype == getattr(torch, dtype)
    assert torch.equal(capture.tensor(SITE), expected)
    assert np.array_equal(capture.numpy(SITE), expected.float().numpy())
    assert capture.metadata["dtype"] == dtype


def test_samples_and_stages_have_files_of_their_own_that_are_read_together(tmp_path: Path) -> None:
    requests = []
    for rank, hooks in enumerate(({"post_mlp": [1]}, {"post_mlp": [3], "final_norm": "all"})):
        with capturing(tmp_path, stage=(rank, 2)) as files:
            for index in range(2):
                request = files.request({"hooks": hooks, "request_id": "a"}, sample=(index, 2), output=3 + index)
                files.feed.whole(request)
                requests.append(request)

    names = sorted(path.name for path in (tmp_path / "default").iterdir())
    assert names == [f"a-{sample}.pp{rank}.safetensors" for sample in (0, 1) for rank in (0, 1)]
    captures = list(open_captures(tmp_path))
    assert [(capture.name, capture.metadata["sample_index"]) for capture in captures] == [("a-0", 0), ("a-1", 1)]
    for capture in captures:
        assert [site.name for site in capture.sites] == ["1.post_mlp", "3.post_mlp", "final_norm"]
        for request in requests:
            if request.info.sample_index == capture.metadata["sample_index"]:
                for site, rows in request.expected().rows.items():
                    assert torch.equal(capture[site], rows)


@pytest.mark.parametrize("layout", ["request", "raw"])
def test_what_is_there_is_never_overwritten(tmp_path: Path, layout: str) -> None:
    with capturing(tmp_path, layout=layout) as files:
        first = files.request({"request_id": "a"}, engine_id="one")
        files.feed.whole(first)
        second = files.request({"request_id": "a"}, engine_id="two")

        with pytest.raises(ConsumerError, match="exists and is not overwritten"):
            files.feed.whole(second)

        assert files.temporary() == []
    assert torch.equal(open_captures(tmp_path)["a"][SITE], first.expected().rows[SITE])


@pytest.mark.parametrize("layout", ["request", "raw"])
def test_a_name_taken_while_a_request_runs_is_not_overwritten_either(tmp_path: Path, layout: str) -> None:
    with capturing(tmp_path, layout=layout) as files:
        slow, quick = (files.request({"request_id": "a"}, engine_id=name) for name in ("slow", "quick"))
        files.feed.begin(slow)
        files.feed.step({slow: (0, slow.final.num_rows)})
        files.feed.whole(quick)

        with pytest.raises(ConsumerError, match="exists and is not overwritten"):
            files.feed.finish(slow)

    assert torch.equal(open_captures(tmp_path)["a"][SITE], quick.expected().rows[SITE])


@pytest.mark.parametrize("layout", ["request", "raw", "shards"])
def test_equal_names_are_numbered_where_that_is_wanted(tmp_path: Path, layout: str) -> None:
    with capturing(tmp_path, layout=layout, if_exists="number", threads=1) as files:
        requests = [files.request({"request_id": "a"}, engine_id=name) for name in ("one", "two", "three")]
        payloads = [files.feed.whole(request) for request in requests]

    found = {capture.metadata["engine_request_id"]: capture for capture in open_captures(tmp_path).find("a")}
    assert len(found) == 3
    for request, payload in zip(requests, payloads, strict=True):
        capture = found[request.info.request_id]
        assert set(capture.paths) <= set(payload["paths"])
        assert torch.equal(capture[SITE], request.expected().rows[SITE])


def test_ids_that_are_no_file_names_become_some_and_stay_apart(tmp_path: Path) -> None:
    ids = ["chat/1", "chat-1", "../etc/passwd", "", "ü" * 200, "nul\0", "chat:1"]
    with capturing(tmp_path) as files:
        for client_id in ids:
            files.feed.whole(files.request(client_id=client_id))

    folder = open_captures(tmp_path)
    assert sorted(capture.request_id for capture in folder) == sorted(ids)
    assert folder["chat/1"].metadata["client_request_id"] == "chat/1"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp", "default"]


def test_the_operator_can_record_every_request() -> None:
    params = {"root": "captures", "hooks": {"post_mlp": [0]}, "positions": "last_prompt", "tag": "all-of-them"}

    spec = FilesystemConsumer.global_capture_spec(spec_context(params))

    assert spec is not None
    assert [site.name for site in spec.sites] == ["0.post_mlp"]
    assert spec.positions.to_wire() == "last_prompt"
    assert spec.options == {"tag": "all-of-them", "request_id": "client-1", "name": "client-1", "layout": "request"}


def test_without_hooks_only_those_who_ask_are_recorded() -> None:
    assert FilesystemConsumer.global_capture_spec(spec_context({"root": "captures"})) is None


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "root"),
        ({"root": ""}, "root"),
        ({"root": 3}, "root"),
        ({"root": "a", "layout": "parquet"}, "layout"),
        ({"root": "a", "threads": 0}, "threads"),
        ({"root": "a", "tag": "a/b"}, "tag"),
        ({"root": "a", "hooks": {"post_milk": [1]}}, "post_milk"),
        ({"root": "a", "positions": "some"}, "positions"),
        ({"root": "a", "if_exists": "replace"}, "if_exists"),
    ],
)
def test_wrong_parameters_are_refused_by_name(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FilesystemConsumer.check_params(params)


def test_a_stage_without_any_of_the_sites_writes_nothing(tmp_path: Path) -> None:
    with capturing(tmp_path, stage=(1, 2)) as files:
        request = files.request()
        request.info = replace(request.info, spec=replace(request.info.spec, sites=()))

        files.feed.begin(request)
        assert files.feed.finish(request) is None
    assert list(open_captures(tmp_path)) == []


ROW_BYTES = 3 * 16 * 2  # three sites, hidden size 16, bfloat16


def spooled(root: Path) -> list[int]:
    """Sizes of the files that hold rows of running requests."""
    return [path.stat().st_size for path in (root / ".tmp").glob("*/[0-9]*")]


def test_rows_of_a_long_request_leave_memory(tmp_path: Path) -> None:
    with capturing(tmp_path, threads=1, max_request_bytes=500) as files:
        long, short = files.request(client_id="long", prompt=200), files.request(client_id="short", prompt=1, output=1)
        files.feed.begin(long)
        for position in range(MAX_BLOCKS):
            files.feed.step({long: (position, position + 1)})
        files.feed.whole(short)  # through the same writer, so what came before is done

        assert spooled(tmp_path) == [MAX_BLOCKS * ROW_BYTES]
        files.feed.step({long: (MAX_BLOCKS, long.final.num_rows)})
        files.feed.finish(long)
        assert spooled(tmp_path) == []

    capture = open_captures(tmp_path)["long"]
    for site, rows in long.expected().rows.items():
        assert torch.equal(capture[site], rows)


def test_rows_leave_memory_only_while_all_together_are_too_many(tmp_path: Path) -> None:
    with capturing(tmp_path, threads=1, memory_bytes=4000) as files:
        large, small = files.request(client_id="large", prompt=200), files.request(client_id="small", prompt=20)
        files.feed.begin(large)
        files.feed.step({large: (0, 150)})
        files.feed.whole(files.request(client_id="first"))
        assert spooled(tmp_path) == [150 * ROW_BYTES]
        files.feed.abandon(large)

        files.feed.begin(small)
        files.feed.step({small: (0, 10)})
        files.feed.whole(files.request(client_id="second"))

        assert spooled(tmp_path) == []


def test_after_drops_the_positions_that_every_site_has_are_kept(tmp_path: Path) -> None:
    with capturing(tmp_path) as files:
        request = files.request(prompt=4, output=3)
        sites = request.info.spec.sites
        files.feed.begin(request)
        files.feed.step({request: (0, 2)})
        # Of position 2 one site is lost, of position 3 every site.
        files.feed.write([make_block(sites[1:], [(request, np.array([2]))])])
        files.feed.step({request: (4, 6)})
        files.feed.finish(request, dropped_rows=2)

    capture = open_captures(tmp_path)["client-1"]
    assert capture.positions.tolist() == [0, 1, 4, 5]
    assert capture.metadata["dropped_rows"] == 2
    for site in sites:
        assert torch.equal(capture[site], request.rows(site, capture.positions))


@pytest.mark.parametrize("positions", [[0, 1, 1], [1, 0]])
def test_rows_out_of_order_or_twice_are_an_error_and_not_a_file(tmp_path: Path, positions: list[int]) -> None:
    with capturing(tmp_path) as files:
        request = files.request()
        files.feed.begin(request)
        for position in positions:
            files.feed.step({request: (position, position + 1)})

        with pytest.raises(ConsumerError, match="out of order or twice"):
            files.feed.finish(request)
    assert list(open_captures(tmp_path)) == []


def test_a_missing_row_that_was_not_dropped_is_an_error_and_not_a_file(tmp_path: Path) -> None:
    with capturing(tmp_path) as files:
        request = files.request()
        files.feed.begin(request)
        files.feed.write([make_block(request.info.spec.sites[1:], [(request, np.array([0]))])])

        with pytest.raises(ConsumerError, match="differ in their positions"):
            files.feed.finish(request)
    assert list(open_captures(tmp_path)) == []


@pytest.mark.parametrize("shape", [(16, torch.float32), (8, torch.bfloat16)], ids=["dtype", "width"])
def test_rows_that_are_not_the_model_s_are_refused(tmp_path: Path, shape: tuple[int, torch.dtype]) -> None:
    with capturing(tmp_path) as files:
        request = files.request()
        files.feed.begin(request)
        block = make_block(request.info.spec.sites, [(request, np.array([0]))])
        wrong = RowBlock(
            sites=block.sites,
            rows=torch.zeros(3, 1, shape[0], dtype=shape[1]),
            positions=block.positions,
            spans=block.spans,
        )

        with pytest.raises(ConsumerError, match="the model has"):
            files.feed.write([wrong])
