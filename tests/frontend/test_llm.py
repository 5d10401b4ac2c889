"""`LLM` over the model-free worker: what requests may ask, what is captured of them, and what they are told."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.frontend.conftest import ENGINE, capture_settings, stop

pytestmark = pytest.mark.engine

HOOKS = {"hooks": {"post_mlp": [3, 5]}}
MODES = {"core-in-its-own-process": ("1", "0"), "core-in-this-process": ("0", "0"), "async-scheduling": ("1", "1")}
EOS = 2


@pytest.fixture(scope="module", params=[*MODES])
def llm(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Any]:
    multiprocessing, asynchronous = MODES[request.param]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = multiprocessing
    os.environ["TESTS_ASYNC_SCHEDULING"] = asynchronous
    from vllm import LLM

    from headgate.capture.engine.plugin import register

    register()
    llm = LLM(str(model_dir), additional_config=capture_settings(), **ENGINE)
    yield llm
    stop(llm.llm_engine)


def encode(llm: Any, text: str) -> list[int]:
    return list(llm.get_tokenizer().encode(text, add_special_tokens=False))


def sampling(script: list[int] | None = None, **kwargs: Any) -> Any:
    from headgate.capture import SamplingParams

    return SamplingParams(extra_args={"script": script} if script else None, **kwargs)


def run(llm: Any, prompt: list[int], script: list[int] | None = None, **kwargs: Any) -> Any:
    params = sampling(script, **{"capture": {"rows": HOOKS}, **kwargs})
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    return output


def payload(result: Any) -> dict[str, Any]:
    assert result.status == "ok", result
    return dict(result.payload)


def check_rows(output: Any, completion: Any = None) -> dict[str, Any]:
    """One row for each token that was forwarded, and the tokens are those that the user has."""
    completion = completion or output.outputs[0]
    told = payload(completion.capture_results["rows"])
    kept = [*output.prompt_token_ids, *completion.token_ids]
    assert told["token_ids"] == kept
    assert told["num_prompt"] == len(output.prompt_token_ids)
    assert told["rows"] == list(range(len(kept) - 1))
    return told


def test_a_request_that_reached_its_length(llm: Any) -> None:
    output = run(llm, list(range(100, 140)), max_tokens=7)

    assert check_rows(output)["status"] == "length"
    assert output.capture_results["rows"].num_rows == 40 + 7 - 1
    assert output.capture_results == output.outputs[0].capture_results


def test_a_request_of_one_token(llm: Any) -> None:
    assert check_rows(run(llm, [77], max_tokens=1))["rows"] == [0]


def test_a_prompt_computed_in_chunks(llm: Any) -> None:
    check_rows(run(llm, [5] * 1300, max_tokens=3))


def test_a_request_that_sampled_eos(llm: Any) -> None:
    output = run(llm, [1, 2, 3], [900, 901, EOS, 902], max_tokens=50)

    assert output.outputs[0].token_ids == [900, 901, EOS]
    assert check_rows(output)["status"] == "stop"


def test_a_request_that_sampled_a_stop_token(llm: Any) -> None:
    output = run(llm, [1, 2, 3], [900, 901, 902, 903], max_tokens=50, stop_token_ids=[902])

    assert output.outputs[0].token_ids == [900, 901, 902]
    assert check_rows(output)["status"] == "stop"


def test_a_request_that_met_a_stop_string(llm: Any) -> None:
    script = encode(llm, " one two three STOP four five six seven eight nine ten")
    output = run(llm, [1, 2, 3], script, max_tokens=len(script), stop=["STOP"])

    assert output.outputs[0].stop_reason == "STOP"
    assert len(output.outputs[0].token_ids) < len(script)
    assert check_rows(output)["status"] == "stop"


@pytest.mark.parametrize("num_more", [1, 2])
def test_the_engine_ends_a_request_before_it_learns_of_the_stop_string(llm: Any, num_more: int) -> None:
    script = [*encode(llm, " all is well."), *[900] * (num_more - 1), EOS]
    output = run(llm, [1, 2, 3], script, max_tokens=60, stop=["."])

    assert output.outputs[0].stop_reason == "."
    assert len(output.outputs[0].token_ids) == len(script) - num_more
    assert check_rows(output)["status"] == "stop"


def test_a_stop_string_that_never_comes(llm: Any) -> None:
    assert check_rows(run(llm, [1, 2, 3], [900], max_tokens=9, stop=["nowhere"]))["status"] == "length"
    assert check_rows(run(llm, [1, 2, 3], [900, EOS], max_tokens=9, stop=["nowhere"]))["status"] == "stop"


def test_every_sample_has_its_own_results(llm: Any) -> None:
    output = run(llm, [7] * 20, max_tokens=6, n=3, temperature=1.0)

    assert len(output.outputs) == 3
    for completion in output.outputs:
        check_rows(output, completion)
    merged = output.capture_results["rows"]
    assert merged.num_rows == 3 * (20 + 6 - 1)
    assert [sample["rows"] for sample in merged.payload] == [list(range(25))] * 3


def test_many_prompts_share_one_sampling_params_and_it_stays_as_it_was(llm: Any) -> None:
    params = sampling(capture={"rows": HOOKS}, max_tokens=4)
    before = copy.deepcopy(params.extra_args)
    prompts = [{"prompt_token_ids": [i] * (i + 3)} for i in range(40)]

    outputs = llm.generate(prompts, params, use_tqdm=False)

    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == prompt["prompt_token_ids"]
        check_rows(output)
    assert params.extra_args == before
    assert params.capture == {"rows": HOOKS}


@pytest.mark.parametrize(
    "pass_on",
    [copy.copy, copy.deepcopy, lambda params: params.clone(), lambda params: pickle.loads(pickle.dumps(params))],
    ids=["copy", "deepcopy", "clone", "pickle"],
)
def test_capture_survives(llm: Any, pass_on: Any) -> None:
    params = pass_on(sampling(max_tokens=2, capture={"rows": HOOKS}, capture_wait=True))

    assert params.capture == {"rows": HOOKS}
    assert params.capture_wait is True
    (output,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)
    check_rows(output)


def test_capture_as_a_plain_attribute(llm: Any) -> None:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=2)
    params.capture = {"rows": HOOKS}
    (output,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)
    params.capture = None
    (plain,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)

    check_rows(output)
    assert plain.capture_results == plain.outputs[0].capture_results == {}


def test_the_wire_carries_what_the_worker_needs(llm: Any) -> None:
    told = check_rows(run(llm, [1] * 10, max_tokens=2, capture={"rows": {**HOOKS, "positions": [-1, 3], "tag": "x"}}))

    assert told["wire"]["v"] == 1
    assert told["wire"]["n"] == 1
    assert told["spec"] == {"sites": {"post_mlp": [3, 5]}, "positions": [3, 9], "options": {"tag": "x"}}


def test_captured_prompt_positions_are_computed_and_others_keep_the_cache(llm: Any) -> None:
    prompt = list(range(2000, 2128))
    last = {"rows": {**HOOKS, "positions": "last_prompt"}}

    cold = run(llm, prompt, max_tokens=2)
    last_only = run(llm, prompt, max_tokens=2, capture=last)
    again = run(llm, prompt, max_tokens=2)
    plain = run(llm, prompt, max_tokens=2, capture=None)

    hits = [output.num_cached_tokens for output in (cold, last_only, again, plain)]
    assert hits == [0, 96, 0, 96]
    check_rows(again)


BAD = {
    "an unknown consumer": ({"nobody": HOOKS}, "capture.nobody"),
    "no consumer": ({}, "capture"),
    "not an object": ("rows", "capture"),
    "an unknown hook": ({"rows": {"hooks": {"nowhere": [1]}}}, "capture.rows.hooks.nowhere"),
    "a layer too high": ({"rows": {"hooks": {"post_mlp": [99]}}}, "capture.rows.hooks.post_mlp"),
    "a site that is not configured": ({"rows": {"hooks": {"pre_attn": [1]}}}, "capture.rows.hooks.pre_attn"),
    "an unknown key": ({"rows": {**HOOKS, "hoks": 1}}, "capture.rows.hoks"),
    "an unknown selector": ({"rows": {**HOOKS, "positions": "most"}}, "capture.rows.positions"),
    "a position before the prompt": ({"rows": {**HOOKS, "positions": [-9]}}, "capture.rows.positions"),
    "a message without a chat": ({"rows": {**HOOKS, "positions": {"role": "user"}}}, "capture.rows.positions"),
    "a value that cannot travel": ({"rows": {**HOOKS, "tag": object()}}, "capture.rows"),
}


@pytest.mark.parametrize(("capture", "field"), BAD.values(), ids=BAD.keys())
def test_a_bad_spec_is_a_value_error_that_names_its_field(llm: Any, capture: Any, field: str) -> None:
    with pytest.raises(ValueError) as caught:
        run(llm, [1, 2, 3], capture=capture)

    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert caught.value.parameter == field


@pytest.mark.parametrize("key", ["headgate", "headgate_request"])
def test_what_headgate_keeps_in_extra_args_cannot_be_forged(llm: Any, key: str) -> None:
    from vllm import SamplingParams

    forged = {key: {"v": 1, "capture": {"reply": "ipc:///tmp/mine"}}}

    with pytest.raises(ValueError, match=rf"extra_args\.{key}:"):
        llm.generate({"prompt_token_ids": [1]}, SamplingParams(extra_args=forged), use_tqdm=False)


def test_a_bad_request_among_many_leaves_nothing_behind(llm: Any) -> None:
    good, bad = sampling(capture={"rows": HOOKS}, max_tokens=3), sampling(capture={"nobody": {}})

    with pytest.raises(ValueError, match="nobody"):
        llm.generate([{"prompt_token_ids": [i + 1]} for i in range(3)], [good, good, bad], use_tqdm=False)

    assert hub_of(llm).stats().waiting == 0
    check_rows(run(llm, [4, 5, 6], max_tokens=3))


def test_beam_search_is_refused(llm: Any) -> None:
    from vllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=2, max_tokens=3)

    with pytest.raises(ValueError, match="beam search"):
        params.capture = {"rows": HOOKS}


def test_an_engine_run_by_hand_hands_out_results(llm: Any) -> None:
    engine = llm.llm_engine
    engine.add_request("mine", {"prompt_token_ids": [1, 2, 3, 4]}, sampling(max_tokens=3, capture={"rows": HOOKS}))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += [output for output in engine.step() if output.finished]

    assert outputs[0].capture_results["rows"].status in ("ok", "pending")
    assert hub_of(llm).stats().waiting == 0


def test_an_aborted_request_is_forgotten(llm: Any) -> None:
    engine = llm.llm_engine
    engine.add_request("gone", {"prompt_token_ids": [1, 2, 3]}, sampling(max_tokens=500, capture={"rows": HOOKS}))
    engine.step()
    engine.abort_request(["gone"])

    assert hub_of(llm).stats().waiting == 0
    check_rows(run(llm, [4, 5, 6], max_tokens=3))


def test_nothing_is_left_in_worker_or_hub(llm: Any) -> None:
    check_rows(run(llm, [4, 5, 6], max_tokens=3))

    (stats,) = llm.collective_rpc("headgate_stats")
    assert stats == {"running": [], "ended": []}
    assert hub_of(llm).stats().waiting == 0


def hub_of(llm: Any) -> Any:
    from headgate.capture.engine.requests.capture_frontend import front_end_of

    front = front_end_of(llm.llm_engine)
    assert front is not None
    return front.hub


@pytest.mark.parametrize("fields", [{"steering_vectors": {"post_mlp": {3: [0.0]}}}, {"steering_name": "calm"}])
def test_an_engine_without_steering_refuses_its_fields(llm: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"this engine was started without steering.*--enable-steering") as caught:
        run(llm, [1, 2, 3], **fields)

    assert caught.value.field == next(iter(fields))
    assert not hasattr(llm, "steering")
    check_rows(run(llm, [4, 5, 6], max_tokens=3))


CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello you"},
    {"role": "user", "content": "Bye"},
]


def text_of(llm: Any, tokens: Any) -> str:
    return str(llm.get_tokenizer().decode([int(token) for token in tokens]))


def test_handles_of_chats_lead_to_the_rows_of_their_messages(llm: Any) -> None:
    params = sampling(max_tokens=4, n=2, temperature=1.0)
    outputs, handles = llm.capture([CHAT, CHAT[:1]], params, sites=["3.post_mlp", "5.post_mlp"], use_tqdm=False)

    assert [(handle.request_id, handle.sample_index) for handle in handles] == [
        (output.request_id, index) for output in outputs for index in (0, 1)
    ]
    first = handles[0]
    assert [span.role for span in first.messages] == ["user", "assistant", "user"]
    assert [(span.start, span.stop) for span in first.messages] == [
        (one.positions[0], one.positions[-1] + 1) for one in map(first.message, range(3))
    ]
    said = first.message(-1, role="assistant")
    assert text_of(llm, said.token_ids) == "<|im_start|>assistant\nHello you<|im_end|>\n"
    assert said["3.post_mlp"][:, 0].tolist() == said.positions.tolist()
    assert said["3.post_mlp"][:, 1].tolist() == [3] * len(said)
    assert first.messages[1].token_ids == said.token_ids.tolist()
    answered = first.message(-1, include_generated=True)
    assert answered.positions.tolist() == [*first.message(-1).positions.tolist(), *first.generated.positions.tolist()]
    assert len(first.generated) == 3
    assert params.capture is None
    for handle in handles[1:]:
        handle.discard()


def test_outputs_keep_a_summary_and_texts_have_no_messages(llm: Any) -> None:
    (output,), (handle,) = llm.capture(
        {"prompt_token_ids": [5, 6, 7]},
        sampling(max_tokens=2),
        sites={"post_mlp": [3]},
        positions=["last_prompt", "all_generated"],
        options={"tag": "x"},
        use_tqdm=False,
    )

    assert handle.fetch() is handle.fetch()
    assert payload(output.capture_results["rows"])["spec"] == {
        "sites": {"post_mlp": [3]},
        "positions": {"start": 2, "stop": None, "step": 1},
        "options": {"tag": "x"},
    }
    with pytest.raises(ValueError, match=r"^message: request .* was no chat"):
        handle.message(0)


def test_results_of_a_chat_tell_where_its_messages_lie(llm: Any) -> None:
    params = sampling(max_tokens=2, n=2, temperature=1.0, capture={"rows": HOOKS}, capture_messages=True)
    outputs = llm.chat([CHAT, CHAT[:1]], params, use_tqdm=False)

    for output, chat in zip(outputs, (CHAT, CHAT[:1]), strict=True):
        spans = output.capture_results["rows"].messages
        assert [text_of(llm, span.token_ids) for span in spans] == [
            f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in chat
        ]
        assert output.outputs[1].capture_results["rows"].messages == spans
    with pytest.raises(ValueError, match="capture_messages: needs a chat request"):
        run(llm, [1, 2], capture_messages=True)
    assert hub_of(llm).stats().waiting == 0


def test_selectors_of_several_messages(llm: Any) -> None:
    several = [{"role": "user", "index": "all", "start": 3, "stop": -2}, {"index": 1, "include_generated": True}]
    capture = {"rows": {**HOOKS, "positions": several}}
    (output,) = llm.chat(CHAT, sampling(max_tokens=3, capture=capture), use_tqdm=False)

    before, tail = payload(output.capture_results["rows"])["spec"]["positions"]
    tokens = output.prompt_token_ids
    assert (
        text_of(llm, [tokens[position] for position in before]) == "Hi<|im_start|>assistant\nHello you<|im_end|>\nBye"
    )
    assert tail == {"start": len(tokens), "stop": None, "step": 1}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"sites": ["3.nowhere"]}, "sites"),
        ({"consumer": "nobody"}, "consumer"),
        ({"sampling_params": {"capture": {"rows": HOOKS}}}, "capture.rows"),
        ({"positions": ["all", "most"]}, "capture.rows.positions[1]"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named(llm: Any, given: dict[str, Any], field: str) -> None:
    params = sampling(**given.get("sampling_params", {}))
    given = {name: value for name, value in given.items() if name != "sampling_params"}
    with pytest.raises(ValueError) as caught:
        llm.capture({"prompt_token_ids": [1, 2]}, params, use_tqdm=False, **{"sites": {"post_mlp": [3]}, **given})

    assert caught.value.field == field
