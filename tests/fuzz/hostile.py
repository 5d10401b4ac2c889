"""Hostile bodies: good and bad ones with something foreign in them, as JSON or msgpack, cut off, mangled, or noise."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import strategies as st

from headgate.capture.schema.sites import HOOK_NAMES
from tests.fakes.bad_bodies import CAPTURES, ROUTES, STEERS
from tests.fakes.steering_forms import GOOD, ROW, listed, packed

CAPTURE = {"capture": {"rows": {"hooks": {"post_mlp": [3, 5]}, "positions": [0, 1, -1]}}, "capture_wait": True}
GENERATING: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "tiny", "prompt": "The capital of", "max_tokens": 2},
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/responses": {"model": "tiny", "input": "Hi", "max_output_tokens": 16},
}
FIELDS: Sequence[dict[str, Any]] = [
    *GOOD.values(),
    CAPTURE,
    {"steering_name": "calm"},
    {"steering_module_ref": ["calm", 2.0]},
    *(fields for fields, _ in [*CAPTURES.values(), *STEERS.values()] if len(str(fields)) < 50_000),
]
"""Fields of headgate's, right and wrong."""
OURS: Sequence[tuple[str, dict[str, Any]]] = [
    *((path, fields) for path, fields, _ in ROUTES.values()),
    ("/v1/steering/set", {"vectors": {"post_mlp": {"3": listed(ROW)}}}),
    ("/v1/steering/set", {"decode_vectors": {"post_mlp": packed([3])}, "replace": True}),
    ("/v1/steering/clear", {}),
    ("/v1/steering/modules/register", {"name": "calm", "vectors": {"post_mlp": packed([5])}}),
    ("/v1/steering/modules/unregister", {"name": "calm"}),
]
"""Bodies of headgate's own routes."""
KINDS = (
    *("application/json", "application/json; charset=utf-16", "application/msgpack", "application/x-msgpack"),
    *("text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "", "é" * 20, "a" * 5000),
)
WORDS = (
    *HOOK_NAMES,
    "0",
    "3",
    "-1",
    "30",
    "vector",
    "scale",
    "data",
    "dtype",
    "shape",
    "layer_indices",
    "hooks",
    "rows",
)
LONGEST = 300_000


@dataclass(frozen=True)
class Body:
    """What is sent.

    Attributes:
        path: Route.
        content: Bytes.
        kind: Content type.
        cut: The connection promises the whole content, sends this many bytes and ends; None: everything is sent.
    """

    path: str
    content: bytes
    kind: str
    cut: int | None = None

    def __repr__(self) -> str:
        shown = (
            repr(self.content) if len(self.content) < 2000 else f"{self.content[:1000]!r}...{len(self.content)} bytes"
        )
        return f"Body({self.path!r}, {shown}, {self.kind!r}, cut={self.cut})"


class Raw(str):
    """JSON text that stands in the body as it is."""


def nested(depth: int) -> Raw:
    """Lists in lists."""
    return Raw("[" * depth + "]" * depth)


plain_leaves: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(WORDS),
    st.sampled_from([listed(ROW), packed([3]), [576], "float32", "all", "", {}, []]),
)
hostile_leaves: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(
        [Raw('"\\ud800"'), Raw('"\\udc00\\ud800x"'), Raw("1e309"), Raw("-1e999"), Raw("NaN"), Raw("-Infinity")]
    ),
    st.sampled_from(
        [Raw("1" * 400), Raw("-" + "9" * 5000), Raw("0." + "1" * 5000), Raw("1e-400"), 2**63, 2**64, -(2**63) - 1]
    ),
    st.sampled_from([10, 100, 1000, 5000, 100_000]).map(nested),
    st.sampled_from([100, 5000]).map(lambda depth: Raw('{"a":' * depth + "1" + "}" * depth)),
    st.sampled_from([Raw('{"a": 1, "a": 2}'), Raw('{"post_mlp": [3], "post_mlp": [5]}'), Raw('{"": {"": ""}}')]),
    st.sampled_from([100, 20_000, LONGEST // 8]).map(lambda count: Raw("[" + ",".join(["3"] * count) + "]")),
    st.sampled_from([100, 20_000]).map(lambda count: Raw("[" + ",".join(map(str, range(count))) + "]")),
    st.sampled_from([100, 5000]).map(lambda count: Raw("{" + ",".join(f'"{n}":{n}' for n in range(count)) + "}")),
    st.sampled_from([1000, LONGEST]).map(lambda count: "x" * count),
    st.sampled_from([1000, LONGEST // 6]).map(lambda count: Raw('"' + "\\u0000" * count + '"')),
    st.text(st.characters(exclude_categories=()), max_size=8).map(lambda text: Raw(json.dumps(text))),
)
leaves = plain_leaves | hostile_leaves


@st.composite
def mutated(draw: Callable[..., Any], document: Any) -> Any:
    """`document` with one node replaced, left out, or with something new beside it."""
    if isinstance(document, dict) and document and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(document, key=str)))
        return {**document, key: draw(mutated(document[key]))}
    if isinstance(document, list) and 0 < len(document) < 50 and draw(st.booleans()):
        index = draw(st.integers(0, len(document) - 1))
        return [*document[:index], draw(mutated(document[index])), *document[index + 1 :]]
    if isinstance(document, dict) and draw(st.booleans()):
        return {**document, draw(st.sampled_from(WORDS) | st.text(max_size=4)): draw(leaves)}
    return draw(leaves)


def as_json(document: Any) -> bytes:
    """JSON with `Raw` texts in it, and with lone surrogates escaped."""
    if isinstance(document, Raw):
        return document.encode()
    if isinstance(document, dict):
        return (
            b"{"
            + b",".join(json.dumps(str(key)).encode() + b":" + as_json(one) for key, one in document.items())
            + b"}"
        )
    if isinstance(document, list) and not all(isinstance(one, float) for one in document):
        return b"[" + b",".join(map(as_json, document)) + b"]"
    return json.dumps(document).encode()


def as_msgpack(document: Any) -> bytes:
    """The same as msgpack, as far as it can say it; what it cannot is a text."""
    try:
        return msgspec.msgpack.encode(_plain(document))
    except (OverflowError, UnicodeEncodeError, RecursionError, ValueError):
        return as_json(document)


def _plain(document: Any) -> Any:
    if isinstance(document, Raw):
        try:
            return json.loads(document)
        except (ValueError, RecursionError):
            return str(document)
    if isinstance(document, dict):
        return {key: _plain(value) for key, value in document.items()}
    return [_plain(value) for value in document] if isinstance(document, list) else document


@st.composite
def documents(draw: Callable[..., Any]) -> tuple[str, Any]:
    """A route and a body: of headgate's own routes, or of a generating one with headgate's fields in it."""
    if draw(st.booleans()):
        path, document = draw(st.sampled_from(OURS))
    else:
        path = draw(st.sampled_from(sorted(GENERATING)))
        document = draw(st.sampled_from(FIELDS))
        if draw(st.booleans()):
            document = {**document, **draw(st.sampled_from(FIELDS))}
    for _ in range(draw(st.integers(0, 3))):
        document = draw(mutated(document))
    if path in GENERATING and isinstance(document, dict):
        # What is vLLM's own stays small and right: its reading of it is no matter of ours.
        document = {**document, **GENERATING[path]}
        if draw(st.booleans()):
            document["stream"] = True
    return path, document


@st.composite
def bodies(draw: Callable[..., Any]) -> Body:
    """Anything."""
    path, document = draw(documents())
    kind = draw(st.sampled_from(KINDS[:1] * 6 + KINDS[2:3] * 4 + KINDS))
    content = as_msgpack(document) if "msgpack" in kind else as_json(document)
    match draw(st.integers(0, 11)):
        case 0:
            content = content[: draw(st.integers(0, len(content)))]
        case 1 if content:
            place = draw(st.integers(0, len(content) - 1))
            content = content[:place] + draw(st.binary(max_size=8)) + content[place + draw(st.integers(0, 8)) :]
        case 2:
            content = draw(st.binary(max_size=200))
        case 3:
            return Body(path, content, kind, cut=draw(st.integers(0, len(content))))
    return Body(path, content, kind)
