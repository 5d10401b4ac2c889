"""The consumer that answers each request with one number from its activations, for trainers that reward them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headgate.capture.schema.batch import Float64Array, Int64Array
from headgate.capture.schema.consumer import (
    ConsumerContext,
    FinishedRequest,
    ModelInfo,
    RequestInfo,
    RowBlock,
    SpecContext,
    StreamingConsumer,
)
from headgate.capture.schema.errors import ConfigError, ConsumerError
from headgate.capture.schema.readouts.readout import Readout
from headgate.capture.schema.sites import Site
from headgate.capture.schema.spec import CaptureSpec
from headgate.consumers.reward.directions import AlongDirections, read_direction
from headgate.consumers.reward.params import DIRECTION, RewardParams, parse_params, parse_request


class RewardConsumer(StreamingConsumer):
    """Answers with ``{"reward", "cos", "act_norm", "num_positions", "status"}``; `RewardParams` lists the parameters.

    Rows are those of the chosen generated positions at one site. `cos` is the mean of their cosines with the
    direction, `act_norm` the mean of their lengths, ``reward = transform(scale * measure)``. The three are None, and
    `num_positions` 0, with the status ``no_rows``: no generated position was chosen that has a row (the last token
    has none). Further statuses: ``ok``; ``not_finite``, when a row holds NaN or infinity, with None in place of the
    numbers; ``incomplete``, when overload has lost rows, with the numbers of the others.

    A request asks with ``{}``, or ``{"direction": NAME}`` where several directions are configured, and waits for its
    result. The worker multiplies the rows where they are, and copies the products; with ``dtype="float64"`` they are
    multiplied here, since what is copied is float32.

    Raises:
        ConfigError: If a direction cannot be read, or its site cannot be captured.
    """

    location = "worker"
    is_awaited = True

    def __init__(self, params: Mapping[str, Any], context: ConsumerContext) -> None:
        super().__init__(params, context)
        self._settings = parse_params(params)
        self._columns = {name: column for column, name in enumerate(self._settings.files)}
        self._directions = _directions(self._settings, context.model)
        self._keys = {site: readout.key for site, readout in self.readouts(params, context.model).items()}
        self._requests: dict[str, _Measured] = {}

    @classmethod
    def check_params(cls, params: Mapping[str, Any]) -> None:
        parse_params(params)

    @classmethod
    def validate_client_spec(cls, raw: object, context: SpecContext) -> CaptureSpec:
        return parse_request(raw, context)

    @classmethod
    def readouts(cls, params: Mapping[str, Any], model: ModelInfo) -> dict[Site, Readout]:
        settings = parse_params(params)
        directions = _directions(settings, model)  # read in any case: what is wrong with them is said at the start
        is_exact = settings.dtype == "float64"
        return {} if is_exact else {settings.site(model.num_layers): AlongDirections(directions)}

    def begin(self, request: RequestInfo) -> None:
        wanted = {site: self._keys[site] for site in request.spec.sites if site in self._keys}
        if {site: facts.key for site, facts in request.readouts.items()} != wanted:
            raise ConsumerError("a direction's file has changed since the engine started; restart the engine to use it")
        self._requests[request.request_id] = _Measured()

    def write(self, blocks: Sequence[RowBlock]) -> None:
        for block in blocks:
            rows = block.rows[0].double().numpy()
            if self._keys:
                dots, norms = rows[:, :-1], rows[:, -1]
            else:
                dots, norms = rows @ self._directions, np.linalg.norm(rows, axis=1)
            for span in block.spans:
                column = self._columns[span.request.spec.options[DIRECTION]]
                part = slice(span.start, span.stop)
                self._requests[span.request.request_id].add(block.positions[part], dots[part, column], norms[part])

    def finish(self, finished: FinishedRequest) -> dict[str, Any] | None:
        measured = self._requests.pop(finished.request.request_id)
        if not finished.request.spec.sites:
            return None  # the site belongs to another pipeline stage
        positions, dots, norms = measured.joined()
        first, num_rows = finished.final.num_prompt_tokens, finished.final.num_rows
        chosen = self._settings.positions.indices(num_rows - first)
        kept = np.isin(positions - first, chosen)
        return _payload(self._settings, dots[kept], norms[kept], num_expected=len(chosen))

    def abandon(self, request: RequestInfo) -> None:
        self._requests.pop(request.request_id, None)

    def close(self, timeout_s: float) -> None:
        self._requests.clear()


def _directions(settings: RewardParams, model: ModelInfo) -> Float64Array:
    """Every direction, float64 ``[hidden, directions]``, rounded to the dtype of the parameters."""
    site = settings.site(model.num_layers)
    if site not in model.sites:
        configured = ", ".join(one.name for one in model.sites[:5])
        raise ConfigError(
            f"reward: site {site.name} is not captured here, but {configured}, ...; add it to capture.sites"
        )
    found = [read_direction(Path(path).expanduser(), site, model.hidden_size) for path in settings.files.values()]
    return np.stack(found, axis=1).astype(settings.dtype).astype(np.float64)


@dataclass(slots=True)
class _Measured:
    """Positions, dot products and lengths of one request's rows so far."""

    parts: list[tuple[Int64Array, Float64Array, Float64Array]] = field(default_factory=list)

    def add(self, positions: Int64Array, dots: Float64Array, norms: Float64Array) -> None:
        # Copies: the slices would keep those of every request of the block.
        self.parts.append((positions.copy(), dots.copy(), norms.copy()))

    def joined(self) -> tuple[Int64Array, Float64Array, Float64Array]:
        if not self.parts:
            return np.empty(0, dtype=np.int64), np.empty(0), np.empty(0)
        positions, dots, norms = (np.concatenate(parts) for parts in zip(*self.parts, strict=True))
        return positions, dots, norms


_TRANSFORMS: dict[str, Callable[[float], float]] = {
    "identity": lambda value: value,
    "tanh": math.tanh,
    "sigmoid": lambda value: 0.5 * (1.0 + math.tanh(0.5 * value)),  # as 1 / (1 + exp(-value)), without overflow
}


def _payload(settings: RewardParams, dots: Float64Array, norms: Float64Array, *, num_expected: int) -> dict[str, Any]:
    none = {"reward": None, "cos": None, "act_norm": None, "num_positions": len(dots)}
    if not len(dots):
        return {**none, "status": "incomplete" if num_expected else "no_rows"}
    if not (np.isfinite(dots).all() and np.isfinite(norms).all()):
        return {**none, "status": "not_finite"}
    # A row of zeros has no direction: it counts as one at a right angle.
    cos = float(np.divide(dots, norms, out=np.zeros_like(dots), where=norms > 0).mean())
    measure = cos if settings.measure == "cos" else float(dots.mean())
    return {
        "reward": _TRANSFORMS[settings.transform](settings.scale * measure),
        "cos": cos,
        "act_norm": float(norms.mean()),
        "num_positions": len(dots),
        "status": "ok" if len(dots) == num_expected else "incomplete",
    }
