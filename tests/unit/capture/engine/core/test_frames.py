"""Long bytes in vLLM's messages."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from headgate.capture.engine.contracts.core_calls import LONG, Frame, enc_hook, ext_hook, frame_of, lift

ROWS = np.random.default_rng(0).bytes(LONG)


class Encoder(MsgpackEncoder):
    enc_hook = enc_hook(MsgpackEncoder.enc_hook)


class Decoder(MsgpackDecoder):
    ext_hook = ext_hook(MsgpackDecoder.ext_hook)


def test_only_long_bytes_become_frames_and_nothing_is_copied() -> None:
    given = {"key": b"short", "vectors": {"rows": ROWS, "layers": [1, 2]}, "n": 1}
    lifted = lift(given)
    frame = lifted["vectors"].pop("rows")
    assert isinstance(frame, Frame)
    assert np.shares_memory(frame, np.frombuffer(ROWS, np.uint8))
    assert lifted == {"key": b"short", "vectors": {"layers": [1, 2]}, "n": 1}
    assert given["vectors"]["rows"] is ROWS


def test_a_frame_travels_beside_the_message_among_the_arrays_of_vllm() -> None:
    other = np.arange(1000.0)
    message, *frames = Encoder().encode({"first": frame_of(ROWS), "array": other, "second": frame_of(ROWS[1:])})
    assert len(message) < 100
    assert [bytes(found) for found in frames] == [ROWS, other.tobytes(), ROWS[1:]]

    received = Decoder().decode([message, *frames])
    assert isinstance(received["first"], Frame)
    assert not received["first"].flags.writeable
    assert np.shares_memory(received["first"], np.frombuffer(ROWS, np.uint8))
    assert (received["first"].tobytes(), received["second"].tobytes()) == (ROWS, ROWS[1:])


@pytest.mark.parametrize("number", [b"", b"\0\0\0\0", b"\1\0\0\0", b"\xff\xff\xff\xff"])
def test_a_frame_that_a_message_does_not_have_is_refused(number: bytes) -> None:
    import msgspec

    message = msgspec.msgpack.encode(msgspec.msgpack.Ext(0x68, number))
    for given in (message, [message]):
        with pytest.raises(NotImplementedError):
            Decoder().decode(given)


@pytest.mark.parametrize("protocol", [4, 5])
def test_frames_are_pickled_on_their_way_to_workers(protocol: int) -> None:
    received = pickle.loads(pickle.dumps(frame_of(ROWS), protocol))
    assert (type(received), received.tobytes()) == (Frame, ROWS)


def test_a_pickled_frame_leaves_its_data_to_who_sends_it() -> None:
    buffers: list[Any] = []
    text = pickle.dumps(frame_of(ROWS), 5, buffer_callback=buffers.append)
    assert len(text) < 200
    received = pickle.loads(text, buffers=buffers)
    assert np.shares_memory(received, np.frombuffer(ROWS, np.uint8))


def test_a_copied_frame_holds_the_same() -> None:
    assert bytes(copy.deepcopy(frame_of(ROWS))) == ROWS
