"""The sources of this repository as syntax trees, for the tests of its architecture."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("capture", "steering", "consumers")

LIBRARY = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
SOURCES = [*LIBRARY, *TESTS, *sorted((ROOT / "examples").rglob("*.py")), *sorted((ROOT / ".ci").glob("*.py"))]

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    """The path from the root of the repository, with slashes."""
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def offences(paths: Iterable[Path], rule: Callable[[ast.Module], Iterable[tuple[int, str]]]) -> list[str]:
    """``FILE:LINE offence`` for everything that `rule` finds in the files."""
    return [f"{name_of(path)}:{line} {what}" for path in paths for line, what in rule(tree_of(path))]


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """``(line, module)`` of every import, anywhere in a file; ``from a import b`` gives ``a`` and ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def imports_of(*packages: str) -> Callable[[ast.Module], list[tuple[int, str]]]:
    """The rule against importing any of `packages` or their modules."""

    def rule(tree: ast.Module) -> list[tuple[int, str]]:
        return [
            (line, module)
            for line, module in imports(tree)
            if any(module == package or module.startswith(f"{package}.") for package in packages)
        ]

    return rule


def calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """``(line, name)`` of every call whose callee is a name or a dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield node.lineno, ast.unparse(node.func)


def calls_of(*names: str) -> Callable[[ast.Module], list[tuple[int, str]]]:
    """The rule against calling any of `names`."""
    return lambda tree: [(line, name) for line, name in calls(tree) if name in names]


def within(*folders: str) -> list[Path]:
    """Files of the library whose path begins with one of `folders`."""
    return [path for path in LIBRARY if name_of(path).startswith(folders)]


def outside(*folders: str) -> list[Path]:
    """The other files of the library."""
    return [path for path in LIBRARY if not name_of(path).startswith(folders)]


def module_of(path: Path) -> str:
    """The name that a file of the library is imported under."""
    return "headgate." + name_of(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")


@cache
def library_imports() -> dict[str, frozenset[str]]:
    """Modules of the library, each with those that it imports, also inside functions and for types alone."""
    modules = {module_of(path): path for path in LIBRARY}
    found = {}
    for module, path in modules.items():
        named = {name for _, name in imports(tree_of(path))}
        inner = {name for name in named if name in modules}
        # `from package import module` names the package too, whose __init__ is imported on the way anyhow.
        passed = {name for name in inner if any(other.startswith(f"{name}.") for other in inner)}
        found[module] = frozenset(inner - passed - {module})
    return found
