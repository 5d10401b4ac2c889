"""How requests ended, as front end, engine core and workers report it to each other.

The front end's count travels in its list of requests to abort, which keeps the order with everything else it sends and
takes no round trip. Final states travel from the engine core to the workers with a ``SchedulerOutput``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from headgate.capture.engine.contracts.wire_format import Final
from headgate.capture.schema.batch import Document

_MARK = "\0headgate\0"
_SENT = "\0headgate-sent\0"


class KeptTokens(NamedTuple):
    """The tokens of a request that the front end kept when it ended the request.

    Attributes:
        num_tokens: Prompt and output.
        status: Why: ``stop`` for a stop string, ``abort``.
    """

    num_tokens: int
    status: str


def mark_kept(req_id: str, kept: KeptTokens) -> str:
    """Write an entry for the list of requests to abort: how much of `req_id` the front end kept.

    Stock vLLM takes it for the id of an unknown request, which it ignores.
    """
    return f"{_MARK}{kept.num_tokens}\0{kept.status}\0{req_id}"


def mark_sent(key: str) -> str:
    """Write an entry for the list of requests to abort: all samples of the fan-out `key` have been sent."""
    return f"{_SENT}{key}"


def is_mark(entry: str) -> bool:
    """Whether an entry of the list of requests to abort is by `mark_kept`."""
    return entry.startswith(_MARK)


class Marks(NamedTuple):
    """A list of requests to abort, parted.

    Attributes:
        ids: The requests.
        kept: What `mark_kept` wrote, by id.
        sent: The fan-outs that `mark_sent` wrote.
    """

    ids: list[str]
    kept: dict[str, KeptTokens]
    sent: list[str]


def split_marks(request_ids: Sequence[str]) -> Marks:
    """Part a list of requests to abort into the ids and the marks."""
    marks = Marks([], {}, [])
    for entry in request_ids:
        if entry.startswith(_SENT):
            marks.sent.append(entry.removeprefix(_SENT))
        elif is_mark(entry):
            num_tokens, status, req_id = entry.removeprefix(_MARK).split("\0", 2)
            marks.kept[req_id] = KeptTokens(int(num_tokens), status)
        else:
            marks.ids.append(entry)
    return marks


class Ended(NamedTuple):
    """A request as the scheduler freed it.

    Attributes:
        num_prompt: Tokens of its prompt.
        token_ids: All of its tokens.
        status: The finish reason.
        describe: Returns the notes on the rows of its first tokens, given how many of these were kept.
        num_outdated: As of `FinalState`.
    """

    num_prompt: int
    token_ids: list[int]
    status: str
    describe: Callable[[int], Document]
    num_outdated: int

    def final(self, kept: KeptTokens | None) -> Final:
        """Cut it to what the front end kept, unless the engine ended the request at the very same token."""
        token_ids, status = self.token_ids, self.status
        if kept is not None and (kept.num_tokens < len(token_ids) or status == "abort"):
            token_ids, status = token_ids[: kept.num_tokens], kept.status
        return self.num_prompt, token_ids, status, self.describe(len(token_ids)), self.num_outdated


class SchedulerEnds:
    """The ends of one scheduler's requests. Used on the engine core's thread only.

    Attributes:
        finals: Final states to be reported with the next step, by request id.
    """

    def __init__(self) -> None:
        self.finals: dict[str, Final | None] = {}
        self._kept: dict[str, KeptTokens] = {}
        self._held: dict[str, Ended] = {}

    def end(self, req_id: str, ended: Ended, *, is_decided: bool) -> None:
        """Note the end of a request that was freed; if not `is_decided`, the front end's count is waited for."""
        kept = self._kept.pop(req_id, None)
        if kept is not None or is_decided:
            self.finals[req_id] = ended.final(kept)
        else:
            self._held[req_id] = ended
            self.finals[req_id] = None

    def front_end_kept(self, req_id: str, kept: KeptTokens, *, is_running: bool) -> None:
        """Note how much the front end kept of `req_id`. A second time is ignored: vLLM delivers aborts twice."""
        if req_id in self._held:
            self.finals[req_id] = self._held.pop(req_id).final(kept)
        elif is_running:
            self._kept[req_id] = kept

    def front_end_left(self, req_id: str) -> None:
        """Note that the front end gave up on `req_id` and sends nothing more about it."""
        if req_id in self._held:
            self.finals[req_id] = self._held.pop(req_id).final(None)

    def pop_finals(self) -> dict[str, Final | None]:
        """Return what is to be reported now, once."""
        finals, self.finals = self.finals, {}
        return finals
