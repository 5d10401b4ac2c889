"""Files of lenses, and the direction of a token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from headgate.capture.lens import LensError, LensKind, load, save

RNG = np.random.default_rng(1)
MATRICES = {layer: RNG.normal(size=(6, 6)).astype(np.float16) for layer in (0, 2)}
BIASES = {2: RNG.normal(size=6).astype(np.float32)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lens.safetensors"


def test_a_lens_is_read_as_it_was_written(path: Path) -> None:
    save(path, LensKind.JACOBIAN, MATRICES, model="m", source="s.pt")

    lens = load(path)

    assert (lens.kind, lens.hidden_size, lens.layers, lens.model, lens.source) == ("jacobian", 6, (0, 2), "m", "s.pt")
    for layer, matrix in MATRICES.items():
        assert lens.matrix(layer).dtype == np.float16
        np.testing.assert_array_equal(lens.matrix(layer), matrix)
        assert lens.bias(layer) is None


def test_a_tuned_lens_has_biases_and_its_checksum_follows_the_content(path: Path) -> None:
    wide = {layer: matrix.astype(np.float64) for layer, matrix in MATRICES.items()}
    save(path, LensKind.TUNED, wide, BIASES)
    lens = load(path)
    np.testing.assert_array_equal(lens.bias(2), BIASES[2])
    assert (lens.matrix(0).dtype, lens.bias(0)) == (np.float32, None)

    save(path, LensKind.TUNED, wide, {2: BIASES[2] + 1})

    assert load(path).sha256 != lens.sha256


def test_the_direction_of_a_token_raises_its_logit_fastest(path: Path) -> None:
    """The gradient of ``u . (M h + b)``, of a tuned lens ``u . (h + W h + b)``, after h."""
    row = RNG.normal(size=6)
    save(path, LensKind.JACOBIAN, MATRICES)
    jacobian = load(path).direction(2, row)
    save(path, LensKind.TUNED, MATRICES, BIASES)
    tuned = load(path).direction(2, row)

    expected = MATRICES[2].astype(float).T @ row
    np.testing.assert_allclose(jacobian, expected, rtol=1e-12)
    np.testing.assert_allclose(tuned, row + expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("matrices", "biases", "message"),
    [
        ({}, {}, "needs the matrix of one layer at least"),
        ({0: np.ones((6, 6)), 1: np.ones((5, 5))}, {}, r"layer 1 has the shape \[5, 5\]; expected \[6, 6\]"),
        ({0: np.ones((6, 6))}, {0: np.ones(5)}, r"the bias of layer 0 has the shape \[5\]; expected \[6\]"),
        ({0: np.full((6, 6), 1e300)}, {}, "not finite, or too large"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_what_is_no_lens_is_not_written(path: Path, matrices: dict, biases: dict, message: str) -> None:
    with pytest.raises(LensError, match=message):
        save(path, LensKind.TUNED, matrices, biases)

    assert not list(path.parent.iterdir())


def test_files_that_are_none_are_refused_by_name(path: Path, tmp_path: Path) -> None:
    with pytest.raises(LensError, match=r"lens\.safetensors: no such file"):
        load(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(LensError, match=r"lens\.safetensors: not a safetensors file"):
        load(path)
    save_file({"J": np.ones((2, 2))}, path)
    with pytest.raises(LensError, match="no lens of headgate; make one of other files: headgate lens import"):
        load(path)
    save(path, LensKind.JACOBIAN, MATRICES)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(LensError, match="cut off or damaged"):
        load(path)
    with pytest.raises(LensError, match="ends in"):
        save(tmp_path / "lens.pt", LensKind.JACOBIAN, MATRICES)
