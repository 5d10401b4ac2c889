"""Serves a tiny model of `architectures` and compares what is captured and steered with Hugging Face."""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from torch import Tensor

from headgate.capture.schema.errors import SelfTestError, UnsupportedError
from headgate.capture.schema.sites import INNER_HOOKS, HookPoint, Site
from tests.conftest import start_llm, stop_llm
from tests.engine.architecture_reference import AS_VLLM, STEERED_LAYER, Reference, Rows, reference, vector
from tests.engine.architectures import (
    HUGGING_FACE,
    IN_BFLOAT16,
    LAYERS,
    LIKE_OWN_MODULES,
    SPARSE,
    VOCABULARY,
    WITH_A_VISION_TOWER,
    make_model,
)
from tests.engine.hf_reference import own_process, relative_error, row_cosines
from tests.engine.own_modules import different_rows, watched
from tests.environment import ENVIRONMENT, add_plugins

PROMPTS = [[1, *((7 * i) % (VOCABULARY - 5) + 5 for i in range(40))], [1, *(range(30, 49))]]
NUM_OUTPUT = 4
MAX_ERROR = 1e-4
MAX_ROUNDING = MAX_ERROR / 10
MIN_COSINE = 0.999
"""Of every row of a model in bfloat16, whose largest error says little."""
BOUNDS = (MAX_ERROR, MAX_ROUNDING)
"""Largest errors of a stream: from the sum of its branches, and from what the layer before left."""
BOUNDS_IN_BFLOAT16 = (2**-6, 2**-6)
"""The layer before left a row that was rounded; the vector of a steered one was added to a branch, rounded as well."""
AROUND_ATTENTION = INNER_HOOKS | {HookPoint.ATTN_IN, HookPoint.HOOK_Z}
"""Left to the parity tests: many models lack one of them and have all others."""
INNER = [hook for hook in HookPoint if hook is not HookPoint.FINAL_NORM and hook not in AROUND_ATTENTION]
BOUNDARIES = [HookPoint.PRE_ATTN, HookPoint.POST_MLP]
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 4,
    "max_logprobs": -1,
    "enable_prefix_caching": False,
    "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
    "in_process": True,
}
"""vLLM's rotary kernel for CPUs is left out: of queries with three dimensions it rotates some values wrongly."""
ON_GPUS: dict[str, Any] = {
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 1 << 28,
    "compilation_config": {},
    "gdn_prefill_backend": "triton",
}
"""What differs on a GPU. FlashInfer may be missing."""


def _has_gpus() -> bool:
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()


def engine_of(model_type: str) -> dict[str, Any]:
    """The settings of a type's engine on this machine."""
    settings = {**ENGINE, **({"language_model_only": True} if model_type in WITH_A_VISION_TOWER else {})}
    if _has_gpus():
        settings |= ON_GPUS
        if model_type not in IN_BFLOAT16:
            settings["attention_config"] = {"backend": "TRITON_ATTN"}  # others compute no float32
        if model_type in SPARSE:
            settings["block_size"] = 64
    if model_type in IN_BFLOAT16:
        settings["dtype"] = "bfloat16"
    return settings | json.loads(os.environ.get("GPU_TEST_ENGINE", "{}"))


def compare(model_type: str, helpers: Executor, cache: Path) -> dict[str, Any]:
    """Try one type; the entry for the results."""
    folder = cache / model_type
    try:
        helpers.submit(make_model, model_type, folder).result()
        helpers.submit(reference, str(folder), PROMPTS, is_steered=False).result()
    except Exception as error:  # noqa: BLE001 - whatever a model's own code raises
        return {"result": "not built", "note": f"{HUGGING_FACE}{_line(error)}"}
    try:
        llm, hooks = _start(folder)
    except Exception as error:  # noqa: BLE001
        refused = _cause(error, UnsupportedError) or _cause(error, SelfTestError)
        if refused is None:
            traceback.print_exc()
            return {"result": "not built", "note": f"vLLM: {_line(error)}"}
        return {"result": "refused", "note": _line(refused)}
    try:
        found = {"model": _served(llm), "hooks": _said(hooks), **_compare(llm, hooks, str(folder), helpers)}
        alone = _alone(llm, hooks) if found["result"] == "WRONG" and model_type in SPARSE else []
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        return {"result": "WRONG", "hooks": _said(hooks), "note": _line(error)}
    finally:
        stop_llm(llm)
    return found | compare_with_modules(folder, alone) if alone else found


