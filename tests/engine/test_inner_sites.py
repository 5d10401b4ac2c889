"""Rows within attention and the MLP are those of Hugging Face's functions; vectors, operations and gates act there."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load

from headgate.capture.schema.sites import MIXER_HOOKS, READ_ONLY, HookPoint, Site
from headgate.consumers.inline import fetch_rows
from headgate.consumers.reader import open_captures
from headgate.steering import ops
from tests.conftest import start_llm, stop_llm
from tests.engine.hf_reference import Reference, Steering, own_process, relative_error
from tests.engine.inner_reference import inner_rows
from tests.engine.steering_cases import Acting, Case, every_method
from tests.engine.tiny_models import LAYERS, MIXERS, tiny_model

HEADS = [HookPoint.Q_PRE, HookPoint.K_PRE, HookPoint.Q, HookPoint.K, HookPoint.V]
ROUTED = [HookPoint.ROUTER_LOGITS, HookPoint.EXPERTS, HookPoint.EXPERT_WEIGHTS]
PROMPTS = [[3 + (7 * i) % 500 for i in range(40)], [9], [3 + (11 * i) % 500 for i in range(17)]]
"""The first takes two steps of at most 32 tokens."""
NUM_OUTPUT = 5
FAMILIES: dict[str, list[HookPoint]] = {
    "qwen3": [*HEADS, HookPoint.MLP_ACT],
    "gemma3": [*HEADS, HookPoint.MLP_ACT, HookPoint.ATTN_OUT_PRE, HookPoint.MLP_OUT_PRE],
    "mixtral": [*HEADS, *ROUTED],
    "qwen2_moe": [*HEADS, *ROUTED, HookPoint.MLP_ACT],
    "deepseek_v3": [HookPoint.Q, HookPoint.KV_LATENT, *ROUTED, HookPoint.MLP_ACT],
    "lfm2": [*MIXER_HOOKS, *HEADS, HookPoint.MLP_ACT],
    "granitemoehybrid": [*MIXER_HOOKS, HookPoint.Q, HookPoint.K, HookPoint.V, HookPoint.MLP_ACT],
}
ACTING = {
    "gemma3": (HookPoint.K_PRE, HookPoint.ATTN_OUT_PRE, HookPoint.MLP_OUT_PRE),
    "mixtral": (HookPoint.Q_PRE, HookPoint.V, HookPoint.ROUTER_LOGITS),
    "qwen2_moe": (HookPoint.Q, HookPoint.ROUTER_LOGITS, HookPoint.MLP_ACT),
    "deepseek_v3": (HookPoint.KV_LATENT, HookPoint.ROUTER_LOGITS, HookPoint.MLP_ACT),
    **dict.fromkeys(MIXERS, (*MIXER_HOOKS, HookPoint.V)),
}
LAYOUTS = ("request", "shards", "raw")
ROUTING: list[dict[str, Any]] = [
    {"steering_ops": [ops.ban_experts("2.router_logits", [0])]},
    {"steering_ops": [ops.force_experts("2.router_logits", [3])]},
    {"steering_ops": [ops.ban_experts("2.router_logits", [1]), ops.force_experts("2.router_logits", [0])]},
]
"""By prompt: what becomes of some of the four experts of the last layer."""
FIRST_WITH_EXPERTS = {"deepseek_v3": 1}
"""The first layer whose MLP is of experts."""


def layers_of(family: str, hook: HookPoint) -> list[int]:
    if family in MIXERS and hook in (*MIXER_HOOKS, *HEADS):
        return [1] if hook in HEADS else [0, 2]
    return list(range(FIRST_WITH_EXPERTS.get(family, 0) if hook in ROUTED else 0, LAYERS))


class Served(NamedTuple):
    """Answers of one engine, plain, steered and with operations, with what Hugging Face computes of their tokens."""

    family: str
    hooks: list[HookPoint]
    folder: Path
    plain: list[Any]
    plain_references: list[Reference]
    steered: list[Any]
    steered_references: list[Reference]
    operated: list[Any]
    operated_references: list[Reference]
    gated: list[Any]
    gate: dict[str, Any]
    routed: list[Any]


@pytest.fixture(scope="module")
def references() -> Iterator[Executor]:
    with own_process() as executor:
        yield executor


COMPILED = "qwen2_moe, compiled"


EXTENDED = ("qwen3", "granitemoehybrid", COMPILED)
"""Left out by default: others have each of their hook points."""


@pytest.fixture(
    scope="module",
    params=[*(family for family in FAMILIES if family not in EXTENDED)]
    + [pytest.param(name, marks=pytest.mark.extended) for name in EXTENDED],
)
def served(request: pytest.FixtureRequest, references: Executor, tmp_path_factory: pytest.TempPathFactory) -> Served:
    family, _, is_compiled = request.param.partition(", ")
    with pytest.MonkeyPatch.context() as environment:
        if is_compiled:
            environment.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("cache")))
        return serve(family, references, tmp_path_factory.mktemp("rows"), enforce_eager=not is_compiled)


def serve(family: str, references: Executor, folder: Path, **settings: Any) -> Served:
    """Start an engine, have `PROMPTS` answered plainly and steered, stop it; ask Hugging Face the same."""
    hooks = FAMILIES[family]
    sites = {hook.value: layers_of(family, hook) for hook in hooks}
    steered = {hook.value: layers_of(family, hook) for hook in hooks if hook not in READ_ONLY}
    capture = {"consumers": consumers_in(folder), "sites": sites}
    llm = start_llm(
        model=tiny_model(family),
        additional_config={"headgate": {"capture": capture, "steering": {"op_sites": steered}}},
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_batched_tokens=32,
        in_process=True,
        # vLLM's rotary kernel for CPUs rotates some queries with three dimensions wrongly.
        compilation_config={"custom_ops": ["all", "-rotary_embedding"]} if family in ("deepseek_v3", "lfm2") else {},
        **settings,
    )
    try:
        plain = generate(llm, sites, [{}] * len(PROMPTS))
        widths = {site: rows.shape[1] for site, rows in plain[0].capture_results["memory"].payload.rows.items()}
        random = torch.Generator().manual_seed(5)
        vectors = [
            {site: torch.randn(width, generator=random) for site, width in widths.items() if site.hook is hook}
            for hook in ACTING.get(family, (HookPoint.Q_PRE, HookPoint.K_PRE, HookPoint.MLP_ACT))
        ]
        steered = generate(llm, sites, vectors)
        operations = [operations_at({site: len(vector) for site, vector in each.items()}) for each in vectors]
        operated = generate(llm, sites, [{}] * len(PROMPTS), operations)
        at = Site(LAYERS - 1, [hook for hook in hooks if hook not in READ_ONLY][-1])
        gate = gate_at(at, torch.randn(widths[at], generator=random).tolist())
        gated = generate(llm, sites, [{}] * len(PROMPTS), gate=gate)
        routed = generate(llm, sites, [{}] * len(PROMPTS), fields=ROUTING) if "experts" in sites else []
    finally:
        stop_llm(llm)
    acting = [Steering()] * len(PROMPTS) + [Steering(prefill=each, decode=each) for each in vectors]
    acting += [Steering(operations=each) for each in operations]
    found = references_of(family, references, [*plain, *steered, *operated], acting)
    parts = [found[start : start + len(PROMPTS)] for start in range(0, len(found), len(PROMPTS))]
    return Served(family, hooks, folder, plain, parts[0], steered, parts[1], operated, parts[2], gated, gate, routed)


def consumers_in(folder: Path) -> list[Any]:
    """Consumers of tensors and answers, and of files of each layout."""
    files = [
        {"name": "filesystem", "instance_name": name, "params": {"root": str(folder / name), "layout": name}}
        for name in LAYOUTS
    ]
    return [{"name": "memory"}, {"name": "inline"}, *files]


def references_of(
    family: str, references: Executor, outputs: Sequence[Any], acting: Sequence[Steering]
) -> list[Reference]:
    """What Hugging Face computes of the tokens of answers to `PROMPTS`, again and again."""
    requests = [
        (list(output.prompt_token_ids), list(output.outputs[0].token_ids), each)
        for output, each in zip(outputs, acting, strict=True)
    ]
    return references.submit(inner_rows, tiny_model(family), family, torch.float32, requests).result()


def operations_at(widths: dict[Site, int]) -> list[Acting]:
    """Three operations at each site, in turn of every method."""
    [width] = set(widths.values())
    documents = islice(every_method(width), 3 * (width % 3), 3 * (width % 3) + 3)
    return [("both", site, document) for document in documents for site in widths]


def gate_at(site: Site, weight: list[float]) -> dict[str, Any]:
    """A gate of two readings of rows of a site, which adds a vector there on every row."""
    scores: list[dict[str, Any]] = [
        {"cosine": weight, "at": site.name, "above": -2.0},
        {"probe": {"at": site.name, "weight": weight, "bias": 0.25}, "below": 1e9},
    ]
    vectors = {site.hook.value: {str(site.layer): weight}}
    return {"name": "wide", "when": {"all": scores}, "then": {"vectors": vectors}}


def generate(
    llm: Any,
    sites: dict[str, Any],
    vectors: list[dict[Site, torch.Tensor]],
    operations: Sequence[Sequence[Acting]] = ((),) * len(PROMPTS),
    gate: dict[str, Any] | None = None,
    fields: Sequence[dict[str, Any]] = ({},) * len(PROMPTS),
) -> list[Any]:
    from vllm import SamplingParams

    params = []
    for each, acting, others in zip(vectors, operations, fields, strict=True):
        made = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=NUM_OUTPUT)
        made.capture = {"memory": {"hooks": sites}}
        if "experts" in sites:
            made.capture |= {name: {"hooks": sites} for name in LAYOUTS}
            made.capture["inline"] = {"hooks": {"experts": "all"}, "layout": "routed_experts"}
        field: dict[str, Any] = {}
        for site, vector in each.items():
            field.setdefault(site.hook.value, {})[site.layer] = vector.tolist()
        found = Case("", operations=tuple(acting)).fields() | others | ({"steering_vectors": field} if field else {})
        if gate is not None:
            found |= {"steering_gates": [gate], "return_steering_trace": True}
        for name, value in found.items():
            setattr(made, name, value)
        params.append(made)
    return list(llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False))


CHOICES = (HookPoint.EXPERTS, HookPoint.EXPERT_WEIGHTS)
"""Compared by expert: which of two is the first of equal weights may differ."""


def check(served: Served, output: Any, reference: Reference) -> None:
    result = output.capture_results["memory"]
    rows = result.payload.rows

    assert result.status == "ok", result.error
    assert rows.keys() == {Site(layer, hook) for hook in served.hooks for layer in layers_of(served.family, hook)}
    routed = [site for site in rows if site.hook is HookPoint.EXPERTS]
    for site in rows.keys() - {Site(site.layer, hook) for site in routed for hook in CHOICES}:
        assert relative_error(rows[site], reference.rows[site]) <= 1e-4, site
    for site in routed:
        weights = Site(site.layer, HookPoint.EXPERT_WEIGHTS)
        assert (rows[site].dtype, rows[weights].dtype) == (torch.int16, torch.float32)
        chosen = [by_expert(each[site], each[weights]) for each in (rows, reference.rows)]
        assert relative_error(*chosen) <= 1e-4, site


def by_expert(chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``[rows, 4]``: the weight of each expert, 0 of those that were not chosen; in whatever order they were."""
    return torch.zeros(len(chosen), 4).scatter_(1, chosen.long(), weights.float())


