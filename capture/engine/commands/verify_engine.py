"""One engine of ``headgate verify``, run by it in a process of its own: ``python -m`` and this module's name, ``JOB``.

JOB is a file that holds an `EngineJob`. The engine core runs in this process, so that all requests of a scene are there
before the first step: then two engines batch them alike, and what they answer compares bit for bit.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from headgate.capture.engine import vllm_names
from headgate.capture.engine.commands.verify_stock import MIN_MODEL_LENGTH, plain_requests
from headgate.capture.engine.contracts.parts import check_parts
from headgate.capture.engine.setup.settings import OUR_KEY, model_info
from headgate.capture.engine.setup.startup_checks import bound_cpu_cache, is_left_to_vllm
from headgate.capture.engine.vllm_names import versions
from headgate.capture.monitoring.verify_checks import (
    EAGER,
    IDLE,
    PLAIN,
    PLAIN_AGAIN,
    PLAIN_AT_THE_END,
    SERVED,
    STOCK,
    USAGE_STATUS,
    AnswerRows,
    ConsumerReading,
    Float32Rows,
    Recording,
    RequestAnswer,
    Runs,
    Scene,
    SceneRequest,
    Stage,
    Status,
    Verdict,
    VerifyFacts,
    difference,
    equality,
    noise_of,
)
from headgate.capture.schema.batch import Document
from headgate.capture.schema.config import CaptureConsumerSpec, parse_config
from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.results import CaptureResult
from headgate.capture.schema.sites import READ_ONLY, Site, site_map

CAPTURED = "captured"
SITES: Document = {"post_mlp": [0, 1, -1], "pre_attn": [1], "final_norm": "all"}
"""Captured unless the user says otherwise: few, and among them two between which steering shows."""
CONSUMER = "memory"
MAX_BYTES = 8 << 30
MIN_COSINE = 0.999
"""Least mean cosine of a site's rows, in models of 16 bits."""
MIN_ROW_COSINE = 0.975
"""Least cosine of a single row of theirs. Hugging Face's bfloat16 rows of SmolLM2 have cosines down to 0.994 with its
float32 rows, an angle of 6.3 degrees. Two right implementations in bfloat16 may each be that far off, in opposite
directions."""
MAX_RELATIVE_ERROR = 1e-3
"""Largest relative error of a row of a float32 model."""
LIKE_EAGER = "captured rows equal those of eager mode"
NEARER = 0.5
"""Rows of the same token may be so alike that rounding decides which is nearer: half as far is another's."""
MOE_SHARE = 0.01
"""Rows of a mixture of experts that may be further off: rounding may send a token to other experts."""


def checked_consumers(given: Document) -> list[CaptureConsumerSpec]:
    """Return the user's consumers that a part checks.

    Raises:
        ConfigError: If the section is wrong.
    """
    checked = {name for part in check_parts().values() for name in part.consumers}
    return [each for each in parse_config(given).consumers if each.name in checked]


class CaptureChecks:
    """Implements `headgate.capture.monitoring.verify_checks.CheckPart`."""

    consumers = ()

    def section(self, given: Document, *, counts: bool) -> dict[str, object]:
        """The user's section with the memory consumer, and in use the consumers that are checked: nothing is written,
        and no limit is in the way."""
        kept = {name: value for name, value in given.items() if not name.startswith("max_request_")}
        consumer = {"name": CONSUMER, "params": {"max_bytes": MAX_BYTES}}
        read = [msgspec.to_builtins(each) for each in checked_consumers(given)] if counts else []
        return {"sites": SITES, **kept, "consumers": [consumer, *read], "fire_counter": counts}

    def scenes(self, stage: Stage) -> Iterator[Scene]:
        """Everything of every request; in eager mode, their answers are part of the prompts."""
        requests: Sequence[SceneRequest] = stage.plain
        if stage.earlier is not None:
            requests = [
                SceneRequest(label=answer.label, prompt=answer.prompt + answer.tokens[:-1], max_tokens=1)
                for answer in stage.earlier.scenes[CAPTURED]
            ]
        yield Scene(name=CAPTURED, requests=[replace(request, captures=True) for request in requests])

    def judge(self, runs: Runs) -> Iterator[Verdict]:
        """Completeness, neighbours, equality with eager mode, and attribution."""
        served = runs[SERVED][0]
        captured, plain = served.scenes[CAPTURED], served.scenes[PLAIN]
        yield equality("a capture changes no answer", difference(plain, captured), noise=noise_of([served]))
        complete = judge_complete(captured)
        yield complete
        facts, eager = runs[EAGER][0].facts, runs[EAGER][0].scenes[CAPTURED]
        again = judge_complete(eager)
        if complete.status is not Status.PASSED or again.status is not Status.PASSED:
            reason = "" if again.status is Status.PASSED else f"eager mode: {again.figure}"
            yield Verdict(LIKE_EAGER, Status.FAILED, reason or "captures are not complete")
            return
        yield judge_rows(captured, eager, facts.dtype, is_moe=facts.num_experts > 0)
        yield judge_owners(captured, eager)


