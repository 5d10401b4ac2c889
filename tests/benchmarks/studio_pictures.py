"""The pictures of the studio's guide, and how fast its page is there, on the server of ``headgate studio --demo``.

::

    python -m tests.benchmarks.studio_pictures FOLDER [--visits 5]

It writes ``studio-chat.png``, ``studio-grid.png``, ``studio-attention.png`` and ``studio-steer.png``, and with
``--small`` each view at the width of a phone and in dark colours beside them, to be looked at. Then it prints the
seconds from the beginning of the navigation until a question can be sent, with an empty cache and on a server that
answers nobody else: the median of `--visits` visits, and all of them.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.fakes.server import Server, serving

COMMAND = ["-c", "from headgate.capture.cli import main; main()", "studio", "--demo"]
FLAGS = [
    *("--capture-sites", '{"post_mlp": "all", "q": [12], "k": [12]}'),
    *("--capture-consumers", "inline:max_bytes=67108864", "lens", "attention"),
]
SIZE, PHONE = (1180, 700), (375, 700)
COLOURS = 256
LIMIT_MS = 300_000
QUESTION = "How was your day?"
PARIS = 42
"""The position of the token " Paris" in the answer to the second question."""


def show(page: Page, view: str) -> None:
    """Change to a view."""
    page.get_by_role("navigation").get_by_role("button", name=view, exact=True).click()


def ask(page: Page, text: str) -> None:
    """Ask, and wait for all answers and their comparison."""
    page.get_by_label("Your message").fill(text)
    page.get_by_label("Your message").press("Enter")
    answers = page.locator("li.turn.assistant").last.locator(".run")
    expect(answers.last).to_have_attribute("data-status", "done")
    if answers.count() == 2:
        expect(page.get_by_text("nats likelier")).to_be_visible()


def make_vector(page: Page) -> None:
    """Make the vector that the page suggests, and steer with it."""
    show(page, "Steer")
    page.get_by_role("button", name="Make it").click()
    expect(page.locator("svg circle").first).to_be_visible()
    page.get_by_label("Scale of joy").fill("4")


def take_steer(page: Page) -> None:
    """A vector of two lists of prompts, with its dose in the answer that was read before."""
    page.get_by_label("Layer", exact=True).select_option("12")
    ask(page, QUESTION)
    make_vector(page)
    page.get_by_label("Scale of joy").blur()


def take_chat(page: Page) -> None:
    """A plain and a steered answer, with the card of a token."""
    page.get_by_role("button", name="Register on the server").click()
    expect(page.get_by_text("registered, at")).to_be_visible()
    show(page, "Chat")
    page.get_by_role("button", name="New conversation").click()
    page.get_by_label("cosine to joy").check()
    ask(page, QUESTION)
    page.get_by_label("Colour by").select_option("score:cosine joy")
    page.locator(".run.steered .token").nth(4).hover()


def take_grid(page: Page) -> None:
    """What the logit lens reads of a plain answer."""
    show(page, "Steer")
    page.get_by_role("checkbox", name="joy", exact=True).uncheck()
    show(page, "Chat")
    page.get_by_role("button", name="New conversation").click()
    ask(page, "What is the capital of France?")
    page.get_by_role("button", name="Layer by layer").click()
    page.get_by_label("Lens").select_option("logit")
    page.get_by_role("button", name="Read all layers").click()
    page.get_by_label("Shows").select_option("lens")
    page.locator(".canvas").evaluate("(box) => { box.scrollLeft = box.scrollWidth; }")


def take_attention(page: Page) -> None:
    """The heads of a layer, and the keys of the token Paris."""
    show(page, "Attention")
    page.get_by_role("button", name="Read its attention").click()
    pattern = page.get_by_role("application")
    for _ in range(PARIS + 1):
        pattern.press("ArrowDown")
    pattern.blur()
    page.evaluate("scrollTo(0, 0)")


TAKES: dict[str, Callable[[Page], None]] = {
    "steer": take_steer,
    "chat": take_chat,
    "grid": take_grid,
    "attention": take_attention,
}
"""Names of pictures in the order in which they are taken, and what is done before each."""


def save(page: Page, path: Path) -> None:
    """Write what is seen of a page, with few colours."""
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


def save_variants(page: Page, path: Path) -> None:
    """Write a page at the width of a phone, and in dark colours."""
    page.emulate_media(color_scheme="dark")
    page.screenshot(path=path.with_suffix(".dark.png"), full_page=True)
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    page.screenshot(path=path.with_suffix(".phone.png"), full_page=True)
    page.set_viewport_size({"width": SIZE[0], "height": SIZE[1]})


def take_pictures(browser: Browser, server: Server, folder: Path, with_small: bool) -> None:
    """Take all pictures."""
    page = browser.new_page(viewport={"width": SIZE[0], "height": SIZE[1]})
    page.set_default_timeout(LIMIT_MS)
    page.goto(f"{server.url}/headgate/")
    for name, take in TAKES.items():
        take(page)
        save(page, folder / f"studio-{name}.png")
        if with_small:
            save_variants(page, folder / f"studio-{name}.png")
    page.close()


READY = """(question) => {
  const button = [...document.querySelectorAll("button")].find((each) => each.textContent === question);
  return button && !button.disabled ? performance.now() : null;
}"""
"""Milliseconds since the navigation began, once the question can be clicked; looked at in each frame."""


def first_view_s(browser: Browser, server: Server) -> float:
    """Seconds from the beginning of the navigation until a question can be sent, with an empty cache."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{server.url}/headgate/", wait_until="commit")
    found: float = page.wait_for_function(READY, arg=QUESTION, timeout=LIMIT_MS).json_value()
    context.close()
    return found / 1000


def main() -> None:
    """Take the pictures and measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--visits", type=int, default=5)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    chromium = os.environ.get("HEADGATE_CHROMIUM") or shutil.which("chromium")
    expect.set_options(timeout=LIMIT_MS)
    with serving([*COMMAND, *FLAGS]) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        first_view_s(browser, server)  # the browser's own first page is no part of the figure
        seconds = [first_view_s(browser, server) for _ in range(arguments.visits)]
        print(f"first view: median {statistics.median(seconds):.2f} s of {[round(each, 2) for each in seconds]}")
        take_pictures(browser, server, arguments.folder, arguments.small)
        browser.close()


if __name__ == "__main__":
    main()
