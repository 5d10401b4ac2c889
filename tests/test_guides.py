"""The guides: the blocks of a page, pasted in order, run and print what the page shows.

Python blocks of a page become one program. A block that begins with ``# NAME.py`` is a file, and entry points of a
TOML block are published. Shell blocks run where they stand; one that begins with ``headgate serve`` starts a server,
and what follows runs against it, in a new program. A block after ``<!-- not run: REASON -->`` is left out.

A ``text`` block is what the block before it prints: its lines must be printed in that order, whatever their numbers
and quoted texts, which differ between processors; a line that ends with ``...`` shows how a line begins.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
import tomllib

from tests.conftest import ENGINE_DEFAULTS
from tests.fakes.server import Server, serving
from tests.source_tree import ROOT
from tests.test_examples import IN_ONE_PROCESS, run_example

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""What the guides call their model: readers fetch it, tests have it as a folder."""

URL = "http://localhost:8000"
"""What the guides call their server."""

FLAGS = "--enforce-eager --block-size 32 --max-model-len 1024 --max-num-batched-tokens 256 --max-num-seqs 8"

EVERY_TIME: tuple[str, ...] = ("attention", "capture", "sites", "consumers", "steering")
"""Guides that `make test` runs; those below run in `make test-extended`."""

EXTENDED: tuple[str, ...] = (
    "../index",
    *("chats", "server", "datasets", "harvest", "moments", "reward", "stream", "studio"),
    *("controllers", "dynamic", "lenses", "operations", "probes", "saes", "train_sae"),
)

pages = pytest.mark.parametrize(
    "name", [*EVERY_TIME, *(pytest.param(name, marks=pytest.mark.extended) for name in EXTENDED)]
)

PROGRAM = """
import os, subprocess, sys

def sh(commands):
    print(subprocess.run(["bash", "-euc", commands], check=True, stdout=subprocess.PIPE, text=True).stdout, flush=True)

if __name__ == "__main__":
    import headgate.capture.engine.api
    import vllm

    def start(self, *args, _start=vllm.LLM.__init__, **settings):
        _start(self, *args, **{**%(settings)r, **settings})

    vllm.LLM.__init__ = start
    exec(compile(open(%(blocks)r).read(), %(blocks)r, "exec"))
"""


class Block(NamedTuple):
    """A code block of a page, and what it prints according to the page."""

    language: str
    text: str
    is_run: bool


def blocks_of(page: str) -> list[Block]:
    """All code blocks of a page, in order; also those within a list."""
    found = re.findall(
        r"^( *)(<!-- not run: [^\n]+ -->\s+)?```(\w+)[^\n]*\n(.*?)^\1```", page, re.DOTALL | re.MULTILINE
    )
    return [
        Block(language, re.sub(rf"^{indent}", "", text, flags=re.MULTILINE), not left_out)
        for indent, left_out, language, text in found
    ]


def parts_of(blocks: list[Block]) -> Iterator[list[Block]]:
    """What runs together: each server begins a new part."""
    part: list[Block] = []
    for block in blocks:
        if block.is_run and block.text.startswith("headgate serve") and part:
            yield part
            part = []
        part.append(block)
    yield part


@pytest.mark.engine
@pages
def test_a_guide_runs_as_it_is_pasted(
    name: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / f"docs/guides/{name}.md").read_text(encoding="utf-8").replace(MODEL, str(model_dir))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for number, part in enumerate(parts_of(blocks_of(page))):
        run_part(f"part{number}", part, model_dir, tmp_path)


def run_part(name: str, part: list[Block], model_dir: Path, folder: Path) -> None:
    """Run the blocks, and compare what they print."""
    serve: AbstractContextManager[Server | None] = nullcontext()
    if part[0].text.startswith("headgate serve"):
        command = shlex.split(part[0].text.replace("\\\n", " "))[2:]
        serve = serving(["-c", "from headgate.capture.cli import main; main()", "serve", *command, *shlex.split(FLAGS)])
    with serve as server:
        url = server.url if server else URL
        blocks, program = folder / f"{name}-blocks.py", folder / f"{name}.py"
        blocks.write_text("\n".join(source_of(part, model_dir, folder)).replace(URL, url))
        program.write_text(PROGRAM % {"settings": dict(ENGINE_DEFAULTS), "blocks": str(blocks)})
        printed = run_example(str(program), cwd=folder, environment=IN_ONE_PROCESS) if blocks.stat().st_size else ""
        (folder / f"{name}.txt").write_text(printed)  # what the page should show
    assert_printed(
        [line for block in part if block.language == "text" and block.is_run for line in block.text.splitlines()],
        printed,
    )


def source_of(part: list[Block], model_dir: Path, folder: Path) -> Iterator[str]:
    """The program of a part; files of it are written."""
    for block in part:
        if not block.is_run:
            continue
        if block.language == "toml":
            publish(tomllib.loads(block.text)["project"]["entry-points"], folder / "my_package-1.dist-info")
        elif block.language == "python" and (file := re.match(r"# (\w+\.py)\n", block.text)):
            (folder / file[1]).write_text(block.text)
        elif block.language == "python":
            yield block.text
        elif block.language == "sh" and not block.text.startswith("headgate serve"):
            yield f"sh({re.sub(f'harvest {model_dir}', f'harvest {model_dir} {FLAGS}', block.text)!r})"


def publish(groups: dict[str, dict[str, str]], info: Path) -> None:
    """Entry points, as an installed package has them."""
    info.mkdir()
    (info / "METADATA").write_text("Name: my_package\nVersion: 1\n")
    with (info / "entry_points.txt").open("w") as file:
        for group, names in groups.items():
            file.write(f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in names.items()))


def assert_printed(expected: list[str], printed: str) -> None:
    """Every expected line is there, in order, apart from numbers and quoted texts."""
    lines = iter(map(alike, printed.splitlines()))
    for line in expected:
        begin, is_cut = alike(line.removesuffix("...")), line.endswith("...")
        is_there = any(found.startswith(begin) if is_cut else found == begin for found in lines)
        assert is_there, f"{line!r} not in:\n{printed}"


def alike(line: str) -> str:
    """A line without what differs between processors, and without its spaces."""
    line = re.sub(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", "''", line)
    return re.sub(r"\s+", " ", re.sub(r"[-+]?\d[\d.,]*(e[-+]?\d+)?", "0", line)).strip()
