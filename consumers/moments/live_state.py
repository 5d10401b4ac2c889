"""The moments of one process: added to by its consumer's thread, and written to its file by another."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.consumer import RequestInfo
from headgate.capture.schema.errors import CaptureFileError, ConfigError
from headgate.capture.schema.sites import Site
from headgate.consumers.moments.entry import MomentsEntry, MomentsKey, MomentsSettings, Phase
from headgate.consumers.moments.state_file import (
    Entries,
    OwnedFile,
    encode_state,
    read_settings,
    read_state,
    state_files,
)

if TYPE_CHECKING:
    from torch import Tensor


Sites = tuple[Site, ...]
Float32Array = npt.NDArray[np.float32]

HOLD_ROWS = 16
"""Generated rows of each request and site that are held back at least: the engine runs ahead of a request's end."""

TAG = "tag"
"""Option of a request's spec: the tag that its rows count under."""


@dataclass(slots=True)
class _Held:
    """Rows at the same sites: pieces of ascending positions and ``[sites, rows, width]``."""

    pieces: deque[tuple[Int64Array, Tensor]] = field(default_factory=deque)
    num_rows: int = 0
    counted: list[Int64Array] = field(default_factory=list)  # positions of rows that are not held any more


class RunningRequest:
    """A request that has not ended: what was counted of it, and generated rows that are held back.

    Attributes:
        tag: Of the request.
        num_prompt: Length of its prompt.
        num_rows: Rows that were counted, over all sites.
        num_skipped: Rows left out at its beginning, over all sites.
        num_past_end: The part of `num_rows` that turned out to lie past its end.
    """

    def __init__(self, request: RequestInfo) -> None:
        self.tag: str = request.spec.options[TAG]
        self.num_prompt = request.num_prompt_tokens
        self.num_rows = 0
        self.num_skipped = 0
        self.num_past_end = 0
        self._held: dict[Sites, _Held] = defaultdict(_Held)

    def hold(self, sites: Sites, positions: Int64Array, rows: Tensor) -> None:
        """Keep a copy of rows, ``[sites, N, width]``: the block that they are part of belongs to many requests."""
        held = self._held[sites]
        held.pieces.append((positions.copy(), rows.clone()))
        held.num_rows += len(positions)

    def release(self, keep: int) -> list[tuple[Sites, Float32Array]]:
        """Return the oldest rows, which count from now on, ``[sites, N, width]``; at least `keep` of each site stay.

        Nothing is returned before there are as many again, so that rows come in pieces that are worth while.
        """
        released = []
        for sites, held in self._held.items():
            if held.num_rows <= 2 * keep:
                continue
            taken = []
            while held.pieces and held.num_rows - len(held.pieces[0][0]) >= keep:
                positions, rows = held.pieces.popleft()
                held.num_rows -= len(positions)
                held.counted.append(positions)
                taken.append(float32_of(rows))
            if taken:
                released.append((sites, np.concatenate(taken, axis=1)))
                self.num_rows += released[-1][1].shape[1] * len(sites)
        return released

    def cut(self, num_rows: int) -> None:
        """Forget rows at positions from `num_rows` on, and count those of them that were released already."""
        for sites, held in self._held.items():
            self.num_past_end += sum(int((positions >= num_rows).sum()) for positions in held.counted) * len(sites)
            ends = [int(np.searchsorted(positions, num_rows)) for positions, _ in held.pieces]
            held.pieces = deque(
                (positions[:end], rows[:, :end]) for (positions, rows), end in zip(held.pieces, ends, strict=True)
            )
            held.num_rows = sum(ends)


def float32_of(rows: Tensor) -> Float32Array:
    """Rows of any of the model dtypes as float32, which holds them exactly."""
    array: Float32Array = rows.float().numpy()
    return array


logger = logging.getLogger(__name__)


class LiveState:
    """Moments in memory, and the file that they go on from and are written to. Any thread may call.

    Attributes:
        problem: The reason why the last write failed; None if it did not.

    Args:
        root: Folder of the file.
        settings: Of the moments.
        flush_s: Seconds between two writes; if 0, `flush` alone writes.
        name: Of the thread that writes.

    Raises:
        ConfigError: If the root cannot be used, or holds damaged files or moments of other settings.
    """

    def __init__(self, root: Path, settings: MomentsSettings, *, flush_s: float, name: str) -> None:
        self.problem: str | None = None
        self._settings = settings
        self._flush_s = flush_s
        self._lock = threading.Lock()  # guards _entries and _is_dirty
        self._writing = threading.Lock()  # one writer of the file at a time
        self._is_dirty = False
        self._is_closed = threading.Event()
        self._file, self._entries = _open(root, settings)
        self._thread = threading.Thread(target=self._flush_now_and_then, name=name, daemon=True)
        if flush_s:
            self._thread.start()

    def add(self, tag: str, phase: Phase, sites: Sequence[Site], rows_SNW: Float32Array) -> None:
        """Add rows, ``[sites, N, width]``; they are copied."""
        with self._lock:
            self._is_dirty = True
            for site, rows in zip(sites, rows_SNW, strict=True):
                self._entry(MomentsKey(tag, site.name, phase)).add(rows)

    def skip(self, tag: str, phase: Phase, sites: Sequence[Site], num_rows: int) -> None:
        """Count rows at each of `sites` that were left out."""
        with self._lock:
            self._is_dirty = True
            for site in sites:
                self._entry(MomentsKey(tag, site.name, phase)).num_skipped += num_rows

    def flush(self) -> None:
        """Write the state, if anything has changed. A disk that takes no more is logged, and tried again next time."""
        with self._writing:
            with self._lock:
                if not self._is_dirty:
                    return
                content, self._is_dirty = encode_state(self._settings, self._entries), False
            try:
                self._file.replace(content)
            except OSError as error:
                with self._lock:
                    self._is_dirty = True
                self.problem = f"moments could not be written to {self._file.path}: {error}"
                logger.error(self.problem)  # noqa: TRY400  (the text says all)
            else:
                self.problem = None

    def close(self, timeout_s: float) -> None:
        """Write what is not written yet, and give the file up. May be called again."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        if self._flush_s:
            self._thread.join(timeout_s)
        self.flush()
        self._file.close()

    def _entry(self, key: MomentsKey) -> MomentsEntry:
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = MomentsEntry(self._settings, key.site)
        return entry

    def _flush_now_and_then(self) -> None:
        while not self._is_closed.wait(self._flush_s):
            self.flush()


def _open(root: Path, settings: MomentsSettings) -> tuple[OwnedFile, Entries]:
    try:
        owned = OwnedFile(root)
    except OSError as error:
        raise ConfigError(f"moments: root {root} cannot be used: {error}") from error
    try:
        for path in state_files(root):
            settings.check_same(read_settings(path), str(path))
        if owned.path.exists():
            return owned, read_state(owned.path).entries
        owned.replace(encode_state(settings, {}))  # others see at once whose root it is
        return owned, {}  # noqa: TRY300
    except (CaptureFileError, OSError) as error:
        owned.close()
        raise ConfigError(f"moments: {error}") from error
    except BaseException:
        owned.close()
        raise
