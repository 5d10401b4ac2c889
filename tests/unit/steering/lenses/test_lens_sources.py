"""Lenses of other tools, and ``headgate lens import``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from headgate.capture.lens import LensError, LensKind, load
from headgate.steering.lenses.commands import app, read_source

WIDTH = 6
MATRICES = torch.randn(3, WIDTH, WIDTH, generator=torch.Generator().manual_seed(1)).half()
BY_LAYER = {layer: MATRICES[layer] for layer in range(3)}


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


@pytest.mark.parametrize(
    ("content", "layers"),
    [
        ({"J": BY_LAYER, "source_layers": [0, 1, 2], "d_model": WIDTH, "n_prompts": 9}, [0, 1, 2]),
        ({"J": {"4": MATRICES[0], "9": MATRICES[1], "2": MATRICES[2]}}, [2, 4, 9]),
        ({"J": MATRICES, "meta": {"d_model": WIDTH, "model": "m"}}, [0, 1, 2]),
        ({"J": MATRICES, "meta": {"source_layers": [5, 1, 3]}}, [1, 3, 5]),
        ({"parameters": {"jacobians": BY_LAYER}}, [0, 1, 2]),
    ],
    ids=["reference", "texts", "one tensor", "one tensor of named layers", "parameters"],
)
def test_jacobian_lenses_of_every_form_are_read(tmp_path: Path, content: Any, layers: list[int]) -> None:
    found = read_source(saved(tmp_path / "lens.pt", content))

    assert (found.kind, list(found.matrices), dict(found.biases)) == (LensKind.JACOBIAN, layers, {})
    order = {"4": 0, "9": 1, "2": 2} if 9 in layers else {5: 0, 1: 1, 3: 2} if 5 in layers else {0: 0, 1: 1, 2: 2}
    for layer, place in order.items():
        assert found.matrices[int(layer)].dtype == np.float16
        np.testing.assert_array_equal(found.matrices[int(layer)], MATRICES[place].numpy())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"jacobian_sum": {}}, "expected 'J' or 'parameters.jacobians', found jacobian_sum"),
        ([1], "expected a dictionary with 'J', got list"),
        ({"J": BY_LAYER, "d_model": 7}, r"'J\.0'.*expected the shape \[7, 7\] \(d_model"),
        ({"J": {0: MATRICES[0], 1: torch.ones(5, 5)}}, r"'J\.1'.*expected the shape \[6, 6\]"),
        ({"J": {0: torch.ones(6, 5)}}, r"expected the shape \[6, 6\]"),
        ({"J": BY_LAYER, "source_layers": [0, 1]}, r"has the layers \[0, 1, 2\], and source_layers says \[0, 1\]"),
        ({"J": {"first": MATRICES[0]}}, "expected numbers of layers, got 'first'"),
        ({"J": MATRICES[0]}, r"expected \[layers, d, d\]"),
        ({"J": {}}, "has no layer"),
        ({"J": BY_LAYER, "run": Path("x")}, "so it is not loaded"),
    ],
    ids=["checkpoint", "list", "d_model", "widths", "not square", "layers", "names", "axes", "empty", "pickled"],
)
def test_what_is_no_jacobian_lens_is_refused_by_name(tmp_path: Path, content: Any, message: str) -> None:
    path = saved(tmp_path / "lens.pt", content)
    with pytest.raises(LensError, match=message) as refused:
        read_source(path)
    assert str(path) in str(refused.value)


def tuned(folder: Path, **config: Any) -> Path:
    state = {f"{index}.weight": MATRICES[index].float() for index in range(3)}
    state |= {f"{index}.bias": torch.full((WIDTH,), float(index)) for index in range(3)}
    torch.save(state, folder / "params.pt")
    about = {"d_model": WIDTH, "num_hidden_layers": 3, "base_model_name_or_path": "m", "unembed_hash": "x", **config}
    (folder / "config.json").write_text(json.dumps(about))
    return folder


def test_a_tuned_lens_reads_after_the_layer_before_its_translator(tmp_path: Path) -> None:
    found = read_source(tuned(tmp_path))

    assert (found.kind, found.model, sorted(found.matrices)) == (LensKind.TUNED, "m", [0, 1])
    for layer in (0, 1):
        np.testing.assert_array_equal(found.matrices[layer], MATRICES[layer + 1].float().numpy())
        np.testing.assert_array_equal(found.biases[layer], np.full(WIDTH, layer + 1.0))


def test_what_is_no_tuned_lens_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(LensError, match=r"with params.pt and config.json; no params.pt"):
        read_source(tmp_path)
    with pytest.raises(LensError, match=r"expected the shape \[7, 7\] \(d_model\)"):
        read_source(tuned(tmp_path, d_model=7))
    with pytest.raises(LensError, match="lens_type 'mlp' is not known"):
        read_source(tuned(tmp_path, lens_type="mlp"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LensError, match=r"config\.json: not the config of a tuned lens"):
        read_source(tmp_path / "params.pt")
    with pytest.raises(LensError, match="no such file"):
        read_source(tmp_path / "nothing.pt")


def test_the_command_writes_what_was_read(tmp_path: Path) -> None:
    source, target = saved(tmp_path / "lens.pt", {"J": BY_LAYER}), tmp_path / "lens.safetensors"
    run = CliRunner().invoke(app, ["import", str(source), str(target), "--model", "m"])

    assert run.exit_code == 0, run.output
    assert "jacobian lens, of m, 3 layers (0 to 2), 6 values" in run.output
    lens = load(target)
    np.testing.assert_array_equal(lens.matrix(2), MATRICES[2].numpy())
    assert CliRunner().invoke(app, ["show", str(target)]).output == run.output
    refused = CliRunner().invoke(app, ["import", str(tmp_path / "no.pt"), str(target)])
    assert (refused.exit_code, "no such file" in refused.output) == (1, True)
