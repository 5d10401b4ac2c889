"""Engines that answer the requests of `gate_cases`, and the comparison of their answers with `gate_reference`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headgate.capture.schema.sites import INNER_HOOKS, HookPoint
from tests.conftest import start_llm
from tests.engine.gate_cases import cases_of
from tests.engine.gate_making import MODULE, NUM_OUTPUT, PROMPTS, SAE, SAE_SITE, GateCase, named_probes, names
from tests.engine.gate_reference import Gated, Told, plain_rows, told
from tests.engine.gate_semantics import Names
from tests.engine.hf_reference import relative_error
from tests.engine.steering_cases import MAX_ERROR, logprobs_of
from tests.engine.tiny_models import LAYERS, tiny_model

FAMILY = "llama"
SITES = {hook.value: "all" for hook in HookPoint if hook not in INNER_HOOKS}
BLOCK = 32
MIN_MARGIN = 1e-5
"""How far pooled scores stay from thresholds, relative to their size: a nearer one could round to the other side."""


class Run(NamedTuple):
    """What an engine answered to some cases, a sample each.

    Attributes:
        cases: The cases.
        requests: As the reference is told them.
        outputs: Of the requests.
        samples: Of the outputs.
        expected: By the reference.
    """

    cases: list[GateCase]
    requests: list[Gated]
    outputs: list[Any]
    samples: list[Any]
    expected: list[Told]


def made_cases(references: Executor) -> list[GateCase]:
    """Make the cases, in a process of the reference's."""
    return cases_of(plain_rows_of(references))


def plain_rows_of(references: Executor) -> Any:
    """The rows of each of `PROMPTS` and its answer without steering."""
    return references.submit(plain_rows, tiny_model(FAMILY), FAMILY, PROMPTS, NUM_OUTPUT).result()


def start(
    folder: Path,
    steering: Mapping[str, Any] | None = None,
    consumers: Sequence[Mapping[str, Any]] = (),
    sites: Mapping[str, Any] = SITES,
    **settings: Any,
) -> Any:
    """Start an engine with everything that the cases name.

    Args:
        folder: For files.
        steering: Further settings of that section.
        consumers: Capture consumers beside ``memory``, as they are configured.
        sites: That are captured, steered and read.
        settings: Of the engine.
    """
    saes = {"sae": f"{SAE.save(folder / 'sae')}@{SAE_SITE.name}"}
    usual = {"sites": sites, "op_sites": sites, "saes": saes, "max_probe_units": 40}
    capture = {"consumers": [{"name": "memory"}, *consumers], "sites": sites}
    llm = start_llm(
        **{
            "model": tiny_model(FAMILY),
            "dtype": "float32",
            "in_process": True,
            "skip_tokenizer_init": True,
            "max_model_len": 128,
            "max_num_batched_tokens": 16,
            "num_gpu_blocks_override": 14,
            "block_size": BLOCK,
            "max_logprobs": -1,
            "enable_prefix_caching": True,
            "additional_config": {"headgate": {"capture": capture, "steering": {**usual, **(steering or {})}}},
            **settings,
        }
    )
    name_all(llm)
    return llm


def params_of(case: GateCase, num_output: int, *, captures: bool = False) -> Any:
    """The sampling parameters of a case."""
    from headgate.capture import SamplingParams

    sampling = SamplingParams(
        max_tokens=num_output,
        n=case.n,
        temperature=0.0 if case.n == 1 else 1.0,
        ignore_eos=True,
        detokenize=False,
        logprobs=-1,
        capture={"memory": {"hooks": SITES, "positions": "all"}} if captures else None,
    )
    for name, value in case.fields().items():
        setattr(sampling, name, value)
    return sampling


def name_all(llm: Any) -> None:
    """Register the probes and the module that cases name."""
    for name, probe in named_probes().items():
        llm.steering.register_probe(name, probe)
    llm.steering.register("calm", **MODULE)


def generate(
    llm: Any, cases: Sequence[GateCase], prompts: Sequence[Sequence[int]], num_output: int, *, captures: bool = False
) -> list[Any]:
    """Answer all cases at once."""
    params = [params_of(case, num_output, captures=captures) for case in cases]
    return list(llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False))


