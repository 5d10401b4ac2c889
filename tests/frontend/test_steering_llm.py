"""`LLM` that steers, over the model-free worker: request fields, errors, named modules, ``llm.steering``."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headgate.capture.schema.errors import RequestError
from headgate.steering.documents.request import read_steering
from headgate.steering.spec import from_wire, to_wire
from tests.fakes.saes import TinySae
from tests.fakes.steering_forms import BAD, GOOD, HIDDEN, LAYERS, ROW, listed
from tests.frontend.conftest import ENGINE, capture_settings, stop

pytestmark = pytest.mark.engine

WORKER = "tests.fakes.noting_worker.NotingWorker"
ONE = {"post_mlp": {3: ROW}}
SAE = TinySae(architecture="gated", width=HIDDEN)
EDIT = {"sae": "tiny", "feature": 3, "set": 2.5}


@pytest.fixture(scope="module", params=["1", "0"], ids=["core-in-its-own-process", "core-in-this-process"])
def llm(request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = request.param
    from headgate.steering import LLM

    settings = {**ENGINE, "worker_cls": WORKER, "additional_config": capture_settings()}
    sae = SAE.save(tmp_path_factory.mktemp("saes") / "sae")
    saes = {"saes": {"tiny": f"{sae}@3.post_mlp"}, "sae_encode": ["tiny"]}
    llm = LLM(str(model_dir), steering={"max_steering_slots": 150, **saes}, **settings)
    yield llm
    stop(llm.llm_engine)


@pytest.fixture(autouse=True)
def left_clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did, the engine goes on, holds nothing and waits for no request."""
    yield
    llm = request.getfixturevalue("llm")
    llm.steering.clear()
    for name in llm.steering.modules():
        llm.steering.unregister(name)
    assert not llm.llm_engine.has_unfinished_requests()
    run(llm)
    assert [slots.reserved for slots in llm.steering.status().slots] == [0]


def run(llm: Any, *, prompt: Any = (1, 2, 3), max_tokens: int = 2, **fields: Any) -> Any:
    from headgate.steering import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, **fields)
    (output,) = llm.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    return output


def notes_of(llm: Any, **fields: Any) -> list[dict[str, Any]]:
    llm.collective_rpc("take_notes")
    run(llm, **fields)
    (notes,) = llm.collective_rpc("take_notes")
    return list(notes)


def note_of(llm: Any, **fields: Any) -> dict[str, Any]:
    (note,) = notes_of(llm, **fields)
    return note


def wire_of(llm: Any, **fields: Any) -> Any:
    """What the front end makes of fields."""
    spec, _ = read_steering(fields, llm.steering.steerable)
    assert spec is not None
    return to_wire(spec)


def test_a_steering_request_brings_its_wire_and_nothing_else(llm: Any) -> None:
    note = note_of(llm, steering_vectors=ONE, decode_steering_vectors={"pre_attn": {0: -2 * ROW}})

    expected = wire_of(llm, steering_vectors=ONE, decode_steering_vectors={"pre_attn": {0: -2 * ROW}})
    assert note["wire"] == {"v": 1, "parts": {"steering": expected}, "offline": True}
    assert note["extra"] == ["headgate"]
    assert not note["skips_cache"]


