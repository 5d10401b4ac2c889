"""Operations in every form that a request may have give the program that they mean."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import numpy as np
import pytest

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.positions import Indices, Named
from headgate.steering import ops
from headgate.steering.documents.operations import METHOD_ALIASES, MODULE_FIELDS, read_ops
from headgate.steering.programs.codes import CODE, EVERYWHERE, GROUP
from headgate.steering.programs.lowering import lower
from headgate.steering.programs.operations import (
    Method,
    ModuleVector,
    Operation,
)
from headgate.steering.programs.program import Program
from headgate.steering.programs.wire import content_from_wire, content_to_wire
from tests.fakes.gate_forms import plain
from tests.fakes.op_fields import (
    CLAMPS,
    DECODE,
    FIRST,
    OPS,
    PREFILL,
    ROW,
    SECOND,
    SITES,
    V,
    W,
    clamp,
    clamps,
    op,
    packed_clamps,
    program,
    read,
)
from tests.fakes.programs import apply, run
from tests.fakes.vector_forms import HIDDEN, bits_of, model

FORMS = {
    "array": np.array(V, np.float32),
    "float64": np.array(V),
    "packed": {"dtype": "float32", "shape": [HIDDEN], "data": np.array(V, np.float32).tobytes()},
    "base64": {"dtype": "float64", "shape": [HIDDEN], "data": b64encode(np.array(V).tobytes()).decode()},
    "bfloat16": {"dtype": "bfloat16", "shape": [HIDDEN], "data": bits_of(V).tobytes()},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_every_form_of_a_vector_gives_the_same_program(form: Any) -> None:
    assert program(op(vector=form)) == program(op())


ALIKE = [
    (op(at="0.resid_post"), op()),
    (op(at={"hook": "post-mlp", "layers": [0]}), op()),
    (op(at={"hook": "resid_post", "layers": 0}), op()),
    (op(at=FIRST), op()),
    (op(at="final_norm"), op(at={"hook": "final_norm"})),
    (op(scale=1.0), op(strength=1)),
    (op(positions="all"), op()),
    (op(vector=[2 * value for value in V]), op()),
    (op(at={"hook": "post_mlp", "layers": {"ranges": [[0, 3]]}}), op(at=["2.post_mlp", "0.post_mlp", "1.post_mlp"])),
    (clamp(method="PROJECTION_CAP"), clamp()),
    (clamp(min=None, value=2.0), op(method="set", value=2)),
    (clamp(min=2.0, max=2.0), op(method="set", value=2)),
    (op(method="replace", mask=[1, 0, 0, 0, 0, 1]), op(method="replace", mask=[5, 0])),
    (op(method="replace", mask=np.eye(HIDDEN, dtype=bool)[2]), op(method="replace", mask=[2], strength=1)),
    (clamps({"vector": V, "min": 1.0}), clamp()),
    (clamps({"vector": V, "min": 1.0, "max": None, "strength": 0.5}), clamp(strength=0.5)),
    (clamps({"vector": V, "value": 3}), op(method="set", value=3.0)),
    ({CLAMPS: {"resid_post": {"0": [{"vector": V, "min": 1.0}]}}}, clamp()),
    ({CLAMPS: {"post_mlp": {-4: [{"vector": V, "min": 1.0}]}}}, clamp()),
    ({CLAMPS: {"final_norm": {-1: [{"vector": V, "min": 1.0}]}}}, clamp(at="final_norm")),
    (
        packed_clamps(),
        {OPS: [*clamp(min=None, max=1.0)[OPS], *clamp(vector=W, min=0.5, max=2.0, strength=0.5)[OPS]]},
    ),
    (packed_clamps(strengths=None, dtype="float64", data=np.array([V, W]).tobytes()), packed_clamps(strengths=[1, 1])),
]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_two_ways_to_say_the_same_give_the_same_program(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert program(one) == program(other)


@pytest.mark.parametrize("alias", METHOD_ALIASES)
def test_methods_have_their_names_in_other_tools(alias: str) -> None:
    keys = {"scale": 0.5, "min": 1.0, "mean": W, "target": W, "alpha": 0.5, "plane": [V, W], "degrees": 20.0}
    wanted = {
        Method.CLAMP: ("vector", "min"),
        Method.AFFINE: ("vector", "alpha"),
        Method.MEAN_ABLATE: ("vector", "mean"),
        Method.ROTATE: ("plane", "degrees"),
        Method.REPLACE: ("vector", "alpha"),
    }.get(METHOD_ALIASES[alias], ("vector", "scale"))
    document = {key: {"vector": V, **keys}[key] for key in wanted}

    def named(name: str) -> Program:
        return program({OPS: [{"at": "0.post_mlp", "method": name, **document}]})

    assert named(alias.upper().replace("_", "-")) == named(METHOD_ALIASES[alias].value)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {OPS: None, CLAMPS: None, "steering_vectors": {}},
        op(scale=0),
        op(method="additive", vector=[0.0] * HIDDEN, scale=0),
        op(method="orthogonal", scale=1),
        clamp(strength=0),
        op(method="norm_scaled_add", scale=0),
        op(method="replace", alpha=0),
    ],
)
def test_what_changes_nothing_is_nothing(fields: dict[str, Any]) -> None:
    assert read(fields) is None


def test_a_phase_has_the_base_first_then_its_own_and_clamps_behind_operations() -> None:
    fields = {
        OPS: op(method="additive")[OPS],
        PREFILL: op(vector=W)[OPS],
        CLAMPS: clamps({"vector": W, "max": 0.5})[CLAMPS],
    }
    found = read(fields)
    assert found is not None
    assert isinstance(found.prefill, Program)
    assert isinstance(found.decode, Program)
    added = {"method": "additive", "vector": V, "scale": 1}
    capped = {"method": "clamp", "vector": W, "min": None, "max": 0.5, "strength": 1}
    decoded = apply(capped, apply(added, ROW))

    np.testing.assert_allclose(run(found.decode, FIRST, ROW), decoded, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        run(found.prefill, FIRST, ROW),
        apply({"method": "ablate", "vector": W, "scale": 1}, decoded),
        rtol=1e-5,
        atol=1e-6,
    )


def test_phases_that_are_alike_are_one_object() -> None:
    found = read(op())

    assert found is not None
    assert found.prefill is found.decode


def test_a_field_of_one_phase_leaves_the_other_alone() -> None:
    found = read({DECODE: op()[OPS]})

    assert found is not None
    assert found.prefill is None
    assert isinstance(found.decode, Program)


def test_one_direction_at_many_sites_and_in_many_methods_is_one_row() -> None:
    at = [site.name for site in SITES]
    documents = [{"at": at, "method": "ablate", "vector": V}, {"at": at, "method": "additive", "vector": V}]

    assert program({OPS: [*documents, *clamp(vector=np.array(V) * 4)[OPS]]}).num_rows == 1


def test_equal_selectors_of_positions_are_one_group() -> None:
    documents = [op(positions=positions)[OPS][0] for positions in ([-1], None, [-1], "last_prompt", "all")]

    found = program({OPS: documents})

    assert found.groups == (Indices.of([-1]), Named("last_prompt"))
    assert found.codes[:, GROUP].tolist() == [1, EVERYWHERE, 1, 2, EVERYWHERE]


def test_an_operation_with_positions_acts_on_the_rows_of_its_group() -> None:
    found = program(op(positions=[-1]))

    assert (run(found, FIRST, ROW) == ROW).all()
    assert (run(found, FIRST, ROW, frozenset({1})) != ROW).any()


def test_fields_of_modules_have_short_names() -> None:
    document = {"ops": op()[OPS], "decode_clamps": clamps({"vector": V, "min": 1})[CLAMPS], "name": "x"}

    found = read_ops(document, model(), SITES, 8, MODULE_FIELDS)

    assert found is not None
    assert isinstance(found.prefill, Program)
    assert isinstance(found.decode, Program)
    assert len(found.prefill.codes) == 1
    assert len(found.decode.codes) == 2


def referring() -> tuple[Operation, ...]:
    documents = [
        op(at=["0.post_mlp", "1.post_mlp"], vector="axis", positions=[3], preserve_norm=True)[OPS][0],
        op(method="swap", target={"module": "other", "site": "2.pre_attn"})[OPS][0],
        op(method="rotate", vector=None, plane=["axis", V], degrees=30, only_if_positive=True)[OPS][0],
        op(method="replace", mask=[2], at="1.post_mlp")[OPS][0],
    ]
    found = read({OPS: documents})
    assert found is not None
    assert isinstance(found.prefill, tuple)
    assert found.modules == {"axis": f"{OPS}[0].vector", "other": f"{OPS}[1].target"}
    return found.prefill


def test_operations_that_name_modules_are_lowered_where_modules_are_known() -> None:
    vectors = {
        ModuleVector("axis", FIRST): np.array(W, np.float32),
        ModuleVector("axis", SECOND): np.array(V[::-1], np.float32),
        ModuleVector("other", SITES[3]): np.array([1, 1, 0, 0, 0, 1], np.float32),
    }
    named = lower(referring(), "float32", lambda module, site: vectors.get(ModuleVector(module, site)))
    given = program(
        {
            OPS: [
                op(vector=W, positions=[3], preserve_norm=True)[OPS][0],
                op(vector=V[::-1], positions=[3], preserve_norm=True, at="1.post_mlp")[OPS][0],
                op(method="swap", target=[1, 1, 0, 0, 0, 1])[OPS][0],
                op(method="rotate", vector=None, plane=[W, V], degrees=30, only_if_positive=True)[OPS][0],
                op(method="replace", mask=[2], at="1.post_mlp")[OPS][0],
            ]
        }
    )

    assert named == given


def test_a_module_without_a_vector_at_the_site_is_refused() -> None:
    with pytest.raises(RequestError, match=r"steering_ops\[0\].vector: module 'axis' has no vector at 0.post_mlp"):
        lower(referring(), "float32", lambda module, site: None)


def test_operations_travel_with_shared_vectors_once() -> None:
    operations = referring()
    wire = content_to_wire(operations)
    vectors = {name: np.array(W, np.float32) for name in ("axis", "other")}

    again = content_from_wire(tuple[Operation, ...], wire)

    assert plain(again) == plain(operations)
    assert len(wire["arrays"]) == 2  # the vector, and the mask of another operation
    assert lower(again, "float32", lambda module, _: vectors[module]) == lower(
        operations, "float32", lambda module, _: vectors[module]
    )


@pytest.mark.parametrize("positions", ["all_prompt", {"start": -3, "step": 2}, [0, -1]], ids=str)
def test_every_form_of_positions_travels(positions: Any) -> None:
    found = read({OPS: [op(vector="axis", positions=positions)[OPS][0]]})
    assert found is not None
    assert isinstance(found.prefill, tuple)

    (again,) = content_from_wire(tuple[Operation, ...], content_to_wire(found.prefill))

    assert again.positions == found.prefill[0].positions


def test_the_functions_of_ops_make_documents_that_are_read() -> None:
    made = [
        ops.additive(V, "0.post_mlp", 2.0),
        ops.ablate(V, FIRST, positions=[-1], preserve_norm=True),
        ops.orthogonal(V, [FIRST, "1.post_mlp"], 0.5),
        ops.clamp(V, {"hook": "post_mlp", "layers": [0]}, min=1.0, max=2.0, strength=0.5),
        ops.set_projection(V, "0.post_mlp", 3.0),
        ops.swap(V, W, "0.post_mlp"),
        ops.affine(V, "0.post_mlp", reference=W, alpha=0.5),
        ops.mean_ablate(V, W, "0.post_mlp"),
        ops.norm_scaled_add(V, "1.post_mlp", 0.3, max_ratio=0.2),
        ops.rotate(V, W, "1.post_mlp", 90, only_if_positive=True),
        ops.replace(V, "1.post_mlp", 0.5, mask=[1]),
    ]

    found = program({OPS: made})

    assert {document["method"] for document in made} == set(Method)
    assert len(found.codes) == len(made) + 2  # one more site, and a mean that is added
    assert made[0] == {"at": "0.post_mlp", "method": "additive", "vector": V, "scale": 2.0}
    assert found.codes[:, CODE].all()
