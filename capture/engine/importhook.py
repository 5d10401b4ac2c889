"""Runs a function on a module right after that module was imported, without importing it.

Every vLLM process imports its own part of vLLM; what is patched in a module must neither load it where it is not
needed nor come too late where it is.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

OnImport = Callable[[ModuleType], None]


class ImportHook(importlib.abc.MetaPathFinder):
    """Finder at the head of ``sys.meta_path`` that watches for the modules asked for.

    Modules are imported on any thread; `_lock` guards the table of callbacks and is never held while one runs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, list[OnImport]] = {}

    def when_imported(self, name: str, call: OnImport) -> None:
        """Call `call` with module `name`: now if it is imported, else as soon as it is."""
        module = sys.modules.get(name)
        if module is not None and not _is_initializing(module):
            call(module)
            return
        with self._lock:
            self._waiting.setdefault(name, []).append(call)
            if self not in sys.meta_path:
                sys.meta_path.insert(0, self)

    def forget(self) -> None:
        """Drop every callback that still waits, and leave ``sys.meta_path``."""
        with self._lock:
            self._waiting.clear()
            if self in sys.meta_path:
                sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Let the other finders find `name`; run the callbacks after it was executed."""
        with self._lock:
            if name not in self._waiting:
                return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _NotifyingLoader(spec.loader, self)
                return spec
        return None

    def _imported(self, module: ModuleType) -> None:
        with self._lock:
            calls = self._waiting.pop(module.__name__, [])
        for call in calls:
            call(module)


class _NotifyingLoader(importlib.abc.Loader):
    """A module's own loader, followed by the callbacks."""

    def __init__(self, loader: Any, hook: ImportHook) -> None:
        self._loader = loader
        self._hook = hook

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        # From here on the module is as if we had never been there: `inspect` and `pkgutil` look at these.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._hook._imported(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _is_initializing(module: ModuleType) -> bool:
    spec = getattr(module, "__spec__", None)
    return bool(getattr(spec, "_initializing", False))
