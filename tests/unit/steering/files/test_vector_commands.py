"""``headgate vectors`` on files of every format."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from headgate.capture import cli
from headgate.steering.files.commands import app
from headgate.steering.files.foreign_files import CONVERTERS
from headgate.steering.files.vector_files import VectorFile, load, save

RUNNER = CliRunner()
STACKED = torch.arange(1.0, 13.0).reshape(3, 4)


def run(*arguments: object, code: int = 0) -> str:
    result = RUNNER.invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


@pytest.fixture
def persona(tmp_path: Path) -> Path:
    path = tmp_path / "evil_response_avg_diff.pt"
    torch.save(STACKED.double(), path)
    return path


def test_a_file_is_shown(persona: Path) -> None:
    digest = hashlib.sha256(persona.read_bytes()).hexdigest()

    told = run("show", persona)
    document = json.loads(run("show", persona, "--layer", 1, "--json"))

    assert "persona_vectors, float64, vectors of 4 values" in told
    assert f"sha256 {digest}" in told
    assert "left_out: row 0" in told
    for layer in (0, 1):
        assert f"{layer}.post_mlp  norm {np.linalg.norm(STACKED[layer + 1]):.5g}" in told
    assert document["sha256"] == digest
    assert document["vectors"] == [
        {"tier": "vectors", "site": "1.post_mlp", "norm": pytest.approx(21.1187), "peak": 12.0}
    ]


def test_a_file_is_imported_with_its_source(persona: Path, tmp_path: Path) -> None:
    told = run("import", f"{persona}@layer=0", "--to", tmp_path / "evil.safetensors")

    made = load(tmp_path / "evil.safetensors")
    assert made.vectors == load(persona, layer=0).vectors
    assert made.metadata["source"] == persona.name
    assert made.metadata["source_sha256"] == hashlib.sha256(persona.read_bytes()).hexdigest()
    assert made.metadata["format"] == "persona_vectors"
    assert "evil.safetensors: safetensors, bfloat16, vectors of 4 values" in told
    assert f"source_sha256: {made.metadata['source_sha256']}" in told


def test_an_import_of_a_file_of_headgate_names_its_element_type(persona: Path, tmp_path: Path) -> None:
    run("import", persona, "--to", tmp_path / "evil.safetensors", "--layer", 1)
    vectors = load(tmp_path / "evil.safetensors").vectors
    assert vectors is not None
    save(tmp_path / "mine.safetensors", vectors)

    told = run("import", tmp_path / "mine.safetensors", "--to", tmp_path / "again.safetensors")

    assert "again.safetensors: safetensors, bfloat16, vectors of 4 values" in told


def test_every_tier_of_a_file_of_headgate_is_shown_and_kept(persona: Path, tmp_path: Path) -> None:
    vectors = load(persona).vectors
    assert vectors is not None
    file = VectorFile(vectors=vectors, decode_vectors=vectors.scaled(2.0), metadata={"note": "mine"})
    save(tmp_path / "v.json", file)

    told = run("import", tmp_path / "v.json", "--to", tmp_path / "v.safetensors")

    assert told.count("decode_vectors") == 2
    assert "note: mine" in told
    assert load(tmp_path / "v.safetensors").tiers() == file.tiers()


def test_converters_are_printed(tmp_path: Path) -> None:
    for name, text in CONVERTERS.items():
        assert run("converter", name) == text
    assert "no converter 'x'; there are steering-vectors, numpy" in run("converter", "x", code=1)


def test_errors_are_a_line_and_status_1(persona: Path, tmp_path: Path) -> None:
    assert "no layer 7" in run("show", persona, "--layer", 7, code=1)
    assert "layer is given twice" in run("show", f"{persona}@layer=1", "--layer", 1, code=1)
    assert "such file" in run("show", tmp_path / "direction.pt", code=1)
    assert "ends in .safetensors" in run("import", persona, "--to", tmp_path / "v.gguf", code=1)
    assert "such file" in run("import", persona, "--to", tmp_path / "no" / "v.safetensors", code=1)
    assert list(tmp_path.iterdir()) == [persona]


def test_it_is_a_command_of_headgate(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["vectors", "--help"])

    assert ended.value.code == 0
    assert "converter" in capsys.readouterr().out
