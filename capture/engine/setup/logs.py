"""headgate's log lines, shown where vLLM's own are shown."""

from __future__ import annotations

import logging


def speak_through_vllm() -> None:
    """Give headgate's logger vLLM's handlers and level, unless the application has set up either itself.

    vLLM configures its own logger only; without this, what a server's sites cost and that they passed the self-test
    would not be seen. Idempotent.
    """
    ours, theirs = logging.getLogger("headgate"), logging.getLogger("vllm")
    if ours.handlers or logging.getLogger().handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
