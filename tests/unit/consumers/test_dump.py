"""``headgate dump``: what people and programs see of a folder of captures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from headgate.capture.schema.errors import CaptureFileError
from headgate.capture.schema.sites import Site
from headgate.consumers.datasets import open_dataset
from headgate.consumers.dump import app, describe_bytes, describe_sites
from headgate.consumers.reader import open_captures
from tests.fakes.capturing import capturing

SITE = Site.parse("3.post_mlp")


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("COLUMNS", "200")
    return CliRunner()


def test_ls_lists_requests_with_what_one_wants_to_know(tmp_path: Path, runner: CliRunner) -> None:
    with capturing(tmp_path) as files:
        for layout in ("request", "raw", "shards"):
            files.feed.whole(files.request({"layout": layout, "tag": f"in-{layout}"}, client_id=f"a-{layout}"))

    result = runner.invoke(app, ["ls", str(tmp_path)])

    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["tag", "request", "layout", "sites", "rows", "size", "age", "ended"]
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["in-raw", "a-raw", "raw"],
        ["in-request", "a-request", "request"],
        ["in-shards", "a-shards", "shards"],
    ]
    assert "post_mlp 1,3; final_norm" in lines[1]
    assert "768 B" in lines[1]
    assert lines[-1] == "3 requests, 24 rows, 2.2 KiB"


def test_ls_for_programs(tmp_path: Path, runner: CliRunner) -> None:
    with capturing(tmp_path) as files:
        for tag in ("one", "two"):
            (path,) = files.feed.whole(files.request({"tag": tag}, engine_id=tag))["paths"]

    result = runner.invoke(app, ["ls", str(tmp_path), "--tag", "two", "--json"])

    (entry,) = json.loads(result.stdout)
    assert entry["paths"] == [path]
    assert entry["sites"] == ["1.post_mlp", "3.post_mlp", "final_norm"]
    assert (entry["request_id"], entry["num_rows"], entry["num_bytes"]) == ("client-1", 8, 768)


def test_show_gives_norms_extremes_and_what_is_not_finite(tmp_path: Path, runner: CliRunner) -> None:
    with capturing(tmp_path) as files:
        request = files.request()
        files.feed.whole(request)

    result = runner.invoke(app, ["show", str(tmp_path), "client-1", "--json"])

    (shown,) = json.loads(result.stdout)
    line = next(line for line in shown["statistics"] if line["site"] == "3.post_mlp")
    rows = request.expected().rows[SITE].double()
    assert line["mean_norm"] == pytest.approx(rows.norm(dim=1).mean().item())
    assert line["max_norm"] == pytest.approx(rows.norm(dim=1).max().item())
    assert (line["min"], line["max"]) == (rows.min().item(), rows.max().item())
    assert (line["rows"], line["num_nan"], line["num_inf"]) == (8, 0, 0)
    assert shown["model"] == "example-model"


def test_show_counts_nan_and_keeps_them_out_of_the_rest(
    tmp_path: Path, runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    with capturing(tmp_path) as files:
        request = files.request()
        good = request.rows
        poison = torch.zeros(8, 16, dtype=torch.bfloat16)
        poison[2, 3], poison[4, 5] = torch.nan, torch.inf
        monkeypatch.setattr(request, "rows", lambda site, positions: good(site, positions) + poison)
        files.feed.whole(request)

    result = runner.invoke(app, ["show", str(tmp_path), "client-1", "--json"])

    line = next(line for line in json.loads(result.stdout)[0]["statistics"] if line["site"] == "3.post_mlp")
    healthy = good(SITE, request.wanted())[[0, 1, 3, 5, 6, 7]].double()
    assert (line["num_nan"], line["num_inf"]) == (1, 1)
    assert line["mean_norm"] == pytest.approx(healthy.norm(dim=1).mean().item())


def test_show_is_readable(tmp_path: Path, runner: CliRunner) -> None:
    with capturing(tmp_path) as files:
        files.feed.whole(files.request(prompt=5, output=4))

    result = runner.invoke(app, ["show", str(tmp_path), "client-1"])

    assert result.exit_code == 0
    assert "default/client-1" in result.stdout
    assert "8: 5 of the prompt, 3 generated, 0 dropped" in result.stdout
    assert str(tmp_path / "default" / "client-1.safetensors") in result.stdout
    assert [line.split()[0] for line in result.stdout.splitlines()[-3:]] == ["1.post_mlp", "3.post_mlp", "final_norm"]


def test_a_request_without_rows_can_be_shown(tmp_path: Path, runner: CliRunner) -> None:
    with capturing(tmp_path) as files:
        request = files.request(output=0, status="abort")
        files.feed.begin(request)
        files.feed.finish(request)

    assert runner.invoke(app, ["show", str(tmp_path), "client-1"]).exit_code == 0
    result = runner.invoke(app, ["show", str(tmp_path), "client-1", "--json"])
    assert json.loads(result.stdout)[0]["statistics"][0]["mean_norm"] is None


@pytest.mark.parametrize("arguments", [["ls", "missing"], ["show", ".", "missing"]])
def test_what_is_not_there_is_said_in_one_line(
    tmp_path: Path, runner: CliRunner, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    result = runner.invoke(app, arguments)

    assert result.exit_code == 1
    assert "missing" in result.stderr
    assert "Traceback" not in result.output


def test_damage_is_said_and_the_rest_is_listed(tmp_path: Path, runner: CliRunner) -> None:
    with capturing(tmp_path) as files:
        for name in ("cut", "whole"):
            (path,) = files.feed.whole(files.request({"request_id": name}, engine_id=name))["paths"]
    damaged = Path(path).with_stem("cut")
    damaged.write_bytes(damaged.read_bytes()[:-1])

    result = runner.invoke(app, ["ls", str(tmp_path)])

    assert result.exit_code == 1
    assert "whole" in result.stdout
    assert f"damaged: {damaged}" in result.stderr


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["final_norm"], "final_norm"),
        (["0.post_mlp", "1.post_mlp", "2.post_mlp", "7.post_mlp"], "post_mlp 0-2,7"),
        (["3.pre_attn", "3.post_mlp", "final_norm"], "pre_attn 3; post_mlp 3; final_norm"),
    ],
)
def test_sites_are_said_briefly(names: list[str], text: str) -> None:
    assert describe_sites([Site.parse(name) for name in names]) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB"), (5 << 50, "5120.0 TiB")],
)
def test_bytes_are_said_briefly(num_bytes: int, text: str) -> None:
    assert describe_bytes(num_bytes) == text


def test_links_that_lead_back_to_themselves_are_no_folders(tmp_path: Path, runner: CliRunner) -> None:
    with capturing(tmp_path / "root") as files:
        request = files.request()
        files.feed.whole(request)
    for loop in (tmp_path / "loop", tmp_path / "root" / "loop"):
        loop.symlink_to(loop)
    (tmp_path / "elsewhere").symlink_to(tmp_path / "root")

    for arguments in (["ls", str(tmp_path / "loop")], ["show", str(tmp_path / "loop"), "x"]):
        result = runner.invoke(app, arguments)
        assert result.exit_code == 1
        assert isinstance(result.exception, SystemExit), result.exception
    for root in ("root", "elsewhere"):
        listed = runner.invoke(app, ["ls", str(tmp_path / root)])
        assert listed.exit_code == 0
        assert "client-1" in listed.stdout


def test_links_below_a_root_are_not_followed(tmp_path: Path, runner: CliRunner) -> None:
    """As the server's own list does not: a program that may write there must not choose what is read elsewhere."""
    for name in ("root", "outside"):
        with capturing(tmp_path / name) as files:
            request = files.request()
            files.feed.whole(request)
    (stored,) = (tmp_path / "outside" / "default").glob("*.safetensors")
    (tmp_path / "root" / "linked").symlink_to(tmp_path / "outside" / "default")
    (tmp_path / "root" / "default" / "linked.safetensors").symlink_to(stored)

    listed = json.loads(runner.invoke(app, ["ls", str(tmp_path / "root"), "--json"]).stdout)

    assert [(entry["tag"], entry["paths"]) for entry in listed] == [
        ("default", [str(tmp_path / "root" / "default" / stored.name)])
    ]
    rows = open_dataset(tmp_path / "root", index=False).num_rows
    assert set(rows.values()) == {listed[0]["num_rows"]}
    for tag in ("linked", "linked/", "../outside/default"):
        shown = runner.invoke(app, ["show", str(tmp_path / "root"), "client-1", "--tag", tag])
        assert shown.exit_code == 1
        assert f"no capture of request 'client-1' with tag {tag!r}" in " ".join(shown.output.split())


def test_a_file_of_a_folder_that_became_a_link_is_not_read(tmp_path: Path) -> None:
    """A sidecar of the layout `raw` names files that no listing of folders passes by."""
    with capturing(tmp_path / "root") as files:
        files.feed.whole(files.request({"layout": "raw"}))
    (folder,) = [path for path in (tmp_path / "root" / "default").iterdir() if path.is_dir()]
    rows, (request,) = folder / "1_post_mlp.bin", open_captures(tmp_path / "root")
    rows.rename(tmp_path / "elsewhere.bin")
    rows.symlink_to(tmp_path / "elsewhere.bin")

    with pytest.raises(CaptureFileError, match=r"1_post_mlp\.bin: not a file"):
        list(open_captures(tmp_path / "root"))
    with pytest.raises(CaptureFileError, match=r"1_post_mlp\.bin: not a file"):
        request.tensor("1.post_mlp")
