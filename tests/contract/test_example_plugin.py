"""The examples of plug-ins in packages of their own: installed as their readmes say, their tests pass."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deadlines import patience

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("example", "package"),
    [
        ("consumer_plugin", "headgate_cosine"),
        ("controller_plugin", "headgate_refusal"),
        ("steering_consumer", "headgate_loop_guard"),
    ],
)
def test_an_example_plugin_installs_and_passes_its_tests(tmp_path: Path, example: str, package: str) -> None:
    source, installed = tmp_path / "source", tmp_path / "installed"
    shutil.copytree(EXAMPLES / example, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(installed)]
    run("pip", "install", *options, str(source))
    shutil.rmtree(source / package)

    output = run("pytest", "-q", "-p", "no:cacheprovider", str(source), path=installed)

    assert " passed" in output
    assert "skipped" not in output


def run(module: str, *arguments: str, path: Path | None = None) -> str:
    """Run a module in a process of its own, with `path` on the import path; return what it prints."""
    environment = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=patience(300))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
