"""A real engine core and scheduler in this process, over `steering_worker`, driven one step at a time."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headgate.capture.engine.contracts.wire_format import OVERLOADED
from headgate.capture.engine.core.engine_core import CORE_ADAPTER
from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.spec import ModuleRef, SteeringSpec, to_wire
from headgate.steering.vectors.phase_vectors import PhaseVectors
from tests.frontend.conftest import ENGINE

WORKER = "tests.fakes.steering_worker.SteeringWorker"
BLOCK = 32
PART = "steering"
FIELDS = ("request_id", "prompt_token_ids", "sampling_params", "priority", "resumable")
NOTHING = SteeringSpec()


def vectors(hidden_size: int, *layers: int, value: float = 1.0) -> PhaseVectors:
    """A vector at ``post_mlp`` of each layer; others for other values."""
    row = value + np.arange(hidden_size, dtype=np.float32) / hidden_size
    made = PhaseVectors.from_rows({Site(layer, HookPoint.POST_MLP): row for layer in layers})
    assert made is not None
    return made


def naming(*refs: tuple[str, float]) -> SteeringSpec:
    return SteeringSpec(modules=tuple(ModuleRef(name, scale) for name, scale in refs))


def engine_config(model_dir: Path, *, asynchronous: bool = False, steering: Any = None, **settings: Any) -> Any:
    """A `VllmConfig` that steers, its worker in this process; `steering` are settings of that section."""
    from vllm.engine.arg_utils import EngineArgs

    from headgate.capture.engine.plugin import register

    register()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    arguments = {**ENGINE, "worker_cls": WORKER, "model": str(model_dir), **settings}
    section = {PART: {"max_steering_slots": 9, **(steering or {})}}
    config = EngineArgs(additional_config={"headgate": section}, **arguments).create_engine_config()
    config.scheduler_config.async_scheduling = asynchronous  # the CPU platform turns it off; the worker can do it
    return config


def engine_request(
    req_id: str,
    prompt: Sequence[int],
    spec: SteeringSpec = NOTHING,
    *,
    script: Sequence[int] = (),
    max_tokens: int = 1,
    priority: int = 0,
    **more: Any,
) -> Any:
    """Return the request that a front end sends to an engine core."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    extra: dict[str, Any] = {"script": list(script)}
    if wire := to_wire(spec):
        extra["headgate"] = {"v": 1, "parts": {PART: wire}}
    return EngineCoreRequest(
        request_id=req_id,
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        priority=priority,
        **more,
    )


class Core:
    """An engine core.

    Attributes:
        tokens: What each request generated so far.
        ended: Why each request ended, in the order of their ends.
        stop_reasons: Of those that ended.
    """

    def __init__(self, model_dir: Path, **settings: Any) -> None:
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor

        config = engine_config(model_dir, **settings)
        self.hidden_size = config.model_config.get_hidden_size()
        self.core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self.scheduler = self.core.scheduler
        self.worker = self.core.model_executor.driver_worker.worker
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.stop_reasons: dict[str, Any] = {}

    def close(self) -> None:
        self.core.shutdown()
        gc.collect()

    def vectors(self, *layers: int, value: float = 1.0) -> PhaseVectors:
        return vectors(self.hidden_size, *layers, value=value)

    def both(self, *layers: int, value: float = 1.0) -> SteeringSpec:
        made = self.vectors(*layers, value=value)
        return SteeringSpec(prefill=made, decode=made)

    def preprocess(self, request: Any) -> Any:
        """The input thread's half of taking a request in."""
        made, _ = self.core.preprocess_add_request(request)
        return made

    def add(self, req_id: str, prompt: Sequence[int], spec: SteeringSpec = NOTHING, **more: Any) -> Any:
        made = self.preprocess(engine_request(req_id, prompt, spec, **more))
        self.core.add_request(made)
        return made

    def step(self) -> None:
        outputs, executed = self.core.step_fn()
        self.core.post_step(executed)
        for output in (outputs or {}).values():
            for item in output.outputs:
                self.tokens.setdefault(item.request_id, []).extend(item.new_token_ids)
                if item.finish_reason is not None:
                    self.ended[item.request_id] = str(item.finish_reason)
                    self.stop_reasons[item.request_id] = item.stop_reason

    @property
    def sent_away(self) -> set[str]:
        """Requests that were, told or not: without a front end of its own the engine core tells with its next step."""
        told = {name for name, why in self.stop_reasons.items() if str(why).startswith(OVERLOADED)}
        return told | {request.request_id for request, _ in vars(self.core)[CORE_ADAPTER]._unreported}

    @property
    def is_busy(self) -> bool:
        return bool(self.scheduler.has_requests() or self.core.batch_queue)

    def run(self, limit: int = 5000) -> None:
        """Step until nothing is left."""
        for _ in range(limit):
            if not self.is_busy:
                return
            self.step()
        raise AssertionError(f"still busy after {limit} steps: {list(self.scheduler.requests)[:5]}")

    def serve(self, req_id: str, prompt: Sequence[int], spec: SteeringSpec = NOTHING, **more: Any) -> int:
        """Run one request alone; returns how many of its tokens were computed."""
        self.add(req_id, prompt, spec, **more)
        self.run()
        assert self.ended[req_id] == "length"
        return int(self.worker.computed[req_id])

    def abort(self, *req_ids: str) -> None:
        self.core.abort_requests(list(req_ids))

    def call(self, method: str, **args: Any) -> Any:
        answer = self.core.headgate_call(PART, method, args)
        assert set(answer) in ({"ok"}, {"error"})
        return answer

    def done(self, method: str, **args: Any) -> Any:
        answer = self.call(method, **args)
        assert "ok" in answer, answer
        return answer["ok"]

    def refused(self, method: str, **args: Any) -> dict[str, str]:
        return dict(self.call(method, **args)["error"])

    def register(self, name: str, spec: SteeringSpec) -> Any:
        return self.done("register", name=name, spec=to_wire(spec))

    def set_global(self, *, replace: bool = True, **tiers: PhaseVectors) -> Any:
        return self.done("set_global", tiers=tiers_wire(**tiers), replace=replace)

    def check_empty(self) -> None:
        """Nobody holds anything, here or in the worker."""
        self.done("clear_global")
        for module in self.done("modules"):
            self.done("unregister", name=module["name"])
        self.serve("last", [1])
        self.step_idle()
        status = self.done("status")
        assert (status["slots"]["reserved"], status["waiting"]) == (0, 0)
        left = self.worker.leftovers()
        assert left.pop("slots_used") >= 0  # it keeps some for later
        assert left == {"requests": [], "contents": [], "modules": 0, "slots_live": 0}
        assert not self.scheduler.requests
        assert self.scheduler.kv_cache_manager.usage == 0

    def step_idle(self) -> None:
        """The step that tells the worker who finished."""
        while self.is_busy:
            self.step()


def tiers_wire(**tiers: PhaseVectors) -> dict[str, Any]:
    """The tiers of ``set_global`` as they travel."""
    return {name: None if found is None else to_wire(SteeringSpec(prefill=found)) for name, found in tiers.items()}
