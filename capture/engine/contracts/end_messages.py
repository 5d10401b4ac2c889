"""How a request ended, as front end, engine core and worker tell each other.

The front end's count travels in its list of requests to abort, which keeps the order with everything else it sends and
takes no round trip. Final states travel from the engine core to the workers as the attribute `FINAL_ATTRIBUTE` of a
`SchedulerOutput`, by request id; None means that the request ended and its final state follows later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headgate.capture.engine.contracts.plain_values import Document

FINAL_ATTRIBUTE = "headgate_final"
Final = tuple[int, list[int], str, Document, int]
"""Number of prompt tokens, all token ids, the finish reason, notes on rows by part, and `FinalState.num_outdated`."""
OVERLOADED = "headgate: overloaded: "
"""Start of the stop reason of a request that was sent away unserved, with the finish reason "error"; the cause
follows."""
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
        sent: The fan-outs of which `mark_sent` wrote.
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