def judge_complete(answers: Sequence[RequestAnswer]) -> Verdict:
    """Nothing missing, foreign or dropped: each row's position and token are those of the request."""
    check = "captures are complete, none foreign"
    sites = {site for answer in answers if answer.rows for site in answer.rows.values}
    for index, answer in enumerate(answers):
        if (problem := _problem(answer, sites)) is not None:
            return Verdict(check, Status.FAILED, f"request {index}: {problem}")
    num_rows = sum(len(rows.positions) for answer in answers if (rows := answer.rows))
    if not num_rows or not sites:
        return Verdict(check, Status.FAILED, "nothing was captured")
    return Verdict(check, Status.PASSED, f"{num_rows} rows at {len(sites)} sites, none missing, foreign or dropped")


def _problem(answer: RequestAnswer, sites: set[str]) -> str | None:
    rows, expected = answer.rows, (answer.prompt + answer.tokens)[:-1]
    if rows is None or rows.status != "ok":
        return f"captured {rows.status}: {rows.error}" if rows else "no capture result"
    if rows.dropped:
        return f"{rows.dropped} rows were dropped"
    if rows.positions != list(range(len(expected))):
        return f"{len(rows.positions)} rows of other positions than 0 to {len(expected) - 1}"
    if rows.token_ids != expected:
        return "rows of other tokens than the request's"
    missing = sites - rows.values.keys()
    wrong = [site for site in rows.values if len(rows.at(site)) != len(expected)]
    if missing or wrong:
        return f"no rows, or too few, at {sorted(missing | set(wrong))}"
    infinite = [site for site in rows.values if not np.isfinite(rows.at(site)).all()]
    return f"values at {infinite[0]} are not finite" if infinite else None


def judge_rows(found: Sequence[RequestAnswer], eager: Sequence[RequestAnswer], dtype: str, *, is_moe: bool) -> Verdict:
    """Row by row, what was captured while serving against what an engine in eager mode captures of the same tokens.

    In float32 by relative error, else by cosine.
    """
    check, is_exact = LIKE_EAGER, dtype == "float32"
    measures = [
        (_relative_errors if is_exact else _cosines)(*pair)
        for one, other in zip(found, eager, strict=True)
        for pair in _pairs(one.rows, other.rows, is_exact=is_exact)
    ]
    sites = {site for answer in found if answer.rows for site in answer.rows.values}
    left_out = sorted({Site.parse(site).hook.value for site in sites.difference(_judged(sites, is_exact=is_exact))})
    not_compared = f"not compared in 16 bits: {', '.join(left_out)}"
    if not measures:
        return Verdict(check, Status.WARNING, not_compared)
    values = np.concatenate(measures)
    is_off = ~(values <= MAX_RELATIVE_ERROR) if is_exact else ~(values >= MIN_ROW_COSINE)
    worst = 1.0 if is_exact else _smallest_mean(found, eager)
    if is_exact:
        text = f"largest relative error {values.max():.1e} of {len(values)} vectors (allowed {MAX_RELATIVE_ERROR:.0e})"
    else:
        text = (
            f"smallest cosine {values.min():.4f} of {len(values)} vectors (at least {MIN_ROW_COSINE}), "
            f"smallest mean of a site {worst:.5f} (at least {MIN_COSINE})"
        )
    if left_out:
        text += f"; {not_compared}"
    if not worst >= MIN_COSINE:
        return Verdict(check, Status.FAILED, text)
    if not is_off.any():
        return Verdict(check, Status.PASSED, text)
    text = f"{text}; {int(is_off.sum())} are off"
    if is_moe and is_off.mean() <= MOE_SHARE:
        return Verdict(check, Status.WARNING, f"{text}: other experts may have been chosen")
    return Verdict(check, Status.FAILED, text)


