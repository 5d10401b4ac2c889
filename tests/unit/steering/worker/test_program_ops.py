"""The operation of the forward's graph that runs programs, on a CPU."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tqdm import tqdm

from headgate.steering.programs.codes import NUM_CODES, NUM_PARAMS, Code, Edit, with_change
from headgate.steering.worker import program_action
from headgate.steering.worker.gates.step_gates import no_gates
from headgate.steering.worker.program_action import (
    NO_SAE,
    program_deltas,
    program_deltas_and_state,
    steered_rows,
    steered_rows_and_state,
)
from tests.unit.steering.worker.test_worker import make_facts

NO_GATES = no_gates(torch.device("cpu"))


def tables():
    """Table row 1 moves a row of the stream along the vector of slot 1 by twice the product with it.

    Its program has one entry, and that of row 0 none: the counts of some tokens are their rows.
    """
    pool = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    codes = torch.zeros(2, 3, NUM_CODES, dtype=torch.int32)
    params = torch.zeros(2, 3, NUM_PARAMS)
    codes[1, 0] = torch.tensor([Code.LINEAR, 1, 1, 0])
    params[1, 0, :3] = torch.tensor([1.0, 1.0, 2.0])
    return codes, params, pool


@pytest.mark.parametrize("shape", [(3, 2), (1, 3, 2)], ids=["rows", "with-a-leading-axis"])
@pytest.mark.parametrize("has_addend", [False, True], ids=["value", "sum"])
def test_rows_and_groups_may_be_longer_than_the_batch(shape, has_addend):
    codes, params, pool = tables()
    codes[1, 0, 3] = 2
    value = torch.arange(6.0).reshape(shape)
    addend = torch.ones(shape) if has_addend else None
    rows, groups = torch.tensor([1, 0, 1, 1, 1], dtype=torch.int32), torch.tensor([2, 2, 3, 0, 0])

    delta = torch.ops.headgate.program_deltas(value, addend, pool, rows, rows, codes, params, groups)

    assert delta.dtype == torch.float32
    assert delta.tolist() == [[0, 2 * (1 + has_addend)], [0, 0], [0, 2 * (5 + has_addend)]]


def test_groups_choose_rows():
    codes, params, pool = tables()
    codes[1, 0, 3] = 2
    rows = torch.tensor([1, 1], dtype=torch.int32)

    delta = program_deltas(torch.ones(2, 2), None, pool, rows, rows, codes, params, torch.tensor([1, 2]))

    assert delta.tolist() == [[0, 0], [0, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_compiler_is_told_the_shape_and_dtype_that_come(dtype):
    codes, params, pool = tables()
    rows = torch.tensor([1, 0, 1, 1], dtype=torch.int32)
    value = torch.ones(1, 3, 2, dtype=dtype)

    for addend, groups in ((None, None), (value.clone(), torch.ones(4, dtype=torch.int64))):
        arguments = (value, addend, pool.to(dtype), rows, rows, codes, params, groups)
        torch.library.opcheck(program_deltas, arguments)


def test_it_is_one_node_of_a_compiled_graph():
    tqdm.monitor_interval = 0  # the compiler shows a bar now and then: no thread for it
    codes, params, pool = tables()
    rows = torch.tensor([1, 0, 1], dtype=torch.int32)
    steer = torch.compile(
        lambda value: value + program_deltas(value, None, pool, rows, rows, codes, params, None),
        backend="aot_eager",
        fullgraph=True,
        dynamic=True,
    )

    assert steer(torch.ones(3, 2)).tolist() == [[1, 3], [1, 1], [1, 3]]


PARTS = [0, 0, 1, 1]
"""Of four ranks, which of two heads each has."""


@pytest.fixture(params=range(4), ids="rank-{}".format)
def rank(request, monkeypatch):
    """One of four ranks, with rows of two heads of four values; the gathers that it took part in."""
    taken = []

    def gather(part):
        taken.append(part)
        return torch.stack([WIDE[..., 4 * head : 4 * head + 4].reshape(3, 4) for head in PARTS])

    monkeypatch.setattr(program_action, "_worker", make_facts(tp_rank=request.param, tp_size=4, gather=gather))
    return PARTS[request.param], taken


WIDE = torch.arange(24.0).reshape(3, 8) - 9
ACROSS = torch.tensor([[0.0] * 8, [1.0, -1, 0, 2, 0, 3, 1, -2]])


@pytest.mark.parametrize("has_addend", [False, True], ids=["value", "sum"])
def test_where_rows_are_gathered_each_rank_keeps_the_change_of_its_own_columns(rank, has_addend):
    codes, params, _ = tables()
    head, taken = rank
    rows = torch.tensor([1, 0, 1], dtype=torch.int32)
    own = WIDE[:, 4 * head : 4 * head + 4]
    value, addend = (own - 2, torch.full((3, 4), 2.0)) if has_addend else (own, None)

    delta = program_deltas(value, addend, ACROSS, rows, rows, codes, params, None)

    whole = program_deltas(WIDE, None, ACROSS, rows, rows, codes, params, None)
    assert whole[0].tolist() == (2 * (WIDE[0] @ ACROSS[1]) * ACROSS[1]).tolist()
    assert torch.equal(delta, whole[:, 4 * head : 4 * head + 4])
    assert delta.is_contiguous()
    assert len(taken) == 1
    assert torch.equal(taken[0], own)


def test_rows_are_gathered_where_a_program_is_active_alone(rank):
    codes, params, _ = tables()
    head, taken = rank
    own, slots = WIDE[:, 4 * head : 4 * head + 4], torch.tensor([0, 1, 0], dtype=torch.int32)
    groups = torch.zeros(3, dtype=torch.int64)

    def run(rows):
        return steered_rows(own, None, ACROSS, slots, rows, rows, codes, params, groups)

    vectors = run(torch.zeros(3, dtype=torch.int32))
    assert taken == []
    both = run(torch.tensor([1, 0, 0], dtype=torch.int32))

    assert len(taken) == 1
    added = ACROSS[1, 4 * head : 4 * head + 4]
    assert vectors.tolist() == [[0] * 4, added.tolist(), [0] * 4]
    assert both.tolist() == [(2 * (WIDE[0] @ ACROSS[1]) * added).tolist(), added.tolist(), [0] * 4]


@pytest.mark.parametrize("acts", [False, True])
@pytest.mark.parametrize("runs_requests", [False, True], ids=["dummy", "requests"])
@pytest.mark.parametrize("rank", [1], indirect=True)
def test_where_no_program_acts_in_a_step_of_requests_nothing_is_gathered_or_run(rank, monkeypatch, runs_requests, acts):
    codes, params, _ = tables()
    head, taken = rank
    own, rows = WIDE[:, 4 * head : 4 * head + 4], torch.tensor([1, 0, 1], dtype=torch.int32)
    asked = []
    known = replace(program_action._worker, runs_requests=lambda: runs_requests)
    step = SimpleNamespace(acts=lambda active: asked.append(active) or acts, scans=lambda: True)
    monkeypatch.setattr(program_action, "_worker", known)
    monkeypatch.setattr(program_action, "_step", step)

    delta = program_deltas(own, None, ACROSS, rows, rows, codes, params, None)

    is_run = acts or not runs_requests
    assert bool(delta.any()) == is_run
    assert (len(taken), len(asked)) == (is_run, runs_requests)
    assert (delta.shape, delta.dtype) == ((3, 4), torch.float32)


@pytest.mark.parametrize("rank", [0], indirect=True)
def test_the_compiler_is_told_the_shape_of_a_ranks_own_columns(rank):
    codes, params, _ = tables()
    rows, groups = torch.tensor([1, 0, 1], dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    own = WIDE[None, :, :4].contiguous()

    torch.library.opcheck(program_deltas, (own, None, ACROSS, rows, rows, codes, params, groups))
    torch.library.opcheck(steered_rows, (own, None, ACROSS, 0 * rows, rows, rows, codes, params, groups))


def halves():
    """Codes and params of a feature that is read, and of its being written: row 1 of each table, and the pool."""
    codes, params, pool = tables()
    reads, writes = codes.clone(), codes.clone()
    reads[1, 0] = torch.tensor([with_change(Code.READ_FEATURE | Edit.SET, 2), 1, 0, 0])
    writes[1, 0] = torch.tensor([with_change(Code.WRITE_FEATURE, 2), 0, 1, 0])
    numbers = params.clone()
    params[1, 0] = torch.tensor([1.0, 1.0, 0.0, 0.0, 10.0, 1.0, 0.0, 0.0])
    numbers[1, 0, :2] = torch.tensor([0.0, 0.5])
    return (reads, params), (writes, numbers), pool


@pytest.mark.parametrize("shape", [(3, 2), (1, 3, 2)], ids=["rows", "with-a-leading-axis"])
def test_what_a_feature_changes_is_added_at_a_later_site(shape):
    reads, writes, pool = halves()
    rows, groups = torch.tensor([1, 0, 1, 1], dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    changes = torch.full((4, 3), torch.nan)
    value = torch.arange(6.0).reshape(shape)

    none = program_deltas_and_state(value, None, pool, rows, rows, *reads, groups, changes, *NO_GATES, *NO_SAE)
    delta = program_deltas_and_state(-value, None, pool, rows, rows, *writes, groups, changes, *NO_GATES, *NO_SAE)

    assert not none.any()
    assert delta.tolist() == [[0, 0.5 * (10 - 1)], [0, 0], [0, 0.5 * (10 - 5)]]
    assert changes[:, 2].isnan().tolist() == [False, True, False, True]
    assert changes[:, :2].isnan().all()


def test_the_compiler_is_told_that_changes_are_written():
    reads, _, pool = halves()
    rows, groups = torch.tensor([1, 0, 1, 1], dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    value, changes = torch.ones(1, 3, 2), torch.zeros(4, 3)

    torch.library.opcheck(
        program_deltas_and_state,
        (value, None, pool, rows, rows, *reads, groups, changes, *NO_GATES, *NO_SAE),
        rtol=0,
        atol=0,
    )
    torch.library.opcheck(
        steered_rows_and_state,
        (value, None, pool, 0 * rows, rows, rows, *reads, groups, changes, *NO_GATES, *NO_SAE),
        rtol=0,
        atol=0,
    )


def test_no_operation_that_changes_arguments_has_a_default():
    """torch strips arguments that equal their defaults; releases up to 2.11 then fail to find those that change."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("headgate::")]
    schemas = [torch._C._get_schema(*(name.split(".") if "." in name else (name, ""))) for name in names]
    changing = [schema for schema in schemas if schema.is_mutable]

    assert {schema.name for schema in changing} >= {
        "headgate::program_deltas_and_state",
        "headgate::steered_rows_and_state",
    }
    for schema in changing:
        assert not [argument.name for argument in schema.arguments if argument.has_default_value()], schema
