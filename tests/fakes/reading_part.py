"""A part that reads the position of every row, and tells requests that ask for it which of their rows were forwarded.

Its worker is `tests.fakes.reading_worker`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headgate.capture.engine.contracts.core_part import CorePart
from headgate.capture.engine.contracts.parts import PARTS, Part
from headgate.capture.engine.contracts.request_part import PartRequest, PartRequestReader
from headgate.capture.schema.errors import RequestError

PART = "reading"
WORKER = "tests.fakes.reading_worker.ReadingWorker"
ENTRY_POINTS = f"""
[vllm.general_plugins]
{PART} = tests.fakes.reading_part:register
"""


@contextmanager
def installed(site: Path) -> Iterator[None]:
    """Add the part in this process, and by a plugin in the empty folder `site` in those that it starts."""
    info = site / "headgate_reading-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: headgate-reading\nVersion: 0.0.1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    before = os.environ.get("PYTHONPATH", "")
    sys.path.insert(0, str(site))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), *([before] if before else [])])
    register()
    try:
        yield
    finally:
        sys.path.remove(str(site))
        os.environ["PYTHONPATH"] = before
        del PARTS[PART]
        forget_parts()


def register() -> None:
    """Add the part in this process: vLLM calls it before or after headgate's own plugin."""
    from headgate.capture.engine import vllm_names
    from headgate.capture.engine.requests.sampling_params import add_properties

    PARTS[PART] = "tests.fakes.reading_part:ReadingAsPart"
    forget_parts()
    if vllm_names.SAMPLING_PARAMS.find() is not None:
        add_properties(vllm_names.SAMPLING_PARAMS.get(), vllm_names.BEAM_SEARCH_PARAMS.get())


def forget_parts() -> None:
    """Let this process look for parts anew."""
    from headgate.capture.engine.contracts import parts
    from headgate.capture.engine.requests import sampling_params

    for cached in (parts.request_parts, sampling_params.all_fields):
        cached.cache_clear()
    sampling_params.answer_fields.cache_clear()
    sampling_params.nested_names.cache_clear()


class ReadingCore(CorePart):
    """Every request may run, and no row is told twice."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def accept(self, req_id: str, wire: Any, num_prompt: int) -> Any:
        return wire

    def block_keys(self, req_id: str) -> None:
        return None

    def forget(self, req_id: str) -> None:
        self.release(req_id)

    def offer(self, req_id: str, *, priority: int, is_session: bool, is_offline: bool) -> bool:
        return True

    def acts_on(self, req_id: str) -> bool:
        return False

    def overdue(self) -> dict[str, str]:
        return {}

    def release(self, req_id: str) -> None:
        self._next.pop(req_id, None)

    def withdraw(self, req_ids: Collection[str] | None) -> list[str]:
        return []

    def admit(self) -> list[str]:
        return []

    def call(self, method: str, args: Mapping[str, object]) -> object:
        return {"names": [], "known": sorted(self._next)}[method]

    def take_readings(
        self, readings: Mapping[str, Any], discarded: Collection[str], ends: Mapping[str, int] | None = None
    ) -> dict[str, object]:
        notes: dict[str, object] = {}
        for req_id, (start, end) in readings["rows"].items():
            first = max(self._next.get(req_id, 0), start)
            if req_id not in discarded:
                self._next[req_id] = max(first, end)
                notes[req_id] = {"rows": list(range(first, end))}
        return notes

    def begin_again(self, req_id: str) -> None: ...


class RowsReader(PartRequestReader):
    """Notes are the rows."""

    def read(self, values: Mapping[str, Any]) -> PartRequest | None:
        asked = values.get("return_rows", False)
        if not isinstance(asked, bool):
            raise RequestError("return_rows", f"expected true or false, got {asked!r}")
        return PartRequest(
            wire={},
            field=next(iter(values)),
            names={},
            wants_notes=asked,
            reads_every_row=values.get("every_row", True),
        )

    def names(self, values: Mapping[str, Any]) -> Mapping[str, str]:
        return {}

    def check(self, wanted: PartRequest, known: Any) -> None:
        pass

    def read_notes(self, wanted: PartRequest, notes: Sequence[Any], end: int | None) -> dict[str, object]:
        rows = [row for note in notes for row in note["rows"]]
        return {"rows": [row for row in rows if end is None or row < end - 1]}


class ReadingRequests:
    """Implements `RequestPart`."""

    fields: Mapping[str, str] = {
        "return_rows": "Whether to tell the rows.",
        "every_row": "Whether none may come from the cache.",
    }
    answer_fields: Mapping[str, str] = {"return_rows": "rows"}
    nested: Mapping[str, Sequence[str]] = {}
    how_to_start = "Configure it."
    names_method = "names"
    check_method = "names"

    def open(self, section: Any, model: Any, vocabulary: Any = None) -> RowsReader:
        return RowsReader()

    def handle(self, cores: Any, reader: Any) -> Any:
        return cores

    def async_handle(self, cores: Any, reader: Any) -> Any:
        return cores

    def check_section(self, section: Any) -> None:
        pass

    def add_flags(self, group: Any) -> None:
        pass

    def read_flags(self, args: Any, section: Any) -> Any:
        return section


class ReadingAsPart(Part):
    """The part; the tests' worker reads by itself."""

    def worker(self, section: Any) -> None:
        return None

    def core(self, facts: Any, section: Any, services: Any) -> Any:
        return ReadingCore()

    def requests(self) -> Any:
        return ReadingRequests()
