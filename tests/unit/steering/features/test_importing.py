"""Finding out of which format a source is."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate.steering.features.importing import open_coder
from headgate.steering.features.tensors import FeatureFileError
from tests.fakes.sparse_coders import (
    MATRICES,
    only,
    save,
)


def test_a_transcoder_takes_no_other_site_and_an_unknown_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(b"")
    with pytest.raises(FeatureFileError, match=r"of no known format \(headgate, saelens, gemma_scope"):
        open_coder(tmp_path / "x.pkl")
    with pytest.raises(FeatureFileError, match="no such file or folder"):
        open_coder(tmp_path / "y")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/cfg.json").write_text("{", encoding="utf-8")
    save(tmp_path / "broken/sae_weights.safetensors", only(*MATRICES))
    with pytest.raises(FeatureFileError, match="expected an object of JSON"):
        open_coder(tmp_path / "broken")
