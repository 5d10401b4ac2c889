"""The studio's files: those that the sources make, small, and served with a policy that lets nothing else in."""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from headgate.capture.engine.server.studio import FOLDER, HEADERS, INDEX, PATH, TYPES, open_studio
from tests.source_tree import ROOT

MAX_BYTES = 400_000


@pytest.fixture(scope="module")
def browser() -> TestClient:
    app = FastAPI()
    app.include_router(open_studio())
    return TestClient(app, follow_redirects=False)


def test_the_page_and_its_files_are_served_with_their_policy(browser: TestClient) -> None:
    for path in (PATH, *(PATH + name for name in TYPES)):
        answer = browser.get(path)
        assert answer.status_code == 200
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
        assert answer.content == (FOLDER / (path.removeprefix(PATH) or INDEX)).read_bytes()
    assert "unsafe" not in HEADERS["Content-Security-Policy"]


def test_without_the_slash_the_answer_leads_to_the_page_under_any_prefix(browser: TestClient) -> None:
    answer = browser.get(PATH.rstrip("/"))

    assert (answer.status_code, answer.headers["location"]) == (307, "headgate/")


@pytest.mark.parametrize("name", ["studio.py", "..%2fstudio.py", "%2e%2e/studio.py", "index.html/"])
def test_no_other_file_is_served(browser: TestClient, name: str) -> None:
    assert browser.get(PATH + name).status_code in (307, 404)
    assert b"APIRouter" not in browser.get(PATH + name).content


def test_the_page_names_its_own_files_alone() -> None:
    page = (FOLDER / INDEX).read_text()

    assert sorted(re.findall(r'(?:src|href)="([^"]*)"', page)) == ["data:,", "studio.css", "studio.js"]
    assert not re.search(r"<script>|<style|\son\w+=|style=", page)


def test_the_page_is_small() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(TYPES)
    assert sum(len(gzip.compress((FOLDER / name).read_bytes())) for name in TYPES) < MAX_BYTES


@pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm to build the studio with")
@pytest.mark.timeout(300)
def test_the_committed_files_are_those_that_the_sources_make(tmp_path: Path) -> None:
    folder = tmp_path / "studio"
    shutil.copytree(ROOT / "studio", folder, ignore=shutil.ignore_patterns("node_modules"))
    for command in (
        ["npm", "ci", "--silent", "--no-audit", "--no-fund"],
        ["npx", "tsc", "--noEmit"],
        ["node", "build.mjs", str(tmp_path / "page")],
    ):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}\n{done.stderr}"

    for name in TYPES:
        assert (tmp_path / "page" / name).read_bytes() == (FOLDER / name).read_bytes(), f"{name}: run `make studio`"
