"""Roots in object stores, by the store in memory that fsspec brings: names, refusals and the spool."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from headgate.capture.monitoring.stats import figures_of
from headgate.capture.schema.errors import CaptureFileError, ConfigError, ConsumerError
from headgate.capture.schema.sites import Site
from headgate.consumers.filesystem.consumer import parse_params
from headgate.consumers.filesystem.storage.object_store import ObjectStore
from headgate.consumers.filesystem.uploading import uploader
from headgate.consumers.filesystem.uploading.uploader import SpoolFolder, units_of
from headgate.consumers.reader import open_captures
from tests.fakes.capturing import Capturing, capturing

SITE = Site.parse("final_norm")
ROOT = "memory://bucket/run"

each_layout = pytest.mark.parametrize("layout", ["request", "raw"])


@pytest.fixture
def bucket() -> Iterator[Any]:
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


@pytest.fixture
def remote(bucket: Any, tmp_path: Path) -> Callable[..., Any]:
    return lambda **settings: capturing(ROOT, spool=str(tmp_path / "spool"), **settings)


def ask_twice(files: Capturing) -> Any:
    """Two requests of one id: the first, and the payload of each."""
    first, second = (files.request({"request_id": "a"}, engine_id=name) for name in ("one", "two"))
    return first, files.feed.whole(first), files.feed.whole(second)


@each_layout
def test_an_id_that_is_taken_is_an_error(remote: Any, layout: str) -> None:
    with remote(layout=layout) as files:
        first = files.request({"request_id": "a"}, engine_id="one")
        files.feed.whole(first)

        with pytest.raises(ConsumerError, match=r"memory://.*a.* exists and is not overwritten"):
            files.feed.whole(files.request({"request_id": "a"}, engine_id="two"))

    assert torch.equal(open_captures(ROOT)["a"][SITE], first.expected().rows[SITE])


@each_layout
def test_or_is_numbered(bucket: Any, remote: Any, layout: str) -> None:
    with remote(layout=layout, if_exists="number") as files:
        _, *payloads = ask_twice(files)

    assert len(open_captures(ROOT).find("a")) == 2
    assert not set(payloads[0]["paths"]) & set(payloads[1]["paths"])
    assert all(bucket.exists(path) for payload in payloads for path in payload["paths"])
    assert payloads[0]["uploaded"]
    assert payloads[0]["durable"] is None  # the store's business


@each_layout
def test_the_number_follows_that_in_the_spool(bucket: Any, remote: Any, layout: str) -> None:
    with remote(layout=layout, if_exists="number") as files:
        ask_twice(files)
        files.feed.whole(files.request({"request_id": "a"}, engine_id="three"))

    names = {capture.metadata["engine_request_id"] for capture in open_captures(ROOT).find("a")}
    assert names == {"one", "two", "three"}


def test_a_raw_folder_that_is_still_being_uploaded_is_refused(bucket: Any, remote: Any) -> None:
    with remote(layout="raw") as files:
        files.feed.whole(files.request())
    bucket.rm("/bucket/run/default/client-1/final_norm.json")

    with pytest.raises(CaptureFileError, match="partial"):
        list(open_captures(ROOT))


def test_a_shard_is_not_there_before_its_index(bucket: Any, remote: Any) -> None:
    with remote(layout="shards") as files:
        payload = files.feed.whole(files.request())
        assert payload["uploaded"] is False
        assert payload["durable"] is True
    (index,) = [path for path in bucket.find("/bucket") if path.endswith("index.jsonl")]
    assert f"memory://{index}" == f"{payload['paths'][0]}/index.jsonl"
    assert len(list(open_captures(ROOT))) == 1

    bucket.rm(index)

    assert list(open_captures(ROOT)) == []


@pytest.mark.parametrize(
    ("root", "why"),
    [
        ("no-such-store://bucket", "object stores"),
        ("sftp://host/run", "object stores"),
        ("s3://key:secret@bucket/run", r"^(?!.*secret).*credentials"),
        ("s3://key@bucket/run", "credentials"),
        ("az://c/run?sig=secret", r"^(?!.*secret).*credentials"),
        ("abfs://c:secret@account.dfs.core.windows.net/run", "credentials"),
    ],
)
def test_a_root_that_cannot_be_written_to_is_refused(root: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_params({"root": root})


@pytest.mark.parametrize("root", ["s3://bucket/run", "gs://bucket", "abfs://c@account.dfs.core.windows.net/run"])
def test_the_stores_are_taken(root: str) -> None:
    assert parse_params({"root": root, "layout": "shards", "spool_bytes": 5, "upload_wait_s": 0}).is_remote


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"root": "s3://b", "key": "AK", "secret": "x"}, "unknown field"),
        ({"root": "s3://b", "spool_bytes": 0}, "spool_bytes must be at least 1"),
        ({"root": "s3://b", "upload_threads": 0}, "upload_threads must be at least 1"),
        ({"root": "s3://b", "upload_wait_s": -1}, "upload_wait_s must be from 0"),
        ({"root": "/x", "spool": "/y"}, "spool needs a root in an object store"),
        ({"root": "/x", "upload_threads": 2}, "upload_threads needs a root in an object store"),
    ],
)
def test_a_parameter_that_is_wrong_is_refused(params: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_params(params)


def test_a_package_that_is_missing_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(url: str) -> None:
        raise ImportError("Install gcsfs to access Google Storage")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)

    with (
        pytest.raises(ConfigError, match=r"Install gcsfs .*pip install 'headgate\[remote\]'"),
        capturing("gs://bucket/run", spool=str(tmp_path)),
    ):
        pass
    with pytest.raises(CaptureFileError, match=r"pip install 'headgate\[remote\]'"):
        open_captures("gs://bucket/run")


def test_the_spool_is_of_this_user_alone(tmp_path: Path) -> None:
    folder = SpoolFolder(tmp_path / "spool", ROOT)

    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "spool", folder.parent, folder.path)} == {0o700}
    folder.close()
    folder.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="parameter spool to a folder of your own"):
        SpoolFolder(tmp_path / "spool", ROOT)


def test_a_spool_that_cannot_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match=r"file/headgate/spool.*; set the parameter spool"), capturing(ROOT):
        pass


def test_a_spool_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)

    with pytest.raises(ConfigError, match="without locks"):
        SpoolFolder(tmp_path, ROOT)


def test_files_are_taken_over_from_a_process_that_is_gone_and_from_no_other(tmp_path: Path) -> None:
    living, other_root = SpoolFolder(tmp_path, ROOT), SpoolFolder(tmp_path, f"{ROOT}2")
    for folder in (living, other_root):
        (folder.path / "tag").mkdir()
        (folder.path / "tag" / "a.safetensors").write_text("whole")
    (living.path / ".tmp").mkdir()
    (living.path / ".tmp" / "half").write_text("half")

    second = SpoolFolder(tmp_path, ROOT)
    assert second.left == []
    second.close()
    assert not second.path.exists()

    living.close()
    third = SpoolFolder(tmp_path, ROOT)
    assert third.left == list(units_of(living.path)) != []
    assert not (living.path / ".tmp").exists()
    third.left[0].remove()
    third.close()
    assert not living.path.exists()
    assert list(units_of(other_root.path)) != []
    other_root.close()


def figures(files: Capturing) -> dict[str, float]:
    return {each.name.removeprefix("upload_"): each.value for each in figures_of(files.feed.consumer)}


def test_uploads_are_counted_with_those_that_failed_before(remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    put, failures = ObjectStore.put, iter([True, True])

    def unsteady(self: ObjectStore, path: Path, key: str) -> bool:
        if next(failures, False):
            raise OSError(errno.EIO, "the store is down")
        return put(self, path, key)

    monkeypatch.setattr(ObjectStore, "put", unsteady)
    monkeypatch.setattr(uploader, "FIRST_PAUSE_S", 0.001)
    with remote(upload_threads=1) as files:
        before = figures(files)
        payloads = [files.feed.whole(files.request(engine_id=name, client_id=name)) for name in "abc"]
    after = figures(files)

    assert set(before.values()) == {0}
    assert [payload["uploaded"] for payload in payloads] == [True] * 3
    assert after == {
        **{"done": 3, "failures": 2, "retried": 1, "bytes": sum(payload["num_bytes"] for payload in payloads)},
        **{"waiting": 0, "waiting_bytes": 0, "failing": 0},
    }


def test_files_that_wait_are_told(remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(self: ObjectStore, path: Path, key: str) -> bool:
        raise OSError(errno.EIO, "the store is down")

    monkeypatch.setattr(uploader, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(uploader, "MAX_PAUSE_S", 0.001)
    with remote(upload_wait_s=0) as files, monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "put", down)
        payloads = [files.feed.whole(files.request(engine_id=name, client_id=name)) for name in "ab"]
        found = figures(files)

    assert (found["done"], found["waiting"]) == (0, 2)
    assert found["waiting_bytes"] == sum(payload["num_bytes"] for payload in payloads)
    assert figures(files)["waiting_bytes"] == 0


def test_a_local_root_has_no_uploads(tmp_path: Path) -> None:
    with capturing(tmp_path / "root") as files:
        assert figures(files) == {}
