"""Readouts on the device: outputs of kept rows, in place of the rows, on their way into host memory.

They are computed after the forward, by its stream, as rows are packed there. Outputs gather in a buffer on the device
and leave it by few copies.

Shapes: F rows of a flat block of the ring (the slots of all sites of one shape), C rows of a chunk, N rows of a job, P
outputs, A arguments, D width of the site's rows, V outputs of all jobs of a part, with the gaps between their groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from headgate.capture.monitoring.logs import SparseLog
from headgate.capture.planning.step_plan import PackGroup, memory_rows, row_cost, unwanted
from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.config import MIB
from headgate.capture.schema.consumer import (
    MAX_OUTPUTS,
    OUTPUT_BYTES,
    HeadReadout,
    HeadReduction,
    Readout,
    RowArguments,
)
from headgate.capture.schema.errors import ConfigError, UnsupportedError
from headgate.capture.schema.sites import SiteShape

CHUNK_BYTES = 32 * MIB
"""Size of the widened rows that a readout gets at a time, at most."""
BUFFER_OUTPUTS = 4 * MAX_OUTPUTS
"""Size of each of the two buffers that outputs gather in, as float32."""

Function = Callable[..., Tensor]
NO_ARGUMENT = -1


class BoundReadout(NamedTuple):
    """A readout on the device of the forward.

    Attributes:
        source: Index of its site among those of the ring.
        num_outputs: ``P``.
        function: Float64 ``[n, D]``, and `RowArguments` if there are any, to ``[n, P]``.
        num_arguments: ``A``.
        bit: The consumer's.
        transport: Maps rows of this site ahead of `function`, which then is of several sites: it is called once with
            the rows of all of them. None if `function` is of this site alone.
    """

    source: int
    num_outputs: int
    function: Function
    num_arguments: int = 0
    bit: int = 0
    transport: Function | None = None

    def __call__(self, rows_ND: Tensor, arguments: RowArguments | None) -> Tensor:
        """Compute the outputs of rows of its site."""
        transported = rows_ND if self.transport is None else _called(self.transport, rows_ND, arguments)
        return _called(self.function, transported, arguments)


def _called(function: Function, rows_ND: Tensor, arguments: RowArguments | None) -> Tensor:
    return function(rows_ND) if arguments is None else function(rows_ND, arguments)


Reduce = Callable[[HeadReduction], Function]
"""Finds the function of a reduction with the model's head: the same one for the same reduction."""


def no_head(*_: object) -> NoReturn:
    """Stand in for what finds the model's head, or brings a reduction to it, where there is none."""
    raise UnsupportedError("there is no model's head here")


def bind(
    readout: Readout,
    source: int,
    *,
    width: int,
    device: torch.device,
    name: str,
    bit: int = 0,
    reduce: Reduce = no_head,
) -> BoundReadout:
    """Bring a readout to the device, and try it there.

    Args:
        readout: As declared.
        source: Index of its site among those of the ring.
        width: ``D``.
        device: Where the forward runs.
        name: Consumer and site, for errors.
        bit: The consumer's.
        reduce: For a `HeadReadout`.

    Raises:
        ConfigError: If it fails, or returns something else than it says.
    """
    with torch.inference_mode(False), torch.no_grad():
        try:
            bound = _bound(readout, source, device, bit, reduce)
            rows = torch.ones(3, width, dtype=torch.float64, device=device)
            none = np.full((3, readout.num_arguments), NO_ARGUMENT, np.int64)
            found = bound(rows, _on_device(none, device) if bound.num_arguments else None)
        except UnsupportedError as error:
            raise ConfigError(f"{name}: {error}") from error
        except Exception as error:
            raise ConfigError(f"{name}: the readout fails on {device}: {type(error).__name__}: {error}") from error
    expected = (3, readout.num_outputs)
    if tuple(found.shape) != expected or found.device.type != device.type or not found.is_floating_point():
        raise ConfigError(
            f"{name}: the readout made {found.dtype} {list(found.shape)} on {found.device} of 3 rows; expected floats "
            f"{list(expected)} on {device}"
        )
    return bound


