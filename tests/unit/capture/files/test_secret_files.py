"""Files of secrets: whose they may be, and who else may read or change them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from headgate.capture.engine.access.key_ring import read_keys
from headgate.capture.files.reading import MAX_SECRET_BYTES, read_secret
from headgate.capture.links import network
from headgate.capture.schema.config import NetworkConfig
from headgate.capture.schema.errors import ConfigError
from headgate.consumers.stream.wire import read_token

READERS: dict[str, Callable[[Path], object]] = {
    "keys of clients": lambda path: read_keys(path, lambda: ("capture",)),
    "keys of hosts": lambda path: network.read_keys(NetworkConfig(keys_file=str(path))),
    "token of a stream": lambda path: read_token(str(path)),
}


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("x" * 40)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601, 0o620, 0o660, 0o644])
def test_nobody_else_may_read_it_nor_the_group_change_it(secret: Path, kind: str, mode: int) -> None:
    secret.chmod(mode)

    with pytest.raises(ConfigError, match=f"{secret}: its mode {mode:04o} lets other users .* run chmod 600 {secret}"):
        READERS[kind](secret)


@pytest.mark.parametrize("kind", READERS)
def test_it_belongs_to_this_user_or_to_root(secret: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fstat

    def of_another(descriptor: int) -> os.stat_result:
        found = list(real(descriptor))
        found[4] = os.geteuid() + 1
        return os.stat_result(found)

    monkeypatch.setattr("headgate.capture.files.reading.os.fstat", of_another)

    with pytest.raises(ConfigError, match=f"belongs to the user {os.geteuid() + 1}.* run chown {os.geteuid()}"):
        READERS[kind](secret)
    assert read_token(str(secret), is_reader=True) == b"x" * 40


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o600, 0o640])
def test_its_group_may_read_it(secret: Path, mode: int) -> None:
    secret.chmod(mode)

    assert read_secret(secret, "secret") == b"x" * 40


def test_what_is_no_file_of_secrets_is_refused(secret: Path) -> None:
    secret.write_bytes(bytes(MAX_SECRET_BYTES + 1))

    with pytest.raises(ConfigError, match=f"secret {secret}: has more than {MAX_SECRET_BYTES} bytes"):
        read_secret(secret, "secret")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_secret(secret.parent, "secret")
    with pytest.raises(ConfigError, match="No such file"):
        read_secret(secret.with_name("none"), "secret")
