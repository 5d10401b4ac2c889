"""The direction of a token by a lens, wherever a request may give a vector.

``{"lens": NAME, "token": TEXT or id, "at": "12.post_mlp", "scale": 4.0}`` stands for ``scale * M_l^T W_U[token]``: the
direction in the stream after layer l along which the lens reads the token more strongly. ``M_l`` is the lens' matrix of
that layer, the identity of the logit lens, and ``W_U[token]`` the token's row of the model's head as it is in the
model's files: neither its final norm's weights nor a logit scale are in it. The row is read in the front end, since a
request's vectors are resolved there; no worker is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headgate.capture.lens import LOGIT, Lens, LensError, load_current
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.errors import ConfigError, HeadgateError, RequestError, finite, shown
from headgate.capture.schema.sites import HookPoint, Site
from headgate.capture.schema.vocabulary import Vocabulary, read_token
from headgate.steering.vectors.dtypes import Float32Rows

KEYS = frozenset(("lens", "token", "at", "scale"))
_MAX_KNOWN = 1024


class LensDirections:
    """Reads directions; implements `headgate.steering.vectors.phase_vectors.Directions`.

    Args:
        lenses: Files by name; `LOGIT` needs none.
        model: That is served.
        vocabulary: Its tokens.

    Raises:
        ConfigError: If a file is none of a lens, or of another model.
    """

    def __init__(self, lenses: Mapping[str, str], model: ModelInfo, vocabulary: Vocabulary | None) -> None:
        self._lenses = {name: _open(name, path, model) for name, path in lenses.items()}
        self._hidden, self._num_layers = model.hidden_size, model.num_layers
        self._vocabulary = vocabulary
        self._known: dict[tuple[str, int, int], Float32Rows] = {}

    def read(self, value: Mapping[Any, Any], where: str) -> tuple[Site, Float32Rows, float]:
        """Return the site, the direction, float32 ``[hidden]``, and the scale.

        Raises:
            RequestError: Naming the key that is wrong.
        """
        if not set(value) <= KEYS or value.get("token") is None or value.get("at") is None:
            raise RequestError(where, f"expected the keys 'lens', 'token', 'at' and 'scale', got {shown(list(value))}")
        name = value["lens"]
        if not isinstance(name, str) or (name != LOGIT and name not in self._lenses):
            known = ", ".join((LOGIT, *self._lenses))
            raise RequestError(f"{where}.lens", f"no such lens {shown(name)}; configured: {known} (--lenses)")
        site = self._site(value["at"], name, f"{where}.at")
        if self._vocabulary is None:
            raise RequestError(f"{where}.token", "the tokens of the model are not known here")
        token = read_token(value["token"], self._vocabulary, f"{where}.token")
        given = value.get("scale", 1.0)
        if (scale := finite(given)) is None:
            raise RequestError(f"{where}.scale", f"expected a finite number, got {shown(given)}")
        return site, self._direction(name, site.layer, token, where), scale

    def _site(self, given: object, name: str, where: str) -> Site:
        try:
            site = Site.parse(str(given))
        except ValueError as error:
            raise RequestError(where, f"expected a site such as 12.post_mlp, got {shown(given)}") from error
        if site.hook is not HookPoint.POST_MLP or not 0 <= site.layer < self._num_layers:
            raise RequestError(where, f"a lens reads post_mlp of a layer below {self._num_layers}, not {site.name}")
        if name != LOGIT and site.layer not in self._lenses[name].layers:
            raise RequestError(where, f"the lens {name!r} has the layers {list(self._lenses[name].layers)} alone")
        return site

    def _direction(self, name: str, layer: int, token: int, where: str) -> Float32Rows:
        key = name, layer, token
        if key not in self._known:
            assert self._vocabulary is not None  # noqa: S101  (a token was read)
            try:
                row = self._vocabulary.head_row(token)
                found = row if name == LOGIT else self._lenses[name].direction(layer, row)
            except (HeadgateError, OSError) as error:
                raise RequestError(where, str(error)) from error
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[key] = np.ascontiguousarray(found, np.float32)
        return self._known[key]


def _open(name: str, path: str, model: ModelInfo) -> Lens:
    where = f"steering.lenses.{name}"
    if name == LOGIT:
        raise ConfigError(f"{where}: this is the name of the lens without a file; choose another")
    try:
        lens = load_current(path)
        lens.check(model.hidden_size, model.num_layers)
    except (OSError, LensError) as error:
        raise ConfigError(f"{where}: {error}") from error
    return lens
