"""The symbols of torch's inductor that headgate uses: listed, in one folder, and refused or reported where missing."""

from __future__ import annotations

import ast

import pytest
from rich.console import Console

from headgate.capture.engine.commands import doctor
from headgate.capture.engine.compiler.inductor import KERNELS, LOWERING, Inductor, missing_symbols
from headgate.capture.schema.errors import UnsupportedError
from tests.source_tree import LIBRARY, name_of, tree_of


def test_every_symbol_is_there_and_a_missing_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_symbols(kernels=True) == []

    monkeypatch.delattr("torch._inductor.codegen.simd_kernel_features.MemoryEstimator.remove_kernel_local")

    assert missing_symbols(kernels=True) == ["codegen.simd_kernel_features.MemoryEstimator.remove_kernel_local"]
    assert missing_symbols(kernels=False) == []
    with pytest.raises(UnsupportedError, match=r"remove_kernel_local\).*enforce-eager"):
        Inductor("capture", kernels=True)


def test_inductor_is_imported_in_one_folder_and_its_symbols_are_listed() -> None:
    """Imports for type checkers alone do not count."""
    listed = {f"torch._inductor.{name}" for name in (*LOWERING, *KERNELS)}
    for path in LIBRARY:
        tree = tree_of(path)
        skipped = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch._inductor"):
                if node in skipped:
                    continue
                assert name_of(path).startswith("capture/engine/compiler/"), name_of(path)
                for alias in node.names:
                    assert any(name.startswith(f"{node.module}.{alias.name}") for name in listed), alias.name


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("", "all 15 symbols that headgate uses are there"),
        ("codegen.common.CSEProxy", "torch._inductor.codegen.common.CSEProxy.load does not exist"),
        ("ir.Pointwise", "1 of 15 symbols are missing: run with --enforce-eager"),
    ],
)
def test_doctor_says_which_symbol_is_missing_and_what_to_do(monkeypatch, missing, told):
    if missing:
        monkeypatch.delattr(f"torch._inductor.{missing}")
    console = Console(record=True, width=200)

    is_healthy = doctor._report_compiler(console)

    assert is_healthy is not bool(missing)
    assert told in console.export_text()