def _bound(readout: Readout, source: int, device: torch.device, bit: int, reduce: Reduce) -> BoundReadout:
    sizes = readout.num_outputs, readout.num_arguments
    if not isinstance(readout, HeadReadout):
        return BoundReadout(source, sizes[0], readout.on(device), sizes[1], bit)
    return BoundReadout(source, sizes[0], reduce(readout.reduction), sizes[1], bit, readout.transport(device))


def _on_device(values: Int64Array, device: torch.device) -> RowArguments:
    """Bring arguments to the device without waiting for it."""
    host = torch.from_numpy(values)
    if device.type == "cuda":
        host = host.pin_memory()  # of a cache that knows which copies read it
    return RowArguments(values, host.to(device, non_blocking=True))


class ReadoutJob(NamedTuple):
    """One readout of the rows of a group.

    Attributes:
        group: Which of the part's groups.
        readout: See `BoundReadout`.
        block: Block of the ring that has its site's rows.
        first: Where its rows' indices begin among those of the part.
        num_rows: ``N``.
        target: Where its outputs begin among the part's.
        arguments: int64 ``[N, A]``; None if the readout takes none.
    """

    group: int
    readout: BoundReadout
    block: int
    first: int
    num_rows: int
    target: int
    arguments: Int64Array | None = None

    @property
    def stop(self) -> int:
        """Where its rows' indices end."""
        return self.first + self.num_rows


class _Piece(NamedTuple):
    """Rows ``start : stop`` of a job."""

    job: ReadoutJob
    start: int
    stop: int


ReadOut = Callable[[Sequence[ReadoutJob], Tensor], frozenset[int]]
"""Computes jobs into host memory; returns the groups that failed."""


Arguments = Mapping[tuple[str, int], Sequence[int]]
"""Arguments of requests that have any, by the request and the consumer's bit."""


def arguments_of(group: PackGroup, readout: BoundReadout, given: Arguments) -> Int64Array | None:
    """The arguments of a group's rows, int64 ``[N, A]``, -1 where there are fewer; None if the readout takes none."""
    if not readout.num_arguments:
        return None
    found = np.full((len(group.rows), readout.num_arguments), NO_ARGUMENT, np.int64)
    for req_id, start, stop in group.spans:
        values = given.get((req_id, readout.bit), ())  # no more than fit: the front end has checked that
        found[start:stop, : len(values)] = values
    return found


def jobs_of(
    groups: Sequence[PackGroup],
    readouts: Sequence[BoundReadout],
    blocks: Sequence[int],
    row_bytes: int,
    given: Arguments | None = None,
) -> list[ReadoutJob]:
    """The jobs of a part whose groups have their rows, and their outputs in host memory, consecutively.

    Args:
        groups: Those of sites first, then those of readouts.
        readouts: Of the worker, in the order of their indices, which begin after those of its sites.
        blocks: Of each site of the worker, the block of the ring that has its rows.
        row_bytes: Bytes of a row of host memory; the outputs of each group begin at a row.
        given: Arguments of the requests.
    """
    jobs, first, target = [], 0, 0
    for number, group in enumerate(groups):
        num_rows = len(group.rows)
        arguments: dict[int, Int64Array | None] = {}  # alike for all sites of a consumer
        for place, site_id in enumerate(group.site_ids.tolist()):
            if group.site_set.is_read_out:
                readout = readouts[site_id - len(blocks)]
                begin = target + place * num_rows * readout.num_outputs
                if readout.num_arguments not in arguments:
                    arguments[readout.num_arguments] = arguments_of(group, readout, given or {})
                found = arguments[readout.num_arguments]
                jobs.append(ReadoutJob(number, readout, blocks[readout.source], first, num_rows, begin, found))
            first += num_rows
        target += memory_rows(group, row_bytes) * row_bytes // OUTPUT_BYTES
    return jobs


