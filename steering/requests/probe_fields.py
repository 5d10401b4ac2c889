"""The body that registers a probe, read into a `Probe`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from headgate.capture.probes.probe import MAX_CLASSES, FloatArray, Probe, ProbeError, ProbeKind
from headgate.capture.schema.errors import RequestError, shown
from headgate.steering.probes.wire import check_kind
from headgate.steering.requests.op_documents import read_site
from headgate.steering.requests.vector_forms import check_scale, packed_rows, packed_type, read_single
from headgate.steering.vectors.dtypes import StoredType, widen

PROBE_FIELDS = ("at", "weight", "bias", "kind", "threshold", "classes", "pooling", "model")


def read_probe(document: Mapping[str, Any], hidden: int) -> Probe:
    """Read a document with the keys `PROBE_FIELDS`; those that are None are as if they were not there.

    Args:
        document: ``weight`` is one vector, or a list of them, one for each class: lists, arrays, tensors, or packed as
            ``{"dtype", "shape": [hidden] or [classes, hidden], "data"}``; ``bias`` a number, or a list of them.
        hidden: The model's hidden size.

    Raises:
        RequestError: Naming the field that is wrong.
    """
    given = {name: value for name, value in document.items() if value is not None}
    for name in given:
        if name not in PROBE_FIELDS:
            raise RequestError(shown(name)[1:-1], f"is no field of a probe; it has {', '.join(PROBE_FIELDS)}")
    for name in ("at", "weight"):
        if name not in given:
            raise RequestError(name, "is missing")
    site = read_site(given.pop("at"), "at")
    weight = _weight(given.pop("weight"), hidden)
    if "bias" in given:
        given["bias"] = _bias(given["bias"], len(weight))
    if "classes" in given:
        given["classes"] = _classes(given["classes"])
    elif len(weight) > 1:
        given["classes"] = tuple(f"class{index}" for index in range(len(weight)))
    if "threshold" in given:
        given["threshold"] = check_scale(given["threshold"], "threshold")
    try:
        if given.get("kind") == ProbeKind.MLP.value:
            check_kind(ProbeKind.MLP)
        return Probe(site=site, weight=weight, **given)
    except ProbeError as error:
        raise RequestError(error.field or "weight", error.message) from error


def probe_document(probe: Probe) -> dict[str, Any]:
    """Return the fields that `read_probe` reads back; metadata is not among them.

    Raises:
        ProbeError: If it is an MLP.
    """
    check_kind(probe.kind)
    return {
        "at": probe.site.name,
        "weight": probe.weight,
        "bias": probe.biases.tolist(),
        "kind": probe.kind.value,
        "threshold": probe.threshold,
        "classes": list(probe.classes),
        "pooling": probe.pooling,
        "model": probe.model,
    }


def _weight(value: Any, hidden: int) -> FloatArray:
    if isinstance(value, Mapping) and isinstance(value.get("shape"), list | tuple) and len(value["shape"]) == 2:
        return _packed(value, hidden)
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    is_array = is_tensor or isinstance(value, np.ndarray)
    has_rows = value.ndim == 2 if is_array else isinstance(value, list | tuple) and bool(value) and _is_row(value[0])
    if not has_rows:
        return read_single(value, hidden, "weight")[None]
    _check_count(len(value))
    return np.stack([read_single(row, hidden, f"weight[{index}]") for index, row in enumerate(value)])


def _is_row(value: Any) -> bool:
    return isinstance(value, list | tuple | Mapping) or (hasattr(value, "shape") and len(value.shape) > 0)


def _packed(value: Mapping[Any, Any], hidden: int) -> FloatArray:
    if set(value) != {"dtype", "shape", "data"}:
        raise RequestError("weight", f"expected the keys 'dtype', 'shape' and 'data', got {shown(list(value))}")
    dtype = packed_type(value["dtype"], "weight.dtype")
    count, width = value["shape"]
    if not isinstance(count, int) or isinstance(count, bool) or width != hidden or count < 1:
        raise RequestError(
            "weight.shape", f"expected [classes, {hidden}], the hidden size; got {shown(value['shape'])}"
        )
    _check_count(count)
    stored: StoredType = "float32" if dtype == "float64" else dtype  # type: ignore[assignment]
    rows = widen(packed_rows(value["data"], dtype, count, hidden, "weight.data"), stored)
    if not np.isfinite(rows).all():
        wrong = [int(index) for index in np.argwhere(~np.isfinite(rows))[0]]
        raise RequestError("weight", f"the value at {wrong} is not finite in float32")
    return rows


def _check_count(count: int) -> None:
    if count > MAX_CLASSES:
        raise RequestError("weight", f"expected at most {MAX_CLASSES} rows, one for each class; got {count}")


def _bias(value: Any, num_classes: int) -> list[float]:
    if hasattr(value, "tolist"):
        value = value.tolist()
    listed = value if isinstance(value, list | tuple) else [value]
    if len(listed) != num_classes:
        raise RequestError("bias", f"expected {num_classes} numbers, one for each row of weight; got {len(listed)}")
    where = "bias" if listed is not value else "bias[{}]"
    return [check_scale(each, where.format(index)) for index, each in enumerate(listed)]


def _classes(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise RequestError("classes", f"expected a list of names, got {shown(value)}")
    return tuple(value)
