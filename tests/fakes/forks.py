"""Python programs that begin in forks of a process with vLLM imported: importing it takes 13 s of a core each time.

.ci/run_tests.py keeps such a process for what tests and their engines start (`keep`), and `Fork` asks it for one. What
a fork runs is what ``python ARGUMENTS`` would: arguments, environment, folder and output are its own.
"""

from __future__ import annotations

import atexit
import fcntl
import importlib
import json
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from setproctitle import getproctitle

ADDRESS = "TESTS_FORKS"
"""The environment variable with the address of the process that forks; without it programs start as usual."""
_NUMBER = 8
"""Bytes of a number on the link: the length of a message, a process id, or its exit status when it has ended."""
_MAX_FILES = 16
_ABOVE = 512
"""Numbers of open files that no program is given."""


class Fork:
    """A program in a fork, with the part of `subprocess.Popen` that servers and child processes need.

    Args:
        arguments: What ``python`` would get: ``-m MODULE`` or ``-c TEXT``, and the program's own.
        environment: All of its environment.
        files: Open files of this process that it gets, by their numbers there; without any, it prints to `stdout`.
        folder: Where it runs; this process's own, if none is named.

    Attributes:
        pid: Of the process, which leads a session.
        stdout: What it prints, errors included, if it was given no files.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        files: Mapping[int, int] | None = None,
        folder: Path | None = None,
    ) -> None:
        writing = None
        if files is None:
            reading, writing = os.pipe()
            self.stdout = os.fdopen(reading, "r", errors="replace")
            files = {1: writing, 2: writing}
        self._link = socket.socket(socket.AF_UNIX)
        self._link.connect(f"\0{os.environ[ADDRESS]}")
        asked = json.dumps([list(arguments), dict(environment), str(folder or Path.cwd()), list(files)]).encode()
        socket.send_fds(self._link, [len(asked).to_bytes(_NUMBER, "little")], list(files.values()))
        if writing is not None:
            os.close(writing)
        self._link.sendall(asked)
        self.pid = self._receive()
        self._status: int | None = None
        self._is_waiting = threading.Lock()

    def send_signal(self, number: int) -> None:
        """Send it a signal; nothing happens after `wait` returned."""
        if self._status is None:
            os.kill(self.pid, number)  # until the link is closed it stays a zombie, and its number its own

    def kill(self) -> None:
        """End it, now."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; returns its exit status, negative after a signal.

        Raises:
            subprocess.TimeoutExpired: If it goes on after so many seconds.
        """
        with self._is_waiting:
            if self._status is None:
                self._link.settimeout(timeout)
                try:
                    self._status = self._receive()
                except TimeoutError as error:
                    raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0) from error
                self._link.close()
            return self._status

    def _receive(self) -> int:
        found = self._link.recv(_NUMBER, socket.MSG_WAITALL)
        if len(found) < _NUMBER:
            raise RuntimeError("the process that forks has ended")
        return int.from_bytes(found, "little", signed=True)


CALLED = "import sys; from tests.fakes.forks import serve_calls; serve_calls(int(sys.argv[1]))"


class ForkedCalls(Executor):
    """Functions that run in a fork, one after the other; `submit` returns when its function has."""

    def __init__(self) -> None:
        self._link, theirs = Pipe()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with theirs:
            end = theirs.fileno()
            self._process = Fork(["-c", CALLED, str(end)], environment, {file: file for file in (1, 2, end)})

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `concurrent.futures.Executor.submit`."""
        self._link.send_bytes(pickle.dumps((fn, args, kwargs)))
        found, error = pickle.loads(self._link.recv_bytes())
        future: Future[Any] = Future()
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(found)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the fork."""
        self._link.close()
        self._process.wait()


def serve_calls(end: int) -> None:
    """Run what `ForkedCalls` sends, until that closes its end of the pipe."""
    link = Connection(end)
    with suppress(EOFError):
        while True:
            function, arguments, keywords = pickle.loads(link.recv_bytes())
            answer: tuple[Any, Exception | None]
            try:
                answer = function(*arguments, **keywords), None
            except Exception as error:  # noqa: BLE001 whatever it is, it is raised on the other side
                error.add_note(traceback.format_exc())
                answer = None, error
            link.send_bytes(pickle.dumps(answer))


class Forking:
    """Stands for the module ``subprocess`` where headgate starts a Python of its own, which begins in a fork then."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    @staticmethod
    def Popen(command: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], **others: Any) -> Any:
        """The process, whose output is this one's."""
        if ADDRESS not in os.environ:
            return subprocess.Popen(command, env=env, pass_fds=pass_fds, **others)
        return Fork(command[1:], env, {file: file for file in (1, 2, *pass_fds)})


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
    while True:
        link, _ = listener.accept()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # its time of the processors becomes part of this one's
                pass
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
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)  # as an interpreter does
    except BaseException:  # noqa: BLE001 whatever it is, it is printed, and the status tells
        traceback.print_exc()
        status = status or 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)


def _attend(link: socket.socket) -> int:
    """Fork what is asked for, send its process id and, once it has ended, how; reap it when the other side closes.

    This process ends before it if the other side does.
    """
    size, files, _, _ = socket.recv_fds(link, _NUMBER, _MAX_FILES)
    asked = link.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL)
    if not (process := os.fork()):
        link.close()
        finish(lambda: _run(files, *json.loads(asked)))
    for file in files:
        os.close(file)
    link.sendall(process.to_bytes(_NUMBER, "little"))
    end = os.pidfd_open(process)
    if end not in select.select([end, link.fileno()], [], [])[0]:
        return 0  # who asked for it is gone: so is its parent now, which it may look for
    ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    with suppress(OSError):
        link.sendall(status.to_bytes(_NUMBER, "little", signed=True))
        link.recv(1)
    os.waitpid(process, 0)
    return 0


def _run(
    files: Sequence[int], arguments: list[str], environment: dict[str, str], folder: str, numbers: list[int]
) -> int:
    """Be ``python ARGUMENTS``, with open files under these numbers."""
    os.setsid()
    aside = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(aside, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:1] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    importlib.invalidate_caches()
    sys.modules.pop("sitecustomize", None)
    with suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
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