def _smallest_mean(found: Sequence[RequestAnswer], eager: Sequence[RequestAnswer]) -> float:
    """The mean cosine of the site where it is smallest."""
    by_answer = [
        [_cosines(*pair) for pair in _pairs(one.rows, other.rows, is_exact=False)]
        for one, other in zip(found, eager, strict=True)
    ]
    return min(float(np.concatenate(of_site).mean()) for of_site in zip(*by_answer, strict=True))


def _judged(sites: Iterable[str], *, is_exact: bool) -> list[str]:
    """The sites whose rows are compared: where numbers are rounded, a token may be sent to other experts."""
    return [site for site in sites if is_exact or Site.parse(site).hook not in READ_ONLY]


def _pairs(
    found: AnswerRows | None, eager: AnswerRows | None, *, is_exact: bool
) -> Iterator[tuple[Float32Rows, Float32Rows]]:
    assert found is not None  # noqa: S101  (both are complete)
    assert eager is not None  # noqa: S101
    for site in _judged(found.values, is_exact=is_exact):
        one, other = found.at(site), eager.at(site) if site in eager.values else np.zeros((0, 1), np.float32)
        yield one, other if one.shape == other.shape else np.full_like(one, np.nan)


def _relative_errors(found: Float32Rows, expected: Float32Rows) -> Float32Rows:
    """``[rows]``."""
    size = np.maximum(np.linalg.norm(expected, axis=1), np.finfo(np.float32).tiny)
    return np.linalg.norm(found - expected, axis=1) / size  # type: ignore[no-any-return]


def _cosines(found: Float32Rows, expected: Float32Rows) -> Float32Rows:
    """``[rows]``; of rows of zeros, 1 if both are."""
    sizes = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    products = np.einsum("ij,ij->i", found, expected)
    are_zero = ~found.any(axis=1) & ~expected.any(axis=1)
    return np.where(are_zero, 1.0, products / np.maximum(sizes, np.finfo(np.float32).tiny))


def judge_owners(found: Sequence[RequestAnswer], eager: Sequence[RequestAnswer]) -> Verdict:
    """No request's last row is nearer by far to another request's in eager mode than to its own."""
    check, strangers, sites = "captured rows are the request's own", [], []
    for site in found[0].rows.values if found[0].rows else ():
        ours = np.stack([answer.rows.at(site)[-1] for answer in found if answer.rows])
        theirs = np.stack([answer.rows.at(site)[-1] for answer in eager if answer.rows and site in answer.rows.values])
        apart = np.stack([np.linalg.norm(theirs - row, axis=1) for row in ours])
        is_other = apart.min(axis=1) < NEARER * apart.diagonal()
        strangers += [f"request {index} at {site}" for index in np.flatnonzero(is_other)]
        sites.append(site)
    if strangers:
        return Verdict(check, Status.FAILED, f"{strangers[0]}, and {len(strangers) - 1} more, are like another's")
    return Verdict(check, Status.PASSED, f"{len(found)} requests at {len(sites)} sites")


NUM_LOGPROBS = 5
IN_FLIGHT = (1, 8)
NUM_DRAINING_STEPS = 5
NUM_ROUNDS = 5
TIMING_S = 120
"""A slow machine begins no further round after this time."""
TIMED_PROMPT = 32
TIMED_TOKENS = 33


class EngineJob(msgspec.Struct, frozen=True, kw_only=True):
    """The job of one engine.

    Attributes:
        kind: Of the engine.
        arguments: For vLLM's parser, ``--model`` first.
        sections: Of ``additional_config["headgate"]``, as the user gave them by headgate's flags.
        out: Where the recording goes.
        earlier: File with the recording of `SERVED`, for `EAGER`.
        is_timed: Whether decode steps are timed.
    """

    kind: str
    arguments: list[str]
    sections: dict[str, dict[str, object]]
    out: str
    earlier: str | None = None
    is_timed: bool = False


