"""Reading captures back: lazily, exactly, and never what is damaged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headgate.capture.schema.errors import CaptureFileError
from headgate.capture.schema.sites import Site
from headgate.consumers.reader import open_capture, open_captures
from tests.fakes.capturing import capturing

SITE = Site.parse("3.post_mlp")


def test_every_layout_is_found_by_tag_and_id(tmp_path: Path) -> None:
    with capturing(tmp_path) as files:
        requests = [
            files.request({"layout": layout, "tag": tag}, client_id=f"{layout}-{tag}")
            for layout in ("request", "raw", "shards")
            for tag in ("one", "two")
        ]
        for request in requests:
            files.feed.whole(request)

    folder = open_captures(tmp_path)
    assert folder.tags == ["one", "two"]
    assert len(list(folder)) == len(list(folder)) == 6  # it can be iterated again
    for request in requests:
        options = request.info.spec.options
        capture = folder[request.info.client_request_id]
        expected = request.expected()
        assert (capture.tag, capture.layout) == (options["tag"], options["layout"])
        assert capture.metadata["sites"] == [site.name for site in expected.sites]
        assert capture.num_rows == len(expected.positions)
        assert capture.num_bytes == sum(rows.nbytes for rows in expected.rows.values())
        assert np.array_equal(capture.positions, expected.positions)
        assert np.array_equal(capture.token_ids, expected.token_ids)
        assert np.array_equal(capture.is_prefill, expected.is_prefill)
        assert torch.equal(capture[SITE], expected.rows[SITE])


def test_a_site_has_its_aliases(tmp_path: Path) -> None:
    with capturing(tmp_path) as files:
        request = files.request()
        files.feed.whole(request)
    capture = open_captures(tmp_path)["client-1"]

    assert tuple(capture) == tuple(capture.sites)
    for name in ("3.post_mlp", "3.resid_post", "3.post_block", SITE):
        assert torch.equal(capture[name], request.expected().rows[SITE])
    for missing in ("2.post_mlp", "3.pre_attn", "nonsense"):
        with pytest.raises(KeyError, match=r"not captured.*3\.post_mlp"):
            capture.tensor(missing)


def test_one_id_can_have_several_captures(tmp_path: Path) -> None:
    with capturing(tmp_path) as files:
        for tag in ("one", "two"):
            files.feed.whole(files.request({"tag": tag}, engine_id=tag))
    folder = open_captures(tmp_path)

    assert [capture.tag for capture in folder.find("client-1")] == ["one", "two"]
    assert [capture.tag for capture in folder.find("client-1", tag="two")] == ["two"]
    with pytest.raises(KeyError, match="2 captures"):
        folder["client-1"]
    with pytest.raises(KeyError, match="no such capture"):
        folder["client-2"]


@pytest.mark.parametrize("layout", ["request", "shards", "raw"])
def test_stages_on_different_hosts_are_put_together_from_their_roots(tmp_path: Path, layout: str) -> None:
    roots = [tmp_path / "one", tmp_path / "two"]
    for rank, root in enumerate(roots):
        with capturing(root, stage=(rank, 2)) as files:
            spec = {"layout": layout, "hooks": {"post_mlp": [2 * rank + 1]}}
            for number in range(3):
                files.feed.whole(files.request(spec, client_id=f"client-{number}"))

    together = {capture.request_id: capture for capture in open_captures(*roots)}
    alone = [open_captures(root)["client-1"].sites for root in roots]

    assert set(together) == {"client-0", "client-1", "client-2"}
    assert not set(alone[0]) & set(alone[1])
    for name, capture in together.items():
        assert set(capture.sites) == {*alone[0], *alone[1]}
        for root in roots:
            own = open_captures(root)[name]
            assert all(torch.equal(capture.tensor(site), own.tensor(site)) for site in own.sites)
    assert open_captures(*roots).tags == open_captures(roots[0]).tags


def test_a_stage_that_wrote_other_positions_is_refused(tmp_path: Path) -> None:
    for rank, positions in enumerate(("all", "all_prompt")):
        with capturing(tmp_path, stage=(rank, 2)) as files:
            files.feed.whole(files.request({"positions": positions}, engine_id="same"))

    with pytest.raises(CaptureFileError, match="not the positions"):
        list(open_captures(tmp_path))


def test_bfloat16_becomes_float32_without_loss(tmp_path: Path) -> None:
    with capturing(tmp_path) as files:
        request = files.request()
        files.feed.whole(request)
    capture = open_captures(tmp_path)["client-1"]

    array = capture.numpy(SITE)

    assert array.dtype == np.float32
    assert np.array_equal(array, request.expected().rows[SITE].float().numpy())


def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    with capturing(tmp_path) as files:
        request = files.request()
        files.feed.whole(request)
    capture = open_captures(tmp_path)["client-1"]

    capture.tensor(SITE).zero_()
    capture.positions[:] = -1

    assert torch.equal(capture.tensor(SITE), request.expected().rows[SITE])
    assert np.array_equal(capture.positions, request.expected().positions)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_a_partial_file_is_refused(tmp_path: Path, keep: int) -> None:
    with capturing(tmp_path) as files:
        (path,) = files.feed.whole(files.request())["paths"]
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[:keep])

    with pytest.raises(CaptureFileError, match="partial"):
        open_capture(path)
    with pytest.raises(CaptureFileError, match="partial"):
        list(open_captures(tmp_path))
    folder = open_captures(tmp_path, strict=False)
    assert list(folder) == []
    assert len(folder.damaged) == 1


def test_a_file_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with capturing(tmp_path) as files:
        (path,) = files.feed.whole(files.request())["paths"]
    with open(path, "ab") as file:
        file.write(b"\0")

    with pytest.raises(CaptureFileError, match="partial"):
        open_capture(path)


@pytest.mark.parametrize("name", ["3_post_mlp.json", "3_post_mlp.bin"])
def test_a_raw_folder_without_all_its_files_is_refused(tmp_path: Path, name: str) -> None:
    with capturing(tmp_path, layout="raw") as files:
        files.feed.whole(files.request())
    (tmp_path / "default" / "client-1" / name).unlink()

    with pytest.raises(CaptureFileError, match=r"partial|missing"):
        list(open_captures(tmp_path))


def test_a_raw_file_of_another_length_is_refused(tmp_path: Path) -> None:
    with capturing(tmp_path, layout="raw") as files:
        files.feed.whole(files.request())
    path = tmp_path / "default" / "client-1" / "3_post_mlp.bin"
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(CaptureFileError, match="partial"):
        list(open_captures(tmp_path))


def test_files_of_others_are_passed_over(tmp_path: Path) -> None:
    with capturing(tmp_path) as files:
        files.feed.whole(files.request())
    save_file({"weight": torch.zeros(2)}, tmp_path / "default" / "model.safetensors")
    (tmp_path / "default" / "notes.txt").write_text("mine")
    (tmp_path / "default" / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("mine")

    assert [capture.request_id for capture in open_captures(tmp_path)] == ["client-1"]
    with pytest.raises(CaptureFileError, match="not written by headgate"):
        open_capture(tmp_path / "default" / "model.safetensors")


def test_a_file_that_safetensors_wrote_again_can_be_read(tmp_path: Path) -> None:
    from safetensors import safe_open

    with capturing(tmp_path) as files:
        request = files.request()
        (path,) = files.feed.whole(request)["paths"]
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(load_file(path), path, metadata)

    assert torch.equal(open_capture(path)[SITE], request.expected().rows[SITE])


def test_a_newer_format_is_refused_with_both_versions(tmp_path: Path) -> None:
    with capturing(tmp_path) as files:
        (path,) = files.feed.whole(files.request())["paths"]
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole.replace(b'"format_version":"1"', b'"format_version":"5"'))

    with pytest.raises(CaptureFileError, match=r"version 5.*version 4"):
        open_capture(path)


def test_a_folder_that_is_not_there_is_an_error_and_not_empty(tmp_path: Path) -> None:
    with pytest.raises(CaptureFileError, match="no such folder"):
        open_captures(tmp_path / "typo")


def test_reading_needs_neither_vllm_nor_torch(tmp_path: Path) -> None:
    with capturing(tmp_path) as files:
        files.feed.whole(files.request())
    program = f"""
