"""The markers of pluggy with which a part of headgate says what it implements, and the check of what it says.

Imports neither vLLM nor torch: a part that brings a sub-command alone needs nothing else of headgate.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import pluggy

PROJECT = "headgate"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class _PartHooks(pluggy.PluginManager):
    """pluggy's manager, which reads no computed attribute of a plugin: before 1.7 pluggy itself reads every one."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        if isinstance(inspect.getattr_static(plugin, name, None), property | cached_property):
            return None
        return super().parse_hookimpl_opts(plugin, name)


def checked_hooks(specs: type, plugins: Mapping[str, object]) -> pluggy.PluginManager:
    """Register `plugins` by name and check each against the hook specifications `specs`.

    Raises:
        pluggy.PluginValidationError: If a plugin implements a hook that does not exist, or with other arguments.
    """
    manager = _PartHooks(PROJECT)
    manager.add_hookspecs(specs)
    for name, plugin in plugins.items():
        manager.register(plugin, name)
    manager.check_pending()
    return manager
