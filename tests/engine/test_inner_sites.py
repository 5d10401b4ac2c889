"""Rows within attention and the MLP are those of Hugging Face's functions, and vectors act there as they do there."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch

from headgate.capture.schema.sites import HookPoint, Site
from tests.conftest import start_llm, stop_llm
from tests.engine.hf_reference import Reference, Steering, own_process, relative_error
from tests.engine.inner_reference import inner_rows
from tests.engine.tiny_models import LAYERS, tiny_model

HOOKS = [HookPoint.Q_PRE, HookPoint.K_PRE, HookPoint.Q, HookPoint.K, HookPoint.V]
PROMPTS = [[3 + (7 * i) % 500 for i in range(40)], [9], [3 + (11 * i) % 500 for i in range(17)]]
"""The first takes two steps of at most 32 tokens."""
NUM_OUTPUT = 5
FAMILIES: dict[str, list[HookPoint]] = {
    "llama": HOOKS,
    "qwen3": HOOKS,
    "gemma3": HOOKS,
    "mixtral": HOOKS,
}


class Served(NamedTuple):
    """Answers of one engine, plain and steered, with what Hugging Face computes of their tokens."""

    hooks: list[HookPoint]
    plain: list[Any]
    plain_references: list[Reference]
    steered: list[Any]
    steered_references: list[Reference]


@pytest.fixture(scope="module")
def references() -> Iterator[ProcessPoolExecutor]:
    with own_process() as executor:
        yield executor


COMPILED = "qwen3, compiled"


@pytest.fixture(scope="module", params=[*FAMILIES, COMPILED])
def served(
    request: pytest.FixtureRequest, references: ProcessPoolExecutor, tmp_path_factory: pytest.TempPathFactory
) -> Served:
    family, _, is_compiled = request.param.partition(", ")
    with pytest.MonkeyPatch.context() as environment:
        if is_compiled:
            environment.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("cache")))
        return serve(family, references, enforce_eager=not is_compiled)


def serve(family: str, references: ProcessPoolExecutor, **settings: Any) -> Served:
    """Start an engine, have `PROMPTS` answered plainly and steered, stop it; ask Hugging Face the same."""
    hooks = FAMILIES[family]
    sites = {hook.value: "all" for hook in hooks}
    llm = start_llm(
        model=tiny_model(family),
        additional_config={
            "headgate": {"capture": {"consumers": [{"name": "memory"}], "sites": sites}, "steering": {"sites": sites}}
        },
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_batched_tokens=32,
        in_process=True,
        **settings,
    )
    try:
        plain = generate(llm, sites, [{}] * len(PROMPTS))
        widths = {site: rows.shape[1] for site, rows in plain[0].capture_results["memory"].payload.rows.items()}
        random = torch.Generator().manual_seed(5)
        vectors = [
            {site: torch.randn(width, generator=random) for site, width in widths.items() if site.hook is hook}
            for hook in (HookPoint.Q_PRE, HookPoint.K_PRE, HookPoint.V)
        ]
        steered = generate(llm, sites, vectors)
    finally:
        stop_llm(llm)
    acting = [Steering()] * len(PROMPTS) + [Steering(prefill=each, decode=each) for each in vectors]
    requests = [
        (prompt, list(output.outputs[0].token_ids), each)
        for prompt, output, each in zip(PROMPTS * 2, [*plain, *steered], acting, strict=True)
    ]
    found = references.submit(inner_rows, tiny_model(family), family, torch.float32, requests).result()
    return Served(hooks, plain, found[: len(PROMPTS)], steered, found[len(PROMPTS) :])


def generate(llm: Any, sites: dict[str, Any], vectors: list[dict[Site, torch.Tensor]]) -> list[Any]:
    from vllm import SamplingParams

    params = []
    for each in vectors:
        made = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=NUM_OUTPUT)
        made.capture = {"memory": {"hooks": sites}}
        field: dict[str, Any] = {}
        for site, vector in each.items():
            field.setdefault(site.hook.value, {})[site.layer] = vector.tolist()
        if field:
            made.steering_vectors = field
        params.append(made)
    return list(llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False))


def check(hooks: list[HookPoint], output: Any, reference: Reference) -> None:
    result = output.capture_results["memory"]
    rows = result.payload.rows

    assert result.status == "ok", result.error
    assert rows.keys() == {Site(layer, hook) for hook in hooks for layer in range(LAYERS)}
    for site, found in rows.items():
        assert relative_error(found, reference.rows[site]) <= 1e-4, site


def test_rows_equal_hugging_faces(served: Served) -> None:
    for output, reference in zip(served.plain, served.plain_references, strict=True):
        check(served.hooks, output, reference)


def test_vectors_act_as_in_hugging_faces_model(served: Served) -> None:
    last = Site(LAYERS - 1, HookPoint.V)
    for output, reference, plain in zip(
        served.steered, served.steered_references, served.plain_references, strict=True
    ):
        check(served.hooks, output, reference)
        assert relative_error(reference.rows[last][-1:], plain.rows[last][-1:]) > 1e-2
