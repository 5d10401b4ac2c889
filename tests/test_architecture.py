"""The rules that keep the packages apart and their files readable, checked on the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("capture", "steering", "consumers")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 40

LIBRARY = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
SOURCES = [*LIBRARY, *TESTS, *sorted((ROOT / "examples").rglob("*.py")), *sorted((ROOT / ".ci").glob("*.py"))]

WITHOUT_TORCH = ("batch", "config", "consumer", "errors", "handoff", "plan", "positions", "results", "sites", "spec")
"""Modules of `capture` that are used and tested where there is no torch."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


each_source = pytest.mark.parametrize("path", SOURCES, ids=name_of)
each_library_file = pytest.mark.parametrize("path", LIBRARY, ids=name_of)
each_test_file = pytest.mark.parametrize("path", [path for path in TESTS if path.name.startswith("test_")], ids=name_of)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported, anywhere in the file; ``from a import b`` gives ``a`` and ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}: write the package's name"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def inside(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_every_package_is_there() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in LIBRARY} == set(PACKAGES)


@each_library_file
def test_vllm_is_imported_in_the_engine_folder_alone(path: Path) -> None:
    if not name_of(path).startswith("capture/engine/"):
        assert [module for module in imports(tree_of(path)) if inside(module, "vllm")] == []


@each_library_file
def test_triton_is_imported_in_kernel_folders_alone(path: Path) -> None:
    if path.parent.name != "kernels":
        assert [module for module in imports(tree_of(path)) if inside(module, "triton")] == []


@each_library_file
def test_packages_import_downwards_only(path: Path) -> None:
    forbidden = {
        "capture": ("headgate.steering", "headgate.consumers"),
        "steering": ("headgate.consumers",),
        "consumers": ("headgate.steering", "headgate.capture.engine", "headgate.capture.kernels"),
    }[path.relative_to(ROOT).parts[0]]

    assert [module for module in imports(tree_of(path)) if inside(module, *forbidden)] == []


@each_library_file
def test_pytest_is_imported_by_the_contract_tests_alone(path: Path) -> None:
    if name_of(path) != "consumers/testing.py":
        assert [module for module in imports(tree_of(path)) if inside(module, "pytest")] == []


@each_library_file
def test_capture_outside_the_engine_folder_does_not_know_it(path: Path) -> None:
    if name_of(path).startswith("capture/") and not name_of(path).startswith(
        ("capture/engine/", "capture/cli.py", "capture/__init__.py")
    ):
        assert [module for module in imports(tree_of(path)) if inside(module, "headgate.capture.engine")] == []


def test_plain_modules_load_without_torch() -> None:
    names = [name for name in WITHOUT_TORCH if (ROOT / "capture" / f"{name}.py").exists()]
    program = "".join(f"import headgate.capture.{name}\n" for name in names)
    program += "import sys; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr or "torch or vllm was imported"


@each_source
def test_a_file_has_at_most_400_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES


@each_source
def test_a_function_has_at_most_40_lines_beside_its_docstring(path: Path) -> None:
    long = {
        f"{node.name}, line {node.lineno}": length_of(node)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and length_of(node) > MAX_FUNCTION_LINES
    }

    assert long == {}


def length_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    length = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        docstring = function.body[0]
        assert docstring.end_lineno is not None
        length -= docstring.end_lineno - docstring.lineno + 1
    return length


@each_library_file
def test_a_public_module_class_and_function_says_what_it_is(path: Path) -> None:
    tree = tree_of(path)
    nodes = (node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef))
    silent = [node.name for node in nodes if not node.name.startswith("_") and ast.get_docstring(node) is None]

    assert silent == []
    assert ast.get_docstring(tree) is not None or not tree.body


@each_library_file
def test_names_say_what_a_thing_is(path: Path) -> None:
    vague = ("Manager", "Helper", "Utils", "Mixin")
    classes = [node.name for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)]

    assert [name for name in classes if name.endswith(vague)] == []
    assert path.stem not in ("utils", "helpers", "misc", "common")


@each_library_file
def test_the_library_does_not_print(path: Path) -> None:
    assert [line for line, name in calls(tree_of(path)) if name == "print"] == []


@each_library_file
def test_importing_starts_no_thread_and_reads_no_environment(path: Path) -> None:
    """Only what runs at import counts: bodies of functions do not."""
    statements = [node for node in tree_of(path).body if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    at_import = [node for statement in statements for node in walk_outside_functions(statement)]

    environment = [
        node.lineno
        for node in at_import
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")
    ]
    threads = [
        node.lineno
        for node in at_import
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("Thread", "ThreadPoolExecutor"))
    ]

    assert environment == []
    assert threads == []


def walk_outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from walk_outside_functions(child)


@each_source
def test_no_unknown_exception_is_dropped_in_silence(path: Path) -> None:
    silent = [
        node.lineno
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
        and all(isinstance(line, ast.Pass | ast.Continue) for line in node.body)
    ]

    assert silent == []


@each_test_file
def test_tests_wait_for_events_and_never_sleep(path: Path) -> None:
    assert [line for line, name in calls(tree_of(path)) if name in ("time.sleep", "sleep")] == []


@each_source
def test_public_names_are_listed_in_order(path: Path) -> None:
    for node in tree_of(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
            assert list(names) == sorted(names, key=ruff_order)


def ruff_order(name: str) -> tuple[int, str]:
    """CONSTANTS, then Classes, then functions."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2), name


def test_the_distribution_ships_every_folder() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {path.parent for path in LIBRARY if path.name == "__init__.py"}
    named = {"headgate." + folder.relative_to(ROOT).as_posix().replace("/", ".") for folder in folders}

    assert set(project["tool"]["setuptools"]["packages"]) == named
    assert {path.parent for path in LIBRARY} == folders, "a folder without __init__.py"


def calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """``(line, name)`` of every call whose callee is a name or a dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield node.lineno, ast.unparse(node.func)
