"""The mixing buffer: every row once an epoch, well mixed, the same from the same seed, resumed where it was left."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headgate.capture.schema.errors import CaptureFileError
from headgate.consumers.datasets import Dataset, MixedBatches, open_dataset, view
from tests.deadlines import patience
from tests.fakes.captured_roots import SITE, expected_facts, facts_of, write_root
from tests.fakes.sparse_shards import make_sparse

SMALL: dict[str, Any] = {"batch_size": 16, "min_rows": 60, "min_requests": 5}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mixing") / "root"
    write_root(root, [f"r{number}" for number in range(30)])
    return root


@pytest.fixture(scope="module")
def data(root: Path) -> Dataset:
    return open_dataset(root, sites=SITE)


@pytest.fixture(scope="module")
def long_data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """400 requests of 50 rows in two shards."""
    root = tmp_path_factory.mktemp("long") / "root"
    make_sparse(str(root), num_shards=2, num_requests=200, rows=50, hidden_size=2)
    return open_dataset(root)


class HeldReads:
    """Holds the reads of the mixing's thread until the test says so; no reader serves two threads meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._began, self._may_go_on = threading.Event(), threading.Event()
        self._busy: set[int] = set()
        self._read = view.RangeReader.read
        monkeypatch.setattr(view.RangeReader, "read", lambda reader, pieces: self._held(reader, pieces))

    def wait(self) -> None:
        """Wait until the thread reads."""
        assert self._began.wait(patience(30))

    def go_on(self) -> None:
        self._may_go_on.set()

    def go_on_without_thread(self) -> None:
        """The same in a forked process, where the thread that held a reader does not exist."""
        self._busy.clear()
        self.go_on()

    def _held(self, reader: view.RangeReader, pieces: Sequence[view.FileRange]) -> None:
        if threading.current_thread().name == "headgate-mixing":
            self._busy.add(id(reader))
            self._began.set()
            assert self._may_go_on.wait(patience(30))
            self._read(reader, pieces)
            self._busy.discard(id(reader))
        else:
            assert id(reader) not in self._busy
            self._read(reader, pieces)


@pytest.fixture
def read_ahead(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldReads]:
    held = HeldReads(monkeypatch)
    yield held
    held.go_on()


def numbers_of(mixed: MixedBatches) -> list[list[int]]:
    return [batch.numbers.tolist() for batch in mixed]


@pytest.mark.parametrize("min_rows", [1, 10, 60, 10_000])
@pytest.mark.parametrize("batch_size", [1, 16, 500])
def test_every_row_comes_once_an_epoch(data: Dataset, min_rows: int, batch_size: int) -> None:
    mixed = data.mixed(min_rows=min_rows, min_requests=5, batch_size=batch_size)

    found = facts_of(mixed)

    assert found == facts_of(data.batches())
    assert set(found.values()) == {1}


def test_epochs_differ_and_seeds_repeat(data: Dataset) -> None:
    two = numbers_of(data.mixed(**SMALL, epochs=2, seed=7))
    half = len(two) // 2

    for epoch in (two[:half], two[half:]):
        assert sorted(chain(*epoch)) == list(range(len(data.rows())))
    assert two[:half] != two[half:]
    assert two == numbers_of(data.mixed(**SMALL, epochs=2, seed=7))
    assert two[half:] == numbers_of(MixedBatches(data.rows(), **SMALL, seed=7, first_epoch=1))
    assert two != numbers_of(data.mixed(**SMALL, epochs=2, seed=8))


def test_a_batch_is_of_as_many_rows_and_requests_as_stated(long_data: Dataset) -> None:
    """Rows come from a buffer of at least 2000 rows and 150 requests, which follows from where they were drawn."""
    view = long_data.rows()
    mixed = long_data.mixed(batch_size=512, min_rows=2000, min_requests=150)
    buffer = mixed._buffer
    left = len(view)
    seen: set[int] = set()

    for batch in mixed:
        left -= len(batch)
        seen.update(batch.numbers.tolist())
        rows = buffer.count + len(batch)
        requests = len(set(view.requests(buffer.numbers)) | set(batch.requests.tolist()))
        if left > 2000 + 512 and len(set(view.requests(np.setdiff1d(np.arange(len(view)), list(seen))))) > 150:
            assert rows >= 2000
            assert requests >= 150
            assert buffer.num_requests == len(set(view.requests(buffer.numbers)))

    assert left == 0


def test_all_requests_that_there_are_can_be_mixed(long_data: Dataset) -> None:
    mixed = long_data.mixed(batch_size=64, min_rows=100, min_requests=400)

    batch = next(mixed)

    assert len({*batch.requests.tolist(), *mixed.view.requests(mixed._buffer.numbers).tolist()}) == 400


