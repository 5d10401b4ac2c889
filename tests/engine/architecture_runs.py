"""Serves one tiny model of `architectures` after another and compares what is captured and steered with Hugging Face.

``python -m tests.engine.architecture_runs RESULTS.json TYPE ...`` adds one entry for each type to RESULTS.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headgate.capture.schema.errors import UnsupportedError
from headgate.capture.schema.sites import FINAL_NORM_SITE, HookPoint, Site
from tests.engine.architectures import HIDDEN, LAYERS, VOCABULARY, make_model
from tests.engine.hf_reference import own_process, relative_error

PROMPTS = [[1, *((7 * i) % (VOCABULARY - 5) + 5 for i in range(40))], [1, *(range(30, 49))]]
STEERED_LAYER = 1
NUM_OUTPUT = 4
MAX_ERROR = 1e-4
INNER = [hook for hook in HookPoint if hook is not HookPoint.FINAL_NORM]
BOUNDARIES = [HookPoint.PRE_ATTN, HookPoint.POST_MLP]
ENGINE = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 4,
    "max_logprobs": -1,
    "enable_prefix_caching": False,
    "in_process": True,
}
Rows = dict[Site, Tensor]


def vector() -> Tensor:
    """What the second of two runs adds to the stream after layer `STEERED_LAYER`."""
    return torch.randn(HIDDEN, generator=torch.Generator().manual_seed(3))


def reference(
    folder: str, tokens: Sequence[Sequence[int]], *, is_steered: bool, final: Tensor | None = None
) -> list[tuple[Rows, Tensor]]:
    """Hugging Face's streams around each layer and the LM head's input, by forward hooks, and the logits.

    With `final`, the LM head gets these rows instead of its own.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    rows: Rows = {}
    for index, layer in enumerate(_layers(model)):
        _tap(layer, index, rows, vector() if is_steered and index == STEERED_LAYER else None)

    def enter_head(_: nn.Module, args: tuple[Any, ...]) -> Any:
        rows[FINAL_NORM_SITE] = args[0].reshape(-1, args[0].shape[-1]).clone()
        return None if final is None else (final.view_as(args[0]), *args[1:])

    model.get_output_embeddings().register_forward_pre_hook(enter_head)
    found = []
    for ids in tokens:
        with torch.no_grad():
            logits = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
        found.append((dict(rows), logits))
    return found


def _layers(model: nn.Module) -> nn.ModuleList:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == LAYERS]
    return lists[0]


