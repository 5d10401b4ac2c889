"""Callbacks that run right after a module was imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from headgate.capture.engine.setup.patch_set import ImportHook


@pytest.fixture
def hook() -> Iterator[ImportHook]:
    hook = ImportHook()
    yield hook
    hook.forget()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package ``watched`` with a module ``watched.inner``, not imported."""
    (tmp_path / "watched").mkdir()
    (tmp_path / "watched" / "__init__.py").write_text("VALUE = 1\n")
    (tmp_path / "watched" / "inner.py").write_text("def call():\n    return 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "watched"
    for name in ("watched", "watched.inner"):
        sys.modules.pop(name, None)


def test_a_module_is_handed_over_after_it_was_executed(hook: ImportHook, package: str) -> None:
    seen: list[int] = []
    hook.when_imported(package, lambda module: seen.append(module.VALUE))
    assert seen == []

    importlib.import_module(package)

    assert seen == [1]


def test_a_module_that_is_imported_already_is_handed_over_at_once(hook: ImportHook, package: str) -> None:
    imported = importlib.import_module(package)
    seen: list[ModuleType] = []

    hook.when_imported(package, seen.append)

    assert seen == [imported]


def test_callbacks_run_in_order_and_once(hook: ImportHook, package: str) -> None:
    seen: list[str] = []
    hook.when_imported("watched.inner", lambda module: seen.append("first"))
    hook.when_imported("watched.inner", lambda module: seen.append("second"))

    module = importlib.import_module("watched.inner")
    importlib.reload(module)

    assert seen == ["first", "second"]


def test_nothing_is_imported_by_watching(hook: ImportHook, package: str) -> None:
    hook.when_imported("watched.inner", lambda module: None)

    assert "watched" not in sys.modules


def test_the_module_keeps_its_own_loader(hook: ImportHook, package: str) -> None:
    hook.when_imported(package, lambda module: None)

    module = importlib.import_module(package)

    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__


def test_a_module_that_does_not_exist_is_still_missing(hook: ImportHook) -> None:
    hook.when_imported("no_such_module_anywhere", lambda module: None)

    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_anywhere")


def test_forgotten_callbacks_do_not_run(hook: ImportHook, package: str) -> None:
    seen: list[ModuleType] = []
    hook.when_imported(package, seen.append)

    hook.forget()
    importlib.import_module(package)

    assert seen == []
    assert hook not in sys.meta_path


def test_a_callback_may_watch_for_more(hook: ImportHook, package: str) -> None:
    seen: list[str] = []
    hook.when_imported(
        package, lambda module: hook.when_imported("watched.inner", lambda inner: seen.append(inner.__name__))
    )

    importlib.import_module("watched.inner")

    assert seen == ["watched.inner"]
