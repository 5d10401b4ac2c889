"""The steps of an engine core that were launched and whose outputs have not been taken.

Under asynchronous scheduling, and in a pipeline, vLLM launches the next step before it has the tokens of this one.
Whatever restarts requests would make the scheduler drop those tokens, although the rows after them were captured,
counted and reported already. So their outputs are taken first, and no token that was computed is lost. A prompt that is
computed in part has no token yet, though: which of its rows are computed again is noted, and reported at its end.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from functools import wraps

from headgate.capture.engine.contracts.wire_format import is_captured
from headgate.capture.engine.vllm_types import CoreOutputs, EngineCore, Function, Request, Scheduler

logger = logging.getLogger("headgate")

STEPS = "_headgate_steps"
"""Attribute of a scheduler; absent where headgate is not configured."""


class StepsInFlight:
    """Takes the outputs of launched steps ahead of time. Engine thread only.

    Args:
        core: vLLM's ``EngineCore``, whose ``step_fn`` is stock's. If it runs in its client's process it is replaced:
            outputs that were taken here come with the next steps.

    Attributes:
        begin_again: Is notified of each request whose prompt begins again under something else, and how many steps are
            in flight.
    """

    def __init__(self, core: EngineCore) -> None:
        self.begin_again: Callable[[str, int], None] = lambda *_: None
        self._core = core
        self._step = core.step_fn
        self._kept: deque[Mapping[int, CoreOutputs]] = deque()
        """Outputs that wait for a client in this process."""
        self._begun: dict[str, int] = {}
        """Rows of prompts that were computed in part when their requests were preempted."""
        self._outdated: dict[str, int] = {}
        """Rows of theirs, and of others, that are computed again under something else."""
        if core.batch_queue is not None and not hasattr(core, "output_queue"):
            core.step_fn = self._kept_or_next
        setattr(core.scheduler, STEPS, self)

    def take(self) -> None:
        """Wait for the steps that were launched, let the scheduler take their tokens, and pass these to the clients.

        Raises:
            Exception: What a step raised; the engine ends.
        """
        core = self._core
        if not core.batch_queue:
            return
        # Where there is nothing to launch, stock's step takes the oldest output of the queue.
        core.scheduler.has_requests = lambda: False
        try:
            while core.batch_queue:
                self._take_oldest(len(core.batch_queue))
        except BaseException as error:
            end_engine(core, f"a step in flight failed: {error}")
            raise
        finally:
            del core.scheduler.has_requests

    def preempted(self, request: Request) -> None:
        """Follow the preemption of a request, before its rows are forgotten."""
        req_id = request.request_id
        if request.num_computed_tokens >= request.num_prompt_tokens:
            # If the first token is not there yet, a step in flight brings it.
            self._begun.pop(req_id, None)
        elif request.num_tokens == request.num_prompt_tokens:
            self._begun[req_id] = max(self._begun.get(req_id, 0), request.num_computed_tokens)

    def outdate(self, request: Request) -> None:
        """Note that the rows of a request are computed again under something else.

        Rows after which a token was sampled stay what they were; those of a prompt without its first token do not.
        """
        req_id = request.request_id
        num_begun = max(self._begun.get(req_id, 0), request.num_computed_tokens)
        if request.num_tokens > request.num_prompt_tokens or not num_begun:
            return
        self.begin_again(req_id, len(self._core.batch_queue or ()))
        if is_captured(request.sampling_params):
            self._outdated[req_id] = num_begun

    @property
    def outdated(self) -> frozenset[str]:
        """Capturing requests, not yet freed, with rows that were computed again under something else."""
        return frozenset(self._outdated)

    def release(self, req_id: str) -> int:
        """Forget a request that was freed; return how many rows of its prompt were computed again."""
        self._begun.pop(req_id, None)
        return self._outdated.pop(req_id, 0)

    def _take_oldest(self, num_left: int) -> None:
        core = self._core
        outputs, is_executed = self._step()
        if core.batch_queue is None or len(core.batch_queue) >= num_left:
            raise AssertionError("vLLM's step took no output of the steps in flight")
        if hasattr(core, "output_queue"):
            for output in (outputs or {}).items():
                core.output_queue.put_nowait(output)
        elif outputs:
            self._kept.append(outputs)
        core.post_step(is_executed)

    def _kept_or_next(self) -> tuple[Mapping[int, CoreOutputs] | None, bool]:
        return (self._kept.popleft(), False) if self._kept else self._step()


def steps_of(scheduler: Scheduler) -> StepsInFlight | None:
    """Return the steps in flight of a scheduler; None if headgate is not configured there."""
    found: StepsInFlight | None = vars(scheduler).get(STEPS)
    return found


def end_engine(core: EngineCore, reason: str) -> None:
    """Let an engine end instead of taking another step."""
    logger.critical("headgate: %s; the engine ends", reason)

    def step() -> None:
        raise RuntimeError(f"headgate: {reason}")

    core.step_fn = step


def reset_prefix_cache(original: Function) -> Function:
    """Wrap ``Scheduler.reset_prefix_cache``: where it restarts requests, their steps in flight count."""

    @wraps(original)
    def wrapped(self: Scheduler, reset_running_requests: bool = False, *args: object, **kwargs: object) -> object:
        steps = steps_of(self)
        if reset_running_requests and steps is not None:
            # It is called when weights have changed.
            steps.take()
            for request in self.requests.values():
                steps.outdate(request)
        return original(self, reset_running_requests, *args, **kwargs)

    return wrapped
