"""The table of patches against the installed vLLM, in a process of its own, since patches are a process's matter."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headgate.capture.engine.compiler import graph_code
from headgate.capture.engine.compiler.graph_code import traced_modules
from headgate.capture.engine.site_action import SiteAction
from headgate.capture.engine.worker import capture_part, install
from headgate.capture.schema.sites import HookPoint, Site
from tests.deadlines import patience

SCRIPT = """
import json, sys
import headgate.capture
told = {"by importing capture": sorted({"vllm", "torch"} & set(sys.modules))}
from headgate.capture.engine import vllm_names
from headgate.capture.engine.plugin import register, unregister
from headgate.capture.engine.setup.patch_set import process_patches
from headgate.capture.engine.patch_table import PATCHES
register()
told["by registering"] = sorted({"vllm"} & set(sys.modules))
used = vllm_names.required_names()
for name in (*(patch.target for patch in PATCHES), *used):
    list(name.imported())
register()
patches = process_patches()
patches.require()
told["values"] = len([name.get() for name in used]), len(used)
told["problems"] = patches.problems
told["missing"] = [patch.name for patch in PATCHES if not patch.is_installed()]
told["stuck"] = unregister()
told["left"] = [patch.name for patch in PATCHES if patch.is_installed()]
register()
told["missing again"] = [patch.name for patch in PATCHES if not patch.is_installed()]
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=patience(300), check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_importing_capture_imports_neither_vllm_nor_torch(told: dict[str, Any]) -> None:
    assert told["by importing capture"] == []


def test_registering_imports_nothing_of_vllm(told: dict[str, Any]) -> None:
    assert told["by registering"] == []


def test_every_patch_fits_and_is_installed(told: dict[str, Any]) -> None:
    assert told["problems"] == []
    assert told["missing"] == []


def test_every_name_that_is_used_is_there(told: dict[str, Any]) -> None:
    found, wanted = told["values"]
    assert found == wanted > 60


def test_every_patch_can_be_taken_out_and_put_in_again(told: dict[str, Any]) -> None:
    assert told["stuck"] == []
    assert told["left"] == []
    assert told["missing again"] == []


def test_every_patch_says_why() -> None:
    from headgate.capture.engine.patch_table import PATCHES

    names = [patch.name for patch in PATCHES]
    assert len(set(names)) == len(names)
    assert all(patch.why for patch in PATCHES)
    assert [patch.target.path for patch in PATCHES if not patch.parameters] == ["enable_envs_cache"]


def test_graphs_that_other_code_of_headgate_was_compiled_into_are_never_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM's caches of compiled graphs are keyed by a hash of the configuration: each module in a graph changes it."""
    from vllm.config import VllmConfig

    actions = {Site(0, HookPoint.POST_MLP): [SiteAction(run=capture_part.capture_traced, tensors={}, order=0)]}
    modules = traced_modules([capture_part.capture_traced])
    for name in modules:
        shutil.copy(graph_code._path(name), tmp_path / name)
    monkeypatch.setattr(graph_code, "_path", tmp_path.joinpath)

    def key() -> str:
        config = VllmConfig(additional_config={"headgate": {"capture": {"consumers": [{"name": "rows"}]}}})
        install._key_graph([config], {}, actions)
        return str(config.compute_hash())

    before = key()
    assert key() == before
    for name in modules:
        source = (tmp_path / name).read_text()
        (tmp_path / name).write_text(source + "# of another version\n")
        assert key() != before, name
        (tmp_path / name).write_text(source)
    assert "headgate.capture.engine.worker.capture_part" in modules
    assert key() == before