def test_a_steering_request_opens_no_hub_and_waits_for_nobody(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from headgate.capture.engine.requests.capture_frontend import front_end_of

    front = front_end_of(llm.llm_engine)
    assert front is not None
    monkeypatch.setattr(front, "_hub", None)
    output = run(llm, steering_vectors=ONE)

    assert front._hub is None
    assert output.capture_results == output.outputs[0].capture_results == {}


@pytest.mark.parametrize("fields", GOOD.values(), ids=GOOD.keys())
def test_every_form_comes_to_the_same(llm: Any, fields: dict[str, Any]) -> None:
    assert note_of(llm, **fields)["wire"]["parts"]["steering"] == wire_of(llm, steering_vectors=ONE)


def test_capture_and_steering_in_one_request(llm: Any) -> None:
    note = note_of(llm, steering_vectors=ONE, capture={"rows": {"hooks": {"post_mlp": [3]}}})

    assert note["wire"]["parts"]["steering"] == wire_of(llm, steering_vectors=ONE)
    assert note["wire"]["capture"]["specs"]["rows"]["sites"] == {"post_mlp": [3]}
    assert note["skips_cache"] is True


def test_a_request_that_does_not_steer_brings_nothing(llm: Any) -> None:
    assert note_of(llm)["wire"] is None
    zeros = note_of(llm, steering_vectors={"post_mlp": {3: {"vector": ROW, "scale": 0}}}, extra_args={"mine": 1})
    assert (zeros["wire"], zeros["extra"]) == (None, ["mine"])


@pytest.mark.parametrize(
    "pass_on",
    [copy.copy, copy.deepcopy, lambda params: params.clone(), lambda params: pickle.loads(pickle.dumps(params))],
    ids=["copy", "deepcopy", "clone", "pickle"],
)
def test_the_fields_survive(llm: Any, pass_on: Any) -> None:
    from headgate.steering import SamplingParams

    llm.steering.register("calm", ONE)
    tiers = {"steering_vectors": ONE, "prefill_steering_vectors": ONE, "decode_steering_vectors": ONE}
    params = pass_on(SamplingParams(**tiers, steering_name=["calm"], max_tokens=2))
    params.steering_module_ref, params.steering_name = ("calm", 2.0), None
    llm.collective_rpc("take_notes")
    llm.generate({"prompt_token_ids": [1, 2]}, params, use_tqdm=False)
    ((note,),) = llm.collective_rpc("take_notes")

    steering = note["wire"]["parts"]["steering"]
    doubled = wire_of(llm, steering_vectors={"post_mlp": {3: 2 * ROW}})
    assert (steering["prefill"]["key"], steering["is_shared"]) == (doubled["prefill"]["key"], doubled["is_shared"])
    assert steering["modules"] == [["calm", 2.0]]
    assert [scale for _, scale in steering["prefill_parts"]] == [2.0]


def test_one_params_for_many_prompts_is_read_once_and_stays_as_it_was(llm: Any, monkeypatch: Any) -> None:
    from headgate.steering import SamplingParams
    from headgate.steering.documents import request

    reads: list[Any] = []
    monkeypatch.setattr(request, "read_steering", lambda *args: (reads.append(args), read_steering(*args))[1])
    vectors = {"post_mlp": {3: 5 * ROW}}  # in no other test: what is equal is not read again
    params = SamplingParams(steering_vectors=vectors, max_tokens=2)
    before = dict(params.extra_args)
    llm.collective_rpc("take_notes")

    llm.generate([{"prompt_token_ids": [i + 1]} for i in range(20)], params, use_tqdm=False)

    assert len(reads) == 1
    assert params.extra_args == before
    assert params.steering_vectors is vectors
    (notes,) = llm.collective_rpc("take_notes")
    assert [note["wire"]["parts"]["steering"] for note in notes] == [wire_of(llm, steering_vectors=vectors)] * 20


def test_an_array_that_was_changed_in_place_is_read_anew(llm: Any) -> None:
    from headgate.steering import SamplingParams

    row = ROW.copy()
    params = SamplingParams(steering_vectors={"post_mlp": {3: row}}, max_tokens=2)
    llm.collective_rpc("take_notes")
    llm.generate({"prompt_token_ids": [1]}, params, use_tqdm=False)
    row *= 2
    llm.generate({"prompt_token_ids": [1]}, params, use_tqdm=False)

    (notes,) = llm.collective_rpc("take_notes")
    assert notes[1]["wire"]["parts"]["steering"] == wire_of(llm, steering_vectors={"post_mlp": {3: 2 * ROW}})
    assert notes[0]["wire"]["parts"]["steering"] != notes[1]["wire"]["parts"]["steering"]


def test_every_sample_is_steered(llm: Any) -> None:
    notes = notes_of(llm, steering_vectors=ONE, n=3, temperature=1.0)

    assert [note["wire"]["parts"]["steering"] for note in notes] == [wire_of(llm, steering_vectors=ONE)] * 3


EVERYWHERE = {layer: ROW + layer for layer in range(LAYERS)}
ONLY_IN_PYTHON: dict[str, tuple[dict[str, Any], str]] = {
    "not a number": (
        {"steering_vectors": {"post_mlp": {3: np.where(ROW == 0, np.nan, ROW)}}},
        "steering_vectors.post_mlp.3",
    ),
    "infinite": ({"steering_vectors": {"post_mlp": {3: [float("inf")] * HIDDEN}}}, "steering_vectors.post_mlp.3"),
    "an object": ({"steering_vectors": {"post_mlp": {3: object()}}}, "steering_vectors.post_mlp.3"),
    "integers": ({"steering_vectors": {"post_mlp": {3: np.arange(HIDDEN)}}}, "steering_vectors.post_mlp.3"),
    "more vectors than slots": (
        {
            "steering_vectors": {"pre_attn": EVERYWHERE, "post_mlp": EVERYWHERE, "post_attn": EVERYWHERE},
            "decode_steering_vectors": {"pre_attn": EVERYWHERE, "post_mlp": EVERYWHERE},
        },
        "steering_vectors",
    ),
}


@pytest.mark.parametrize(("fields", "field"), {**BAD, **ONLY_IN_PYTHON}.values(), ids={**BAD, **ONLY_IN_PYTHON}.keys())
def test_bad_input_is_one_value_error_that_names_its_field(llm: Any, fields: Any, field: str) -> None:
    with pytest.raises(ValueError) as caught:
        run(llm, **fields)

    assert isinstance(caught.value, RequestError)
    assert caught.value.field == caught.value.parameter == field  # type: ignore[attr-defined]
    assert str(caught.value).startswith(f"{field}: ")
    assert len(str(caught.value)) < 2000


def test_what_does_not_fit_beside_the_modules_is_refused_with_the_numbers(llm: Any) -> None:
    everywhere = dict.fromkeys(range(LAYERS), ROW)
    llm.steering.register("wide", {"pre_attn": everywhere})
    twice = {hook: dict.fromkeys(range(LAYERS), 2 * ROW) for hook in ("post_attn", "post_mlp")}
    fields = {"steering_vectors": {"post_attn": everywhere, "post_mlp": everywhere}, "decode_steering_vectors": twice}

    with pytest.raises(RequestError, match="needs 120 vector slots, but only 119 of 149") as caught:
        run(llm, **fields)

    assert caught.value.field == "steering_vectors"
    llm.steering.unregister("wide")
    run(llm, **fields)


def test_beam_search_is_refused(llm: Any) -> None:
    from vllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=2, max_tokens=3)

    with pytest.raises(ValueError, match="steering_vectors: beam search"):
        params.steering_vectors = ONE


