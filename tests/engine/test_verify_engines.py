"""``headgate verify`` on real engines: what they record passes, and vectors that go to the wrong rows are found.

Each engine is a process of its own, as it is when a user verifies.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headgate.capture.engine.commands.verify import environment, run_engine
from headgate.capture.engine.commands.verify_engine import CAPTURED, judge_complete
from headgate.capture.engine.commands.verify_stock import judge_graphs
from headgate.capture.engine.contracts.parts import check_parts
from headgate.capture.monitoring.verify_checks import SERVED, Recording, Status, Verdict
from tests.deadlines import patience
from tests.engine.tiny_models import tiny_model
from tests.fakes.saes import TinySae

FLAGS = [
    *("--dtype", "float32", "--skip-tokenizer-init", "--max-model-len", "128", "--max-num-batched-tokens", "64"),
    *("--max-num-seqs", "16", "--block-size", "32"),
]
EACH_KIND = ("q_pre", "k_pre", "q", "k", "v", "hook_z", "mlp_act", "attn_out", "mlp_out")
SECTIONS = {
    "capture": {
        "sites": {**{hook: [1] for hook in EACH_KIND}, "post_mlp": "all", "pre_attn": [1], "final_norm": "all"}
    },
    "steering": {"sites": {**{hook: [1] for hook in EACH_KIND}, "post_mlp": "all", "pre_attn": "all"}},
}
"""Sites of every width of the model."""
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_WORKER_MULTIPROC_METHOD": "fork", "HF_HUB_OFFLINE": "1"}
TIMEOUT_S = patience(400)

MUTANT = """
import numpy as np


def install():
    from headgate.steering.worker.rows import step_rows

    right = step_rows._spread
    step_rows._spread = lambda view, batch: np.roll(right(view, batch), 1)
"""


def record(folder: Path, env: dict[str, str]) -> Recording:
    """What the engine in use records of a tiny model whose heads and neurons have widths of their own."""
    out, file, log = folder / "out.msgpack", folder / "job.json", folder / "log"
    saes = {"random": f"{TinySae(architecture='topk', width=64).save(folder / 'sae')}@1.post_mlp"}
    consumers = [{"name": "lens"}, {"name": "attention"}, {"name": "features", "params": {"saes": saes}}]
    # Of patterns, the layer must not be one whose queries and keys are steered.
    sites = {**SECTIONS["capture"]["sites"], "q": [0], "k": [0]}
    capture = {"sites": sites, "consumers": consumers}
    job = {
        "kind": SERVED,
        "arguments": ["--model", str(tiny_model("qwen3")), *FLAGS],
        "sections": {**SECTIONS, "capture": capture},
        "out": str(out),
    }
    file.write_text(json.dumps(job))
    status = run_engine(file, log, {**environment(SERVED, os.environ), **SETTINGS, **env}, TIMEOUT_S)
    assert status == 0, log.read_text()[-4000:]
    return msgspec.msgpack.decode(out.read_bytes(), type=Recording)


def steering_verdicts(served: Recording) -> dict[str, Status]:
    return {verdict.check: verdict.status for verdict in check_parts()["steering"].judge({SERVED: [served]})}


@pytest.mark.engine
def test_what_an_engine_records_passes_the_checks_that_need_no_other(tmp_path: Path) -> None:
    served = record(tmp_path, {})

    assert set(steering_verdicts(served).values()) == {Status.PASSED}
    readings: list[Verdict] = list(check_parts()["consumers"].judge({SERVED: [served]}))
    assert [verdict.status for verdict in readings] == [Status.PASSED] * 4, readings
    assert judge_complete(served.scenes[CAPTURED]).status is Status.PASSED
    run_counts, replays = judge_graphs({"stock": [served], SERVED: [served]})
    assert (run_counts.status, replays.status) == (Status.PASSED, Status.SKIPPED), (run_counts, replays)


@pytest.mark.extended
def test_vectors_that_go_to_the_next_row_are_found(tmp_path: Path) -> None:
    """The self-test cannot see this one: it aims at rows by itself."""
    (tmp_path / "headgate_mutant.py").write_text(MUTANT)
    metadata = tmp_path / "headgate_mutant-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: headgate-mutant\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nmutant = headgate_mutant:install\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))

    verdicts = steering_verdicts(record(tmp_path, {"PYTHONPATH": path, "VLLM_PLUGINS": "headgate,mutant"}))

    assert verdicts["batch-mates of steered requests keep their answers"] is Status.FAILED
    assert verdicts["every token gets its own vector, and no other"] is Status.FAILED


@pytest.mark.extended
def test_the_command_verifies_a_model(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("headgate")), "verify", str(tiny_model("llama")), *FLAGS]

    done = subprocess.run(
        [*command, "--json", str(tmp_path / "report.json"), "--keep", str(tmp_path)],
        env={**os.environ, **SETTINGS, "COLUMNS": "250"},
        capture_output=True,
        text=True,
        timeout=5 * TIMEOUT_S,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    by_check = {verdict["check"]: verdict["status"] for verdict in report["verdicts"]}
    of_answers = {check: status for check, status in by_check.items() if not check.startswith("idle cost")}
    assert set(of_answers.values()) == {"passed", "skipped"}
    assert [check for check, status in of_answers.items() if status == "skipped"] == [
        "steps are replayed from CUDA graphs"
    ]
    assert sum(check.startswith("idle cost") for check in by_check) == 2
