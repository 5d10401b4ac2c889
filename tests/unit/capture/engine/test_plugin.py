"""What vLLM's plug-in loader meets when headgate itself cannot be imported."""

from __future__ import annotations

import sys
from argparse import Namespace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from headgate.capture.engine import plugin
from headgate.capture.schema.errors import UnsupportedError

CONFIGURED = {"headgate": {"capture": {}}}


@pytest.fixture
def vllm_modules(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for the two modules of vLLM that make an engine's configuration and its core."""

    class EngineArgs:
        def __init__(self, additional_config: Any) -> None:
            self.additional_config = additional_config

        def create_engine_config(self) -> Any:
            return Namespace(additional_config=self.additional_config)

    class EngineCore:
        def _initialize_kv_caches(self, vllm_config: Any) -> str:
            return "started"

    for name, owner in (("vllm.engine.arg_utils", EngineArgs), ("vllm.v1.engine.core", EngineCore)):
        module = ModuleType(name)
        setattr(module, owner.__name__, owner)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "headgate.capture.engine.patch_table", None)  # as if a dependency were missing
    return SimpleNamespace(EngineArgs=EngineArgs, EngineCore=EngineCore)


def test_a_configured_engine_does_not_start_without_headgate(vllm_modules: Any) -> None:
    patches = plugin._install()
    try:
        with pytest.raises(UnsupportedError, match="configured but could not be installed: ModuleNotFoundError"):
            vllm_modules.EngineArgs(CONFIGURED).create_engine_config()
        with pytest.raises(UnsupportedError, match="configured but could not be installed"):
            vllm_modules.EngineCore()._initialize_kv_caches(Namespace(additional_config=CONFIGURED))
    finally:
        patches.undo()


@pytest.mark.parametrize("extra", [{}, None, {"another": {}}])
def test_other_engines_start(vllm_modules: Any, extra: Any) -> None:
    patches = plugin._install()
    try:
        config = vllm_modules.EngineArgs(extra).create_engine_config()
        assert config.additional_config == extra
        assert vllm_modules.EngineCore()._initialize_kv_caches(config) == "started"
    finally:
        patches.undo()
