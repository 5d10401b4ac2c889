"""Live rows: all of them once, mixed, the same for one seed, within the bytes that they may take."""

from __future__ import annotations

import gc
import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.errors import ConfigError, ConsumerError
from headgate.capture.schema.results import CaptureResult
from headgate.capture.schema.sites import Site
from headgate.consumers.feed import EXAMPLE_MODEL, ExampleRequest
from headgate.consumers.harvest import LiveRows, Wanted, parse_site_names
from tests.deadlines import patience
from tests.fakes.harvesting import ROW_BYTES, FakeEngine, Unrenderable

COST = ROW_BYTES + 16
"""Bytes of a row of one site in the pool."""
Rows = Counter[bytes]


def rows_in(batches: Sequence[torch.Tensor]) -> Rows:
    """Rows by their values, which no two rows of the fake engine share."""
    return Counter(row.tobytes() for batch in batches for row in batch.view(torch.uint8).numpy())


def rows_by_prompt(prompts: Sequence[Sequence[int]], *, site: str = "1.post_mlp", **fields: Any) -> list[list[bytes]]:
    """The rows of each prompt as the engine gives them."""
    wanted = Wanted(sites=parse_site_names(site), **fields)
    found = []
    for index, prompt in enumerate(prompts):
        task = wanted.plan(index, prompt, 63)
        specs = [{"hooks": wanted.hooks, "positions": task.positions}] if task is not None else []
        results = FakeEngine().run([task], wanted, "memory", specs) if task is not None else []
        found.append([row for result in results for row in rows_in([result.payload[site]])])
    return found


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(0, 12), max_size=30),
    batch_size=st.integers(1, 9),
    pool=st.integers(24, 60),
    batch=st.integers(1, 6),
    drop_first=st.integers(0, 3),
)
def test_each_row_comes_once(lengths: list[int], batch_size: int, pool: int, batch: int, drop_first: int) -> None:
    prompts = [[7] * length for length in lengths]
    engine = FakeEngine()

    bounds: dict[str, Any] = {"batch_size": batch_size, "max_bytes": 2 * pool * COST, "batch": batch}
    with LiveRows(engine, prompts, "1.post_mlp", drop_first=drop_first, **bounds) as rows:
        batches = list(rows.of_one_site())

    expected = Counter(row for rows in rows_by_prompt(prompts, drop_first=drop_first) for row in rows)
    assert rows_in(batches) == expected
    assert sum(expected.values()) == sum(max(length - drop_first, 0) for length in lengths)
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert engine.peak_bytes <= pool * COST
    gc.collect()
    assert engine.held_bytes == 0


def test_batches_of_several_sites_have_the_same_tokens() -> None:
    prompts = [[7] * 10 for _ in range(8)]
    names = ["1.post_mlp", "3.post_mlp"]
    lone = {}
    for name in names:
        with LiveRows(FakeEngine(), prompts, name, batch_size=16, max_bytes=1 << 20) as rows:
            lone[name] = torch.cat(list(rows.of_one_site()))

    with LiveRows(FakeEngine(), prompts, names, batch_size=16, max_bytes=1 << 20) as both:
        batches = list(both)
        with pytest.raises(ValueError, match=r"1\.post_mlp, 3\.post_mlp"):
            both.of_one_site()

    assert [{name: tuple(rows.shape) for name, rows in batch.items()} for batch in batches] == [
        dict.fromkeys(names, (16, EXAMPLE_MODEL.hidden_size))
    ] * 5
    assert all(rows.dtype is torch.bfloat16 for batch in batches for rows in batch.values())
    for name in names:
        assert torch.equal(torch.cat([batch[name] for batch in batches]), lone[name])


