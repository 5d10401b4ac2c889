"""How much one request may capture: what it could come to at most is known when its prompt is.

Only what the client itself named counts: global consumers are the operator's, ``return_hidden_states`` keeps one row.
"""

from __future__ import annotations

from collections.abc import Mapping

from headgate.capture.config import CaptureConsumersConfig
from headgate.capture.consumer import ModelInfo
from headgate.capture.errors import RequestError
from headgate.capture.messages import DTYPES
from headgate.capture.positions import PositionSelector
from headgate.capture.spec import CaptureSpec


def check_quotas(
    specs: Mapping[str, CaptureSpec],
    config: CaptureConsumersConfig,
    model: ModelInfo,
    *,
    num_prompt: int,
    max_tokens: int | None,
    num_samples: int,
) -> None:
    """Refuse a request that could capture more than it may.

    Args:
        specs: Of the consumers that the client named, resolved.
        config: The operator's.
        model: The model being served.
        num_prompt: Tokens of the prompt.
        max_tokens: What may be generated; None if that is not known yet: then nothing is refused.
        num_samples: The request's ``n``.

    Raises:
        RequestError: Naming the consumer.
    """
    if (config.max_request_rows is None and config.max_request_bytes is None) or max_tokens is None:
        return
    row_bytes = model.hidden_size * DTYPES[model.dtype].itemsize
    total = 0
    for instance, spec in specs.items():
        rows = num_samples * count_rows(spec.positions, num_prompt, num_prompt + max_tokens - 1)
        total += rows * len(spec.sites) * row_bytes
        for what, count, limit in (
            ("positions", rows, config.max_request_rows),
            ("bytes", total, config.max_request_bytes),
        ):
            if limit is not None and count > limit:
                raise RequestError(
                    f"capture.{instance}",
                    f"with this prompt, max_tokens {max_tokens} and n {num_samples}, the request could capture {count} "
                    f"{what}; at most {limit} are allowed here. Choose fewer positions or sites, or lower max_tokens",
                )


def count_rows(positions: PositionSelector, num_prompt: int, num_rows: int) -> int:
    """Positions below `num_rows` that a resolved selector selects."""
    wanted = positions.wanted(num_prompt)
    if isinstance(wanted, range):
        return len(range(wanted.start, min(wanted.stop, num_rows), wanted.step))
    return sum(position < num_rows for position in wanted)
