"""A harvest into an object store ends with the rows of a local one, whatever is killed or down."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headgate.capture.schema.errors import CaptureFileError, ConfigError, ConsumerError
from headgate.consumers.harvest import HarvestRoot, PromptSet, Wanted, harvest, parse_site_names, run_prompts
from headgate.consumers.harvest import root as harvest_root
from headgate.consumers.harvest.root import LOCK, TAG
from tests.deadlines import patience
from tests.fakes.capturing import capturing
from tests.fakes.dying_harvests import KILL_AFTER, ROWS
from tests.fakes.harvesting import FakeEngine, Killed, prompt_file
from tests.fakes.remote_roots import root_of, waiting
from tests.fakes.s3_server import S3Server
from tests.unit.consumers.harvest.test_harvest_resume import rows_of
from tests.unit.consumers.harvest.test_harvest_resume import run as run_locally

PROMPT = Wanted(sites=parse_site_names("1.post_mlp,3.post_mlp"))
MANIFEST = "run/_headgate_manifest.json"


def run(url: str, spool: Path, prompts: PromptSet, *, rows: int = 40, shard_bytes: int = 400, **kill: Any) -> Any:
    """One run of the command, with an engine without a model."""
    with HarvestRoot(url, spool=spool) as root:
        with capturing(**root.params, shard_bytes=shard_bytes) as files:
            finish = run_prompts(FakeEngine(files, **kill), prompts, root, PROMPT, rows=rows, batch=2)
        return finish()


@pytest.fixture
def prompts(tmp_path: Path) -> PromptSet:
    return prompt_file(tmp_path / "prompts.jsonl", [5, 0, 7, 3, 9, 4, 6, 8, 5, 2, 7, 9, 8])


def test_a_harvest_in_a_store_has_the_rows_of_a_local_one(store: S3Server, tmp_path: Path, prompts: PromptSet) -> None:
    expected = run_locally(tmp_path / "local", prompts, rows=40)

    manifest = run(root_of(store), tmp_path / "spool", prompts)

    assert rows_of(root_of(store)) == rows_of(tmp_path / "local")  # type: ignore[arg-type]
    assert manifest["harvest"] == expected["harvest"]
    objects = store.objects()
    assert json.loads(objects[MANIFEST]) == manifest
    assert json.loads(objects["run/_harvest.json"])["model"] == "example-model"
    assert [name for name in waiting(tmp_path / "spool") if not name.endswith(LOCK)] == []


def test_it_goes_on_from_the_store_alone_on_another_machine(
    store: S3Server, tmp_path: Path, prompts: PromptSet
) -> None:
    with pytest.raises(Killed):
        run(root_of(store), tmp_path / "one", prompts, kill_after=3, aborts=True)  # its consumer ends well
    assert MANIFEST not in store.objects()

    first = run(root_of(store), tmp_path / "two", prompts, rows=20)
    again = run(root_of(store), tmp_path / "three", prompts)

    run_locally(tmp_path / "local", prompts, rows=40)
    assert rows_of(root_of(store)) == rows_of(tmp_path / "local")  # type: ignore[arg-type]
    assert first["harvest"]["rows"] < again["harvest"]["rows"]
    assert json.loads(store.objects()[MANIFEST]) == again


def test_killed_processes_leave_no_gaps_and_no_doubles(store: S3Server, tmp_path: Path, prompts: PromptSet) -> None:
    command = [sys.executable, "-m", "tests.fakes.dying_harvests", root_of(store), str(tmp_path / "spool")]
    done = subprocess.run([*command, prompts.name], capture_output=True, text=True, timeout=patience(120), check=False)
    assert done.returncode == 0, done.stderr

    run_locally(tmp_path / "local", prompts, rows=ROWS)
    assert int(done.stdout) >= 10 // KILL_AFTER - 1
    assert rows_of(root_of(store)) == rows_of(tmp_path / "local")  # type: ignore[arg-type]
    assert MANIFEST in store.objects()


def test_a_store_that_is_down_is_said_and_the_same_command_goes_on(
    store: S3Server, tmp_path: Path, prompts: PromptSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harvest_root, "UPLOAD_TIMEOUT_S", 0.2)
    url, spool = root_of(store), tmp_path / "spool"
    with HarvestRoot(url, spool=spool) as root:
        files = capturing(**root.params, shard_bytes=1 << 20)
        with files as opened:
            finish = run_prompts(FakeEngine(opened), prompts, root, PROMPT, rows=40)
            store.refuses = lambda method, path: "503 Slow Down" if method == "PUT" else None
            monkeypatch.setattr("tests.fakes.capturing.TIMEOUT_S", 0.2)
        with pytest.raises(ConsumerError, match=r"files wait in .*spool.*; the same command goes on once s3"):
            finish()
    assert MANIFEST not in store.objects()

    monkeypatch.undo()
    store.refuses = lambda method, path: None
    run(url, spool, prompts)

    run_locally(tmp_path / "local", prompts, rows=40)
    assert rows_of(url) == rows_of(tmp_path / "local")  # type: ignore[arg-type]


def test_rows_that_another_harvest_wrote_meanwhile_are_an_error(
    store: S3Server, tmp_path: Path, prompts: PromptSet
) -> None:
    run(root_of(store), tmp_path / "spool", prompts, rows=10)
    for key, content in store.objects().items():
        if f"/{TAG}/_shards/" in key:
            folder, _, name = key.rpartition("/")
            store.put(f"{folder}-of-another/{name}", content)

    with pytest.raises(CaptureFileError, match=r"prompt-\d is in s3://.*/run twice"):
        run(root_of(store), tmp_path / "spool", prompts, rows=20)


def test_settings_of_another_harvest_are_refused(store: S3Server, tmp_path: Path, prompts: PromptSet) -> None:
    run(root_of(store), tmp_path / "spool", prompts, rows=10)
    other = prompt_file(tmp_path / "other.jsonl", [3, 3])

    with pytest.raises(ConfigError, match=r"s3://.*/run: its harvest was begun with other settings: prompts_sha256"):
        run(root_of(store), tmp_path / "spool", other, rows=20)


def test_a_live_consumer_is_not_taken_for_a_finished_store(store: S3Server, tmp_path: Path, prompts: PromptSet) -> None:
    with HarvestRoot(root_of(store), spool=tmp_path) as root, pytest.raises(ConfigError, match="use run_prompts"):
        harvest(FakeEngine(), prompts, root, PROMPT, rows=10)
