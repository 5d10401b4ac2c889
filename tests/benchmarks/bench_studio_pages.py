"""CPU time of a server per request, with ten pages of each view of the studio open and with none, round by round.

::

    python -m tests.benchmarks.bench_studio_pages MODEL [--rounds 5] [--requests 20] [--pages 10] [--views Server ...]

Pages are opened by Chromium on the same machine. The figures are the CPU time of the API server's process and of all
processes of the server, its engine included, so that the browser's own does not count. In each round every view is
measured once, and no page before and after them; views that ask for figures again and again are Server and Dynamic.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
from playwright.sync_api import Browser, sync_playwright

from tests.fakes.server import Server, serving

COMMAND = ["-c", "from headgate.capture.cli import main; main()", "serve"]
FLAGS = [
    *("--served-model-name", "smollm2", "--enforce-eager", "--block-size", "32", "--max-model-len", "1024"),
    *("--capture-sites", '{"post_mlp": "all", "q": [5], "k": [5]}', "--steering-op-sites", '{"post_mlp": "all"}'),
]
NO_PAGE = "no page"
VIEWS = ("Chat", "Grid", "Attention", "Features", "Steer", "Dynamic", "Captures", "Server")


class Round(NamedTuple):
    """One measurement: CPU milliseconds for each request, of the API server and of all processes, and its seconds."""

    api_ms: float
    all_ms: float
    seconds: float


def cpu_ms(server: Server) -> tuple[float, float]:
    """Milliseconds that a server's first process and all its processes have run, in all their threads."""
    own = total = 0.0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            continue  # it has ended meanwhile
        if int(fields[3]) != server.pid:
            continue
        spent = 1000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        total += spent
        if int(process.name) == server.pid:
            own = spent
    return own, total


@contextmanager
def pages(browser: Browser, server: Server, count: int, view: str) -> Iterator[None]:
    """Keep `count` pages of a view open; none of `NO_PAGE`."""
    contexts = [browser.new_context() for _ in range(0 if view == NO_PAGE else count)]
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
    before, began = cpu_ms(server), time.monotonic()
    messages = [{"role": "user", "content": "How was your day?"}]
    with httpx.Client(timeout=120) as client:
        for _ in range(requests):
            body = {"model": "smollm2", "messages": messages, "max_tokens": 16, "temperature": 0}
            client.post(f"{server.url}/v1/chat/completions", json=body).raise_for_status()
    api, everything = ((now - then) / requests for now, then in zip(cpu_ms(server), before, strict=True))
    return Round(api, everything, time.monotonic() - began)


def described(name: str, rounds: list[Round], without: list[Round]) -> str:
    """Return medians of a view's rounds, and their difference to those without a page."""
    api, everything, seconds = (statistics.median(each) for each in zip(*rounds, strict=True))
    more = statistics.median(each.api_ms for each in without), statistics.median(each.all_ms for each in without)
    return (
        f"{name:>10}: API server {api:6.2f} ms ({api - more[0]:+5.2f}), all processes {everything:7.2f} ms "
        f"({everything - more[1]:+6.2f}) of CPU per request, {seconds:.1f} s per round"
    )


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--sae", help="A file for the consumer features; without it there is no view Features.")
    parser.add_argument("--views", nargs="+", choices=VIEWS, default=VIEWS)
    for name, default in (("rounds", 5), ("requests", 20), ("pages", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    chromium = os.environ.get("HEADGATE_CHROMIUM") or shutil.which("chromium")
    features = [f'features:saes={{"sae":"{arguments.sae}"}}'] if arguments.sae else []
    consumers = ["--capture-consumers", "inline:max_bytes=4000000", "lens", "attention", *features]
    views = [view for view in arguments.views if view != "Features" or features]
    found: dict[str, list[Round]] = defaultdict(list)
    with serving([*COMMAND, arguments.model, *FLAGS, *consumers]) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        measure(server, arguments.requests)
        for _ in range(arguments.rounds):
            for view in (NO_PAGE, *views, NO_PAGE):
                with pages(browser, server, arguments.pages, view):
                    found[view].append(measure(server, arguments.requests))
        browser.close()
    for view, rounds in found.items():
        print(described(view, rounds, found[NO_PAGE]), flush=True)


if __name__ == "__main__":
    main()
