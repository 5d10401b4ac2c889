"""A stream and its reader: every row once and in order, whatever breaks; slow readers; readers that stay away."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.capture.schema.consumer import ConsumerContext
from headgate.capture.schema.errors import ConfigError, ConsumerError
from headgate.consumers.datasets.feeds.torch_rows import TensorBatches, TensorsByHook
from headgate.consumers.feed import EXAMPLE_MODEL, TIMEOUT_S
from headgate.consumers.stream import (
    StreamBatch,
    StreamConsumer,
    StreamError,
    StreamGapError,
    StreamReader,
)
from tests.fakes.streams import SITE, break_connections, expected_facts, facts, streaming

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=6)


@settings(max_examples=25, deadline=None)
@given(
    outputs=LENGTHS,
    cuts=st.lists(st.integers(1, 6000), max_size=6),
    batch_size=st.none() | st.integers(1, 9),
    batch_rows=st.integers(1, 5),
)
def test_rows_come_once_and_in_order_over_connections_that_break(
    outputs: list[int], cuts: list[int], batch_size: int | None, batch_rows: int
) -> None:
    with pytest.MonkeyPatch.context() as patch, streaming(batch_rows=batch_rows) as stream:
        break_connections(patch, cuts)
        requests = [stream.send(f"r{n}", output=1 + output) for n, output in enumerate(outputs)]
        stream.end()
        with StreamReader(stream.address, sites=SITE, batch_size=batch_size) as reader:
            batches = list(reader)

    assert facts(batches) == expected_facts(requests)
    if batch_size is not None:
        assert {len(batch) for batch in batches[:-1]} <= {batch_size}


@settings(max_examples=25, deadline=None)
@given(
    outputs=LENGTHS,
    events=st.lists(st.sampled_from(["go", "checkpoint", "die"]), max_size=20),
    cuts=st.lists(st.integers(400, 4000), max_size=3),
    batch_size=st.none() | st.integers(1, 7),
)
def test_a_reader_that_dies_goes_on_at_its_checkpoint(
    outputs: list[int], events: list[str], cuts: list[int], batch_size: int | None
) -> None:
    with pytest.MonkeyPatch.context() as patch, streaming(batch_rows=3) as stream:
        break_connections(patch, cuts)
        requests = [stream.send(f"r{n}", output=1 + output) for n, output in enumerate(outputs)]
        stream.end()

        def opened(state: dict[str, Any] | None) -> StreamReader:
            reader = StreamReader(stream.address, sites=SITE, batch_size=batch_size, acknowledge="manual")
            if state is not None:
                reader.load_state_dict(state)
            return reader

        reader, batches, state, kept = opened(None), [], None, 0
        for event in events:
            batches += [batch for batch in [next(reader, None)] if batch is not None]
            if event == "checkpoint":
                state, kept = reader.state_dict(), len(batches)
                if len(facts(batches)) < len(expected_facts(requests)):  # after the last row the server is gone
                    reader.acknowledge()
            elif event == "die":
                reader.close()
                reader, batches = opened(state), batches[:kept]
        batches += reader
        reader.acknowledge()
        reader.close()

    assert facts(batches) == expected_facts(requests)


def test_a_slow_reader_is_waited_for_in_bounded_memory() -> None:
    with streaming(max_bytes=20_000, wait_s=TIMEOUT_S) as stream:
        requests: list[Any] = []

        def produce() -> None:
            requests.extend(stream.send(f"r{number}", output=9) for number in range(30))
            stream.end()

        producer = threading.Thread(target=produce)
        producer.start()
        with StreamReader(stream.address, sites=SITE, batch_size=16) as reader:
            found = facts(reader)
        producer.join(TIMEOUT_S)

    assert found == expected_facts(requests)


def test_requests_end_with_an_error_where_the_reader_is_too_slow_or_they_are_too_large() -> None:
    with streaming(max_bytes=12_000, wait_s=0) as stream:
        first = stream.send("first")
        with pytest.raises(ConsumerError, match=r"no reader is connected, and there was no room .* max_bytes, 12000"):
            [stream.send(f"r{number}") for number in range(9)]
        with StreamReader(stream.address, sites=SITE) as reader:
            assert facts([next(reader)]) == expected_facts([first])
            with pytest.raises(ConsumerError, match=r"the reader is too slow: .* max_bytes, 12000, for 0 s"):
                [stream.send(f"s{number}") for number in range(9)]
        with pytest.raises(ConsumerError, match=r"one request may have half of max_bytes, 6000"):
            stream.send("large", prompt=200)


def test_rows_of_running_requests_are_bounded() -> None:
    with streaming(running_bytes=600) as stream:
        with pytest.raises(ConsumerError, match="running_bytes is 600"):
            stream.send("large", prompt=20)
        small = stream.send("small")
        with StreamReader(stream.address, sites=SITE) as reader:
            assert facts([next(reader)]) == expected_facts([small])


def test_a_reader_that_was_away_for_too_long_is_told_so() -> None:
    with streaming(max_bytes=12_000, wait_s=0, max_away_s=0) as stream:
        stream.send("read")
        with StreamReader(stream.address, sites=SITE) as reader:
            next(reader)
            state = reader.state_dict()
        refusals = ["too slow"]
        while "too slow" in refusals[-1]:  # until the server has noticed that the reader left, and there is no room
            try:
                stream.send(f"r{len(refusals)}")
            except ConsumerError as error:
                refusals.append(str(error))
        assert refusals[-1] == "no reader has been connected for 0 s (parameter max_away_s)"
        with pytest.raises(ConsumerError, match="no reader has been connected"):  # at once, although there is room now
            stream.send("later")

        back = StreamReader(stream.address, sites=SITE)
        back.load_state_dict(state)
        with pytest.raises(StreamGapError, match=r"batch 1 is not there; the first that is kept is \d\. .* max_away_s"):
            next(back)

        with StreamReader(stream.address, sites=SITE) as new:
            found: list[StreamBatch] = []
            thread = threading.Thread(target=lambda: found.append(next(new)))
            thread.start()
            while True:  # until the server has noticed the new reader
                try:
                    last = stream.send("last")
                except ConsumerError:
                    continue
                break
            thread.join(TIMEOUT_S)
    assert facts(found) == expected_facts([last])


def test_a_server_that_was_started_anew_is_a_gap(tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/rows.sock"
    reader = StreamReader(address, sites=SITE, reconnect_s=TIMEOUT_S)
    with streaming(address=address) as stream:
        stream.send("one")
        next(reader)

    with streaming(address=address) as stream:
        stream.send("two")
        with pytest.raises(StreamGapError, match="the server was started anew"):
            next(reader)
        with StreamReader(address, sites=SITE) as new:
            assert set(next(new).request_ids) == {"client-two"}
    with pytest.raises(StreamError, match=r"no connection for 0 s: "):
        next(StreamReader(address, reconnect_s=0))


def test_a_stream_has_one_reader_at_a_time() -> None:
    with streaming() as stream:
        requests = [stream.send(name) for name in ("one", "two")]
        with StreamReader(stream.address, sites=SITE) as reader:
            next(reader)
            other = StreamReader(stream.address, sites=SITE, reconnect_s=0)
            with pytest.raises(StreamError, match="another reader is connected"):
                next(other)
            assert facts([next(reader)]) == expected_facts(requests[1:])


def test_rows_without_the_wanted_sites_are_left_out_and_do_not_fill_the_backlog(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with streaming(max_bytes=12_000, wait_s=TIMEOUT_S) as stream:
        wanted: list[Any] = []

        def produce() -> None:
            for number in range(20):
                sent = stream.send(f"r{number}", raw={"hooks": {"post_mlp": [3] if number % 7 == 3 else [1]}})
                wanted.extend([sent] if number % 7 == 3 else [])
            stream.end()

        producer = threading.Thread(target=produce)
        producer.start()
        with StreamReader(stream.address, sites=SITE, batch_size=100) as reader:
            found = facts(reader)
        producer.join(TIMEOUT_S)

    assert found == expected_facts(wanted)
    assert reader.num_lacking == 17
    assert caplog.text.count("lack 3.post_mlp and are left out") == 1


def test_a_reader_that_never_acknowledges_is_told_before_it_waits_in_vain() -> None:
    with streaming(max_bytes=12_000) as stream:
        for name in ("one", "two", "three"):
            stream.send(name)
        with StreamReader(stream.address, sites=SITE, acknowledge="manual") as reader:
            with pytest.raises(StreamError, match=r"over half of the server's max_bytes, 12000, is not acknowledged"):
                [next(reader) for _ in range(4)]
            reader.acknowledge()


def test_batches_say_all_of_their_rows() -> None:
    with streaming(batch_rows=100) as stream:
        one = stream.send("one", raw={"tag": "mine"})
        payload = stream.payload
        two = stream.send("two", raw={"hooks": {"post_mlp": [1, 3]}, "positions": "all_generated"})
        stream.end()
        with StreamReader(stream.address, batch_size=100) as reader:
            (batch,) = reader

    assert reader.sites == ("1.post_mlp", SITE)
    assert batch.tags == ["mine"] * 6 + ["default"] * 3
    assert batch.is_prefill.tolist() == [*[True] * 3, *[False] * 6]
    for site in reader.sites:
        assert facts([batch], site) == expected_facts([one, two], site)
    assert batch.torch(SITE).dtype == torch.bfloat16
    assert torch.equal(batch.torch(SITE)[:6], one.expected().rows[EXAMPLE_MODEL.sites[7]])
    batch.torch(SITE).zero_()  # its own memory
    with pytest.raises(ValueError, match=r"several sites: name one of 1\.post_mlp, 3\.post_mlp"):
        batch.torch()
    assert (payload["batches"], payload["num_rows"]) == ([0, 1], 6)


def test_trainers_feeds_take_a_stream() -> None:
    with streaming() as stream:
        requests = [stream.send(name, output=5) for name in ("one", "two")]
        with StreamReader(stream.address, sites=SITE, batch_size=4) as reader:
            provider = TensorBatches(reader, dtype=torch.float32)
            rows = torch.cat([next(provider) for _ in range(3)])
            assert provider.state_dict()["rows"] == 5
        with StreamReader(stream.address, sites=["1.post_mlp", SITE]) as both:
            both.load_state_dict(provider.state_dict())
            named = next(TensorsByHook(both, {"1.post_mlp": "blocks.1", SITE: "blocks.3"}))

    expected = torch.cat([one.expected().rows[EXAMPLE_MODEL.sites[7]] for one in requests]).float()
    assert torch.equal(rows, expected[:12])
    assert torch.equal(named["blocks.3"].float(), expected[12:])


def test_pipeline_stages_and_a_second_listener_are_refused() -> None:
    context = ConsumerContext(instance_name="stream", model=EXAMPLE_MODEL, pp_size=2)
    with pytest.raises(ConfigError, match=r"2 pipeline stages, .*location=driver"):
        StreamConsumer({"address": "tcp://127.0.0.1:0"}, context)
    with streaming() as stream, pytest.raises(ConfigError, match=r"cannot listen at tcp://127.0.0.1:\d+: .*in use"):
        StreamConsumer({"address": stream.address}, ConsumerContext(instance_name="s", model=EXAMPLE_MODEL))
