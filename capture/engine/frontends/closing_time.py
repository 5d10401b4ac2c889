"""How long vLLM waits for processes that it has told to end: as long as consumers may take to close.

It kills engine cores, and with them workers whose consumers are writing, after 5 seconds; those of a server at once.
Nobody waits longer than they take.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from functools import wraps

from headgate.capture.engine.contracts.vllm_engine import Function, VllmConfig
from headgate.capture.engine.setup.settings import capture_config

logger = logging.getLogger("headgate")

TEARDOWN_S = 5
"""For all else that a process does when it ends."""
GRACE = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"
"""vLLM's own setting: what an engine core waits for its workers. Since vLLM 0.33 servers wait so long for it, too."""


class _Grace:
    """The time that this process has set.

    Attributes:
        is_given: An engine of this process captures, and `GRACE` holds for it.
        own: The value of `GRACE` that was set here; None if it is the user's.
    """

    is_given: bool = False
    own: str | None = None


_grace = _Grace()


def let_consumers_close(timeout_s: float) -> None:
    """Let the processes of an engine have `timeout_s` seconds for consumers when they end, and `TEARDOWN_S` more.

    A value that the user has set stays, with a warning if it is too short. Of several engines, the longest time holds.
    """
    given = os.environ.get(GRACE)
    _grace.is_given = True
    if given is None or given == _grace.own:
        _grace.own = os.environ[GRACE] = str(max(math.ceil(timeout_s + TEARDOWN_S), int(given or 0)))
    elif float(given) < timeout_s:
        text = "capture: %s=%s ends consumers before capture.close_timeout_s, which is %g"
        logger.warning(text, GRACE, given, timeout_s)


def open_manager(original: Function) -> Function:
    """Wrap ``CoreEngineProcManager.__init__``: its processes know how long they have.

    With several API servers it is in a process without a front end.
    """

    @wraps(original)
    def __init__(self: object, *args: object, vllm_config: VllmConfig, **kwargs: object) -> None:
        if (config := capture_config(vllm_config)) is not None:
            let_consumers_close(config.close_timeout_s)
        original(self, *args, vllm_config=vllm_config, **kwargs)

    return __init__


def shutdown(original: Function) -> Function:
    """Wrap ``vllm.v1.engine.utils.shutdown``, which tells engine cores to end and kills them `timeout` seconds later.

    Requests may run on for the time that vLLM gives them; consumers close after that.
    """

    @wraps(original)
    def wrapped(procs: Sequence[object], timeout: float | None = None) -> object:
        if _grace.is_given:
            timeout = (timeout or 0) + float(os.environ[GRACE])
        return original(procs, timeout=timeout)

    return wrapped