def main() -> None:
    """Run the job whose file is the first argument."""
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=EngineJob)
    if job.kind != STOCK:
        from headgate.capture.engine.plugin import register

        register()
    earlier = Path(job.earlier).read_bytes() if job.earlier else None
    engine = VerifiedEngine(job, msgspec.msgpack.decode(earlier, type=Recording) if earlier else None)
    Path(job.out).write_bytes(msgspec.msgpack.encode(engine.record()))
    engine.close()


class VerifiedEngine:
    """vLLM's `LLM` as the user wants it, and what it did.

    Raises:
        ConfigError: If the model is too short for the prompts.
    """

    def __init__(self, job: EngineJob, earlier: Recording | None) -> None:
        self._job = job
        self._earlier = earlier
        self._consumers = checked_consumers(job.sections.get("capture") or {}) if job.kind == SERVED else []
        began = time.perf_counter()
        self._llm = _open(job)
        self._start_s = time.perf_counter() - began
        self._config = self._llm.llm_engine.vllm_config
        model = self._config.model_config
        if model.max_model_len < MIN_MODEL_LENGTH:
            raise ConfigError(
                f"headgate verify: max_model_len is {model.max_model_len}, too short for its prompts and answers; "
                f"at least {MIN_MODEL_LENGTH} is needed"
            )
        self._plain = plain_requests(model.get_vocab_size(), model.max_model_len)
        self._scenes: dict[str, list[RequestAnswer]] = {}
        self._unchecked: dict[str, str] = {}
        self._run_counts: dict[str, list[dict[str, dict[str, int]]]] = {}
        self._replays: dict[str, list[int]] = {}

    def record(self) -> Recording:
        """Serve all scenes of this kind of engine."""
        self._llm.collective_rpc(count_replays)
        for scene in self._all_scenes():
            self._serve(scene)
        return Recording(
            kind=self._job.kind,
            facts=self._facts(),
            scenes=self._scenes,
            unchecked=self._unchecked,
            run_counts=self._run_counts,
            replays=self._replays,
            step_ms=self._time() if self._job.is_timed else {},
        )

    def close(self) -> None:
        """Stop it."""
        self._llm.llm_engine.engine_core.shutdown()

    def _all_scenes(self) -> Iterator[Scene]:
        if self._job.kind != EAGER:
            yield Scene(name=PLAIN, requests=self._plain)
            yield Scene(name=PLAIN_AGAIN, requests=self._plain)
        if self._job.kind not in (STOCK, IDLE):
            for part in check_parts().values():
                yield from part.scenes(self._stage())
        if self._job.kind == SERVED:
            yield Scene(name=PLAIN_AT_THE_END, requests=self._plain)

    def _stage(self) -> Stage:
        info = model_info(self._config)
        return Stage(
            kind=self._job.kind,
            llm=self._llm,
            plain=self._plain,
            sites=info.sites,
            width=lambda site: info.shape(site).width,
            earlier=self._earlier,
            consumers=self._consumers,
        )

    def _serve(self, scene: Scene) -> None:
        self._unchecked |= scene.unchecked
        self._empty_cache()
        with self._counted(scene.name):
            outputs = self._llm.generate(
                [{"prompt_token_ids": list(request.prompt)} for request in scene.requests],
                [self._params(request) for request in scene.requests],
                use_tqdm=False,
            )
        self._scenes[scene.name] = [
            self._answer(request, output) for request, output in zip(scene.requests, outputs, strict=True)
        ]

    def _answer(self, request: SceneRequest, output: Any) -> RequestAnswer:
        (sample,) = output.outputs
        results = getattr(output, "capture_results", None) or {}  # the stock engine runs without headgate
        return RequestAnswer(
            label=request.label,
            prompt=list(output.prompt_token_ids),
            tokens=list(sample.token_ids),
            logprobs=[{token: entry.logprob for token, entry in step.items()} for step in sample.logprobs],
            rows=_rows(results[CONSUMER]) if results and request.captures else None,
            readings={
                each.instance: ConsumerReading(each.name, found.status, found.error, found.payload)
                for each in self._consumers
                if (found := results.get(each.instance)) is not None
            },
        )

    def _empty_cache(self) -> None:
        """Two scenes of the same prompts compute the same only if neither finds blocks of the other."""
        for _ in range(NUM_DRAINING_STEPS):
            if self._llm.reset_prefix_cache():
                return
            self._llm.llm_engine.engine_core.get_output()  # a step that async scheduling may still have under way
        raise AssertionError("the prefix cache could not be emptied: blocks are in use between two scenes")

    def _params(self, request: SceneRequest) -> object:
        SamplingParams = vllm_names.SAMPLING_PARAMS.get()

        made = SamplingParams(
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            max_tokens=request.max_tokens,
            logprobs=NUM_LOGPROBS,
        )
        for name, value in request.fields.items():
            setattr(made, name, value)
        if request.captures:
            made.capture = {CONSUMER: {"hooks": _all_of(self._stage())}}
        return made

    @contextmanager
    def _counted(self, scene: str) -> Iterator[None]:
        """Note how often sites ran and graphs were replayed meanwhile, on every worker."""
        before, replayed = self._run_counts_now(), self._llm.collective_rpc(num_replays)
        yield
        self._run_counts[scene] = [
            {part: _less(counts, earlier[part]) for part, counts in worker.items()}
            for worker, earlier in zip(self._run_counts_now(), before, strict=True)
        ]
        self._replays[scene] = [b - a for a, b in zip(replayed, self._llm.collective_rpc(num_replays), strict=True)]

    def _run_counts_now(self) -> list[dict[str, dict[str, int]]]:
        if self._job.kind != SERVED:
            return []
        return [
            {part: found["run_counts"] for part, found in worker.items() if found and "run_counts" in found}
            for worker in self._llm.collective_rpc("headgate_stats")
        ]

    def _facts(self) -> VerifyFacts:
        current_platform = vllm_names.PLATFORM.get()

        model, compilation = self._config.model_config, self._config.compilation_config
        mode = compilation.cudagraph_mode
        return VerifyFacts(
            architecture=", ".join(getattr(model.hf_config, "architectures", None) or ["unknown"]),
            dtype=str(model.dtype).removeprefix("torch."),
            num_layers=model.hf_text_config.num_hidden_layers,
            hidden_size=model.get_hidden_size(),
            num_experts=model.get_num_experts(),
            graph_mode="NONE" if mode is None or current_platform.is_cpu() else mode.name,
            device=_device_name(),
            num_workers=len(self._llm.collective_rpc(num_replays)),
            versions=versions(),
            start_s=self._start_s,
            load_format=str(self._config.load_config.load_format),
            compiler="" if self._job.kind == STOCK else _compiler_text(self._llm.collective_rpc("headgate_stats")),
        )

    def _time(self) -> dict[int, list[float]]:
        """Median time of a decode step, in milliseconds, for each round; the first round only warms up."""
        step_ms: dict[int, list[float]] = {number: [] for number in IN_FLIGHT}
        began = time.perf_counter()
        for round_index in range(NUM_ROUNDS + 1):
            if round_index > 1 and time.perf_counter() - began > TIMING_S:
                break
            for number in IN_FLIGHT:
                value = self._time_once(round_index, number)
                if round_index:
                    step_ms[number].append(value)
        return step_ms

    def _time_once(self, round_index: int, num_requests: int) -> float:
        SamplingParams = vllm_names.SAMPLING_PARAMS.get()

        engine = self._llm.llm_engine
        tokens = [token for request in self._plain for token in request.prompt]
        longest = min(TIMED_PROMPT, self._config.model_config.max_model_len - TIMED_TOKENS - 1)
        for index in range(num_requests):
            start = (round_index * num_requests + index) % max(len(tokens) - longest, 1)
            params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=TIMED_TOKENS)
            prompt = {"prompt_token_ids": tokens[start : start + longest]}
            engine.add_request(f"headgate-verify-{round_index}-{num_requests}-{index}", prompt, params)
        ends = []
        while engine.has_unfinished_requests():
            engine.step()
            ends.append(time.perf_counter())
        # The first steps compute the prompts; the last one may only hand out what is there.
        steps = [b - a for a, b in pairwise(ends)][2:-1]
        return 1e3 * statistics.median(steps)


