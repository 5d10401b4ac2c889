"""Sites whose rows are not as wide as the stream, on one rank and with their columns spread over two."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from headgate.capture.schema.sites import HookPoint, Site
from headgate.consumers.inline import InlineRows
from headgate.consumers.moments import open_moments
from headgate.consumers.reader import open_captures
from headgate.steering import ops
from tests.conftest import start_llm, stop_llm
from tests.engine.hf_reference import Reference, Steering, own_process, relative_error
from tests.engine.inner_reference import inner_rows
from tests.engine.tiny_models import HIDDEN, LAYERS, tiny_model

FAMILY = "qwen3_one_kv"
WIDTHS = {HookPoint.Q: 128, HookPoint.K: 32, HookPoint.V: 32, HookPoint.HOOK_Z: 128, HookPoint.POST_MLP: HIDDEN}
WIDTHS |= {HookPoint.MLP_ACT: 128}
"""Its four heads of 32 have one of keys and values; two ranks hold that one each. The stream has 64."""
SITES: dict[str, Any] = dict.fromkeys((hook.value for hook in WIDTHS), "all")
PROMPTS = [[3 + (7 * i) % 500 for i in range(40)], [9], [3 + (11 * i) % 500 for i in range(17)]]
NUM_OUTPUT = 5
RANDOM = torch.Generator().manual_seed(3)
VECTORS = {
    Site(layer, hook): torch.randn(width, generator=RANDOM) for layer in range(LAYERS) for hook, width in WIDTHS.items()
}
HEAD = 32


def limited(columns: tuple[int, int], document: dict[str, Any]) -> dict[str, Any]:
    """An operation on some columns of `hook_z` as the reference knows it: on whole rows, zero elsewhere."""
    mask = np.zeros(WIDTHS[HookPoint.HOOK_Z], np.float32)
    mask[slice(*columns)] = 1
    vector = np.zeros_like(mask)
    vector[slice(*columns)] = document["vector"]
    return {**document, "vector": vector} | ({"mask": mask} if document["method"] == "replace" else {})


MEAN, DIRECTION = (torch.randn(HEAD, generator=RANDOM).numpy() for _ in range(2))
NEURON = np.eye(WIDTHS[HookPoint.MLP_ACT], dtype=np.float32)[100]
ACROSS, OTHER = (torch.randn(WIDTHS[HookPoint.HOOK_Z], generator=RANDOM).numpy() for _ in range(2))
OPERATIONS: list[list[tuple[str, dict[str, Any], dict[str, Any]]]] = [
    [
        (
            "1.hook_z",
            ops.ablate_heads("1.hook_z", [1]),
            limited((32, 64), {"method": "replace", "vector": 0, "alpha": 1.0}),
        )
    ],
    [
        (
            "1.hook_z",
            ops.ablate_heads("1.hook_z", [3], mean=MEAN.tolist(), alpha=0.75),
            limited((96, 128), {"method": "replace", "vector": MEAN, "alpha": 0.75}),
        ),
        (
            "1.k",
            ops.orthogonal(DIRECTION.tolist(), "1.k", 1.7),
            {"method": "orthogonal", "vector": DIRECTION, "scale": 1.7},
        ),
        (
            "2.q",
            ops.ablate(ACROSS.tolist(), "2.q"),
            {"method": "ablate", "vector": ACROSS, "scale": 1.0},
        ),
        (
            "2.k",
            ops.additive(DIRECTION.tolist(), "2.k", preserve_norm=True),
            {"method": "additive", "vector": DIRECTION, "scale": 1.0, "preserve_norm": True},
        ),
    ],
    [
        (
            "1.hook_z",
            ops.within(ops.clamp(DIRECTION.tolist(), "1.hook_z", max=-0.1), heads=[2]),
            limited((64, 96), {"method": "clamp", "vector": DIRECTION, "min": None, "max": -0.1, "strength": 1.0}),
        ),
        (
            "1.mlp_act",
            ops.set_projection(NEURON.tolist(), "1.mlp_act", 3.0),
            {"method": "set", "vector": NEURON, "value": 3.0, "strength": 1.0},
        ),
        (
            "2.hook_z",
            ops.swap(ACROSS.tolist(), OTHER.tolist(), "2.hook_z"),
            {"method": "swap", "vector": ACROSS, "target": OTHER},
        ),
        (
            "2.mlp_act",
            ops.norm_scaled_add(OTHER.tolist(), "2.mlp_act", 0.4, max_ratio=0.25),
            {"method": "norm_scaled_add", "vector": OTHER, "scale": 0.4, "max_ratio": 0.25},
        ),
    ],
]
"""By prompt: site, operation of the request, and what the reference does. In layer 1 each direction lies within one
head; in layer 2 the ranks gather their rows, for directions across heads and norms."""
ACTING = [VECTORS, VECTORS, {site: vector for site, vector in VECTORS.items() if site.hook is HookPoint.POST_MLP}]
CONSUMERS = ("memory", "inline", "request", "shards", "raw", "moments")


class Served(NamedTuple):
    """One engine's answers to `PROMPTS`, and what Hugging Face computes of their tokens.

    Attributes:
        outputs: With the rows of every site, from every consumer.
        narrow: With the rows of the stream alone, of two heads alone, and of the keys alone; in one batch.
        folder: Of the files.
        references: Of `outputs`.
        steered: With the rows of every site, each with `VECTORS`; those of the stream alone for the last prompt.
        steered_references: Of `steered`.
        operated: With the rows of every site, each with its `OPERATIONS`.
        operated_references: Of `operated`.
        cached: The same requests twice, without rows.
    """

    outputs: list[Any]
    narrow: list[Any]
    folder: Path
    references: list[Reference]
    steered: list[Any]
    steered_references: list[Reference]
    operated: list[Any]
    operated_references: list[Reference]
    cached: list[list[Any]]


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "two-ranks"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("widths")
    files = [
        {"name": "filesystem", "instance_name": name, "params": {"root": str(folder / name), "layout": name}}
        for name in ("request", "shards", "raw")
    ]
    moments = {"name": "moments", "params": {"root": str(folder / "moments"), "flush_s": 0}}
    capture = {"consumers": [{"name": "memory"}, {"name": "inline"}, *files, moments], "sites": SITES}
    config = {"capture": capture, "steering": {"sites": SITES, "op_sites": {hook: [1] for hook in SITES}}}
    config["steering"]["gather_sites"] = {hook: [2] for hook in ("q", "k", "hook_z", "mlp_act")}
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"} if request.param == 2 else {}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # two workers on a machine with one NUMA node
        llm = start_llm(
            model=tiny_model(FAMILY),
            additional_config={"headgate": config},
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=128,
            max_num_batched_tokens=32,
            block_size=32,
            **ranks,
        )
        try:
            outputs, narrow, steered, operated, cached = answers(llm)
        finally:
            stop_llm(llm)
    references = references_of(outputs, [Steering()] * len(PROMPTS))
    acting = references_of(steered, [Steering(prefill=vectors, decode=vectors) for vectors in ACTING])
    operations = [[("both", Site.parse(at), document) for at, _, document in each] for each in OPERATIONS]
    operating = references_of(operated, [Steering(operations=each) for each in operations])
    return Served(outputs, narrow, folder, references, steered, acting, operated, operating, cached)


def answers(llm: Any) -> tuple[list[Any], list[Any], list[Any], list[Any], list[list[Any]]]:
    """Return what `Served` has of an engine."""
    from vllm import SamplingParams

    def generate(*captures: dict[str, Any] | None, **fields: Sequence[Any]) -> list[Any]:
        params = []
        for index, capture in enumerate(captures):
            made = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=NUM_OUTPUT)
            for name, value in {"capture": capture, **{name: found[index] for name, found in fields.items()}}.items():
                setattr(made, name, value)
            params.append(made)
        found: list[Any] = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
        return found

    everything = {name: {"hooks": SITES} for name in CONSUMERS}
    chosen: list[Any] = [{"post_mlp": "all"}, [{"hook": "hook_z", "layers": "all", "heads": [1, 3]}], {"k": "all"}]
    alone = [{name: {"hooks": hooks} for name in CONSUMERS[:2]} for hooks in chosen]
    kept = [{"memory": {"hooks": SITES}}] * len(PROMPTS)
    fields = [field_of(vectors) for vectors in ACTING]
    acting = [[operation for _, operation, _ in each] for each in OPERATIONS]
    whole = generate(*[everything] * len(PROMPTS))
    cached = [generate(*[None] * len(PROMPTS), steering_ops=acting) for _ in range(2)]
    return (
        whole,
        generate(*alone),
        generate(*kept, steering_vectors=fields),
        generate(*kept, steering_ops=acting),
        cached,
    )


def references_of(outputs: list[Any], steering: Sequence[Steering]) -> list[Reference]:
    requests = [
        (prompt, list(output.outputs[0].token_ids), each)
        for prompt, output, each in zip(PROMPTS, outputs, steering, strict=True)
    ]
    with own_process() as executor:
        return executor.submit(inner_rows, tiny_model(FAMILY), FAMILY, torch.float32, requests).result()


def field_of(vectors: dict[Site, torch.Tensor]) -> dict[str, Any]:
    """Vectors as a request's field."""
    found: dict[str, Any] = {}
    for site, vector in vectors.items():
        found.setdefault(site.hook.value, {})[site.layer] = vector.tolist()
    return found


