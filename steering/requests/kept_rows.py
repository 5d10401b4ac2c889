"""Rows that an operation takes from an earlier request of this server: its key ``source``.

Such a row becomes the operation's vector before anything is computed from it, so an operation with a source is the
same as one with the row itself, down to the keys of the prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from headgate.capture.schema.errors import RequestError, shown
from headgate.capture.schema.results import MAX_KEPT_NAME, FindKept, KeptRequest
from headgate.capture.schema.selectors.union import MAX_POSITION
from headgate.capture.schema.sites import Site
from headgate.steering.programs.operations import Float32Row

_KEYS = ("request", "site", "position", "sample")


class RowSource(NamedTuple):
    """A kept row, as an operation names it.

    Attributes:
        request: Name under which it is kept.
        sample: Which sample of that request.
        site: Where it was captured; None for the site where the operation acts.
        position: Absolute; a negative one counts from the end of the prompt.
    """

    request: str
    sample: int
    site: Site | None
    position: int


def read_source(value: object, where: str) -> RowSource:
    """Read ``{"request", "position", "site", "sample"}``, of which the last two may be absent.

    Raises:
        RequestError: If it is something else, naming the key that is wrong.
    """
    if not isinstance(value, Mapping) or len(value) > len(_KEYS):
        raise RequestError(where, f'expected {{"request", "site", "position"}}, got {shown(value)}')
    unknown = next((key for key in value if key not in _KEYS), None)
    if unknown is not None:
        raise RequestError(f"{where}.{shown(unknown)[1:-1]}", f"unknown key; a source has {', '.join(_KEYS)}")
    request = value.get("request")
    if not isinstance(request, str) or not 0 < len(request) <= MAX_KEPT_NAME:
        raise RequestError(f"{where}.request", f"expected the name under which rows are kept, got {shown(request)}")
    if value.get("position") is None:
        raise RequestError(f"{where}.position", "is missing: the position of the row, such as 5 or -1")
    sample = value.get("sample")
    return RowSource(
        request=request,
        sample=0 if sample is None else _integer(sample, 0, f"{where}.sample"),
        site=_site(value.get("site"), f"{where}.site"),
        position=_integer(value["position"], -MAX_POSITION, f"{where}.position"),
    )


class KeptRows:
    """The kept rows of one request's operations; a row of many operations is one array.

    Args:
        find: Finds what earlier requests have kept; None where no request is at hand.
    """

    def __init__(self, find: FindKept | None = None) -> None:
        self._find = find
        self._requests: dict[tuple[str, int], KeptRequest] = {}
        self._rows: dict[tuple[str, int, Site, int], Float32Row] = {}

    def row(self, source: RowSource, site: Site, where: str) -> Float32Row:
        """Return the row of a source for an operation at `site`.

        Raises:
            RequestError: If it is not kept (any more), or not finite.
        """
        if self._find is None:
            raise RequestError(where, "only a request can take rows from others; give the row itself as 'vector'")
        site = site if source.site is None else source.site
        owner = source.request, source.sample
        if owner not in self._requests:
            self._requests[owner] = self._find(*owner, where)
        key = (*owner, site, source.position)
        if key not in self._rows:
            self._rows[key] = float32_row(self._requests[owner].row(site, source.position, where), where)
        return self._rows[key]


def float32_row(row: Any, where: str) -> Float32Row:
    """Return a captured row, a tensor ``[hidden]``, in float32, which holds it exactly.

    Raises:
        RequestError: If a value is not finite.
    """
    wide: Float32Row = row.float().numpy()
    if not np.isfinite(wide).all():
        wrong = int(np.flatnonzero(~np.isfinite(wide))[0])
        raise RequestError(where, f"the captured row has a value that is not finite: {wide[wrong]} at {wrong}")
    return wide


def _site(value: object, where: str) -> Site | None:
    if value is None or isinstance(value, Site):
        return value
    try:
        return Site.parse(value if isinstance(value, str) and len(value) <= MAX_KEPT_NAME else "")
    except ValueError:
        raise RequestError(where, f"not a site: {shown(value)}; expected LAYER.HOOK, such as 12.post_mlp") from None


def _integer(value: object, least: int, where: str) -> int:
    if type(value) is not int or not least <= value <= MAX_POSITION:
        raise RequestError(where, f"expected an integer from {least} to {MAX_POSITION}, got {shown(value)}")
    return value
