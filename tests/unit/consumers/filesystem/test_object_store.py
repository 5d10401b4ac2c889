"""Roots in S3: rows reach it whole and once, whatever becomes of the store or of the process that uploads."""

from __future__ import annotations

import subprocess
import sys
import threading
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from headgate.capture.schema.errors import CaptureFileError, ConfigError, ConsumerError
from headgate.capture.schema.sites import Site
from headgate.consumers.dump import app
from headgate.consumers.feed import TIMEOUT_S
from headgate.consumers.filesystem import FilesystemConsumer, consumer
from headgate.consumers.filesystem.storage import object_store
from headgate.consumers.reader import open_capture
from tests.fakes.capturing import Capturing, capturing
from tests.fakes.dying_uploads import WHOLE
from tests.fakes.remote_roots import check, end_uploads, is_taken, root_of, waiting, write
from tests.fakes.s3_server import S3Server

NORM = Site.parse("final_norm")


def test_every_layout_arrives_and_leaves_the_spool(store: S3Server, tmp_path: Path) -> None:
    with capturing(root_of(store), spool=str(tmp_path)) as files:
        requests = write(files, [f"r{n}" for n in range(6)])

    assert not any(method == "DELETE" for method, _ in store.requests)  # no temporary keys
    stored = [Path(path.rstrip("?")) for method, path in store.requests if method == "PUT"]
    shard = [path.name for path in stored if "_shards" in path.parts]
    assert (shard[0], shard[-1]) == ("shard.json", "index.jsonl")
    raw = [path.suffix for path in stored if path.parts[-2] == "r1"]
    assert raw == sorted(raw) == [".bin"] * 3 + [".json"] * 3
    check(store, tmp_path, requests)


@pytest.mark.parametrize(("setting", "age_s"), [({"shard_bytes": 1}, 600.0), ({}, 0.0)], ids=["full", "old"])
def test_a_shard_that_is_full_or_old_is_uploaded_before_the_end(
    store: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any], age_s: float
) -> None:
    monkeypatch.setattr(consumer, "MAX_SHARD_AGE_S", age_s)
    uploaded = threading.Event()
    store.refuses = lambda method, path: uploaded.set() if method == "PUT" and "index.jsonl" in path else None

    with capturing(root_of(store), spool=str(tmp_path), threads=1, **setting) as files:
        requests = write(files, ["a", "b"], layout="shards")
        assert uploaded.wait(TIMEOUT_S)

    check(store, tmp_path, requests)
    assert len([key for key in store.objects() if key.endswith("index.jsonl")]) == 2


def test_rows_are_fetched_by_their_results_from_the_store_alone(store: S3Server, tmp_path: Path) -> None:
    with capturing(root_of(store), spool=str(tmp_path)) as files:
        asked = [files.request({"layout": layout}, client_id=layout) for layout in ("request", "raw", "shards")]
        payloads = [files.feed.whole(request) for request in asked]

    for request, payload in zip(asked, payloads, strict=True):
        rows, expected = FilesystemConsumer.fetch_rows(payload), request.expected()
        assert rows.positions.tolist() == expected.positions.tolist()
        for site in expected.sites:
            assert torch.equal(rows[site], expected.rows[site])
    late = {**payloads[0], "paths": [f"{root_of(store)}/default/later.safetensors"], "uploaded": False}
    with pytest.raises(CaptureFileError):
        FilesystemConsumer.fetch_rows(late)


def test_large_files_go_up_in_parts(store: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "PART_BYTES", 300)
    with capturing(root_of(store), spool=str(tmp_path)) as files:
        requests = write(files, ["a", "b", "c"], layout="request")

    check(store, tmp_path, requests)
    parts = [path for method, path in store.requests if method == "PUT" and "partNumber=" in path]
    assert len(parts) >= 6


def test_nothing_is_lost_while_the_store_is_down(store: S3Server, tmp_path: Path) -> None:
    with capturing(root_of(store), spool=str(tmp_path), upload_wait_s=0) as files:
        requests = write(files, ["before", "before-2"])
        store.stop()
        for name in ("during", "during-2", "during-3"):
            requests.append(files.request({"layout": "request"}, client_id=name))
            payload = files.feed.whole(requests[-1])
            assert (payload["uploaded"], payload["durable"]) == (False, True)
            assert payload["paths"] == [f"{root_of(store)}/default/{name}.safetensors"]
        store.start()
        requests += write(files, ["after"])

    check(store, tmp_path, requests)


