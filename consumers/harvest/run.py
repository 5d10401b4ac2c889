"""Running prompts until a root has the rows: batch after batch, each durable before the next one begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from headgate.capture.schema.errors import ConfigError, ConsumerError, RequestError
from headgate.capture.schema.results import MessageSpan
from headgate.capture.schema.sites import ITEM_SIZES
from headgate.consumers.datasets.dataset import open_dataset
from headgate.consumers.harvest.engine import EngineFacts, HarvestEngine
from headgate.consumers.harvest.prompts import PromptSet, Record, Refusals, is_chat
from headgate.consumers.harvest.root import TAG, HarvestRoot
from headgate.consumers.harvest.wanted import Task, Wanted, settings_of

DEFAULT_BATCH = 256
"""Prompts in a batch."""


class Progress(NamedTuple):
    """How far a harvest is.

    Attributes:
        rows: Durable rows at each site, those of earlier runs included.
        wanted_rows: Rows at which it ends.
        num_bytes: Bytes of the durable rows at all sites, with positions and tokens.
        prompts: Prompts that have those rows.
    """

    rows: int
    wanted_rows: int
    num_bytes: int
    prompts: int


Report = Callable[[Progress], None]


@dataclass(kw_only=True)
class _Run:
    """One run of a harvest.

    Attributes:
        done: Rows by prompt that is durable.
        rows: Rows of the prompts gone through so far, those of the batch that runs included where they are known.
        skipped: Prompts gone through that have no rows.
        refusals: Records gone through that the model cannot take.
        cut: Prompts that this run cut to the context.
        unclear: Chats that this run has found no messages in.
    """

    engine: HarvestEngine
    wanted: Wanted
    context: int
    wanted_rows: int
    batch: int
    done: dict[int, int]
    rows: int = 0
    skipped: int = 0
    cut: int = 0
    unclear: int = 0
    refusals: Refusals = field(default_factory=Refusals)
    messages: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """Where the messages lie of chats that have yet to run."""
    durable: int = field(init=False)

    def __post_init__(self) -> None:
        self.durable = sum(self.done.values())

    def batches(self, prompts: PromptSet) -> Iterator[list[Task]]:
        """Batches of prompts that are not done, until there are rows enough.

        Whether a prompt belongs to the harvest follows from those before it alone, however often it was cut off.
        """
        if self.wanted.is_exact:
            yield from self._known(prompts)
        else:
            yield from self._counted(prompts)

    def _known(self, prompts: PromptSet) -> Iterator[list[Task]]:
        """The fewest prompts, from the first on, that have the rows: how many each has is known before it runs."""
        pending: list[Task] = []
        for index, record in enumerate(prompts.records()):
            if self.rows >= self.wanted_rows:
                break
            if index in self.done:
                self.rows += self.done[index]
            elif (task := self._plan(index, record)) is not None:
                pending.append(task)
                self.rows += task.most_rows
            if len(pending) == self.batch:
                yield pending
                pending = []
        if pending:
            yield pending

    def _counted(self, prompts: PromptSet) -> Iterator[list[Task]]:
        """Fixed batches, up to the first batch after which the rows are there."""
        numbered = enumerate(prompts.records())
        while self.rows < self.wanted_rows and (group := list(islice(numbered, self.batch))):
            planned = [self._plan(index, record) for index, record in group if index not in self.done]
            if tasks := [task for task in planned if task is not None]:
                yield tasks
            self.rows += sum(self.done.get(index, 0) for index, _ in group)

    def _plan(self, index: int, record: Record) -> Task | None:
        try:
            prompt = record.prompt()
            token_ids = self.engine.tokens(prompt)
        except (ConfigError, RequestError) as error:
            self.refusals.add(record, error)
            return None
        task = self.wanted.plan(index, token_ids, self.context)
        if task is None:
            self.skipped += 1
            return None
        self.cut += task.was_cut
        if self.wanted.messages and is_chat(prompt):
            found = self.engine.messages(prompt)
            self.unclear += found is None
            if found is not None:
                self.messages[index] = _within(found, len(task.token_ids))
        return task

    def take(self, tasks: Sequence[Task], consumer: str) -> None:
        """Run a batch; its rows are durable afterwards.

        Raises:
            ConsumerError: If a prompt lacks rows, or they are not on the disk.
        """
        hooks = self.wanted.hooks
        alike = {"hooks": hooks, "tag": TAG, "layout": "shards"}
        specs = [
            {**alike, "positions": task.positions, "request_id": task.name, **self._options(task)} for task in tasks
        ]
        results = self.engine.run(tasks, self.wanted, consumer, specs)
        for task, result in zip(tasks, results, strict=True):
            if result.status != "ok":
                why = result.error or f"the result is {result.status}: the disk does not keep up"
                raise ConsumerError(f"{task.name}: {why}")
            if self.wanted.is_exact and result.num_rows != task.most_rows:
                raise ConsumerError(f"{task.name}: {result.num_rows} rows came, expected {task.most_rows}")
            self.done[task.index] = result.num_rows
            self.durable += result.num_rows

    def _options(self, task: Task) -> dict[str, Any]:
        found = self.messages.pop(task.index, None)
        return {} if found is None else {"messages": found}


def _within(messages: Sequence[MessageSpan], length: int) -> list[dict[str, Any]]:
    """Where messages lie in a prompt that is cut to a length."""
    return [
        {"role": one.role, "start": one.start, "stop": min(one.stop, length)}
        for one in messages
        if one.start < min(one.stop, length)
    ]


Finish = Callable[[], dict[str, Any]]


def run_prompts(
    engine: HarvestEngine,
    prompts: PromptSet,
    root: HarvestRoot,
    wanted: Wanted,
    *,
    rows: int,
    batch: int = DEFAULT_BATCH,
    context: int | None = None,
    consumer: str = "filesystem",
    report: Report | None = None,
) -> Finish:
    """Run prompts until `rows` rows at each site have been written, or there are no more prompts.

    Arguments and errors are those of `harvest`.

    Returns:
        A function that writes the manifest and returns it. Call it when the engine's consumer is closed: what a root in
        an object store has is known then. Another run for such a root needs the consumer opened anew.
    """
    if rows < 1 or batch < 1:
        raise ConfigError(f"rows and batch: must be at least 1, got {rows} and {batch}")
    facts = engine.facts
    length = wanted.context(context, facts.max_length)
    settings = {**described(prompts, wanted, length, batch), **of_engine(facts)}
    root.begin(settings)
    run = _Run(engine=engine, wanted=wanted, context=length, wanted_rows=rows, batch=batch, done=root.finished())
    row_bytes = len(wanted.sites) * facts.hidden_size * ITEM_SIZES[facts.dtype] + 2 * ITEM_SIZES["int64"]

    def show_progress() -> None:
        if report is not None:
            report(Progress(run.durable, rows, run.durable * row_bytes, len(run.done)))

    show_progress()
    for tasks in run.batches(prompts):
        root.take_manifest_away()
        run.take(tasks, consumer)
        show_progress()

    def finish() -> dict[str, Any]:
        if root.is_remote and run.done != root.finished():
            raise ConsumerError(f"{root.path}: has not the rows of this harvest: another one writes there")
        manifest = _manifest(run, root, settings, facts)
        root.finish(manifest)
        return manifest

    return finish


def harvest(
    engine: HarvestEngine,
    prompts: PromptSet,
    root: HarvestRoot,
    wanted: Wanted,
    *,
    rows: int,
    batch: int = DEFAULT_BATCH,
    context: int | None = None,
    consumer: str = "filesystem",
    report: Report | None = None,
) -> dict[str, Any]:
    """Run prompts until the root has `rows` rows at each site, or there are no more prompts; return the manifest.

    An interrupted harvest that is run again ends with the rows of an uninterrupted one. A larger `rows` continues a
    finished harvest.

    Args:
        engine: An engine with the consumer `filesystem` for the root, with `HarvestRoot.params`. It writes in this
            process (``location="driver"``), so nothing writes there after this process has ended.
        prompts: The prompts, in order.
        root: The folder for the rows; `run_prompts` also takes object stores.
        wanted: Which rows of each prompt. No prompt's rows are cut, so the total is slightly larger than `rows`.
        rows: Rows at each site.
        batch: Prompts that run together.
        context: Tokens that longer prompts are truncated to; if None, what the engine accepts.
        consumer: Instance name of the consumer.
        report: Called at the beginning and after each batch.

    Raises:
        ConfigError: If the root was begun with other settings, or a value does not fit.
        ConsumerError: If rows did not reach the disk.
        CaptureFileError: If the root is damaged.
    """
    if root.is_remote:
        raise ConfigError(f"{root.path}: files are uploaded when the consumer is closed: use run_prompts, then finish")
    return run_prompts(
        engine, prompts, root, wanted, rows=rows, batch=batch, context=context, consumer=consumer, report=report
    )()


def described(prompts: PromptSet, wanted: Wanted, context: int | None, batch: int) -> dict[str, Any]:
    """Settings of a harvest that are known before its engine is, in JSON values."""
    about = {"prompts": prompts.name, "field": prompts.field, "prompts_sha256": prompts.sha256}
    return {**about, **settings_of(wanted, context, batch)}


def of_engine(facts: EngineFacts) -> dict[str, Any]:
    """Settings of a harvest that its engine reports, in JSON values."""
    names = ("model", "revision", "tokenizer", "dtype", "quantization", "hidden_size")
    return {name: getattr(facts, name) for name in names}


def _manifest(run: _Run, root: HarvestRoot, settings: Mapping[str, Any], facts: EngineFacts) -> dict[str, Any]:
    data = open_dataset(root.path, tags=TAG)
    try:
        whole = data.manifest(revision=facts.revision, tokenizer=facts.tokenizer)
    finally:
        data.close()
    counts = {
        "rows": run.durable,
        "rows_wanted": run.wanted_rows,
        "prompts_with_rows": len(run.done),
        "prompts_without_rows": run.skipped,
        "prompts_cut_in_this_run": run.cut,
        "records_refused_in_this_run": run.refusals.count,
        "chats_without_messages_in_this_run": run.unclear,
        "has_all_rows": run.durable >= run.wanted_rows,
    }
    return {**whole, "harvest": {**settings, **counts}}


LINE_S = 10.0
"""Seconds between two lines of a log."""


@contextmanager
def showing(console: Console, clock: Callable[[], float] = time.monotonic) -> Iterator[Report]:
    """Show what is reported: rows, rows per second, gigabytes and the time left.

    Args:
        console: A terminal gets a bar; anything else gets a line at the first batch, then every `LINE_S` seconds.
        clock: Seconds.
    """
    speed = _Speed(clock)
    if not console.is_terminal:
        yield _Lines(console, speed, clock)
        return
    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("", total=None)

        def show(progress: Progress) -> None:
            text = f"{_rows(progress)}, {speed.of(progress):,.0f} rows/s, {progress.num_bytes / 1e9:.2f} GB"
            bar.update(task, completed=progress.rows, total=progress.wanted_rows, description=text)

        yield show


class _Speed:
    """Rows per second of this run, since the first report."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._first: tuple[float, int] | None = None

    def of(self, progress: Progress) -> float:
        """The speed at a report."""
        now = self._clock()
        if self._first is None:
            self._first = now, progress.rows
        seconds = now - self._first[0]
        return (progress.rows - self._first[1]) / seconds if seconds > 0 else 0.0


class _Lines:
    """Reports as lines of a log."""

    def __init__(self, console: Console, speed: _Speed, clock: Callable[[], float]) -> None:
        self._console = console
        self._speed = speed
        self._clock = clock
        self._count = 0
        self._last = 0.0

    def __call__(self, progress: Progress) -> None:
        speed, now = self._speed.of(progress), self._clock()
        self._count += 1
        if self._count > 2 and now - self._last < LINE_S:
            return
        self._last = now
        rows_left = max(progress.wanted_rows - progress.rows, 0)  # the last prompt brings more than are wanted
        left = f", {rows_left / speed:,.0f} s left" if speed else ""
        line = f"{_rows(progress)}, {speed:,.0f} rows/s, {progress.num_bytes / 1e9:.2f} GB{left}"
        self._console.print(line, soft_wrap=True, highlight=False)


def _rows(progress: Progress) -> str:
    return f"{progress.rows:,} of {progress.wanted_rows:,} rows"