class RingReadouts:
    """The readouts of a ring, which are numbered after its sites.

    Attributes:
        sources: int64: of each site and readout, the index of the site whose rows it is of.
        row_cost: Rows of host memory that one row at every site and readout can take.
        arguments: Of requests with rows in the ring, by request and consumer's bit. The owner of the ring sets them.

    Args:
        readouts: In the order of the planner's.
        shapes: Of each site of the ring; None: that of the stream.
        blocks: Of each site of the ring, the block that has its rows.
        row_bytes: Bytes of a row of host memory.
    """

    def __init__(
        self,
        readouts: Sequence[BoundReadout],
        shapes: Sequence[SiteShape | None],
        blocks: Sequence[int],
        row_bytes: int,
    ) -> None:
        self._readouts = tuple(readouts)
        self._blocks = tuple(blocks)
        self._row_bytes = row_bytes
        self.arguments: dict[tuple[str, int], Sequence[int]] = {}
        self.sources: Int64Array = np.array([*range(len(shapes)), *(each.source for each in readouts)], np.int64)
        outputs = [SiteShape(each.num_outputs, "float32") for each in readouts]
        self.row_cost = sum(row_cost(shape, row_bytes) for shape in (*shapes, *outputs))

    def run(
        self, groups: Sequence[PackGroup], target_V: Tensor, read_out: ReadOut
    ) -> tuple[tuple[PackGroup, ...], int]:
        """Compute the outputs of a part.

        Args:
            groups: Of the part: those of sites first, then those of readouts.
            target_V: float32, where the outputs go.
            read_out: Of the copier.

        Returns:
            The groups, without the rows whose readout has failed; and the bytes of the outputs.
        """
        jobs = jobs_of(groups, self._readouts, self._blocks, self._row_bytes, self.arguments)
        failed = read_out(jobs, target_V)
        num_bytes = sum(OUTPUT_BYTES * job.num_rows * job.readout.num_outputs for job in jobs)
        return tuple(unwanted(group) if index in failed else group for index, group in enumerate(groups)), num_bytes


