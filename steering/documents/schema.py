"""The OpenAPI schema of a document, from the class that says what the document has.

A class is a msgspec Struct, a dataclass or a TypedDict. Its annotations give the types; the section ``Attributes`` of
its docstring gives the descriptions.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

Schema = dict[str, Any]

Count = Annotated[int, Meta(ge=0)]
Amount = Annotated[float, Meta(ge=0)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]

_ATTRIBUTE = re.compile(r"^\s+(\w+): ((?:.+\n?)(?:^\s{12,}\S.*\n?)*)", re.MULTILINE)
_TYPES: dict[type, str] = {str: "string", int: "integer"}


def schema_of(kind: Any, *, is_answer: bool = False) -> Schema:
    """Return the schema of a type, without references to others.

    Args:
        kind: A class or another type that msgspec knows.
        is_answer: Whether the server writes it: then each object has all its fields.
    """
    (schema,), parts = msgspec.json.schema_components([kind], ref_template="{name}")
    made: Schema = _complete(schema, parts, is_answer)
    return made


def one_of(*kinds: Any) -> Meta:
    """Return what annotates a field that has one of several types, where msgspec cannot distinguish them."""
    return Meta(extra_json_schema={"anyOf": [schema_of(kind) for kind in kinds]})


def has(**fields: Any) -> Meta:
    """Return what annotates a mapping with exactly these keys."""
    return Meta(extra_json_schema=object_of(**fields))


def object_of(*schemas: Schema, **fields: Any) -> Schema:
    """Return the schema of an object with the fields of other objects, and required fields of its own."""
    properties = {name: field if isinstance(field, dict) else schema_of(field) for name, field in fields.items()}
    required = [*fields, *(name for schema in schemas for name in schema.get("required", ()))]
    for schema in schemas:
        properties.update(schema["properties"])
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": required} if required else schema


def _complete(schema: Any, parts: Schema, is_answer: bool) -> Any:
    """Put parts in the places of references, and descriptions to fields."""
    if isinstance(schema, list):
        return [_complete(each, parts, is_answer) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        described = {key: value for key, value in schema.items() if key != "$ref"}
        return {**_complete(parts[schema["$ref"]], parts, is_answer), **described}
    made = {key: _complete(value, parts, is_answer) for key, value in schema.items() if key not in ("title", "default")}
    options = made.get("anyOf", ())
    others = [option for option in options if option != {"type": "null"}]  # msgspec 0.20 has it before the others
    if len(options) == 2 and len(others) == 1 and "type" in others[0] and "enum" not in others[0]:
        del made["anyOf"]
        made = {**made, **others[0], "type": [others[0]["type"], "null"]}
    elif options:
        made["anyOf"] = others + [{"type": "null"}] * (len(options) - len(others))
    if "enum" in made and "type" not in made:
        made["type"] = _TYPES[type(made["enum"][0])]
    if schema.get("default") is not None:
        made["default"] = schema["default"]
    if "properties" in made:
        about, _, listed = made.pop("description", "").partition("Attributes:")
        for name, text in _ATTRIBUTE.findall(listed):
            if name in made["properties"]:
                made["properties"][name].setdefault("description", " ".join(text.split()))
        required = list(made["properties"]) if is_answer else made.pop("required", [])
        made |= {"description": about.strip(), "additionalProperties": False}
        made |= {"required": required} if required else {}
    return made