def test_rows_equal_hugging_faces(served: Served) -> None:
    for output, reference in zip(served.plain, served.plain_references, strict=True):
        check(served, output, reference)


def test_vectors_act_as_in_hugging_faces_model(served: Served) -> None:
    last = Site(LAYERS - 1, served.hooks[0])
    for output, reference, plain in zip(
        served.steered, served.steered_references, served.plain_references, strict=True
    ):
        check(served, output, reference)
        assert relative_error(reference.rows[last][-1:], plain.rows[last][-1:]) > 1e-3


def test_operations_act_as_in_hugging_faces_model(served: Served) -> None:
    for output, reference, plain in zip(
        served.operated, served.operated_references, served.plain_references, strict=True
    ):
        check(served, output, reference)
        assert relative_error(reference.logits, plain.logits) > 1e-4


def test_gates_read_rows_of_every_width(served: Served) -> None:
    first, second = served.gate["when"]["all"]
    site, weight = Site.parse(first["at"]), torch.tensor(first["cosine"]).double()
    for output in served.gated:
        rows = output.capture_results["memory"].payload.rows[site].double()
        trace = output.outputs[0].steering_trace
        cosine, probe = (torch.tensor(scores).double() for scores in trace["scores"].values())

        assert relative_error(cosine, rows @ weight / (rows.norm(dim=1) * weight.norm())) <= 1e-4
        assert relative_error(probe, rows @ weight + second["probe"]["bias"]) <= 1e-4
        assert all(trace["gates"]["wide"]["applied"])


