"""Lenses of other tools, ``headgate lens import``, and what ``headgate lens fit`` refuses and keeps."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import headgate.capture
from headgate.capture.lens import LensError, LensKind, load
from headgate.steering.lenses import commands
from headgate.steering.lenses.commands import app, cut_prompts, read_source

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


class Letters:
    """A tokenizer of one id for each letter."""

    def __init__(self, bos_token_id: int | None, *, is_added: bool) -> None:
        self.bos_token_id, self._is_added = bos_token_id, is_added

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int | None]:
        return [self.bos_token_id] * (add_special_tokens and self._is_added) + [ord(letter) - 96 for letter in text]


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (Letters(0, is_added=True), [[0, 1, 2], [0, 3, 4], [0, 5, 6]]),
        (Letters(0, is_added=False), [[1, 2, 3], [4, 5, 6]]),
        (Letters(None, is_added=False), [[1, 2, 3], [4, 5, 6]]),
    ],
    ids=["added", "not added", "none"],
)
def test_every_prompt_of_a_fit_begins_as_a_text_does(tokenizer: Letters, expected: list[list[int]]) -> None:
    assert cut_prompts(tokenizer, "abcdefg", 3) == expected


class Engine:
    """In place of vLLM's: four layers."""

    llm_engine = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=4)))

    def __init__(self, model: str, **_: object) -> None:
        if model != "model":
            raise OSError(f"no model {model}")

    def get_tokenizer(self) -> Letters:
        return Letters(0, is_added=True)


def run_fit(folder: Path, *arguments: str, target: str = "j.safetensors", model: str = "model") -> Any:
    (folder / "text.txt").write_text("a" * 100)
    given = ["fit", model, str(folder / "text.txt"), str(folder / target), "--num-tokens", "20", *arguments]
    return CliRunner().invoke(app, given)


@pytest.mark.parametrize("layer", ["-1", "3", "99"])
def test_a_layer_that_no_fit_can_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: str) -> None:
    """Rows after the last layer are captured before anything acts there."""
    monkeypatch.setitem(vars(headgate.capture), "LLM", Engine)
    monkeypatch.setattr(commands, "fit_layer", lambda *_: pytest.fail("a layer was fitted"))

    refused = run_fit(tmp_path, "--layer", "1", "--layer", layer)

    assert refused.exit_code == 2, refused.output
    assert f"--layer {layer}: expected 0 to 2" in refused.output


def test_a_fit_that_ends_early_keeps_the_layers_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit_layer(llm: Engine, prompts: list[list[int]], layer: int, rounds: int) -> np.ndarray:
        if layer == 2:
            raise LensError("a prompt's rows are missing: x")
        return MATRICES[layer].double().numpy()

    monkeypatch.setitem(vars(headgate.capture), "LLM", Engine)
    monkeypatch.setattr(commands, "fit_layer", fit_layer)

    run = run_fit(tmp_path)

    assert (run.exit_code, "a prompt's rows are missing: x" in run.output) == (1, True)
    kept = load(tmp_path / "j.safetensors")
    assert kept.layers == (0, 1)
    for layer in kept.layers:
        np.testing.assert_array_equal(kept.matrix(layer), MATRICES[layer].numpy())


def test_what_a_fit_cannot_read_or_write_is_refused_before_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(headgate.capture), "LLM", lambda *_, **__: pytest.fail("the engine was started"))

    named = run_fit(tmp_path, target="j.pt")
    missing = CliRunner().invoke(app, ["fit", "model", str(tmp_path / "no.txt"), str(tmp_path / "j.safetensors")])

    assert (named.exit_code, "ends in .safetensors" in named.output) == (2, True)
    assert (missing.exit_code, "no.txt" in missing.output) == (1, True)


def test_a_fit_names_a_text_that_is_too_short_and_a_model_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(headgate.capture), "LLM", Engine)

    short, missing = run_fit(tmp_path, "--num-tokens", "102"), run_fit(tmp_path, model="other")

    assert (short.exit_code, "the text has 100 tokens, and a prompt takes 101 of them" in short.output) == (1, True)
    assert (missing.exit_code, "no model other" in missing.output) == (1, True)


def test_a_model_of_one_layer_has_nothing_to_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier file is not taken for what was fitted."""

    class OneLayer(Engine):
        llm_engine = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=1)))

    monkeypatch.setitem(vars(headgate.capture), "LLM", OneLayer)

    run = run_fit(tmp_path)

    assert (run.exit_code, "a model of one layer needs no lens" in run.output) == (1, True)
