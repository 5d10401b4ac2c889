"""``headgate probe`` on captured rows, and files of labels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from headgate.capture import cli
from headgate.steering.probes import ProbeError, load, read_labels
from headgate.steering.probes.commands import app
from tests.fakes.stored_probes import direction, store

RUNNER = CliRunner()


def run(*arguments: object, code: int = 0) -> str:
    result = RUNNER.invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("captures")
    labels = store(root / "rows")
    (root / "labels.json").write_text(json.dumps(labels))
    return root


def test_a_probe_is_fitted_and_judged(captures: Path, tmp_path: Path) -> None:
    labels, probe = captures / "labels.json", tmp_path / "anger.safetensors"

    told = run("fit", captures / "rows", "--labels", labels, "--at", "3.post_mlp", "--fpr", 0.1, "-o", probe)

    assert "3.post_mlp, linear, class '1'; last_prompt" in told
    assert "held_out_auroc" in told
    made = load(probe)
    assert float(made.weight[0] @ direction()) > 0.9
    assert made.metadata["held_out_requests"] == "10"

    picture, figures = tmp_path / "roc.png", tmp_path / "roc.json"
    told = run(
        *("eval", probe, captures / "rows", "--labels", labels, "--fpr", 0.1),
        *("--picture", picture, "--json", figures),
    )
    assert "3.post_mlp, last_prompt: 40 rows of 40 requests" in told
    found = json.loads(figures.read_text())
    assert found["own"]["threshold"] == made.threshold
    assert found["chosen"]["fpr"] <= 0.1
    assert found["auroc"] == pytest.approx(
        np.trapezoid(found["roc"]["tpr"], found["roc"]["fpr"])
        if hasattr(np, "trapezoid")
        else np.trapz(found["roc"]["tpr"], found["roc"]["fpr"])
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"AUROC                {found['auroc']:.4f}" in told


def test_logistic_regression_is_a_method(captures: Path, tmp_path: Path) -> None:
    pytest.importorskip("sklearn", exc_type=ImportError)
    probe = tmp_path / "p.safetensors"

    run(
        *("fit", captures / "rows", "--labels", captures / "labels.json", "--at", "3.post_mlp"),
        *("--method", "logistic", "--pool", "token", "--regularization", 10, "-o", probe),
    )

    made = load(probe)
    assert made.pooling == "token"
    assert float(made.metadata["held_out_auroc"]) > 0.98


def test_errors_are_a_line_and_status_1(captures: Path, tmp_path: Path) -> None:
    rows, labels = captures / "rows", captures / "labels.json"
    one = tmp_path / "one.json"
    one.write_text('{"client-1": 1}')

    missing = run("fit", rows, "--labels", one, "--at", "3.post_mlp", code=1)
    assert "39 captured requests have no label: default/client-0" in missing
    assert "not a site" in run("fit", rows, "--labels", labels, "--at", "x", code=1)
    assert ".safetensors" in run("fit", rows, "--labels", labels, "--at", "3.post_mlp", "-o", "x.pt", code=1)
    assert "no such folder" in run("fit", tmp_path / "no", "--labels", labels, "--at", "3.post_mlp", code=1)
    assert "no such file" in run("eval", tmp_path / "no.safetensors", rows, "--labels", labels, code=1)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_picture_of_another_format_is_refused_by_name(captures: Path, tmp_path: Path) -> None:
    rows, labels, probe = captures / "rows", captures / "labels.json", tmp_path / "anger.safetensors"
    run("fit", rows, "--labels", labels, "--at", "3.post_mlp", "-o", probe)

    told = run("eval", probe, rows, "--labels", labels, "--picture", tmp_path / "roc.xyz", code=1)

    assert "roc.xyz: Format 'xyz' is not supported" in told


@pytest.mark.parametrize(("command", "extra"), [("fit", "probes"), ("eval", "plot")])
def test_help_names_the_extra(command: str, extra: str) -> None:
    """In square brackets, as pip takes it, Typer would read a name as markup, and leave it out."""
    told = re.sub(r"[\s│]+", " ", run(command, "--help"))

    assert f"needs the extra '{extra}'" in told


def test_it_is_a_command_of_headgate(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["probe", "--help"])

    assert ended.value.code == 0
    assert "eval" in capsys.readouterr().out


FORMS = {
    "an object": ("l.json", '{"a": true, "t/b": 0, "c": "1.0"}', {"a": "true", "t/b": "0", "c": "1.0"}),
    "a list": (
        "l.json",
        '[{"request_id": "a", "label": 1.0}, {"tag": "t", "id": "b", "label": "x"}, {"tag": "u", "label": 2}]',
        {"a": "1", "t/b": "x", "u": "2"},
    ),
    "lines": ("l.jsonl", '{"request_id": "a", "label": 1}\n\n{"id": 7, "label": 0}\n', {"a": "1", "7": "0"}),
    "columns": ("l.csv", 'request_id,label,note\na,1,x\n"b,c", 0 ,\n', {"a": "1", "b,c": "0"}),
    "columns of a spreadsheet": ("l.csv", "\ufefftag,request_id,label\r\nt,a,1\r\nt,b,0\r\n", {"t/a": "1", "t/b": "0"}),
}


@pytest.mark.parametrize(("name", "text", "expected"), FORMS.values(), ids=FORMS.keys())
def test_labels_are_read_from_every_form(tmp_path: Path, name: str, text: str, expected: Any) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8", newline="")

    assert read_labels(tmp_path / name) == expected


BAD = {
    "another suffix": ("l.txt", "", "expected labels in a file named *.json, *.jsonl, *.csv"),
    "no JSON": ("l.json", "{", "cannot be read"),
    "a number": ("l.json", "3", "expected an object of labels"),
    "a name twice": ("l.json", '{"a": 1, "b": 0, "a": 0}', "'a' stands there twice"),
    "a key twice": ("l.jsonl", '{"id": "a", "label": 1, "label": 0}', "line 1: 'label' stands there twice"),
    "an entry of a text": ("l.json", '["a"]', "entry 0: expected an object"),
    "a label of null": ("l.json", '{"a": null}', "'a': expected a label"),
    "no label": ("l.jsonl", '{"id": "a"}', "line 1: expected a label"),
    "no id": ("l.jsonl", '{"id": "a", "label": 1}\n{"name": "b", "label": 1}', "line 2: expected request_id"),
    "no header": ("l.csv", "a,1\nb,0\n", "line 2: expected request_id (or id) or tag; got a, 1"),
    "two labels": ("l.csv", "id,label\na,1\na,0\n", "'a' is labelled '1' and '0'"),
    "none": ("l.csv", "id,label\n", "has no labels"),
    "bytes": ("l.csv", "id,label\n\x00", "expected a label"),
}


@pytest.mark.parametrize(("name", "text", "message"), BAD.values(), ids=BAD.keys())
def test_bad_labels_are_told(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")

    with pytest.raises(ProbeError) as caught:
        read_labels(tmp_path / name)

    assert message in str(caught.value)
    assert name in str(caught.value)


def test_labels_that_are_not_there_are_told(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match=r"none.json: cannot be read: .*No such file"):
        read_labels(tmp_path / "none.json")
