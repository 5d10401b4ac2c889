"""The consumers' part of ``headgate verify``: what agrees passes, and each wrong number fails its own check."""

from __future__ import annotations

import base64
from copy import deepcopy
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save

from headgate.capture.engine.commands.verify_engine import checked_consumers
from headgate.capture.monitoring.verify_checks import (
    PLAIN,
    SERVED,
    ConsumerReading,
    Recording,
    RequestAnswer,
    Scene,
    SceneRequest,
    Stage,
    Status,
    VerifyFacts,
)
from headgate.capture.schema.config import CaptureConsumerSpec
from headgate.capture.schema.sites import Site
from headgate.consumers.verify import CHECKS, NOT_READ, READ, READ_AGAIN, ReadingChecks

LOGPROBS: list[dict[int, float]] = [{7: -0.1, 8: -3.0}, {9: -0.2, 3: -2.0}]
WEIGHTS = torch.tensor([[[0.1, 0.6, 0.05, 0.05, 0.1, 0.1], [0.3, 0.2, 0.1, 0.1, 0.2, 0.1]]])


def patterns(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    found = {name: values.contiguous() for name, values in {**tensors, "queries": torch.tensor([5])}.items()}
    return {"data": base64.b64encode(save(found)).decode(), "heads": "all"}


def payloads() -> dict[str, tuple[Any, Any]]:
    """What the consumers answer, by instance, in each of the two scenes."""
    values, keys = WEIGHTS.topk(5, dim=-1)
    top = {"5.attention.keys": keys.int(), "5.attention.values": values, "5.attention.rest": 1 - values.sum(-1)}
    lens = {"positions": [2], "layers": {"29": {"ids": [[9, 3]], "logprobs": [[-0.2, -2.0]]}}}
    strongest = {"positions": [0, 1], "ids": [[2, 40], [41, 1]], "values": [[3.0, 1.0], [2.0, 1.5]]}
    given = {"positions": [0, 1], "ids": [[1, 2], [1, 2]], "values": [[0.0, 3.0], [1.5, 0.0]]}
    return {
        "mine": (lens, None),
        "attention": (patterns({"5.attention": WEIGHTS}), patterns(top)),
        "features": (strongest, given),
    }


KINDS = {"mine": "lens", "attention": "attention", "features": "features"}


def recording(found: dict[str, tuple[Any, Any]], status: str = "ok") -> Recording:
    def answer(place: int | None) -> RequestAnswer:
        readings = {
            name: ConsumerReading(KINDS[name], status, None if status == "ok" else "no room", both[place])
            for name, both in found.items()
            if place is not None and both[place] is not None
        }
        return RequestAnswer(label="plain", prompt=[1, 2], tokens=[7, 9], logprobs=LOGPROBS, readings=readings)

    scenes = {PLAIN: [answer(None)], READ: [answer(0)], READ_AGAIN: [answer(1)]}
    facts = VerifyFacts(architecture="A", dtype="float32", num_layers=30, hidden_size=4)
    made = Recording(kind=SERVED, facts=facts, scenes=scenes)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Recording)


def statuses(served: Recording) -> dict[str, Status]:
    return {each.check.partition(":")[0]: each.status for each in ReadingChecks().judge({SERVED: [served]})}


def test_what_agrees_passes_and_nothing_is_judged_where_nothing_was_asked() -> None:
    found = statuses(recording(payloads()))

    assert found == dict.fromkeys(["lenses, patterns and features change no answer", *KINDS], Status.PASSED)
    plain = recording({}).scenes[PLAIN]
    nothing = msgspec.structs.replace(recording({}), scenes={PLAIN: plain})
    assert statuses(nothing) == {}


@pytest.mark.parametrize(
    ("name", "place", "path", "value"),
    [
        ("mine", 0, ["layers", "29", "logprobs", 0, 0], -0.3),
        ("mine", 0, ["layers", "29", "ids", 0, 0], 8),
        ("mine", 0, ["positions", 0], 1),
        ("features", 1, ["values", 0, 1], 2.9),
        ("features", 1, ["values", 1, 1], 0.1),
        ("features", 1, ["positions", 1], 2),
        ("features", 0, ["values", 1, 0], float("nan")),
        ("features", 1, ["values", 1, 0], None),
    ],
    ids=str,
)
def test_a_wrong_number_fails_its_own_check(name: str, place: int, path: list[Any], value: Any) -> None:
    found = deepcopy(payloads())
    inner = found[name][place]
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value

    failed = {check for check, status in statuses(recording(found)).items() if status is Status.FAILED}

    assert failed == {name}


