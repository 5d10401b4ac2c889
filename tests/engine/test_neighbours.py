"""Neighbours never pay: prefix-cache hits, tokens and logprobs of requests that ask for nothing are stock's.

And what a capture needs of the prefix cache: all positions of the prompt are there, also after somebody else filled it.
What steering needs of it is in `test_steering_cache`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headgate.capture.schema.sites import HookPoint, Site
from tests.conftest import start_llm, stop_llm
from tests.engine.hf_reference import HFReference, relative_error
from tests.engine.steering_cases import (
    TRANSCODERS,
    Acting,
    Case,
    PlacedSae,
    Tiers,
    saved_saes,
    sites_of,
    vectors,
)
from tests.engine.tiny_models import HIDDEN, tiny_model
from tests.fakes.saes import TinySae

BLOCK = 32
PROMPT = [3 + (7 * i) % 500 for i in range(3 * BLOCK + 5)]
CACHED = 3 * BLOCK
OTHERS = [[3 + (k * i + k) % 500 for i in range(20 + 9 * k)] for k in range(1, 5)]
SITE = Site.parse("1.post_mlp")
ENGINE: dict[str, Any] = {
    "model": None,
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_batched_tokens": 48,
    "enable_prefix_caching": True,
    "in_process": True,
}
SITES = {"post_mlp": "all", "mlp_in": "all"}
STEERED = {"sites": SITES, "op_sites": SITES}
HEADGATE = {"headgate": {"capture": {"consumers": [{"name": "memory"}], "sites": SITES}, "steering": STEERED}}
PLACES = sites_of(HookPoint.POST_MLP, HookPoint.MLP_IN)
FIRST, *_ = vectors([SITE], 5).values()
ABLATED: Acting = ("both", SITE, {"method": "ablate", "vector": FIRST.numpy(), "scale": 1.0})
ROTATED: Acting = ("decode", SITE, {"method": "rotate", "plane": [FIRST.numpy(), FIRST.numpy()[::-1]], "degrees": 90.0})
SAE = PlacedSae("sae", SITE, TinySae(architecture="jumprelu", norm="layer_norm", width=HIDDEN))
WITHIN, *_, ACROSS, _ = TRANSCODERS
STEERING: dict[str, Tiers | Case] = {
    "both phases": Tiers(base=vectors(PLACES, 1)),
    "prefill": Tiers(prefill=vectors(PLACES, 2)),
    "decode": Tiers(decode=vectors(PLACES, 3)),
    "large": Tiers(base=vectors(PLACES, 4, 1e4)),
    "operation": Case("operation", operations=(ABLATED,)),
    "operations and vectors": Case("both", Tiers(decode=vectors(PLACES, 6)), operations=(ROTATED,)),
    "features": Case("features", operations=(SAE.features("both", {"feature": 1, "set": 9.0}),)),
    "transcoder": Case("transcoder", operations=(WITHIN.features("both", {"feature": 1, "set": 9.0}),)),
    "cross-layer": Case("cross-layer", operations=(ACROSS.features("both", {"feature": 1, "set": 9.0}),)),
    "reconstruction": Case("reconstruction", operations=(SAE.features("prefill", reconstructs=True),)),
    "reconstruction and features": Case(
        "decode", operations=(SAE.features("decode", {"feature": 1, "set": 9.0}, reconstructs=True),)
    ),
}


def sampling(capture: Any = None, tiers: Tiers | Case | None = None, **settings: Any) -> Any:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=8, **settings)
    for name, value in tiers.fields().items() if tiers else ():
        setattr(params, name, value)
    if capture is not None:
        params.capture = {"memory": {"hooks": {"post_mlp": [1]}, "positions": capture}}
    return params


def generate(llm: Any, prompts: list[list[int]], params: Any) -> Any:
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def plain_run(llm: Any) -> list[Any]:
    """Tokens and logprobs of requests that run beside a capturing one, and the cache hits of a repeated prompt."""
    beside = generate(llm, OTHERS, [sampling(logprobs=3) for _ in OTHERS])
    generate(llm, [PROMPT], sampling())
    repeated = generate(llm, [PROMPT], sampling(logprobs=3))
    return [(output.outputs[0].token_ids, logprobs(output)) for output in [*beside, *repeated]]


def logprobs(output: Any) -> list[dict[int, float]]:
    return [{token: entry.logprob for token, entry in step.items()} for step in output.outputs[0].logprobs]


@pytest.fixture(scope="module")
def stock() -> list[Any]:
    llm = start_llm(**{**ENGINE, "model": tiny_model("llama")})
    try:
        return plain_run(llm)
    finally:
        stop_llm(llm)


@pytest.fixture(scope="module")
def llm(stock: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    saes = saved_saes([SAE, WITHIN, ACROSS], tmp_path_factory.mktemp("saes"))
    steering = {**STEERED, "saes": saes, "sae_encode": ["sae"]}
    config = {"headgate": {**HEADGATE["headgate"], "steering": steering}}
    llm = start_llm(**{**ENGINE, "model": tiny_model("llama"), "additional_config": config})
    yield llm
    stop_llm(llm)


@pytest.fixture(autouse=True)
def empty_cache(request: pytest.FixtureRequest) -> None:
    if "llm" in request.fixturenames:
        request.getfixturevalue("llm").reset_prefix_cache()


@pytest.fixture(scope="module")
def reference() -> HFReference:
    return HFReference(tiny_model("llama"), "llama")


def test_requests_that_ask_for_nothing_get_stock_tokens_and_logprobs_bit_for_bit(stock, llm):
    assert plain_run(llm) == stock


def test_neighbours_of_a_capturing_request_get_stock_tokens_and_logprobs_bit_for_bit(stock, llm):
    params = [sampling(logprobs=3) for _ in OTHERS]
    params[0].capture = {"memory": {"hooks": {"post_mlp": "all", "mlp_in": "all"}}}

    outputs = generate(llm, OTHERS, params)

    assert [(output.outputs[0].token_ids, logprobs(output)) for output in outputs] == stock[: len(OTHERS)]
    assert outputs[0].capture_results["memory"].status == "ok"


@pytest.mark.parametrize("tiers", STEERING.values(), ids=STEERING)
def test_neighbours_of_a_steered_request_get_stock_tokens_and_logprobs_bit_for_bit(stock, llm, tiers):
    steered = sampling(tiers=tiers, logprobs=3)

    outputs = generate(llm, OTHERS, [steered, *(sampling(logprobs=3) for _ in OTHERS[1:])])

    found = [(output.outputs[0].token_ids, logprobs(output)) for output in outputs]
    assert found[1:] == stock[1 : len(OTHERS)]
    assert found[0] != stock[0]


def test_a_request_that_was_steered_leaves_nothing_to_the_next(stock, llm):
    generate(llm, [OTHERS[0]] * len(STEERING), [sampling(tiers=tiers) for tiers in STEERING.values()])
    llm.reset_prefix_cache()

    assert plain_run(llm) == stock


def test_neighbours_keep_their_hits_while_others_are_steered(llm):
    generate(llm, [PROMPT], sampling())

    params = [*(sampling(tiers=tiers) for tiers in STEERING.values()), sampling()]

    *steered, plain = generate(llm, [PROMPT] * len(params), params)

    assert plain.num_cached_tokens == CACHED
    assert [output.num_cached_tokens for output in steered] == [0, 0, CACHED, 0, 0, CACHED, 0, 0, 0, 0, CACHED]


@pytest.mark.parametrize("positions", ["all", "all_prompt", [0], {"start": -5}])
def test_prompt_positions_are_complete_although_the_prompt_is_cached(llm, reference, positions):
    generate(llm, [PROMPT], sampling())

    (output,) = generate(llm, [PROMPT], sampling(positions))

    assert output.num_cached_tokens == 0
    assert_right(output, reference)


@pytest.mark.parametrize("positions", ["last_prompt", "all_generated", [-1]])
def test_the_last_prompt_position_and_generated_ones_keep_the_cache(llm, reference, positions):
    generate(llm, [PROMPT], sampling())

    (output,) = generate(llm, [PROMPT], sampling(positions))

    assert output.num_cached_tokens == CACHED
    assert_right(output, reference)


def test_a_capture_fills_the_cache_for_others(llm):
    generate(llm, [PROMPT], sampling("all"))

    (output,) = generate(llm, [PROMPT], sampling())

    assert output.num_cached_tokens == CACHED


def test_neighbours_keep_their_hits_while_another_request_does_without(llm, reference):
    generate(llm, [PROMPT], sampling())

    capturing, plain = generate(llm, [PROMPT, PROMPT], [sampling("all"), sampling()])

    assert (capturing.num_cached_tokens, plain.num_cached_tokens) == (0, CACHED)
    assert capturing.outputs[0].token_ids == plain.outputs[0].token_ids
    assert_right(capturing, reference)


def assert_right(output: Any, reference: HFReference) -> None:
    result = output.capture_results["memory"]
    assert result.status == "ok", result.error
    expected = reference.run(PROMPT, list(output.outputs[0].token_ids)).rows[SITE]
    positions = torch.from_numpy(result.payload.positions)
    assert len(positions)
    assert relative_error(result.payload.rows[SITE], expected[positions]) <= 1e-4