class RowReader:
    """Runs jobs, a chunk of rows at a time, in memory that is allocated once.

    Args:
        blocks_FD: Of the ring.
        max_rows: Rows of a part, at most.
    """

    def __init__(self, blocks_FD: Sequence[Tensor], max_rows: int) -> None:
        widest = max(block.shape[1] for block in blocks_FD)
        size = min(max(CHUNK_BYTES // 8, widest), max_rows * widest)
        itemsize, device = max(block.element_size() for block in blocks_FD), blocks_FD[0].device
        self._blocks_FD = tuple(blocks_FD)
        self._size = size
        self._rows_CD = torch.empty(size * itemsize, dtype=torch.uint8, device=device)
        self._wide_CD = torch.empty(size, dtype=torch.float64, device=device)
        self._log = SparseLog("capture readouts")
        self.device_bytes = self._rows_CD.nbytes + self._wide_CD.nbytes

    def run(self, jobs: Sequence[ReadoutJob], index: Tensor, put: Callable[[int, Tensor], object]) -> frozenset[int]:
        """Run jobs.

        Args:
            jobs: In the order of their targets.
            index: int64, flat row indices of the part, on the device of the ring.
            put: Takes outputs ``[n, P]`` and their target, in order.

        Returns:
            Groups with an output that could not be computed, which is logged: their outputs are undefined.
        """
        with torch.inference_mode():
            return frozenset().union(*(self._call(pieces, index, put) for pieces in self._calls(jobs)))

    def _call(self, pieces: Sequence[_Piece], index: Tensor, put: Callable[[int, Tensor], object]) -> frozenset[int]:
        """Compute what one call computes, or if it fails, each piece of it alone; return the groups that failed."""
        at = 0
        try:
            found = self._outputs(pieces, index)
            for job, start, stop in pieces:
                put(job.target + start * job.readout.num_outputs, found[at : at + stop - start])
                at += stop - start
        except Exception as error:  # noqa: BLE001  a consumer's own code must not end the engine's step
            if len(pieces) > 1 and not at:  # one site of several may be to blame
                return frozenset().union(*(self._call([piece], index, put) for piece in pieces))
            self._log.error("rows are lost: a readout failed", cause=error)
            return frozenset(piece.job.group for piece in pieces)
        return frozenset()

    def _calls(self, jobs: Sequence[ReadoutJob]) -> Iterator[list[_Piece]]:
        """Yield what one call computes: a chunk of the rows of a job, or of jobs that share their function."""
        pieces: list[_Piece] = []
        room = 0
        for job in jobs:
            start = 0
            while start < job.num_rows:
                if pieces and not (room and _is_shared(pieces[-1].job, job)):
                    yield pieces
                    pieces = []
                room = room if pieces else self._chunk_rows(job)
                pieces.append(_Piece(job, start, stop := min(start + room, job.num_rows)))
                room -= stop - start
                start = stop
        if pieces:
            yield pieces

    def _chunk_rows(self, job: ReadoutJob) -> int:
        """Return the rows that a call may have, at most."""
        readout = job.readout
        size = min(self._size // self._blocks_FD[job.block].shape[1], BUFFER_OUTPUTS // readout.num_outputs)
        return min(size, BUFFER_OUTPUTS // readout.num_arguments) if readout.num_arguments else size

    def _outputs(self, pieces: Sequence[_Piece], index: Tensor) -> Tensor:
        """Compute the outputs of the rows of pieces, one after the other."""
        readout, source_FD = pieces[0].job.readout, self._blocks_FD[pieces[0].job.block]
        num_rows, width = sum(piece.stop - piece.start for piece in pieces), source_FD.shape[1]
        rows_ND = self._rows_CD.view(source_FD.dtype)[: num_rows * width].view(num_rows, width)
        wide_ND = self._wide_CD[: num_rows * width].view(num_rows, width)
        given = [job.arguments[start:stop] for job, start, stop in pieces if job.arguments is not None]
        arguments = _on_device(np.concatenate(given), wide_ND.device) if given else None
        at = 0
        for job, start, stop in pieces:
            own = slice(at, at := at + stop - start)
            torch.index_select(source_FD, 0, index[job.first + start : job.first + stop], out=rows_ND[own])
        wide_ND.copy_(rows_ND)
        if readout.transport is not None:
            _transport(pieces, wide_ND, arguments)
        found = _called(readout.function, wide_ND, arguments)
        expected = (num_rows, readout.num_outputs)
        if tuple(found.shape) != expected:
            raise ValueError(f"expected outputs {list(expected)}, got {list(found.shape)}")
        return found


def _is_shared(one: ReadoutJob, other: ReadoutJob) -> bool:
    """Whether one call may compute both."""
    left, right = one.readout, other.readout
    is_same = (left.num_outputs, left.num_arguments) == (right.num_outputs, right.num_arguments)
    return is_same and left.transport is not None and left.function is right.function and one.block == other.block


def _transport(pieces: Sequence[_Piece], wide_ND: Tensor, arguments: RowArguments | None) -> None:
    """Map the rows of each piece by the transport of its site."""
    at = 0
    for job, start, stop in pieces:
        own = slice(at, at := at + stop - start)
        given = None if arguments is None else RowArguments(arguments.host[own], arguments.device[own])
        if job.readout.transport is not None:
            rows_ND = wide_ND[own]
            if (found := _called(job.readout.transport, rows_ND, given)) is not rows_ND:
                rows_ND.copy_(found)


class OutputBuffers:
    """Outputs that gather in a buffer on the device until one copy takes them all.

    Args:
        device: Of the buffers.
        before_use: Called before a buffer is written to, with its number: its last copy must be done.
        copy: Called with the number, the outputs of a buffer, and their target.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        before_use: Callable[[int], object],
        copy: Callable[[int, Tensor, int], object],
    ) -> None:
        self._buffers = torch.empty(2, BUFFER_OUTPUTS, dtype=torch.float32, device=device)
        self._before_use = before_use
        self._copy = copy
        self._at = 0
        self._first: int | None = None
        self._stop = 0
        self.device_bytes = self._buffers.nbytes

    def put(self, target: int, found: Tensor) -> None:
        """Take outputs ``[n, P]``, at most a buffer full, whose target follows that of the last ones."""
        stop = target + found.numel()
        if self._first is not None and stop - self._first > BUFFER_OUTPUTS:
            self.flush()
        if self._first is None:
            self._first = target
            self._before_use(self._at)
        into = self._buffers[self._at, target - self._first : stop - self._first]
        into.view(found.shape).copy_(found)
        self._stop = stop

    def flush(self) -> None:
        """Start the copy of what was taken."""
        if self._first is None:
            return
        first, self._first = self._first, None
        at, self._at = self._at, 1 - self._at
        self._copy(at, self._buffers[at, : self._stop - first], first)
