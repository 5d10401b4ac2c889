"""The key of the compile caches covers the code that graphs are made of."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from headgate.capture.engine.compiler import graph_code
from headgate.capture.engine.compiler.graph_code import digest_of, traced_modules
from headgate.capture.engine.model import forward_wrappers
from headgate.capture.engine.site_action import SiteAction, SiteValue
from headgate.capture.engine.worker import capture_part
from headgate.capture.schema.sites import HookPoint
from headgate.steering.worker import site_action

OPS = "headgate.capture.engine.worker.capture_part"
STEERING = "headgate.steering.worker.site_action"


@pytest.mark.parametrize(
    ("function", "modules"),
    [
        (capture_part.capture_plain, {OPS}),
        (capture_part.capture_traced, {OPS, "headgate.capture.engine.compiler.inductor_heuristics"}),
        (capture_part.capture_unfused, {OPS, "headgate.capture.engine.compiler.unfused_copy"}),
        (capture_part.capture_with_kernel, {OPS, "headgate.capture.kernels.scatter_rows"}),
        (capture_part.counted(capture_part.capture_plain), {OPS, "headgate.capture.engine.worker.capture_part"}),
        (site_action.add_traced, {STEERING}),
        (site_action.add_with_kernel, {STEERING, "headgate.steering.kernels.add_rows"}),
        (site_action.counted(site_action.add_plain), {STEERING}),
    ],
)
def test_code_that_an_action_reaches_is_found(function: Callable[..., Tensor], modules: set[str]) -> None:
    assert modules <= set(traced_modules([function]))


def test_every_module_that_runs_in_a_forward_is_found() -> None:
    ring, slots = torch.zeros(8, 4), torch.arange(8, dtype=torch.int32)
    action = SiteAction(
        run=capture_part.capture_plain, tensors={capture_part.ROWS: ring, capture_part.SLOTS: slots}, order=0
    )
    norm = nn.LayerNorm(4)
    runs = forward_wrappers.attach(norm, HookPoint.FINAL_NORM, [action])
    place = forward_wrappers.HookPlace(module="norm")
    forward_wrappers.swap_class(norm, forward_wrappers.module_forward([(HookPoint.FINAL_NORM, place, runs)]))
    ran: set[str] = set()

    def note(frame: object, event: str, _: object) -> None:
        name = frame.f_globals.get("__name__", "")  # type: ignore[attr-defined]
        if event == "call" and name.startswith("headgate."):
            ran.add(name)

    sys.setprofile(note)
    try:
        norm(torch.ones(2, 4))
    finally:
        sys.setprofile(None)

    assert OPS in ran
    assert ran <= set(traced_modules([action.run]))


def test_all_of_the_compiler_folder_is_in_the_key() -> None:
    folder = Path(graph_code.__file__).parent
    modules = {f"headgate.capture.engine.compiler.{path.stem}" for path in folder.glob("*.py")} - {
        "headgate.capture.engine.compiler.__init__"
    }

    assert modules <= set(traced_modules([]))


def test_other_code_gives_another_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("1")
    monkeypatch.setattr(graph_code, "_path", lambda _: tmp_path / "code.py")
    before = digest_of([OPS])
    assert before == digest_of([OPS])

    (tmp_path / "code.py").write_text("2")

    assert digest_of([OPS]) != before
    assert digest_of([OPS, STEERING]) != digest_of([OPS])


def test_a_value_that_is_no_function_reaches_nothing() -> None:
    assert traced_modules([SiteValue, 3, "text"]) == tuple(sorted(graph_code.ALWAYS))
