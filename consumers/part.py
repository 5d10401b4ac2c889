"""How the consumers join headgate: entry point ``consumers`` of the group ``headgate.parts``.

Consumers themselves are entry points of the group ``vllm.capture_consumers``; this brings their command alone.
"""

from __future__ import annotations

from headgate.capture.schema.part_hooks import hookimpl


@hookimpl
def headgate_commands() -> dict[str, str]:
    """``headgate dump``."""
    return {"dump": "headgate.consumers.dump:app"}