def test_the_next_process_uploads_what_this_one_could_not(store: S3Server, tmp_path: Path) -> None:
    files = Capturing(root_of(store), spool=str(tmp_path), upload_wait_s=0)
    store.stop()
    requests = write(files, [f"r{n}" for n in range(6)])
    files.feed.consumer.close(0.5)
    end_uploads()
    assert len(waiting(tmp_path)) > 6

    store.start()
    with capturing(root_of(store), spool=str(tmp_path)) as files:
        requests += write(files, ["more"])

    check(store, tmp_path, requests)


def test_or_a_command_does(store: S3Server, tmp_path: Path) -> None:
    files = Capturing(root_of(store), spool=str(tmp_path), upload_wait_s=0)
    store.stop()
    requests = write(files, ["a", "b", "c"])
    command = ["upload", root_of(store), "--spool", str(tmp_path), "--timeout", "0.2"]

    running = CliRunner().invoke(app, command)
    files.feed.consumer.close(0.2)
    end_uploads()
    down = CliRunner().invoke(app, command)
    end_uploads()
    store.start()
    up = CliRunner().invoke(app, command[:-2])

    assert (running.exit_code, running.stdout[:24]) == (0, "0 of 0 files and folders")
    assert (down.exit_code, down.stdout[:24]) == (1, "0 of 3 files and folders")
    assert (up.exit_code, up.stdout[:24]) == (0, "3 of 3 files and folders")
    check(store, tmp_path, requests)


def test_a_store_that_is_down_at_the_start_is_waited_for(store: S3Server, tmp_path: Path) -> None:
    store.stop()
    with capturing(root_of(store), spool=str(tmp_path), upload_wait_s=0) as files:
        requests = write(files, ["a", "b", "c"])
        store.start()

    check(store, tmp_path, requests)


def test_failures_are_tried_again(store: S3Server, tmp_path: Path) -> None:
    failures = iter(range(5))

    def fail(method: str, path: str) -> str | None:
        return "503 Service Unavailable" if method == "PUT" and next(failures, None) is not None else None

    store.refuses = fail
    with capturing(root_of(store), spool=str(tmp_path)) as files:
        requests = write(files, ["a", "b", "c"])

    assert next(failures, None) is None
    check(store, tmp_path, requests)


def test_an_answer_that_is_lost_does_not_make_a_second_file(store: S3Server, tmp_path: Path) -> None:
    lost: list[str] = []

    def lose(method: str, path: str) -> str | None:
        if method != "PUT" or path in lost:
            return None
        lost.append(path)
        return "503 Service Unavailable"

    with capturing(root_of(store), spool=str(tmp_path), if_exists="number") as files:
        store.loses = lose
        requests = write(files, ["a", "b"], layout="request")

    assert len(lost) == 2
    check(store, tmp_path, requests)


@pytest.mark.parametrize("layout", ["request", "raw"])
def test_a_key_that_exists_is_never_overwritten(store: S3Server, tmp_path: Path, layout: str) -> None:
    name = "a.safetensors" if layout == "request" else "a/final_norm.bin"
    store.put(f"run/default/{name}", b"somebody else's")

    with capturing(root_of(store), spool=str(tmp_path)) as files:
        request = files.request({"layout": layout, "request_id": "a"})
        with pytest.raises(ConsumerError, match=r"s3://.*/a.* exists and is not overwritten"):
            files.feed.whole(request)
    with capturing(root_of(store), spool=str(tmp_path), if_exists="number") as files:
        (path, *_) = files.feed.whole(request)["paths"]

    objects = store.objects()
    assert objects[f"run/default/{name}"] == b"somebody else's"
    assert "a~2" in path
    assert sorted(key for key in objects if "a~2" not in key) == [f"run/default/{name}"]
    assert waiting(tmp_path) == []


