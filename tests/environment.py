"""The environment that every test runs in, set before anything imports vLLM."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PLUGINS = str(Path(__file__).parent / "plugins")

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TESTS_ASYNC_SCHEDULING": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Every engine of the tests runs under it, and its processes inherit it."""


def set_environment() -> None:
    """Set `ENVIRONMENT`, and take away whatever else is known to vLLM or headgate."""
    for name in [name for name in os.environ if name.startswith(("HEADGATE_", "VLLM_"))]:
        if name not in ("HEADGATE_CACHE", "HEADGATE_RECORDED"):
            del os.environ[name]
    os.environ.update(ENVIRONMENT)
    add_plugins()


def add_plugins() -> None:
    """Let this process and those that it starts find the plugins of the tests."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if PLUGINS not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, paths), PLUGINS])
    if PLUGINS not in sys.path:
        sys.path.append(PLUGINS)
