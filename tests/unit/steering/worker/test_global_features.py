"""Features and reconstructions that act on everybody, on a CPU: as if each request had asked for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.encoded_worker import HIDDEN, SET, EncodedWorker
from tests.fakes.saes import TinySae

OTHER = {"sae": "a", "feature": 5, "add": -0.75}
VECTORS = {"post_mlp": {1: np.linspace(-1, 1, HIDDEN).astype(np.float32)}}
STREAM = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(3))
STEP = (("one", 0, 3), ("two", 1, 3), ("three", 2, 3))
"""Rows 0 to 2, 3 and 7 to 8 are of prompts."""


def steered(folder: Path, sae: TinySae, shared: dict[str, Any], *own: dict[str, Any]) -> torch.Tensor:
    """Rows of three requests of 3, 2 and 5 prompt tokens, with global fields and their own."""
    worker = EncodedWorker(folder, sae)
    worker.set_global(**shared)
    for (name, *_), num_prompt, fields in zip(STEP, (3, 2, 5), own, strict=True):
        worker.add(name, num_prompt, **fields)
    worker.step(*STEP)
    return worker.run(STREAM)


@pytest.mark.parametrize(
    "fields",
    [
        {"steering_features": [SET]},
        {"decode_steering_features": [SET, OTHER]},
        {"prefill_sae_reconstruction": ["a"], "steering_features": [SET]},
        {"sae_reconstruction": ["a"]},
    ],
    ids=["features", "of-a-phase", "with-reconstruction", "reconstruction"],
)
@pytest.mark.parametrize("architecture", ["jumprelu", "gated"])
def test_what_acts_on_everybody_is_what_each_request_could_ask_for(
    tmp_path: Path, architecture: str, fields: dict[str, Any]
) -> None:
    sae = TinySae(architecture=architecture, width=HIDDEN)

    shared = steered(tmp_path / "shared", sae, fields, {}, {}, {})
    own = steered(tmp_path / "own", sae, {}, fields, fields, fields)

    assert torch.equal(shared, own)
    assert not torch.equal(shared, STREAM)


def test_requests_act_beside_it_and_their_edits_take_the_place_of_its_own(tmp_path: Path) -> None:
    sae, rows = TinySae(width=HIDDEN), STREAM.double().numpy()
    own = {"steering_features": [{**SET, "set": -2.0}]}, {"steering_features": [OTHER]}, {"steering_vectors": VECTORS}

    found = steered(tmp_path, sae, {"steering_features": [SET]}, *own)

    added = rows[6:] + VECTORS["post_mlp"][1]
    np.testing.assert_allclose(found[:3], sae.edited(rows[:3], own[0]["steering_features"]), atol=1e-5)
    np.testing.assert_allclose(found[3:6], sae.edited(rows[3:6], [SET, OTHER]), atol=1e-5)
    np.testing.assert_allclose(found[6:], sae.edited(added, [SET]), atol=1e-5)


def test_a_request_may_reconstruct_what_everybody_does(tmp_path: Path) -> None:
    sae, rows = TinySae(width=HIDDEN), STREAM.double().numpy()
    shared = {"sae_reconstruction": ["a"], "steering_features": [SET]}

    found = steered(tmp_path, sae, shared, {"sae_reconstruction": ["a"]}, {"steering_features": [OTHER]}, {})

    expected = np.concatenate(
        [sae.reconstructed(part, edits) for part, edits in ((rows[:3], [SET]), (rows[3:6], [SET, OTHER]))]
    )
    np.testing.assert_allclose(found[:6], expected, atol=1e-5)
    np.testing.assert_allclose(found[6:], sae.reconstructed(rows[6:], [SET]), atol=1e-5)


def test_taken_back_it_leaves_rows_and_slots_as_they_were(tmp_path: Path) -> None:
    worker = EncodedWorker(tmp_path, TinySae(width=HIDDEN))
    worker.add("one", 3, steering_features=[{**SET, "set": -2.0}])
    worker.step(("one", 0, 3))
    before, slots = worker.run(STREAM), worker.part.headgate_stats()["steering"]["slots_live"]

    worker.set_global(steering_features=[SET, OTHER], sae_reconstruction=["a"])
    worker.step(("one", 0, 3))
    assert not torch.equal(worker.run(STREAM), before)
    worker.set_global()
    worker.step(("one", 0, 3))

    assert torch.equal(worker.run(STREAM), before)
    assert worker.part.headgate_stats()["steering"]["slots_live"] == slots
