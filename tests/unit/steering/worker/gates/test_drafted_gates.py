"""Gates under speculative decoding, from a step's columns to traces and counts: as without drafts, to the bit.

Worker and engine core are real, and so are programs on rows; the rows of the stream are drawn. A reference run has a
step for each token. The other one has drafts: some, all or none of them accepted, answers that end within drafts,
preemptions, and a host that takes the drafts of the step before for accepted.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from headgate.capture.engine.contracts.worker_hooks import WorkerFacts
from headgate.capture.schema.batch import BatchView
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.config import parse_config
from headgate.steering.core.steering_core import SteeringCore
from headgate.steering.gates.gate import Gate, InlineProbe, Leaf, Pid, Then
from headgate.steering.gates.trace import join_notes
from headgate.steering.programs.codes import GateScope, Mode, ScorePooling, TokenFlag
from headgate.steering.programs.operations import Method, Operation
from headgate.steering.spec import SteeringSpec, to_wire
from headgate.steering.worker.program_reference import program_deltas_reference
from headgate.steering.worker.steering_part import EntryLimits, WorkerSteering
from tests.unit.steering.worker.gates.test_step_gates import Sampled, view

HIDDEN, LAYERS, IN_FLIGHT, MAX_TOKENS = 4, 3, 4, 64
EARLY, READ, LATE = (Site(layer, HookPoint.POST_MLP) for layer in range(LAYERS))
CONFIG = parse_config({"op_sites": {"post_mlp": "all"}, "max_gates": 4})
STEERABLE = CONFIG.steerable(num_layers=LAYERS, hidden_size=HIDDEN, dtype="float32")


class NoWorkers:
    def call_workers(self, method: str, args: Any) -> list[object]:
        return []


def adding(site: Site) -> Then:
    vectors = {"vector": np.ones(HIDDEN, np.float32)}
    return Then(operations=(Operation(method=Method.ADDITIVE, site=site, vectors=vectors, numbers={"scale": 1.0}),))


def gate(name: str, then: Site = LATE, **settings: Any) -> Gate:
    reading = InlineProbe(site=READ, weight=np.array([1, 0.5, 0, 0], np.float32))
    leaf = {"reading": reading, "threshold": 0.1} | {
        key: settings.pop(key) for key in ("pooling", "alpha", "hysteresis", "threshold") if key in settings
    }
    return Gate(**{"name": name, "when": Leaf(**leaf), "then": adding(then), "where": "steering_gates[0]", **settings})


GATES = [
    [gate("row"), gate("next", scope=GateScope.NEXT), gate("latch", scope=GateScope.REST, threshold=2.0)],
    [
        gate("average", pooling=ScorePooling.EMA, alpha=0.25),
        gate("stays", hysteresis=0.8, mode=Mode.PROPORTIONAL, amount=0.7),
    ],
    [
        gate("mean", pooling=ScorePooling.PROMPT_MEAN),
        gate("last", EARLY, pooling=ScorePooling.LAST_PROMPT, scope=GateScope.NEXT),
    ],
    [
        gate("loop", threshold=None, mode=Mode.PID, pid=Pid(setpoint=0.2, kp=0.5, ki=0.3, kd=0.2, least=-2, largest=2)),
        gate("rest", EARLY, pooling=ScorePooling.PROMPT_MEAN, scope=GateScope.REST, threshold=-9.0),
    ],
]
"""Of each request in turn: rows alone, latches, averages, what the prompt decides, control loops."""


@dataclass
class Running:
    """A request and what was computed of it.

    Attributes:
        rows: Of the stream at each site, ``[length, sites, D]``: its last token is at position `length`.
        done: Rows that count.
        host: Rows as the host has them: it takes drafts for accepted until it knows.
    """

    req_id: str
    num_prompt: int
    length: int
    gates: Sequence[Gate]
    rows: torch.Tensor
    done: int = 0
    host: int = 0
    tokens: int = 0
    notes: list[Any] = field(default_factory=list)

    @property
    def is_early(self) -> bool:
        """Whether a gate writes at a site before the one where it is evaluated."""
        return any(operation.site == EARLY for gate in self.gates for operation in gate.then.operations)


class Engine:
    """Worker, engine core and the rows of the forward."""

    def __init__(self, *, has_drafts: bool) -> None:
        steerable = replace(STEERABLE, knows_positions=not has_drafts)
        self.core = SteeringCore("float32", 64, NoWorkers(), CONFIG, steerable=steerable)
        facts = WorkerFacts(
            model=ModelInfo(name="m", num_layers=LAYERS, hidden_size=HIDDEN, dtype="float32", sites=()),
            owned_layers=tuple(range(LAYERS)),
            device=torch.device("cpu"),
            dtype=torch.float32,
            max_tokens=MAX_TOKENS,
            max_num_seqs=IN_FLIGHT,
            is_compiled=False,
        )
        limits = EntryLimits(CONFIG.max_entries, CONFIG.num_changes, CONFIG.num_columns)
        self.worker = WorkerSteering(CONFIG.num_slots(LAYERS), STEERABLE.sites, facts, STEERABLE.op_sites, limits)
        self.added: dict[tuple[str, int], list[float]] = {}
        """What the forward added last at each site to each row that counts."""

    def add(self, request: Running) -> None:
        wire = self.core.accept(
            request.req_id, {**to_wire(SteeringSpec(gates=tuple(request.gates))), "trace": True}, request.num_prompt
        )
        assert wire is not None
        self.core.offer(request.req_id, priority=0, is_session=False, is_offline=False)
        self.worker.add(request.req_id, request.num_prompt, wire)
        request.tokens = request.num_prompt

    def step(self, parts: Sequence[tuple[Running, int, int]], random_rows: torch.Generator | None) -> None:
        """Run a step of so many rows of each request, of which the last ones are of rejected drafts."""
        laid_out = view(*((one.req_id, one.host, rows) for one, rows, _ in parts))
        if random_rows is not None:
            counted = view(*((one.req_id, one.done, rows - gone) for one, rows, gone in parts))
            outcome = Sampled(replace(counted, starts=laid_out.starts), [gone for *_, gone in parts])
            laid_out = replace(laid_out, outcome=outcome)
        self.worker.step_begins(laid_out)
        self._forward(laid_out, parts, random_rows)
        self.worker.step_ends()
        found = self.worker.readings()
        ends = {}
        for one, rows, gone in parts:
            one.done += rows - gone
            one.host = one.done
            if one.done >= one.num_prompt:
                one.tokens = max(one.tokens, min(one.done, one.length) + 1)
            ends[one.req_id] = one.tokens - 1
        if found is not None:
            noted = self.core.take_readings(found.collect(), (), ends if random_rows is not None else None)
            for one, *_ in parts:
                if one.req_id in noted:
                    one.notes.append(noted[one.req_id])
        for one, *_ in parts:
            if one.done >= one.length:
                self.worker.remove(one.req_id)
                self.core.release(one.req_id)

    def _forward(
        self, laid_out: BatchView, parts: Sequence[tuple[Running, int, int]], random_rows: torch.Generator | None
    ) -> None:
        rows, keys = [], []
        for one, number, gone in parts:
            for position in range(one.done, one.done + number):
                is_kept = position < one.done + number - gone and position < one.length
                keys.append((one.req_id, position) if is_kept else None)
                rows.append(one.rows[position] if is_kept else torch.randn(LAYERS, HIDDEN, generator=random_rows))
        tables, used = self.worker.tables, slice(laid_out.num_tokens)
        programs, gates = tables.programs, tables.gates
        assert programs is not None
        assert gates is not None
        seen = gates._replace(signals=gates.signals[used], tokens=gates.tokens[used])
        assert self.worker.scans() == bool((gates.tokens[:, 1] & TokenFlag.IS_SCANNED).any())
        for key in keys:
            if key is not None:
                self.added[key] = []
        for index, x_TD in enumerate(torch.stack(rows).unbind(1)):
            active = programs.active[index][used]
            assert self.worker.acts(programs.active[index]) == bool(programs.active[index].any())
            given = tables.rows[used], active, programs.codes[index], programs.params[index], None, None, seen
            added = program_deltas_reference(x_TD, None, tables.pool, *given, dtype=torch.float32)
            for key, row in zip(keys, added[:, 0].tolist(), strict=True):
                if key is not None:
                    self.added[key].append(row)


def requests(number: int, lots: random.Random, drawn: torch.Generator) -> list[Running]:
    made = []
    for at in range(number):
        num_prompt = lots.randrange(1 if at % len(GATES) < 2 else 2, 6)  # gates that act early need two tokens
        length = num_prompt + lots.randrange(1, 40)
        rows = torch.randn(length, LAYERS, HIDDEN, generator=drawn)
        gates = [replace(one, name=f"{one.name} {at % len(GATES)}") for one in GATES[at % len(GATES)]]
        made.append(Running(f"r{at}", num_prompt, length, gates, rows))
    return made


def in_plain_steps(engine: Engine, given: Sequence[Running]) -> None:
    for one in given:
        engine.add(one)
        engine.step([(one, one.num_prompt, 0)], None)
        while one.done < one.length:
            engine.step([(one, 1, 0)], None)


def with_drafts(engine: Engine, given: Sequence[Running], lots: random.Random, preempted: float) -> dict[str, int]:
    """Run all, some at a time; returns how many rows were of rejected drafts, and came after an answer's end.

    The last row of a prompt, alone, has drafts, as vLLM lays out requests that begin with it. Gates that act early keep
    the cache from being read, so a request with some never begins with one row.
    Before each step, a request is preempted with the probability that is given.
    """
    waiting, running, drawn = list(given), [], torch.Generator().manual_seed(1)
    found = {"rejected": 0, "after": 0, "again": 0, "padded": 0}
    while waiting or running:
        while waiting and len(running) < IN_FLIGHT:
            running.append(waiting.pop(0))
            engine.add(running[-1])
        parts: list[tuple[Running, int, int]] = []
        for one in lots.sample(running, lots.randrange(1, len(running) + 1)):
            if one.done >= one.num_prompt and lots.random() < preempted:
                one.done = one.host = 0  # preempted
                found["again"] += 1
            known = one.tokens - one.done
            if known == 1 and one.done < one.num_prompt and not one.is_early:
                gone = lots.choice([3, 3, 2, 0])
                found["padded"] += 1
                found["after"] += max(one.done + 4 - gone - one.length, 0)
                parts.append((one, 4, gone))
                continue
            if known > 1 or one.done < one.num_prompt:
                parts.append((one, lots.randrange(1, known + 1), 0))
                continue
            drafts = lots.randrange(4)
            gone = lots.choice([0, drafts, lots.randrange(drafts + 1)])
            one.host += lots.randrange(4)
            found["rejected"] += gone
            found["after"] += max(one.done + 1 + drafts - gone - one.length, 0)
            parts.append((one, 1 + drafts, gone))
        engine.step(parts, drawn)
        running = [one for one in running if one.done < one.length]
    return found


def traces(given: Sequence[Running]) -> Mapping[str, Any]:
    return {one.req_id: join_notes(one.notes, one.length + 1) for one in given}


@pytest.mark.parametrize(("seed", "preempted"), [(0, 0.0), (1, 0.0), (2, 0.03), (3, 0.03)])
def test_states_traces_and_counts_are_those_without_drafts(seed: int, preempted: float) -> None:
    plain, drafting = Engine(has_drafts=False), Engine(has_drafts=True)
    known, given = (requests(16, random.Random(seed), torch.Generator().manual_seed(seed)) for _ in range(2))

    in_plain_steps(plain, known)
    found = with_drafts(drafting, given, random.Random(seed), preempted)

    assert found["rejected"] > 100
    assert found["after"] > 3
    assert found["padded"] > 3
    assert (found["again"] > 0) == (preempted > 0)
    assert traces(given) == traces(known)
    assert drafting.added == plain.added
    counted = [engine.core.operator.call("dynamic", {})["gates"] for engine in (plain, drafting)]
    assert counted[0].keys() == counted[1].keys()
    assert sum(counted[0].values()) > 100
    if not preempted:  # rows that are computed again count again
        assert counted[0] == counted[1]
