"""CPU time of the API server per request, with ten pages of the studio open and with none, in interleaved rounds.

::

    python -m tests.benchmarks.bench_studio_pages MODEL [--rounds 8] [--requests 40] [--pages 10]

Pages are opened by Chromium on the same machine; the figure is the CPU time of the API server's process alone, so that
the browser's own does not count. Views that ask for figures again and again (Server, Dynamic) are measured, too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import httpx
from playwright.sync_api import Browser, sync_playwright

from tests.fakes.server import Server, serving

COMMAND = ["-c", "from headgate.capture.cli import main; main()", "serve"]
FLAGS = [
    *("--served-model-name", "smollm2", "--enforce-eager", "--block-size", "32", "--max-model-len", "1024"),
    *("--steering-op-sites", '{"post_mlp": "all"}', "--capture-consumers", "inline:max_bytes=4000000", "lens"),
]
VIEWS = ("Chat", "Server", "Dynamic")


class Round(NamedTuple):
    """One round: CPU milliseconds of the API server for each request, and seconds that the round took."""

    cpu_ms: float
    seconds: float


def cpu_ms(pid: int) -> float:
    """Milliseconds that a process has run, in all its threads."""
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        fields = file.read().rpartition(")")[2].split()
    return 1000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def pages(browser: Browser, server: Server, count: int, view: str) -> Iterator[None]:
    """Keep `count` pages of a view open."""
    contexts = [browser.new_context() for _ in range(count)]
    try:
        for context in contexts:
            page = context.new_page()
            page.goto(f"{server.url}/headgate/")
            page.get_by_role("navigation").get_by_role("button", name=view, exact=True).click()
        time.sleep(3)  # what opening asks is no part of the figure
        yield
    finally:
        for context in contexts:
            context.close()


def measure(server: Server, requests: int) -> Round:
    """Send requests one after the other."""
    before, began = cpu_ms(server.pid), time.monotonic()
    messages = [{"role": "user", "content": "How was your day?"}]
    with httpx.Client(timeout=120) as client:
        for _ in range(requests):
            body = {"model": "smollm2", "messages": messages, "max_tokens": 16, "temperature": 0}
            client.post(f"{server.url}/v1/chat/completions", json=body).raise_for_status()
    return Round((cpu_ms(server.pid) - before) / requests, time.monotonic() - began)


def compare(browser: Browser, server: Server, arguments: argparse.Namespace, view: str) -> None:
    """Print the figures of one view."""
    without, with_pages = [], []
    for _ in range(arguments.rounds):
        without.append(measure(server, arguments.requests))
        with pages(browser, server, arguments.pages, view):
            with_pages.append(measure(server, arguments.requests))
    for name, rounds in (("no page", without), (f"{arguments.pages} pages of {view}", with_pages)):
        print(f"{name:>20}: {described(rounds)}", flush=True)


def described(rounds: Sequence[Round]) -> str:
    """Return medians and the span of some rounds."""
    figures = sorted(each.cpu_ms for each in rounds)
    seconds = statistics.median(each.seconds for each in rounds)
    return (
        f"{statistics.median(figures):.2f} ms of CPU per request ({figures[0]:.2f} to {figures[-1]:.2f}), "
        f"{seconds:.1f} s per round"
    )


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for name, default in (("rounds", 8), ("requests", 40), ("pages", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    chromium = os.environ.get("HEADGATE_CHROMIUM") or shutil.which("chromium")
    with serving([*COMMAND, arguments.model, *FLAGS]) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        measure(server, arguments.requests)
        for view in VIEWS:
            compare(browser, server, arguments, view)
        browser.close()


if __name__ == "__main__":
    main()
