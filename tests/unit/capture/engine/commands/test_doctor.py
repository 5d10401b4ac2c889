"""`headgate doctor`: what it says of a model's sites."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from headgate.capture.engine import patch_table, vllm_names
from headgate.capture.engine.commands import doctor
from headgate.capture.engine.setup.patch_set import Patch
from headgate.capture.engine.vllm_names import Name
from headgate.capture.schema.errors import UnsupportedError
from headgate.capture.schema.sites import HookPoint, SiteShape


def printed(report: doctor.ModelReport) -> str:
    console = Console(record=True, width=200)
    doctor._print_model(console, report)
    return console.export_text()


def test_the_reason_why_there_is_no_hook_z_is_printed() -> None:
    hooks = (doctor.HookReport(HookPoint.ATTN_IN, "DecoderLayer.self_attn", (SiteShape(64, "bfloat16"),) * 3),)
    report = doctor.ModelReport("Gemma", 3, 64, torch.bfloat16, 1023, hooks, {HookPoint.HOOK_Z: "it has 128 values"})

    text = printed(report)

    assert "attn_in" in text
    assert "no hook_z: it has 128 values" in text
    assert "no hook_z" not in printed(report._replace(absent={}))
    alike = dict.fromkeys((HookPoint.K, HookPoint.V, HookPoint.ATTN_IN), "it shares them")
    text = printed(report._replace(absent=alike))
    assert "\nno k, v: it shares them" in text
    assert "\nsome layers have no attn_in: it shares them" in text


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    """``headgate doctor`` over a vLLM of two attributes, so that none is imported."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setattr(doctor, "_report_versions", lambda console: True)
    monkeypatch.setattr(doctor, "_report_compiler", lambda console: True)
    monkeypatch.setattr(patch_table, "PATCHES", [patch("loads"), patch("dumps")])
    monkeypatch.setattr(vllm_names, "required_names", lambda: [Name("json:JSONEncoder")])
    return doctor.command


def patch(target: str, parameters: tuple[str, ...] = ()) -> Patch:
    return Patch(target=Name(f"json:{target}"), wrap=lambda original: original, why="reads it", parameters=parameters)


def run(app: typer.Typer, *arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})


def test_wrapped_attributes_are_one_line_unless_they_are_asked_for(app: typer.Typer) -> None:
    short, long = run(app), run(app, "--verbose")

    assert short.exit_code == long.exit_code == 0
    assert "2 attributes are wrapped in memory, 1 are used, all fit" in short.stdout
    assert len(short.stdout.splitlines()) < 4
    assert "reads it" not in short.stdout
    assert long.stdout.count("reads it") == 2


def test_an_attribute_that_does_not_fit_is_named(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_table, "PATCHES", [patch("loads"), patch("dumps", parameters=("no_such",))])

    result = run(app)

    assert result.exit_code == 1
    assert "json.dumps takes (obj, " in result.stdout
    assert "json.loads" not in result.stdout
    assert "1 do not fit" in result.stdout


def test_a_name_that_does_not_exist_is_named(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_names, "required_names", lambda: [Name("json:Gone", "json.decoder:Gone")])

    result = run(app)

    assert result.exit_code == 1
    assert "json.Gone or json.decoder.Gone does not exist" in result.stdout
    assert "1 do not fit" in result.stdout


def test_a_model_that_is_not_there_is_one_line(app: typer.Typer, tmp_path: Path) -> None:
    result = run(app, str(tmp_path / "none"))

    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == f"{tmp_path / 'none'}: there is no such folder"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError("cannot reach the hub\nlook at https://x"), "OSError: cannot reach the hub look at https://x"),
        (ValueError("1 validation error\n  no config [type=value_error, input={...}]"), "1 validation error no config"),
        (UnsupportedError("its [layers] are not understood"), "owner/model: its [layers] are not understood"),
    ],
)
def test_a_model_that_cannot_be_read_is_one_line(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    def fail(model: str) -> doctor.ModelReport:
        raise error

    monkeypatch.setattr(doctor, "examine", fail)

    result = run(app, "owner/model")

    assert result.exit_code == 1
    assert told in result.stdout.splitlines()[-1]
    assert "Traceback" not in result.output
    assert "Traceback" in run(app, "owner/model", "--verbose").output
