"""One engine run per process, for the GPU tests of gates and controllers: ``python dynamic_runs.py MODE OUT.pt``.

MODE is graphs (compiled, FULL CUDA graphs) or eager. Requests of five kinds run together: a neighbour; one with a gate
whose module acts on the very row; one whose gate acts at an earlier site on the next row; one that a rule steers for
the rest of it; one whose module's scale the controller ``pid`` sets behind each row. Traces say what was read and
added; rows captured on both sides of each site that is written say what was added in fact. DYNAMIC_READ is the hook
point that is read, post_attn if it is not set; with hook_z and two GPUs, rows are gathered in the graph.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import engine_runs as base
import numpy as np
import torch

EARLY, LAYER = base.LAYERS[1], base.LAYERS[2]
HOOK = os.environ.get("DYNAMIC_READ", "post_attn")
READ, WRITTEN = f"{LAYER}.{HOOK}", f"{LAYER}.post_mlp"
WRITES = {"early": EARLY, "late": LAYER}
"""Layers behind which something is added, with the row captured before and behind."""
SEEN = {HOOK: [LAYER], "post_mlp": [EARLY, LAYER], "pre_attn": [EARLY + 1, LAYER + 1]}
KINDS = ("neighbour", "this_token", "next_token", "rule", "controller")
MAX_TOKENS = 40
LIMIT = 1.0
PID = {"setpoint": 0.0, "kp": 20.0, "ki": 0.0, "min_scale": -LIMIT, "max_scale": LIMIT, "min_emit_delta": 0.0}


def weight() -> Any:
    """float32, as wide as rows of the site that is read: of the probe, whose score is a cosine."""
    width = base.HEADS_WIDTH if HOOK == "hook_z" else base.HIDDEN
    return np.random.default_rng(1).standard_normal(width).astype(np.float32)


def direction() -> Any:
    """float32 ``[hidden]``: that of all vectors."""
    return np.random.default_rng(2).standard_normal(base.HIDDEN).astype(np.float32)


def config(folder: Path) -> dict[str, Any]:
    """Capture and steering, with the controller, and the files of its probe and its module."""
    from headgate.capture.schema.sites import Site
    from headgate.steering import PhaseVectors, probes, save

    path, module = folder / "probe.safetensors", folder / "late.safetensors"
    vectors = PhaseVectors.from_rows({Site.parse(f"{LAYER}.post_mlp"): direction()})
    assert vectors is not None
    save(module, vectors)  # of another size than `prepare` will find
    probes.save(path, probes.Probe(site=Site.parse(READ), kind=probes.ProbeKind.COSINE, weight=weight()[None]))
    found = base.headgate(SEEN)
    found["headgate"]["steering"] = {
        "op_sites": {"post_mlp": [EARLY, LAYER]},
        "gather_sites": {HOOK: [LAYER]},
        "modules": {"late": str(module)},
        "controllers": [
            {
                "name": "pid",
                "applies_to": "opt_in",
                "budget_ms": 1000,  # what is slow here is the first step, and everything is to be followed
                "params": {"probe": str(path), "module": "late", **PID},
            }
        ],
    }
    return found


def fields(kind: str, threshold: float) -> dict[str, Any]:
    """What a request of a kind asks for."""
    when = {"cosine": weight().tolist(), "at": READ, "above": threshold}
    found: dict[str, Any] = {"return_steering_trace": True, "steering_rules": []}
    if kind == "this_token":
        found["steering_gates"] = [{"name": "gate", "when": when, "then": {"module": "late"}}]
    elif kind == "next_token":
        found["steering_gates"] = [{"name": "gate", "when": when, "then": {"module": "early"}, "scope": "next_token"}]
    elif kind == "rule":
        found["steering_rules"] = ["latch"]
    elif kind == "controller":
        found["steering_rules"] = ["pid"]
    return found


def serve(llm: Any, make: Any, *, captures: bool = True, **more: Any) -> list[Any]:
    """All prompts in one batch, with the fields that `make` gives for the index of each."""
    from headgate.capture import SamplingParams

    requests = base.prompts()
    params = []
    for index in range(len(requests)):
        one = SamplingParams(
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            max_tokens=MAX_TOKENS,
            capture={"memory": {"hooks": SEEN}} if captures else None,
            **more,
        )
        for name, value in make(index).items():
            setattr(one, name, value)
        params.append(one)
    return list(llm.generate([{"prompt_token_ids": ids} for ids in requests], params, use_tqdm=False))


def rows_of(outputs: Any, name: str) -> Any:
    """The captured rows of all requests at a site, float32 ``[n, width]``."""
    payloads = [output.capture_results["memory"].payload for output in outputs]
    found = [payload.rows[site] for payload in payloads for site in payload.sites if site.name == name]
    return torch.cat(found).float().numpy()


def prepare(llm: Any, outputs: Any) -> float:
    """Register vectors that move rows by a tenth of their size, and the rule; returns the median score."""
    rows, size = rows_of(outputs, READ), 0.1 * float(np.sqrt((rows_of(outputs, WRITTEN) ** 2).mean()))
    for name, layer in WRITES.items():
        llm.steering.register(name, vectors={"post_mlp": {layer: (size * direction()).tolist()}})
    scores = rows @ weight() / (np.linalg.norm(rows, axis=1) * np.linalg.norm(weight()))
    threshold = float(np.median(scores))
    late = {"when": {"cosine": weight().tolist(), "at": READ, "above": threshold}, "then": {"module": "late"}}
    llm.steering.register_rule("latch", applies_to="opt_in", scope="rest_of_request", **late)
    return threshold


def counted(llm: Any, threshold: float) -> dict[str, int]:
    """Rows that one gate wrote of all prompts: as traces say (``loud``), and as the device has counted (``quiet``)."""
    gated = fields("this_token", threshold)
    (gate,) = gated["steering_gates"]
    llm.reset_prefix_cache()
    outputs = serve(llm, lambda _: gated, captures=False)
    traces = [output.outputs[0].steering_trace["gates"]["gate"]["applied"] for output in outputs]
    quiet = {"steering_gates": [{**gate, "name": "quiet"}], "steering_rules": []}
    llm.reset_prefix_cache()
    serve(llm, lambda _: quiet, captures=False)
    loud = sum(int(np.count_nonzero(applied)) for applied in traces)
    return {"loud": loud, "quiet": llm.steering.dynamic().gates["quiet"], "requests": len(outputs)}


def driven(llm: Any) -> dict[str, Any]:
    """All prompts with the controller, with traces (``traced``) and without (``plain``).

    Returns for both the tokens, the actions that were applied, and how many steps the controller missed.
    """
    found: dict[str, Any] = {}
    for name, is_traced in (("traced", True), ("plain", False)):
        before = llm.steering.dynamic().controllers[0]
        llm.reset_prefix_cache()
        asked = {"return_steering_trace": is_traced, "steering_rules": ["pid"]}
        outputs = serve(llm, lambda _, asked=asked: asked, captures=False)
        status = llm.steering.dynamic().controllers[0]
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        applied = status.actions["applied"] - before.actions["applied"]
        found[name] = {"tokens": tokens, "applied": applied, "skipped": status.skipped}
    return found


def told(output: Any, kind: str) -> Mapping[str, Any]:
    """What a request's test needs: its trace, and rows before and behind each site that is written."""
    (entry,) = base.collect([output])
    return {**entry, "kind": kind, "trace": output.outputs[0].steering_trace}


def main() -> None:
    """Serve one mode."""
    mode, out = sys.argv[1], sys.argv[2]
    with tempfile.TemporaryDirectory() as folder:
        llm = base.open_engine(mode, config(Path(folder)))
        threshold = prepare(llm, serve(llm, lambda _: {}))
        outputs = serve(llm, lambda index: fields(KINDS[index % len(KINDS)], threshold))
    requests = [told(output, KINDS[index % len(KINDS)]) for index, output in enumerate(outputs)]
    status = llm.steering.dynamic()
    found = {"requests": requests, "threshold": threshold, "steps": status.controllers[0].steps}
    found["counted"] = counted(llm, threshold)
    found["driven"] = driven(llm)
    torch.save(found, out)
    print("RAN", mode, f"{len(requests)} requests, {status}"[:300], flush=True)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    main()