@pytest.mark.parametrize("what", ["sum", "value", "key"])
def test_a_wrong_pattern_fails_its_own_check(what: str) -> None:
    values, keys = WEIGHTS.topk(5, dim=-1)
    whole = WEIGHTS * (1.1 if what == "sum" else 1.0)
    top = {
        "5.attention.keys": (keys.flip(-1) if what == "key" else keys).int(),
        "5.attention.values": values * (1.1 if what == "value" else 1.0),
    }

    found = statuses(recording({"attention": (patterns({"5.attention": whole}), patterns(top))}))

    assert found["attention"] is Status.FAILED


@pytest.mark.parametrize(("name", "place"), [("features", 1), ("attention", 1), ("mine", 0), ("features", 0)])
def test_a_result_that_is_missing_in_one_request_fails(name: str, place: int) -> None:
    served = recording(payloads())
    scene = served.scenes[(READ, READ_AGAIN)[place]]
    scene.append(msgspec.structs.replace(scene[0], readings={}))
    for other in {READ, READ_AGAIN, PLAIN} - {(READ, READ_AGAIN)[place]}:
        served.scenes[other].append(served.scenes[other][0])

    assert statuses(served)[name] is Status.FAILED


def test_rows_that_are_missing_fail() -> None:
    assert set(statuses(recording(payloads(), "partial_error")).values()) == {Status.PASSED, Status.FAILED}


def test_each_consumer_of_the_user_is_asked_by_its_own_name() -> None:
    request = SceneRequest(label="plain", prompt=[1], max_tokens=2)
    consumers = [
        CaptureConsumerSpec(name="lens", instance_name="mine"),
        CaptureConsumerSpec(name="attention"),
        CaptureConsumerSpec(name="features", params={"saes": {"gs20": "x"}}),
    ]
    sites = tuple(map(Site.parse, ("2.k", "3.q", "3.k", "4.q", "4.k")))

    def scenes(kind: str, asked: list[CaptureConsumerSpec]) -> dict[str, Any]:
        stage = Stage(kind=kind, llm=None, plain=[request], sites=sites, width=lambda site: 4, consumers=asked)
        return {scene.name: scene.requests[0].fields["capture"] for scene in ReadingChecks().scenes(stage)}

    assert scenes("eager", consumers) == scenes(SERVED, []) == {}
    found = scenes(SERVED, consumers)
    assert found[READ]["mine"] == {"layers": [-1], "top": 5, "positions": "all_generated"}
    assert "mine" not in found[READ_AGAIN]
    assert [found[name]["attention"] for name in (READ, READ_AGAIN)] == [{"layers": [3]}, {"layers": [3], "top": 5}]
    assert found[READ_AGAIN]["features"]["sae"] == "gs20"


def test_what_cannot_be_checked_is_told_with_the_reason() -> None:
    request = SceneRequest(label="plain", prompt=[1], max_tokens=2)
    few = CaptureConsumerSpec(name="features", instance_name="few", params={"saes": {"gs20": "x"}, "top": 7})
    keys_alone = CaptureConsumerSpec(name="attention")
    expected = {
        "few: features have the activations of the strongest": (
            "its parameter top is 7: 8 features by their ids are needed"
        ),
        "attention: patterns sum to 1, and the largest keys are theirs": (
            "q and k of no layer are both captured: add them to --capture-sites"
        ),
    }

    def scenes(*others: CaptureConsumerSpec) -> list[Scene]:
        stage = Stage(
            kind=SERVED,
            llm=None,
            plain=[request],
            sites=(Site.parse("3.k"), Site.parse("4.q")),
            width=lambda site: 4,
            consumers=[few, keys_alone, *others],
        )
        return list(ReadingChecks().scenes(stage))

    for found, name in ((scenes(), NOT_READ), (scenes(CaptureConsumerSpec(name="lens")), READ)):
        assert [(scene.name, scene.unchecked) for scene in found] == [(name, expected)]
    made = msgspec.structs.replace(recording({}), scenes={PLAIN: recording({}).scenes[PLAIN]}, unchecked=expected)
    served = msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Recording)
    verdicts = list(ReadingChecks().judge({SERVED: [served]}))
    assert [(each.check, each.status, each.figure) for each in verdicts] == [
        (check, Status.SKIPPED, why) for check, why in expected.items()
    ]


def test_every_consumer_with_a_check_is_in_the_engine_that_is_checked() -> None:
    given = {"consumers": [{"name": name} for name in (*ReadingChecks().consumers, "inline")]}

    assert [each.name for each in checked_consumers(given)] == [*CHECKS]
