"""Requests of clients whose keys have quotas: counted when they are made, settled when they end."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import AsyncGenerator

from headgate.capture.engine.access.caller import Caller, Charge, current_caller
from headgate.capture.engine.contracts.wire_format import CAPTURE
from headgate.capture.engine.requests.capture_frontend import FrontEnd
from headgate.capture.engine.requests.capture_request import capturing_key
from headgate.capture.engine.requests.sampling_params import CaptureRequest
from headgate.capture.engine.vllm_types import RequestOutput, SamplingParams
from headgate.capture.schema.errors import RequestError

Outputs = AsyncGenerator[RequestOutput, None]


class Meter:
    """One request that is counted, from its admission to its end. Event loop only.

    Args:
        charge: Counts it.
        front: Knows what it captures.
        ask: Of the request, resolved.
        num_prompt: Tokens of its prompt.
        is_delta: Whether its outputs hold new tokens only.
    """

    def __init__(
        self, charge: Charge, front: FrontEnd, ask: CaptureRequest, num_prompt: int, *, is_delta: bool
    ) -> None:
        self.charge = charge
        self._front = front
        self._ask = ask
        self._num_prompt = num_prompt
        self._is_delta = is_delta
        self._num_tokens: Counter[int] = Counter()
        self._has_ended = False

    def see(self, output: RequestOutput) -> None:
        """Count the tokens of an output."""
        for sample in output.outputs:
            before = self._num_tokens[sample.index] if self._is_delta else 0
            self._num_tokens[sample.index] = before + len(sample.token_ids)
        self._has_ended = self._has_ended or output.finished

    def settle(self) -> None:
        """Charge what was captured; all that could be, if its end was not seen."""
        self.charge.settle(self._captured() if self._has_ended else self.charge.num_bytes)

    def fail(self) -> None:
        """Charge what was captured before the request failed; nothing if it never ran."""
        if self._num_tokens:
            self.charge.settle(self._captured())
        else:
            self.charge.cancel()

    def _captured(self) -> int:
        counts = (max(count, 1) for count in self._num_tokens.values())
        uses = [self._front.use_of(self._ask, self._num_prompt, count, 1) for count in counts]
        return min(sum(sum(use.num_bytes.values()) for use in uses), self.charge.num_bytes)


def open_meter(
    caller: Caller, front: FrontEnd, ask: CaptureRequest, num_prompt: int | None, params: SamplingParams
) -> Meter | None:
    """Count what a client captures; None if it is not counted.

    Args:
        caller: The client.
        front: Capture's front end.
        ask: What is asked, resolved.
        num_prompt: Tokens of the prompt; None if they are not known.
        params: The request's.

    Raises:
        QuotaError: If a quota of the client's key has no room for it.
        RequestError: If its prompt is not known, and so not what it could capture.
    """
    key = capturing_key()
    if key is None or not ask.is_explicit or not key.limits.are_counted:
        return None
    field = f"{CAPTURE}.{next(iter(ask.specs))}"
    if num_prompt is None or params.max_tokens is None:
        raise RequestError(field, f"the key {key.name!r} has quotas: only prompts of tokens can be counted")
    use = front.use_of(ask, num_prompt, params.max_tokens, params.n)
    charge = caller.usage.charge(key, sum(use.num_bytes.values()), field)
    if charge is None:
        return None
    return Meter(charge, front, ask, num_prompt, is_delta=params.output_kind.name == "DELTA")


def check_quota(front: FrontEnd, ask: CaptureRequest, num_prompt: int, params: SamplingParams) -> None:
    """Refuse, before an answer begins, what `open_meter` would refuse.

    Raises:
        QuotaError: If a quota of the client's key has no room for it.
    """
    caller, key = current_caller(), capturing_key()
    if caller is not None and key is not None and ask.is_explicit and params.max_tokens is not None:
        use = front.use_of(ask, num_prompt, params.max_tokens, params.n)
        caller.usage.check(key, sum(use.num_bytes.values()), f"{CAPTURE}.{next(iter(ask.specs))}")


def metered(outputs: Outputs, meter: Meter) -> Outputs:
    """Settle the request when its outputs end, or when they will never be asked for."""
    watched = _metered(outputs, meter)
    # Generators that never began do not end: another prompt of the same call may have been refused.
    weakref.finalize(watched, meter.charge.cancel).atexit = False
    return watched


async def _metered(outputs: Outputs, meter: Meter) -> Outputs:
    try:
        async for output in outputs:
            meter.see(output)
            yield output
    except Exception:
        meter.fail()  # the engine's doing, and not the client's, who may have to come again
        raise
    finally:
        meter.settle()
        await outputs.aclose()
