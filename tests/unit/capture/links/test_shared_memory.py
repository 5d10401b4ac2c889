"""Leases that another process releases, and the number that announces a copy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading

import pytest
import torch

from headgate.capture.links import shared_memory
from headgate.capture.links.shared_memory import (
    MAX_LEASES,
    NumberedCopy,
    SharedArena,
    SharedMemory,
    SharedRows,
    SharedStaging,
)
from headgate.capture.schema.errors import UnsupportedError
from headgate.capture.staging.host_rows import GRANULARITY
from tests.fakes.pipeline import TIMEOUT_S


def arena_of(num_granules: int) -> tuple[SharedArena, SharedRows]:
    shared = SharedMemory(1024)
    return SharedArena(num_granules * GRANULARITY, shared), SharedRows(shared)


def test_released_leases_are_free_again_in_order() -> None:
    arena, rows = arena_of(2)
    first, second = arena.try_lease(1), arena.try_lease(GRANULARITY)
    assert (first.number, second.number) == (1, 2)
    assert arena.try_lease(1) is None

    rows.release(second)
    assert arena.num_leased == 2 * GRANULARITY  # the first one is still being read
    rows.release(first)

    assert arena.num_leased == 0
    assert arena.try_lease(2 * GRANULARITY).number == 3


def test_more_leases_come_and_go_than_there_are_numbers() -> None:
    arena, rows = arena_of(4)
    held = []
    for number in range(1, 3 * MAX_LEASES):
        held.append(arena.try_lease(1))
        assert held[-1].number == number
        if len(held) == 4:
            assert arena.try_lease(1) is None
            rows.release(held.pop(0))
            assert rows._shared.words[0] == 0


def test_no_more_leases_are_out_than_their_numbers_tell_apart() -> None:
    arena, rows = arena_of(MAX_LEASES)
    leases = [arena.try_lease(1) for _ in range(MAX_LEASES // 2)]
    assert arena.try_lease(1) is None

    rows.release(leases[0])

    assert arena.try_lease(1) is not None


def test_a_waiting_step_thread_goes_on_when_memory_is_released() -> None:
    arena, rows = arena_of(1)
    lease, found = arena.try_lease(1), []
    waiter = threading.Thread(target=lambda: found.append(arena.lease(1, TIMEOUT_S)))
    waiter.start()

    rows.release(lease)
    waiter.join(TIMEOUT_S)

    assert found[0].number == 2


def test_nobody_waits_for_memory_without_patience_or_without_a_reader() -> None:
    arena, _ = arena_of(1)
    arena.try_lease(1)
    assert arena.lease(1, patience_s=0) is None

    arena.leave(0)
    assert not arena.is_served
    assert arena.lease(1, patience_s=TIMEOUT_S) is None

    arena.enter(0)
    assert arena.is_served
    assert arena.try_lease(1) is not None


def test_a_lease_is_free_when_every_reader_has_given_it_back() -> None:
    shared = SharedMemory(1024, num_readers=3)
    arena = SharedArena(GRANULARITY, shared)
    first, second, third = (SharedRows(shared, reader) for reader in range(3))
    lease = arena.try_lease(1)

    first.release(lease)
    arena.release_for(lease, 1)  # as if it had not got the rows
    assert arena.try_lease(1) is None
    third.release(lease)
    lease = arena.try_lease(1)
    assert lease.number == 2

    second.release(lease)
    third.release(lease)
    arena.leave(0)
    assert arena.is_served
    assert arena.try_lease(1) is None  # whoever reads it may still do so
    arena.enter(0)
    lease = arena.try_lease(1)
    assert lease.number == 3

    arena.release(lease)
    assert arena.num_leased == 0


def test_both_ends_see_the_same_rows() -> None:
    staging = SharedStaging(64, 8, torch.float32, torch.device("cpu"))
    shared = staging.shared
    far = SharedMemory(64 * 8 * 4, fds=(shared.memory_fd, shared.freed_fd))

    staging.rows_AD.copy_(torch.arange(64 * 8).view(64, 8))

    assert torch.equal(far.rows(8, torch.float32), torch.arange(64.0 * 8).view(64, 8))


@pytest.mark.parametrize("number", [1, MAX_LEASES // 2, MAX_LEASES - 1, MAX_LEASES, 5 * MAX_LEASES + 3])
def test_a_copy_has_arrived_when_its_number_or_a_later_one_stands_there(number: int) -> None:
    shared = SharedMemory(1024)
    rows = SharedRows(shared)

    shared.words[0] = (number - 1) % MAX_LEASES
    assert not shared.has_arrived(number)
    for ahead in (0, 1, MAX_LEASES // 2 - 1):
        shared.words[0] = (number + ahead) % MAX_LEASES
        assert shared.has_arrived(number)
    NumberedCopy(rows, number).wait()


def test_a_copy_that_never_arrives_is_not_waited_for_once_the_engine_is_gone() -> None:
    rows = SharedRows(SharedMemory(1024))
    rows.is_over = True

    with pytest.raises(ConnectionError, match="the engine is gone"):
        NumberedCopy(rows, 1).wait()


class _Copier:
    """Copies at once, but for what a test withholds."""

    def __init__(self, lost: int | None = None, scale: float = 1) -> None:
        self._lost, self._scale = lost, scale
        self._num_fetched = 0

    def wait_for_forward(self) -> None:
        pass

    def fetch(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if self._num_fetched != self._lost:
            target.copy_(source if source.dtype == torch.int64 else source * self._scale)
        self._num_fetched += 1


def test_the_way_into_shared_memory_is_proved_before_it_is_used() -> None:
    staging = SharedStaging(4 * GRANULARITY, 16, torch.bfloat16, torch.device("cpu"))

    staging.prove(_Copier())

    assert staging.arena.num_leased == 0
    assert staging.arena.try_lease(4 * GRANULARITY).number == 2
    staging.close()


@pytest.mark.parametrize(
    ("copier", "what"),
    [
        (_Copier(lost=1), r"nothing in 0\.01 s"),
        (_Copier(lost=0), "other values than it was sent"),
        (_Copier(scale=2), "other values than it was sent"),
    ],
    ids=["no number", "no row", "another row"],
)
def test_a_way_that_loses_rows_is_refused(copier: _Copier, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "PROOF_S", 0.01)
    staging = SharedStaging(4 * GRANULARITY, 16, torch.bfloat16, torch.device("cpu"))

    with pytest.raises(UnsupportedError, match=rf"copied into shared memory.*brought {what}; set capture.processes"):
        staging.prove(copier)
    staging.close()


IN_SMALL_CONTAINER = """
mount -t tmpfs -o size=1m headgate-test /dev/shm && exec {python} -c '
import shutil, torch
from headgate.capture.links.shared_memory import SharedStaging
assert shutil.disk_usage("/dev/shm").total == 1 << 20
staging = SharedStaging(16384, 1024, torch.bfloat16, torch.device("cpu"))
staging.rows_AD.fill_(1)
assert float(staging.rows_AD.float().mean()) == 1
print(staging.rows_AD.nbytes >> 20, "MiB")
'
"""
"""Docker gives a container a ``/dev/shm`` of 64 MiB, whatever its memory is."""


def test_staging_memory_takes_no_room_in_dev_shm() -> None:
    namespaces = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    if shutil.which("unshare") is None or subprocess.run([*namespaces, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets no process mount its own /dev/shm")
    script = IN_SMALL_CONTAINER.format(python=sys.executable)
    done = subprocess.run([*namespaces, "sh", "-c", script], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout) == (0, "32 MiB\n"), done.stderr
