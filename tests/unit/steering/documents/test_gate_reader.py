"""The reader of requests tells what gates name, checks that it exists, and keeps what it read."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.capture.engine.contracts.request_part import PartRequest
from headgate.capture.schema.errors import RequestError
from headgate.steering.documents.request import FIELD_DOCS, SteeringReader
from headgate.steering.gates.gate import probe_key
from headgate.steering.programs.feature_edits import sae_key
from headgate.steering.spec import SteeringSpec, from_wire
from tests.fakes.gate_forms import INLINE, LATER, gate, gated, old_gate
from tests.fakes.op_fields import ROW

NAMING = [
    gate(),
    gate(when={"sae": "sae", "feature": 7, "above": 1}, then={"features": [{"sae": "other", "feature": 1, "set": 2}]}),
    gate(when={"probe": {"at": "0.post_mlp", "weight": "axis"}, "above": 1}, then={"vectors": LATER}),
    gate(
        when={"cosine": "angle", "at": "0.post_mlp", "above": 0},
        then={"ops": [{"at": "1.post_mlp", "method": "ablate", "vector": "axis"}]},
    ),
]
KNOWN: dict[str, dict[str, Any]] = {
    probe_key("anger"): {"at": "1.post_mlp", "classes": []},
    **{
        sae_key(name): {
            "site": "1.post_mlp",
            "write_sites": ["1.post_mlp"],
            "num_features": 5,
            "decision": "exact",
            "has_max_act": False,
            "is_encoded": False,
        }
        for name in ("sae", "other")
    },
    **{name: {"peak": 1.0} for name in ("calm", "axis", "angle")},
}


def wanted(fields: dict[str, Any]) -> PartRequest:
    found = SteeringReader(gated()).read(fields)
    assert found is not None
    return found


def test_the_reader_tells_what_gates_name() -> None:
    found = wanted({"steering_gates": NAMING, "steering_vectors": LATER})

    assert found.names == {
        probe_key("anger"): "steering_gates[0].when.probe",
        "calm": "steering_gates[0].then.module",
        sae_key("sae"): "steering_gates[1].when.sae",
        sae_key("other"): "steering_gates[1].then.features[0].sae",
        "axis": "steering_gates[2].when.probe.weight",
        "angle": "steering_gates[3].when.cosine",
    }
    assert isinstance(found.content, SteeringSpec)
    assert [each.name for each in found.content.gates] == ["gate0", "gate1", "gate2", "gate3"]
    assert len(from_wire(found.wire).gates) == 4
    assert found.content.prefill is not None
    SteeringReader(gated()).check(found, KNOWN)


@pytest.mark.parametrize(
    ("missing", "field", "message"),
    [
        (probe_key("anger"), "steering_gates[0].when.probe", "unknown probe 'anger'; registered: none"),
        (sae_key("sae"), "steering_gates[1].when.sae", "unknown SAE 'sae'; registered: other"),
        ("axis", "steering_gates[2].when.probe.weight", "unknown steering module 'axis'; registered: angle, calm"),
    ],
)
def test_an_unknown_name_is_an_error(missing: str, field: str, message: str) -> None:
    known = {name: facts for name, facts in KNOWN.items() if name != missing}

    with pytest.raises(RequestError) as refused:
        SteeringReader(gated()).check(wanted({"steering_gates": NAMING}), known)

    assert refused.value.field == field
    assert message in str(refused.value)


def test_an_unknown_feature_is_an_error() -> None:
    edits = [{"sae": "sae", "feature": 5, "set": 1}]

    with pytest.raises(RequestError, match="has the features 0 to 4") as refused:
        SteeringReader(gated()).check(wanted({"steering_gates": [gate(then={"features": edits})]}), KNOWN)

    assert refused.value.field == "steering_gates[0].then.features[0].feature"


def test_the_reader_reads_both_fields_and_keeps_what_it_read() -> None:
    reader = SteeringReader(gated())
    arrays = {"steering_gates": [gate(when={"probe": {**INLINE, "weight": ROW.copy()}, "above": 1})]}

    assert reader.read({"steering_gates": [gate()]}) is reader.read({"steering_gates": [gate()]})
    assert reader.read(arrays) is (first := reader.read(arrays))
    arrays["steering_gates"][0]["when"]["probe"]["weight"][0] = 7.0
    assert reader.read(arrays) is not first
    assert wanted({"steering": [old_gate()]}).field == "steering"
    assert {"steering_gates", "steering"} <= set(FIELD_DOCS)