def _start(folder: Path) -> tuple[Any, list[HookPoint]]:
    """Start with as many hook points as the model has."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    settings, hooks = engine_of(folder.name), list(INNER)
    while True:
        capture: dict[str, Any] = {"consumers": [{"name": "memory"}], "sites": {hook.value: "all" for hook in hooks}}
        capture["sites"]["final_norm"] = "all"
        steering = {"sites": {"post_mlp": "all"}}
        try:
            return start_llm(
                model=folder, **settings, additional_config={"headgate": {"capture": capture, "steering": steering}}
            ), hooks
        except Exception as error:
            cleanup_dist_env_and_memory()
            refused = _cause(error, UnsupportedError)
            missing = [hook for hook in hooks if refused and f"has no hook point {hook}" in str(refused)]
            if not missing or missing[0] in BOUNDARIES:
                raise
            hooks = [hook for hook in hooks if hook not in missing]


@dataclass(frozen=True, kw_only=True, slots=True)
class Alone:
    """What came of one prompt alone, steered after a layer or not."""

    prompt: list[int]
    is_steered: bool
    tokens: list[int]
    rows: Rows


def serve_alone(folder: Path) -> list[Alone]:
    """Serve the model of a folder with headgate, as `compare_with_modules` takes it."""
    llm, hooks = _start(folder)
    try:
        return _alone(llm, hooks)
    finally:
        stop_llm(llm)


def _alone(llm: Any, hooks: list[HookPoint]) -> list[Alone]:
    """One prompt after the other: a module's rows of a step are then of one request."""
    found = []
    for is_steered in (False, True):
        for prompt in PROMPTS:
            (output,) = _generate(llm, hooks, [prompt], is_steered=is_steered)
            tokens = list(output.outputs[0].token_ids)
            found.append(Alone(prompt=prompt, is_steered=is_steered, tokens=tokens, rows=_captured(output)))
    return found


