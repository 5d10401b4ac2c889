"""Rows of several pipeline stages come out once each, complete, in order; what any stage lost comes out of none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.links.driver import StageJoin, join_requests
from headgate.capture.schema.consumer import RequestInfo, RowBlock, RowSpan
from headgate.capture.schema.positions import Indices, Named
from headgate.capture.schema.sites import HookPoint, Site
from headgate.capture.schema.spec import CaptureSpec

HIDDEN = 3


def request(sites: tuple[Site, ...]) -> RequestInfo:
    return RequestInfo(
        request_id="r",
        client_request_id="c",
        prompt_token_ids=np.zeros(0, dtype=np.int64),
        spec=CaptureSpec(sites=sites, positions=Named("all")),
    )


def block(sites: tuple[Site, ...], positions: list[int]) -> RowBlock:
    """Every row says whose it is: layer and position."""
    layers = torch.tensor([float(site.layer) for site in sites])[:, None, None]
    rows = (100 * layers + torch.tensor(positions, dtype=torch.float32)[None, :, None]).expand(-1, -1, HIDDEN)
    return RowBlock(
        sites=sites,
        rows=rows.contiguous(),
        positions=np.array(positions, dtype=np.int64),
        spans=(RowSpan(request=request(sites), start=0, stop=len(positions)),),
    )


@dataclass(frozen=True)
class Schedule:
    """What stages send: writes in order of arrival as ``(stage, positions)``, and all positions of each stage."""

    writes: list[tuple[int, list[int]]]
    kept: list[set[int]]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Stages that each lose some positions, send the rest in pieces of their own, and overtake each other."""
    some = st.sets(st.integers(0, 12), max_size=3)
    wanted = draw(st.sets(st.integers(0, 12)))
    kept = [wanted - draw(some) for _ in range(draw(st.integers(2, 3)))]
    pieces = [draw(cuts(sorted(own))) for own in kept]
    order = draw(st.permutations([stage for stage, own in enumerate(pieces) for _ in own]))
    return Schedule([(stage, pieces[stage].pop(0)) for stage in order], kept)


@st.composite
def cuts(draw: st.DrawFn, positions: list[int]) -> list[list[int]]:
    """Consecutive pieces, as steps and staging memory cut them."""
    stops = sorted(draw(st.sets(st.integers(0, len(positions)), max_size=4)) | {len(positions)})
    pieces = [positions[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
    return [piece for piece in pieces if piece]


@given(schedules(), st.integers(0, 15))
def test_what_every_stage_sent_comes_out_once_in_order_and_nothing_else(schedule: Schedule, start_at: int) -> None:
    sites = [(Site(2 * stage, HookPoint.POST_MLP), Site(2 * stage + 1, HookPoint.MLP_IN)) for stage in range(3)]
    sites = sites[: len(schedule.kept)]
    joined = join_requests({stage: request(own) for stage, own in enumerate(sites)})

    released = run(schedule, sites, joined, start_at=min(start_at, len(schedule.writes)))

    expected = sorted(set.intersection(*schedule.kept))
    for site in joined.spec.sites:
        parts = [part for write in released for part in write if site in part.sites]
        assert [int(position) for part in parts for position in part.positions] == expected
        for part in parts:
            assert part.spans == (RowSpan(request=joined, start=0, stop=len(part.positions)),)
            values = 100 * site.layer + torch.from_numpy(part.positions).float()
            assert torch.equal(part.rows[part.sites.index(site)], values[:, None].expand(-1, HIDDEN))


@given(schedules(), st.integers(0, 15))
def test_all_sites_of_one_write_have_the_same_positions(schedule: Schedule, start_at: int) -> None:
    sites = [(Site(stage, HookPoint.MLP_IN), Site(stage, HookPoint.POST_MLP)) for stage in range(len(schedule.kept))]
    joined = join_requests({stage: request(own) for stage, own in enumerate(sites)})

    for write in run(schedule, sites, joined, start_at=min(start_at, len(schedule.writes))):
        positions = {
            site: tuple(p for part in write if site in part.sites for p in part.positions.tolist())
            for site in joined.spec.sites
        }
        assert len(set(positions.values())) == 1


def stages_of(sites: Sequence[tuple[Site, ...]]) -> dict[int, RequestInfo]:
    return {stage: request(own) for stage, own in enumerate(sites)}


def run(
    schedule: Schedule, sites: list[tuple[Site, ...]], joined: RequestInfo, *, start_at: int
) -> list[list[RowBlock]]:
    """Put a schedule through a join that learns of the stages before write number `start_at`."""
    join, released = StageJoin(), []
    for index, (stage, positions) in enumerate(schedule.writes):
        if index == start_at:
            released.append(join.start(joined, stages_of(sites)))
        blocks = [block(sites[stage][:1], positions), block(sites[stage][1:], positions)]
        released.append(join.add(stage, blocks))
    if start_at == len(schedule.writes):
        released.append(join.start(joined, stages_of(sites)))
    return [*released, join.end()]


def test_rows_come_out_as_soon_as_the_last_stage_has_sent_them() -> None:
    first, second = Site(0, HookPoint.POST_MLP), Site(1, HookPoint.POST_MLP)
    join = StageJoin()
    stages = stages_of([(first,), (second,)])
    join.start(join_requests(stages), stages)

    assert join.add(0, [block((first,), [0, 1, 2])]) == []
    released = join.add(1, [block((second,), [0, 1])])

    assert [(part.sites, part.positions.tolist()) for part in released] == [((first,), [0, 1]), ((second,), [0, 1])]


def test_a_stage_without_sites_is_not_waited_for() -> None:
    only = Site(0, HookPoint.POST_MLP)
    join = StageJoin()

    assert join.add(0, [block((only,), [0])]) == []
    (early,) = join.start(join_requests(stages_of([(only,), ()])), stages_of([(only,)]))
    (late,) = join.add(0, [block((only,), [1])])

    assert (early.positions.tolist(), late.positions.tolist()) == ([0], [1])


def test_a_stage_holds_up_and_lacks_only_what_it_wants() -> None:
    """The first stage has keys at all positions, the second one queries at positions 1 and 3 alone."""
    k, q = Site(0, HookPoint.K), Site(1, HookPoint.Q)
    own = {HookPoint.Q: Indices.of((1, 3))}
    stages = {
        stage: replace(info, spec=replace(info.spec, hook_positions=own))
        for stage, info in stages_of([(k,), (q,)]).items()
    }
    join = StageJoin()
    join.start(join_requests(stages), stages)

    early = join.add(0, [block((k,), [0, 1, 2])])
    middle = join.add(1, [block((q,), [1])])
    late = join.add(0, [block((k,), [4])])
    end = [*join.add(1, [block((q,), [3])]), *join.end()]

    found = [[(part.sites[0].hook, part.positions.tolist()) for part in parts] for parts in (early, middle, late, end)]
    assert found == [
        [(HookPoint.K, [0])],
        [(HookPoint.K, [1, 2]), (HookPoint.Q, [1])],
        [],
        [(HookPoint.K, [4])],  # nobody has position 3 of every stage that wants it
    ]


def test_a_request_of_several_stages_has_all_sites_in_the_order_of_the_forward_pass() -> None:
    sites = (Site(0, HookPoint.POST_MLP), Site(1, HookPoint.PRE_ATTN), Site(5, HookPoint.POST_MLP))

    assert join_requests({1: request(sites[2:]), 0: request(sites[:2])}).spec.sites == sites
