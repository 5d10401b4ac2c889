"""Exports that need no further package, and the command; ``make test-producers`` has the others."""

from __future__ import annotations

import io
import json
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from headgate.consumers.datasets import open_dataset
from headgate.consumers.datasets.export import export_parquet, hook_name
from headgate.consumers.dump import app
from tests.fakes.captured_roots import SITE, expected_facts, write_root

NAMES = [f"r{number}" for number in range(9)]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("COLUMNS", "200")
    return CliRunner()


def test_npy_has_every_row_and_says_whose_it_is(tmp_path: Path, runner: CliRunner) -> None:
    requests = write_root(tmp_path / "root", NAMES)
    to = tmp_path / "out"

    result = runner.invoke(app, ["export", str(tmp_path / "root"), "--to", str(to), "--format", "npy", "--site", SITE])

    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == f"{sum(expected_facts(requests).values())} rows of {SITE} in {to}"
    rows, positions, tokens = (np.load(to / f"{name}.npy") for name in ("3_post_mlp", "positions", "token_ids"))
    facts: Counter[object] = Counter()
    for line in map(json.loads, (to / "requests.jsonl").read_text().splitlines()):
        for number in range(*line["rows"]):
            facts[line["request_id"], int(positions[number]), int(tokens[number]), rows[number].tobytes()] += 1
    assert facts == expected_facts(requests)
    manifest = json.loads((to / "_headgate_manifest.json").read_text())
    assert manifest["export"] == {"format": "npy", "rows": len(rows), "left_out_rows": 0}


def test_an_export_of_a_role_has_its_messages(tmp_path: Path, runner: CliRunner) -> None:
    write_root(tmp_path / "root", NAMES[:3], messages=lambda _: [{"role": "user", "start": 1, "stop": 3}])
    command = ["export", str(tmp_path / "root"), "--to", str(tmp_path / "out"), "--format", "npy", "--site", SITE]

    assert runner.invoke(app, [*command, "--role", "user"]).exit_code == 0
    assert np.load(tmp_path / "out" / "positions.npy").tolist() == [1, 2] * 3
    refused = runner.invoke(app, [*command, "--role", "tool"])
    assert (refused.exit_code, "no message has the role tool; there are user" in refused.output) == (1, True)


def test_parquet_has_every_row(tmp_path: Path) -> None:
    from pyarrow import parquet

    requests = write_root(tmp_path / "root", NAMES)
    (tmp_path / "out").mkdir()

    facts = export_parquet(open_dataset(tmp_path / "root", sites=SITE).rows(), tmp_path / "out")

    table = parquet.read_table(tmp_path / "out")
    columns = [table.column(name).to_pylist() for name in ("request_id", "position", "token_id")]
    rows = [np.float32(row).tobytes() for row in table.column(SITE).to_pylist()]
    assert Counter(zip(*columns, rows, strict=True)) == expected_facts(requests)
    assert facts == {"format": "parquet", "rows": len(rows), "left_out_rows": 0}


def test_webdataset_has_a_sample_for_each_request(tmp_path: Path, runner: CliRunner) -> None:
    requests = write_root(tmp_path / "root", NAMES)
    to = tmp_path / "out"

    result = runner.invoke(app, ["export", str(tmp_path / "root"), "--to", str(to), "--format", "webdataset"])

    assert result.exit_code == 0, result.output
    samples: dict[str, dict[str, bytes]] = {}
    for path in sorted(to.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, name = member.name.partition(".")
                file = tar.extractfile(member)
                assert file is not None
                samples.setdefault(key, {})[name] = file.read()
    facts: Counter[object] = Counter()
    for sample in samples.values():
        columns = (np.load(io.BytesIO(sample[f"{name}.npy"])) for name in ("positions", "token_ids", "3_post_mlp"))
        for position, token, row in zip(*columns, strict=True):
            facts[json.loads(sample["json"])["request_id"], int(position), int(token), row.tobytes()] += 1
    assert len(samples) == len(NAMES)
    assert facts == expected_facts(requests)


def test_an_export_overwrites_nothing(tmp_path: Path, runner: CliRunner) -> None:
    write_root(tmp_path / "root", NAMES[:1])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")

    result = runner.invoke(app, ["export", str(tmp_path / "root"), "--to", str(tmp_path / "out"), "--format", "npy"])

    assert result.exit_code == 1
    assert "nothing is overwritten" in result.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_damage_stops_an_export_unless_it_is_skipped(tmp_path: Path, runner: CliRunner) -> None:
    requests = write_root(tmp_path / "root", NAMES[:2])
    torn = tmp_path / "root" / "even" / "r0.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    command = ["export", str(tmp_path / "root"), "--to", str(tmp_path / "out"), "--format", "npy"]

    refused = runner.invoke(app, command)
    skipped = runner.invoke(app, [*command, "--skip-damaged"])

    assert refused.exit_code == 1
    assert f"{torn}: partial" in refused.stderr
    assert skipped.exit_code == 0
    assert f"torn: {torn}" in skipped.stderr
    assert len(np.load(tmp_path / "out" / "positions.npy")) == sum(expected_facts(requests[1:]).values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "missing: no such folder"),
        (["root", "--tag", "none"], "no rows are selected"),
        (["root", "--site", "12.nothing"], "not a site"),
        (["root", "--phase", "middle"], "phases: expected any of"),
    ],
)
def test_errors_are_said_in_one_line(
    tmp_path: Path, runner: CliRunner, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    write_root(tmp_path / "root", NAMES[:1])
    monkeypatch.chdir(tmp_path)

    result = runner.invoke(app, ["export", *arguments, "--to", "out", "--format", "npy"])

    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_a_package_that_is_missing_is_named(tmp_path: Path, runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    write_root(tmp_path / "root", NAMES[:1])

    result = runner.invoke(app, ["export", str(tmp_path / "root"), "--to", str(tmp_path / "o"), "--format", "parquet"])

    assert result.exit_code == 1
    assert "pip install 'headgate[datasets]'" in result.stderr


def test_sites_have_the_names_of_transformer_lens() -> None:
    assert hook_name("12.post_mlp") == "blocks.12.hook_resid_post"
    for site in ("12.mlp_in", "final_norm"):
        with pytest.raises(ValueError, match="no hook with these values"):
            hook_name(site)


def test_an_export_of_no_rows_is_refused(tmp_path: Path) -> None:
    from headgate.consumers.datasets.export import export_npy

    write_root(tmp_path / "root", NAMES[:1], raw={"positions": "all_prompt"})
    data = open_dataset(tmp_path / "root", phases="decode")

    with pytest.raises(ValueError, match="no rows are selected"):
        export_npy(data.rows(), tmp_path)
