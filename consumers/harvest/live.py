"""Rows of a running engine as batches for a trainer, mixed, in bounded memory: generation waits for the trainer."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from headgate.capture.schema.errors import ConfigError, ConsumerError, RequestError
from headgate.capture.schema.sites import ITEM_SIZES
from headgate.consumers.datasets.mixing import ShuffleBuffer, SinkFilter
from headgate.consumers.datasets.view import Bytes
from headgate.consumers.harvest.engine import HarvestEngine, engine_of
from headgate.consumers.harvest.prompts import Prompt, PromptSet, Record, Refusals, each_record
from headgate.consumers.harvest.run import DEFAULT_BATCH
from headgate.consumers.harvest.wanted import Task, Tokens, Wanted, parse_site_names

if TYPE_CHECKING:
    from torch import Tensor

    from headgate.consumers.memory import CapturedRows

Batch = deque["CapturedRows"]
_BATCHES = 2
"""Batches of prompts at a time: one runs while the rows of the other go into the shuffle buffer."""
_INT64S = 2 * ITEM_SIZES["int64"]  # of a row in the shuffle buffer, beside its values


class LiveRows(Iterator[dict[str, "Tensor"]]):
    """Batches ``{site: [rows, hidden]}`` in the model's dtype, whose rows are the same tokens at every site.

    A batch is drawn uniformly from a shuffle buffer, filled up before each draw, so the same engine, prompts and seed
    give the same batches. Each row is returned once. A thread runs the prompts, batch after batch, while the caller
    trains; no other thread may use the engine meanwhile. If the trainer is slower, the thread waits.

    It is a `data_provider` for SAELens' `MultiSAETrainer`, and `of_one_site` one for its `SAETrainer`. A context
    manager: leaving it, or `close`, ends the thread after the prompts that run.

    Args:
        llm: An `LLM` with the consumer `memory` (or a `HarvestEngine`).
        prompts: Texts, chats or lists of token ids, also without end, or the name of a file or data set.
        sites: Such as ``"12.post_mlp"``; several separated by commas, or a list.
        batch_size: Rows in a batch; the last one may be smaller.
        max_bytes: Bytes of rows in memory: half of it for the buffer, a quarter for each of two batches of prompts.
            The engine's buffers are additional; the architecture page lists them.
        tokens: Rows of the prompt, of the tokens that were generated, or both: ``prompt``, ``generated``, ``all``.
        drop_first: Positions at the beginning whose rows are omitted, such as BOS and attention sinks.
        max_tokens: Tokens to generate.
        temperature: Sampling temperature; each prompt's index is its seed.
        context: Tokens that longer prompts are truncated to; if None, what the engine accepts.
        batch: Largest number of prompts that run together; fewer if their rows would take too much memory.
        seed: Seed of the mixing.
        consumer: Instance name of the consumer.
        drop_sinks: Omit rows whose norm is above 10 times the median at one of the sites, at any position. The medians
            are computed from the first batch of prompts.

    Attributes:
        num_sinks: Rows that were omitted as sinks so far.
        num_refused: Records so far that are no prompts that the model can take; the log names the first of them.

    Raises:
        ConfigError: If an argument is out of range, or `max_bytes` does not hold a batch.
    """

    def __init__(
        self,
        llm: object,
        prompts: str | Iterable[Prompt] | PromptSet,
        sites: str | Iterable[str],
        *,
        batch_size: int = 4096,
        max_bytes: int = 1 << 30,
        tokens: Tokens = "prompt",
        drop_first: int = 0,
        max_tokens: int = 1,
        temperature: float = 0.0,
        context: int | None = None,
        batch: int = DEFAULT_BATCH,
        seed: int = 0,
        consumer: str = "memory",
        drop_sinks: bool = False,
    ) -> None:
        engine = engine_of(llm)
        answers: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
        wanted = Wanted(sites=parse_site_names(sites), tokens=tokens, drop_first=drop_first, **answers)
        facts = engine.facts
        self.sites = tuple(site.name for site in wanted.sites)
        self._dtype, self._hidden_size = facts.dtype, facts.hidden_size
        row_bytes = facts.hidden_size * ITEM_SIZES[facts.dtype]
        cost = row_bytes * len(self.sites) + _INT64S
        if batch < 1:
            raise ConfigError(f"batch: must be at least 1, got {batch}")
        self._batch_size = batch_size
        self._buffer = ShuffleBuffer(self.sites, row_bytes, _buffer_rows(max_bytes, cost, batch_size))
        self._random = np.random.default_rng(seed)
        self._rows: Batch = deque()
        self._used = self._taken = self.num_sinks = 0  # used: rows of the first of `_rows` that are in the buffer
        self._drops_sinks = drop_sinks
        self._filter: SinkFilter | None = None  # once there are rows
        self._error: BaseException | None = None  # of the thread
        self._is_over = False
        self._plan = _Plan(wanted, wanted.context(context, facts.max_length), max_bytes // 4 // cost, batch)
        self._source = _Source(engine, self._plan, each_record(prompts), consumer)
        self._finalizer = weakref.finalize(self, self._source.stop)

    @property
    def num_refused(self) -> int:
        return self._plan.refusals.count

    def __iter__(self) -> LiveRows:
        return self

    def __next__(self) -> dict[str, Tensor]:
        """The next batch; waits for the engine.

        Raises:
            ConsumerError: If the rows of a prompt did not come.
            Exception: What running the prompts raised.
        """
        import torch

        self._fill()
        if not self._buffer.count:
            self.close()
            raise StopIteration
        _, data = self._buffer.draw(self._random, self._batch_size)
        dtype = getattr(torch, self._dtype)
        return {
            site: torch.from_numpy(rows).view(dtype).reshape(len(rows), self._hidden_size)
            for site, rows in data.items()
        }

    def __enter__(self) -> LiveRows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def of_one_site(self) -> Iterator[Tensor]:
        """Yield the batches as tensors ``[rows, hidden]``.

        Raises:
            ValueError: If there are several sites.
        """
        if len(self.sites) > 1:
            raise ValueError(f"the rows are of {', '.join(self.sites)}; name one site, or take the batches by site")
        return (batch[self.sites[0]] for batch in self)

    def close(self) -> None:
        """End the thread, after the prompts that run. No more batches come. May be called again."""
        self._is_over = True
        self._buffer.clear()
        self._rows.clear()
        self._finalizer()
        self._source.join()

    def _fill(self) -> None:
        """Fill the shuffle buffer, as long as there are rows."""
        if self._error is not None:
            raise self._error
        while self._buffer.free and not self._is_over:
            if not self._rows:
                self._receive()
                continue
            captured = self._rows[0]
            count = min(self._buffer.free, len(captured) - self._used)
            span = slice(self._used, self._used + count)
            self._add({site: self._bytes_of(site, captured[site][span]) for site in self.sites}, count)
            self._used += count
            if self._used == len(captured):
                del captured
                self._rows.popleft()
                self._used = 0
                if not self._rows:
                    self._source.give_back()

    def _bytes_of(self, site: str, rows: Tensor) -> Any:
        """Rows of a site as uint8 ``[rows, row_bytes]``."""
        import torch

        if rows.shape[1] != self._hidden_size or rows.dtype != getattr(torch, self._dtype):
            raise ConsumerError(
                f"rows of {site} are {rows.shape[1]} values of {rows.dtype}, those of the residual stream "
                f"{self._hidden_size} of {self._dtype}; LiveRows mixes rows like those of the stream alone: capture "
                "others with harvest, into files"
            )
        return rows.contiguous().view(torch.uint8).numpy()

    def _add(self, data: dict[str, Bytes], count: int) -> None:
        numbers = np.arange(self._taken, self._taken + count)
        if self._filter is not None:
            kept = self._filter.keeps(data)
            numbers, data = numbers[kept], {site: rows[kept] for site, rows in data.items()}
        self._buffer.add(numbers, data)
        self._taken += count
        self.num_sinks += count - len(numbers)

    def _receive(self) -> None:
        found = self._source.next()
        if isinstance(found, BaseException):
            self._error = found
            self._is_over = True
            raise found
        if found is None:
            self._is_over = True
        elif found:
            self._rows = found
            if self._drops_sinks and self._filter is None:
                samples = ({site: self._bytes_of(site, rows[site]) for site in self.sites} for rows in found)
                self._filter = SinkFilter(samples, self._dtype)
        else:
            self._source.give_back()


def _buffer_rows(max_bytes: int, cost: int, batch_size: int) -> int:
    """Rows of the shuffle buffer, at `cost` bytes each."""
    rows = max_bytes // 2 // cost
    if not 1 <= batch_size <= rows:
        raise ConfigError(
            f"batch_size: {batch_size} is not from 1 to {rows}, the rows of the shuffle buffer: half of max_bytes "
            f"({max_bytes}), at {cost} bytes each"
        )
    return rows


class _Plan:
    """Cuts prompts into batches whose rows fit.

    Args:
        wanted: Rows of each prompt.
        context: Tokens of a prompt at most.
        max_rows: Rows of a batch at most.
        max_prompts: Prompts of a batch at most.

    Attributes:
        refusals: Records so far that the model cannot take.
    """

    def __init__(self, wanted: Wanted, context: int, max_rows: int, max_prompts: int) -> None:
        self.wanted = wanted
        self.refusals = Refusals()
        self._context = context
        self._max_rows = max_rows
        self._max_prompts = max_prompts

    def batches(self, engine: HarvestEngine, records: Iterable[Record]) -> Iterator[list[Task]]:
        """The prompts in their order; those without rows are left out, and records that the model cannot take.

        Raises:
            ConfigError: If the rows of one prompt alone do not fit, or the model can take none of several records.
        """
        pending: list[Task] = []
        rows = 0
        for task in self._tasks(engine, records):
            if task.most_rows > self._max_rows:
                raise ConfigError(
                    f"max_bytes: {task.name} can have {task.most_rows} rows, and a batch of prompts has room for "
                    f"{self._max_rows}; raise max_bytes, or set context or max_tokens"
                )
            if pending and (rows + task.most_rows > self._max_rows or len(pending) == self._max_prompts):
                yield pending
                pending, rows = [], 0
            pending.append(task)
            rows += task.most_rows
        if pending:
            yield pending

    def _tasks(self, engine: HarvestEngine, records: Iterable[Record]) -> Iterator[Task]:
        num_taken = 0
        for index, record in enumerate(records):
            try:
                token_ids = engine.tokens(record.prompt())
            except (ConfigError, RequestError) as error:
                self.refusals.add(record, error)
                continue
            num_taken += 1
            if (task := self.wanted.plan(index, token_ids, self._context)) is not None:
                yield task
        if self.refusals.count and not num_taken:
            raise ConfigError(f"{self.refusals.first}; none of the {self.refusals.count} records can be run")


class _Source:
    """A thread that runs batches of prompts, at most `_BATCHES` ahead of the readers of their rows.

    Args:
        engine: Used by the thread alone.
        plan: Makes the batches.
        prompts: Gone through once.
        consumer: Instance name of the consumer `memory`.
    """

    def __init__(self, engine: HarvestEngine, plan: _Plan, prompts: Iterator[Record], consumer: str) -> None:
        self._engine = engine
        self._plan = plan
        self._prompts = prompts
        self._consumer = consumer
        self._room = threading.Semaphore(_BATCHES)
        self._ready: SimpleQueue[Batch | BaseException | None] = SimpleQueue()
        self._is_stopped = threading.Event()
        # A daemon: a program that ends in the middle of its training does not wait for prompts.
        self._thread = threading.Thread(target=self._run, name="headgate-live-rows", daemon=True)
        self._thread.start()

    def next(self) -> Batch | BaseException | None:
        """The rows of the next batch of prompts; None after the last; or what went wrong. Waits."""
        return self._ready.get()

    def give_back(self) -> None:
        """The rows of a batch are gone: another may run."""
        self._room.release()

    def stop(self) -> None:
        """Run no more batches. Any thread; may be called again."""
        self._is_stopped.set()
        self._room.release()

    def join(self) -> None:
        """Wait for the thread."""
        self._thread.join()

    def _run(self) -> None:
        try:
            for tasks in self._plan.batches(self._engine, self._prompts):
                self._room.acquire()
                if self._is_stopped.is_set():
                    break
                self._ready.put(self._rows_of(tasks))
            self._ready.put(None)
        except BaseException as error:  # noqa: BLE001  (whatever it is, it is for the caller to see)
            self._ready.put(error)

    def _rows_of(self, tasks: Sequence[Task]) -> Batch:
        """Run a batch. Nothing else keeps its rows once this has returned."""
        wanted = self._plan.wanted
        specs = [{"hooks": wanted.hooks, "positions": task.positions} for task in tasks]
        rows: Batch = deque()
        for task, result in zip(tasks, self._engine.run(tasks, wanted, self._consumer, specs), strict=True):
            if result.status != "ok":
                raise ConsumerError(f"{task.name}: {result.error or f'the result is {result.status}'}")
            if len(result.payload):
                rows.append(result.payload)
        return rows
