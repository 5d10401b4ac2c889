"""Real chat prompts through SmolLM2-135M-Instruct: every hook point of all 30 layers against Hugging Face.

The engine runs as users run it, in processes of its own, with prefix caching on and prompts cut into chunks.

In bf16 two right implementations differ: over 30 layers of this model, Hugging Face's own bf16 rows have cosines down
to 0.994 with its fp32 rows of the same weights. So bf16 rows are held against fp32 rows: 0.999 on average at every
site, and no row worse than `MIN_ROW_COSINE`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headgate.capture.schema.sites import FINAL_NORM_SITE, INNER_HOOKS, HookPoint, Site
from headgate.consumers.attention import fetch_patterns
from headgate.consumers.reader import open_capture
from tests.engine.hf_reference import HFReference, relative_error, row_cosines
from tests.source_tree import ROOT

CONVERSATIONS = [
    [{"role": "user", "content": "Why is the sky blue?"}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Write one sentence about cats and the sea."},
        {"role": "assistant", "content": "The cat watched the waves as if they owed it a fish."},
        {"role": "user", "content": "Now one about dogs, in Français, s'il te plaît: où sont-ils? 🐕"},
    ],
    [{"role": "user", "content": "2+2="}],
]
NUM_LAYERS, WIDTH = 30, 576
NUM_OUTPUT = 16
EVERY_LAYER = range(NUM_LAYERS)
SOME_LAYERS = (0, 1, 15, 29)
"""Compiled: each site adds to a graph that takes minutes to compile on two cores."""
MAX_ERROR = 1e-4
MIN_COSINE = 0.999
MIN_ROW_COSINE = 0.995


SAE_SITE, SAE_FEATURES, K = Site(15, HookPoint.POST_MLP), 4096, 32
GIVEN = [4095, 7, 1234]


@pytest.fixture(scope="module")
def sae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A top-k SAE of random weights, as SAELens keeps it."""
    folder = tmp_path_factory.mktemp("saes") / "random"
    generator = torch.Generator().manual_seed(0)
    decoder = torch.nn.functional.normalize(torch.randn(SAE_FEATURES, WIDTH, generator=generator), dim=1)
    save_weights(folder, decoder)
    return folder


def save_weights(folder: Path, decoder: torch.Tensor) -> None:
    folder.mkdir()
    weights = {"W_dec": decoder, "W_enc": decoder.T.contiguous()}
    weights |= {"b_enc": torch.linspace(-0.1, 0.1, SAE_FEATURES), "b_dec": torch.linspace(-1, 1, WIDTH)}
    save_file(weights, folder / "sae_weights.safetensors")
    about = {"architecture": "topk", "k": K, "d_in": WIDTH, "d_sae": SAE_FEATURES, "apply_b_dec_to_input": True}
    about |= {"normalize_activations": "none", "metadata": {"hook_name": "blocks.15.hook_resid_post"}}
    (folder / "cfg.json").write_text(json.dumps(about))


def hooks_of(layers: Sequence[int]) -> dict[str, Any]:
    hooks = [hook for hook in HookPoint if hook not in INNER_HOOKS]
    return {hook.value: "all" if hook is HookPoint.FINAL_NORM else list(layers) for hook in hooks}


def engine(
    shared_llm: Callable[..., Any], dtype: str, sae: Path, layers: Sequence[int] = EVERY_LAYER, *, eager: bool
) -> Any:
    features = {"name": "features", "params": {"saes": {"random": str(sae)}, "top": K}}
    files = {"root": str(sae.parent / "files"), "reads": {"consumer": features["name"], "params": features["params"]}}
    stored = {"name": "filesystem", "instance_name": "files", "params": files}
    consumers = [{"name": "memory"}, features, stored, {"name": "lens"}, {"name": "attention"}]
    capture = {"consumers": consumers, "sites": {**hooks_of(layers), "q": [15], "k": [15]}}
    return shared_llm(
        dtype=dtype,
        enforce_eager=eager,
        max_num_batched_tokens=64,
        additional_config={"headgate": {"capture": capture}},
    )


