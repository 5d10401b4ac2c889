"""One request's rows in RAM, as the memory consumer gives them to programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headgate.capture.monitoring.notebook import norm_table, norms_by_position, page
from headgate.capture.schema.consumer import CapturedRequest
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import Site


def rows_at(rows: Mapping[Site, Tensor], site: Site | str) -> Tensor:
    """Return the rows of one site, by its name, an alias or itself.

    Raises:
        KeyError: If it was not captured; the message lists the captured ones.
    """
    try:
        return rows[site if isinstance(site, Site) else Site.parse(site)]
    except (KeyError, ValueError):
        raise KeyError(f"{site}: not captured; there are {', '.join(one.name for one in rows)}") from None


class CapturedRows:
    """The payload of the memory consumer: one request's rows.

    ``rows["12.post_mlp"]`` is a tensor ``[num_rows, hidden]`` in the model's dtype; aliases and `Site` work too.

    Attributes:
        request_id: The id of the request in its API.
        sample_index: Which of its ``n`` samples.
        sites: In the order of the forward pass.
        rows: The tensors by site.
        positions: int64 ``[num_rows]``, ascending.
        token_ids: int64 ``[num_rows]``: the token whose forward gave the row.
        is_prefill: bool ``[num_rows]``: True where that token was part of the prompt.
        num_prompt_tokens: Length of the prompt.
        prompt_token_ids: int64 ``[num_prompt_tokens]``.
        status: How the request ended: ``stop``, ``length``, ``abort`` ...
        dropped_rows: Rows that overload kept from it.
        kept_as: Name under which later requests find the rows; None if they are not kept.
    """

    def __init__(self, captured: CapturedRequest, *, kept_as: str | None = None) -> None:
        self.request_id = captured.request.client_request_id
        self.sample_index = captured.request.sample_index
        self.sites = captured.sites
        self.rows = captured.rows
        self.positions = captured.positions
        self.token_ids = captured.token_ids
        self.is_prefill = captured.is_prefill
        self.num_prompt_tokens = captured.final.num_prompt_tokens
        self.prompt_token_ids = captured.request.prompt_token_ids
        self.kept_as = kept_as
        self.status = captured.final.status
        self.dropped_rows = captured.dropped_rows

    def __repr__(self) -> str:
        return f"<CapturedRows of {self.request_id}: {len(self)} rows of {', '.join(s.name for s in self.sites)}>"

    def _repr_html_(self) -> str:
        """Return it as HTML for a notebook: facts, and norms by site and position."""
        dtypes = sorted({str(rows.dtype).removeprefix("torch.") for rows in self.rows.values()})
        facts = {
            "request": f"{self.request_id}, sample {self.sample_index}: {self.status}",
            "rows": f"{len(self)} of {len(self.sites)} sites in {', '.join(dtypes)}; {self.dropped_rows} dropped",
            "tokens of the prompt": self.num_prompt_tokens,
        }
        heat = norms_by_position(self.sites, self.positions, lambda site, index: self.rows[site][index].float().numpy())
        table = None if heat is None else norm_table(heat, len(self.sites))
        return page("CapturedRows", facts, table, heat)

    def __len__(self) -> int:
        """Rows per site."""
        return len(self.positions)

    def __iter__(self) -> Iterator[Site]:
        """The sites, in the order of the forward pass."""
        return iter(self.sites)

    def __getitem__(self, site: Site | str) -> Tensor:
        """``[num_rows, hidden]`` of one site.

        Raises:
            KeyError: If it was not captured; the message lists the captured ones.
        """
        return rows_at(self.rows, site)

    def numpy(self, site: Site | str) -> npt.NDArray[Any]:
        """The rows as a numpy array; bfloat16 becomes float32, which holds it exactly."""
        rows = self[site]
        array: npt.NDArray[Any] = (rows.float() if rows.dtype is torch.bfloat16 else rows).numpy()
        return array

    def row(self, site: Site, position: int, field: str) -> Tensor:
        """One row; see `headgate.capture.schema.results.KeptRequest`."""
        if site not in self.rows:
            there = ", ".join(one.name for one in self.sites)
            raise RequestError(f"{field}.site", f"{site.name} was not captured of {self.kept_as!r}, but {there}")
        absolute = position if position >= 0 else position + self.num_prompt_tokens
        index = int(np.searchsorted(self.positions, absolute))
        if index == len(self) or self.positions[index] != absolute:
            raise RequestError(
                f"{field}.position", f"{self.kept_as!r} has no row of position {position}; {self._held()}"
            )
        return self.rows[site][index]

    def _held(self) -> str:
        if not len(self):
            return "it has none"
        first, last = int(self.positions[0]), int(self.positions[-1])
        return f"it has {len(self)} rows, of positions {first} to {last}, and {self.num_prompt_tokens} prompt tokens"

    def summary(self) -> dict[str, Any]:
        """The payload in JSON values: everything but the rows."""
        kept = {} if self.kept_as is None else {"kept_as": self.kept_as}
        return {
            "num_rows": len(self),
            "shapes": {site.name: list(self.rows[site].shape) for site in self.sites},
            "num_prefill_rows": int(self.is_prefill.sum()),
            "num_prompt_tokens": self.num_prompt_tokens,
            "status": self.status,
            "dropped_rows": self.dropped_rows,
            **kept,
        }
