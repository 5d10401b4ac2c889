"""Fields taken out of long bodies: those equal what a plain parser would read, and the rest stays as it was."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.engine.server.bodies.parsing import extract_json, extract_msgpack, read_json
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


def test_numbers_that_are_none_are_refused_as_a_plain_parser_does() -> None:
    with pytest.raises(msgspec.DecodeError, match="out of range"):
        read_json(b'{"a": [%s 1]}' % (b"1e999, " * 100))