def chat(
    shared_llm: Callable[..., Any], dtype: str, sae: Path, layers: Sequence[int] = EVERY_LAYER, *, eager: bool
) -> list[Any]:
    """Finished requests of `CONVERSATIONS`, with every hook point of `layers` captured, and features of the SAE."""
    from headgate.capture import SamplingParams

    hooks, llm = hooks_of(layers), engine(shared_llm, dtype, sae, layers, eager=eager)
    params = [
        SamplingParams(
            max_tokens=NUM_OUTPUT,
            temperature=0,
            capture={
                "memory": {"hooks": hooks, "positions": "all"},
                "features": wanted,
                "files": {name: value for name, value in wanted.items() if name != "above"},
            },
        )
        for wanted in ({"top": K}, {"features": GIVEN}, {"top": 10, "above": 1.0})
    ]
    return list(llm.chat(CONVERSATIONS, params, use_tqdm=False))


def compare(
    outputs: list[Any], model_dir: Path, dtype: torch.dtype, sae: Path, layers: Sequence[int] = EVERY_LAYER
) -> None:
    hooks = set(HookPoint) - INNER_HOOKS - {HookPoint.FINAL_NORM}
    sites = {Site(layer, hook) for layer in layers for hook in hooks} | {FINAL_NORM_SITE}
    reference = HFReference(model_dir, "llama", torch.float32)
    for served in outputs:
        prompt, output = list(served.prompt_token_ids), list(served.outputs[0].token_ids)
        expected = reference.run(prompt, output)
        result = served.capture_results["memory"]
        assert result.status == "ok", result.error
        captured = result.payload
        assert set(captured.sites) == sites
        np.testing.assert_array_equal(captured.positions, np.arange(len(prompt) + len(output) - 1))
        np.testing.assert_array_equal(captured.token_ids, [*prompt, *output[:-1]])
        for site in captured.sites:
            assert captured[site].dtype == dtype
            check_values(captured[site], expected.rows[site], site)
        if dtype == torch.float32:
            check_features(served, expected.rows[SAE_SITE], sae)
            assert expected.next_tokens[len(prompt) - 1 :].tolist() == output


