"""The tokens that activate one feature most, in their context, from captured rows."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from headgate.capture.engine.contracts.captures import StoredRequest
from headgate.capture.engine.contracts.parts import stored_requests
from headgate.steering.features.check import site_of_reads
from headgate.steering.features.sparse_coder import SparseCoder
from headgate.steering.features.tensors import FeatureFileError

Decode = Callable[[Sequence[int]], str]
_ROWS = 1024


class Example(msgspec.Struct, kw_only=True):
    """One token that activates a feature.

    Attributes:
        activation: Of the feature.
        tag: Of the capture.
        request_id: Of the capture.
        position: Of the token.
        token_id: The token.
        before: Text of captured tokens before it, ``...`` where positions between were not captured.
        token: Its text.
        after: Text of captured tokens behind it.
    """

    activation: float
    tag: str
    request_id: str
    position: int
    token_id: int
    before: str
    token: str
    after: str


class Shown(msgspec.Struct, kw_only=True):
    """A feature on captured rows.

    Attributes:
        name: Of the coder.
        feature: Its number.
        num_rows: Rows that were looked at, those at position 0 left out; the feature is active in `num_active` of them.
        examples: The largest activations first.
    """

    name: str
    feature: int
    num_rows: int
    num_active: int
    examples: list[Example]


def show(coder: SparseCoder, feature: int, root: str, *, decode: Decode, top: int = 10, context: int = 12) -> Shown:
    """Find the tokens that activate a feature most.

    Args:
        coder: An SAE or transcoder with a read site.
        feature: Its number.
        root: Of the captured rows.
        decode: Turns ids of tokens into text.
        top: How many tokens.
        context: How many tokens before, and behind, each.

    Raises:
        FeatureFileError: If there is no such feature, or no request has rows of the coder's site and width.
        CaptureFileError: If the captures cannot be read.
    """
    if not 0 <= feature < coder.num_features:
        raise FeatureFileError(f"{coder.name}: no feature {feature}; it has 0 to {coder.num_features - 1}")
    site = site_of_reads(coder)
    largest: list[tuple[float, int, int, StoredRequest]] = []
    num_rows = num_active = 0
    for number, request in enumerate(stored_requests(root)):
        if site not in request.sites:
            continue
        activations = _activations(coder, feature, request)
        num_rows += int((request.positions > 0).sum())
        num_active += int((activations > 0).sum())
        for row in np.argsort(-activations)[:top]:
            if activations[row] > 0:
                entry = (float(activations[row]), -number, -int(row), request)
                (heapq.heappush if len(largest) < top else heapq.heappushpop)(largest, entry)
    if not num_rows:
        raise FeatureFileError(f"{root}: no captured rows at {site.name}, where {coder.name} reads")
    examples = [_example(entry, context, decode) for entry in sorted(largest, reverse=True)]
    return Shown(name=coder.name, feature=feature, num_rows=num_rows, num_active=num_active, examples=examples)


def _activations(coder: SparseCoder, feature: int, request: StoredRequest) -> npt.NDArray[np.float32]:
    """Activations of a request's rows; 0 at position 0, whose long row activates features that mean nothing there."""
    rows = request.numpy(site_of_reads(coder))
    if rows.shape[1] != coder.width:
        raise FeatureFileError(
            f"{coder.name}: reads rows of width {coder.width}, but those of {request.request_id} have {rows.shape[1]}"
        )
    parts = [coder.encode_few(rows[start : start + _ROWS], [feature])[:, 0] for start in range(0, len(rows), _ROWS)]
    activations: npt.NDArray[np.float32] = np.concatenate([np.zeros(0, np.float32), *parts])
    activations[request.positions == 0] = 0
    return activations


def _example(entry: tuple[float, int, int, StoredRequest], context: int, decode: Decode) -> Example:
    activation, _, row, request = entry
    row = -row
    positions, tokens = request.positions, request.token_ids
    return Example(
        activation=activation,
        tag=request.tag,
        request_id=request.request_id,
        position=int(positions[row]),
        token_id=int(tokens[row]),
        before=_text(positions, tokens, max(0, row - context), row, decode),
        token=decode([int(tokens[row])]),
        after=_text(positions, tokens, row + 1, row + 1 + context, decode),
    )


def _text(
    positions: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64], start: int, stop: int, decode: Decode
) -> str:
    """Text of rows `start` to `stop`, runs of neighbouring positions decoded as one."""
    positions, tokens = positions[start:stop], tokens[start:stop]
    gaps = np.flatnonzero(np.diff(positions) != 1) + 1
    return " ... ".join(decode(part.tolist()) for part in np.split(tokens, gaps)) if len(tokens) else ""
