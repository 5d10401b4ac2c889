"""Global features and reconstructions in an engine core: keys, slots, what replaces what, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.capture.engine.contracts.core_calls import CoreClient
from headgate.capture.schema.errors import RequestError
from headgate.steering.control.handle import Steering
from headgate.steering.spec import from_wire
from tests.unit.steering.core.test_core_saes import ABLATION, EDIT, OTHER, SITE, Opened, codes, with_transcoder

MORE = {**EDIT, "feature": 4}


class Served:
    """An engine core, and what its operator calls."""

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        client = CoreClient(SimpleNamespace(engine_core=self), "steering")
        self.steering = Steering(client, opened.steerable)

    def headgate_call(self, part: str, method: str, args: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"ok": self.opened.core.call(method, args)}
        except RequestError as error:
            message = str(error).removeprefix(f"{error.field}: ")
            return {"error": {"field": error.field, "message": message, "is_forbidden": False}}

    def key(self, req_id: str, **fields: Any) -> Any:
        """The block keys of a request, which is forgotten."""
        if fields:
            self.opened.accept(req_id, **fields)
        keys = self.opened.core.block_keys(req_id)
        self.opened.core.forget(req_id)
        return keys

    @property
    def codes(self) -> tuple[list[int], list[int]]:
        """Codes of the global program of each phase."""
        shared = self.opened.core.state.shared
        return codes(shared.prefill_program), codes(shared.decode_program)


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return Served(Opened(tmp_path, sae_encode=["a"]))


@pytest.mark.parametrize(
    "fields",
    [
        {"features": [EDIT]},
        {"decode_features": [EDIT, MORE]},
        {"prefill_features": [EDIT], "ops": [ABLATION]},
        {"sae_reconstruction": ["a"]},
    ],
    ids=["both", "decode", "with-an-operation", "reconstruction"],
)
def test_blocks_have_the_keys_of_requests_that_ask_for_the_same(served: Served, fields: dict[str, Any]) -> None:
    names = {name: name if "sae" in name else name.replace("features", "steering_features") for name in fields}
    own = {names[name].replace("ops", "steering_ops"): value for name, value in fields.items()}
    asked = served.key("r", **own)

    status = served.steering.set(**fields)

    assert served.key("plain") == asked
    assert status.shared.decode.op_sites == (SITE.name,)
    assert status.slots[0].reserved > 0
    served.steering.clear()
    assert served.key("plain") is None
    assert served.steering.status().slots[0].reserved == 0


def test_keys_tell_the_content_of_the_sae(tmp_path: Path) -> None:
    found = []
    for folder, sae in (("1", None), ("2", OTHER)):
        served = Served(Opened(tmp_path / folder, sae_encode=["a"]))
        if sae is not None:
            section = {"saes": {"a": f"{sae.save(tmp_path / 'other')}@{SITE.name}"}, "sae_encode": ["a"]}
            served = Served(Opened(tmp_path / "3", **section))
        for fields in ({"features": [EDIT]}, {"sae_reconstruction": ["a"]}):
            served.steering.set(**fields, replace=True)  # type: ignore[arg-type]
            found.append(served.key("plain"))

    assert len(set(found)) == 4


def test_each_field_replaces_itself_and_an_empty_list_takes_it_back(served: Served) -> None:
    steering = served.steering
    steering.set(ops=[ABLATION], features=[EDIT], decode_sae_reconstruction=["a"])
    first = served.codes
    steering.set(decode_features=[MORE], features=[{**EDIT, "set": 1.0}])
    second = served.codes
    steering.set(features=[], decode_sae_reconstruction=[])
    third = served.codes
    steering.set(ops=[], decode_features=[])

    assert (len(first[0]), len(first[1])) == (2, 3)
    assert (len(second[0]), len(second[1])) == (2, 4)
    assert (len(third[0]), len(third[1])) == (1, 2)
    assert served.codes == ([], [])
    assert served.key("plain") is None
    steering.set({"post_mlp": {1: [1.0] * 32}}, features=[EDIT])
    assert len(served.codes[0]) == 1
    steering.set(decode_features=[MORE], replace=True)
    assert (len(served.codes[0]), len(served.codes[1])) == (0, 1)


def test_what_another_engine_core_refused_is_restored(served: Served) -> None:
    served.steering.set(ops=[ABLATION], features=[EDIT], prefill_sae_reconstruction=["a"])
    before, codes_before = served.key("plain"), served.codes

    exported = served.opened.core.call("export_global", {})
    served.steering.clear()
    served.opened.register(OTHER.save(served.opened.folder / "b"), "b")
    served.opened.core.call("set_global", {"tiers": exported, "replace": True})

    assert (served.key("plain"), served.codes) == (before, codes_before)


@pytest.mark.parametrize(
    ("document", "field", "reason"),
    [
        ({"features": [{**EDIT, "sae": "none"}]}, "features[0].sae", "unknown SAE"),
        ({"decode_features": [EDIT, {**EDIT, "feature": 12}]}, "decode_features[1].feature", "features 0 to 11"),
        ({"features": [EDIT], "prefill_features": [EDIT]}, "prefill_features[0].feature", "given twice"),
        ({"decode_features": [MORE]}, "decode_features", "in the global state, a feature of an SAE is changed twice"),
        ({"prefill_sae_reconstruction": ["a"]}, "prefill_sae_reconstruction", "rows are reconstructed twice"),
        ({"sae_reconstruction": ["b"]}, "sae_reconstruction[0]", "--sae-encode"),
        ({"features": [{**EDIT, "feature": at} for at in range(3)]}, "features", "at most 2 can be changed"),
        (
            {"decode_features": [EDIT, {**EDIT, "feature": 5}]},
            "decode_features",
            "1.post_mlp make 3 entries, at most 2",
        ),
        ({"features": "a"}, "features", "expected a non-empty list"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_changes_nothing(
    tmp_path: Path, document: dict[str, Any], field: str, reason: str
) -> None:
    served = Served(Opened(tmp_path, sae_encode=["a"], max_sae_features=2))
    served.opened.register(OTHER.save(tmp_path / "b"), "b")
    before = served.steering.set(features=[MORE], sae_reconstruction=["a"])

    with pytest.raises(RequestError) as caught:
        served.steering.set(**document)

    assert caught.value.field == field
    assert reason in str(caught.value)
    assert served.steering.status() == before


def test_features_of_transcoders_are_added_to_but_not_read(tmp_path: Path) -> None:
    served = Served(with_transcoder(tmp_path))
    add = {"sae": "t", "feature": 1, "add": 2.0}

    for edit in ({**add, "only_if_active": True}, {"sae": "t", "feature": 1, "set": 2.0}):
        with pytest.raises(RequestError, match=r"reads a feature of transcoder 't', .* belong to requests") as caught:
            served.steering.set(decode_features=[add | {"feature": 2}, edit])
        assert caught.value.field == "decode_features[1]"
    status = served.steering.set(decode_features=[add])

    assert status.shared.decode.op_sites == ("0.mlp_out", "1.mlp_out")


def test_requests_may_change_the_same_feature_and_do_so_themselves(served: Served) -> None:
    served.steering.set(features=[EDIT], sae_reconstruction=["a"])

    program = from_wire(served.opened.accept("r", steering_features=[EDIT], sae_reconstruction=["a"])).prefill_program

    assert program is not None
    assert len(program.codes) == 2