def test_experts_are_banned_and_forced_by_their_numbers(served: Served) -> None:
    chosen = [output.capture_results["memory"].payload.rows[Site(2, HookPoint.EXPERTS)] for output in served.routed]
    if not chosen:
        return
    banned, forced, both = chosen

    assert not (banned == 0).any()
    assert (forced == 3).any(dim=1).all()
    assert not (both == 1).any()
    assert (both == 0).any(dim=1).all()


def test_the_experts_of_all_layers_come_as_one_tensor(served: Served) -> None:
    if HookPoint.EXPERTS not in served.hooks:
        return
    for output in served.plain:
        payload, rows = output.capture_results["inline"].payload, output.capture_results["memory"].payload.rows
        [found] = [found for name, found in load(base64.b64decode(payload["data"])).items() if "experts" in name]
        layers = layers_of(served.family, HookPoint.EXPERTS)
        expected = torch.stack([rows[Site(layer, HookPoint.EXPERTS)] for layer in layers], dim=1)

        assert found.dtype == torch.int16
        assert torch.equal(found, expected)
        assert torch.equal(fetch_rows(payload)[f"{layers[-1]}.experts"], expected[:, -1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_hold_numbers_of_experts_as_integers(served: Served, layout: str) -> None:
    if HookPoint.EXPERTS not in served.hooks:
        return
    captures = {each.metadata["client_request_id"]: each for each in open_captures(served.folder / layout)}
    for output in served.plain:
        for site, expected in output.capture_results["memory"].payload.rows.items():
            found = captures[output.request_id].tensor(site.name)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected), site
