"""The schema of a document has what its class says: types, limits, required fields, and descriptions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import pytest

from headgate.steering.documents import features, gates, operations, probes, vectors
from headgate.steering.documents.schema import Count, object_of, one_of, schema_of


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    """A part.

    Attributes:
        size: How large it is,
            in rows.
    """

    size: Count
    kind: Literal["a", "b"] = "a"


@dataclass
class Outer:
    """The whole."""

    part: Inner | None
    either: Annotated[Any, one_of(str, Inner)] = None


INNER = {
    "type": "object",
    "description": "A part.",
    "properties": {
        "size": {"type": "integer", "minimum": 0, "description": "How large it is, in rows."},
        "kind": {"type": "string", "enum": ["a", "b"], "default": "a"},
    },
    "additionalProperties": False,
    "required": ["size"],
}


def test_a_schema_has_no_references() -> None:
    found = schema_of(Outer)

    assert found["properties"]["part"] == {**INNER, "type": ["object", "null"]}
    assert found["properties"]["either"] == {"anyOf": [{"type": "string"}, INNER]}
    assert found["required"] == ["part"]


def test_an_answer_has_all_its_fields() -> None:
    found = schema_of(Outer, is_answer=True)

    assert found["required"] == ["part", "either"]
    assert found["properties"]["part"]["required"] == ["size", "kind"]


def test_fields_are_added_to_objects() -> None:
    found = object_of(schema_of(Inner), status=str)

    assert list(found["properties"]) == ["status", "size", "kind"]
    assert found["required"] == ["status", "size"]


@pytest.mark.parametrize(
    "document",
    [
        *(vectors.PackedRows, vectors.PackedVector, operations.OperationDocument, operations.SourceDocument),
        *(features.EditDocument, gates.RuleDocument, probes.ProbeDocument, probes.HiddenDocument),
    ],
)
def test_every_described_field_is_one_of_the_document(document: Any) -> None:
    described = document.__doc__.partition("Attributes:")[2].splitlines()
    names = {line.strip().partition(":")[0] for line in described if line.startswith(" " * 8) and line[8] != " "}

    assert names <= set(document.__struct_fields__)


def test_the_keys_of_every_method_are_keys_of_an_operation() -> None:
    taken = {key for keys in operations._KEYS.values() for key in keys} | set(operations._COMMON)

    assert taken | {"strength"} == set(operations.OperationDocument.__struct_fields__)