def _tap(layer: nn.Module, index: int, rows: Rows, added: Tensor | None) -> None:
    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        value = args[0] if args else kwargs["hidden_states"]
        rows[Site(index, HookPoint.PRE_ATTN)] = value.reshape(-1, value.shape[-1]).clone()

    def leave(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        value = output[0] if isinstance(output, tuple) else output
        rows[Site(index, HookPoint.POST_MLP)] = value.reshape(-1, value.shape[-1]).clone()
        if added is None:
            return None
        return (value + added, *output[1:]) if isinstance(output, tuple) else value + added

    layer.register_forward_pre_hook(enter, with_kwargs=True)
    layer.register_forward_hook(leave)


def compare(model_type: str, helpers: ProcessPoolExecutor, cache: Path) -> dict[str, Any]:
    """Try one type; the entry for the results."""
    folder = cache / model_type
    try:
        helpers.submit(make_model, model_type, folder).result()
        helpers.submit(reference, str(folder), PROMPTS, is_steered=False).result()
    except Exception as error:  # noqa: BLE001 - whatever a model's own code raises
        return {"result": "not built", "note": f"Hugging Face: {_line(error)}"}
    try:
        llm, hooks = _start(folder)
    except Exception as error:  # noqa: BLE001
        refused = _cause(error, UnsupportedError)
        if refused is None:
            traceback.print_exc()
            return {"result": "not built", "note": f"vLLM: {_line(error)}"}
        return {"result": "refused", "note": _line(refused)}
    try:
        return {"model": _served(llm), "hooks": _said(hooks), **_compare(llm, hooks, str(folder), helpers)}
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        return {"result": "WRONG", "hooks": _said(hooks), "note": _line(error)}
    finally:
        from tests.conftest import stop_llm

        stop_llm(llm)


def _start(folder: Path) -> tuple[Any, list[HookPoint]]:
    """Start with as many hook points as the model has."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    from tests.conftest import start_llm

    hooks = list(INNER)
    while True:
        capture = {"consumers": [{"name": "memory"}], "sites": {hook.value: "all" for hook in hooks}}
        capture["sites"]["final_norm"] = "all"
        steering = {"sites": {"post_mlp": "all"}}
        try:
            return start_llm(
                model=folder, **ENGINE, additional_config={"headgate": {"capture": capture, "steering": steering}}
            ), hooks
        except Exception as error:
            cleanup_dist_env_and_memory()
            refused = _cause(error, UnsupportedError)
            missing = [hook for hook in hooks if refused and f"has no hook point {hook}" in str(refused)]
            if not missing or missing[0] in BOUNDARIES:
                raise
            fewer = [hook for hook in hooks if hook not in missing]
            hooks = fewer if len(hooks) == len(INNER) else list(BOUNDARIES)


def _compare(llm: Any, hooks: list[HookPoint], folder: str, helpers: ProcessPoolExecutor) -> dict[str, Any]:
    """Compare two runs, of which the second is steered; the largest error decides."""
    worst: tuple[float, str, Any] = (-1.0, "", None)
    for is_steered in (False, True):
        outputs = _generate(llm, hooks, is_steered=is_steered)
        tokens = [[*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]] for output in outputs]
        expected = helpers.submit(reference, folder, tokens, is_steered=is_steered).result()
        for output, ids, (rows, logits) in zip(outputs, tokens, expected, strict=True):
            captured = _captured(output)
            _check_sums(captured, hooks)
            for site in rows:
                error = relative_error(captured[site], rows[site])
                if error > worst[0]:
                    worst = error, f"{'steered, ' * is_steered}{site.name}", (output, ids, is_steered, logits)
    found: dict[str, Any] = {"error": float(f"{worst[0]:.1e}")}
    if worst[0] <= MAX_ERROR:
        return {"result": "equal", **found}
    output, ids, is_steered, logits = worst[2]
    own, final = _logprobs(output), _captured(output)[FINAL_NORM_SITE]
    is_vllms = relative_error(own, logits.log_softmax(-1)[-len(own) :]) > MAX_ERROR / 10
    remade = helpers.submit(reference, folder, [ids], is_steered=is_steered, final=final).result()[0][1]
    is_own = relative_error(own, remade.log_softmax(-1)[-len(own) :]) <= MAX_ERROR / 10
    if is_vllms and is_own:
        note = "vLLM's own logprobs differ from Hugging Face's; the captured final norm gives vLLM's"
        return {"result": "as vLLM", **found, "note": note}
    return {"result": "WRONG", **found, "note": f"{worst[1]}; vLLM differs: {is_vllms}, rows are vLLM's: {is_own}"}


def _generate(llm: Any, hooks: list[HookPoint], *, is_steered: bool) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=NUM_OUTPUT, logprobs=-1)
    sites = {hook.value: "all" for hook in hooks} | {"final_norm": "all"}
    params.capture = {"memory": {"hooks": sites, "positions": "all"}}
    if is_steered:
        params.steering_vectors = {"post_mlp": {STEERED_LAYER: vector().tolist()}}
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    return list(llm.generate(prompts, [params] * len(prompts), use_tqdm=False))


def _captured(output: Any) -> Rows:
    result = output.capture_results["memory"]
    assert result.status == "ok", result.error
    return {site: result.payload[site] for site in result.payload.sites}


def _check_sums(rows: Rows, hooks: list[HookPoint]) -> None:
    """The stream is the sum of its branches, wherever they are captured."""
    parts = [HookPoint.ATTN_OUT, HookPoint.MLP_OUT, *BOUNDARIES]
    for index in range(LAYERS):
        if all(hook in hooks for hook in parts):
            row = {hook: rows[Site(index, hook)] for hook in parts}
            total = row[HookPoint.PRE_ATTN] + row[HookPoint.ATTN_OUT] + row[HookPoint.MLP_OUT]
            error = relative_error(total, row[HookPoint.POST_MLP])
            assert error <= MAX_ERROR, f"layer {index}: stream and branches differ from the stream after it by {error}"


def _logprobs(output: Any) -> Tensor:
    steps = output.outputs[0].logprobs
    return torch.stack([torch.tensor([step[token].logprob for token in range(VOCABULARY)]) for step in steps])


def _served(llm: Any) -> str:
    return type(llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()).__name__


def _said(hooks: Sequence[HookPoint]) -> str:
    missing = [hook.value for hook in INNER if hook not in hooks]
    return "pre_attn, post_mlp" if len(missing) > 1 else f"all but {missing[0]}" if missing else "all"


def _cause(error: BaseException | None, kind: type[Exception]) -> BaseException | None:
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200].replace("|", "/")


def main(path: Path, names: Sequence[str]) -> None:
    """Try `names` and note each result at once."""
    import tests.conftest  # noqa: F401

    with tempfile.TemporaryDirectory() as cache, own_process() as helpers:
        for name in names:
            found = compare(name, helpers, Path(cache))
            results = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps(results | {name: found}, indent=1, sort_keys=True))
            print(name, found, flush=True)


if __name__ == "__main__":
    import os

    from tests.conftest import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    main(Path(sys.argv[1]), sys.argv[2:])