def test_the_order_has_no_memory_of_the_files(long_data: Dataset) -> None:
    """The mean place in the files is the middle all along, and neighbours in a batch are far apart."""
    numbers = np.concatenate(numbers_of(long_data.mixed(batch_size=100, min_rows=5000, min_requests=100)))
    total = len(numbers)

    means = numbers.reshape(10, -1).mean(axis=1) / total
    assert np.abs(means - 0.5).max() < 0.05
    assert np.mean(np.abs(np.diff(numbers))) / total == pytest.approx(1 / 3, abs=0.02)
    assert np.mean(np.diff(numbers) == 1) < 0.002


@pytest.mark.parametrize("done", [0, 1, 5, 11, 20])
@pytest.mark.parametrize("drop_sinks", [False, True])
def test_a_saved_state_goes_on_with_the_same_batches(data: Dataset, done: int, drop_sinks: bool) -> None:
    whole = numbers_of(data.mixed(**SMALL, epochs=2, drop_sinks=drop_sinks))
    first = data.mixed(**SMALL, epochs=2, drop_sinks=drop_sinks)
    for _ in range(done):
        next(first)
    state = pickle.loads(pickle.dumps(first.state_dict()))

    again = open_dataset(data.roots[0].given, sites=SITE).mixed(**SMALL, epochs=2, drop_sinks=drop_sinks)
    again.load_state_dict(state)
    rest = list(again)

    assert [batch.numbers.tolist() for batch in rest] == whole[done:]
    reread = data.rows().gather(np.concatenate([batch.numbers for batch in rest]))[SITE]
    assert np.array_equal(np.concatenate([batch.data[SITE] for batch in rest]), reread)


def test_a_state_of_other_rows_or_arguments_is_refused(data: Dataset, root: Path) -> None:
    state = data.mixed(**SMALL).state_dict()

    with pytest.raises(ValueError, match=r"other arguments: seed 0 \(here 1\)"):
        data.mixed(**SMALL, seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match="other rows"):
        open_dataset(root, sites=SITE, drop_bos=True).mixed(**SMALL).load_state_dict(state)
    with pytest.raises(ValueError, match="state of version 9"):
        data.mixed(**SMALL).load_state_dict(state | {"version": 9})


@pytest.mark.parametrize("drop_sinks", [False, True])
def test_batches_and_states_do_not_depend_on_reading_ahead(data: Dataset, drop_sinks: bool) -> None:
    settings: dict[str, Any] = {**SMALL, "epochs": 2, "drop_sinks": drop_sinks}
    ahead, plain = (MixedBatches(data.rows(), **settings, reads_ahead=value) for value in (True, False))

    for one, other in zip(ahead, plain, strict=True):
        assert np.array_equal(one.numbers, other.numbers)
        assert np.array_equal(one.data[SITE], other.data[SITE])
        states = [{**mixed.state_dict(), "pool": mixed.state_dict()["pool"].tolist()} for mixed in (ahead, plain)]
        assert states[0] == states[1]


def test_rows_are_read_ahead_while_a_batch_is_used(data: Dataset, read_ahead: HeldReads) -> None:
    """The caller reads tokens of a batch while the thread reads rows, each with files of its own."""
    mixed = data.mixed(**SMALL)

    batch = next(mixed)
    read_ahead.wait()
    assert len(batch.token_ids) == len(batch)
    read_ahead.go_on()

    assert sum(facts_of(mixed).values()) == len(data.rows()) - len(batch)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_while_rows_are_read_ahead_gets_the_same_batches(data: Dataset, read_ahead: HeldReads) -> None:
    """As a loader's workers are made. The child has no thread to wait for."""
    mixed = data.mixed(**SMALL)
    next(mixed)
    read_ahead.wait()
    receive, send = multiprocessing.get_context("fork").Pipe(duplex=False)

    if not (child := os.fork()):
        try:
            read_ahead.go_on_without_thread()
            send.send(numbers_of(mixed))
        finally:
            os._exit(0)
    send.close()
    of_child = receive.recv()
    os.waitpid(child, 0)
    read_ahead.go_on()

    assert of_child == numbers_of(mixed)


def test_a_state_can_be_loaded_while_rows_are_read_ahead(data: Dataset, read_ahead: HeldReads) -> None:
    mixed = data.mixed(**SMALL)
    state = mixed.state_dict()
    next(mixed)
    read_ahead.wait()
    read_ahead.go_on()

    mixed.load_state_dict(state)

    batches = list(mixed)
    assert facts_of(batches) == facts_of(data.batches())
    assert [batch.numbers.tolist() for batch in batches] == numbers_of(data.mixed(**SMALL))


@pytest.mark.parametrize("parts", [1, 2, 3, 100])
def test_parts_are_disjoint_and_together_whole(data: Dataset, parts: int) -> None:
    found = [facts_of(data.mixed(**SMALL, part=(number, parts))) for number in range(parts)]

    assert sum(found, type(found[0])()) == facts_of(data.batches())