def sites_of(*hooks: HookPoint) -> set[Site]:
    return {Site(layer, hook) for hook in hooks for layer in range(LAYERS)}


def test_rows_of_both_widths_equal_hugging_faces_in_one_request(served: Served) -> None:
    for output, reference in zip(served.outputs, served.references, strict=True):
        result = output.capture_results["memory"]
        rows = result.payload.rows

        assert result.status == "ok", result.error
        assert rows.keys() == sites_of(*WIDTHS)
        assert {site.hook: found.shape[1] for site, found in rows.items()} == WIDTHS
        assert result.num_bytes == result.num_rows * LAYERS * 4 * sum(WIDTHS.values())
        for site, found in rows.items():
            assert relative_error(found, reference.rows[site]) <= 1e-4, site


def test_vectors_of_both_widths_act_as_in_hugging_faces_model(served: Served) -> None:
    for output, reference, plain in zip(served.steered, served.steered_references, served.references, strict=True):
        rows = output.capture_results["memory"].payload.rows

        for site, found in rows.items():
            assert relative_error(found, reference.rows[site]) <= 1e-4, site
        last = Site(LAYERS - 1, HookPoint.POST_MLP)
        assert relative_error(rows[last][:1], plain.rows[last][:1]) > 1e-2


def test_operations_act_on_heads_keys_and_neurons_as_in_hugging_faces_model(served: Served) -> None:
    for output, reference, plain in zip(served.operated, served.operated_references, served.references, strict=True):
        rows = output.capture_results["memory"].payload.rows

        for site, found in rows.items():
            assert relative_error(found, reference.rows[site]) <= 1e-4, site
        last = Site(LAYERS - 1, HookPoint.POST_MLP)
        assert relative_error(rows[last][:1], plain.rows[last][:1]) > 1e-3


