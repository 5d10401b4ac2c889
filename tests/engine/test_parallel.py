"""Tensor and pipeline parallel workers: the stream is captured once, by the stages that own its layers, and steered by
every rank alike.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from headgate.capture import lens
from headgate.capture.monitoring.step_log import STEP_LOG, compact
from headgate.capture.probe import HiddenLayer, Probe, save
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import INNER_HOOKS, HookPoint, Site
from headgate.consumers.reader import open_captures
from headgate.steering import PhaseVectors
from headgate.steering import save as save_vectors
from tests.conftest import ENGINE_DEFAULTS, start_llm, stop_llm
from tests.deadlines import patience
from tests.engine import gate_making, gate_runs
from tests.engine.controller_cases import READ, VECTORS, WEIGHT, Driven, prompt_of
from tests.engine.controller_replays import check_replays, replayed
from tests.engine.gate_semantics import Names
from tests.engine.hf_reference import HFReference, Steering, check_lens, own_process, relative_error
from tests.engine.steering_cases import (
    OP_LAYER,
    TRANSCODERS,
    Case,
    PlacedSae,
    Tiers,
    added,
    check_logprobs,
    document,
    op_cases_of,
    saved_saes,
    sites_of,
    vectors,
)
from tests.engine.tiny_models import HIDDEN, LAYERS, tiny_model
from tests.fakes.far_host import FarHost, free_port, node_command, second_host
from tests.fakes.saes import TinySae

HOOKS = ("pre_attn", "attn_in", "attn_out", "post_attn", "mlp_in", "mlp_out", "post_mlp")
SITES: dict[str, Any] = {**dict.fromkeys(HOOKS, "all"), "final_norm": "all"}
OP_SITES: dict[str, Any] = {
    **{hook: [OP_LAYER] for hook in HOOKS},
    "mlp_in": "all",
    "mlp_out": "all",
    "final_norm": "all",
}
PHASES = ("both", "prefill", "decode")
PROMPTS = [[3 + (7 * i) % 500 for i in range(40)], [9], [3 + (11 * i) % 500 for i in range(17)]]
NUM_OUTPUT = 5
CUT_S = patience(60)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "max_num_batched_tokens": 32,
    "max_logprobs": -1,
    "distributed_executor_backend": "mp",
    "worker_extension_cls": "tests.fakes.shifted_stage.ShiftedStage",
}
EVERYWHERE = sites_of(*(set(HookPoint) - INNER_HOOKS - {HookPoint.HOOK_Z}))
"""Sites where each tensor-parallel rank has whole rows."""
HEADS = Site(1, HookPoint.HOOK_Z)
SPLIT_SAES = [
    PlacedSae("sae", HEADS, gate_making.SAE),
    PlacedSae("selecting", Site(2, HookPoint.HOOK_Z), TinySae(architecture="topk", width=HIDDEN, seed=5)),
]
"""Where each rank has one of two heads; the second SAE is encoded in full."""
STREAM = sites_of(HookPoint.PRE_ATTN, HookPoint.POST_MLP)
STEERING = [
    Tiers(base=vectors(EVERYWHERE, 1, 0.5)),
    Tiers(),
    Tiers(prefill=vectors(STREAM, 2), decode=vectors(EVERYWHERE, 3, 0.5)),
    Tiers(decode=vectors(STREAM, 4)),
]
WITHIN, *_, ACROSS, _ = TRANSCODERS
RNG = np.random.default_rng(11)
MATRIX = RNG.normal(size=(HIDDEN, HIDDEN)).astype(np.float32) / HIDDEN**0.5
NAMED = [9, 300, 511]
LAST_STAGE = 2
"""The layer at which the second of two pipeline stages begins."""
UNITS = HiddenLayer(weight=RNG.normal(size=(6, HIDDEN)), bias=RNG.normal(size=6), activation="gelu")
PROBES = {
    "near": Probe(site=Site.parse("0.post_attn"), weight=RNG.normal(size=(1, HIDDEN)), bias=[0.5]),
    "angle": Probe(site=Site.parse("0.post_attn"), kind="cosine", weight=RNG.normal(size=(1, HIDDEN))),
    "deep": Probe(site=Site.parse("final_norm"), kind="mlp", weight=RNG.normal(size=(1, 6)), hidden=UNITS),
    "heads": Probe(site=HEADS, kind="mlp", weight=RNG.normal(size=(1, 6)), hidden=UNITS),
}
MODULE, GLOBAL = vectors(STREAM, 5), vectors(STREAM, 6)


class Served(NamedTuple):
    """Two ranks.

    Attributes:
        llm: The engine.
        num_stages: Of the pipeline.
        root: Where the files of the filesystem consumer are.
        far_root: Of the one that is configured for the driver.
        far_host: Where the last stage is, if it is on another host.
    """

    llm: Any
    num_stages: int
    root: Path
    far_root: Path
    far_host: FarHost | None


@pytest.fixture(scope="module", params=["tensor", "pipeline", "hosts"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    way = "tensor" if request.param == "tensor" else "pipeline"
    folder = tmp_path_factory.mktemp("saes")
    root, far_root = tmp_path_factory.mktemp(request.param), tmp_path_factory.mktemp(f"{request.param}-far")
    probes = saved_probes(tmp_path_factory.mktemp("probes"))
    steering: dict[str, Any] = {"sites": gate_runs.SITES, "max_steering_slots": 256}
    if way == "pipeline":
        saes = saved_saes([WITHIN, PlacedSae("sae", gate_making.SAE_SITE, gate_making.SAE)], folder)
        steering |= {"op_sites": gate_runs.SITES, "max_probe_units": 40, **driven_by(folder)}
    else:
        saes = saved_saes([WITHIN, ACROSS, *SPLIT_SAES], folder)
        steering |= {"op_sites": OP_SITES, "gather_sites": {"hook_z": [0]}, "sae_encode": ["selecting"]}
        steering["probes"] = {"heads": probes["heads"]}
    consumers = [
        {"name": "memory"},
        {"name": "filesystem", "params": {"root": str(root)}},
        {"name": "filesystem", "instance_name": "far", "location": "driver", "params": {"root": str(far_root)}},
        {"name": "probe", "params": {"probes": probes}},
        {"name": "probe", "instance_name": "far_probe", "location": "driver", "params": {"probes": probes}},
        {"name": "lens", "params": {"lenses": saved_lens(tmp_path_factory.mktemp("lens") / "jacobian.safetensors")}},
    ]
    config = {
        "capture": {"consumers": consumers, "sites": steering["sites"]},
        "steering": {**steering, "saes": saes},
    }
    with ExitStack() as stack:
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # two workers on a machine with one NUMA node
        if request.param != "hosts":
            environment.setenv(STEP_LOG, str(root / "steps"))
        settings, host = {**SETTINGS, f"{way}_parallel_size": 2}, None
        if request.param == "hosts":
            host, cluster = on_two_hosts(stack, environment, settings, config, tmp_path_factory)
            settings |= cluster
        llm = start_llm(model=tiny_model("llama"), additional_config={"headgate": config}, **settings)
        stack.callback(stop_llm, llm)
        yield Served(llm, 2 if way == "pipeline" else 1, root, far_root, host)


def driven_by(folder: Path) -> dict[str, Any]:
    """Settings of a controller, for requests that select it, and of the module that it turns on."""
    rows = {Site(layer, HookPoint.POST_MLP): np.float32(row) for layer, row in VECTORS["post_mlp"].items()}
    save_vectors(folder / "driven.safetensors", PhaseVectors.from_rows(rows))
    save(folder / "read.safetensors", Probe(site=READ, weight=WEIGHT[None], bias=[0.1]))
    params = {"probe": str(folder / "read.safetensors"), "module": "driven", "threshold": 0.0, "ema_alpha": 1.0}
    controller = {"name": "threshold", "applies_to": "opt_in", "budget_ms": 1000, "params": params}
    return {"controllers": [controller], "modules": {"driven": str(folder / "driven.safetensors")}}


def saved_probes(folder: Path) -> dict[str, str]:
    files = {name: folder / f"{name}.safetensors" for name in PROBES}
    for name, path in files.items():
        save(path, PROBES[name])
    return {name: str(path) for name, path in files.items()}


def saved_lens(path: Path) -> dict[str, str]:
    lens.save(path, lens.LensKind.JACOBIAN, {OP_LAYER: MATRIX})
    return {"jacobian": str(path)}


def on_two_hosts(
    stack: ExitStack,
    environment: pytest.MonkeyPatch,
    settings: dict[str, Any],
    config: dict[str, Any],
    folders: pytest.TempPathFactory,
) -> tuple[FarHost, dict[str, Any]]:
    """Start the second stage on another host, and return that, and what the first stage needs to find it."""
    host, config["network"] = second_host(stack, environment, folders)
    cluster = {"nnodes": 2, "master_addr": host.here, "master_port": free_port()}
    flags = {**ENGINE_DEFAULTS, **settings, **cluster, "node_rank": 1}
    flags["additional_config"] = json.dumps({"headgate": config})
    host.start(*node_command(tiny_model("llama"), flags))
    return host, {**cluster, "node_rank": 0}


@pytest.fixture(scope="module")
def reference() -> HFReference:
    return HFReference(tiny_model("llama"), "llama")


def sampling(tiers: Tiers | Case | None = None, **fields: Any) -> Any:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=NUM_OUTPUT, logprobs=-1)
    params.capture = {"memory": {"hooks": SITES}}
    for name, value in {**(tiers.fields() if tiers else {}), **fields}.items():
        setattr(params, name, value)
    return params


def generate(llm: Any, prompts: list[list[int]], params: Any) -> Any:
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def test_rows_of_two_ranks_equal_the_solo_run(served, reference):
    params = sampling(capture={name: {"hooks": SITES} for name in ("memory", "filesystem", "far")})

    outputs = generate(served.llm, PROMPTS, params)

    stats = served.llm.collective_rpc("headgate_stats")
    assert sum(found["capture"] is not None for found in stats) == served.num_stages
    assert len(list(served.root.rglob("*.safetensors"))) == served.num_stages * len(PROMPTS)
    assert len(list(served.far_root.rglob("*.safetensors"))) == len(PROMPTS)  # all stages' rows in one file
    captures, far = (
        {capture.metadata["client_request_id"]: capture for capture in open_captures(root)}
        for root in (served.root, served.far_root)
    )
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = whole(reference.run(prompt, list(output.outputs[0].token_ids)).rows)
        assert_all_rows(output, expected, num_rows=len(prompt) + NUM_OUTPUT - 1)
        assert output.capture_results["filesystem"].status == "ok"
        capture = captures[output.request_id]
        assert {site.name for site in capture.sites} == {site.name for site in expected}
        assert output.capture_results["far"].status == "ok"
        for site, rows in expected.items():
            assert relative_error(capture.tensor(site.name), rows) <= 1e-4, site
            assert torch.equal(far[output.request_id].tensor(site.name), capture.tensor(site.name))


def test_rows_of_other_tokens_are_refused_on_every_stage(served):
    params = sampling(capture={name: {"hooks": SITES} for name in ("memory", "filesystem", "far")})
    for stage in range(served.num_stages):
        served.llm.collective_rpc("shift_stage", args=(stage, True))
        try:
            (output,) = generate(served.llm, PROMPTS[:1], params)
        finally:
            served.llm.collective_rpc("shift_stage", args=(stage, False))

        for name, result in output.capture_results.items():
            is_in_parts = name == "filesystem" and served.num_stages > 1  # the other stage's file is right
            assert result.status == ("partial_error" if is_in_parts else "error"), (stage, name)
            assert "were not computed from the request's own tokens (position 1: token 3, expected 10)" in result.error
    (output,) = generate(served.llm, PROMPTS[:1], params)
    assert {result.status for result in output.capture_results.values()} == {"ok"}


def test_the_step_log_says_where_the_rows_of_each_step_are(served):
    logs = sorted((served.root / "steps").glob("rank*.jsonl"))
    if served.far_host is not None:
        pytest.skip("engines on two hosts run without a log")
    assert len(logs) == 2
    before = [len(log.read_text().splitlines()) for log in logs]

    (output,) = generate(served.llm, PROMPTS[:1], sampling(STEERING[0]))

    tokens = [*PROMPTS[0], *output.outputs[0].token_ids][:-1]
    first, second = (
        [json.loads(line) for line in log.read_text().splitlines()[start:]]
        for log, start in zip(logs, before, strict=True)
    )
    assert [step["requests"] for step in first] == [step["requests"] for step in second]
    if served.num_stages == 1:
        assert [step["steering"] for step in first] == [step["steering"] for step in second]
        assert [step["capture"] for step in second] == [None] * len(second)  # one rank captures
    at = 0
    sizes = [32, 8, 1, 1, 1, 1]  # at most 32 tokens a step
    for steps, size in zip(zip(first, second, strict=True), sizes, strict=True):
        captured, steered = list[str](), list[str]()
        for step in steps[: served.num_stages]:
            (request,) = step["requests"]
            assert request["positions"] == compact(range(at, at + size))
            assert (request["rows"], request["tokens"]) == (compact(range(size)), compact(tokens[at : at + size]))
            (group,) = step["capture"]["groups"]
            captured += group["sites"]
            (rows,) = group["rows"]
            assert (rows["request"], rows["consumers"]) == (request["id"], ["memory"])
            assert (rows["positions"], rows["rows"]) == (request["positions"], request["rows"])
            assert rows["ring_rows"] == step["capture"]["ring_rows"]
            steered += step["steering"]["slots"]
            assert all(slots not in ("0", f"0*{size}") for slots in step["steering"]["slots"].values())
        assert sorted(captured) == sorted(steered) == sorted(site.name for site in EVERYWHERE)
        at += size
    assert at == len(tokens)


def test_scores_are_computed_on_the_stage_of_their_site(served, reference):
    """Of the consumer beside each worker, and of one that is configured for the driver; no row leaves a device."""
    params = sampling(capture={"probe": {}, "far_probe": {"probes": ["near", "deep"]}})
    before = [found["capture"]["bytes"] for found in served.llm.collective_rpc("headgate_stats") if found["capture"]]

    outputs = generate(served.llm, PROMPTS, params)

    after = [found["capture"]["bytes"] for found in served.llm.collective_rpc("headgate_stats") if found["capture"]]
    num_rows = sum(len(prompt) + NUM_OUTPUT - 1 for prompt in PROMPTS)
    # All probes of a site are one readout.
    assert sum(after) - sum(before) == 4 * num_rows * (len(PROBES) + len({"near", "angle", "deep"}))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        rows = reference.run(prompt, list(output.outputs[0].token_ids)).rows
        found = output.capture_results["probe"].payload
        parts = found if served.num_stages > 1 else [found]
        told = {name: scores for part in parts for name, scores in part["probes"].items()}
        far = output.capture_results["far_probe"].payload["probes"]
        assert (told.keys(), far.keys()) == (PROBES.keys(), {"near", "deep"})
        for scored in (told, far):
            for name, one in scored.items():
                expected = PROBES[name].scores(rows[PROBES[name].site].float().numpy())
                scores = np.array(one["scores"]).reshape(expected.shape)
                assert np.abs(scores - expected).max() <= 1e-4 * np.abs(expected).max(), name


def read_by(output: Any) -> list[int]:
    """The tokens whose forward gave the rows."""
    return [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]


def test_a_lens_reads_the_whole_vocabulary_where_the_head_is(served, reference):
    """With tensor parallelism each rank has half of the head; of a pipeline, only the last stage has one."""
    first = 0 if served.num_stages == 1 else LAST_STAGE
    layers = list(range(first, LAYERS))
    params = sampling(capture={"lens": {"top": 7, "tokens": NAMED}})
    mapped = sampling(capture={"lens": {"lens": "jacobian", "top": 7, "tokens": NAMED}})

    outputs = generate(served.llm, PROMPTS, params)
    (moved,) = generate(served.llm, PROMPTS[:1], mapped) if first <= OP_LAYER else (None,)

    for prompt, output in zip(PROMPTS, outputs, strict=True):
        rows, tokens = whole(reference.run(prompt, list(output.outputs[0].token_ids)).rows), read_by(output)
        result = output.capture_results["lens"]
        assert (result.status, list(result.payload["layers"])) == ("ok", [str(layer) for layer in layers])
        for layer in layers:
            logits = reference.read(rows[Site(layer, HookPoint.POST_MLP)], tokens)
            check_lens(result.payload["layers"][str(layer)], logits, 7, NAMED)
    if moved is not None:
        rows = whole(reference.run(PROMPTS[0], list(moved.outputs[0].token_ids)).rows)
        mapped_rows = rows[Site(OP_LAYER, HookPoint.POST_MLP)].float() @ torch.from_numpy(MATRIX).T
        logits = reference.read(mapped_rows, read_by(moved))
        check_lens(moved.capture_results["lens"].payload["layers"][str(OP_LAYER)], logits, 7, NAMED)


def test_a_lens_before_the_last_stage_is_refused(served):
    if served.num_stages == 1:
        pytest.skip("one stage")
    begins = rf"last pipeline stage, which has the model's head, begins at layer {LAST_STAGE}"
    with pytest.raises(RequestError, match=begins) as refused:
        generate(served.llm, PROMPTS[:1], sampling(capture={"lens": {"layers": [0]}}))
    assert refused.value.field == "capture.lens.layers"


def test_a_cable_that_is_pulled_for_a_while_loses_nothing(served, reference):
    if served.far_host is None:
        pytest.skip("one host")
    done = []
    params = sampling(capture={name: {"hooks": SITES} for name in ("memory", "filesystem", "far")})
    running = threading.Thread(target=lambda: done.extend(generate(served.llm, PROMPTS, params)))

    served.far_host.cut()
    running.start()
    running.join(2.0)
    assert running.is_alive()
    served.far_host.mend()
    running.join(CUT_S)

    for prompt, output in zip(PROMPTS, done, strict=True):
        expected = whole(reference.run(prompt, list(output.outputs[0].token_ids)).rows)
        assert_all_rows(output, expected, num_rows=len(prompt) + NUM_OUTPUT - 1)
        assert {output.capture_results[name].status for name in ("filesystem", "far")} == {"ok"}


def test_requests_steered_by_two_ranks_equal_the_solo_run(served, reference):
    requests = [(prompt, tiers) for prompt in PROMPTS for tiers in STEERING]

    outputs = generate(served.llm, [prompt for prompt, _ in requests], [sampling(tiers) for _, tiers in requests])

    for (_, tiers), output in zip(requests, outputs, strict=True):
        assert_steered(output, tiers.steering(), reference)
    assert_ranks_agree(served)


def test_operations_on_two_ranks_equal_the_solo_run(served, reference):
    cases = [*op_cases_of("llama"), Case("neighbour")]

    outputs = generate(served.llm, [PROMPTS[0]] * len(cases), [sampling(case) for case in cases])

    for case, output in zip(cases, outputs, strict=True):
        assert_steered(output, case.steering(), reference)
    assert_ranks_agree(served)


def test_features_on_two_ranks_equal_the_solo_run(served, reference):
    edits = [{"feature": 0, "set": 5.0}, {"feature": 1, "scale": -2.0}, {"feature": 2, "max": 0.1}]
    coders = [WITHIN] if served.num_stages > 1 else [WITHIN, ACROSS]
    cases = [Case(coder.name, operations=(coder.features(phase, *edits),)) for coder in coders for phase in PHASES]
    if served.num_stages == 1:
        sae, selecting = SPLIT_SAES
        cases.append(Case("heads", operations=(sae.features("both", *edits), selecting.features("decode", *edits))))
        cases.append(Case("rebuilt", operations=(selecting.features("both", *edits[:1], reconstructs=True),)))
    cases.append(Case("neighbour"))

    outputs = generate(served.llm, [PROMPTS[0]] * len(cases), [sampling(case) for case in cases])

    for case, output in zip(cases, outputs, strict=True):
        assert_steered(output, case.steering(), reference)
    assert_ranks_agree(served)


def test_a_transcoder_across_stages_is_refused_by_every_core(served, tmp_path):
    if served.num_stages == 1:
        pytest.skip("one stage")
    path = ACROSS.coder.save(tmp_path / "across")

    with pytest.raises(RequestError, match=r"path: .*reads at 0.mlp_in and writes at .* different stages of the pipe"):
        served.llm.steering.register_sae("across", path)
    assert set(served.llm.steering.saes()) == {WITHIN.name, "sae"}


REFUSED = {
    "at the end": "gates[0].then: writes at 0.pre_attn, on an earlier pipeline stage than final_norm",
    "two samples": "gates[1].then: writes at 0.attn_in, on an earlier pipeline stage than 2.mlp_in",
    "named probes and modules": "gates[2].then: writes at 0.post_mlp, on an earlier pipeline stage than 2.pre_attn",
}
"""Of the cases, with layers 0 and 1 on the first stage: they would write before the stage that decides."""


@pytest.fixture(scope="module")
def references() -> Iterator[Executor]:
    with own_process() as executor:
        yield executor


@pytest.fixture(scope="module")
def gated(served, references) -> Iterator[gate_runs.Run]:
    """What all cases of gates got that are not refused; strengths of layers 0 and 1 act on the second stage, too."""
    if served.num_stages == 1 or served.far_host is not None:
        pytest.skip("one stage, or stages that are far")
    cases = gate_runs.made_cases(references)
    gate_runs.name_all(served.llm)
    for name, why in REFUSED.items():
        (case,) = (each for each in cases if each.name == name)
        with pytest.raises(RequestError, match=re.escape(why)):
            gate_runs.generate(served.llm, [case], [gate_making.PROMPTS[case.prompt]], 1)
    yield gate_runs.serve(served.llm, [case for case in cases if case.name not in REFUSED], references)
    served.llm.steering.unregister("calm")


def test_gates_of_two_stages_equal_the_solo_run(gated):
    gate_runs.check(gated, captures=True)


def test_gates_on_heads_of_two_ranks_equal_the_solo_run(served, references):
    """They read whole rows of `hook_z`, where each rank has one of two heads, and write there and elsewhere."""
    if served.num_stages > 1:
        pytest.skip("ranks of a pipeline have whole rows")
    cases = head_cases(references)

    outputs = gate_runs.generate(
        served.llm, cases, [gate_making.PROMPTS[case.prompt] for case in cases], gate_making.NUM_OUTPUT
    )

    names = Names(probes={"heads": told_probe(PROBES["heads"])}, saes={"sae": (gate_making.SAE, HEADS)})
    run = gate_runs.told_of(cases, outputs, references, named=names)
    gate_runs.check(run)
    for case, sample in zip(cases, run.samples, strict=True):
        for name, gate in (sample.steering_trace or {"gates": {}})["gates"].items():
            assert len(np.unique(gate["applied"])) > 1, f"{case.name}: {name} acts always or never"
    assert_ranks_agree(served)


def head_cases(references: Executor) -> list[gate_making.GateCase]:
    """Conditions of every kind on heads, which turn on vectors, operations and features there, later and earlier."""
    rows, prompt = gate_runs.plain_rows_of(references), gate_making.SHORT
    make = gate_making.Maker(rows)
    activations = np.sort(gate_making.SAE.encode(rows[prompt][HEADS].double().numpy())[:, 4])
    median = activations[len(activations) // 2 :][:2].mean()
    removed = {"method": "ablate", "at": "2.hook_z", "vector": make.vector(), "scale": 1.0}
    longer = {"method": "norm_scaled_add", "at": "1.hook_z", "vector": make.vector(), "scale": 0.4, "max_ratio": 0.5}
    product = {
        "when": make.when("1.hook_z", prompt),
        "then": {"vectors": make.vectors("1.hook_z", "2.mlp_out")},
    }
    feature = {
        "when": {"sae": "sae", "feature": 4, "above": float(median)},
        "then": {"features": [{"sae": "sae", "feature": 1, "set": 2.0}]},
    }
    network = {
        "when": {"probe": "heads", "above": 0.3},
        "then": {"ops": [removed, longer]},
        "strength": {"sigmoid": 1.5},
    }
    angle = {
        "when": make.when("2.hook_z", cosine=True, pool={"ema": 0.3}),
        "then": {"vectors": make.vectors("0.hook_z", "1.post_mlp")},
        "scope": "next_token",
        "strength": {"sigmoid": 5.0},
    }
    return [
        gate_making.GateCase(name="product and feature", gates=[product, feature], prompt=prompt),
        gate_making.GateCase(name="network", gates=[network], prompt=prompt),
        gate_making.GateCase(name="angle", gates=[angle]),
        gate_making.GateCase(name="neighbour", prompt=prompt),
    ]


def told_probe(probe: Probe) -> dict[str, Any]:
    """An MLP probe as the reference is told it."""
    assert probe.hidden is not None
    hidden = {"weight": probe.hidden.weight, "bias": probe.hidden.bias, "activation": probe.hidden.activation.value}
    return {"at": probe.site.name, "kind": "mlp", "weight": probe.weight[0], "bias": probe.biases[0], "hidden": hidden}


def test_rules_of_two_stages_do_what_the_same_gates_do(served, gated):
    """Counted, too; their strengths are those of the gates, and their last decision is on the last stage."""
    names = ("networks, rest_of_request", "early, next_token, 1, False")
    cases = [(case, sample) for case, sample in zip(gated.cases, gated.samples, strict=True) if case.name in names]
    gates = [named(case.gates) for case, _ in cases]
    rules = {f"rule {at}.{name}": gate for at, each in enumerate(gates) for name, gate in each.items()}
    for name, gate in rules.items():
        served.llm.steering.register_rule(applies_to="opt_in", **{**gate, "name": name})

    params = [gate_runs.params_of(replace(case, gates=()), gate_making.NUM_OUTPUT) for case, _ in cases]
    for at, one in enumerate(params):
        one.steering_rules = [name for name in rules if name.startswith(f"rule {at}.")]
        one.return_steering_trace = True
    outputs = generate(served.llm, [gate_making.PROMPTS[case.prompt] for case, _ in cases], params)

    counted = {rule.name: rule.rows for rule in served.llm.steering.dynamic().rules}
    for name in rules:
        served.llm.steering.unregister_rule(name)
    assert len(cases) == len(names)
    for at, ((case, sample), output) in enumerate(zip(cases, outputs, strict=True)):
        assert list(output.outputs[0].token_ids) == list(sample.token_ids)
        wanted, found = sample.steering_trace["gates"], output.outputs[0].steering_trace["gates"]
        assert len(found) == len(case.gates)
        for name in named(case.gates):
            np.testing.assert_allclose(found[f"rule {at}.{name}"]["applied"], wanted[name]["applied"], atol=1e-4)
            assert counted[f"rule {at}.{name}"] == np.count_nonzero(wanted[name]["applied"])
    assert sum(count > 0 for count in counted.values()) > len(names)


def named(gates: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Gates by the names that traces give them."""
    return {gate.get("name", f"gate{at}"): gate for at, gate in enumerate(gates)}


