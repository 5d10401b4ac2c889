"""Host cost of one steered request: ``python tests/benchmarks/bench_steering_host.py``. Needs no torch; takes seconds.

34 layers x 3 hook points x 2560 (Gemma-3-4B), every site. *read* validates, sums, packs and makes the key; *wire* is
what follows up to the engine: encode and decode with msgpack, and the vectors as views. Median of `RUNS` runs each.
The request of a named module does not know the module's hook points, so its cost cannot depend on them. Lists come as
Python floats here: reading them out of the JSON text is extra, about 28 ms for one hook point.

The articles' figures for this shape, on their machines: 1.9 ms for the hash alone, 15.6 ms a request for the whole
submission in one process, 31 ms with the engine in a process of its own.
"""

from __future__ import annotations

import platform
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from headgate.capture.schema.sites import HookPoint
from headgate.steering.config import SteeringConfig
from headgate.steering.documents.request import BASE, DECODE, PREFILL, read_steering
from headgate.steering.spec import from_wire, to_wire

LAYERS, HIDDEN, RUNS = 34, 2560, 41
HOOKS = (HookPoint.PRE_ATTN, HookPoint.POST_ATTN, HookPoint.POST_MLP)
STEERABLE = SteeringConfig().steerable(num_layers=LAYERS, hidden_size=HIDDEN, dtype="bfloat16")


def nested(rows: Any, form: Callable[[Any], Any]) -> dict[str, Any]:
    return {hook.value: {n: form(rows[i, n]) for n in range(LAYERS)} for i, hook in enumerate(HOOKS)}


def packed(rows: Any, dtype: str, form: Callable[[bytes], Any] = bytes) -> dict[str, Any]:
    head = {"dtype": dtype, "shape": [LAYERS, HIDDEN], "layer_indices": list(range(LAYERS))}
    return {hook.value: {**head, "data": form(rows[i].tobytes())} for i, hook in enumerate(HOOKS)}


def text(data: bytes) -> str:
    return b64encode(data).decode()


def cases() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Requests by name, the JSON list form first."""
    rows = np.random.default_rng(0).standard_normal((len(HOOKS), LAYERS, HIDDEN)).astype(np.float32)
    bits, halves = (rows.view(np.uint32) >> 16).astype(np.uint16), rows.astype(np.float16)
    yield "lists of floats", {BASE: nested(rows, lambda row: row.astype(float).tolist())}
    yield "arrays float32", {BASE: nested(rows, np.array)}
    yield "arrays float16", {BASE: nested(halves, np.array)}
    yield "arrays float32 with scales", {BASE: nested(rows, lambda row: {"vector": row, "scale": 2.5})}
    yield "packed bytes float32", {BASE: packed(rows, "float32")}
    yield "packed bytes bfloat16", {BASE: packed(bits, "bfloat16")}
    yield "packed base64 float32", {BASE: packed(rows, "float32", text)}
    yield "packed base64 bfloat16", {BASE: packed(bits, "bfloat16", text)}
    yield "prefill and decode, bfloat16", {PREFILL: packed(bits, "bfloat16"), DECODE: packed(bits[::-1], "bfloat16")}
    yield "named module", {"steering_module_ref": ("calm", 2.0)}


def milliseconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e3


def travel(wire: dict[str, Any]) -> object:
    return from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(wire)))


def main() -> None:
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}")
    print(f"{'':32}{'read ms':>9}{'wire ms':>9}{'sum ms':>9}{'of lists':>9}{'KB':>8}")
    lists = None
    for name, fields in cases():
        spec = read_steering(fields, STEERABLE)
        if spec is None:
            raise SystemExit(f"{name}: reads as no steering")
        wire = to_wire(spec)
        size = len(msgspec.msgpack.encode(wire)) / 1e3
        read = milliseconds(lambda fields=fields: read_steering(fields, STEERABLE))  # type: ignore[misc]
        sent = milliseconds(lambda spec=spec: travel(to_wire(spec)))  # type: ignore[misc]
        lists = lists or read + sent
        print(f"{name:32}{read:9.3f}{sent:9.3f}{read + sent:9.3f}{(read + sent) / lists:9.1%}{size:8.1f}")


if __name__ == "__main__":
    main()