def _compiler_text(workers: Sequence[Mapping[str, Mapping[str, int]]]) -> str:
    """Say for the report what the workers counted of inductor's kernels."""
    found = Counter[str]()
    for worker in workers:
        found.update(worker["compiler"])
    text = f"inductor: rewrites of kernels {'on' if found['rewrites'] == len(workers) else 'off'}"
    if not found["kernels"]:
        return f"{text}; none was written (not compiled for a GPU, or from its cache)"
    text += (
        f"; {found['prefetched']} of {found['norms']} norm kernels load weights early, {found['hoisted']} of "
        f"{found['kernels']} kernels load tables early; {found['excluded']} buffers left out of the heuristics"
    )
    return f"{text}; {found['unmatched']} NOT RECOGNISED" if found["unmatched"] else text


def _open(job: EngineJob) -> Any:
    LLM = vllm_names.LLM.get()
    EngineArgs = vllm_names.ENGINE_ARGS.get()
    FlexibleArgumentParser = vllm_names.ARGUMENT_PARSER.get()

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="headgate verify", add_help=False))
    try:
        arguments = EngineArgs.from_cli_args(parser.parse_args(job.arguments))
    except SystemExit:
        sys.exit(USAGE_STATUS)
    given = dict(arguments.additional_config or {})
    ours = {**(given.pop(OUR_KEY, None) or {}), **job.sections}
    if job.kind != STOCK:
        parts = check_parts()
        sections = {name: part.section(ours.get(name) or {}, counts=job.kind == SERVED) for name, part in parts.items()}
        given[OUR_KEY] = {**ours, **{name: section for name, section in sections.items() if section}}
    arguments.additional_config = given
    if job.kind == EAGER:
        arguments.enforce_eager = True
    if job.kind == STOCK:
        fit_cpu_cache(arguments)
    llm = LLM.from_engine_args(arguments)
    WorkerBase = vllm_names.WORKER.get()

    if hasattr(WorkerBase, "headgate_stats") != (job.kind != STOCK):
        raise AssertionError(f"headgate verify: the {job.kind} engine was started with the wrong plugins")
    return llm