import sys
sys.modules["vllm"] = sys.modules["torch"] = None
from headgate.consumers.reader import open_captures
(capture,) = open_captures({str(tmp_path)!r})
assert capture.numpy("3.post_mlp").shape == (8, 16)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_a_notebook_shows_norms_of_a_capture_without_reading_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with capturing(tmp_path) as files:
        request = files.request({"tag": "one"}, client_id="<b>x</b>")
        files.feed.whole(request)
    capture = open_captures(tmp_path)["<b>x</b>"]

    shown = capture._repr_html_()

    lengths = request.expected().rows[SITE].double().norm(dim=1)
    assert f"3.post_mlp</td><td>{lengths.min():.5g}</td><td>{lengths.mean():.5g}</td><td>{lengths.max():.5g}" in shown
    assert shown.count("<td style=background") == len(lengths) * len(capture.sites)
    assert "<b>x</b>" not in shown
    assert len(shown.encode()) < 20_000
    monkeypatch.setattr("headgate.consumers.reader.MAX_FETCHED", 8)
    monkeypatch.setattr(capture, "_source", object())
    assert "not read: over 8 bytes to fetch" in capture._repr_html_()


def test_a_notebook_lists_the_first_requests_of_a_folder(tmp_path: Path) -> None:
    with capturing(tmp_path) as files:
        for number in range(12):
            files.feed.whole(files.request({"tag": "one"}, client_id=f"r-{number:02}"))
    folder = open_captures(tmp_path, strict=False)
    (damaged,) = open_captures(tmp_path)["r-11"].paths
    Path(damaged).write_bytes(b"torn")
    assert len(list(folder)) == 11

    shown = folder._repr_html_()

    assert "r-09" in shown
    assert "r-10" not in shown
    assert "the first 10 of more" in shown
    assert [str(error) for error in folder.damaged] != []
    (torn,) = open_captures(tmp_path)["r-00"].paths
    Path(torn).write_bytes(b"torn")
    assert f"damaged: {torn}"[:80] in open_captures(tmp_path)._repr_html_()
