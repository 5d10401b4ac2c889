"""The example notebook: what is stored in it, and that its cells still do what is stored."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.test_docs import missing_names
from tests.test_examples import IN_ONE_PROCESS, run_example

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "notebook.ipynb"
CELLS: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]
SOURCE = "\n\n".join("".join(cell["source"]) for cell in CODE)


def test_the_stored_outputs_are_those_of_one_run_from_top_to_bottom() -> None:
    kinds = [output["output_type"] for cell in CODE for output in cell["outputs"]]
    shown = [set(output.get("data", ())) for cell in CODE for output in cell["outputs"]]

    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    assert "error" not in kinds
    assert sum("image/png" in data for data in shown) == 2
    assert sum("text/html" in data for data in shown) == 4
    assert list(missing_names(ast.parse(SOURCE))) == []
    assert "/work/" not in NOTEBOOK.read_text(encoding="utf-8"), "a path of the machine that it ran on"


@pytest.mark.engine
def test_the_cells_run_and_print_what_is_stored(model_dir: Path, tmp_path: Path) -> None:
    script = tmp_path / "cells.py"
    script.write_text(SOURCE, encoding="utf-8")
    environment = {**IN_ONE_PROCESS, "MODEL": str(model_dir), "MPLBACKEND": "Agg"}

    printed = run_example(str(script), environment=environment)

    stored = "".join("".join(output["text"]) for cell in CODE for output in cell["outputs"] if "text" in output)
    told, expected = printed.splitlines(), stored.splitlines()
    assert expected[0] in told, printed
    # Answers differ from one CPU to the next, after some words.
    assert [line[:2] for line in told if line[:1] in "+-"] == ["-3", "+0", "+3", "+6"]
