"""``headgate sae``: from a downloaded folder to checked rows and the tokens of a feature."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from headgate.capture import cli
from headgate.steering.features.commands import app
from headgate.steering.features.importing import open_coder
from headgate.steering.features.labels import labels_of
from headgate.steering.features.source_coder import CoderKind
from tests.fakes.sparse_coders import put, save
from tests.fakes.stored_features import SITE, WIDTH, activations, dictionary, imported, mean, store, trained

RUNNER = CliRunner()
NO_TOKENIZER = ("--tokenizer", "/nowhere")


def run(*arguments: object, code: int = 0) -> str:
    result = RUNNER.invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout if "--json" in arguments else result.output


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("captures")
    store(root)
    return root


@pytest.fixture
def downloaded(tmp_path: Path) -> Path:
    """A folder of SAELens: the SAE of `trained`, on rows that were scaled by a third."""
    config = {"architecture": "jumprelu", "d_in": WIDTH, "d_sae": WIDTH, "apply_b_dec_to_input": False}
    config |= {"normalize_activations": "expected_average_only_in"}
    config |= {"metadata": {"hook_name": "blocks.3.hook_resid_post"}}
    put(tmp_path / "downloaded/cfg.json", config)
    rows = dictionary(SITE).astype(np.float32)
    middle = mean(SITE).astype(np.float32) / 3
    tensors = {"W_enc": rows.T, "W_dec": rows, "b_enc": -rows @ middle, "b_dec": middle}
    tensors["threshold"] = np.full(WIDTH, 0.5 / 3, np.float32)
    save(tmp_path / "downloaded/sae_weights.safetensors", tensors)
    return tmp_path / "downloaded"


def test_import_check_and_show(downloaded: Path, captures: Path, tmp_path: Path) -> None:
    to = tmp_path / "joy.safetensors"
    assert "give it: --scale X" in run("import", downloaded, "--to", to, code=1)
    assert not to.exists()

    told = run("import", downloaded, "--to", to, "--scale", "0.3333", "--captures", captures)
    assert told.startswith("joy: 3.post_mlp; 16 features of width 16, jumprelu; from saelens, sha256 ")
    assert open_coder(to).max_activations([0]) is not None

    report = run("check", "joy", "--sae-root", tmp_path, "--captures", captures)
    assert "joy at 3.post_mlp: 228 rows, 6 left out" in report
    assert "variance unexplained  0.0" in report

    shown = json.loads(run("show", to, 5, "--captures", captures, "--top", 3, "--context", 2, "--json", *NO_TOKENIZER))
    expected = sorted(
        ((activations(f"request-{r}", p)[5], f"client-{r}", p) for r in range(6) for p in range(1, 39)), reverse=True
    )
    assert len(shown["examples"]) == 3
    for example, (value, request, position) in zip(shown["examples"], expected, strict=False):
        assert (example["request_id"], example["position"]) == (request, position)
        assert example["activation"] == pytest.approx(value / 3, abs=0.1), "in units of the rows it was trained on"
        assert len(example["before"].split()) == 2
    assert (shown["num_rows"], shown["num_active"]) == (6 * 38, sum(value > 0 for value, _, _ in expected))


def test_check_says_what_is_wrong_and_what_would_be_better(captures: Path, tmp_path: Path) -> None:
    wrong = imported(tmp_path, trained(7.0))

    told = run("check", wrong, "--captures", captures, code=1)

    assert "problem: FVU is" in told
    assert "better with rows times" in told
    report = json.loads(run("check", wrong, "--captures", captures, "--json", code=1))
    assert report["declared_l0"] == 3
    assert report["findings"]
    assert "1.post_mlp: 228 rows" in run("check", wrong, "--captures", captures, "--site", "1.post_mlp", code=1)


def test_show_prints_tokens_in_their_context(captures: Path, tmp_path: Path) -> None:
    path = imported(tmp_path, trained())

    result = run("show", path, 5, "--captures", captures, "--top", 2, *NO_TOKENIZER)

    assert "showing ids; name one: --tokenizer MODEL" in result
    assert "x, feature 5: active in" in result
    assert "default/client-" in result
    for arguments, why in (
        ((16, "--captures", captures), "no feature 16; it has 0 to 15"),
        ((0, "--captures", captures, "--site", "0.pre_attn"), "no captured rows at 0.pre_attn"),
        ((0, "--captures", tmp_path / "no"), "no such folder"),
    ):
        assert why in run("show", path, *arguments, *NO_TOKENIZER, code=1)


def test_wrong_arguments_are_named(downloaded: Path, captures: Path, tmp_path: Path) -> None:
    to = tmp_path / "x.safetensors"
    for arguments, why in (
        (("import", downloaded, "--to", tmp_path / "x.pt"), "expected a name that ends in .safetensors"),
        (
            ("import", downloaded, "--to", to, "--dtype", "int8"),
            "expected float32, bfloat16, float16, got 'int8'",
        ),
        (("import", downloaded, "--to", to, "--site", "3.nowhere"), "--site: not a site: '3.nowhere'"),
        (("import", downloaded, "--to", to, "--format", "sae"), "--format: unknown 'sae'"),
        (("import", tmp_path / "no", "--to", to), "no such file or folder"),
        (("check", "no", "--captures", captures), "no such file or folder; names are looked for in --sae-root"),
        (("check", "no", "--captures", captures, "--sae-root", tmp_path), f"no such file or folder, nor in {tmp_path}"),
    ):
        assert why in run(*arguments, code=1)
    assert not to.exists()


def test_a_threshold_given_at_import_stands_for_top_k(tmp_path: Path) -> None:
    first = imported(tmp_path, trained(kind=CoderKind.TOPK, k=3, threshold=None))

    run("import", first, "--to", tmp_path / "y.safetensors", "--threshold", "0.7", "--name", "joy")

    coder = open_coder(tmp_path / "y.safetensors")
    assert (coder.name, coder.decision) == ("joy", "threshold")
    assert coder.rows([0]).threshold == pytest.approx([0.7])


def test_it_is_a_command_of_headgate() -> None:
    assert "sae" in RUNNER.invoke(cli.app, ["--help"]).output


def test_labels_are_kept_beside_the_sae(downloaded: Path, tmp_path: Path) -> None:
    run("import", downloaded, "--to", tmp_path / "joy.safetensors", "--scale", "0.3333")
    (tmp_path / "a.csv").write_text("3,the sea\n3,waves\n1,cats\n")

    told = run("labels", "joy", tmp_path / "a.csv", "--sae-root", tmp_path)

    assert told.splitlines() == [
        f"{tmp_path / 'joy.safetensors.labels.jsonl'}: 2 labels; joy has 16 features",
        "1 further labels of the same features were left out",
    ]
    assert dict(labels_of(tmp_path / "joy.safetensors")) == {1: "cats", 3: "the sea"}
    (tmp_path / "a.csv").write_text("16,too large\n")
    assert "the SAE has the features 0 to 15" in run("labels", tmp_path / "joy.safetensors", tmp_path / "a.csv", code=1)
    (tmp_path / "a.csv").write_text("")
    assert "no labels" in run("labels", tmp_path / "joy.safetensors", tmp_path / "a.csv", code=1)