def test_a_made_request_that_was_never_read_is_refused(llm: Any) -> None:
    from headgate.steering import SamplingParams

    engine = llm.llm_engine
    rendered = {"type": "token", "prompt_token_ids": [1, 2, 3]}
    params = SamplingParams(max_tokens=2, steering_vectors=ONE)
    made = engine.input_processor.process_inputs("made", rendered, SamplingParams(max_tokens=2), ("generate",))
    with pytest.raises(RequestError, match="steering_vectors: an EngineCoreRequest"):
        engine.add_request("made", made, params)
    made = engine.input_processor.process_inputs("made", rendered, params, ("generate",))
    llm.collective_rpc("take_notes")
    engine.add_request("made", made, params)
    while engine.has_unfinished_requests():
        engine.step()

    ((note,),) = llm.collective_rpc("take_notes")
    assert note["wire"]["parts"]["steering"] == wire_of(llm, steering_vectors=ONE)


def test_vectors_are_not_printed(llm: Any) -> None:
    from headgate.steering import SamplingParams

    text = repr(SamplingParams(steering_vectors={"post_mlp": {3: listed(ROW)}}, steering_name="calm"))

    assert "'steering_name': 'calm'" in text
    assert len(text) < 2000


def test_modules_are_registered_used_and_forgotten(llm: Any) -> None:
    module = llm.steering.register("calm", ONE, decode_vectors={"pre_attn": {0: ROW}})
    assert (module.name, module.prefill.sites) == ("calm", ("3.post_mlp",))
    assert module.decode.sites == ("0.pre_attn", "3.post_mlp")
    assert llm.steering.modules() == {"calm": module}

    steering = note_of(llm, steering_module_ref=("calm", -1.5))["wire"]["parts"]["steering"]
    assert steering["modules"] == [["calm", -1.5]]
    assert [[key.hex(), scale] for key, scale in steering["prefill_parts"]] == [[module.prefill.hash, -1.5]]
    assert [[key.hex(), scale] for key, scale in steering["decode_parts"]] == [[module.decode.hash, -1.5]]

    assert llm.steering.unregister("calm") == module
    assert llm.steering.modules() == {}


