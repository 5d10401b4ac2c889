"""Over random schedules, each consumer gets exactly the rows its request wants, with the right values, and is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.capture.schema.batch import BatchView, FinalState, NewRequest
from headgate.capture.schema.config import CaptureConsumersConfig, CaptureConsumerSpec
from headgate.capture.schema.consumer import CapturedRequest
from headgate.capture.schema.positions import Named
from headgate.capture.schema.registry import OpenConsumer
from headgate.capture.schema.results import CaptureResult
from headgate.capture.schema.spec import CaptureSpec
from tests.fakes.capture_world import Keeper, KeptResults, local_session, make_staging
from tests.fakes.pipeline import TIMEOUT_S, row_values
from tests.strategies import BITS, SITES, Arrival, Step, schedules

MAX_TOKENS = 256

KNOBS: Mapping[int, dict[str, Any]] = {
    BITS[0]: {},
    BITS[1]: {"queue_bytes": 1},
    BITS[2]: {"queue_bytes": 200, "overload": "spill"},
    BITS[3]: {"queue_bytes": 2000},
}
"""Large, tiny and spilling queues; none of these loses anything."""


@dataclass
class Life:
    """One request from its arrival to its end; an id may live several times."""

    number: int
    num_prompt: int
    specs: Mapping[int, CaptureSpec]
    computed: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    num_known: int = 0
    final: FinalState | None = None

    @property
    def key(self) -> str:
        return f"key-{self.number}"

    def compute(self, start: int, stop: int) -> None:
        """Positions of one step. What is computed again is not captured, nor what is late.

        A row is late if a preempted request computes it for the first time below its earlier rows, which began behind
        the prefix cache. With drafts it may be captured, if none of the earlier steps had a row to capture.
        """
        self.computed |= set(range(max(start, self.num_known), stop))
        self.late |= set(range(start, min(stop, self.num_known))) - self.computed
        self.num_known = max(self.num_known, stop)

    def end(self) -> FinalState:
        """All tokens that were computed and one that was sampled; for every other request, the last row was in vain."""
        num_tokens = max([position + 1 for position in self.computed], default=0) + 1 - self.number % 2
        num_tokens = max(num_tokens, self.num_prompt)
        self.final = FinalState(
            num_prompt_tokens=self.num_prompt,
            token_ids=1000 * self.number + np.arange(num_tokens, dtype=np.int64),
            status="stop",
        )
        return self.final

    def expected(self, bit: int, late: set[int]) -> tuple[list[int], int]:
        """Positions that consumer gets, and how many it misses, by a slow loop; `late` are captured late ones."""
        assert self.final is not None
        assert late <= self.late
        prompt = np.array([self.num_prompt])
        wanted = [
            position
            for position in range(self.final.num_rows)
            if self.specs[bit].positions.mask(np.array([position]), prompt)[0]
        ]
        got = [position for position in wanted if position in self.computed | late]
        return got, len(wanted) - len(got)


@dataclass
class Outcome:
    """Which rows of a step count; the session learns it late, as from a device."""

    counted: BatchView
    known: bool = False

    def is_known(self) -> bool:
        return self.known

    def view(self) -> BatchView:
        self.known = True
        return self.counted


class Driven:
    """Drives a session through a schedule as an engine would, and keeps book.

    Args:
        drafts: Decides how many drafts of each request are rejected, and when that is known; None: there are no drafts.
    """

    def __init__(self, staging_rows: int, num_rows: int, linger_s: float, drafts: Random | None = None) -> None:
        self.drafts = drafts
        self.outcomes: list[Outcome] = []
        self.staging = make_staging(SITES, num_rows=num_rows, max_tokens=MAX_TOKENS, staging_rows=staging_rows)
        self.sender = KeptResults()
        self.keepers = {bit: Keeper() for bit in BITS}
        specs = {bit: CaptureConsumerSpec(name=f"c{bit}", **KNOBS[bit]) for bit in BITS}
        self.session = local_session(
            config=CaptureConsumersConfig(consumers=tuple(specs.values()), linger_s=linger_s),
            sites=SITES,
            consumers=[OpenConsumer(bit, specs[bit], self.keepers[bit]) for bit in BITS],
            staging=self.staging,
            sender=self.sender,
        )
        self.alive: dict[str, Life] = {}
        self.lives: list[Life] = []

    def step(self, step: Step) -> None:
        for req_id in step.left:
            self._end(req_id)
        for arrival in step.arrived:
            # What is handed over whole has the same positions at every site.
            specs = {bit: replace(spec, hook_positions={}) for bit, spec in arrival.specs.items()}
            self.alive[arrival.req_id] = life = Life(len(self.lives), arrival.num_prompt, specs)
            self.lives.append(life)
            self._announce(arrival.req_id, life)
        view = step.view if self.drafts is None else self._with_drafts(step.view, self.drafts)
        self.session.step_begins(view, self._token_ids(view))
        self._forward(view)
        self.session.step_ends()

    def _with_drafts(self, view: BatchView, drafts: Random) -> BatchView:
        """Add rows of rejected drafts, and the positions that a host expects which takes earlier ones for accepted."""
        for outcome in self.outcomes:
            outcome.known |= drafts.random() < 0.4
        prompts = np.array([self.alive[req_id].num_prompt for req_id in view.req_ids], dtype=np.int64)
        decodes = view.num_computed + view.num_scheduled > prompts
        rejected, ahead = (
            np.array([drafts.randrange(4) if each else 0 for each in able.tolist()], dtype=np.int64)
            for able in (decodes, view.num_computed >= prompts)
        )
        planned = view.num_scheduled + rejected
        order = np.argsort(view.starts, kind="stable")
        starts = np.empty_like(view.starts)
        starts[order] = np.cumsum(planned[order]) - planned[order]
        self.outcomes.append(Outcome(replace(view, starts=starts)))
        return BatchView(view.req_ids, starts, planned, view.num_computed + ahead, self.outcomes[-1])

    def finish(self) -> None:
        for req_id in [*self.alive]:
            self._end(req_id)
        assert self.session.close(TIMEOUT_S).is_clean

    def _announce(self, req_id: str, life: Life) -> None:
        specs = {f"c{bit}": spec.to_wire() for bit, spec in life.specs.items()}
        capture = {"id": req_id, "n": 1, "key": life.key, "reply": None, "wait": False, "specs": specs}
        wire = {"v": 1, "capture": capture}
        prompt = np.arange(life.num_prompt, dtype=np.int64)
        self.session.request_added(NewRequest(req_id=req_id, prompt_token_ids=prompt, wire=wire))

    def _end(self, req_id: str) -> None:
        for outcome in self.outcomes:  # it has ended with tokens of them
            outcome.known = True
        self.session.request_finished(req_id, self.alive.pop(req_id).end())

    def _token_ids(self, view: BatchView) -> torch.Tensor:
        """What the forward reads: position p of a request is token ``1000 * its number + p``, and a draft is none."""
        token_ids = torch.full((MAX_TOKENS,), -1, dtype=torch.int32)
        view = self.outcomes[-1].counted if self.outcomes else view
        for req_id, start, count, first in zip(
            view.req_ids, view.starts, view.num_scheduled, view.num_computed, strict=True
        ):
            ids = 1000 * self.alive[req_id].number + torch.arange(first, first + count)
            token_ids[start : start + count] = ids.to(torch.int32)
        return token_ids

    def _forward(self, view: BatchView) -> None:
        for buffer in self.staging.site_rows:
            buffer[self.staging.slots[: view.num_tokens]] = -7.0  # of drafts, where nothing else is written
        view = self.outcomes[-1].counted if self.outcomes else view
        batch = list(zip(view.req_ids, view.starts, view.num_scheduled, view.num_computed, strict=True))
        for req_id, _, count, first in batch:
            self.alive[req_id].compute(first, first + count)
        for index, buffer in enumerate(self.staging.site_rows):
            for req_id, start, count, first in batch:
                values = row_values(self.alive[req_id].number, np.arange(first, first + count), index)
                buffer.index_put_((self.staging.slots[start : start + count],), values)


@settings(max_examples=60)
@given(
    schedules(),
    st.sampled_from([64, 128, 100_000]),
    st.sampled_from([MAX_TOKENS, 2 * MAX_TOKENS]),
    st.sampled_from([0.0, 0.02, 1.0]),
    st.none() | st.randoms(use_true_random=False),
)
def test_every_consumer_gets_exactly_its_rows_and_every_request_its_result(
    steps: list[Step], staging_rows: int, num_rows: int, linger_s: float, drafts: Random | None
) -> None:
    driven = Driven(staging_rows, num_rows, linger_s, drafts)
    try:
        for step in steps:
            driven.step(step)
        driven.finish()
    finally:
        driven.session.close(TIMEOUT_S)

    results = {(message["key"], message["instance"]): message["result"] for message in driven.sender.sent}
    captured = {(_key(each), bit): each for bit, keeper in driven.keepers.items() for each in keeper.captured}
    assert len(driven.sender.sent) == len(results) == sum(len(life.specs) for life in driven.lives)
    for life in driven.lives:
        for bit in life.specs:
            result = results[life.key, f"c{bit}"]
            if life.final is None:
                assert "another request took over the id" in result.error
                assert (life.key, bit) not in captured
            else:
                check(life, bit, result, captured[life.key, bit], may_be_late=drafts is not None)


def test_a_request_gets_no_row_of_one_that_had_its_id_in_a_step_whose_outcome_is_unknown() -> None:
    class Late(Random):
        """One draft of each request is rejected, and no outcome is known before somebody waits for it."""

        def random(self) -> float:
            return 1.0

        def randrange(self, *_: object) -> int:
            return 1

    def step(arrived: Arrival, first: int) -> Step:
        batch = np.array([0, 2]), np.array([2, 1]), np.array([0, first])
        return Step((), (arrived,), BatchView(("taken", "other"), *batch))

    wanted = {BITS[0]: CaptureSpec(sites=SITES[:1], positions=Named("all"))}
    driven = Driven(64, MAX_TOKENS, 0.0, Late())
    driven.step(Step((), (Arrival("other", 1, wanted),), BatchView(("other",), *np.array([[0], [1], [0]]))))
    driven.step(step(Arrival("taken", 2, {}), 1))
    driven.step(step(Arrival("taken", 2, wanted), 2))
    driven.finish()

    captured = {_key(each): each for each in driven.keepers[BITS[0]].captured}
    assert captured["key-2"].token_ids.tolist() == [2000, 2001]
    assert captured["key-2"].positions.tolist() == [0, 1]
    site = SITES[0]
    assert torch.equal(captured["key-2"].rows[site], row_values(2, np.arange(2), 0))


def check(life: Life, bit: int, result: CaptureResult, captured: CapturedRequest, *, may_be_late: bool) -> None:
    """Assert that one consumer got what it should of one request, and that its result says so."""
    late = set(captured.positions.tolist()) - life.computed if may_be_late else set()
    positions, num_missing = life.expected(bit, late)
    assert (result.status == "ok") == (num_missing == 0), result
    assert (result.num_rows, result.dropped_rows) == (len(positions), 0)
    assert not num_missing or f"{num_missing} of" in str(result.error)
    assert captured.positions.tolist() == positions
    assert captured.token_ids.tolist() == [1000 * life.number + position for position in positions]
    assert captured.sites == life.specs[bit].sites
    for site, values in captured.rows.items():
        assert torch.equal(values, row_values(life.number, np.array(positions, np.int64), SITES.index(site)))


def _key(captured: CapturedRequest) -> str:
    assert captured.request.origin is not None
    return captured.request.origin.key
