"""Every hook point of every family holds what Hugging Face holds there: prefill and decode, eager and compiled.

One engine per family, in this process: prompts of one chunk, of several, and of one token run side by side in steps
of at most 32 tokens. `hf_reference` says what is right.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headgate.capture.sites import FINAL_NORM_SITE, HookPoint, Site
from tests.conftest import start_llm, stop_llm
from tests.engine.hf_reference import ANATOMIES, own_process, reference_rows, relative_error, row_cosines
from tests.engine.tiny_models import FAMILIES, LAYERS, VOCABULARY, tiny_model

PROMPTS = [
    [1, *((7 * i) % (VOCABULARY - 5) + 5 for i in range(45))],
    [9],
    [1, *((11 * i) % (VOCABULARY - 5) + 5 for i in range(20))],
]
NUM_OUTPUT = 6
MAX_ERROR = 1e-4
MIN_COSINE = 0.999
ENGINE = {
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 4,
    "enable_prefix_caching": False,
}
ROUTED = ("mixtral", "qwen3_moe")
EVERY_EXPERT = ("mixtral_all", "qwen3_moe_all")
"""All experts take every token: where a router chooses, a rounding of bf16 can choose another expert."""

EXACT = [family for family in FAMILIES if family not in EVERY_EXPERT]
ROUNDED = [family for family in FAMILIES if family not in ROUTED]
COMPILED = ("gemma3", "granite", "mixtral", "olmo2")
"""A pair with post-norms, a single stream with a multiplier, experts, Hugging Face's own layers."""


@pytest.fixture(scope="module")
def references() -> Iterator[ProcessPoolExecutor]:
    with own_process() as executor:
        yield executor


def hooks_of(family: str) -> dict[str, Any]:
    hooks = set(HookPoint) - ({HookPoint.POST_ATTN} if ANATOMIES[family].mid is None else set())
    return {hook.value: "all" for hook in sorted(hooks)}


def serve(family: str, dtype: str, *, eager: bool) -> list[Any]:
    """Start an engine, run `PROMPTS` with everything captured, stop it; the finished requests."""
    from vllm.config import CompilationMode

    from headgate.capture import SamplingParams

    hooks = hooks_of(family)
    capture = {"consumers": [{"name": "memory"}], "sites": hooks}
    llm = start_llm(
        model=tiny_model(family),
        dtype=dtype,
        enforce_eager=eager,
        additional_config={"headgate": {"capture": capture}},
        in_process=True,
        **ENGINE,
    )
    try:
        assert (llm.llm_engine.vllm_config.compilation_config.mode == CompilationMode.NONE) == eager
        params = SamplingParams(
            max_tokens=NUM_OUTPUT,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            capture={"memory": {"hooks": hooks, "positions": "all"}},
        )
        return list(llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False))
    finally:
        stop_llm(llm)
        del llm
        gc.collect()


def check(family: str, dtype: torch.dtype, outputs: list[Any], references: ProcessPoolExecutor) -> None:
    """Positions, tokens and shapes exactly; values within the bounds of `dtype`."""
    requests = [(prompt, list(output.outputs[0].token_ids)) for prompt, output in zip(PROMPTS, outputs, strict=True)]
    expected = references.submit(reference_rows, tiny_model(family), family, dtype, requests).result()
    hooks = [HookPoint(hook) for hook in hooks_of(family)]
    sites = {Site(layer, hook) for layer in range(LAYERS) for hook in hooks if hook is not HookPoint.FINAL_NORM}
    for (prompt, output), reference, served in zip(requests, expected, outputs, strict=True):
        result = served.capture_results["memory"]
        assert result.status == "ok", result.error
        captured, token_ids = result.payload, [*prompt, *output[:-1]]
        assert set(captured.sites) == sites | {FINAL_NORM_SITE}
        np.testing.assert_array_equal(captured.positions, np.arange(len(token_ids)))
        np.testing.assert_array_equal(captured.token_ids, token_ids)
        assert int(captured.is_prefill.sum()) == len(prompt)
        for site in captured.sites:
            assert captured[site].dtype == dtype
            assert captured[site].shape == reference.rows[site].shape
            check_values(captured[site], reference.rows[site], site)
        if dtype == torch.float32:
            assert reference.next_tokens[len(prompt) - 1 :].tolist() == output


def check_values(got: torch.Tensor, expected: torch.Tensor, site: Site) -> None:
    if got.dtype == torch.float32:
        error = relative_error(got, expected)
        assert error <= MAX_ERROR, f"{site.name}: relative error {error:.2g}"
    else:
        cosine = row_cosines(got, expected).min()
        assert cosine >= MIN_COSINE, f"{site.name}: cosine {cosine:.5f}"


@pytest.mark.parametrize("family", EXACT)
def test_rows_equal_hugging_face(family: str, references: ProcessPoolExecutor) -> None:
    check(family, torch.float32, serve(family, "float32", eager=True), references)


@pytest.mark.parametrize("family", ROUNDED)
def test_rows_point_where_hugging_face_does_in_bf16(family: str, references: ProcessPoolExecutor) -> None:
    check(family, torch.bfloat16, serve(family, "bfloat16", eager=True), references)


@pytest.mark.parametrize("family", COMPILED)
def test_compiled_rows_equal_hugging_face(
    family: str, references: ProcessPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))  # compiled here and now

    check(family, torch.float32, serve(family, "float32", eager=False), references)
