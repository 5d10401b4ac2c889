"""A server process for tests: started, awaited by its own log, stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.deadlines import patience
from tests.fakes.forks import ADDRESS, Fork

READY = "Application startup complete."
END_S = 120
"""A server that was told to end does; with several processes on a busy machine it takes its time."""


@dataclass
class Server:
    """A running server.

    Attributes:
        url: Its address.
        log: Its last lines of output.
        pid: Its first process, which leads the session of all others.
    """

    url: str
    pid: int
    log: deque[str] = field(default_factory=lambda: deque(maxlen=400))

    def post(self, path: str, /, **body: object) -> httpx.Response:
        """POST a JSON body."""
        return httpx.post(f"{self.url}{path}", json=body, timeout=patience(60))

    def resources(self) -> dict[str, int]:
        """Threads, open sockets and other open files of all its processes; Linux only."""
        counts = {"threads": 0, "sockets": 0, "files": 0}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                session = int((process / "stat").read_text().rpartition(")")[2].split()[3])
                if session != self.pid:
                    continue
                counts["threads"] += len(list((process / "task").iterdir()))
                for file in (process / "fd").iterdir():
                    counts["sockets" if str(file.readlink()).startswith("socket:") else "files"] += 1
            except FileNotFoundError:
                continue  # it has ended, or was closed, meanwhile
        return counts


@contextmanager
def serving(
    command: Sequence[str],
    num_servers: int = 1,
    host: str = "127.0.0.1",
    log_lines: int = 400,
    *,
    may_fork: bool = True,
    **environment: str,
) -> Iterator[Server]:
    """Run ``python command --port ...`` until the block ends, with `environment` beside this process's own.

    Its last `log_lines` lines of output are kept. Where a process keeps vLLM imported, it begins in a fork of that one,
    unless it may not, such as one for a ``sitecustomize`` that must come before all imports.

    Raises:
        AssertionError: If it ends before it is ready; the message holds its output.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [*command, "--host", host, "--port", str(port)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
    forks = may_fork and ADDRESS in os.environ and command[0] in ("-m", "-c")
    process = Fork(arguments, environment) if forks else _started(arguments, environment)
    assert process.stdout is not None
    server = Server(f"http://127.0.0.1:{port}", process.pid, deque(maxlen=log_lines))
    try:
        for line in process.stdout:
            server.log.append(line)
            num_servers -= READY in line
            if num_servers == 0:
                break
        assert num_servers == 0, "the server did not start:\n" + "".join(server.log)
        reader = threading.Thread(target=server.log.extend, args=(process.stdout,))
        reader.start()
        yield server
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(patience(END_S))
        finally:
            # Whatever it has started is in its session, and must not outlive the test.
            kill_session(process.pid)
            process.wait()
    reader.join()
    process.stdout.close()


def _started(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=environment,
    )


def known_flags(*flags: str) -> list[str]:
    """Those of vLLM's flags that the release at hand has."""
    import vllm

    folder = Path(vllm.__file__).parent
    files = [*(folder / "entrypoints").rglob("cli_args.py"), folder / "engine" / "arg_utils.py"]
    source = "".join(file.read_text() for file in files)
    return [flag for flag in flags if flag.removeprefix("--").replace("-", "_") in source]


def kill_session(pid: int) -> None:
    """Kill every process of the session that `pid` led."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