def test_the_same_seed_gives_the_same_batches_and_another_one_others() -> None:
    prompts = [[7] * 10 for _ in range(20)]

    def batches(seed: int) -> list[torch.Tensor]:
        with LiveRows(FakeEngine(), prompts, "1.post_mlp", batch_size=8, max_bytes=80 * COST, seed=seed) as rows:
            return list(rows.of_one_site())

    first, again, other = batches(0), batches(0), batches(1)

    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def test_a_batch_is_drawn_from_a_full_buffer() -> None:
    """Of a pool of 200 rows, a first batch of 100 has rows of nearly all the 20 prompts that fill it."""
    prompts = [[7] * 10 for _ in range(60)]
    place = {row: index for index, rows in enumerate(rows_by_prompt(prompts)) for row in rows}

    with LiveRows(FakeEngine(), prompts, "1.post_mlp", batch_size=100, max_bytes=400 * COST) as rows:
        first = next(rows.of_one_site())

    found = {place[row.tobytes()] for row in first.view(torch.uint8).numpy()}
    assert found <= set(range(20))
    assert len(found) >= 15


def test_sinks_are_left_out_wherever_they_lie_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ExampleRequest.rows

    def with_sinks(self: ExampleRequest, site: Site, positions: Int64Array) -> torch.Tensor:
        rows = plain(self, site, positions)
        if site.layer == 1:
            rows[torch.from_numpy(positions % 4 == 2)] *= 100
        return rows

    monkeypatch.setattr(ExampleRequest, "rows", with_sinks)
    prompts = [[7] * 10 for _ in range(20)]
    names = ["1.post_mlp", "3.post_mlp"]
    bounds: dict[str, Any] = {"batch_size": 8, "max_bytes": 1 << 20, "batch": 4, "drop_first": 1}

    with LiveRows(FakeEngine(), prompts, names, drop_sinks=True, **bounds) as rows:
        found = list(rows)

    for name in names:
        expected = Counter(
            row for of_prompt in rows_by_prompt(prompts, drop_first=1, site=name) for row in without(of_prompt, (1, 5))
        )
        assert rows_in([batch[name] for batch in found]) == expected
    assert rows.num_sinks == 20 * 2  # positions 2 and 6 of each


def without(rows: Sequence[bytes], places: Sequence[int]) -> list[bytes]:
    return [row for place, row in enumerate(rows) if place not in places]


class TellingEngine(FakeEngine):
    """Says when a batch of prompts begins."""

    def __init__(self) -> None:
        super().__init__()
        self._begun = threading.Semaphore(0)

    def run(self, *args: Any) -> list[CaptureResult]:
        self._begun.release()
        return super().run(*args)

    def begins(self, count: int) -> bool:
        """Whether so many batches begin, and no more within a moment."""
        have_begun = all(self._begun.acquire(timeout=patience(60)) for _ in range(count))
        return have_begun and not self._begun.acquire(timeout=0.3)


def test_generation_waits_for_the_trainer() -> None:
    """A pool of 40 rows, batches of prompts of 20: two of these run ahead of what the pool has taken."""
    engine = TellingEngine()
    prompts = ([7] * 10 for _ in itertools.count())

    with LiveRows(engine, prompts, "1.post_mlp", batch_size=20, max_bytes=80 * COST) as rows:
        assert engine.begins(2)
        assert engine.held_bytes == 40 * ROW_BYTES
        next(rows)  # the pool takes two batches of prompts
        assert engine.begins(2)
        for _ in range(3):  # each draw makes room for one
            next(rows)
            assert engine.begins(1)


def test_an_iterator_that_is_dropped_ends_its_thread() -> None:
    rows = LiveRows(
        FakeEngine(), ([7] * 10 for _ in itertools.count()), "1.post_mlp", batch_size=2, max_bytes=80 * COST
    )
    next(rows)
    threads = [thread for thread in threading.enumerate() if thread.name == "headgate-live-rows"]

    del rows
    gc.collect()

    assert len(threads) == 1
    threads[0].join(patience(60))
    assert not threads[0].is_alive()


