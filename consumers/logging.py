"""The consumer that logs one line for each captured request."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from headgate.capture.schema.consumer import BatchedConsumer, CapturedRequest, ConsumerContext
from headgate.capture.schema.errors import ConfigError

logger = logging.getLogger(__name__)

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class LoggingConsumer(BatchedConsumer):
    """Logs one line per request: who it was, how it ended, which sites, which shape.

    Parameters: ``level``, ``"info"`` if absent. The payload holds ``num_rows`` and the shape of every site.
    """

    takes_columns = True

    def __init__(self, params: Mapping[str, Any], context: ConsumerContext) -> None:
        super().__init__(params, context)
        self._level = _level(params)

    @classmethod
    def check_params(cls, params: Mapping[str, Any]) -> None:
        unknown = sorted(set(params) - {"level"})
        if unknown:
            raise ConfigError(f"logging: unknown parameter {unknown[0]!r}; known: level")
        _level(params)

    def on_capture(self, captured: CapturedRequest) -> dict[str, Any]:
        shapes = {site.name: list(captured.rows[site].shape) for site in captured.sites}
        logger.log(
            self._level,
            "%s: request %s (%s): %d rows, %d of the prompt, %d dropped: %s",
            self.context.instance_name,
            captured.request.client_request_id,
            captured.final.status,
            len(captured.positions),
            int(captured.is_prefill.sum()),
            captured.dropped_rows,
            shapes,
        )
        return {"num_rows": len(captured.positions), "shapes": shapes}


def _level(params: Mapping[str, Any]) -> int:
    name = params.get("level", "info")
    if not isinstance(name, str) or name.lower() not in _LEVELS:
        raise ConfigError(f"logging: level must be one of {', '.join(_LEVELS)}, got {name!r}")
    return _LEVELS[name.lower()]
