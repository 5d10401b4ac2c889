"""Captures of a root as clients see them: pages, filters, owners, and rows as bytes."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from headgate.capture.schema.errors import CaptureFileError, NoCaptureError, RequestError
from headgate.capture.schema.results import CaptureBrowser, ReportContext
from headgate.capture.schema.sites import HookPoint
from headgate.consumers.filesystem import FilesystemConsumer, browsing
from tests.fakes.capturing import capturing, spec_context

MESSAGES = [{"role": "user", "start": 0, "stop": 2}]


def fill(root: Path, layout: str = "request", count: int = 5, **params: Any) -> list[Any]:
    """Requests r0, r1, ... of `alice`, each a second younger than the one before."""
    with capturing(root, layout=layout, threads=1, **params) as files:
        requests = [
            files.request({"request_id": f"r{i}"}, client_id=f"c{i}", owner="alice", prompt=i + 1) for i in range(count)
        ]
        for number, request in enumerate(requests):
            for path in files.feed.whole(request)["paths"]:
                if layout != "shards":
                    folder = Path(path) if layout == "request" else Path(path).parent
                    os.utime(folder, (number, number))
    return requests


def context(root: Path, owner: str | None = "alice", query: dict[str, str] | None = None, **allows: Any) -> Any:
    allowed: dict[str, Any] = {"allows_site": lambda site: True, "allows_tag": lambda tag: True}
    allowed["allows_owner"] = lambda name: owner is None or name == owner
    return ReportContext(params={"root": str(root)}, query=query or {}, **{**allowed, **allows})


def listed(root: Path, owner: str | None = "alice", query: dict[str, str] | None = None, **allows: Any) -> Any:
    found = FilesystemConsumer.list_captures(context(root, owner, query, **allows))
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    return found


@pytest.mark.parametrize("layout", ["request", "raw", "shards"])
def test_pages_have_every_capture_once_and_the_newest_first(tmp_path: Path, layout: str) -> None:
    assert isinstance(FilesystemConsumer, CaptureBrowser)
    fill(tmp_path, layout)

    pages, after = [], {}
    while True:
        page = listed(tmp_path, query={"limit": "2", **after})
        pages.append([capture["request_id"] for capture in page["captures"]])
        if page["next"] is None:
            break
        after = {"after": page["next"]}

    assert [name for page in pages for name in page] == ["r4", "r3", "r2", "r1", "r0"]
    assert [len(page) for page in pages] == [2, 2, 1]


def test_a_page_opens_a_bounded_number_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browsing, "MAX_OPENED", 3)
    fill(tmp_path)

    first = listed(tmp_path, query={"site": "1.post_mlp", "role": "user"})
    second = listed(tmp_path, query={"after": first["next"]})

    assert (first["captures"], second["next"]) == ([], None)
    assert [capture["request_id"] for capture in second["captures"]] == ["r1", "r0"]


@pytest.mark.parametrize("layout", ["request", "raw", "shards"])
def test_rows_are_sent_as_they_are_stored(tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browsing, "PIECE_BYTES", 50)
    requests = fill(tmp_path, layout)

    for capture, request in zip(reversed(listed(tmp_path)["captures"]), requests, strict=True):
        name, expected = capture["name"], request.expected()
        one = FilesystemConsumer.describe_capture(context(tmp_path), "default", name)
        file = FilesystemConsumer.send_capture(context(tmp_path), "default", name)
        content = b"".join(file.pieces)
        tensors = load(content)
        assert len(content) == file.num_bytes
        assert one["positions"] == tensors["positions"].tolist() == expected.positions.tolist()
        assert one["token_ids"] == tensors["token_ids"].tolist() == expected.token_ids.tolist()
        assert one["metadata"]["sites"] == ["1.post_mlp", "3.post_mlp", "final_norm"]
        assert capture["sites"] == {"post_mlp": [1, 3], "final_norm": []}
        for site in expected.sites:
            assert torch.equal(tensors[site.name], expected.rows[site])
        query = {"sites": "final_norm,1.resid_post"}
        some = load(b"".join(FilesystemConsumer.send_capture(context(tmp_path, query=query), "default", name).pieces))
        assert some.keys() == {"positions", "token_ids", "1.post_mlp", "final_norm"}


def test_a_client_sees_its_own_captures_tags_and_sites(tmp_path: Path) -> None:
    with capturing(tmp_path, hooks={"final_norm": "all"}) as files:
        for owner, tag in (("alice", "a"), ("alice", "b"), ("bob", "a"), (None, "a")):
            raw = {"tag": tag, "request_id": str(owner), "messages": MESSAGES if tag == "b" else []}
            files.feed.whole(files.request(raw, client_id=f"{owner}{tag}", owner=owner))
        spec = FilesystemConsumer.global_capture_spec(replace(spec_context(files.params), owner="alice"))

    def names(*args: Any, **allows: Any) -> list[tuple[str, str]]:
        return sorted((capture["tag"], capture["name"]) for capture in listed(tmp_path, *args, **allows)["captures"])

    assert names() == [("a", "alice.safetensors"), ("b", "alice.safetensors")]
    assert names("bob") == [("a", "bob.safetensors")]
    assert len(names(None)) == 4
    assert names("nobody") == []
    assert names(allows_tag="b".__eq__) == names(query={"tag": "b"}) == names(query={"role": "user"})
    assert names(allows_site=lambda site: False) == []
    assert spec is not None
    assert "owner" not in spec.options  # what the operator records of every request is the operator's
    allows_norm = context(tmp_path, allows_site=lambda site: site.hook is HookPoint.FINAL_NORM)
    sent = load(b"".join(FilesystemConsumer.send_capture(allows_norm, "a", "alice.safetensors").pieces))
    assert sent.keys() == {"positions", "token_ids", "final_norm"}
    with pytest.raises(RequestError, match=r"sites.*1\.post_mlp is not in this capture"):
        FilesystemConsumer.send_capture(
            context(tmp_path, query={"sites": "1.post_mlp"}, allows_site=allows_norm.allows_site),
            "a",
            "alice.safetensors",
        )
    for who, tag, name in (("bob", "a", "alice.safetensors"), ("alice", "a", "None.safetensors"), ("bob", "a", "x")):
        for look in (FilesystemConsumer.describe_capture, FilesystemConsumer.send_capture):
            with pytest.raises(NoCaptureError, match="no capture"):
                look(context(tmp_path, who), tag, name)


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        ("..", "outside.safetensors"),
        ("default", "../outside.safetensors"),
        ("default", "..:0"),
        ("default", "linked.safetensors"),
        ("linked", "outside.safetensors"),
        ("default", "r0.safetensors:0"),
        ("default", "_shards"),
        (".tmp", "lock"),
        ("default", ""),
        ("default", "r0.safetensors\0"),
        ("default", "r" * 256),
        ("d" * 256, "r0.safetensors"),
    ],
)
def test_nothing_outside_of_the_root_is_reached(tmp_path: Path, tag: str, name: str) -> None:
    root, outside = tmp_path / "root", tmp_path / "elsewhere"
    fill(root, count=1)
    fill(outside, count=1)
    (outside / "default" / "r0.safetensors").rename(tmp_path / "outside.safetensors")
    (root / "default" / "linked.safetensors").symlink_to(tmp_path / "outside.safetensors")
    (root / "linked").symlink_to(tmp_path)

    with pytest.raises(NoCaptureError):
        FilesystemConsumer.send_capture(context(root, None), tag, name)
    assert [capture["name"] for capture in listed(root, None)["captures"]] == ["r0.safetensors"]


def test_damaged_files_are_named_to_administrators_alone(tmp_path: Path) -> None:
    fill(tmp_path, count=2)
    path = tmp_path / "default" / "r0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])

    of_all, own = listed(tmp_path, None), listed(tmp_path)

    assert [len(found["captures"]) for found in (of_all, own)] == [1, 1]
    assert ("partial" in of_all["damaged"][0], own["damaged"]) == (True, [])
    with pytest.raises(NoCaptureError):
        FilesystemConsumer.send_capture(context(tmp_path), "default", path.name)
    with pytest.raises(CaptureFileError, match="partial"):
        FilesystemConsumer.send_capture(context(tmp_path, None), "default", path.name)


@pytest.mark.parametrize(
    "query",
    [
        {"colour": "red"},
        {"site": "12.nowhere"},
        {"limit": "0"},
        {"limit": "501"},
        {"limit": f"{501:010}"},
        {"limit": "x"},
        {"after": "../.."},
    ],
    ids=str,
)
def test_a_wrong_query_names_its_field(tmp_path: Path, query: dict[str, str]) -> None:
    with pytest.raises(RequestError) as refused:
        listed(tmp_path, query=query)

    assert refused.value.field == next(iter(query))


def test_a_root_elsewhere_is_said(tmp_path: Path) -> None:
    with pytest.raises(CaptureFileError, match="no such folder on the API server's machine"):
        listed(tmp_path / "missing")
    with pytest.raises(CaptureFileError, match="object store"):
        FilesystemConsumer.list_captures(replace(context(tmp_path), params={"root": "memory://bucket/run"}))
