"""Handles of captured rows: what `LLM.capture` gives for each request, to be read when they are needed.

::

    outputs, handles = llm.capture(chats, params, sites={"post_mlp": [12]})
    handles[0]["12.post_mlp"]                   # [rows, hidden]
    handles[0].message(-1)["12.post_mlp"]       # the rows of the last message
    rows = fetch_all(handles)

Until then the rows lie where their consumer keeps them: in RAM with `memory`, in files with `filesystem`.
"""

from __future__ import annotations

import asyncio
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from headgate.capture.monitoring.notebook import norm_table, norms_by_position, page
from headgate.capture.schema.batch import BoolArray, Int64Array
from headgate.capture.schema.errors import ConsumerError, RequestError
from headgate.capture.schema.results import CaptureResult, FetchedRows, MessageSpan
from headgate.capture.schema.sites import Site

if TYPE_CHECKING:
    from torch import Tensor

FETCH_THREADS = 8
"""Threads that `fetch_all` reads with."""


class UnreadCaptureWarning(UserWarning):
    """Rows were captured, and their handle was dropped before they were read."""


class ChatFinder(Protocol):
    """Finds the messages of one chat in its prompt; `headgate.capture.engine.requests.chat_messages.ChatMessages`."""

    def find(self, role: str | None, index: int, field: str) -> MessageSpan:
        """Return one message.

        Raises:
            RequestError: If there is none, or the chat template does not show where it lies.
        """
        ...

    def spans(self, field: str) -> tuple[MessageSpan, ...]:
        """Return all messages, in order. Raises as `find` does."""
        ...


@dataclass(slots=True)
class CaptureCall:
    """Facts that the handles of one call share.

    Attributes:
        consumer: Name of the consumer that has the rows.
        fetch: Returns the rows that a payload refers to.
        has_warned: One of its handles was dropped unread; later ones are not reported again.
    """

    consumer: str
    fetch: Callable[[Any], FetchedRows]
    has_warned: bool = False

    def warn(self, request_id: str, num_bytes: int) -> None:
        """Warn that a handle was dropped unread, once for each call."""
        if not self.has_warned:
            self.has_warned = True
            warnings.warn(
                f"captured rows of request {request_id} ({num_bytes} bytes, consumer {self.consumer!r}) were dropped "
                "unread, and perhaps others of the same call: keep the handles of llm.capture and call fetch(), or "
                "discard() what is not needed",
                UnreadCaptureWarning,
                stacklevel=2,
            )


class RowView:
    """Some of the rows of a request, the same positions at every site.

    ``view["12.post_mlp"]`` is a tensor ``[len(view), hidden]`` in the model's dtype.

    Attributes:
        positions: int64 ``[rows]``, ascending: the absolute position of each row.
        token_ids: int64 ``[rows]``: the token whose forward gave the row.
    """

    def __init__(self, rows: FetchedRows, mask: BoolArray) -> None:
        self._rows = rows
        numbers = np.flatnonzero(mask)
        is_run = len(numbers) > 0 and numbers[-1] - numbers[0] + 1 == len(numbers)
        self._index: Any = slice(int(numbers[0]), int(numbers[-1]) + 1) if is_run else numbers
        self.positions: Int64Array = rows.positions[self._index]
        self.token_ids: Int64Array = rows.token_ids[self._index]

    def __len__(self) -> int:
        """Rows per site."""
        return len(self.positions)

    def __iter__(self) -> Iterator[Site]:
        """The sites, in the order of the forward pass."""
        return iter(self._rows.sites)

    def __getitem__(self, site: Site | str) -> Tensor:
        """``[rows, hidden]`` of one site; a view of the request's where the rows are consecutive.

        Raises:
            KeyError: If it was not captured; the message lists the captured ones.
        """
        return self._rows[site][self._index]

    def __repr__(self) -> str:
        sites = ", ".join(site.name for site in self._rows.sites)
        return f"<RowView: {len(self)} rows of {sites}>"

    def _repr_html_(self) -> str:
        """Return it as HTML for a notebook: norms by site and position."""
        return _page("RowView", {"rows": len(self)}, self, self._rows.sites)


