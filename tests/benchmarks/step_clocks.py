"""Clocks inside an engine core: a plugin of vLLM's that notes what each step took; see `profile_steps`.

Loaded where `FOLDER` is set in the environment. It wraps methods of classes before there are instances, so what
headgate wraps on instances lies around it, and what of a method's time is headgate's own is the difference between the
two. Events on a GPU's stream say how long it was busy with a step, and how long it waited for the host before that.
Nothing is written while requests run. A step costs some 20 us more with it, stock's too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = "HEADGATE_STEP_CLOCKS"
PLUGIN = "step_clocks"
ENTRY_POINT = f"{PLUGIN} = tests.benchmarks.step_clocks:register"

FACTS = ("started", "mode", "new", "requests", "tokens")
PARTS = {
    "step": ("vllm.v1.engine.core", "EngineCore", ("step_with_batch_queue", "step")),
    "schedule": ("vllm.v1.core.sched.scheduler", "Scheduler", ("schedule",)),
    "update": ("vllm.v1.core.sched.scheduler", "Scheduler", ("update_from_output",)),
    "execute": ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", ("execute_model",)),
    "prepare": ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", ("prepare_inputs",)),
    "sample": ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", ("sample_tokens",)),
    "execute_v1": ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", ("execute_model",)),
    "prepare_v1": ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", ("_prepare_inputs",)),
    "sample_v1": ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", ("sample_tokens",)),
    "wait": ("vllm.v1.worker.gpu.async_utils", "AsyncOutput", ("get_output",)),
    "seam_execute": ("headgate.capture.engine.worker.runner", "RunnerAdapter", ("_execute_model",)),
    "seam_sample": ("headgate.capture.engine.worker.runner", "RunnerAdapter", ("_sample_tokens",)),
    "seam_prepare": ("headgate.capture.engine.worker.runner", "RunnerAdapter", ("_lay_out",)),
    "capture_begins": ("headgate.capture.session", "CaptureSession", ("step_begins",)),
    "capture_ends": ("headgate.capture.session", "CaptureSession", ("step_ends",)),
    "capture_adds": ("headgate.capture.session", "CaptureSession", ("request_added",)),
    "capture_finishes": ("headgate.capture.session", "CaptureSession", ("request_finished",)),
    "steering_begins": ("headgate.steering.worker.steering_part", "WorkerSteering", ("step_begins",)),
    "steering_ends": ("headgate.steering.worker.steering_part", "WorkerSteering", ("step_ends",)),
    "orders": ("headgate.steering.core.steering_core", "SteeringCore", ("orders",)),
    "takes": ("headgate.steering.core.steering_core", "SteeringCore", ("take_readings",)),
    "decides": ("headgate.steering.core.steering_core", "SteeringCore", ("decide",)),
}
"""What is timed, and where it is; methods of other vLLMs may be missing. Each contains those it calls."""
COLUMNS = (*FACTS, *PARTS, "own_cpu", "other_cpu", "gpu", "gpu_gap")
"""Of a record: seconds, but for the facts. ``own_cpu`` is the step thread's, ``other_cpu`` that of other threads.
``gpu`` is from the first kernel of the step to the end of its sampling, ``gpu_gap`` from the last step's end to it; NaN
without a GPU."""


class Clocks:
    """Notes steps. The step thread's alone.

    Args:
        folder: For the records: float64 ``[steps, len(COLUMNS)]`` in ``.npy`` files, and the modes' names beside them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records: list[list[float]] = []
        self._now = dict.fromkeys(COLUMNS, 0.0)
        self._modes = ["idle"]
        self._mode = 0
        self._events: list[tuple[Any, Any]] = []
        """On the GPU's stream, of each record: in front of its step and behind it."""
        self._begun: Any = None
        self._ended: Any = None

    def timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """`method`, and its time under `name`."""

        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            if name in ("execute", "execute_v1") and self._now["tokens"]:
                self._begun = _event()
            try:
                result = method(*args, **kwargs)
            finally:
                self._now[name] += time.perf_counter() - began
            if name in ("sample", "sample_v1") and self._now["tokens"]:
                self._ended = _event()
            if name == "schedule":
                self._scheduled(result)
            return result

        return run

    def stepping(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """`method`, a step of the engine core: a record is made of it, and all is written where it was the last."""

        @wraps(method)
        def run(core: Any, *args: Any, **kwargs: Any) -> Any:
            self._now = dict.fromkeys(COLUMNS, 0.0)
            self._begun = self._ended = None
            started, process, thread = time.perf_counter(), time.process_time(), time.thread_time()
            result = method(core, *args, **kwargs)
            own = time.thread_time() - thread
            other = time.process_time() - process - own
            self._now |= {"started": started, "step": time.perf_counter() - started, "mode": self._mode}
            self._now |= {"own_cpu": own, "other_cpu": other}
            if self._now["tokens"]:
                self._records.append(list(self._now.values()))
                self._events.append((self._begun, self._ended))
            elif self._records and not core.scheduler.has_requests():
                self._write()
            return result

        return run

    def _scheduled(self, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            params = new.sampling_params
            wire = (params.extra_args or {}).get("headgate") if params is not None else None
            specs = (wire or {}).get("capture", {}).get("specs", {})
            name = "+".join(_title(*spec) for spec in sorted(specs.items())) or _steered(wire)
            if name not in self._modes:
                self._modes.append(name)
            self._mode = self._modes.index(name)
        self._now["new"] = len(output.scheduled_new_reqs)
        self._now["requests"] = len(output.num_scheduled_tokens)
        self._now["tokens"] = output.total_num_scheduled_tokens

    def _write(self) -> None:
        stem = self._folder / f"steps-{os.getpid()}-{time.monotonic_ns()}"
        made = np.array(self._records)
        made[:, [COLUMNS.index("gpu"), COLUMNS.index("gpu_gap")]] = _gpu_seconds(self._events)
        np.save(stem.with_suffix(".npy"), made)
        stem.with_suffix(".txt").write_text("\n".join(self._modes))
        self._records, self._events = [], []


def _event() -> Any:
    """An event on the current stream; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _gpu_seconds(events: Sequence[tuple[Any, Any]]) -> list[tuple[float, float]]:
    """Of each step whose events are given: how long the GPU was busy with it, and waited before it; NaN if unknown."""
    found, earlier = [], None
    for begun, ended in events:
        if ended is not None:
            ended.synchronize()
        busy = begun.elapsed_time(ended) / 1e3 if begun is not None and ended is not None else np.nan
        gap = earlier.elapsed_time(begun) / 1e3 if begun is not None and earlier is not None else np.nan
        found.append((busy, gap))
        earlier = ended
    return found


def _steered(wire: Mapping[str, Any] | None) -> str:
    """How a request is steered, as a mode is called."""
    if not wire:
        return "idle"
    parts = wire.get("parts", {}).get("steering", {})
    if parts.get("rules"):
        return "rules " + " ".join(parts["rules"])
    return "programs" if any("program" in key for key in parts) else "steered"


def _title(consumer: str, spec: Mapping[str, Any]) -> str:
    """A consumer and the sites that a request wants, as a mode is called."""
    return f"{consumer} {sum(len(layers or (-1,)) for layers in spec['sites'].values())}"


def register() -> None:
    """Set the clocks; where a method is not, nothing is."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    clocks = Clocks(Path(folder))
    for name, (module, owner, methods) in PARTS.items():
        with suppress(ImportError):
            found = getattr(import_module(module), owner)
            for method in methods:
                original = vars(found).get(method)
                if original is not None:
                    set_it = clocks.stepping if name == "step" else lambda each, name=name: clocks.timed(name, each)
                    setattr(found, method, set_it(original))
