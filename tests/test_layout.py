"""The rooms of the library: arrows between folders, dependencies, and code that only tests use."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import tomllib

from tests.source_tree import (
    LIBRARY,
    ROOT,
    Function,
    library_imports,
    module_of,
    name_of,
    offences,
    tree_of,
    within,
)

LAYERS = {
    "headgate.capture": (
        *(["schema"], ["files"], ["monitoring", "kernels"], ["lens", "probe"], ["planning"], ["staging"], ["delivery"]),
        *(
            ["links"],
            ["local_delivery"],
            ["capture_process"],
            ["session"],
            ["handles"],
            ["engine"],
            ["cli"],
        ),
    ),
    "headgate.capture.engine": (
        *(
            ["vllm_names", "vllm_types"],
            ["vllm_errors"],
            ["site_action", "client_errors"],
            ["contracts"],
            ["access"],
            ["setup", "model", "compiler"],
            ["worker", "core"],
            ["requests"],
            ["frontends"],
            ["server"],
        ),
        *(["patch_table", "other_changes"], ["plugin"], ["api", "commands"], ["part"]),
    ),
    "headgate.steering": (
        *(
            ["ops", "lru_cache"],
            ["vectors", "features"],
            ["lenses"],
            ["probes"],
            ["programs"],
            ["gates"],
            ["spec"],
            ["kernels"],
            ["controllers"],
            ["config"],
            ["flags", "documents"],
            ["files"],
            ["core", "worker"],
            ["control"],
            ["client"],
        ),
        *(["verify"], ["part"]),
    ),
    "headgate.consumers.datasets": (
        *(["index"], ["selection"], ["view"], ["mixing"], ["dataset"], ["feeds", "export"]),
    ),
    "headgate.consumers.filesystem": (
        ["storage"],
        ["formats", "uploading"],
        ["condition", "browsing"],
        ["request_writer"],
        ["consumer"],
    ),
}
"""Folders and modules of a package from the lowest to the highest. Each imports those before it, and none beside it."""

HOST_PACKAGES = {
    *(
        "torch",
        "triton",
        "vllm",
        "transformers",
        "huggingface_hub",
        "fastapi",
        "starlette",
        "uvicorn",
        "prometheus_client",
    ),
    *("prometheus_client", "typing_extensions"),
}
"""Packages that come with the user's own vLLM; the last is for type checkers alone."""

EXTRAS = {"datasets", "gguf", "httpx", "matplotlib", "pyarrow", "pytest", "sklearn"}
"""Packages of the optional dependencies, imported inside the function or the module that needs them."""

IMPORT_NAMES = {"pyyaml": "yaml", "pyzmq": "zmq"}
"""Distributions whose packages have other names."""


def test_folders_import_downwards_only() -> None:
    upward = []
    for module, imported in library_imports().items():
        for package in LAYERS:
            for other in imported:
                here, there = place(module, package), place(other, package)
                if here is not None and there is not None and here[1] != there[1] and there[0] >= here[0]:
                    upward.append(f"{module} imports {other}")

    assert upward == []


def place(module: str, package: str) -> tuple[int, str] | None:
    """The rank of a module in `package`, and its folder or itself; None if it is not in it."""
    if not module.startswith(f"{package}."):
        return None
    name = module.removeprefix(f"{package}.").partition(".")[0]
    return next(rank for rank, names in enumerate(LAYERS[package]) if name in names), name


def test_every_folder_has_its_place_in_the_order() -> None:
    for package, layers in LAYERS.items():
        folder = ROOT.joinpath(*package.split(".")[1:])
        found = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}

        assert found - {"__init__"} == {name for names in layers for name in names}, package


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert list(circles(library_imports())) == []