def compare_with_modules(folder: Path, alone: Sequence[Alone]) -> dict[str, Any]:
    """Compare `alone` with hooks on vLLM's own modules, in an engine without headgate: bit for bit."""
    llm = start_llm(model=folder, **engine_of(folder.name))
    try:
        different, num_rows = [], 0
        for each in alone:
            with watched(_model(llm), LAYERS, {STEERED_LAYER: vector()} if each.is_steered else {}) as seen:
                (output,) = llm.generate([{"prompt_token_ids": each.prompt}], _params(), use_tqdm=False)
            if list(output.outputs[0].token_ids) != each.tokens:
                different.append("tokens")
            different += [f"{num} rows at {site}" for site, num in different_rows(each.rows, seen).items()]
            num_rows += sum(map(len, each.rows.values()))
            assert num_rows, "no row was captured: there is nothing to compare"
    finally:
        stop_llm(llm)
    if different:
        return {"result": "WRONG", "note": f"other than vLLM's own modules have: {', '.join(different)}"}
    note = f"{num_rows} rows are those of hooks on vLLM's own modules, bit for bit; the error is from Hugging Face"
    return {"result": LIKE_OWN_MODULES, "note": note}


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What was found for one prompt.

    Attributes:
        error: Largest error of a site, relative to the site's largest value.
        site: That site, and whether the run was steered.
        is_vllms: Whether vLLM's own logprobs differ from Hugging Face's and are what the captured rows give; only
            looked at beyond `MAX_ERROR`.
        note: What is known of the difference.
    """

    error: float
    site: str
    is_vllms: bool = False
    note: str = ""


def _compare(llm: Any, hooks: list[HookPoint], folder: str, helpers: Executor) -> dict[str, Any]:
    """Compare two runs, of which the second is steered; the largest error decides."""

    def ask(*args: Any, **settings: Any) -> list[Reference]:
        return helpers.submit(reference, folder, *args, **settings).result()

    is_rounded = engine_of(Path(folder).name)["dtype"] == "bfloat16"
    run = _compare_rounded if is_rounded else _compare_run
    compared = [each for is_steered in (False, True) for each in run(llm, hooks, ask, is_steered=is_steered)]
    worst = max(compared, key=lambda each: each.error)
    found: dict[str, Any] = {"error": float(f"{worst.error:.1e}"), **({"dtype": "bfloat16"} if is_rounded else {})}
    differing = [each for each in compared if each.error > (1 - MIN_COSINE if is_rounded else MAX_ERROR)]
    if not differing:
        return {"result": "equal", **found}
    wrong = [each for each in differing if not each.is_vllms]
    if wrong:
        return {"result": "WRONG", **found, "note": f"{wrong[0].site}: {wrong[0].note}"}
    return {"result": "as vLLM", **found, "note": AS_VLLM[Path(folder).name][0]}


def _compare_run(
    llm: Any, hooks: list[HookPoint], ask: Callable[..., list[Reference]], *, is_steered: bool
) -> list[Comparison]:
    outputs = _generate(llm, hooks, is_steered=is_steered)
    tokens = [[*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]] for output in outputs]
    captured = [_captured(output) for output in outputs]
    compared = []
    for rows, own in zip(captured, ask(tokens, is_steered=is_steered), strict=True):
        check_sums(rows, hooks, is_steered=is_steered)
        error, site = max((relative_error(rows[site], own.rows[site]), site.name) for site in own.rows)
        compared.append(Comparison(error=error, site=f"{'steered, ' * is_steered}{site}"))
        if error <= MAX_ERROR:
            _check_inner(rows, hooks, own)
    if max(each.error for each in compared) <= MAX_ERROR:
        return compared
    forced = ask(tokens, is_steered=is_steered, forced=captured)
    as_vllm = ask(tokens, is_steered=is_steered, is_as_vllm=True)
    judged = map(_judge, compared, outputs, captured, ask(tokens, is_steered=is_steered), forced, as_vllm)
    return list(judged)


def _compare_rounded(
    llm: Any, hooks: list[HookPoint], ask: Callable[..., list[Reference]], *, is_steered: bool
) -> list[Comparison]:
    """Compare each part of a run in bfloat16 with Hugging Face's in float32, of the same rounded weights and inputs.

    An error is 1 - cosine. What rounding did to the parts before is in a part's inputs, the captured rows: a random
    model's layers enlarge it, so that Hugging Face's own rows in bfloat16 are 2e-3 from its rows in float32.
    """
    outputs = _generate(llm, hooks, is_steered=is_steered)
    tokens = [[*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]] for output in outputs]
    captured = [_captured(output) for output in outputs]
    compared = []
    for rows, own in zip(captured, ask(tokens, is_steered=is_steered, is_rounded=True, forced=captured), strict=True):
        check_sums(rows, hooks, is_steered=is_steered, bounds=BOUNDS_IN_BFLOAT16)
        errors = {
            site: (1 - row_cosines(rows[site], expected))
            * (rows[site] != expected).any(-1)  # a padding token's row is 0
            for site, expected in own.rows.items()
        }
        site = max(errors, key=lambda site: float(errors[site].max()))
        note = ", ".join(
            f"{site.name} {int((found > 1 - MIN_COSINE).sum())} of {len(found)}" for site, found in errors.items()
        )
        compared.append(
            Comparison(error=float(errors[site].max()), site=site.name, note=f"rows that differ by site: {note}")
        )
    return compared


def _judge(
    compared: Comparison, output: Any, rows: Rows, expected: Reference, forced: Reference, as_vllm: Reference
) -> Comparison:
    """Whether a difference is vLLM's, and in which of the parts of Hugging Face's model, given the captured rows."""
    own = _logprobs(output)
    error, left = (relative_error(own, each.logits.log_softmax(-1)[-len(own) :]) for each in (expected, forced))
    errors = {site.name: relative_error(rows[site], value) for site, value in forced.rows.items()}
    parts = [name for name, error in errors.items() if error > MAX_ROUNDING]
    remaining = max(relative_error(rows[site], value) for site, value in as_vllm.rows.items())
    note = f"vLLM's logprobs differ by {error:.0e}, those of the captured final norm from vLLM's by {left:.0e}; parts "
    note += f"that differ alone: {', '.join(parts) or 'none'}; remaining where Hugging Face is as vLLM: {remaining:.0e}"
    is_vllms = error > MAX_ROUNDING and left <= MAX_ROUNDING and remaining <= MAX_ERROR
    return replace(compared, is_vllms=is_vllms, note=note)


def _check_inner(rows: Rows, hooks: list[HookPoint], expected: Reference) -> None:
    """The MLP's input is that of a module of Hugging Face's layer; of parallel branches, so is attention's output."""
    places = [(HookPoint.MLP_IN, expected.mlp_inputs)]
    if HookPoint.POST_ATTN not in hooks:
        places.append((HookPoint.ATTN_OUT, expected.attn_outputs))
    for hook, theirs in places:
        for site in (Site(index, hook) for index in range(LAYERS) if hook in hooks):
            candidates = [each for each in theirs.get(site.layer, []) if each.shape == rows[site].shape]
            error = min((relative_error(rows[site], each) for each in candidates), default=1.0)
            assert error <= MAX_ERROR, f"{site.name} is of no module of Hugging Face's: {error} from the nearest"


def _params() -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=NUM_OUTPUT, logprobs=-1)


