"""A headgate consumer: how far each token of a request points along a direction."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headgate.capture import (
    BatchedConsumer,
    CapturedRequest,
    CaptureSpec,
    ConfigError,
    ConsumerContext,
    ConsumerError,
    RequestError,
    Site,
    SpecContext,
    parse_client_spec,
    site_map,
)

__all__ = ["CosineConsumer"]

Vector = np.ndarray[Any, np.dtype[np.float32]]

DEFAULT_TOP = 5
MAX_TOP = 1000


class CosineConsumer(BatchedConsumer):
    """Reports the cosine between each token's activation and a direction: the mean, and the highest ones.

    Parameters: ``direction``, a ``.npy`` file with a vector of the model's hidden size, and ``site``, such as
    ``12.post_mlp``.

    A request asks with ``{"top": 5, "positions": "all"}``, both optional. The payload is
    ``{"mean": ..., "top": [{"position", "token_id", "cosine"}, ...]}``, the highest cosine first.
    """

    location = "worker"  # next to the model: only the payload travels

    def __init__(self, params: Mapping[str, Any], context: ConsumerContext) -> None:
        super().__init__(params, context)
        self._site = _site(params)
        self._direction = _load(params["direction"], context.model.hidden_size)

    @classmethod
    def check_params(cls, params: Mapping[str, Any]) -> None:
        """Runs in the front end too, maybe on another machine, so it looks at no file."""
        for name in params:
            if name not in ("direction", "site"):
                raise ConfigError(f"cosine: unknown parameter {name!r}; known: direction, site")
        if not isinstance(params.get("direction"), str):
            raise ConfigError(f"cosine: direction must name a .npy file, got {params.get('direction')!r}")
        _site(params)

    @classmethod
    def validate_client_spec(cls, raw: object, context: SpecContext) -> CaptureSpec:
        """The site is the operator's choice; a request chooses positions and how many tokens it wants to hear of."""
        if not isinstance(raw, Mapping):
            raise RequestError(context.field, f"expected an object such as {{'top': 5}}, got {raw!r}")
        if "hooks" in raw:
            raise RequestError(f"{context.field}.hooks", "the site is configured on the server; leave it out")
        hooks = {hook: layers or "all" for hook, layers in site_map([_site(context.params)]).items()}
        spec = parse_client_spec({**raw, "hooks": hooks}, context, options=("top",))
        top = spec.options.get("top", DEFAULT_TOP)
        if isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= MAX_TOP:
            raise RequestError(f"{context.field}.top", f"expected an integer from 0 to {MAX_TOP}, got {top!r}")
        return CaptureSpec(sites=spec.sites, positions=spec.positions, options={"top": top})

    def on_capture(self, captured: CapturedRequest) -> dict[str, Any]:
        if not captured.sites:
            return {}  # under pipeline parallelism the site may belong to another stage
        rows = captured.rows[self._site].float().numpy()
        if not np.isfinite(rows).all():
            raise ConsumerError("activations are not finite, so their cosine would mean nothing")
        lengths = np.linalg.norm(rows, axis=1)
        cosines = rows @ self._direction / np.maximum(lengths, np.finfo(np.float32).tiny)
        highest = np.argsort(-cosines, kind="stable")[: captured.request.spec.options["top"]]
        return {
            "mean": float(cosines.mean()) if len(cosines) else None,
            "top": [
                {
                    "position": int(captured.positions[row]),
                    "token_id": int(captured.token_ids[row]),
                    "cosine": float(cosines[row]),
                }
                for row in highest
            ],
        }


def _site(params: Mapping[str, Any]) -> Site:
    try:
        return Site.parse(str(params.get("site")))
    except ValueError as error:
        raise ConfigError(f"cosine: site: {error}") from error


def _load(path: str, hidden_size: int) -> Vector:
    """The direction, with length 1."""
    try:
        direction: Vector = np.load(Path(path).expanduser()).astype(np.float32)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cosine: direction {path} cannot be read: {error}") from error
    length = float(np.linalg.norm(direction))
    if direction.shape != (hidden_size,) or not np.isfinite(length) or length == 0:
        raise ConfigError(
            f"cosine: direction {path} has shape {list(direction.shape)} and length {length}; expected a finite vector "
            f"of {hidden_size} values that is not zero"
        )
    return direction / np.float32(length)
