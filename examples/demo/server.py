"""vLLM's OpenAI server as a child process, with headgate configured."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

READY_S = 1200.0
"""Much more than an idle machine needs: a loaded one was ready after 298 s."""
STOP_S = 30.0
POLL_S = 0.25
SIGN_OF_LIFE_S = 15.0


class ServerError(RuntimeError):
    """The server did not start; the message has the first error and the last lines of its log."""


class Server:
    """``vllm serve`` on a free port of this machine, from `__enter__` to `__exit__`.

    Attributes:
        url: ``http://127.0.0.1:PORT``.
        command: What was started.
        log: Everything it printed.

    Args:
        still_starting: Called with the seconds that have passed, every `SIGN_OF_LIFE_S` until the server is ready.
    """

    def __init__(
        self,
        model: Path,
        *,
        headgate: dict[str, Any],
        dtype: str,
        log: Path,
        still_starting: Callable[[float], None] = lambda passed_s: None,
    ) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._still_starting = still_starting
        self.command = [
            *(str(Path(sys.executable).with_name("vllm")), "serve", str(model)),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--served-model-name", model.name),
            *("--dtype", dtype),
            *("--max-model-len", "1024", "--max-num-batched-tokens", "512", "--max-num-seqs", "16"),
            *("--block-size", "32"),  # what vLLM's CPU attention needs
            *("--shutdown-timeout", "20"),  # time to write what is still queued; vLLM's default is to kill at once
            "--enforce-eager",  # torch.compile works as well; it only takes longer to start
            *("--additional-config", json.dumps({"headgate": headgate})),
        ]

    def __enter__(self) -> Server:
        environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ask the server to finish what it has, and wait for it."""
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_until_ready(self) -> None:
        started = told = time.monotonic()
        while (now := time.monotonic()) - started < READY_S:
            if now - told >= SIGN_OF_LIFE_S:
                told = now
                self._still_starting(now - started)
            if self._process.poll() is not None:
                raise ServerError(f"the server ended with status {self._process.returncode}:\n{self._reason()}")
            if self._is_healthy():
                return
            time.sleep(POLL_S)
        raise ServerError(f"the server was not ready after {READY_S:.0f} s:\n{self._reason()}")

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2.0) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False  # not listening yet

    def _reason(self, num_lines: int = 15) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        causes = [line.partition("] ")[2] for line in lines if re.search(r"ERROR .*\b\w+(Error|Exception): ", line)]
        return "\n".join([*causes[:1], "...", *lines[-num_lines:], f"(all of it: {self.log})"])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