def test_what_goes_wrong_in_the_engine_is_raised_where_rows_are_taken() -> None:
    class Broken(FakeEngine):
        def run(self, *args: Any) -> list[CaptureResult]:
            raise RuntimeError("the engine is gone")

    with LiveRows(Broken(), [[7] * 5], "1.post_mlp", batch_size=2, max_bytes=1 << 20) as rows:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the engine is gone"):
                next(rows)


def test_a_prompt_whose_rows_did_not_come_is_named() -> None:
    class Full(FakeEngine):
        def run(self, tasks: Any, wanted: Any, consumer: str, specs: Sequence[Mapping[str, Any]]) -> Any:
            assert consumer == "ram"
            return [CaptureResult(status="error", error="they do not fit") for _ in specs]

    with (
        LiveRows(Full(), [[7] * 5], "1.post_mlp", batch_size=2, max_bytes=1 << 20, consumer="ram") as rows,
        pytest.raises(ConsumerError, match="prompt-0: they do not fit"),
    ):
        next(rows)


def test_records_that_are_no_prompts_are_named_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    given: list[Any] = ["ab", 5, Unrenderable("cd"), "ef"]
    with LiveRows(FakeEngine(), given, "1.post_mlp", batch_size=2, max_bytes=1 << 20) as rows:
        found = rows_in(list(rows.of_one_site()))

        assert rows.num_refused == 2
    expected = rows_by_prompt([[0, 1], [], [], [0, 1]])
    assert found == Counter([*expected[0], *expected[3]])
    assert "left out: prompts: prompt 1: expected a text" in caplog.text
    assert "left out: prompts: prompt 2: messages: the template refuses" in caplog.text


def test_records_none_of_which_is_a_prompt_end_with_the_first_reason() -> None:
    given: list[Any] = [5, 6]
    with (
        LiveRows(FakeEngine(), given, "1.post_mlp", batch_size=2, max_bytes=1 << 20) as rows,
        pytest.raises(ConfigError, match=r"prompt 0: expected a text.*none of the 2 records can be run"),
    ):
        next(rows)


def test_a_prompt_that_cannot_fit_is_refused() -> None:
    with (
        LiveRows(FakeEngine(), [[7] * 11], "1.post_mlp", batch_size=20, max_bytes=40 * COST) as rows,
        pytest.raises(ConfigError, match="prompt-0 can have 11 rows, and a batch of prompts has room for 10"),
    ):
        next(rows)


@pytest.mark.parametrize("fields", [{"batch_size": 21}, {"batch_size": 0}, {"batch": 0}])
def test_bounds_that_hold_no_batch_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(fields))}: "):
        LiveRows(FakeEngine(), [], "1.post_mlp", **{"batch_size": 4, "max_bytes": 40 * COST, **fields})


def test_something_that_is_no_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected an LLM of vLLM or a HarvestEngine, got str"):
        LiveRows("my/model", [], "1.post_mlp")


def test_generated_rows_come_too() -> None:
    prompts = [[7] * 3 for _ in range(6)]

    def count(tokens: Any) -> int:
        engine = FakeEngine()
        with LiveRows(
            engine, prompts, "1.post_mlp", batch_size=4, max_bytes=1 << 20, tokens=tokens, max_tokens=6
        ) as rows:
            return sum(map(len, rows.of_one_site()))

    outputs = [1 + index * 5 % 6 for index in range(6)]
    assert count("generated") == sum(outputs) - 6
    assert count("all") == 3 * 6 + sum(outputs) - 6


def test_rows_belong_to_whoever_takes_them() -> None:
    with LiveRows(FakeEngine(), [[7] * 8 for _ in range(8)], "1.post_mlp", batch_size=4, max_bytes=64 * COST) as rows:
        batches: Iterator[torch.Tensor] = rows.of_one_site()
        first = next(batches)
        before = first.clone()
        rest = list(batches)

    assert torch.equal(first, before)
    first.zero_()
    assert np.isfinite(torch.cat(rest).float().numpy()).all()