def test_controllers_of_two_stages_do_what_their_traces_say(served, references):
    """One that reads on the first stage turns a module on, on both."""
    if served.num_stages == 1 or served.far_host is not None:
        pytest.skip("one stage, or stages that are far")
    case, prompts = Driven(name="driven", selects=["threshold"]), [prompt_of(at) for at in range(6)]

    outputs = generate(served.llm, prompts, [gate_runs.params_of(case, 30)] * len(prompts))

    samples = [output.outputs[0] for output in outputs]
    contents = {"module": {"vectors": VECTORS}}
    requests = [replayed(case, prompt, one, contents) for prompt, one in zip(prompts, samples, strict=True)]
    assert sum(len(np.unique(request.applied["driven module"])) == 2 for request in requests if request.applied) >= 3
    check_replays(requests, samples, references)


def test_modules_and_global_vectors_are_on_both_ranks(served, reference):
    empty = assert_ranks_agree(served)
    served.llm.steering.register("mood", **document(Tiers(prefill=MODULE)))
    served.llm.steering.set(**document(Tiers(base=GLOBAL)))
    try:
        outputs = generate(served.llm, PROMPTS[:2], [sampling(steering_module_ref=("mood", 2.0)), sampling()])
        assert assert_ranks_agree(served) != empty
    finally:
        served.llm.steering.clear()
        served.llm.steering.unregister("mood")
    (after,) = generate(served.llm, PROMPTS[:1], sampling())

    both = Steering(prefill=added([(GLOBAL, 1.0), (MODULE, 2.0)]), decode=GLOBAL)
    for output, steering in zip([*outputs, after], [both, Steering(GLOBAL, GLOBAL), Steering()], strict=True):
        assert_steered(output, steering, reference)


