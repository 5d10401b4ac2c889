"""New weights in a running engine, as RL trainers load them: what is captured and steered afterwards is of those.

The consumers that reduce rows to numbers, `reward`, `moments` and `probe`, are compared with rows of the same requests
here, too, `probe` with Hugging Face's rows, and `stream` sends the rows to a reader.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headgate.capture.probe import Probe, save
from headgate.capture.schema.sites import HookPoint, Site
from headgate.consumers.moments import open_moments
from headgate.consumers.stream import StreamReader
from tests.conftest import start_llm, stop_llm
from tests.engine.hf_reference import HFReference, relative_error
from tests.engine.lora_adapter import merge, write_adapter
from tests.engine.steering_cases import MAX_ERROR, Tiers, check_logprobs, sites_of, vectors
from tests.engine.tiny_models import HIDDEN, tiny_model

HOOKS = [HookPoint.PRE_ATTN, HookPoint.POST_ATTN, HookPoint.POST_MLP, HookPoint.ATTN_OUT, HookPoint.MLP_OUT]
SITES = {hook.value: "all" for hook in HOOKS} | {"final_norm": "all"}
ONE = Tiers(base=vectors(sites_of(HookPoint.PRE_ATTN, HookPoint.POST_MLP), 1))
PROMPT = [3 + (7 * i) % 500 for i in range(69)]
CACHED = 64
REWARDED = "1.post_mlp"
ALONG = np.random.default_rng(5).normal(size=HIDDEN)
MOODS = np.random.default_rng(6).normal(size=(3, HIDDEN))
PROBES_BY_NAME = {
    "anger": Probe(site=Site.parse("0.attn_out"), weight=[ALONG], bias=[0.5], threshold=0.1),  # type: ignore[arg-type]
    "moods": Probe(site=Site.parse("final_norm"), kind="cosine", weight=MOODS, classes=("a", "b", "c")),  # type: ignore[arg-type]
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with other weights in every linear module."""
    folder, model = tmp_path_factory.mktemp("trained"), tiny_model("llama")
    return merge(model, write_adapter(model, folder / "change"), folder / "model")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `moments` writes."""
    return tmp_path_factory.mktemp("moments")


def write_probes(folder: Path) -> dict[str, str]:
    for name, probe in PROBES_BY_NAME.items():
        save(folder / f"{name}.safetensors", probe)
    return {name: str(folder / f"{name}.safetensors") for name in PROBES_BY_NAME}


@pytest.fixture(scope="module", params=["eager", pytest.param("compiled", marks=pytest.mark.extended)])
def llm(
    request: pytest.FixtureRequest, trained: Path, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    np.save(root / "along.npy", ALONG)
    reward = {"layer": 1, "direction": str(root / "along.npy"), "positions": {"start": 1}, "transform": "tanh"}
    consumers = [
        {"name": "memory"},
        {"name": "reward", "params": {**reward, "scale": 2.0}},
        {"name": "probe", "params": {"probes": write_probes(root)}},
        {"name": "stream", "params": {"address": f"unix://{root}/rows.sock"}},
        {"name": "moments", "params": {"root": str(root / request.param), "skip_positions": 1, "flush_s": 0}},
    ]
    capture = {"consumers": consumers, "sites": SITES}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("cache")))
        llm = start_llm(
            model=tiny_model("llama"),
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=request.param == "eager",
            max_model_len=128,
            max_num_batched_tokens=48,
            max_logprobs=-1,
            enable_prefix_caching=True,
            in_process=True,
            additional_config={"headgate": {"capture": capture, "steering": {}}},
        )
    yield llm
    stop_llm(llm)


def generate(llm: Any) -> list[Any]:
    """The prompt captured and steered, captured, steered, and plain."""
    from vllm import SamplingParams

    made = []
    for tiers, captures in ((ONE, True), (Tiers(), True), (ONE, False), (Tiers(), False)):
        params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=6, logprobs=-1)
        for name, value in tiers.fields().items():
            setattr(params, name, value)
        if captures:
            params.capture = {"memory": {"hooks": SITES, "positions": "all"}}
        made.append(params)
    return list(llm.generate([{"prompt_token_ids": PROMPT} for _ in made], made, use_tqdm=False))


def check(outputs: list[Any], folder: Path) -> None:
    reference = HFReference(folder, "llama")
    for output, tiers in zip(outputs, (ONE, Tiers()) * 2, strict=True):
        expected = reference.run(PROMPT, list(output.outputs[0].token_ids), tiers.steering())
        check_logprobs(output, expected)
        for result in (getattr(output, "capture_results", None) or {}).values():
            assert result.status == "ok", result.error
            for site in result.payload.sites:
                assert relative_error(result.payload[site], expected.rows[site]) <= MAX_ERROR, site.name


def test_rows_and_vectors_are_of_the_weights_as_they_are(llm: Any, trained: Path) -> None:
    """There and back, each time twice: the second time on top of the prefix cache, which the trainer reset."""
    for folder in (tiny_model("llama"), trained, tiny_model("llama")):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        llm.reset_prefix_cache()
        for _ in range(2):
            outputs = generate(llm)
            check(outputs, folder)
        assert [output.num_cached_tokens for output in outputs[2:]] == [CACHED, CACHED]

    old, new = (HFReference(folder, "llama").run(PROMPT, [5]).rows for folder in (tiny_model("llama"), trained))
    site = sites_of(HookPoint.POST_MLP)[0]
    assert relative_error(new[site], old[site]) > 0.1


def test_rewards_and_moments_are_those_of_the_rows(llm: Any, trained: Path, root: Path) -> None:
    """Samples of several prompts in one batch, with new weights in between."""
    from vllm import SamplingParams

    gathered = []
    for folder in (trained, tiny_model("llama")):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        llm.reset_prefix_cache()
        params = SamplingParams(temperature=1.0, n=3, max_tokens=9, ignore_eos=True, detokenize=False)
        wanted = {"hooks": {"post_mlp": [1]}, "positions": "all"}
        params.capture = {"memory": wanted, "reward": {}, "moments": wanted}
        prompts = [{"prompt_token_ids": PROMPT[:length]} for length in (5, 40, 69)]
        for output in llm.generate(prompts, params, use_tqdm=False):
            for sample in output.outputs:
                results = sample.capture_results
                assert {result.status for result in results.values()} == {"ok"}
                captured = results["memory"].payload
                rows = captured[REWARDED].double().numpy()
                gathered.append(rows[1:])
                generated = rows[captured.num_prompt_tokens + 1 :]
                norms = np.linalg.norm(generated, axis=1)
                cos = (generated @ ALONG / np.linalg.norm(ALONG) / norms).mean()
                assert results["reward"].payload == {
                    "reward": pytest.approx(np.tanh(2.0 * cos), abs=1e-6),
                    "cos": pytest.approx(cos, abs=1e-6),
                    "act_norm": pytest.approx(norms.mean()),
                    "num_positions": len(generated),
                    "status": "ok",
                }

    rows = np.concatenate(gathered)
    state = max(root.glob("*/moments-0.safetensors"), key=lambda path: path.stat().st_mtime_ns)  # of this engine
    found = open_moments(state.parent)[REWARDED]
    assert (found.num_rows, found.num_skipped) == (len(rows), len(gathered))
    np.testing.assert_allclose(found.mean, rows.mean(axis=0), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.covariance(), np.cov(rows.T), rtol=1e-6, atol=1e-12)


def test_scores_are_those_of_probes_on_the_rows_of_hugging_face(llm: Any, trained: Path) -> None:
    """Prompt and answer, prompts in several steps, beside requests for other probes."""
    from vllm import SamplingParams

    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(trained)})
    llm.reset_prefix_cache()
    chosen = [list(PROBES_BY_NAME), ["moods"], ["anger"]]
    made = [SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, detokenize=False) for _ in range(len(chosen))]
    for params, names in zip(made, chosen, strict=True):
        params.capture = {"probe": {"probes": names}}
    before = llm.collective_rpc("headgate_stats")[0]["capture"]
    outputs = llm.generate([{"prompt_token_ids": PROMPT} for _ in made], made, use_tqdm=False)
    after = llm.collective_rpc("headgate_stats")[0]["capture"]

    num_rows, num_scores = len(PROMPT) + 6, sum(len(PROBES_BY_NAME[name].classes) for names in chosen for name in names)
    assert after["bytes"] - before["bytes"] == 4 * num_rows * num_scores  # scores alone, and no row
    reference = HFReference(trained, "llama")
    for output, names in zip(outputs, chosen, strict=True):
        result = output.capture_results["probe"]
        expected = reference.run(PROMPT, list(output.outputs[0].token_ids))
        assert (result.status, list(result.payload["probes"])) == ("ok", names)
        assert result.num_bytes == 4 * num_rows * sum(len(PROBES_BY_NAME[name].classes) for name in names)
        assert result.payload["positions"] == list(range(len(PROMPT) + 6))
        for name in names:
            probe = PROBES_BY_NAME[name]
            rows = expected.rows[probe.site].double().numpy()
            scores = rows @ probe.weight.T.astype(np.float64) + probe.biases
            if name == "moods":
                scores /= np.linalg.norm(rows, axis=1)[:, None] * np.linalg.norm(probe.weight, axis=1)
            found = np.array(result.payload["probes"][name]["scores"]).reshape(scores.shape)
            assert np.abs(found - scores).max() <= 1e-4 * np.abs(scores).max()


def test_a_stream_has_the_rows_of_every_request_in_another_thread(llm: Any, root: Path) -> None:
    from vllm import SamplingParams

    params = SamplingParams(temperature=1.0, n=2, max_tokens=5, ignore_eos=True, detokenize=False)
    wanted = {"hooks": {"post_mlp": [1], "attn_out": [0]}}
    params.capture = {"memory": wanted, "stream": {**wanted, "tag": "mine"}}
    prompts = [{"prompt_token_ids": PROMPT[:length]} for length in (5, 40)]
    outputs = llm.generate(prompts, params, use_tqdm=False)

    with StreamReader(f"unix://{root}/rows.sock", sites=["1.post_mlp", "0.attn_out"]) as reader:
        batches = {(batch.request_ids[0], batch.facts[0].sample): batch for batch in (next(reader) for _ in range(4))}
    assert reader.num_lacking == 0
    for output in outputs:
        for sample in output.outputs:
            kept, told = (sample.capture_results[name] for name in ("memory", "stream"))
            assert (told.status, told.payload["num_rows"]) == ("ok", len(kept.payload.positions))
            batch = batches[output.request_id, sample.index]
            assert set(batch.tags) == {"mine"}
            assert batch.positions.tolist() == kept.payload.positions.tolist()
            assert batch.token_ids.tolist() == kept.payload.token_ids.tolist()
            for site in reader.sites:
                assert torch.equal(batch.torch(site), kept.payload[site])