def test_a_name_that_is_gone_is_the_same_error_as_one_that_never_was(llm: Any) -> None:
    llm.steering.register("calm", ONE)
    llm.steering.register("other", ONE)
    run(llm, steering_name="calm")
    llm.steering.unregister("calm")

    for _ in range(2):  # first by the engine core, since the front end still knows the name
        with pytest.raises(RequestError, match="steering_name: unknown steering module 'calm'; registered: other"):
            run(llm, steering_name="calm")
    run(llm, steering_name="other")


def test_a_module_that_became_too_large_beside_the_request(llm: Any) -> None:
    llm.steering.register("calm", ONE)
    run(llm, steering_module_ref=("calm", 1e6))
    llm.steering.register("calm", {"post_mlp": {3: np.full(HIDDEN, 1e4, np.float32)}})

    for _ in range(2):
        with pytest.raises(RequestError, match=r"steering_module_ref: .*must stay below"):
            run(llm, steering_module_ref=("calm", 1e6))


def test_global_vectors_are_set_added_to_and_cleared(llm: Any) -> None:
    first = llm.steering.set(ONE, prefill_vectors={"pre_attn": {1: ROW}})
    assert first.shared.tiers == {"base": ("3.post_mlp",), "prefill": ("1.pre_attn",)}
    assert (first.shared.prefill.sites, first.shared.decode.sites) == (("1.pre_attn", "3.post_mlp"), ("3.post_mlp",))
    assert llm.steering.set({"post_mlp": {4: ROW}}).shared.decode.sites == ("3.post_mlp", "4.post_mlp")
    assert llm.steering.set({"post_mlp": {4: ROW}}, replace=True).shared.decode.sites == ("4.post_mlp",)
    assert llm.steering.status().slots[0].reserved == 1
    assert llm.steering.clear().shared.tiers == {}