def _generate(llm: Any, hooks: list[HookPoint], given: Sequence[list[int]] = PROMPTS, *, is_steered: bool) -> list[Any]:
    params = _params()
    sites = {hook.value: "all" for hook in hooks} | {"final_norm": "all"}
    params.capture = {"memory": {"hooks": sites, "positions": "all"}}
    if is_steered:
        params.steering_vectors = {"post_mlp": {STEERED_LAYER: vector().tolist()}}
    prompts = [{"prompt_token_ids": ids} for ids in given]
    return list(llm.generate(prompts, [params] * len(prompts), use_tqdm=False))


def _captured(output: Any) -> Rows:
    result = output.capture_results["memory"]
    assert result.status == "ok", result.error
    return {site: result.payload[site] for site in result.payload.sites}


def check_sums(
    rows: Rows, hooks: Sequence[HookPoint], *, is_steered: bool, bounds: tuple[float, float] = BOUNDS
) -> None:
    """The stream is the sum of its branches, wherever they are captured, and a layer gets what the one before left."""
    of_sums, of_streams = bounds
    for index in range(LAYERS):
        row = {hook: rows[Site(index, hook)] for hook in hooks}
        sums = [([HookPoint.PRE_ATTN, HookPoint.ATTN_OUT], HookPoint.POST_ATTN)]
        sums += [([HookPoint.POST_ATTN, HookPoint.MLP_OUT], HookPoint.POST_MLP)]
        sums += [([HookPoint.PRE_ATTN, HookPoint.ATTN_OUT, HookPoint.MLP_OUT], HookPoint.POST_MLP)]
        for parts, whole in sums:
            if {*parts, whole} <= set(hooks):
                error = relative_error(torch.stack([row[part] for part in parts]).sum(0), row[whole])
                assert error <= of_sums, f"layer {index}: {whole} differs from {' + '.join(parts)} by {error}"
        if index + 1 < LAYERS:
            left = row[HookPoint.POST_MLP]
            left = left + vector() if is_steered and index == STEERED_LAYER else left
            error = relative_error(rows[Site(index + 1, HookPoint.PRE_ATTN)], left)
            run = "the steered run" if is_steered else "the plain run"
            assert error <= of_streams, (
                f"in {run}, layer {index + 1} gets another stream than layer {index} left, by {error}"
            )


def _logprobs(output: Any) -> Tensor:
    steps = output.outputs[0].logprobs
    return torch.stack([torch.tensor([step[token].logprob for token in range(VOCABULARY)]) for step in steps])


def _model(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()


def _served(llm: Any) -> str:
    return type(_model(llm)).__name__


def _said(hooks: Sequence[HookPoint]) -> str:
    missing = [hook.value for hook in INNER if hook not in hooks]
    return f"all but {', '.join(missing)}" if missing else "all"


def _cause(error: BaseException | None, kind: type[Exception]) -> BaseException | None:
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [traceback.extract_tb(error.__traceback__)[-1].line or ""]
    return f"{type(error).__name__}: {lines[0]}"[:200].replace("|", "/")


def _save_time() -> None:
    """Leave out what each engine of a process does anew."""
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    registry._run_in_subprocess = lambda read: read()  # vLLM reads a class in a new process that imports all: 10 s
    if current_platform.is_cpu():
        current_platform.register_triton_kernel_overrides()  # fails the second time if modules were imported since
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)
    else:
        _tune_nothing()
    torch.set_num_threads(1)  # tiny tensors: more threads wait for each other


def _tune_nothing() -> None:
    """Give each of Triton's kernels its smallest configuration: to compile and time all took a Mamba 2 four minutes."""
    import triton

    tuned = triton.autotune

    def size(config: Any) -> tuple[int, int]:
        return prod(value for value in config.kwargs.values() if isinstance(value, int)), config.num_stages

    def autotune(configs: Any, *args: Any, **settings: Any) -> Any:
        return tuned([min(configs, key=size)] if configs else configs, *args, **settings)

    triton.autotune = autotune


def serve(pipe: Connection) -> None:
    """Answer each ``(type, folder for models)`` from `pipe` with its entry, until its other end is closed."""
    os.setpgid(0, 0)
    os.environ.update(ENVIRONMENT)
    os.environ["TRITON_F32_DEFAULT"] = "ieee"  # by default its products of float32 have TF32's ten bits
    os.environ["TRITON_CACHE_DIR"] = str(Path(gettempdir()) / "headgate-triton-ieee")
    add_plugins()
    _save_time()
    with own_process() as helpers, contextlib.suppress(EOFError):
        while True:
            model_type, cache = pipe.recv()
            pipe.send(compare(model_type, helpers, Path(cache)))