def fit_cpu_cache(arguments: Any) -> None:
    """Give stock vLLM on CPUs the KV cache that headgate's engines choose where vLLM's share of the memory is not free.

    Args:
        arguments: vLLM's ``EngineArgs``.
    """
    current_platform = vllm_names.PLATFORM.get()

    if current_platform.is_cpu() and is_left_to_vllm(arguments):
        config = copy(arguments).create_engine_config()
        bound_cpu_cache(config)
        arguments.kv_cache_memory_bytes = config.cache_config.kv_cache_memory_bytes


def _rows(result: CaptureResult) -> AnswerRows:
    captured = result.payload
    if captured is None:
        return AnswerRows(status=result.status, error=result.error, dropped=result.dropped_rows)
    values = {site.name: captured.rows[site].float().contiguous().numpy() for site in captured.sites}
    return AnswerRows(
        status=result.status,
        error=result.error,
        dropped=result.dropped_rows,
        positions=captured.positions.tolist(),
        token_ids=captured.token_ids.tolist(),
        widths={site: rows.shape[-1] for site, rows in values.items()},
        hidden_size=next(iter(values.values())).shape[-1],
        values={site: rows.tobytes() for site, rows in values.items()},
    )


def _all_of(stage: Stage) -> dict[str, list[int] | str]:
    return {hook: layers or "all" for hook, layers in site_map(stage.sites).items()}


def _less(counts: Mapping[str, int], earlier: Mapping[str, int]) -> dict[str, int]:
    return {site: count - earlier[site] for site, count in counts.items()}


def _device_name() -> str:
    """Name of the hardware, as vLLM reports it, which makes no CUDA context for it."""
    current_platform = vllm_names.PLATFORM.get()

    if not current_platform.is_cpu():
        return str(current_platform.get_device_name())
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores of {names[0]}" if names else "CPU"


_replayed = 0


def count_replays(worker: object) -> None:
    """Worker call: count from now on how often a CUDA graph is replayed."""
    original = torch.cuda.CUDAGraph.replay

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        global _replayed
        _replayed += 1
        original(graph)

    torch.cuda.CUDAGraph.replay = replay  # type: ignore[assignment, method-assign]


def num_replays(worker: object) -> int:
    """Worker call: how many there were."""
    return _replayed


if __name__ == "__main__":
    # Worker processes import what they call from this module by its name.

    main()