def check_features(served: Any, rows: torch.Tensor, sae: Path) -> None:
    """Features are those that SAELens' formulas find in Hugging Face's rows: ids but for ties, activations to 1e-4."""
    weights = load_file(sae / "sae_weights.safetensors")
    activations = torch.relu((rows.float() - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"])
    least = activations.topk(K, dim=1).values[:, -1:]
    activations = torch.where(activations >= least, activations, 0)
    result = served.capture_results["features"]
    assert result.status == "ok", result.error
    assert result.payload["positions"] == list(range(len(rows)))
    asked = len(result.payload["ids"][0])
    stored = served.capture_results["files"].payload["paths"]
    check_stored(open_capture(*stored).outputs(SAE_SITE), result.payload)
    for ids, values, row in zip(result.payload["ids"], result.payload["values"], activations, strict=True):
        tolerance = MAX_ERROR * float(row.max())
        found = torch.tensor(values)
        torch.testing.assert_close(found, row[ids], rtol=0, atol=tolerance)
        if ids != GIVEN:
            assert values == sorted(values, reverse=True)
            torch.testing.assert_close(found, row.topk(len(ids)).values, rtol=0, atol=tolerance)
    assert asked in (K, len(GIVEN), 10)


def check_stored(found: dict[str, Any], payload: dict[str, Any]) -> None:
    """A file has the numbers of the answer, bit for bit."""
    assert len(found["values"]) == len(payload["positions"])
    for row, (ids, values) in enumerate(zip(payload["ids"], payload["values"], strict=True)):
        assert found["values"][row, : len(values)].tolist() == values
        assert ids == (found["ids"][row, : len(ids)].tolist() if "ids" in found else GIVEN)


def check_values(got: torch.Tensor, expected: torch.Tensor, site: Site) -> None:
    if got.dtype == torch.float32:
        error = relative_error(got, expected)
        assert error <= MAX_ERROR, f"{site.name}: relative error {error:.2g}"
    else:
        cosines = row_cosines(got, expected)
        assert cosines.mean() >= MIN_COSINE, f"{site.name}: mean cosine {cosines.mean():.5f}"
        assert cosines.min() >= MIN_ROW_COSINE, f"{site.name}: smallest cosine {cosines.min():.5f}"


def test_chat_rows_equal_hugging_face(shared_llm: Callable[..., Any], model_dir: Path, sae: Path) -> None:
    outputs = chat(shared_llm, "float32", sae, eager=True)

    assert sum(len(output.prompt_token_ids) for output in outputs) > 128, "prompts must need several steps"
    compare(outputs, model_dir, torch.float32, sae)


def test_the_lens_after_the_last_layer_has_the_models_own_tokens_and_neighbours_keep_theirs(
    shared_llm: Callable[..., Any], sae: Path
) -> None:
    from headgate.capture import SamplingParams

    llm = engine(shared_llm, "float32", sae, eager=True)
    settings: dict[str, Any] = {"max_tokens": NUM_OUTPUT, "temperature": 0, "logprobs": 10}
    wanted = {"lens": {"layers": [3, 29], "top": 10, "tokens": [" the", 260]}}
    plain, lens = SamplingParams(**settings), SamplingParams(**settings, capture=wanted)

    alone = llm.chat(CONVERSATIONS, plain, use_tqdm=False)
    mixed = llm.chat([*CONVERSATIONS, *CONVERSATIONS], [plain] * 3 + [lens] * 3, use_tqdm=False)

    tokens = [list(output.outputs[0].token_ids) for output in alone]
    assert [list(output.outputs[0].token_ids) for output in mixed] == tokens * 2
    for output in mixed[3:]:
        result = output.capture_results["lens"]
        assert result.status == "ok", result.error
        read = result.payload["layers"]["29"]
        first = len(output.prompt_token_ids) - 1
        assert result.payload["positions"] == list(range(first + len(output.outputs[0].token_ids)))
        for step, own in enumerate(output.outputs[0].logprobs):
            ids = read["ids"][first + step]
            best = sorted(own, key=lambda token: -own[token].logprob)[:10]
            assert ids == best, "the model's own ten strongest tokens"
            np.testing.assert_allclose(read["logprobs"][first + step], [own[one].logprob for one in best], atol=1e-4)
            assert read["tokens"][first + step] == [llm.get_tokenizer().decode([token]) for token in ids]
        assert all(one == other for one, other in read["token_ranks"]), "' the' is token 260"


def test_rows_a_pattern_and_lenses_are_those_of_transformer_lens(shared_llm: Callable[..., Any], sae: Path) -> None:
    """`tests/producers/record_transformer_lens.py` recorded them; ``make test-producers`` compares the record."""
    from headgate.capture import SamplingParams

    recorded = load_file(ROOT / "tests" / "producers" / "recorded" / "transformer_lens.safetensors")
    tokens, prompt = recorded["tokens"].tolist(), {"positions": "all_prompt"}
    wanted = {
        "memory": {"hooks": {"post_mlp": [4, 28]}, **prompt},
        "attention": {"layers": [15], "queries": "all_prompt"},
        "lens": {"layers": [4, 20, 29], "top": 10, **prompt},
    }
    params = SamplingParams(max_tokens=1, temperature=0, capture=wanted)

    (output,) = engine(shared_llm, "float32", sae, eager=True).generate(
        [{"prompt_token_ids": tokens}], params, use_tqdm=False
    )

    results = output.capture_results
    assert {name: result.status for name, result in results.items()} == dict.fromkeys(wanted, "ok"), results
    for site, rows in results["memory"].payload.rows.items():
        assert relative_error(rows, recorded[f"stream.{site.layer}"]) <= MAX_ERROR
    patterns = fetch_patterns(results["attention"].payload)
    assert patterns.queries.tolist() == list(range(len(tokens)))
    expected = recorded["attention.15"].transpose(0, 1)
    torch.testing.assert_close(patterns["15.attention"], expected, rtol=0, atol=MAX_ERROR)
    for layer, read in results["lens"].payload["layers"].items():
        assert read["ids"] == recorded[f"lens.{layer}.ids"].tolist()
        np.testing.assert_allclose(read["logprobs"], recorded[f"lens.{layer}.logprobs"], rtol=0, atol=MAX_ERROR)


@pytest.mark.extended  # minutes of compiling; `make demo` compares compiled rows too, and so do the tiny models
def test_compiled_chat_rows_equal_hugging_face(
    shared_llm: Callable[..., Any], model_dir: Path, sae: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))  # compiled here and now

    outputs = chat(shared_llm, "float32", sae, SOME_LAYERS, eager=False)

    compare(outputs, model_dir, torch.float32, sae, SOME_LAYERS)


@pytest.mark.extended  # processors without bf16 take a minute of a core for it
def test_chat_rows_point_where_hugging_face_does_in_bf16(
    shared_llm: Callable[..., Any], model_dir: Path, sae: Path
) -> None:
    compare(chat(shared_llm, "bfloat16", sae, eager=True), model_dir, torch.bfloat16, sae)
