"""A worker without a model, under vLLM's real front end, engine core and scheduler.

It samples the tokens that a request dictates (``extra_args["script"]``), notes which positions it was told to compute,
and answers as headgate's worker would: with how many rows a capture of everything would hold. It needs no compiled
part of vLLM, so the same tests run on any release's Python sources.
"""

from __future__ import annotations

import base64
import hashlib
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import WorkerBase

from headgate.capture.engine.setup.hosts import worker_setup
from headgate.capture.links.messages import Result
from headgate.capture.links.sender import ResultSender
from headgate.capture.schema.batch import RequestWire
from headgate.capture.schema.positions import selector_from_wire
from headgate.capture.schema.results import CaptureResult

STEP_S = 0.002


@dataclass(slots=True)
class _Request:
    prompt: list[int]
    script: list[int]
    wire: RequestWire | None
    num_known: int
    num_computed: int
    computed: set[int] = field(default_factory=set)

    def sample(self) -> int:
        """The next token; the script's last goes on forever."""
        token = self.script[min(self.num_known - len(self.prompt), len(self.script) - 1)]
        self.num_known += 1
        return token


class _LateOutput(AsyncModelRunnerOutput):  # type: ignore[misc]
    """A step that runs while the scheduler plans the next."""

    def __init__(self, output: ModelRunnerOutput, ready_at: float) -> None:
        self._output = output
        self._ready_at = ready_at

    def get_output(self) -> ModelRunnerOutput:
        time.sleep(max(self._ready_at - time.monotonic(), 0))
        return self._output

    def get_kv_connector_output(self) -> None:
        return None


class FakeWorker(WorkerBase):  # type: ignore[misc]
    """Implements what vLLM 0.26 to 0.33 ask of a worker."""

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        self._requests: dict[str, _Request] = {}
        self._ended: dict[str, _Request] = {}
        self._sender = ResultSender()
        self._pending: Any = None
        self._free_at = 0.0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        pass

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size, num_kv_heads=1, head_size=64, dtype=torch.bfloat16
        )
        return {"layer.0": spec, "layer.1": spec}

    def determine_available_memory(self) -> int:
        return 64 << 20

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["NHD"]

    def compile_or_warm_up_model(self) -> Any:
        try:
            from vllm.v1.worker.worker_base import CompilationTimes
        except ImportError:
            return 0.0
        return CompilationTimes(*([0.0] * len(CompilationTimes._fields)))

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    set_kv_cache_layout = initialize_from_config = check_health = reset_mm_cache = reset_encoder_cache = _nothing
    update_max_model_len = execute_dummy_batch = synchronize_device = take_draft_token_ids = _nothing
    get_kv_connector_handshake_metadata = _nothing

    def get_model_inspection(self) -> str:
        return "fake"

    def headgate_stats(self) -> dict[str, Any]:
        """Requests that headgate knows now, by id."""
        return {"running": [*self._requests], "ended": [*self._ended]}

    def headgate_setup(self) -> dict[str, Any]:
        """Tell what all workers have alike, as the real one does."""
        return dict(worker_setup(self.vllm_config, self.rank))

    def execute_model(self, scheduler_output: Any) -> Any:
        self._follow_ends(scheduler_output)
        self._follow_new(scheduler_output)
        ids, tokens = [], []
        for req_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = self._requests[req_id]
            request.computed.update(range(request.num_computed, request.num_computed + num_tokens))
            request.num_computed += num_tokens
            ids.append(req_id)
            tokens.append([request.sample()] if request.num_computed >= request.num_known else [])
        if not ids:
            return EMPTY_MODEL_RUNNER_OUTPUT
        index = {req_id: i for i, req_id in enumerate(ids)}
        return self._deliver(ModelRunnerOutput(req_ids=ids, req_id_to_index=index, sampled_token_ids=tokens))

    def _deliver(self, output: ModelRunnerOutput) -> Any:
        self._free_at = max(time.monotonic(), self._free_at) + STEP_S
        if self.vllm_config.scheduler_config.async_scheduling:
            self._pending = _LateOutput(output, self._free_at)
            return None
        time.sleep(STEP_S)
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        pending, self._pending = self._pending, None
        return pending

    def shutdown(self) -> None:
        self._sender.close(5)

    def _follow_new(self, scheduler_output: Any) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            known = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
            extra = new.sampling_params.extra_args or {}
            request = _Request(
                prompt=list(new.prompt_token_ids),
                script=list(extra.get("script") or [1000]),
                wire=extra.get("headgate"),
                num_known=len(known),
                num_computed=new.num_computed_tokens,
            )
            if new.req_id in self._requests:  # resumed after preemption, as the V2 runner is told
                request.computed = self._requests[new.req_id].computed
            self._requests[new.req_id] = request
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._requests[req_id].num_computed = num_computed

    def _follow_ends(self, scheduler_output: Any) -> None:
        finals = getattr(scheduler_output, "headgate_final", {})
        for req_id in scheduler_output.finished_req_ids:
            request = self._requests.pop(req_id, None)  # None: it ended before it was scheduled
            if request is not None and "capture" in (request.wire or {}):
                assert req_id in finals, f"{req_id} ended without a final state"
                self._ended[req_id] = request
        for req_id, final in finals.items():
            if final is not None and req_id in self._ended:
                self._answer(req_id, self._ended.pop(req_id), final)

    def _answer(self, req_id: str, request: _Request, final: tuple[Any, ...]) -> None:
        assert request.wire is not None
        num_prompt, token_ids, status, *_ = final
        capture = request.wire["capture"]
        rows = sorted(position for position in request.computed if position < len(token_ids) - 1)
        for instance, spec in capture["specs"].items():
            payload: dict[str, Any] = {
                "rows": rows,
                "computed": len(request.computed),
                "num_prompt": num_prompt,
                "token_ids": list(token_ids),
                "status": status,
                "spec": {**spec, "positions": selector_from_wire(spec["positions"]).described()},
                "steered": hashlib.sha256(repr(request.wire.get("parts")).encode()).hexdigest(),
                "wire": {"v": request.wire["v"], "id": capture["id"], "n": capture["n"]},
            }
            if instance == "hidden_states":
                payload = self._state(rows[-1])
            self._sender.send_result(
                capture["reply"],
                Result(
                    key=capture["key"],
                    req_id=req_id,
                    sample_index=int(req_id.split("_", 1)[0]) if capture["n"] > 1 else 0,
                    instance=instance,
                    result=CaptureResult(status="ok", payload=payload, num_rows=len(rows)),
                ),
            )

    def _state(self, position: int) -> dict[str, Any]:
        """What the consumer behind ``return_hidden_states`` answers, for a row that holds its position everywhere."""
        hidden_size = self.vllm_config.model_config.get_hidden_size()
        row = torch.full((hidden_size,), float(position), dtype=torch.bfloat16).view(torch.uint8)
        data = base64.b64encode(bytes(row.numpy().data)).decode()
        return {"dtype": "bfloat16", "shape": [hidden_size], "data": data, "position": position}