@pytest.mark.parametrize("part_bytes", [300, 1 << 20], ids=["in-parts", "at-once"])
def test_a_key_that_appears_during_the_upload_is_not_overwritten(
    store: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr(object_store, "PART_BYTES", part_bytes)

    def appear(method: str, path: str) -> None:
        if method == "PUT" or (method == "POST" and "uploadId=" in path):
            store.put("run/default/a.safetensors", b"somebody else's")

    with capturing(root_of(store), spool=str(tmp_path)) as files:
        request = files.request({"request_id": "a"})
        store.refuses = appear
        with pytest.raises(ConsumerError, match="exists and is not overwritten"):
            files.feed.whole(request)

    assert store.objects() == {"run/default/a.safetensors": b"somebody else's"}
    assert store.unfinished() == []
    assert any("uploadId=" in path for _, path in store.requests) == (part_bytes == 300)


def test_a_key_that_appears_after_the_result_costs_no_rows(
    store: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with capturing(root_of(store), spool=str(tmp_path), upload_wait_s=0) as files:
        store.stop()
        request = files.request({"request_id": "a"})
        files.feed.whole(request)
        store.put("run/default/a.safetensors", b"somebody else's")
        store.start()

    assert store.objects()["run/default/a.safetensors"] == b"somebody else's"
    assert torch.equal(open_capture(f"{root_of(store)}/default/a~2.safetensors")[NORM], request.expected().rows[NORM])
    assert "is uploaded under the next number" in caplog.text


def test_uploads_that_were_cut_off_are_aborted(
    store: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "PART_BYTES", 300)
    cut_off = ["500 Internal Server Error"]  # neither the part nor the abort gets through, as if the process died

    def fail(method: str, path: str) -> str | None:
        return cut_off[0] if cut_off and ("partNumber=2" in path or method == "DELETE") else None

    files = Capturing(root_of(store), spool=str(tmp_path), upload_wait_s=0)
    store.refuses = fail
    requests = write(files, ["a"], layout="request")
    files.feed.consumer.close(0.5)
    end_uploads()
    assert store.unfinished() != []

    cut_off.clear()
    other = store.files().call_s3("create_multipart_upload", Bucket=store.bucket, Key="run/default/b.safetensors")
    with capturing(root_of(store), spool=str(tmp_path)):
        pass

    assert store.unfinished() == ["run/default/b.safetensors"]  # of somebody else
    store.files().call_s3("abort_multipart_upload", Bucket=store.bucket, Key=other["Key"], UploadId=other["UploadId"])
    check(store, tmp_path, requests)


def test_the_spool_is_bounded(store: S3Server, tmp_path: Path) -> None:
    with capturing(root_of(store), spool=str(tmp_path), spool_bytes=60_000, upload_wait_s=0) as files:
        store.stop()
        names = (files.request({"layout": "request"}, client_id=f"r{number}") for number in range(20))
        requests = list(takewhile(lambda request: is_taken(files, request), names))
        assert 2 <= len(requests) < 19
        with pytest.raises(ConsumerError, match=r"no room .*spool_bytes is 60000; see in the log"):
            files.feed.whole(next(names))
        store.start()
        requests.append(files.request({"layout": "request"}, client_id="after"))
        while not is_taken(files, requests[-1]):
            pass  # until there is room again

    check(store, tmp_path, requests)


@pytest.mark.parametrize("root", ["s3://no-such-bucket-0/run", "s3://no-such-bucket-0"])
def test_a_bucket_that_is_not_there_is_refused_at_start(store: S3Server, tmp_path: Path, root: str) -> None:
    with pytest.raises(ConfigError, match=r"no-such-bucket-0.* cannot be listed"), capturing(root, spool=str(tmp_path)):
        pass


def test_a_store_that_lets_nobody_in_is_refused_at_start(store: S3Server, tmp_path: Path) -> None:
    store.refuses = lambda method, path: "403 Forbidden"

    with pytest.raises(ConfigError, match="credentials"), capturing(root_of(store), spool=str(tmp_path)):
        pass


@pytest.mark.parametrize("stride", [12, pytest.param(1, marks=pytest.mark.extended)])
def test_whenever_the_uploader_is_killed_the_next_one_goes_on(store: S3Server, tmp_path: Path, stride: int) -> None:
    program = [sys.executable, "-m", "tests.fakes.dying_uploads", root_of(store), str(tmp_path), str(stride)]

    done = subprocess.run(program, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    points = range(0, int(done.stdout) + 1, stride)
    assert len(points) >= 30 // stride
    assert store.objects() == {f"run/{point}/{name}": whole for point in points for name, whole in WHOLE.items()}
    assert store.unfinished() == []
    assert waiting(tmp_path) == []
