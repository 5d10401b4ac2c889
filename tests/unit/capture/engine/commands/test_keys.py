"""``headgate keys``: keys that are shown once, their digests, and what is said of a wrong file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headgate.capture.engine.access.access_key import digest_of
from headgate.capture.engine.access.key_ring import KeyRing
from headgate.capture.engine.commands.keys import keys
from headgate.capture.links.network import NetworkKeys


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_a_key_is_shown_once_and_its_digest_kept(path: Path) -> None:
    runner = CliRunner()
    added = runner.invoke(keys, ["add", str(path), "alice", "--role", "capture", "--tag", "alice-*", "--tag", "x"])
    other = runner.invoke(keys, ["add", str(path), "root", "--role", "admin", "--role", "steer"])

    assert (added.exit_code, other.exit_code) == (0, 0)
    key = added.stdout.strip().splitlines()[-1]
    assert len(key) > 40
    assert key not in path.read_text()
    found = KeyRing(path).find([key], "capture")
    assert found is not None
    assert (found.name, found.tags) == ("alice", ("alice-*", "x"))
    assert path.stat().st_mode & 0o777 == 0o600
    listed = runner.invoke(keys, ["check", str(path)])
    assert listed.stdout.splitlines() == ["alice: capture", "root: admin, steer"]


def test_a_digest_is_that_of_the_key_without_the_end_of_its_line() -> None:
    result = CliRunner().invoke(keys, ["hash"], input="my-own-key\n")

    assert result.stdout.strip() == digest_of("my-own-key")
    assert CliRunner().invoke(keys, ["hash"], input="\n").exit_code == 1


def test_what_is_wrong_is_said_and_nothing_changes(path: Path) -> None:
    runner = CliRunner()
    runner.invoke(keys, ["add", str(path), "alice", "--role", "capture"])
    before = path.read_text()

    for arguments, expected in (
        (["add", str(path), "alice", "--role", "steer"], "several keys have the name 'alice'"),
        (["add", str(path), "bob", "--role", "conductor"], "unknown role 'conductor'; known: admin, capture, steer"),
        (["add", str(path / "x"), "bob", "--role", "steer"], str(path)),
    ):
        result = runner.invoke(keys, arguments)
        assert (result.exit_code, expected in result.output) == (1, True), result.output
    assert path.read_text() == before
    path.write_text(json.dumps({"keys": [{"name": "alice"}]}))
    assert "missing required field `sha256`" in runner.invoke(keys, ["check", str(path)]).output


def test_keys_of_hosts_are_made_in_a_file_or_printed(tmp_path: Path) -> None:
    runner, path = CliRunner(), tmp_path / "hosts"

    made = runner.invoke(keys, ["new", str(path)])
    again = runner.invoke(keys, ["new", str(path)])
    printed = runner.invoke(keys, ["new"])

    assert (made.exit_code, made.output, path.stat().st_mode & 0o777) == (0, "", 0o600)
    assert again.exit_code == 1
    assert "an engine whose hosts have different keys does not start" in again.output
    found = [NetworkKeys.parse(text, "here") for text in (path.read_text(), printed.stdout)]
    assert found[0] != found[1]
