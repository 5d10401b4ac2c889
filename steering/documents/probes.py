"""The body that registers a probe, read into a `Probe`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from headgate.capture.probe import MAX_CLASSES, MAX_UNITS, POOLINGS, FloatArray, HiddenLayer, Probe, ProbeError
from headgate.capture.schema.errors import RequestError, check_keys, shown
from headgate.steering.documents.operations import read_site
from headgate.steering.documents.schema import Name, one_of
from headgate.steering.documents.vectors import PackedVector, check_scale, packed_rows, packed_type, read_single
from headgate.steering.vectors.dtypes import StoredType, widen
from headgate.steering.vectors.phase_vectors import Steerable

Numbers = list[float]
Weights = Annotated[Any, one_of(Numbers, list[Annotated[Any, one_of(Numbers, PackedVector)]], PackedVector)]
Pooling = Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(POOLINGS)})]


class HiddenDocument(msgspec.Struct, forbid_unknown_fields=True):
    """The first layer of an MLP.

    Attributes:
        weight: A row of the hidden size for each unit.
        bias: A number for each unit.
    """

    weight: Weights
    bias: Numbers
    activation: Literal["relu", "gelu", "silu"]


class ProbeDocument(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A probe.

    Attributes:
        at: A site where operations can act, such as 12.post_mlp.
        weight: One row of the hidden size, or one for each class; of an MLP a value for each of its units.
        threshold: Of the score, for a probe of one row.
        classes: A name for each row.
        pooling: The rows that it was made for; gates choose for themselves.
        hidden: The first layer of an MLP.
    """

    name: Name
    at: str
    weight: Weights
    bias: Annotated[Any, one_of(float, Numbers, None)] = None
    kind: Literal["linear", "cosine", "mlp"] | None = "linear"
    threshold: float | None = None
    classes: list[Name] | None = None
    pooling: Pooling | None = "token"
    model: Name | None = None
    hidden: HiddenDocument | None = None


ProbeSource = Probe | str | os.PathLike[str] | Mapping[str, Any]
"""A probe, a file of one, or a document of its fields."""

PROBE_FIELDS = ProbeDocument.__struct_fields__[1:]
_HIDDEN_FIELDS = HiddenDocument.__struct_fields__


def read_probe(document: Mapping[str, Any], steerable: Steerable) -> Probe:
    """Read a document with the keys `PROBE_FIELDS`; a None counts as an absent key.

    Args:
        document: ``weight`` is one vector, or a list of them, one for each class: lists, arrays, tensors, or packed as
            ``{"dtype", "shape": [hidden] or [classes, hidden], "data"}``; ``bias`` a number, or a list of them. An MLP
            has ``hidden``: ``{"weight": units of hidden values, "bias", "activation"}``; its ``weight`` has a value for
            each unit.
        steerable: The model.

    Raises:
        RequestError: Naming the field that is wrong.
    """
    given = {name: value for name, value in document.items() if value is not None}
    check_keys(given, PROBE_FIELDS, "", "a probe")
    for name in ("at", "weight"):
        if name not in given:
            raise RequestError(name, "is missing")
    site = read_site(given.pop("at"), "at")
    hidden = steerable.width(site)
    layer = _hidden(given.pop("hidden"), hidden) if "hidden" in given else None
    weight = _weight(given.pop("weight"), hidden if layer is None else len(layer.weight))
    if "bias" in given:
        given["bias"] = _bias(given["bias"], len(weight))
    if "classes" in given:
        given["classes"] = _classes(given["classes"])
    elif len(weight) > 1:
        given["classes"] = tuple(f"class{index}" for index in range(len(weight)))
    if "threshold" in given:
        given["threshold"] = check_scale(given["threshold"], "threshold")
    try:
        return Probe(site=site, weight=weight, hidden=layer, **given)
    except ProbeError as error:
        raise RequestError(error.field or "weight", error.message) from error


