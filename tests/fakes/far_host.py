"""Another host, on this machine: a network namespace with a cable to this one, and folders of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from headgate.capture.links.network import NetworkKeys, write_keys
from tests.deadlines import patience

MOUNT = 'while [ "$1" != -- ]; do mount --bind "$2" "$1"; shift 2; done; shift; exec "$@"'
"""Puts folders in the place of others, for one command and what it starts."""
TRIAL = """
unshare -m sh -c 'mount --bind /tmp /tmp' && ip netns add "$1" || exit
ip link add "$1a" type veth peer name "$1b" netns "$1" && ip link set "$1a" up
found=$?
ip netns del "$1"
exit $found
"""
"""Makes and removes what a host needs: a container may have root and lack the right to some of it."""
END_S = 60
THREADS = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}


def is_possible() -> bool:
    """Whether this machine lets us have one: it takes root, ``ip`` and ``unshare``."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("unshare")):
        return False
    return subprocess.run(["sh", "-c", TRIAL, "sh", f"hg{secrets.token_hex(3)}"], check=False).returncode == 0


class FarHost:
    """The host. Everything that ran there ends with it.

    Args:
        folders: Of this host, each with the one that is in its place there; a folder for temporary files among them,
            or the host would have this one's sockets.

    Attributes:
        here: IP address of this host, at the cable.
        there: IP address of the other.
        log: The last lines of what runs there.
    """

    def __init__(self, folders: Mapping[Path, Path]) -> None:
        self._folders = folders
        self._name = f"hg{secrets.token_hex(3)}"
        self._near, self._far = f"{self._name}a", f"{self._name}b"
        net = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(256)}"
        self.here, self.there = f"{net}.1", f"{net}.2"
        self.log: deque[str] = deque(maxlen=400)
        self._running: list[tuple[subprocess.Popen[str], threading.Thread]] = []
        _ip("netns", "add", self._name)
        _ip("link", "add", self._near, "type", "veth", "peer", "name", self._far, "netns", self._name)
        _ip("addr", "add", f"{self.here}/24", "dev", self._near)
        _ip("-n", self._name, "addr", "add", f"{self.there}/24", "dev", self._far)
        _ip("-n", self._name, "link", "set", "lo", "up")
        _ip("-n", self._name, "link", "set", self._far, "up")
        self.mend()

    def cut(self) -> None:
        """Pull the cable: nothing passes, and nobody is told."""
        _ip("link", "set", self._near, "down")

    def mend(self) -> None:
        """Put the cable in."""
        _ip("link", "set", self._near, "up")

    def variables(self, address: str) -> dict[str, str]:
        """What vLLM needs to know of the network, at one of the addresses."""
        device = self._near if address == self.here else self._far
        return {"VLLM_HOST_IP": address, "GLOO_SOCKET_IFNAME": device, **THREADS}

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start ``python command`` there, in a session of its own."""
        mounts = [str(folder) for pair in self._folders.items() for folder in pair]
        enter = ["ip", "netns", "exec", self._name, "unshare", "-m", "sh", "-c", MOUNT, "sh", *mounts, "--"]
        process = subprocess.Popen(
            [*enter, sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, **self.variables(self.there), **environment, "PYTHONUNBUFFERED": "1"},
        )
        assert process.stdout is not None
        reader = threading.Thread(target=self.log.extend, args=(process.stdout,))
        reader.start()
        self._running.append((process, reader))
        return process

    def close(self) -> None:
        """End what runs there, and take the host away."""
        for process, _ in self._running:
            process.send_signal(signal.SIGINT)
        for process, reader in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience(END_S))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            reader.join()
            assert process.stdout is not None
            process.stdout.close()
        _ip("netns", "del", self._name)


@contextlib.contextmanager
def far_host(folders: Mapping[Path, Path]) -> Iterator[FarHost]:
    """A host until the block ends; see `FarHost`."""
    host = FarHost(folders)
    try:
        yield host
    except BaseException:
        sys.stderr.write("".join(host.log))
        raise
    finally:
        host.close()


def second_host(
    stack: contextlib.ExitStack, environment: pytest.MonkeyPatch, folders: pytest.TempPathFactory
) -> tuple[FarHost, dict[str, str]]:
    """Add a host to this one for an engine; return that, and headgate's settings of the network.

    The test is skipped where it is not possible.
    """
    if not is_possible():
        pytest.skip("another host takes root, ip and unshare")
    keys = folders.mktemp("keys") / "keys"
    write_keys(keys, NetworkKeys.make())
    here = folders.mktemp("here")
    environment.setenv("TMPDIR", str(here))
    environment.setattr(tempfile, "tempdir", None)
    host = stack.enter_context(far_host({here: folders.mktemp("there")}))
    for name, value in host.variables(host.here).items():
        environment.setenv(name, value)
    return host, {"listen": host.here, "keys_file": str(keys)}


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def node_command(model: Path, flags: Mapping[str, object]) -> list[str]:
    """Return the command of a host without a front end: ``headgate serve --headless``, with flags as `LLM` has them."""
    given = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if value is not True]
    switches = [f"--{name.replace('_', '-')}" for name, value in flags.items() if value is True]
    return ["-c", "from headgate.capture.cli import main; main()", "serve", str(model), "--headless", *given, *switches]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
