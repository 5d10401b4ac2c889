"""Fields taken out of long bodies: those equal what a plain parser would read, and the rest stays as it was."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.engine.server.bodies.parsing import (
    MAX_REST,
    MAX_VALUES,
    extract_json,
    extract_msgpack,
    read_json,
    read_msgpack,
    read_short_json,
)
from headgate.capture.schema.errors import RequestError

NAMES = ("steering_vectors", "steering_name")
LONG_TEXT = "ab+/" * 1500
LONG = [index / 7 - 20 for index in range(400)]
VECTORS = {"post_mlp": {"3": LONG, "4": {"vector": LONG, "scale": 2.0}, "5": [1.0, 2.0]}}


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        assert value.dtype == np.float64
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def check(document: dict[str, Any], **options: Any) -> dict[str, Any]:
    rest, fields = extract_json(json.dumps(document, **options).encode(), NAMES)

    assert plain(fields) == {name: document[name] for name in NAMES if name in document}
    assert json.loads(rest) == {name: value for name, value in document.items() if name not in NAMES}
    return fields


@pytest.mark.parametrize("indent", [None, 2])
def test_long_lists_become_arrays(indent: int | None) -> None:
    fields = check({"model": "m", "steering_vectors": VECTORS, "prompt": "Hi"}, indent=indent)

    vectors = fields["steering_vectors"]["post_mlp"]
    assert isinstance(vectors["3"], np.ndarray)
    assert isinstance(vectors["4"]["vector"], np.ndarray)
    assert vectors["5"] == [1.0, 2.0]


def test_lists_elsewhere_stay_as_they_were_written() -> None:
    tokens = list(range(400))
    body = json.dumps({"prompt": [tokens, tokens], "steering_name": "calm"}).encode()

    rest, fields = extract_json(body, NAMES)

    assert rest == b'{"prompt":' + json.dumps([tokens, tokens]).encode() + b"}"
    assert fields == {"steering_name": "calm"}


TEXTS = [
    json.dumps(LONG),
    f'say "{json.dumps(LONG)}"',
    'a \\" [1, 2',
    "\\\\",
    '"',
    "é\u2028🐕 [",
    LONG_TEXT,
    LONG_TEXT + "é",
    LONG_TEXT + "\\",
    LONG_TEXT + '"' + LONG_TEXT,
    LONG_TEXT + "\n",
    '{"steering_vectors": ' + json.dumps(LONG) + "}",
]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("ascii_only", [True, False])
def test_text_is_text(text: str, ascii_only: bool) -> None:
    document = {"messages": [{"role": "user", "content": text}], "steering_vectors": VECTORS, text: [text, LONG]}
    check(document, ensure_ascii=ascii_only)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=6), inner, max_size=4)
        | st.just(LONG)
        | st.just(json.dumps(LONG))
        | st.just(LONG_TEXT)
        | st.just({LONG_TEXT: LONG_TEXT})
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from([*NAMES, "model", "prompt", 'a"b', "\\"]), JSON))
def test_any_object_comes_apart_and_together(document: dict[str, Any]) -> None:
    if not any(name in document for name in NAMES):
        body = json.dumps(document).encode()
        assert extract_json(body, NAMES) == (body, {})
    else:
        check(document)


@given(st.binary(max_size=60))
def test_what_is_no_object_is_left_to_the_server(junk: bytes) -> None:
    body = b'{"steering_vectors": ' + json.dumps(LONG).encode() + junk

    rest, fields = extract_json(body, NAMES)

    try:
        document = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError:
        assert (rest, fields) == (body, {})
    else:
        assert plain(fields) == {name: document[name] for name in NAMES if name in document}


@pytest.mark.parametrize(
    "numbers", ["1, " * 200, "1 " * 200 + "1", "-" * 300, "1e999, " * 100 + "1", "01, " * 200 + "1"], ids=range(5)
)
def test_lists_that_are_none_are_left_to_the_server(numbers: str) -> None:
    body = f'{{"steering_vectors": {{"post_mlp": {{"3": [{numbers}]}}}}}}'.encode()

    assert extract_json(body, NAMES) == (body, {})


@pytest.mark.parametrize("end", [b"", b"\xff", b'"', b'"}', b'"}}}', b'" 1}'])
def test_long_strings_in_what_is_no_object_are_left_to_the_server(end: bytes) -> None:
    body = b'{"steering_vectors": {"post_mlp": {"data": "' + LONG_TEXT.encode() + end

    rest, fields = extract_json(body, NAMES)

    if end == b'"}}}':
        assert (rest, fields) == (b"{}", {"steering_vectors": {"post_mlp": {"data": LONG_TEXT}}})
    else:
        assert (rest, fields) == (body, {})


def test_a_long_string_of_bytes_that_are_no_text_is_left_to_the_server() -> None:
    body = b'{"steering_name": "' + LONG_TEXT.encode() + b'\xff"}'

    assert extract_json(body, NAMES) == (body, {})


def test_a_mark_cannot_be_guessed() -> None:
    forged = "headgate-" + "0" * 32 + "-0"
    fields = check({"steering_vectors": {"post_mlp": {"3": LONG, "4": forged}}, "prompt": forged})

    assert fields["steering_vectors"]["post_mlp"]["4"] == forged


def test_msgpack_with_raw_bytes() -> None:
    data = np.arange(8, dtype="<f4").tobytes()
    vectors = {"post_mlp": {"dtype": "float32", "shape": [1, 8], "layer_indices": [3], "data": data}}
    body = msgspec.msgpack.encode({"model": "m", "prompt": "é", "steering_vectors": vectors, "max_tokens": 3})

    rest, fields = extract_msgpack(body, NAMES)

    assert json.loads(rest) == {"model": "m", "prompt": "é", "max_tokens": 3}
    assert fields == {"steering_vectors": vectors}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "body"),
        (b"\xc1", "body"),
        (msgspec.msgpack.encode([1]), "body"),
        (msgspec.msgpack.encode({1: 2}), "body"),
        (msgspec.msgpack.encode({"prompt": b"raw"}), "prompt"),
        (msgspec.msgpack.encode({"a": [{"b": b"raw"}]}), "a"),
        (b"\x81\xa1a" + b"\x91" * 5000 + b"\x90", "body"),
        (msgspec.msgpack.encode({"steering_name": "x"})[:-1], "body"),
    ],
    ids=["empty", "reserved", "list", "number key", "bytes", "bytes within", "deep", "cut off"],
)
def test_wrong_msgpack_is_refused(body: bytes, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        extract_msgpack(body, NAMES)

    assert caught.value.field == field


@given(JSON | st.binary(max_size=60))
def test_a_whole_document_is_what_a_plain_parser_reads(document: Any) -> None:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()

    def answer(read: Any) -> Any:
        try:
            return plain(read(body))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return type(error), str(error)

    assert answer(read_json) == answer(msgspec.json.decode)


def test_numbers_that_are_too_large_are_refused() -> None:
    with pytest.raises(RequestError, match=r"^a\[0\]: expected a finite number that JSON can write, got inf"):
        read_json(b'{"a": [%s 1]}' % (b"1e999, " * 100))


MANY = 1 << 20
FIELD = b'"steering_vectors":{"post_mlp":{"3":'
TOO_MUCH = {
    "empty strings": b"[" + b'"",' * MANY + b'""]',
    "empty lists": b"[" + b"[]," * MANY + b"[]]",
    "quotes in a string": b'"' + b'\\"' * MANY + b'"',
    "backslashes": b'"' + b"\\" * 2 * MANY + b'"',
    "one list of a million numbers": b"[" + b"1," * MANY + b"1]",
    "a list wider than any model": b"[" + b"1," * 40_000 + b"1]",
    "short lists": b"[" + b"[1,2,3]," * 20_000 + b"[]]",
    "spaces": b" " * 4 * MANY + b"1",
    "half a list": b"[" + b"1," * 200_000 + b'""]',
    "text that is longer than any vector": b'"' + b"x" * (17 << 20) + b'"',
}


@pytest.mark.parametrize("value", TOO_MUCH.values(), ids=TOO_MUCH.keys())
def test_a_body_that_would_take_long_is_left_to_the_server(value: bytes) -> None:
    """It takes as much time as a body of vectors does: the CPU time of this thread says so on busy machines, too."""
    body = b"{%s%s}}}" % (FIELD, value)
    began = time.thread_time()

    rest, fields = extract_json(body, NAMES)

    assert time.thread_time() - began < 0.1  # some took seconds
    assert fields == {}
    assert rest is body


@pytest.mark.parametrize("value", TOO_MUCH.values(), ids=TOO_MUCH.keys())
def test_such_a_document_of_our_own_routes_is_refused(value: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        read_json(b'{"name":"calm",%s%s}}}' % (FIELD, value))

    assert caught.value.field == "body"


def test_long_texts_elsewhere_come_back_in_their_places() -> None:
    image = "data:image/png;base64," + "A" * (3 << 20)
    check({"messages": [{"content": [image, "between", image]}], "steering_vectors": VECTORS, "model": "m"})


FEW_BYTES = {
    "empty arrays": b"\xdd" + (4 * MANY).to_bytes(4, "big") + b"\x90" * 4 * MANY,
    "arrays within arrays": b"\x92\x90" * 50_000 + b"\xc0" * 50_001,
    "an empty promise": b"\xdd\xff\xff\xff\xff",
    "maps": b"\xdf\x00\x10\x00\x00" + b"\xa1a\xc0" * MANY,
    "numbers": b"\xdc\xff\xff" + b"\xcb\x00\x00\x00\x00\x00\x00\x00\x00" * 0xFFFF,
}


@pytest.mark.parametrize("value", FEW_BYTES.values(), ids=FEW_BYTES.keys())
@pytest.mark.parametrize("name", ["steering_vectors", "prompt"])
def test_msgpack_of_many_values_makes_none_of_them(value: bytes, name: str) -> None:
    body = b"\x81" + msgspec.msgpack.encode(name) + value
    tracemalloc.start()
    for read in (lambda: extract_msgpack(body, NAMES), lambda: read_msgpack(body)):
        with pytest.raises(RequestError, match=f"more than {MAX_VALUES} values") as caught:
            read()
        assert caught.value.field == "body"
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 1 << 20  # empty arrays took 300 MiB


VALUES: dict[str, Any] = {
    "numbers": [0, 127, 128, -1, -32, -33, 255, 256, 65535, 65536, 2**32, 2**63, -(2**31), -(2**63), 1.5, None, True],
    "texts": ["", "x" * 31, "x" * 32, "x" * 255, "x" * 256, "x" * 65535, "x" * 65536, "\u00e9"],
    "lists": [[], [0] * 15, [0] * 16, [[[]]]],
    "long lists": list(range(5000)),
    "objects": {str(number): {} for number in range(20)},
    "bytes": [b"", b"x" * 255, b"x" * 256, b"x" * 65535, b"x" * 65536],
    "extensions": [msgspec.msgpack.Ext(1, b"x" * size) for size in (1, 2, 3, 4, 8, 16, 17, 255, 256, 65536)],
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_every_kind_of_value_is_counted_as_one(value: Any) -> None:
    """What follows it is found: a value in front of it, and too many behind it."""
    assert read_msgpack(msgspec.msgpack.encode([value, "end"])) == [value, "end"]
    with pytest.raises(RequestError, match="more than"):
        read_msgpack(msgspec.msgpack.encode([value, [0] * MAX_VALUES]))


@given(st.binary(max_size=80))
def test_junk_is_msgpack_or_refused(junk: bytes) -> None:
    try:
        expected = msgspec.msgpack.decode(junk)
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError):
        with pytest.raises(RequestError):
            read_msgpack(junk)
    else:
        assert repr(told(read_msgpack(junk))) == repr(told(expected))


def told(value: Any) -> Any:
    """A value with what its extensions hold, which they do not show themselves."""
    if isinstance(value, msgspec.msgpack.Ext):
        return "extension", value.code, bytes(value.data)
    if isinstance(value, dict):
        return [(told(key), told(inner)) for key, inner in value.items()]
    return [told(inner) for inner in value] if isinstance(value, list | tuple) else value


def test_a_long_prompt_is_sent_as_json() -> None:
    with pytest.raises(RequestError, match="send JSON") as caught:
        extract_msgpack(msgspec.msgpack.encode({"prompt": "x" * MAX_REST, "steering_name": "calm"}), NAMES)

    assert caught.value.field == "body"
    with pytest.raises(RequestError, match="at most"):
        read_msgpack(msgspec.msgpack.encode({"data": b"x" * (17 << 20)}))


@pytest.mark.parametrize("error", [TypeError("unhashable type: 'dict'"), UnicodeDecodeError("utf-8", b"", 0, 1, "x")])
@pytest.mark.parametrize("read", [read_msgpack, lambda body: extract_msgpack(body, NAMES)], ids=["whole", "fields"])
def test_whatever_a_decoder_raises_is_the_bodys_mistake(
    monkeypatch: pytest.MonkeyPatch, read: Any, error: Exception
) -> None:
    """msgspec 0.18 raises a TypeError for a map as a key."""

    def decode(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(msgspec.msgpack, "decode", decode)

    with pytest.raises(RequestError) as caught:
        read(b"\x81\x80\x01")

    assert caught.value.field == "body"


@pytest.mark.parametrize("read", [read_short_json, read_json])
@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        (b'{"name": "a", "bias": NaN}', "bias", "nan"),
        (b'{"scale": [1.0, {"by": -Infinity}], "threshold": NaN}', "scale[1].by", "-inf"),
        (b"[0, Infinity]", "[1]", "inf"),
    ],
)
def test_a_field_that_is_no_number_of_json_is_named(
    read: Callable[[bytes], object], body: bytes, field: str, value: str
) -> None:
    with pytest.raises(RequestError) as refused:
        read(body)

    assert refused.value.field == field
    assert f"expected a finite number that JSON can write, got {value}" in str(refused.value)


@pytest.mark.parametrize("read", [read_short_json, read_json])
def test_what_is_no_json_for_another_reason_stays_so(read: Callable[[bytes], object]) -> None:
    for body in (b'{"a": NaN', b"", b'{"a": 1}}', b'{"a": "\xff"}'):
        with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
            read(body)


@pytest.mark.parametrize(("num_bytes", "is_long"), [(200_000, False), (9_000_000, True)])
def test_only_the_search_of_long_bodies_pauses(num_bytes: int, is_long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)

    fields = check({"steering_vectors": "A" * num_bytes, "stop": ["."]})

    assert fields["steering_vectors"] == "A" * num_bytes
    assert bool(pauses) == is_long