def told_of(
    cases: Sequence[GateCase],
    outputs: Sequence[Any],
    references: Executor,
    family: str = FAMILY,
    named: Names | None = None,
) -> Run:
    """Ask the reference about all samples."""
    each = [(case, output, sample) for case, output in zip(cases, outputs, strict=True) for sample in output.outputs]
    requests = [
        Gated(
            prompt=list(output.prompt_token_ids),
            output=list(sample.token_ids),
            gates=case.gates,
            static=case.steering(),
        )
        for case, output, sample in each
    ]
    expected = references.submit(told, tiny_model(family), family, requests, named or names()).result()
    return Run([case for case, *_ in each], requests, [one[1] for one in each], [one[2] for one in each], expected)


def serve(llm: Any, cases: list[GateCase], references: Executor) -> Run:
    outputs = generate(llm, cases, [PROMPTS[case.prompt] for case in cases], NUM_OUTPUT, captures=True)
    return told_of(cases, outputs, references)


def check(run: Run, *, captures: bool = False) -> None:
    """Tokens, logprobs, traces and rows of all samples."""
    wrong = [
        f"{case.name}: {problem}"
        for case, output, sample, request, expected in zip(
            run.cases, run.outputs, run.samples, run.requests, run.expected, strict=True
        )
        for problem in [
            *wrong_answer(case, sample, request, expected),
            *(wrong_trace(sample.steering_trace, expected, output.num_cached_tokens or 0) if case.gates else ()),
            *(wrong_rows(captured_of(output, sample, case), expected) if captures else ()),
        ]
    ]
    assert not wrong, "\n".join(wrong)


def captured_of(output: Any, sample: Any, case: GateCase) -> Any:
    result = output.capture_results["memory"]
    assert result.status == "ok", result.error
    return result.payload if case.n == 1 else result.payload[sample.index]


def wrong_answer(case: GateCase, sample: Any, request: Gated, expected: Told) -> Iterator[str]:
    if not min(expected.margins, default=1.0) >= MIN_MARGIN:
        yield f"a score is {min(expected.margins):.2g} from its threshold; choose other vectors"
    logits = expected.reference.logits[len(request.prompt) - 1 :]
    if case.n == 1 and logits.argmax(-1).tolist() != list(request.output):
        yield "tokens"
    error = relative_error(logprobs_of(sample.logprobs), logits.float().log_softmax(-1))
    if not error <= MAX_ERROR:
        yield f"logprobs: relative error {error:.2g}"


def wrong_trace(trace: Mapping[str, Any], expected: Told, num_cached: int) -> Iterator[str]:
    """Positions and names exactly, scores relative to the largest one, strengths as they are."""
    num_rows = len(expected.reference.logits)
    if trace["positions"] != list(range(num_cached, num_rows)):
        yield f"positions {trace['positions']}"
        return
    if set(trace["scores"]) != set(expected.scores) or set(trace["gates"]) != set(expected.strength):
        yield f"scores of {sorted(trace['scores'])}, gates {sorted(trace['gates'])}"
        return
    columns = [(name, trace["scores"][name], told, np.abs(told).max()) for name, told in expected.scores.items()]
    for kind in ("strength", "applied"):
        told_by_gate = getattr(expected, kind)
        columns += [(f"{kind} of {gate}", trace["gates"][gate][kind], told_by_gate[gate], 1.0) for gate in told_by_gate]
    for name, got, told_values, size in columns:
        wanted = np.array(told_values[num_cached:])
        is_wrong = ~(np.abs(np.array(got, np.float64) - wanted) <= MAX_ERROR * size)
        if is_wrong.any():
            at = np.flatnonzero(is_wrong)
            yield f"{name} at {(at + num_cached).tolist()}: {np.array(got)[at]}, expected {wanted[at]}"


def wrong_rows(captured: Any, expected: Told) -> Iterator[str]:
    assert len(expected.reference.rows) == LAYERS * (len(SITES) - 1) + 1
    for site, rows in expected.reference.rows.items():
        error = relative_error(captured[site], rows)
        if not error <= MAX_ERROR:
            yield f"rows of {site.name}: relative error {error:.2g}"