def test_sinks_are_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headgate.consumers.feed import ExampleRequest

    plain = ExampleRequest.rows

    def with_sinks(self: ExampleRequest, site: Any, positions: Any) -> torch.Tensor:
        rows = plain(self, site, positions)
        rows[torch.from_numpy(positions % 4 == 2)] *= 100
        return rows

    monkeypatch.setattr(ExampleRequest, "rows", with_sinks)
    requests = write_root(tmp_path, [f"r{number}" for number in range(10)])
    mixed = open_dataset(tmp_path, sites=SITE, drop_bos=True).mixed(**SMALL, drop_sinks=True)

    found = facts_of(mixed)

    wanted = expected_facts(requests)
    assert found == {fact: count for fact, count in wanted.items() if fact[1] > 0 and fact[1] % 4 != 2}
    assert mixed.num_sinks == sum(fact[1] % 4 == 2 for fact in wanted)


def test_rows_with_nan_are_no_sinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headgate.consumers.feed import ExampleRequest

    plain = ExampleRequest.rows

    def broken(self: ExampleRequest, site: Any, positions: Any) -> torch.Tensor:
        rows = plain(self, site, positions)
        rows[0] = torch.nan
        return rows

    monkeypatch.setattr(ExampleRequest, "rows", broken)
    requests = write_root(tmp_path, ["one"])
    data = open_dataset(tmp_path, sites=SITE)

    assert sum(len(batch) for batch in data.mixed(**SMALL, drop_sinks=True)) == sum(expected_facts(requests).values())


@pytest.mark.parametrize("epochs", [1, 3, None])
def test_no_rows_are_no_batches(tmp_path: Path, epochs: int | None) -> None:
    write_root(tmp_path, ["one"], raw={"positions": "all_prompt"})

    data = open_dataset(tmp_path, sites=SITE, phases="decode")

    assert list(data.mixed(epochs=epochs)) == list(data.batches()) == []
    assert data.num_rows == {SITE: 0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size: must be at least 1, got 0"),
        ({"min_rows": 0}, "min_rows"),
        ({"min_requests": 0}, "min_requests"),
        ({"part": (2, 2)}, r"part: expected \(i, n\)"),
    ],
)
def test_bad_arguments_are_refused_by_name(data: Dataset, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data.mixed(**arguments)


@pytest.mark.parametrize("vectors", [1, 3])
def test_rows_are_read_to_their_places_however_few_a_call_takes(
    data: Dataset, monkeypatch: pytest.MonkeyPatch, vectors: int
) -> None:
    expected = numbers_of(data.mixed(**SMALL, seed=5))
    monkeypatch.setattr(view, "_VECTORS", vectors)

    assert facts_of(data.mixed(**SMALL, seed=5)) == facts_of(data.batches())
    assert numbers_of(data.mixed(**SMALL, seed=5)) == expected


def test_reads_that_are_cut_off_go_on(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.preadv

    def half(file: int, buffers: Sequence[Any], offset: int) -> int:
        first = memoryview(buffers[0]).cast("B")
        return whole(file, [first[: max(len(first) // 2, 1)]], offset)

    expected = facts_of(data.batches())
    monkeypatch.setattr(os, "preadv", half)

    assert facts_of(data.mixed(**SMALL)) == expected


def test_a_file_that_lost_rows_since_ends_mixing(tmp_path: Path) -> None:
    make_sparse(str(tmp_path / "root"), num_shards=1, num_requests=20, rows=50, hidden_size=2)
    data = open_dataset(tmp_path / "root")
    mixed = data.mixed(batch_size=16, min_rows=600, min_requests=5)
    next(mixed)
    (column,) = (path for path in (tmp_path / "root").rglob("*.bin") if "post_mlp" in path.name)
    os.truncate(column, 100)

    with pytest.raises(CaptureFileError, match="torn"):
        list(mixed)


def test_mixing_goes_on_when_a_file_can_be_read_again(tmp_path: Path) -> None:
    make_sparse(str(tmp_path / "root"), num_shards=1, num_requests=20, rows=50, hidden_size=2)
    data = open_dataset(tmp_path / "root")
    mixed = data.mixed(batch_size=16, min_rows=600, min_requests=5)
    found = [next(mixed)]
    (column,) = (path for path in (tmp_path / "root").rglob("*.bin") if "post_mlp" in path.name)
    size = column.stat().st_size
    os.truncate(column, 100)
    with pytest.raises(CaptureFileError, match="torn"):
        found.extend(mixed)  # which keeps what came before

    os.truncate(column, size)
    found += list(mixed)

    assert sorted(chain(*(batch.numbers.tolist() for batch in found))) == list(range(1000))
