"""Keys of the environment and of a file: who may pass, and what a new file does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headgate.capture.engine.access import key_ring
from headgate.capture.engine.access.access_key import digest_of
from headgate.capture.engine.access.key_ring import KeyRing, add_entry, known_roles, read_keys
from headgate.capture.schema.errors import ConfigError, ForbiddenError

DIGEST = digest_of("a-key")


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("STEERING", "CAPTURE", "ADMIN"):
        monkeypatch.delenv(f"HEADGATE_{part}_KEYS", raising=False)


def write(path: Path, *entries: dict[str, Any], mode: int = 0o600) -> Path:
    path.write_bytes(msgspec.json.encode({"keys": entries}))
    path.chmod(mode)
    return path


def entry(name: str, *roles: str, key: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"name": name, "sha256": digest_of(key or name), "roles": roles, **fields}


def test_environment_keys_let_in_whoever_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_STEERING_KEYS", " old-key ,new-key,,")
    ring = KeyRing()

    for number, key in enumerate(("old-key", "new-key"), 1):
        found = ring.find([key], "steer")
        assert found.name == f"env.steer.{number}"
        assert ring.find(["wrong", key], "steer") == found
    assert ring.open_roles == {"capture", "admin"}
    assert ring.described("steer", is_local=True) == "2 keys"
    assert "old-key" not in repr(ring)


@pytest.mark.parametrize("given", [[], ["old-key,new-key"], ["OLD-KEY"], ["old-kez"], ["schl\u00fcssel"], ["\udcff"]])
def test_without_one_nobody_passes_even_from_the_same_machine(
    monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    monkeypatch.setenv("HEADGATE_STEERING_KEYS", "old-key,new-key")

    with pytest.raises(ForbiddenError, match="HEADGATE_STEERING_KEYS") as raised:
        KeyRing().find(given, "steer")

    assert "old-key" not in str(raised.value)
    assert "new-key" not in str(raised.value)


def test_without_configured_keys_every_role_is_open() -> None:
    ring = KeyRing()

    assert ring.open_roles == known_roles()
    assert not ring.has_keys
    assert ring.described("capture", is_local=True) == "open, on this machine alone"
    assert ring.described("capture", is_local=False) == "closed, HEADGATE_CAPTURE_KEYS is not set"


def test_all_keys_are_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADGATE_CAPTURE_KEYS", "first")
    ring = KeyRing(write(tmp_path / "keys.json", entry("alice", "capture"), entry("bob", "capture")))
    compared: list[str] = []
    real = key_ring.secrets.compare_digest

    def compare(one: str, other: str) -> bool:
        compared.append(other)
        return real(one, other)

    monkeypatch.setattr(key_ring.secrets, "compare_digest", compare)
    ring.find(["first"], "capture")

    assert compared == [digest_of("first"), digest_of("alice"), digest_of("bob")]


def test_roles_of_a_file_say_what_its_keys_may(tmp_path: Path) -> None:
    entries = [entry("alice", "capture"), entry("bob", "steer", "capture"), entry("root", "admin")]
    ring = KeyRing(write(tmp_path / "keys.json", *entries))

    allowed = {
        (key, role)
        for key in ("alice", "bob", "root", "nobody")
        for role in ("capture", "steer", "admin")
        if _passes(ring, key, role)
    }

    assert allowed == {
        ("alice", "capture"),
        *(("bob", role) for role in ("steer", "capture")),
        *(("root", role) for role in ("steer", "capture", "admin")),
    }
    with pytest.raises(ForbiddenError, match=r"'steer'; 'alice' has capture"):
        ring.find(["alice"], "steer")
    with pytest.raises(ForbiddenError, match="headgate keys add"):
        ring.find([], "capture")


def _passes(ring: KeyRing, key: str, role: str) -> bool:
    try:
        ring.find([key], role)
    except ForbiddenError:
        return False
    return True


def test_two_keys_of_one_name_are_one_client(tmp_path: Path) -> None:
    both = {**entry("alice", "capture"), "sha256": [digest_of("new"), digest_of("old")]}
    ring = KeyRing(write(tmp_path / "keys.json", both))

    assert {ring.find([key], "capture").name for key in ("new", "old")} == {"alice"}


def test_an_expired_key_is_refused(tmp_path: Path) -> None:
    ring = KeyRing(
        write(
            tmp_path / "keys.json",
            entry("alice", "capture", expires="2020-01-01T00:00:00Z"),
            entry("bob", "capture", expires="2999-01-01T00:00:00+01:00"),
        )
    )

    assert ring.find(["bob"], "capture").name == "bob"
    with pytest.raises(ForbiddenError, match="'alice' has expired"):
        ring.find(["alice"], "capture")


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "keys.json", entry("alice", "capture"))
    ring = KeyRing(path)

    write(path, entry("alice", "capture", key="another"), entry("bob", "capture"))
    ring.refresh()
    assert (_passes(ring, "alice", "capture"), _passes(ring, "another", "capture")) == (False, True)

    caplog.clear()
    path.write_text('{"keys": [')
    for _ in range(3):
        ring.refresh()
    assert _passes(ring, "bob", "capture")
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "the keys stay as they were" in caplog.text

    caplog.clear()
    path.unlink()
    for _ in range(3):
        ring.refresh()
    assert _passes(ring, "bob", "capture")
    assert [record.levelname for record in caplog.records] == ["ERROR"]

    write(tmp_path / "new.json", entry("carol", "capture")).replace(path)
    ring.refresh()
    assert (_passes(ring, "bob", "capture"), _passes(ring, "carol", "capture")) == (False, True)


def test_a_forced_reading_does_not_look_at_the_time_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.json", entry("alice", "capture"))
    ring = KeyRing(path)
    before = path.stat()
    write(path, entry("carol", "capture"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    ring.refresh()
    assert _passes(ring, "alice", "capture")
    ring.refresh(is_forced=True)
    assert (_passes(ring, "alice", "capture"), _passes(ring, "carol", "capture")) == (False, True)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o602])
def test_a_file_that_others_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "keys.json", entry("alice", "capture"), mode=mode)

    with pytest.raises(ConfigError, match=f"run chmod 600 {path}"):
        KeyRing(path)


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640, 0o440])
def test_a_file_of_the_owner_and_the_group_that_reads_it_is_taken(tmp_path: Path, mode: int) -> None:
    assert KeyRing(write(tmp_path / "keys.json", entry("alice", "capture"), mode=mode)).has_file


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([entry("alice", "stear")], "unknown role 'stear'; known: admin, capture, steer"),
        ([entry("alice")], "has no role"),
        ([entry("alice", "capture"), entry("alice", "steer", key="b")], "several keys have the name 'alice'"),
        ([entry("alice", "capture"), entry("bob", "capture", key="alice")], "alice, bob have the same sha256"),
        ([{"name": "alice", "sha256": "a-key", "roles": ["capture"]}], "headgate keys hash"),
        ([{**entry("alice", "capture"), "key": "a-key"}], "unknown field `key`"),
        ([entry("a/b", "capture")], "name 'a/b'"),
        ([entry("env.steer.1", "capture")], "names a key of the environment"),
        ([entry("alice", "capture", tags=["../x"])], "no pattern of tags"),
        ([entry("alice", "capture", tags=["alice-*"], default_tag="bob")], "not among its tags"),
        ([entry("alice", "capture", sites={"post_block": "all"})], "post_block"),
        ([entry("alice", "capture", limits={"max_bytes_per_day": -1})], "must not be negative"),
        ([entry("alice", "capture", limits={"max_byte_per_day": 1})], "unknown field"),
        ([entry("alice", "capture", expires="2030-01-01T00:00:00")], "time zone"),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_wrong(
    tmp_path: Path, entries: list[dict[str, Any]], expected: str
) -> None:
    path = write(tmp_path / "keys.json", *entries)

    with pytest.raises(ConfigError, match="keys file ") as raised:
        KeyRing(path)
    assert expected in str(raised.value)


def test_counted_limits_need_a_file_where_several_processes_serve(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.json", entry("alice", "capture", limits={"max_requests_per_day": 1}))

    assert KeyRing(path).has_file
    with pytest.raises(ConfigError, match="--headgate-usage FILE"):
        KeyRing(path, is_counting=False)


def test_entries_are_added_to_a_file_that_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add_entry(path, entry("alice", "capture"), known_roles)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    add_entry(path, entry("bob", "steer", tags=["bob-*"]), known_roles)

    assert [key.name for key in read_keys(path, known_roles)] == ["alice", "bob"]
    assert path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(ConfigError, match="several keys have the name 'bob'"):
        add_entry(path, entry("bob", "capture", key="other"), known_roles)
    assert os.listdir(tmp_path) == ["keys.json"]
