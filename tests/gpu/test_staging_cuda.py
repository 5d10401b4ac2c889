"""The staging ring on a GPU: streams in order, graphs replayed, nothing allocated, and waiting only where it must."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
import torch

from headgate.capture.links.shared_memory import SharedStaging
from headgate.capture.planning.step_plan import PackGroup, SiteSet, StepPlan
from headgate.capture.schema.batch import BatchView, NewRequest
from headgate.capture.schema.sites import HookPoint, Site
from headgate.capture.staging.device_copy import CudaCopier, _CudaCopied
from headgate.capture.staging.host_rows import StagedRows
from headgate.capture.staging.ring import StagingRing
from tests.fakes.pipeline import TIMEOUT_S
from tests.fakes.readouts import bound
from tests.fakes.staged import collected, groups_in

HIDDEN = 256
NUM_SITES = 6
MAX_TOKENS = 192
SITES = tuple(Site(layer, HookPoint.POST_MLP) for layer in range(NUM_SITES))
LONG_SLEEP_CYCLES = 400_000_000
"""About a fifth of a second on the device: longer than anything else in a test."""


def make_ring(*, num_rows=MAX_TOKENS, staging_rows=1 << 14, dtype=torch.bfloat16, is_shared=False, declared=()):
    device = torch.device("cuda", torch.cuda.current_device())
    return StagingRing(
        sites=SITES,
        num_rows=num_rows,
        max_tokens=MAX_TOKENS,
        hidden_size=HIDDEN,
        dtype=dtype,
        device=device,
        staging_bytes=staging_rows * HIDDEN * dtype.itemsize,
        memory=SharedStaging(staging_rows, HIDDEN, dtype, device) if is_shared else None,
        readouts=bound(declared, SITES, HIDDEN, "cuda"),
    )


SHARED = pytest.mark.parametrize("is_shared", [False, True], ids=["own memory", "shared memory"])


def plan_of(token_rows: Sequence[int], *groups: tuple[Sequence[int], Sequence[int]]) -> StepPlan:
    """A plan of one request whose positions are its batch rows: ``(site ids, rows)`` for each group."""
    rows = np.array(sorted(token_rows), dtype=np.int64)
    made = []
    for site_ids, chosen in groups:
        index = np.array(chosen, dtype=np.int64)
        made.append(
            PackGroup(
                site_set=SiteSet(tuple(SITES[site] for site in site_ids), np.array(site_ids, dtype=np.int64)),
                rows=index,
                positions=rows[index],
                masks=np.ones(len(index), dtype=np.int64),
                spans=(("request-1", 0, len(index)),),
            )
        )
    return StepPlan(token_rows=rows, groups=tuple(made))


def random_plan(random: Random) -> StepPlan:
    """Anything from one row at one site to every row at every site."""
    num_tokens = random.choice([1, 2, 17, MAX_TOKENS])
    token_rows = random.sample(range(num_tokens), random.randint(1, num_tokens))
    num_split = random.randint(1, NUM_SITES)
    first, second = range(num_split), range(num_split, NUM_SITES)
    chosen = sorted(random.sample(range(len(token_rows)), random.randint(1, len(token_rows))))
    groups = [(first, range(len(token_rows))), (second, chosen)]
    return plan_of(token_rows, *[(sites, rows) for sites, rows in groups if len(sites)])


class Model:
    """The forward pass: each row says its step, its batch row and its site. As written, or as a CUDA graph."""

    def __init__(self, ring: StagingRing, *, is_graph: bool) -> None:
        self._ring = ring
        device = ring.slots.device
        self._step = torch.zeros((), device=device)
        self._tokens = torch.arange(MAX_TOKENS, device=device).float()
        self._graph: torch.cuda.CUDAGraph | None = None
        self.forward_eagerly()
        if is_graph:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.forward_eagerly()
            self._graph = graph

    def forward(self, step: int) -> None:
        self._step.fill_(step)
        if self._graph is None:
            self.forward_eagerly()
        else:
            self._graph.replay()

    def forward_eagerly(self) -> None:
        for index, buffer in enumerate(self._ring.site_rows):
            values = torch.zeros(MAX_TOKENS, HIDDEN, device=buffer.device, dtype=buffer.dtype)
            values[:, 0] = self._step.to(buffer.dtype)
            values[:, 1] = self._tokens.to(buffer.dtype)
            values[:, 2:] = index
            buffer.index_put_((self._ring.slots,), values)


def check(staged: Sequence[StagedRows], plan: StepPlan, step: int) -> None:
    """Every planned row arrived once, with the values of its step. Steps and rows are below 256: exact in bf16."""
    found: dict[tuple[Site, bool, int], int] = {}
    for part in staged:
        part.wait()
        for group, rows in groups_in(part):
            for site, values in zip(group.sites, rows.float(), strict=True):
                assert (values[:, 0] == step).all()
                assert values[:, 1].tolist() == group.positions.tolist()
                assert (values[:, 2:] == SITES.index(site)).all()
                for key in [(site, group.site_set.is_read_out, position) for position in group.positions.tolist()]:
                    found[key] = found.get(key, 0) + 1
        part.release()
    planned = ((group, site, position) for group in plan.groups for site in group.sites for position in group.positions)
    assert found == {(site, group.site_set.is_read_out, position): 1 for group, site, position in planned}


@pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("num_rows", [MAX_TOKENS, 3 * MAX_TOKENS + 5], ids=["one-step-ring", "three-step-ring"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@SHARED
def test_rows_are_those_of_their_own_step_with_many_steps_under_way(
    is_graph: bool, num_rows: int, dtype: torch.dtype, is_shared: bool
) -> None:
    ring = make_ring(num_rows=num_rows, dtype=dtype, is_shared=is_shared)
    model, random = Model(ring, is_graph=is_graph), Random(0)
    under_way: list[tuple[list[StagedRows], StepPlan, int]] = []

    for step in range(1, 200):
        plan = random_plan(random) if random.random() < 0.9 else None
        ring.begin(plan)
        model.forward(step)
        if plan is not None:
            under_way.append((collected(ring, plan), plan, step))
        while len(under_way) > random.choice([1, 3]):
            check(*under_way.pop(0))

    for parts in under_way:
        check(*parts)
    assert ring.counters.dropped_rows == 0


@SHARED
def test_a_dispatch_thread_that_lags_behind_still_reads_the_right_rows(is_shared: bool) -> None:
    ring = make_ring(staging_rows=4096, is_shared=is_shared)
    model, random = Model(ring, is_graph=True), Random(1)
    waiting: list[tuple[StagedRows, StepPlan, int] | None] = []
    changed, wrong = threading.Condition(), []

    def dispatch() -> None:
        while True:
            with changed:
                assert changed.wait_for(lambda: waiting, TIMEOUT_S)
                item = waiting.pop(0)
            if item is None:
                return
            part, _, step = item
            part.wait()
            steps = {float(rows[:, :, 0].float().min()) for _, rows in groups_in(part)}
            part.release()
            if steps != {float(step)}:
                wrong.append((step, steps))

    thread = threading.Thread(target=dispatch)
    thread.start()
    for step in range(1, 250):
        plan = random_plan(random)
        ring.begin(plan)
        model.forward(step)

        def hand_over(part: StagedRows, plan: StepPlan = plan, step: int = step) -> None:
            with changed:
                waiting.append((part, plan, step))
                changed.notify_all()

        ring.keep(plan)
        ring.collect(hand_over, patience_s=TIMEOUT_S)
    with changed:
        waiting.append(None)
        changed.notify_all()
    thread.join(TIMEOUT_S)

    assert wrong == []


def test_tokens_are_those_that_the_forward_read() -> None:
    ring = make_ring()
    model, token_ids = Model(ring, is_graph=True), torch.zeros(MAX_TOKENS, dtype=torch.int32, device="cuda")
    plan, under_way = plan_of(range(0, 100, 3), (range(NUM_SITES), range(34))), []

    for step in range(20):
        token_ids.copy_(1000 * step + torch.arange(MAX_TOKENS, device="cuda"))
        ring.begin(plan, token_ids)
        model.forward(step)
        under_way += [(step, part) for part in collected(ring, plan)]

    for step, part in under_way:
        part.wait()
        assert part.token_ids(plan.groups[0]).tolist() == (1000 * step + plan.groups[0].positions).tolist()
        part.release()


def busy_side_stream(ring: StagingRing, cycles: int = LONG_SLEEP_CYCLES) -> None:
    """Keep the copies of what is collected next waiting."""
    assert isinstance(ring._copier, CudaCopier)
    with torch.cuda.stream(ring._copier._side):
        torch.cuda._sleep(cycles)


def has_arrived(part: StagedRows) -> bool:
    """Whether its copy is done; waits for nothing."""
    assert isinstance(part._copied, _CudaCopied)
    return part._copied._event.query()


def run_step(ring: StagingRing, model: Model, plan: StepPlan, step: int) -> torch.cuda.Event:
    """One step; return an event after its forward."""
    ring.begin(plan)
    model.forward(step)
    done = torch.cuda.Event()
    done.record()
    return done


def test_the_next_forward_does_not_wait_for_copies_of_other_slots() -> None:
    ring = make_ring(num_rows=2 * MAX_TOKENS)
    model, plan = Model(ring, is_graph=True), plan_of(range(MAX_TOKENS), (range(NUM_SITES), range(MAX_TOKENS)))
    torch.cuda.synchronize()

    run_step(ring, model, plan, 1)
    busy_side_stream(ring)
    (first,) = collected(ring, plan)
    run_step(ring, model, plan, 2).synchronize()

    assert not has_arrived(first)
    (second,) = collected(ring, plan)
    check([first], plan, 1)
    check([second], plan, 2)


def test_the_next_forward_waits_until_its_slots_are_free() -> None:
    ring = make_ring(num_rows=MAX_TOKENS)
    model, plan = Model(ring, is_graph=True), plan_of(range(MAX_TOKENS), (range(NUM_SITES), range(MAX_TOKENS)))
    torch.cuda.synchronize()

    run_step(ring, model, plan, 1)
    busy_side_stream(ring)
    (first,) = collected(ring, plan)
    run_step(ring, model, plan, 2).synchronize()

    assert has_arrived(first)
    (second,) = collected(ring, plan)
    check([first], plan, 1)
    check([second], plan, 2)


@pytest.mark.parametrize("num_sites", [1, NUM_SITES], ids=["run", "packed"])
def test_no_kernel_runs_beside_the_forward(num_sites: int) -> None:
    """Else every kernel of the process would start later from then on: see `CudaLink`."""
    ring = make_ring()
    model, plan = Model(ring, is_graph=True), plan_of(range(9), (range(num_sites), range(9)))
    token_ids = torch.zeros(MAX_TOKENS, dtype=torch.int32, device="cuda")

    def step() -> None:
        ring.begin(plan, token_ids)
        model.forward(1)
        check(collected(ring, plan), plan, 1)

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()

    found = [event for event in profile.profiler.kineto_results.events() if event.device_type().name == "CUDA"]
    of_stream: dict[int, set[str]] = {}
    for event in found:
        if not event.name().startswith(("Memcpy", "Memset")):
            of_stream.setdefault(event.device_resource_id(), set()).add(event.name())
    copies = [event.name() for event in found if "DtoH" in event.name()]
    assert len(of_stream) == 1, of_stream
    assert len(copies) == 2, "the rows and their tokens"


def test_a_step_does_not_wait_for_the_device() -> None:
    ring = make_ring(num_rows=2 * MAX_TOKENS)
    model, plan = Model(ring, is_graph=True), plan_of(range(9), (range(NUM_SITES), range(9)))
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_SLEEP_CYCLES)
    behind = torch.cuda.Event()
    behind.record()

    parts = []
    for step in (1, 2):
        ring.begin(plan)
        model.forward(step)
        parts += collected(ring, plan)

    assert not behind.query()
    for step, part in enumerate(parts, 1):
        check([part], plan, step)


def test_nothing_is_allocated_once_it_is_warm() -> None:
    ring = make_ring()
    model, random = Model(ring, is_graph=True), Random(2)
    token_ids = torch.zeros(MAX_TOKENS, dtype=torch.int32, device="cuda")

    def run(num_steps: int) -> None:
        for step in range(1, num_steps):
            plan = random_plan(random)
            ring.begin(plan, token_ids)
            model.forward(step)
            check(collected(ring, plan), plan, step)
        ring.begin(None)

    run(20)
    before = allocations()
    run(100)

    assert allocations() == before


def allocations() -> tuple[int, int]:
    """Device memory that was asked of the driver so far, and pinned host memory likewise."""
    device = torch.cuda.memory_stats()["segment.all.allocated"]
    return device, torch.cuda.host_memory_stats()["num_host_alloc"]


def test_idle_steps_launch_nothing_and_can_be_recorded_in_a_graph() -> None:
    ring = make_ring()
    ring.begin(plan_of([3], (range(NUM_SITES), [0])))
    ring.begin(None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph):
        ring.begin(None)
        torch.zeros(1, device="cuda")

    assert (ring.slots >= MAX_TOKENS).all()


def test_steps_larger_than_the_host_memory_come_in_parts() -> None:
    ring = make_ring(staging_rows=64)
    model, plan = Model(ring, is_graph=True), plan_of(range(MAX_TOKENS), (range(NUM_SITES), range(MAX_TOKENS)))

    ring.begin(plan)
    model.forward(5)
    seen = 0

    def check_part(part: StagedRows) -> None:
        nonlocal seen
        part.wait()
        for group, rows in groups_in(part):
            assert (rows[:, :, 0] == 5).all()
            assert rows[0, :, 1].tolist() == group.positions.tolist()
            seen += len(group.positions)
        part.release()

    ring.keep(plan)
    ring.collect(check_part, patience_s=TIMEOUT_S)
    assert seen == MAX_TOKENS


def test_a_session_on_a_gpu_delivers_the_rows_of_each_request() -> None:
    from tests.fakes.capture_world import Keeper, make_world, want
    from tests.fakes.pipeline import final_state

    keeper = Keeper()
    ring = make_ring()
    it = make_world((keeper, {}), sites=SITES, staging=ring)
    model = Model(ring, is_graph=True)
    spec = want(sites=SITES).to_wire()
    for req_id in ("a", "b"):
        capture = {"id": req_id, "n": 1, "key": req_id, "reply": None, "wait": False, "specs": {"c0": spec}}
        wire = {"v": 1, "capture": capture}
        it.session.request_added(NewRequest(req_id=req_id, prompt_token_ids=np.arange(4), wire=wire))

    for step in range(40):
        first, count = (0, 4) if step == 0 else (step + 3, 1)
        counts = np.full(2, count)
        view = BatchView(("a", "b"), np.array([0, count]), counts, np.full(2, first))
        it.session.step_begins(view)
        model.forward(step)
        it.session.step_ends()
    for req_id in ("a", "b"):
        it.session.request_finished(req_id, final_state(4, num_tokens=44))
    report = it.session.close(TIMEOUT_S)

    assert report.is_clean
    assert [message["result"].status for message in it.sender.sent] == ["ok", "ok"]
    for captured, batch_row in zip(keeper.captured, (0, 4), strict=True):
        steps = [0] * 4 + list(range(1, 40))
        rows = [batch_row + position for position in range(4)] + [batch_row // 4] * 39
        for index, site in enumerate(SITES):
            values = captured.rows[site].float()
            assert (values[:, 0].tolist(), values[:, 1].tolist()) == (steps, rows)
            assert (values[:, 2:] == index).all()