def test_modules_from_files(llm: Any, tmp_path: Path) -> None:
    from headgate.steering import load, save

    vectors = llm.steering.register("calm", ONE)
    spec, _ = read_steering({"steering_vectors": ONE}, llm.steering.steerable)
    assert spec is not None
    for suffix in (".safetensors", ".json"):
        path = tmp_path / f"calm{suffix}"
        save(path, spec.prefill)  # type: ignore[arg-type]
        assert load(path).vectors is not None
        assert llm.steering.register("calm", path=path).prefill == vectors.prefill


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"vectors": {"post_mlp": {3: [1.0]}}}, "vectors.post_mlp.3"),
        ({"decode_vectors": {"nowhere": {3: [1.0]}}}, "decode_vectors.nowhere"),
        ({}, "vectors"),
        ({"path": "/nowhere.safetensors"}, "path"),
        ({"path": "vectors.txt"}, "path"),
        ({"path": "a.json", "vectors": ONE}, "path"),
    ],
)
def test_a_wrong_module_names_the_argument(llm: Any, arguments: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.steering.register("calm", **arguments)

    assert caught.value.field == field
    assert llm.steering.modules() == {}


def test_wrong_names_and_globals_name_the_argument(llm: Any) -> None:
    with pytest.raises(RequestError, match="name: expected a module's name"):
        llm.steering.register("", ONE)
    with pytest.raises(RequestError, match="name: unknown steering module 'nobody'"):
        llm.steering.unregister("nobody")
    with pytest.raises(RequestError, match=r"prefill_vectors\.post_mlp\.99|prefill_vectors\.post_mlp: layer 99"):
        llm.steering.set(prefill_vectors={"post_mlp": {99: ROW}})
    with pytest.raises(RequestError, match="vectors: there is no vector"):
        llm.steering.set()


def test_what_can_be_steered(llm: Any) -> None:
    assert llm.steering.layers() == {hook: list(range(LAYERS)) for hook in ("pre_attn", "post_attn", "post_mlp")}
    assert (llm.steering.steerable.hidden_size, llm.steering.steerable.max_vectors) == (HIDDEN, 149)


def test_features_of_saes_and_reconstructions_reach_the_worker_as_a_program(llm: Any) -> None:
    decode = {"decode_steering_features": [{**EDIT, "feature": 4}], "decode_sae_reconstruction": ["tiny"]}
    note = note_of(llm, steering_features=[EDIT], **decode)

    spec = from_wire(note["wire"]["parts"]["steering"])
    assert not spec.is_to_lower
    assert spec.prefill_program is not None
    assert spec.decode_program is not None
    assert [len(spec.prefill_program.codes), len(spec.decode_program.codes)] == [1, 3]
    assert [program.reconstructs for _, program in spec.phases if program] == [False, True]


@pytest.mark.parametrize(("key", "value", "field"), [("sae", "none", ".sae"), ("feature", 12, ".feature")])
def test_bad_features_name_their_field(llm: Any, key: str, value: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        run(llm, steering_features=[{**EDIT, key: value}])
    assert caught.value.field == f"steering_features[0]{field}"


def test_an_sae_is_registered_offline_and_a_module_may_change_its_features(llm: Any, tmp_path: Path) -> None:
    path = TinySae(architecture="standard", width=HIDDEN, seed=1).save(tmp_path / "other")

    sae = llm.steering.register_sae("other", path, "3.post_mlp")
    llm.steering.register("m", features=[{**EDIT, "sae": "other"}])
    run(llm, steering_name="m", steering_features=[{**EDIT, "feature": 5}])

    assert (sae.site, sae.activation, len(sae.sha256)) == ("3.post_mlp", "relu", 64)
    assert llm.steering.saes() == {"other": sae, "tiny": llm.steering.saes()["tiny"]}
    with pytest.raises(RequestError, match=r"path: .*no such file"):
        llm.steering.register_sae("other", tmp_path / "none", "3.post_mlp")
    with pytest.raises(RequestError, match=r"sae_reconstruction\[0\]: .*--sae-encode"):
        run(llm, sae_reconstruction=["other"])
    shared = llm.steering.set(features=[EDIT], decode_features=[{**EDIT, "sae": "other"}]).shared
    assert shared.decode.op_sites == ("3.post_mlp",)
    assert shared.prefill.hash != shared.decode.hash
    llm.steering.clear()
    assert "register_sae" in [entry["action"] for entry in llm.steering.audit()]