def probe_document(probe: Probe) -> dict[str, Any]:
    """Return the fields that `read_probe` reads back; metadata is not among them."""
    layer = probe.hidden
    made = {
        "at": probe.site.name,
        "weight": probe.weight,
        "bias": probe.biases.tolist(),
        "kind": probe.kind.value,
        "threshold": probe.threshold,
        "classes": list(probe.classes),
        "pooling": probe.pooling,
        "model": probe.model,
    }
    if layer is not None:
        made["hidden"] = {
            "weight": layer.weight,
            "bias": layer.bias.tolist(),
            "activation": layer.activation.value,
        }
    return made


def _hidden(value: Any, hidden: int) -> HiddenLayer:
    if not isinstance(value, Mapping) or set(value) != set(_HIDDEN_FIELDS):
        raise RequestError("hidden", f"expected an object with {', '.join(_HIDDEN_FIELDS)}; got {shown(value)}")
    weight = _weight(value["weight"], hidden, "hidden.weight", MAX_UNITS)
    bias = _bias(value["bias"], len(weight), "hidden.bias")
    try:
        return HiddenLayer(weight=weight, bias=np.array(bias), activation=value["activation"])
    except ProbeError as error:
        raise RequestError(error.field or "hidden", error.message) from error


def _weight(value: Any, hidden: int, field: str = "weight", most: int = MAX_CLASSES) -> FloatArray:
    if isinstance(value, Mapping) and isinstance(value.get("shape"), list | tuple) and len(value["shape"]) == 2:
        return _packed(value, hidden, field, most)
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    is_array = is_tensor or isinstance(value, np.ndarray)
    has_rows = value.ndim == 2 if is_array else isinstance(value, list | tuple) and bool(value) and _is_row(value[0])
    if not has_rows:
        return read_single(value, hidden, field)[None]
    _check_count(len(value), field, most)
    return np.stack([read_single(row, hidden, f"{field}[{index}]") for index, row in enumerate(value)])


def _is_row(value: Any) -> bool:
    return isinstance(value, list | tuple | Mapping) or (hasattr(value, "shape") and len(value.shape) > 0)


def _packed(value: Mapping[Any, Any], hidden: int, field: str, most: int) -> FloatArray:
    if set(value) != {"dtype", "shape", "data"}:
        raise RequestError(field, f"expected the keys 'dtype', 'shape' and 'data', got {shown(list(value))}")
    dtype = packed_type(value["dtype"], f"{field}.dtype")
    count, width = value["shape"]
    if not isinstance(count, int) or isinstance(count, bool) or width != hidden or count < 1:
        raise RequestError(
            f"{field}.shape",
            f"expected [{'classes' if field == 'weight' else 'units'}, {hidden}]; got {shown(value['shape'])}",
        )
    _check_count(count, field, most)
    stored: StoredType = "float32" if dtype == "float64" else dtype  # type: ignore[assignment]
    rows = widen(packed_rows(value["data"], dtype, count, hidden, f"{field}.data"), stored)
    if not np.isfinite(rows).all():
        wrong = [int(index) for index in np.argwhere(~np.isfinite(rows))[0]]
        raise RequestError(field, f"the value at {wrong} is not finite in float32")
    return rows


def _check_count(count: int, field: str, most: int) -> None:
    if count > most:
        each = "class" if field == "weight" else "unit"
        raise RequestError(field, f"expected at most {most} rows, one for each {each}; got {count}")


def _bias(value: Any, num_classes: int, field: str = "bias") -> list[float]:
    if hasattr(value, "tolist"):
        value = value.tolist()
    listed = value if isinstance(value, list | tuple) else [value]
    if len(listed) != num_classes:
        raise RequestError(field, f"expected {num_classes} numbers, one for each row of weight; got {len(listed)}")
    where = field if listed is not value else field + "[{}]"
    return [check_scale(each, where.format(index)) for index, each in enumerate(listed)]


def _classes(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise RequestError("classes", f"expected a list of names, got {shown(value)}")
    return tuple(value)
