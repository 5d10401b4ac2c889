"""Files that the producers' own classes wrote, against the activations and rows that those classes computed.

`tests/producers/record.py` recorded them: sae-lens 6.54.12, dictionary_learning 0.1.0, eai-sparsify 1.3.3 and
circuit-tracer 0.5.0. ``make test-producers`` records them anew.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from headgate.capture.schema.consumer import RowArguments
from headgate.steering.features.canonical import write_coder
from headgate.steering.features.consumer import FeaturesReadout
from headgate.steering.features.importing import open_coder, read_source
from headgate.steering.features.source_coder import Hints
from tests.source_tree import ROOT

RECORDED = Path(os.environ.get("HEADGATE_RECORDED", ROOT / "tests" / "producers" / "recorded"))
CODERS = {path.relative_to(RECORDED).parts[0]: path.parent for path in sorted(RECORDED.rglob("expected.safetensors"))}


def test_every_producer_was_recorded() -> None:
    kinds = {name.partition("-")[0] for name in CODERS}

    assert kinds == {"saelens", "dictionary_learning", "sparsify", "circuit_tracer"}
    assert len(CODERS) >= 43


def path_of(folder: Path) -> Path:
    """The folder, or the file of layer 3 where each layer has one."""
    return next(folder.glob("*_3.safetensors"), folder)


@pytest.mark.parametrize("imports", [False, True], ids=["direct", "imported"])
@pytest.mark.parametrize("name", CODERS)
def test_activations_and_rows_are_those_of_the_producers_class(name: str, imports: bool, tmp_path: Path) -> None:
    folder = CODERS[name]
    expected = load_file(folder / "expected.safetensors")
    if imports:
        write_coder(tmp_path / "x.safetensors", read_source(path_of(folder), Hints()), name="x", path="recorded")
    coder = open_coder(tmp_path / "x.safetensors" if imports else path_of(folder))

    activations = coder.encode(expected["rows"])

    assert (expected["activations"] > 0).sum() >= 4
    np.testing.assert_allclose(activations, expected["activations"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(coder.decode(activations, expected["rows"]), expected["decoded"], rtol=1e-4, atol=1e-5)
    features = [1, 23, 8]
    few = coder.encode_few(expected["rows"], features)
    np.testing.assert_allclose(few, expected["activations"][:, features], rtol=1e-4, atol=1e-5)
    assert coder.read_site is not None
    assert coder.read_site.layer == 3


@pytest.mark.parametrize("name", CODERS)
def test_features_read_on_the_device_are_those_of_the_producers_class(name: str) -> None:
    coder, expected = open_coder(path_of(CODERS[name])), load_file(CODERS[name] / "expected.safetensors")
    rows, activations = torch.from_numpy(expected["rows"]).double(), expected["activations"]
    top = activations.shape[1]
    host = np.full((len(rows), 1 + top), -1, np.int64)
    given = host.copy()
    given[:, 1:] = np.arange(top)[::-1]
    read = FeaturesReadout([coder], top).on(torch.device("cpu"))

    strongest = read(rows, RowArguments(host, torch.from_numpy(host))).numpy()
    of_given = read(rows, RowArguments(given, torch.from_numpy(given))).numpy()

    np.testing.assert_allclose(of_given[:, top:], activations[:, ::-1], rtol=1e-4, atol=1e-5)
    for ids, values, row in zip(strongest[:, :top].astype(int), strongest[:, top:], activations, strict=True):
        is_active = values > 0
        assert sorted(ids[is_active]) == np.flatnonzero(row > 0).tolist()
        np.testing.assert_allclose(values[is_active], row[ids[is_active]], rtol=1e-4, atol=1e-5)
        assert (np.diff(values) <= 0).all()


@pytest.mark.parametrize("name", CODERS)
def test_a_change_of_features_is_the_producers_decoding_of_edited_activations_plus_the_error(name: str) -> None:
    coder = open_coder(path_of(CODERS[name]))
    expected = {
        key: values.astype(np.float64) for key, values in load_file(CODERS[name] / "expected.safetensors").items()
    }
    x, a = expected["rows"], coder.encode(expected["rows"], np.float64)
    edited = a.copy()
    edited[:, [2, 20]] = 1.5, 0.0

    delta = coder.delta(x, {2: 1.5, 20: 0.0}, np.float64)[0]

    np.testing.assert_allclose(delta, coder.decode(edited, x) - coder.decode(a, x), atol=1e-12)
    error = expected["decoded"] - coder.decode(a, x)
    np.testing.assert_allclose(error, 0, atol=2e-5)
