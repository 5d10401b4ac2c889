"""Captured rows as commands of other parts read them: `headgate.capture.engine.contracts.parts.stored_requests`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headgate.capture.schema.sites import Site


class StoredRequest(Protocol):
    """One request's rows, read when they are asked for."""

    @property
    def tag(self) -> str:
        """Its folder."""

    @property
    def request_id(self) -> str:
        """The client's name for it, or the request's own id."""

    @property
    def sites(self) -> Sequence[Site]:
        """In the order of the forward pass."""

    @property
    def num_rows(self) -> int:
        """Rows per site."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Among others ``model``, its name as the operator gave it, ``num_prompt_tokens`` and ``num_tokens``."""

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """int64 ``[rows]``, ascending: the absolute position of each row."""

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """int64 ``[rows]``: the token whose forward gave the row."""

    def numpy(self, site: Site) -> npt.NDArray[Any]:
        """``[rows, hidden]`` in float16 or float32."""
