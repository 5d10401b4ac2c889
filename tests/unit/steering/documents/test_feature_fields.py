"""Fields of features: every form gives the edits that it means, and a mistake is one error that names its field."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.capture.engine.contracts.request_part import PartRequest
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.documents.features import (
    MODULE_FEATURES,
    REQUEST_FEATURES,
    FeatureFields,
    PhaseFeatures,
    read_features,
)
from headgate.steering.documents.request import SteeringReader
from headgate.steering.programs.codes import Edit
from headgate.steering.programs.feature_edits import NO_FEATURE, FeatureEdit, sae_key
from headgate.steering.programs.wire import content_from_wire, content_to_wire
from headgate.steering.vectors.phase_vectors import Steerable

SITES = (Site(1, HookPoint.POST_MLP), Site(2, HookPoint.POST_MLP))
BASE, PREFILL, DECODE = REQUEST_FEATURES.features
RECONSTRUCTION, _, DECODE_RECONSTRUCTION = REQUEST_FEATURES.reconstructions
SPECS, FULL_SPECS = REQUEST_FEATURES.specs or ()
NAN = float("nan")
KNOWN = {
    sae_key(name): {
        "site": "1.post_mlp",
        "write_sites": ["1.post_mlp"],
        "num_features": 100,
        "decision": "none" if name == "topk" else "exact",
        "has_max_act": name == "figures",
        "is_encoded": name == "sae",
    }
    for name in ("sae", "topk", "figures")
}


def model(max_features: int = 3) -> Steerable:
    return Steerable(
        num_layers=4,
        hidden_size=6,
        dtype="float32",
        sites=SITES,
        max_vectors=100,
        op_sites=SITES,
        max_ops_per_site=8,
        max_sae_features=max_features,
    )


def edit(**keys: Any) -> dict[str, Any]:
    """An edit with `keys` changed; what is changed to None is left out."""
    document = {"sae": "sae", "feature": 7, "set": 2.0, **keys}
    return {key: value for key, value in document.items() if value is not None}


def spec(entry: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    clamp = {"feature_idx": 7, "kind": "absolute", "value": 2.0, **(entry or {})}
    return {"module_name": "sae", "clamps": {"post_mlp": {1: [clamp]}}, **keys}


def read(fields: dict[str, Any], max_features: int = 3, names: FeatureFields = REQUEST_FEATURES) -> PhaseFeatures:
    return read_features(fields, model(max_features), names)


def contents(fields: dict[str, Any], names: FeatureFields = REQUEST_FEATURES) -> list[list[Any]]:
    return [[one.content for one in phase] for phase in read(fields, names=names)]


ALIKE = [
    ({BASE: [edit(set=None, pin=2)]}, {BASE: [edit()]}),
    ({BASE: [edit(set=None, nudge=2)]}, {BASE: [edit(set=None, add=2.0)]}),
    ({BASE: [edit(set=None, strength=2)]}, {BASE: [edit(set=None, add=2.0)]}),
    ({BASE: [edit(set=None, mul=2)]}, {BASE: [edit(set=None, scale=2.0)]}),
    ({BASE: [edit(unit="raw", only_if_active=False, add=None)]}, {BASE: [edit()]}),
    ({BASE: [edit(feature=9), edit()]}, {BASE: [edit(), edit(feature=9)]}),
    ({PREFILL: [edit()], DECODE: [edit()]}, {BASE: [edit()]}),
    ({SPECS: [spec()]}, {BASE: [edit()]}),
    ({SPECS: [spec(phase="decode")]}, {DECODE: [edit()]}),
    ({SPECS: [spec({"kind": "additive", "only_if_active": True}, phase="prefill")]},
     {PREFILL: [edit(set=None, add=2.0, only_if_active=True)]}),
    ({SPECS: [{**spec(), "clamps": {"post_block": {"1": [{"feature_idx": 7, "kind": "absolute", "value": 2}]}}}]},
     {BASE: [edit()]}),
    ({FULL_SPECS: [{"module_name": "sae"}]}, {RECONSTRUCTION: ["sae"]}),
    ({FULL_SPECS: [{"module_name": "sae", "clamps": {}, "phase": "decode"}]}, {DECODE_RECONSTRUCTION: ["sae"]}),
    ({FULL_SPECS: [spec()]}, {RECONSTRUCTION: ["sae"], BASE: [edit()]}),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_every_form_gives_the_edits_that_it_means(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert contents(one) == contents(other)


def test_a_phase_has_those_of_all_phases_and_its_own() -> None:
    found = read({BASE: [edit()], DECODE: [edit(feature=3, set=None, max=1.0, only_if_active=True)]})

    assert [(one.feature, one.edit) for one in found.prefill] == [(7, Edit.SET)]
    assert [(one.feature, one.edit, one.only_if_active) for one in found.decode] == [
        (3, Edit.AT_MOST, True),
        (7, Edit.SET, False),
    ]
    assert found.names == {sae_key("sae"): f"{BASE}[0].sae"}


def test_a_reconstruction_stands_before_the_edits_of_its_sae() -> None:
    found = read({BASE: [edit()], RECONSTRUCTION: ["sae"], DECODE_RECONSTRUCTION: ["figures"]})

    assert [(one.sae, one.feature, one.is_reconstruction) for one in found.decode] == [
        ("figures", NO_FEATURE, True),
        ("sae", NO_FEATURE, True),
        ("sae", 7, False),
    ]
    assert [one.sae for one in found.prefill] == ["sae", "sae"]
    assert found.names == {sae_key("sae"): f"{RECONSTRUCTION}[0]", sae_key("figures"): f"{DECODE_RECONSTRUCTION}[0]"}
    assert content_from_wire(tuple[FeatureEdit, ...], content_to_wire(found.decode)) == found.decode


def test_modules_have_the_same_under_shorter_names() -> None:
    document = {"features": [edit()], "decode_features": [edit(feature=1)]}

    assert contents(document, MODULE_FEATURES) == contents({BASE: [edit()], DECODE: [edit(feature=1)]})


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({RECONSTRUCTION: []}, RECONSTRUCTION, "non-empty list of names"),
    ({RECONSTRUCTION: "sae"}, RECONSTRUCTION, "non-empty list of names"),
    ({RECONSTRUCTION: {"sae": 1}}, RECONSTRUCTION, "non-empty list of names"),
    ({RECONSTRUCTION: [7]}, f"{RECONSTRUCTION}[0]", "an SAE's name"),
    ({RECONSTRUCTION: ["sae", ["sae"]]}, f"{RECONSTRUCTION}[1]", "an SAE's name"),
    ({RECONSTRUCTION: ["sae", "figures", "topk"]}, RECONSTRUCTION, "names 3 SAEs, at most 2"),
    ({RECONSTRUCTION: ["sae", "sae"]}, f"{RECONSTRUCTION}[1]", f"'sae' is given twice, also as {RECONSTRUCTION}[0]"),
    ({RECONSTRUCTION: ["sae"], DECODE_RECONSTRUCTION: ["sae"]}, f"{DECODE_RECONSTRUCTION}[0]", "given twice"),
    ({RECONSTRUCTION: ["sae"], FULL_SPECS: [{"module_name": "sae"}]}, f"{FULL_SPECS}[0].module_name", "given twice"),
    ({RECONSTRUCTION: ["other"]}, f"{RECONSTRUCTION}[0]", "unknown SAE 'other'; registered: figures, sae, topk"),
    ({RECONSTRUCTION: ["figures"]}, f"{RECONSTRUCTION}[0]", "are with --sae-encode"),
    ({FULL_SPECS: [{"module_name": "figures"}]}, f"{FULL_SPECS}[0].module_name", "not encoded in full"),
    ({FULL_SPECS: ["sae"]}, f"{FULL_SPECS}[0]", "the keys"),
    ({FULL_SPECS: [{"clamps": {}}]}, f"{FULL_SPECS}[0]", "the keys"),
    ({FULL_SPECS: [spec(clamps=0)]}, f"{FULL_SPECS}[0].clamps", "{hook:"),
    ({FULL_SPECS: [spec(), spec()]}, f"{FULL_SPECS}[1].module_name", "given twice"),
    ({BASE: []}, BASE, "non-empty list"),
    ({BASE: edit()}, BASE, "non-empty list"),
    ({BASE: [edit(feature=i) for i in range(7)]}, BASE, "has 7 features, at most 6"),
    ({BASE: [7]}, f"{BASE}[0]", "expected an edit"),
    ({BASE: [{str(i): 1 for i in range(1000)}]}, f"{BASE}[0]", "expected an edit"),
    ({BASE: [edit(value=1)]}, f"{BASE}[0].value", "unknown key"),
    ({BASE: [edit(sae=None)]}, f"{BASE}[0].sae", "is missing"),
    ({BASE: [edit(sae=5)]}, f"{BASE}[0].sae", "name"),
    ({BASE: [edit(feature=None)]}, f"{BASE}[0].feature", "is missing"),
    ({BASE: [edit(feature=-1)]}, f"{BASE}[0].feature", "from 0 on"),
    ({BASE: [edit(feature=2**31)]}, f"{BASE}[0].feature", "from 0 on"),
    ({BASE: [edit(feature=7.0)]}, f"{BASE}[0].feature", "from 0 on"),
    ({BASE: [edit(feature=True)]}, f"{BASE}[0].feature", "from 0 on"),
    ({BASE: [edit(set=None)]}, f"{BASE}[0]", "exactly one of set, add, scale, min, max; got none"),
    ({BASE: [edit(add=1.0)]}, f"{BASE}[0].add", "exactly one of"),
    ({BASE: [edit(set=None, min=2.0, max=1.0)]}, f"{BASE}[0].max", "got min and max"),
    ({BASE: [edit(pin=2.0)]}, f"{BASE}[0].pin", "exactly one of"),
    ({BASE: [edit(set=NAN)]}, f"{BASE}[0].set", "finite number"),
    ({BASE: [edit(set=None, add=1e39)]}, f"{BASE}[0].add", "finite number"),
    ({BASE: [edit(set="2")]}, f"{BASE}[0].set", "finite number"),
    ({BASE: [edit(set=10**400)]}, f"{BASE}[0].set", "finite number"),
    ({BASE: [edit(unit="percent")]}, f"{BASE}[0].unit", "raw or max_act"),
    ({BASE: [edit(set=None, scale=2.0, unit="max_act")]}, f"{BASE}[0].unit", "no unit"),
    ({BASE: [edit(only_if_active=1)]}, f"{BASE}[0].only_if_active", "true or false"),
    ({BASE: [edit(), edit(set=None, add=1)]}, f"{BASE}[1].feature", f"given twice, also as {BASE}[0]"),
    ({BASE: [edit()], DECODE: [edit()]}, f"{DECODE}[0].feature", "given twice"),
    ({BASE: [edit()], SPECS: [spec()]}, f"{SPECS}[0].clamps.post_mlp.1[0].feature_idx", "given twice"),
    ({SPECS: {}}, SPECS, "expected [{"),
    ({SPECS: [{"module_name": "sae"}]}, f"{SPECS}[0]", "the keys"),
    ({SPECS: [spec(module_name="")]}, f"{SPECS}[0].module_name", "name"),
    ({SPECS: [spec(phase="all")]}, f"{SPECS}[0].phase", "both, prefill, decode"),
    ({SPECS: [spec(clamps={})]}, f"{SPECS}[0].clamps", "{hook:"),
    ({SPECS: [spec(clamps={"mid": {1: []}})]}, f"{SPECS}[0].clamps.mid", "unknown hook point"),
    ({SPECS: [spec(clamps={"post_mlp": {9: []}})]}, f"{SPECS}[0].clamps.post_mlp.9", "from -4 to 3"),
    ({SPECS: [spec(clamps={"post_mlp": {1: []}})]}, f"{SPECS}[0].clamps.post_mlp.1", "non-empty"),
    ({SPECS: [spec({"kind": "relative"})]}, f"{SPECS}[0].clamps.post_mlp.1[0].kind", "absolute, additive"),
    ({SPECS: [spec({"value": NAN})]}, f"{SPECS}[0].clamps.post_mlp.1[0].value", "finite number"),
    ({SPECS: [spec({"feature_idx": -2})]}, f"{SPECS}[0].clamps.post_mlp.1[0].feature_idx", "from 0 on"),
    ({SPECS: [spec({"scale": 1})]}, f"{SPECS}[0].clamps.post_mlp.1[0]", "the keys"),
    ({BASE: [edit(sae="other")]}, f"{BASE}[0].sae", "unknown SAE 'other'; registered: figures, sae, topk"),
    ({BASE: [edit(feature=100)]}, f"{BASE}[0].feature", "features 0 to 99, got 100"),
    ({BASE: [edit(unit="max_act")]}, f"{BASE}[0].unit", "does not declare"),
    ({BASE: [edit(sae="topk")]}, f"{BASE}[0].sae", "has no threshold"),
    ({BASE: [edit(feature=i) for i in range(4)]}, f"{BASE}[3]", "one feature too many at 1.post_mlp: 3"),
    ({BASE: [edit(), edit(feature=1)], DECODE: [edit(sae="figures"), edit(feature=9)]}, f"{DECODE}[1]", "too many"),
    ({SPECS: [spec(clamps={"post_mlp": {2: [{"feature_idx": 7, "kind": "absolute", "value": 1}]}})]},
     f"{SPECS}[0].clamps.post_mlp.2[0]", "acts at 1.post_mlp, not at 2.post_mlp"),
]  # fmt: skip


def checked(fields: dict[str, Any]) -> PartRequest:
    reader = SteeringReader(model())
    wanted = reader.read(fields)
    assert wanted is not None
    reader.check(wanted, KNOWN)
    return wanted


@pytest.mark.parametrize(("fields", "field", "message"), BAD)
def test_a_mistake_is_one_error_that_names_its_field(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        checked(fields)

    assert caught.value.field == field
    assert message in str(caught.value)


def test_what_can_be_served_passes() -> None:
    fields = {
        BASE: [edit(sae="figures", unit="max_act"), edit(sae="topk", set=None, add=1.0)],
        DECODE: [edit(feature=99, only_if_active=True)],
    }

    assert set(checked(fields).names) == set(KNOWN)


def test_a_server_without_saes_says_so() -> None:
    with pytest.raises(RequestError, match=r"steering_features: this server has no SAEs; .*--saes"):
        read({BASE: [edit()]}, max_features=0)
