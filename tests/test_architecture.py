"""The rules that keep the packages apart and their files readable, checked on the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator

import tomllib

from tests.source_tree import (
    LIBRARY,
    ROOT,
    SOURCES,
    TESTS,
    Function,
    calls_of,
    imports,
    imports_of,
    name_of,
    offences,
    outside,
    tree_of,
    within,
)

MAX_FUNCTION_LINES = 40

WITHOUT_TORCH = (
    *("schema.batch", "schema.config", "schema.consumer", "schema.errors", "schema.positions", "schema.registry"),
    *("schema.results", "schema.sites", "schema.spec"),
    *("planning.planner", "planning.step_plan"),
)
"""Modules of `capture` that are used and tested where there is no torch."""


def test_vllm_is_imported_by_the_table_of_names_alone() -> None:
    assert within("capture/engine/") != []
    assert offences(LIBRARY, imports_of("vllm")) == []


def test_attributes_of_vllm_are_named_in_one_table() -> None:
    def named(tree: ast.Module) -> Iterator[tuple[int, str]]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and re.fullmatch(r"vllm(\.[a-z_0-9]+)+(:\w+)?\.?", str(node.value)):
                yield node.lineno, str(node.value)

    tables = ("capture/engine/vllm_names.py", "capture/engine/commands/serve.py")  # the latter has entry points
    assert offences([path for path in within("capture/engine/") if name_of(path) not in tables], named) == []


def test_triton_is_imported_in_kernel_folders_alone() -> None:
    assert offences([path for path in LIBRARY if path.parent.name != "kernels"], imports_of("triton")) == []


def test_packages_import_downwards_only() -> None:
    engine = ("headgate.capture.engine", "headgate.capture.kernels")

    assert offences(within("capture/"), imports_of("headgate.steering", "headgate.consumers")) == []
    assert offences(within("steering/"), imports_of("headgate.consumers")) == []
    joining = [path for path in within("consumers/") if name_of(path) == "consumers/part.py"]
    assert offences(within("consumers/"), imports_of("headgate.steering")) == []
    assert offences([path for path in within("consumers/") if path not in joining], imports_of(*engine)) == []
    found = [name for path in joining for _, name in imports(tree_of(path)) if name.startswith(engine)]
    assert set(found) == {"headgate.capture.engine.contracts.parts", "headgate.capture.engine.contracts.parts.Part"}


def test_capture_knows_the_engine_folder_at_its_doors_alone() -> None:
    doors = ("capture/engine/", "capture/cli.py", "capture/__init__.py")
    inner = [path for path in within("capture/") if not name_of(path).startswith(doors)]

    assert offences(inner, imports_of("headgate.capture.engine")) == []


def test_pytest_is_imported_by_the_contract_tests_alone() -> None:
    assert offences(outside("consumers/testing.py"), imports_of("pytest", "_pytest")) == []


def test_imports_say_the_whole_name() -> None:
    relative = offences(SOURCES, lambda tree: [(line, name) for line, name in imports(tree) if name.startswith(".")])

    assert relative == []


def test_plain_modules_load_without_torch() -> None:
    program = "".join(f"import headgate.capture.{name}\n" for name in WITHOUT_TORCH)
    program += "import sys; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr or "torch or vllm was imported"


def test_a_function_has_at_most_40_lines_beside_its_docstring() -> None:
    def long_functions(tree: ast.Module) -> Iterator[tuple[int, str]]:
        for node in ast.walk(tree):
            if isinstance(node, Function) and length_of(node) > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name}: {length_of(node)} lines"

    assert offences(SOURCES, long_functions) == []


def length_of(function: Function) -> int:
    assert function.end_lineno is not None
    length = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        docstring = function.body[0]
        assert docstring.end_lineno is not None
        length -= docstring.end_lineno - docstring.lineno + 1
    return length


def test_public_modules_classes_and_functions_say_what_they_are() -> None:
    def undocumented(tree: ast.Module) -> Iterator[tuple[int, str]]:
        if tree.body and ast.get_docstring(tree) is None:
            yield 1, "the module"
        public = [n for n in tree.body if isinstance(n, Function | ast.ClassDef) and not n.name.startswith("_")]
        yield from ((node.lineno, node.name) for node in public if ast.get_docstring(node) is None)

    assert offences(LIBRARY, undocumented) == []


def test_names_say_what_a_thing_is() -> None:
    def vague(tree: ast.Module) -> Iterator[tuple[int, str]]:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name.endswith(("Manager", "Helper", "Utils", "Mixin")):
                yield node.lineno, node.name

    assert offences(LIBRARY, vague) == []
    assert [name_of(path) for path in LIBRARY if path.stem in ("utils", "helpers", "misc", "common")] == []


def test_the_library_does_not_print() -> None:
    assert offences(LIBRARY, calls_of("print")) == []


def test_importing_starts_no_thread_and_reads_no_environment() -> None:
    def at_import(tree: ast.Module) -> Iterator[tuple[int, str]]:
        for node in outside_functions(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv"):
                yield node.lineno, ast.unparse(node)
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("Thread", "ThreadPoolExecutor")):
                yield node.lineno, ast.unparse(node.func)

    assert offences(LIBRARY, at_import) == []


def outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """`node` and what is in it, without bodies of functions, which do not run at import."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.Lambda):
            yield from outside_functions(child)


def test_no_unknown_exception_is_dropped_in_silence() -> None:
    def silent(tree: ast.Module) -> Iterator[tuple[int, str]]:
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler) and all(isinstance(n, ast.Pass | ast.Continue) for n in node.body):
                caught = "everything" if node.type is None else ast.unparse(node.type)
                if caught in ("everything", "Exception", "BaseException"):
                    yield node.lineno, caught

    assert offences(SOURCES, silent) == []


def test_tests_wait_for_events_and_never_sleep() -> None:
    assert offences([path for path in TESTS if path.name.startswith("test_")], calls_of("time.sleep", "sleep")) == []


def test_public_names_are_listed_in_order() -> None:
    def unsorted(tree: ast.Module) -> Iterator[tuple[int, str]]:
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names = list(ast.literal_eval(node.value))
                if names != sorted(names, key=ruff_order):
                    yield node.lineno, "__all__"

    assert offences(SOURCES, unsorted) == []


def ruff_order(name: str) -> tuple[int, str]:
    """CONSTANTS, then Classes, then functions."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2), name


def test_the_distribution_ships_every_folder() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {path.parent for path in LIBRARY}
    named = {"headgate." + folder.relative_to(ROOT).as_posix().replace("/", ".") for folder in folders}

    assert set(project["tool"]["setuptools"]["packages"]) == named
    assert [name_of(folder) for folder in folders if not (folder / "__init__.py").exists()] == []
