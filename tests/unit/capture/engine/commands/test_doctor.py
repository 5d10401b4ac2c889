"""`headgate doctor`: what it says of a model's sites."""

from __future__ import annotations

import torch
from rich.console import Console

from headgate.capture.engine.commands import doctor
from headgate.capture.schema.sites import HookPoint


def printed(report: doctor.ModelReport) -> str:
    console = Console(record=True, width=200)
    doctor._print_model(console, report)
    return console.export_text()


def test_the_reason_why_there_is_no_hook_z_is_printed() -> None:
    hooks = (doctor.HookReport(HookPoint.ATTN_IN, "DecoderLayer.self_attn", 3),)
    report = doctor.ModelReport("Gemma", 3, 64, torch.bfloat16, 1023, hooks, "it has 128 values")

    text = printed(report)

    assert "attn_in" in text
    assert "no hook_z: it has 128 values" in text
    assert "no hook_z" not in printed(report._replace(no_hook_z=""))
