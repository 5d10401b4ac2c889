"""Controllers in a process of their own steer an engine as those in the engine core do: the same tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headgate.steering import probes
from tests.conftest import stop_llm
from tests.engine.controller_cases import READ, WEIGHT, Driven, prompt_of
from tests.engine.gate_making import GateCase
from tests.engine.gate_runs import params_of, start
from tests.fakes.hosted_controllers import publish

NUM_REQUESTS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("hosted")
    publish(folder)
    probes.save(
        folder / "p.safetensors", probes.Probe(site=READ, weight=WEIGHT[None], bias=np.array([0.1], np.float32))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


def engine(folder: Path, part: str, *, is_apart: bool) -> Any:
    """An engine with controllers, with few blocks of memory."""
    probe = str(folder / "p.safetensors")
    pid = {"probe": probe, "module": "calm", "setpoint": 0.4, "min_scale": -1, "max_scale": 1, "min_emit_delta": 0}
    controllers = [
        {"name": "acting", "applies_to": "opt_in", "budget_ms": 1000, "params": {"probe": probe}},
        {"name": "pid", "budget_ms": 1000, "params": pid},
    ]
    (folder / part).mkdir()
    llm = start(
        folder / part, {"controllers": controllers, "controller_process": is_apart, "modules": {"calm": calm(folder)}}
    )
    return llm


def calm(folder: Path) -> str:
    """A module that is there at the start."""
    from headgate.steering import PhaseVectors, save
    from tests.engine.controller_cases import VECTORS

    path = folder / "calm.safetensors"
    if not path.exists():
        save(path, PhaseVectors.from_rows(rows_of(VECTORS)))
    return str(path)


def rows_of(document: dict[str, dict[int, list[float]]]) -> dict[Any, Any]:
    from headgate.capture.schema.sites import Site

    return {
        Site.parse(f"{layer}.{hook}"): np.array(row, np.float32)
        for hook, rows in document.items()
        for layer, row in rows.items()
    }


def run(llm: Any, seed: int, *, traced: float, acting: float) -> tuple[list[Any], dict[str, Any]]:
    """Answer random requests, several at once; returns tokens, reasons and logprobs, and what controllers did.

    Args:
        llm: Answers.
        seed: Of all.
        traced: Share of requests with a trace.
        acting: Share of requests that may select controllers; on the others one of them sets a scale at every token.
    """
    draw, driver = random.Random(seed), llm.llm_engine
    waiting, done = list(range(NUM_REQUESTS)), {}
    num_running = 0
    while waiting or driver.has_unfinished_requests():
        while waiting and num_running < 8 and draw.random() < 0.2:
            at = waiting.pop(0)
            selects = draw.choice([None, None, ["pid", "acting"], ["acting"], []]) if draw.random() < acting else None
            case: GateCase = Driven(name="driven", selects=selects)
            params = params_of(case, draw.choice([9, 20, 40, 70]))
            params.return_steering_trace = draw.random() < traced
            driver.add_request(str(at), {"prompt_token_ids": prompt_of(at % 30, draw.choice([3, 12, 40]))}, params)
            num_running += 1
        for output in driver.step():
            if output.finished:
                (sample,) = output.outputs
                num_running -= 1
                best = [max(each.values(), key=lambda one: one.logprob).logprob for each in sample.logprobs]
                done[int(output.request_id)] = (list(sample.token_ids), sample.stop_reason, best)
    activity = {each.name: (dict(each.actions), each.error) for each in llm.steering.dynamic().controllers}
    return [done[at] for at in range(NUM_REQUESTS)], activity


def test_an_engine_answers_alike_wherever_its_controllers_live(folder: Path) -> None:
    loads = [{"seed": 3, "traced": 0.1, "acting": 1.0}, {"seed": 4, "traced": 0.0, "acting": 1.0}]
    loads += [{"seed": 5, "traced": 0.05, "acting": 0.05}, {"seed": 6, "traced": 0.0, "acting": 0.0}]
    llm = engine(folder, "here", is_apart=False)
    expected = [run(llm, **load) for load in loads]
    stop_llm(llm)
    llm = engine(folder, "apart", is_apart=True)
    found = [run(llm, **load) for load in loads]
    stop_llm(llm)

    for (answers, activity), (wanted, wanted_activity) in zip(found, expected, strict=True):
        assert [answer[:2] for answer in answers] == [answer[:2] for answer in wanted]
        for (_, _, one), (_, _, other) in zip(answers, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
        assert activity == wanted_activity
    assert "by chance" in [reason for _, reason, _ in expected[0][0]]
    assert expected[0][1]["acting"][0]["applied"] > 50
