"""SAEs of the benchmarks: that servers can open them, and what requests do with them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from headgate.steering.config import SteeringConfig
from headgate.steering.documents.features import read_features
from headgate.steering.features.importing import open_coder
from tests.benchmarks.models import ModelSize
from tests.benchmarks.saes import SIZES, sae_flags
from tests.benchmarks.workload import MODES, SHAPES, Asked

SIZE = ModelSize(num_layers=4, hidden=8, vocabulary=4096)


def test_each_request_brings_features_of_its_own_to_the_sae_of_the_server(tmp_path: Path) -> None:
    asked = Asked(MODES["16 features"], SHAPES["decode"], SIZE, "m", seed=1)
    flag, named = sae_flags("", tmp_path, SIZE)
    name, _, path = named.partition("=")

    edits = [msgspec.json.decode(asked.body(index)[1])["steering_features"] for index in range(64)]

    coder = open_coder(Path(path), name=name, site=None)
    assert flag == "--saes"
    assert (coder.num_features, coder.width) == (SIZES[name], SIZE.hidden)
    assert len({json.dumps(one) for one in edits}) == 64
    steerable = SteeringConfig(saes={name: path}).steerable(
        num_layers=SIZE.num_layers, hidden_size=SIZE.hidden, dtype="bfloat16"
    )
    for one in edits[:2]:
        read = read_features({"steering_features": one}, steerable)
        assert len({edit.feature for edit in read.prefill}) == 16
