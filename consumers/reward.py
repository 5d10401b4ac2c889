"""The consumer that answers each request with one number from its activations, for trainers that reward them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from headgate.capture.files.reading import refusing
from headgate.capture.files.tensors import open_npy, open_safetensors
from headgate.capture.schema.batch import Float64Array, Int64Array
from headgate.capture.schema.consumer import (
    ConsumerContext,
    FinishedRequest,
    ModelInfo,
    Readout,
    RequestInfo,
    RowBlock,
    SpecContext,
    StreamingConsumer,
    check_fields,
    read_params,
    select_sites,
)
from headgate.capture.schema.errors import CaptureFileError, ConfigError, ConsumerError, RequestError, shown
from headgate.capture.schema.positions import Named
from headgate.capture.schema.sites import HookPoint, Site, parse_hook
from headgate.capture.schema.spec import CaptureSpec

DIRECTION = "direction"
"""Field of a request's spec: the name of one of the configured directions."""


class GeneratedSlice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which generated positions count, as Python slices them: 0 is the first generated token, -1 the last with a row.

    Attributes:
        start: First one *(inclusive)*.
        stop: End *(exclusive)*; None for no end.
        step: Distance, at least 1.
    """

    start: int | None = None
    stop: int | None = None
    step: int | None = None

    def indices(self, num_generated: int) -> range:
        """Return the chosen of ``0 : num_generated``."""
        return range(num_generated)[slice(self.start, self.stop, self.step)]


class RewardParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the reward consumer.

    Attributes:
        layer: Layer of the site, negative from the last; ignored for ``final_norm``.
        direction: File of the direction: steering vectors (``.safetensors``) or an array ``[hidden]`` (``.npy``).
        directions: Several directions by name, for requests to choose from. Give either `direction` or `directions`.
        default: Name of the direction for requests that name none; the first if None.
        hook: Hook point of the site.
        positions: Slice of the generated positions.
        measure: ``cos``, the mean cosine of the rows with the direction, or ``projection``, the mean of their dot
            products with the direction at unit length.
        scale: Factor of the measure.
        transform: Function of the scaled measure.
        dtype: Precision of products and lengths. ``float32``: computed in float64 on the worker's device, with
            directions rounded to float32, and copied as float32. ``float64``: whole rows are copied.
    """

    layer: int = -1
    direction: str | None = None
    directions: dict[str, str] = msgspec.field(default_factory=dict)
    default: str | None = None
    hook: str = "post_mlp"
    positions: GeneratedSlice = GeneratedSlice()
    measure: Literal["cos", "projection"] = "cos"
    scale: float = 1.0
    transform: Literal["identity", "tanh", "sigmoid"] = "identity"
    dtype: Literal["float32", "float64"] = "float32"

    @property
    def files(self) -> dict[str, str]:
        """Every direction's file by its name; a single `direction` is called ``default``."""
        return self.directions if self.direction is None else {"default": self.direction}

    @property
    def default_name(self) -> str:
        """The direction of requests that name none."""
        return self.default or next(iter(self.files))

    def site(self, num_layers: int) -> Site:
        """Return the site, for a model of that many layers."""
        hook = parse_hook(self.hook, "hook")
        return Site(-1 if hook is HookPoint.FINAL_NORM else self.layer % num_layers, hook)

    def hooks(self) -> dict[str, Any]:
        """Return the site as a request selects it."""
        hook = parse_hook(self.hook, "hook")
        return {hook.value: "all" if hook is HookPoint.FINAL_NORM else [self.layer]}


def parse_params(params: Mapping[str, Any]) -> RewardParams:
    """Read and check the parameters; opens no file.

    Raises:
        ConfigError: Naming the parameter.
    """
    parsed = read_params(RewardParams, params, "reward")
    try:
        hook = parse_hook(parsed.hook, "hook")
    except RequestError as error:
        raise ConfigError(f"reward: {error}") from error
    if (parsed.direction is None) == (not parsed.directions):
        raise ConfigError("reward: give either direction, a file, or directions, {name: file}")
    if parsed.default is not None and parsed.default not in parsed.files:
        raise ConfigError(f"reward: default {parsed.default!r} is none of the directions {sorted(parsed.files)}")
    if hook is not HookPoint.FINAL_NORM and "layer" not in params:
        raise ConfigError(f"reward: layer is required with the hook {hook.value}")
    if not math.isfinite(parsed.scale):
        raise ConfigError(f"reward: scale must be finite, got {parsed.scale}")
    if parsed.positions.step is not None and parsed.positions.step < 1:
        raise ConfigError(f"reward: positions.step must be at least 1, got {parsed.positions.step}")
    return parsed


