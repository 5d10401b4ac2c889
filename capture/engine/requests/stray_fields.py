"""Fields that are headgate's by their names and would act on nothing: each is refused, whoever wrote it.

A name is headgate's if it begins like its fields do, or is a field of an installed part. Values that say nothing
(null, and the default of a field) are as good as absent: some clients send every field that they know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from headgate.capture.engine.contracts.plain_values import Document
from headgate.capture.engine.contracts.vllm_frontend import SamplingParams
from headgate.capture.engine.contracts.wire_format import CAPTURE
from headgate.capture.engine.requests.sampling_params import (
    RETURN_HIDDEN_STATES,
    all_fields,
    is_plain,
    nested_names,
    none_if_default,
)
from headgate.capture.schema.errors import RequestError

PREFIXES = (
    *("steering", "prefill_steering", "decode_steering", "sae_", "prefill_sae_", "decode_sae_"),
    *(CAPTURE, RETURN_HIDDEN_STATES, "return_steering"),
)
EXTRA_ARGS, SAMPLING_PARAMS, VLLM_XARGS = "extra_args", "sampling_params", "vllm_xargs"
_CONTAINERS = (VLLM_XARGS, EXTRA_ARGS, SAMPLING_PARAMS)


def is_ours(name: object) -> bool:
    """Whether a field of this name can only be meant for headgate."""
    return isinstance(name, str) and (name.startswith(PREFIXES) or name in all_fields())


def is_of_interest(name: object) -> bool:
    """Whether `find_ignored` looks at the value of a field of this name."""
    return name in _CONTAINERS or is_ours(name)


def find_ignored(document: Document, where: str = "", *, reads_extra_args: bool = False) -> str | None:
    """Return the path of the first field of headgate's in a body that a route would ignore; None if there is none.

    Args:
        document: The body, or the part of it that its route does not know.
        where: What the path begins with.
        reads_extra_args: The route passes ``sampling_params.extra_args`` on to the engine, which reads them.
    """
    for name, value in document.items():
        if name in _CONTAINERS:
            inner = {} if reads_extra_args and where and name == EXTRA_ARGS else _object_of(value)
            found = find_ignored(inner, f"{where}{name}.", reads_extra_args=reads_extra_args)
            if found is not None:
                return found
        elif is_ours(name) and none_if_default(name, value) is not None:
            return f"{where}{name}"
    return None


def _object_of(value: object) -> Document:
    """The value of a field as an object: forms hold one as JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {}
    return value if isinstance(value, Mapping) else {}


def refuse_unknown(values: Document, where: str = "") -> None:
    """Refuse names that begin like headgate's fields and are none, where its fields are read.

    A name that is read within a field of headgate's is refused beside that field.

    Args:
        values: The values by name; other names are left alone.
        where: What the path of a field begins with.

    Raises:
        RequestError: Naming the first of them.
    """
    for name, value in values.items():
        if value is not None and isinstance(name, str) and name.startswith(PREFIXES) and name not in all_fields():
            raise RequestError(f"{where}{name}", f"headgate has no such field; it has {', '.join(all_fields())}")
    _refuse_beside(values, where)


def _refuse_beside(values: Document, where: str = "") -> None:
    """Refuse names that stand beside the field within which they are read."""
    for name, fields in nested_names().items():
        if values.get(name) is None:
            continue
        for field in fields:
            if values.get(field) is not None:
                raise RequestError(f"{where}{name}", f"is read within {field} alone: give it there")


def refuse_unknown_in(params: SamplingParams | None) -> None:
    """Do so for ``extra_args`` and the attributes of a `SamplingParams`.

    Raises:
        RequestError: Naming the first of them.
    """
    if params is not None and not is_plain(params):
        refuse_unknown(params.extra_args or {}, f"{EXTRA_ARGS}.")
        refuse_unknown(vars(params))
        _refuse_beside({**vars(params), **(params.extra_args or {})})


def refuse_ignored(document: Document, why: str) -> None:
    """Refuse every field of headgate's.

    Raises:
        RequestError: Naming the first of them, with the reason.
    """
    field = find_ignored(document)
    if field is not None:
        raise RequestError(field, why)