def circles(graph: dict[str, frozenset[str]]) -> Iterator[list[str]]:
    """Strongly connected components of more than one module, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(module: str) -> Iterator[list[str]]:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in graph[module]:
            if other not in index:
                yield from visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            members = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(members) > 1:
                yield sorted(members)

    for module in graph:
        if module not in index:
            yield from visit(module)


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}

    assert list(circles({module: frozenset(others) for module, others in graph.items()})) == [["b", "c"]]


def test_a_docstring_does_not_begin_with_a_bare_what() -> None:
    def bare(tree: ast.Module) -> Iterator[tuple[int, str]]:
        for node in ast.walk(tree):
            # An expression that is a string is a docstring: of a module, class, function or of the name above it.
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                text = str(node.value.value)
                if text.startswith("What "):
                    yield node.lineno, text.partition("\n")[0]

    assert offences(LIBRARY, bare) == []


def test_a_constant_is_defined_once() -> None:
    places: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for path in LIBRARY:
        for node in tree_of(path).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if re.fullmatch(r"[A-Z][A-Z0-9_]+|[A-Z]\w+Array", name):
                    places[name, ast.unparse(node.value)].append(name_of(path))

    assert {name: found for (name, _), found in places.items() if len(found) > 1} == {}


def test_a_class_has_a_name_of_its_own() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in LIBRARY:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name_of(path))

    assert {name: found for name, found in places.items() if len(found) > 1} == {}


ONE_IMPORTER = {
    "capture.engine.commands.demo_model": "examples and tests make the model by it",
    "capture.engine.server.studio": "the page's routes; the importer installs routes and middleware of every part",
    "capture.engine.vllm_errors": "importing it imports vLLM",
    "capture.engine.worker.model_head": "a noun of its own: what consumers compute logits with",
    "capture.engine.worker.runner": "a noun of its own; both together would have over 1,000 lines",
    "consumers.attention": "users import it; the importer checks its payloads",
    "consumers.datasets.feeds.torch_rows": "users import it",
    "consumers.feed": "tests of consumers import it, and need no pytest",
    "consumers.filesystem.browsing": "a noun of its own: captures as HTTP shows them",
    "consumers.filesystem.request_writer": "a noun of its own; both together would have over 1,200 lines",
    "consumers.harvest.live": "its package names it for users",
    "consumers.moments.consumer": "its package names it for users",
    "consumers.stream.reader": "its package names it for users",
    "consumers.verify": "a command's checks; the importer has only names of what the consumers bring",
    "steering.client.http": "its package names it for users",
    "steering.ops": "its package names it for users",
    "steering.core.controllers.coefficients": "a noun of its own; both together would have over 1,300 lines",
    "steering.core.operator_calls": "a noun of its own: the calls that change what acts on everybody",
    "steering.files.gguf_files": "one format, with a reader of its own for its binary header",
    "steering.kernels.select_features": "one kernel; the importer has the other that encodes SAEs",
    "steering.worker.device_tables": "the tensors of the forward; both together would have over 1,100 lines",
    "steering.verify": "a command's checks; the importer has only names of what steering brings",
    "steering.worker.program_action": "a noun of its own; both together would have over 900 lines",
}
"""Modules without ``headgate.`` that one module of their folder alone imports, with the reason for each."""


def test_a_module_that_one_neighbour_imports_has_a_reason() -> None:
    """Otherwise it is a part of that neighbour."""
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for module, imported in library_imports().items():
        for other in imported:
            importers[other].add(module)
    packages = {module_of(path) for path in LIBRARY if path.name == "__init__.py"}
    folder = {module: module if module in packages else module.rpartition(".")[0] for module in library_imports()}
    lonely = {
        module
        for module, users in importers.items()
        if module not in packages and len(users) == 1 and folder[next(iter(users))] == folder[module]
    }

    assert {module.removeprefix("headgate.") for module in lonely} == ONE_IMPORTER.keys()


def test_dependencies_are_those_that_are_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[<>=~!\[; ]", entry)[0] for entry in project["dependencies"]}
    declared = {IMPORT_NAMES.get(name, name) for name in names}
    used = {package for path in LIBRARY for package in foreign_packages(tree_of(path))}

    assert declared - used == set(), "declared and never imported"
    assert used - declared - HOST_PACKAGES - EXTRAS == set(), "imported and not declared"


def foreign_packages(tree: ast.Module) -> Iterator[str]:
    """Top-level names of packages that a module imports, neither ours nor Python's own."""
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        for name in names:
            package = name.partition(".")[0]
            if package != "headgate" and package not in sys.stdlib_module_names and package != "__future__":
                yield package


CALLED_BY_OTHERS = {
    "init_state": "vLLM calls it of endpoint plug-ins",
    "scatter_rows_reference": "the definition of a kernel, which its tests compare it with",
    "add_rows_reference": "the definition of a kernel, which its tests compare it with",
}
"""Names that nothing in the library uses, with the reason for each."""


def test_nothing_is_there_for_its_tests_alone() -> None:
    """A name that is defined in the library stands in it a second time, or where users look for it."""
    words = Counter[str]()
    for path in [*LIBRARY, *(ROOT / "examples").rglob("*.py"), *(ROOT / "tests" / "benchmarks").glob("*.py")]:
        words.update(words_of(tree_of(path)))
    told = set(re.findall(r"\w+", "\n".join(path.read_text(encoding="utf-8") for path in pages())))

    unused = {name: name_of(path) for path in LIBRARY for name in defined(path) if not words[name] and name not in told}

    assert unused.keys() == CALLED_BY_OTHERS.keys(), unused


def pages() -> list[Path]:
    """Documents that tell users of names, and the project's entry points."""
    return [ROOT / "pyproject.toml", ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]


def defined(path: Path) -> Iterator[str]:
    """Functions, classes and methods of a file that somebody has to call by name."""
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.Module | ast.ClassDef):
            continue
        inherits = isinstance(node, ast.ClassDef) and (bool(node.bases) or path.name == "testing.py")
        for item in node.body:
            if not isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or item.decorator_list:
                continue
            if not item.name.startswith("__") and not (inherits and isinstance(item, Function)):
                yield item.name


def words_of(tree: ast.Module) -> Iterator[str]:
    """Names that a file uses: loaded, imported, attributes, and words of strings (`__all__`, patched targets)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
            yield from re.findall(r"\w+", node.value.rpartition(":")[2])


def test_tests_mirror_the_folders() -> None:
    folders = {path.parent for path in within("capture/", "steering/", "consumers/")}
    tests = {path.parent for path in (ROOT / "tests" / "unit").rglob("test_*.py")}
    mirrored = {ROOT / folder.relative_to(ROOT / "tests" / "unit") for folder in tests}

    others = {ROOT / "benchmarks", ROOT / "capture" / "session", ROOT / "chaos", ROOT / "ci"}
    assert mirrored - folders - others == set()


def test_test_files_have_names_of_their_own() -> None:
    """Folders of tests are no packages, so pytest refuses a second file of one name in a process."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        places[path.name].append(name_of(path))

    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_packages_are_named_after_their_folders() -> None:
    assert {module_of(path) for path in LIBRARY if path.name == "__init__.py"} == {
        module_of(path.parent / "__init__.py") for path in LIBRARY
    }