def test_a_prefix_without_the_operation_is_not_its_own(served: Served) -> None:
    first, again = served.cached

    assert [output.num_cached_tokens for output in first] == [0, 0, 0]
    assert [output.num_cached_tokens for output in again] == [32, 0, 0]
    for outputs in served.cached:
        for output, reference in zip(outputs, served.operated_references, strict=True):
            tokens = list(output.outputs[0].token_ids)
            assert tokens == reference.next_tokens[len(output.prompt_token_ids) - 1 :].tolist()


def test_requests_of_one_step_may_want_rows_of_different_widths(served: Served) -> None:
    for output, whole in zip(served.narrow, served.outputs, strict=True):
        rows, expected = (found.capture_results["memory"].payload.rows for found in (output, whole))

        assert len(rows) == LAYERS
        inline = InlineRows(base64.b64decode(output.capture_results["inline"].payload["data"]))
        for site, found in rows.items():
            columns = [*range(32, 64), *range(96, 128)] if site.hook is HookPoint.HOOK_Z else slice(None)
            assert relative_error(found, expected[site][:, columns]) <= 1e-4, site
            assert torch.equal(found, inline[site])


@pytest.mark.parametrize("layout", ["request", "shards", "raw"])
def test_files_of_every_layout_hold_the_rows_of_both_widths(served: Served, layout: str) -> None:
    captures = {each.metadata["client_request_id"]: each for each in open_captures(served.folder / layout)}

    for output in served.outputs:
        capture, rows = captures[output.request_id], output.capture_results["memory"].payload.rows
        assert capture.metadata["format_version"] == 2
        assert {site.name for site in capture.sites} == {site.name for site in rows}
        for site, expected in rows.items():
            assert torch.equal(capture.tensor(site.name), expected), site


def test_answers_hold_the_rows_of_both_widths(served: Served) -> None:
    for output in served.outputs:
        found = InlineRows(base64.b64decode(output.capture_results["inline"].payload["data"]))
        for site, expected in output.capture_results["memory"].payload.rows.items():
            assert torch.equal(found[site], expected), site


def test_moments_are_of_each_sites_own_width(served: Served) -> None:
    rows = [output.capture_results["memory"].payload.rows for output in served.outputs]
    moments = open_moments(served.folder / "moments")

    for site in sites_of(*WIDTHS):
        expected = torch.cat([each[site] for each in rows]).double().mean(dim=0)
        found = torch.from_numpy(moments[site.name].mean)
        assert relative_error(found, expected) <= 1e-5, site


def test_a_shard_says_which_sites_have_another_width(served: Served) -> None:
    shard, *_ = (served.folder / "shards").rglob("shard.json")

    assert json.loads(shard.read_text())["shapes"]["0.hook_z"] == [128, "float32"]
