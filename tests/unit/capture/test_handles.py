"""Handles of captured rows: what is read when, and what is said of rows that are missing or were never looked at."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from headgate.capture import CaptureHandle, CaptureResult, RequestError, UnreadCaptureWarning, fetch_all
from headgate.capture.handles import CaptureCall
from headgate.capture.schema.errors import ConsumerError
from headgate.capture.schema.results import MessageSpan
from headgate.capture.schema.sites import Site

SITE = Site.parse("3.post_mlp")


class Rows:
    """Rows of one value, their position."""

    sites = (SITE,)

    def __init__(self, positions: list[int]) -> None:
        self.positions = np.array(positions, dtype=np.int64)
        self.token_ids = self.positions + 100

    def __getitem__(self, site: Site | str) -> torch.Tensor:
        if site not in (SITE, SITE.name):
            raise KeyError(site)
        return torch.tensor(self.positions, dtype=torch.float32)[:, None]


class Chat:
    """A user's message at positions 2 to 4, an assistant's at 5 and 6."""

    all_spans = (
        MessageSpan(role="user", start=2, stop=5, token_ids=[102, 103, 104]),
        MessageSpan(role="assistant", start=5, stop=7, token_ids=[105, 106]),
    )

    def find(self, role: str | None, index: int, field: str) -> MessageSpan:
        return [span for span in self.all_spans if role in (None, span.role)][index]

    def spans(self, field: str) -> tuple[MessageSpan, ...]:
        return self.all_spans


@dataclass
class Call:
    """One call, whose payloads are lists of positions; notes what was fetched."""

    fetched: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shared = CaptureCall("rows", self.fetch)

    def fetch(self, payload: Any) -> Rows:
        self.fetched.append(payload)
        return Rows(payload)

    def handle(self, positions: list[int] | None = None, *, chat: Any = None, **result: Any) -> CaptureHandle:
        payload = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9] if positions is None else positions
        told = {"status": "ok", "payload": payload, "num_rows": len(payload), "num_bytes": 80, "key": "rows", **result}
        return CaptureHandle(
            CaptureResult(**told), self.shared, request_id="7", sample_index=0, num_prompt_tokens=8, chat=chat
        )


def test_nothing_is_fetched_before_it_is_asked_for_and_then_once() -> None:
    call = Call()
    handle = call.handle()
    assert (len(handle), call.fetched) == (10, [])
    assert "7, sample 0: ok; 10 rows, 80 bytes, rows" in repr(handle)

    assert tuple(handle) == tuple(handle.fetch().sites)
    assert handle["3.post_mlp"].shape == (10, 1)
    assert handle.fetch() is handle.fetch()
    assert len(call.fetched) == 1
    with pytest.raises(KeyError):
        handle["4.post_mlp"]


def test_rows_of_messages_and_of_the_answer() -> None:
    handle = Call().handle(chat=Chat())

    assert handle.messages == Chat.all_spans
    assert handle.message(0)[SITE].flatten().tolist() == [2, 3, 4]
    assert handle.message(role="user").positions.tolist() == [2, 3, 4]
    assert handle.message(0, include_generated=True).token_ids.tolist() == [102, 103, 104, 108, 109]
    assert handle.message(0, include_generated=True)[SITE].flatten().tolist() == [2, 3, 4, 8, 9]
    assert handle.generated.positions.tolist() == [8, 9]
    assert len(Call().handle([3, 4], chat=Chat()).message(0)) == 2
    assert len(Call().handle([3, 4]).generated) == 0


def test_a_message_of_which_nothing_was_captured_is_refused() -> None:
    with pytest.raises(RequestError, match="message: no row of positions 5 to 6 was captured of request 7"):
        Call().handle([2, 3], chat=Chat()).message(1)
    with pytest.raises(RequestError, match="message: request 7 was no chat"):
        Call().handle().message(1)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ({"status": "error", "error": "max_bytes is 5"}, "no rows of request 7: error, max_bytes is 5"),
        ({"status": "partial_error", "error": "2 rows lost"}, "partial_error, 2 rows lost"),
        ({"status": "pending", "payload": None, "num_rows": 0}, "pending"),
    ],
)
def test_rows_that_are_missing_are_an_error(result: dict[str, Any], said: str) -> None:
    call = Call()
    with pytest.raises(ConsumerError, match=f"consumer 'rows' has .*{said}"):
        call.handle(**result).fetch()

    assert call.fetched == []


def test_handles_are_awaited() -> None:
    call = Call()
    handles = [call.handle([n]) for n in range(20)]

    async def read() -> list[Any]:
        return [await handles[0], *await asyncio.gather(*handles[1:])]

    rows = asyncio.run(read())
    assert [one.positions.tolist() for one in rows] == [[n] for n in range(20)]
    assert fetch_all(handles) == rows


def drop(*make: Callable[[], Any]) -> list[str]:
    """What is said when the only references to handles go."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for one in make:
            one()
            gc.collect()
    return [str(warning.message) for warning in said if warning.category is UnreadCaptureWarning]


def test_rows_that_are_dropped_unread_are_told_of_once_for_each_call() -> None:
    call = Call()

    said = drop(call.handle, call.handle, Call().handle)

    assert len(said) == 2
    assert all("captured rows of request 7 (80 bytes, consumer 'rows') were dropped unread" in one for one in said)


@pytest.mark.parametrize("look", [CaptureHandle.fetch, CaptureHandle.discard, lambda handle: handle[SITE]])
def test_nothing_is_said_of_rows_that_were_looked_at_or_given_up(look: Callable[[CaptureHandle], Any]) -> None:
    assert drop(lambda: look(Call().handle())) == []
    assert drop(lambda: Call().handle([])) == []


def test_rows_that_were_discarded_are_gone() -> None:
    handle = Call().handle()
    handle.fetch()
    handle.discard()

    assert handle.result.payload is None
    with pytest.raises(ConsumerError, match="they were discarded"):
        handle.fetch()


def test_a_notebook_shows_norms_once_they_are_read() -> None:
    call = Call()
    handle = call.handle(chat=Chat())

    before = handle._repr_html_()
    assert call.fetched == []
    assert "not yet: call fetch()" in before
    handle.fetch()
    assert handle._repr_html_().count("<td style=background") == 10
    assert handle.message(0)._repr_html_().count("<td style=background") == 3
    assert "max_bytes" in call.handle(status="error", error="max_bytes")._repr_html_()
