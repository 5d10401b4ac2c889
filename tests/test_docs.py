"""The documents: links lead somewhere, and code blocks hold what they show."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib

from tests.source_tree import ROOT, name_of

DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        *ROOT.glob("tests/**/*.md"),
    ]
)
PROMISED_ELSEWHERE = {"my_package", "openai"}
"""Packages of readers, which are not installed here."""

document = pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)


def blocks(path: Path, language: str) -> list[str]:
    """The code blocks of a document in one language."""
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def anchors(path: Path) -> set[str]:
    """The names that a document's headings get."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 _-]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@document
def test_links_lead_somewhere(path: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file) if file else path
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(target)

    assert broken == []


@document
def test_python_blocks_compile_and_their_names_are_there(path: Path) -> None:
    for block in blocks(path, "python"):
        missing = list(missing_names(ast.parse(block)))

        assert missing == [], block


def missing_names(tree: ast.Module) -> Iterator[str]:
    """Names that a block imports from installed packages and that are not there; of vLLM only the module is asked."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "headgate":
            module = importlib.import_module(node.module)
            public = set(dir(module)) | set(getattr(module, "__all__", ()))
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name not in public)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] not in PROMISED_ELSEWHERE:
                    importlib.import_module(alias.name)


@document
def test_blocks_of_data_can_be_read(path: Path) -> None:
    for block in blocks(path, "json"):
        json.loads(block)
    for block in blocks(path, "toml"):
        tomllib.loads(block)


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r": ([\w/-]+\.md)", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}

    assert listed == pages


def test_paths_in_the_documents_are_those_of_files() -> None:
    """A path such as ``capture/planning/planner.py`` in a document is a file or a folder of the repository."""
    folders = "capture|steering|consumers|tests|examples"
    missing = {
        f"{name_of(path)}: {found}"
        for path in DOCUMENTS
        for found in re.findall(rf"`((?:{folders})/[\w./]+)`", path.read_text(encoding="utf-8"))
        if not (ROOT / found).exists() and not (path.parent / found).exists()
    }

    assert missing == set()


def test_the_documents_are_short_enough_to_be_read() -> None:
    for name, limit in (("README.md", 240), ("docs/performance.md", 130)):
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) < limit, name


def test_documents_name_no_commits() -> None:
    named = {
        f"{name_of(path)}: {found}"
        for path in DOCUMENTS
        for found in re.findall(
            r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7}\b", path.read_text(encoding="utf-8")
        )
    }

    assert named == set()


def test_the_version_is_that_of_the_changelog() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = re.findall(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)

    assert versions[0] == project["version"]