def parse_request(raw: object, context: SpecContext) -> CaptureSpec:
    """Check ``{}`` or ``{"direction": NAME}``; the option ``direction`` of the spec is the name.

    Raises:
        RequestError: Naming the field; also if the server cannot capture the configured site.
    """
    params = context.parsed_params(parse_params)
    raw = check_fields(raw, context, (DIRECTION,), 'such as {"direction": NAME}')
    name = raw.get(DIRECTION, params.default_name)
    if not isinstance(name, str) or name not in params.files:
        known = ", ".join(sorted(params.files))
        raise RequestError(f"{context.field}.{DIRECTION}", f"no such direction {shown(name)}; configured: {known}")
    sites = select_sites(params.hooks(), context)
    return CaptureSpec(sites=sites, positions=Named("all_generated"), options={DIRECTION: name})


_TIERS = ("vectors", "decode_vectors")
"""Tiers of a file of steering vectors that act on generated tokens."""


class AlongDirections(Readout):
    """A row's dot product with each of some directions, then its length.

    Args:
        directions: ``[hidden, n]``.
    """

    def __init__(self, directions: Float64Array) -> None:
        self._directions = directions.astype(np.float64)

    @property
    def num_outputs(self) -> int:
        """Directions, and one more."""
        return int(self._directions.shape[1]) + 1

    @property
    def key(self) -> str:
        """SHA-256 of the directions."""
        return hashlib.sha256(np.ascontiguousarray(self._directions).tobytes()).hexdigest()

    def on(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """See `Readout.on`."""
        directions = torch.from_numpy(self._directions).to(device)
        return lambda rows: torch.cat([rows @ directions, torch.linalg.vector_norm(rows, dim=1, keepdim=True)], dim=1)


def read_direction(path: Path, site: Site, width: int) -> Float64Array:
    """Return the direction in a file at unit length: float64 ``[hidden]``.

    Of a file of steering vectors, it is the sum of what acts on generated tokens at `site`: the tensors
    ``vectors/SITE`` (or ``SITE`` alone) and ``decode_vectors/SITE``.

    Raises:
        ConfigError: Naming the file, if it cannot be read or holds no such direction.
    """
    try:
        with refusing(path, CaptureFileError):
            found = _of_array(path) if path.suffix == ".npy" else _of_vectors(path, site)
    except CaptureFileError as error:
        raise ConfigError(f"reward: direction {error}") from error
    except OSError as error:
        raise ConfigError(f"reward: direction {path}: {error}") from error
    if found.shape != (width,):
        raise ConfigError(
            f"reward: direction {path}: its shape is {list(found.shape)}, expected [{width}], the width of {site.name}"
        )
    length = float(np.linalg.norm(found))
    if not np.isfinite(length) or length == 0.0:
        raise ConfigError(f"reward: direction {path}: its length is {length}; expected a finite one above 0")
    return found / length


def _of_array(path: Path) -> Float64Array:
    array = open_npy(path, CaptureFileError)
    if array.dtype.kind != "f":
        raise ValueError("expected an array of floats")
    return array.read()


def _of_vectors(path: Path, site: Site) -> Float64Array:
    if path.suffix != ".safetensors":
        raise ValueError(f"unknown suffix {path.suffix!r}; known: .npy, .safetensors")
    tensors = open_safetensors(path, CaptureFileError).tensors
    parts = [tensor.read() for name, tensor in tensors.items() if _acts_at(name, site)]
    if not parts:
        held = ", ".join(sorted(tensors)[:5])
        raise ValueError(f"there is no vector for generated tokens at {site.name}, but {held or 'nothing'}")
    return np.asarray(sum(parts), dtype=np.float64)


def _acts_at(name: str, site: Site) -> bool:
    tier, slash, place = name.rpartition("/")
    if slash and tier not in _TIERS:
        return False
    try:
        return Site.parse(place) == site
    except ValueError:
        return False


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
    model.check_captured(site, "reward")
    found = [read_direction(Path(path).expanduser(), site, model.shape(site).width) for path in settings.files.values()]
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