class CaptureHandle:
    """The captured rows of one request, or of one of its samples, read when they are asked for.

    ``handle["12.post_mlp"]`` is a tensor ``[num_rows, hidden]`` in the model's dtype; ``await handle`` is `fetch`
    without blocking the event loop. A handle that is dropped unread warns (`UnreadCaptureWarning`).

    Attributes:
        request_id: The id of the request in vLLM.
        sample_index: Which of its ``n`` samples.
        result: The consumer's result. Its payload leads to the rows, and is None after `discard`.
        num_prompt_tokens: Length of the prompt.
    """

    def __init__(
        self,
        result: CaptureResult,
        call: CaptureCall,
        *,
        request_id: str,
        sample_index: int,
        num_prompt_tokens: int,
        chat: ChatFinder | None = None,
    ) -> None:
        self.request_id = request_id
        self.sample_index = sample_index
        self.result = result
        self.num_prompt_tokens = num_prompt_tokens
        self._call = call
        self._chat = chat
        self._rows: FetchedRows | None = None
        self._on_drop = weakref.finalize(self, call.warn, request_id, result.num_bytes)
        self._on_drop.atexit = False
        if result.num_rows == 0:
            self._on_drop.detach()

    def fetch(self) -> FetchedRows:
        """Return all rows: of `memory` a `CapturedRows`, of `filesystem` a `StoredCapture`. Again, the same object.

        Raises:
            ConsumerError: If a row is missing: the consumer failed, was out of room (such as ``max_bytes`` of
                `memory`), lost rows to overload, or had not finished when the call returned.
            CaptureFileError: If a file is missing or damaged.
        """
        if self._rows is None:
            self._on_drop.detach()
            if self.result.status != "ok" or self.result.payload is None:
                raise ConsumerError(
                    f"consumer {self._call.consumer!r} has no rows of request {self.request_id}: "
                    f"{self.result.status}, {self.result.error or 'they were discarded'}"
                )
            self._rows = self._call.fetch(self.result.payload)
        return self._rows

    def __await__(self) -> Generator[Any, None, FetchedRows]:
        """`fetch` on another thread."""
        return asyncio.to_thread(self.fetch).__await__()

    def discard(self) -> None:
        """Release the rows without a warning; files are not deleted."""
        self._on_drop.detach()
        self._rows = None
        self.result = CaptureResult(status=self.result.status, error=self.result.error, key=self.result.key)

    def __iter__(self) -> Iterator[Site]:
        """The sites, in the order of the forward pass; raises as `fetch` does."""
        return iter(self.fetch().sites)

    def __getitem__(self, site: Site | str) -> Tensor:
        """``[num_rows, hidden]`` of one site.

        Raises:
            KeyError: If it was not captured; the message lists the captured ones.
            ConsumerError: As `fetch` does.
        """
        return self.fetch()[site]

    def __len__(self) -> int:
        """Rows per site."""
        return self.result.num_rows

    @property
    def messages(self) -> tuple[MessageSpan, ...]:
        """The messages of the chat in its prompt.

        Raises:
            RequestError: If the request was no chat, or the chat template does not show where a message lies.
        """
        return self._finder().spans("messages")

    def message(self, index: int = -1, *, role: str | None = None, include_generated: bool = False) -> RowView:
        """Return the rows of one message of the chat.

        Args:
            index: Which message, negative from the last.
            role: Only messages of this role are counted.
            include_generated: The rows of the answer, too.

        Raises:
            RequestError: If the request was no chat or there is no such message; if the chat template does not show
                where it lies; or if no row of it was captured.
            ConsumerError: As `fetch` does.
        """
        span = self._finder().find(role, index, "message")
        rows = self.fetch()
        mask = (rows.positions >= span.start) & (rows.positions < span.stop)
        if not mask.any():
            raise RequestError(
                "message",
                f"no row of positions {span.start} to {span.stop - 1} was captured of request {self.request_id}; give "
                "llm.capture positions that hold them",
            )
        return RowView(rows, mask | (rows.positions >= self.num_prompt_tokens) if include_generated else mask)

    @property
    def generated(self) -> RowView:
        """The rows of the answer."""
        rows = self.fetch()
        return RowView(rows, rows.positions >= self.num_prompt_tokens)

    def _finder(self) -> ChatFinder:
        if self._chat is None:
            raise RequestError("message", f"request {self.request_id} was no chat: give llm.capture lists of messages")
        return self._chat

    def __repr__(self) -> str:
        about = f"{self.result.num_rows} rows, {self.result.num_bytes} bytes, {self._call.consumer}"
        return f"<CaptureHandle of {self.request_id}, sample {self.sample_index}: {self.result.status}; {about}>"

    def _repr_html_(self) -> str:
        """Return it as HTML for a notebook; norms of rows that were fetched, since looking fetches nothing."""
        facts = {
            "request": f"{self.request_id}, sample {self.sample_index}: {self.result.status}",
            "rows": f"{self.result.num_rows}, {self.result.num_bytes} bytes, kept by {self._call.consumer}",
            **({} if self.result.error is None else {"error": self.result.error}),
        }
        if self._rows is None:
            return page("CaptureHandle", {**facts, "read": "not yet: call fetch()"})
        return _page("CaptureHandle", facts, self._rows, self._rows.sites)


def fetch_all(handles: Iterable[CaptureHandle]) -> list[FetchedRows]:
    """Return the rows of several handles, in their order, read side by side; ``asyncio.gather(*handles)`` awaits them.

    Raises:
        ConsumerError: As `CaptureHandle.fetch` does, of the first handle whose rows are missing.
        CaptureFileError: Likewise.
    """
    with ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="headgate-fetch") as threads:
        return list(threads.map(CaptureHandle.fetch, handles))


def _page(title: str, facts: dict[str, Any], rows: Any, sites: Any) -> str:
    heat = norms_by_position(sites, rows.positions, lambda site, index: rows[site][index].float().numpy())
    return page(title, facts, None if heat is None else norm_table(heat, len(sites)), heat)
