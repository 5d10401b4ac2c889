"""Programs in a Python of their own, which begins with what this one has imported where that is possible.

Importing vLLM takes 13 s of a core. Where .ci/run_tests.py has imported it, and nothing was started here since, a fork
is as good as a new process and has it already.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from subprocess import CompletedProcess
from typing import NoReturn

from tests.fakes.forks import ADDRESS, Fork

ROOT = Path(__file__).resolve().parent.parent
OURS = (ROOT, ROOT / ".ci", ROOT / "tests")
"""Entries of ``sys.path`` that a new process lacks."""


def run_python(
    arguments: Sequence[str], *, cwd: Path = ROOT, environment: Mapping[str, str], may_fork: bool
) -> CompletedProcess[str]:
    """Run ``python ARGUMENTS`` to its end, without input.

    Args:
        arguments: A program's path or ``-m`` and a module's name, and what it is given.
        cwd: Where it runs.
        environment: Set there beside what is set here.
        may_fork: Whether it may begin with the modules of this process; it must not depend on variables that these
            read when they are imported.

    Returns:
        Its status, negative after a signal, and what it and its own processes wrote to each stream.
    """
    if may_fork and ADDRESS in os.environ and arguments[0] == "-m":
        return _forked_elsewhere(arguments, cwd, environment)
    if may_fork and is_ready():
        return _forked(arguments, cwd, environment)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def fresh_cache(folder: Path) -> Path:
    """A folder for ``VLLM_CACHE_ROOT`` that holds nothing compiled, but what vLLM knows of its classes of models.

    To find that out, vLLM starts a process that imports it all once more.
    """
    known = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vllm" / "modelinfos"
    known.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / known.name).symlink_to(known)
    return folder


def is_ready() -> bool:
    """Whether vLLM is imported here and no thread runs beside this one, which a fork would lack."""
    return "vllm" in sys.modules and len(os.listdir("/proc/self/task")) == 1


def _forked_elsewhere(arguments: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> CompletedProcess[str]:
    """Run it in a fork of the process that is kept for this, whatever was imported and started here."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = Fork(arguments, {**os.environ, **environment}, {1: out.fileno(), 2: err.fileno()}, cwd)
        try:
            status = process.wait()
        except BaseException:  # pytest's timeout, for one
            os.killpg(process.pid, signal.SIGKILL)  # with what it started: it leads a session
            process.wait()
            raise
        out.seek(0)
        err.seek(0)
        return CompletedProcess(arguments, status, out.read(), err.read())


def _forked(arguments: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> CompletedProcess[str]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            if stream is not None:
                stream.flush()  # or both processes write what it holds
        process = os.fork()
        if not process:
            _become(arguments, cwd, environment, (out.fileno(), err.fileno()))
        try:
            _, status = os.waitpid(process, 0)
        except BaseException:  # pytest's timeout, for one
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            raise
        out.seek(0)
        err.seek(0)
        return CompletedProcess(arguments, os.waitstatus_to_exitcode(status), out.read(), err.read())


def _become(arguments: Sequence[str], cwd: Path, environment: Mapping[str, str], streams: tuple[int, int]) -> NoReturn:
    """Be that program, in a fork; as Python does it, an error is printed and makes the status 1."""
    status = 1
    try:
        _forget_pytest(streams)
        os.chdir(cwd)
        os.environ.update(environment)
        status = _run(arguments)
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
        util._exit_function()  # type: ignore[attr-defined]  # and for processes
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 whatever it is, the parent is told
        traceback.print_exc()
        status = status or 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def _forget_pytest(streams: tuple[int, int]) -> None:
    """Streams, hooks and duties as they are when Python begins."""
    atexit._clear()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, stream in zip((1, 2), streams, strict=True):
        os.dup2(stream, number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, 1, closefd=False) for number, mode in enumerate("rww"))
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    warnings.resetwarnings()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _run(arguments: Sequence[str]) -> int:
    """Run the program; returns its status."""
    is_module = arguments[0] == "-m"
    name, given = (arguments[1], arguments[2:]) if is_module else (arguments[0], arguments[1:])
    first = Path.cwd() if is_module else Path(name).resolve().parent
    sys.argv = [name, *given]
    sys.path[:] = [str(first), *(path for path in sys.path if path and Path(path).resolve() not in OURS)]
    for module in [module for module in sys.modules if module.partition(".")[0] in ("examples", "tests")]:
        del sys.modules[module]  # found if the program's own path leads there
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, int | None):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    return 0
