"""Python programs that begin in forks of a process with vLLM imported: importing it takes 13 s of a core each time.

.ci/run_tests.py keeps such a process for the servers that tests start (`keep`), and `Fork` asks it for one. What a fork
runs is what ``python ARGUMENTS`` would: arguments, environment, folder and output are its own.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from setproctitle import getproctitle

ADDRESS = "TESTS_FORKS"
"""The environment variable with the address of the process that forks; without it programs start as usual."""
_NUMBER = 8
"""Bytes of a number on the link: the length of a message, a process id, or 0 when that process has ended."""


class Fork:
    """A program in a fork, with the part of `subprocess.Popen` that servers need.

    Args:
        arguments: What ``python`` would get: ``-m MODULE`` or ``-c TEXT``, and the program's own.
        environment: All of its environment.

    Attributes:
        pid: Of the process, which leads a session.
        stdout: What it prints, errors included.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        reading, writing = os.pipe()
        self.stdout = os.fdopen(reading, "r", errors="replace")
        self._link = socket.socket(socket.AF_UNIX)
        self._link.connect(f"\0{os.environ[ADDRESS]}")
        asked = json.dumps([list(arguments), dict(environment), str(Path.cwd())]).encode()
        socket.send_fds(self._link, [len(asked).to_bytes(_NUMBER, "little")], [writing])
        os.close(writing)
        self._link.sendall(asked)
        self.pid = self._receive()
        self._has_ended = False

    def send_signal(self, number: int) -> None:
        """Send it a signal; nothing happens after `wait` returned."""
        if not self._has_ended:
            os.kill(self.pid, number)  # until the link is closed it stays a zombie, and its number its own

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: If it goes on after so many seconds.
        """
        if self._has_ended:
            return
        self._link.settimeout(timeout)
        try:
            self._receive()
        except TimeoutError as error:
            raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0) from error
        self._has_ended = True
        self._link.close()

    def _receive(self) -> int:
        found = self._link.recv(_NUMBER, socket.MSG_WAITALL)
        if len(found) < _NUMBER:
            raise RuntimeError("the process that forks has ended")
        return int.from_bytes(found, "little")


def keep() -> int:
    """Fork a process that forks whenever it is asked to, and set `ADDRESS`; returns its process id."""
    getproctitle()  # the first call looks where the title lies in memory, and finds it in front of this environment
    listener = socket.socket(socket.AF_UNIX)
    address = f"headgate-forks-{os.getpid()}"
    listener.bind(f"\0{address}")  # no file
    listener.listen(64)
    if keeper := os.fork():
        listener.close()
        os.environ[ADDRESS] = address
        return keeper
    os.setsid()  # a terminal's signals are not for it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # what ends needs no waiting for
    while True:
        link, _ = listener.accept()
        if not os.fork():
            listener.close()
            finish(partial(_attend, link))
        link.close()


def finish(call: Callable[[], int]) -> NoReturn:
    """End this fork with the status that `call` returns, as an interpreter ends, but for taking all modules apart."""
    status = 1
    try:
        status = call()
        threading._shutdown()  # type: ignore[attr-defined]  # it waits for threads
        atexit._run_exitfuncs()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 whatever it is, it is printed, and the status tells
        traceback.print_exc()
        status = status or 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)


def _attend(link: socket.socket) -> int:
    """Fork what is asked for, send its process id and, once it has ended, 0; reap it when the other side closes."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, (output,), _, _ = socket.recv_fds(link, _NUMBER, 1)
    asked = link.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL)
    if not (process := os.fork()):
        link.close()
        finish(lambda: _run(output, *json.loads(asked)))
    os.close(output)
    link.sendall(process.to_bytes(_NUMBER, "little"))
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    with suppress(OSError):
        link.sendall(bytes(_NUMBER))
        link.recv(1)
    os.waitpid(process, 0)
    return 0


def _run(output: int, arguments: list[str], environment: dict[str, str], folder: str) -> int:
    """Be ``python ARGUMENTS``."""
    os.setsid()
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:1] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    importlib.invalidate_caches()
    kind, program, *sys.argv[1:] = arguments
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv[0] = kind
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(program, main.__dict__)
    else:
        raise ValueError(f"a fork runs -m MODULE or -c TEXT, not {kind!r}")
    return 0