def assert_ranks_agree(served: Served) -> list[int]:
    """The tables of tensor-parallel ranks are the same; the stages of a pipeline have sites of their own."""
    found = served.llm.collective_rpc("headgate_call", args=("steering", "checksum", {}))
    assert len(found) == 2
    if served.num_stages == 1:
        assert found[0] == found[1]
    return found


def assert_steered(output: Any, steering: Steering, reference: HFReference) -> None:
    prompt, tokens = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
    expected = reference.run(prompt, tokens, steering)
    assert_all_rows(output, whole(expected.rows), num_rows=len(prompt) + NUM_OUTPUT - 1)
    check_logprobs(output, expected)


def whole(rows: dict[Site, torch.Tensor]) -> dict[Site, torch.Tensor]:
    """Rows of the sites that tests capture."""
    return {site: found for site, found in rows.items() if site in EVERYWHERE}


def assert_all_rows(output: Any, expected: dict[Site, torch.Tensor], num_rows: int) -> None:
    result = output.capture_results["memory"]
    assert result.status == "ok", result.error
    assert result.payload.positions.tolist() == list(range(num_rows))
    assert set(result.payload.sites) == set(expected)
    for site, rows in expected.items():
        assert relative_error(result.payload.rows[site], rows) <= 1e-4, site
