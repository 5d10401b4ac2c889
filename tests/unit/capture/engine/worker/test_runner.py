"""What the hooks are told of a model runner, from batches laid out as vLLM's two generations lay them out."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from headgate.capture.engine.contracts.worker_hooks import WorkerHooks, in_turn, overrides
from headgate.capture.engine.worker.runner import LaunchedStep, RunnerAdapter, batch_reader_of, dummy_rows_routed
from headgate.capture.schema.errors import UnsupportedError


class Recorder(WorkerHooks):
    """Writes down every hook call."""

    def __init__(self):
        self.calls = []
        self.views = []

    def headgate_request_added(self, new):
        self.calls.append(("added", new.req_id, new.num_prompt_tokens))

    def headgate_request_finished(self, req_id, final):
        self.calls.append(("finished", req_id, None if final is None else (final.num_rows, final.status)))

    def headgate_step_begins(self, view, token_ids):
        self.token_ids = token_ids
        self.views.append(view)
        if view is None:
            self.calls.append(("begins", None))
        else:
            columns = (view.starts, view.num_scheduled, view.num_computed)
            self.calls.append(("begins", view.req_ids, *(column.tolist() for column in columns)))

    def headgate_step_ends(self):
        self.calls.append(("ends",))


class V1Runner:
    """The V1 runner as the adapter sees it: a persistent batch that `_prepare_inputs` has filled."""

    tokens = "tokens on the device"

    def execute_model(self, scheduler_output, intermediate_tensors=None):
        if scheduler_output.total_num_scheduled_tokens:
            self._prepare_inputs(scheduler_output, np.array(scheduler_output.counts, dtype=np.int32))

    def _prepare_inputs(self, scheduler_output, num_scheduled_tokens):
        self.input_ids = SimpleNamespace(gpu=self.tokens)
        starts = np.concatenate([[0], np.cumsum(num_scheduled_tokens)])
        self.query_start_loc = SimpleNamespace(np=np.pad(starts, (0, 5), constant_values=starts[-1]))
        self.input_batch = SimpleNamespace(
            req_ids=scheduler_output.order,
            num_reqs=len(scheduler_output.order),
            num_computed_tokens_cpu=np.array([*scheduler_output.computed, 99, 99], dtype=np.int32),
            vocab_size=100,
        )
        self.num_computed_tokens = torch.tensor([*getattr(scheduler_output, "exact", ()), 99], dtype=torch.int32)
        self.sampled = getattr(scheduler_output, "sampled", None)
        return "logits_indices", None

    def sample_tokens(self, grammar_output):
        if self.sampled is not None:
            drafted, tokens = self.sampled
            self._sample("logits", SimpleNamespace(num_draft_tokens=drafted) if any(drafted) else None, tokens)

    def _sample(self, logits, spec_decode_metadata, tokens):
        return SimpleNamespace(sampled_token_ids=torch.tensor(tokens, dtype=torch.int32))

    def _dummy_run(self, num_tokens):
        return num_tokens


class V2Runner:
    """The V2 runner as the adapter sees it: `prepare_inputs` returns a batch; dummy runs go through execute_model."""

    tokens = "tokens on the device"

    def execute_model(self, scheduler_output, intermediate_tensors=None, dummy_run=False):
        if not dummy_run and scheduler_output.total_num_scheduled_tokens:
            self.prepare_inputs(scheduler_output, "batch_desc")

    def prepare_inputs(self, scheduler_output, batch_desc):
        counts = np.array(scheduler_output.counts, dtype=np.int32)
        starts = np.cumsum(counts) - counts
        exact = getattr(scheduler_output, "exact", scheduler_output.computed)
        self.sampled = getattr(scheduler_output, "sampled", None)
        spread = [first + row for first, count in zip(exact, counts, strict=True) for row in range(count)]
        return SimpleNamespace(
            positions=torch.tensor([*spread, 0, 0]),
            query_start_loc=torch.tensor([*starts, counts.sum()], dtype=torch.int32),
            req_ids=scheduler_output.order,
            num_reqs=len(counts),
            input_ids=self.tokens,
            num_scheduled_tokens=counts,
            query_start_loc_np=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            num_computed_tokens_np=np.array(scheduler_output.computed, dtype=np.int32),
        )

    def sample_tokens(self, grammar_output):
        if self.sampled is not None:
            drafted, tokens = self.sampled
            self.sample("hidden states", "batch", [1 + each for each in drafted], tokens)

    def sample(self, hidden_states, input_batch, num_logits, tokens):
        num_sampled = (torch.tensor(tokens) >= 0).sum(dim=1)
        return "output", num_sampled, torch.tensor(num_logits) - num_sampled

    def _dummy_run(self, num_tokens):
        self.execute_model(step(), dummy_run=True)


V2Runner.__module__ = "vllm.v1.worker.gpu.model_runner"


def request(req_id, num_prompt, wire="asks"):
    params = SimpleNamespace(extra_args={"headgate": {"capture": wire}} if wire else {})
    return SimpleNamespace(req_id=req_id, prompt_token_ids=list(range(num_prompt)), sampling_params=params)


def step(order=(), counts=(), computed=(), new=(), finished=(), finals=None):
    made = SimpleNamespace(
        order=list(order),
        counts=list(counts),
        computed=list(computed),
        total_num_scheduled_tokens=sum(counts),
        scheduled_new_reqs=list(new),
        finished_req_ids=set(finished),
    )
    if finals is not None:
        made.headgate_final = finals
    return made


def run(runner, output):
    """A step as an engine runs it."""
    runner.execute_model(output)
    runner.sample_tokens(None)


@pytest.fixture(params=[V1Runner, V2Runner], ids=["v1", "v2"])
def runner(request):
    return request.param()


@pytest.fixture
def recorder(runner):
    recorder = Recorder()
    runner.adapter = RunnerAdapter(runner, {"recorder": recorder})
    return recorder


def test_the_view_is_the_batch_as_the_runner_laid_it_out(runner, recorder):
    run(runner, step(["b", "a"], [1, 5], [7, 0], new=[request("a", 5), request("b", 3)]))

    assert recorder.calls == [
        ("added", "a", 5),
        ("added", "b", 3),
        ("begins", ("b", "a"), [0, 1], [1, 5], [7, 0]),
        ("ends",),
    ]
    assert recorder.token_ids == "tokens on the device"


class Lines(list):
    """Takes the lines of a step log."""

    def write(self, step):
        self.append(step)


class Describing(WorkerHooks):
    """A part that says what it does in a step."""

    def headgate_describe_step(self, view):
        return {"mine": len(view.req_ids)}


def test_a_logged_step_has_its_requests_and_what_parts_do_with_them(runner):
    log = Lines()
    recorder = Recorder()
    runner.tokens = np.array([41, 50, 51, 51, 51, 9, 0, 0])
    RunnerAdapter(runner, {"recorder": recorder, "mine": Describing()}, step_log=log)

    run(runner, step(["b", "a"], [1, 5], [7, 0], new=[request("a", 5), request("b", 3)]))
    runner._dummy_run(8)

    assert log == [
        {
            "requests": [
                {"id": "b", "rows": "0", "positions": "7", "tokens": "41"},
                {"id": "a", "rows": "1:6", "positions": "0:5", "tokens": "50:52,51*2,9"},
            ],
            "mine": 2,
        }
    ]


def test_views_of_steps_with_the_same_requests_share_what_is_alike(runner, recorder):
    new = [request("a", 5), request("b", 3)]
    run(runner, step(["b", "a"], [3, 5], [0, 0], new=new))
    for computed in ([3, 5], [4, 6]):
        run(runner, step(["b", "a"], [1, 1], computed))
    run(runner, step(["a", "b"], [1, 1], [7, 5]))
    first, second, third, fourth = recorder.views

    assert second.req_ids is third.req_ids
    assert second.starts is third.starts
    assert second.num_scheduled is third.num_scheduled
    assert [view.num_computed.tolist() for view in (first, second, third, fourth)] == [[0, 0], [3, 5], [4, 6], [7, 5]]
    assert first.starts.tolist() == [0, 3]
    assert fourth.req_ids == ("a", "b")


def test_a_step_is_followed_up_behind_its_sampling(runner, recorder):
    runner.execute_model(step(["a"], [4], [0], new=[request("a", 4)]))
    assert [call[0] for call in recorder.calls] == ["added", "begins"]

    runner.sample_tokens(None)
    assert [call[0] for call in recorder.calls] == ["added", "begins", "ends"]


def test_a_step_that_is_never_sampled_is_followed_up_before_the_next(runner, recorder):
    runner.execute_model(step(["a"], [4], [0], new=[request("a", 4)]))
    run(runner, step(["a"], [1], [4], new=[request("b", 4)]))

    assert [call[0] for call in recorder.calls] == ["added", "begins", "ends", "added", "begins", "ends"]


def test_the_runner_keeps_nothing_of_what_a_request_brought(runner, recorder):
    new = request("a", 5)
    theirs = new.sampling_params

    for _ in range(2):  # the second time as the V2 runner sees it after a preemption
        new.sampling_params = theirs
        run(runner, step(["a"], [5], [0], new=[new]))

        assert new.sampling_params.extra_args == {"headgate": {"v": 1}}
    assert theirs.extra_args == {"headgate": {"capture": "asks"}}
    assert [call[0] for call in recorder.calls].count("added") == 1


class OnAStage(Recorder):
    """A part that sends what it is told to."""

    sent = None

    def headgate_from_last_stage(self, sent):
        self.calls.append(("from", sent))

    def headgate_to_next_stage(self):
        self.calls.append(("to",))
        return self.sent


def on_a_stage(runner, *, is_last_stage):
    """A runner that sends one object in every step, as replayed graphs do; its part; and that object."""
    part, output, original = OnAStage(), SimpleNamespace(tensors={"hidden_states": "rows"}), runner.execute_model

    def execute_model(scheduler_output, intermediate_tensors=None):
        original(scheduler_output, intermediate_tensors)
        return None if is_last_stage else output

    runner.execute_model = execute_model
    RunnerAdapter(runner, {"part": part}, is_last_stage=is_last_stage)
    return part, output


def test_what_a_part_sends_goes_with_the_hidden_states_of_its_step_alone(runner):
    part, output = on_a_stage(runner, is_last_stage=False)
    part.sent = "signals"

    first = runner.execute_model(step(["a"], [4], [0], new=[request("a", 4)]))
    part.sent = None
    second = runner.execute_model(step(["a"], [1], [4]))
    third = runner.execute_model(step())

    assert first.tensors == {"hidden_states": "rows", "headgate_part": "signals"}
    assert second is third is output
    assert output.tensors == {"hidden_states": "rows"}
    assert [call[0] for call in part.calls] == ["added", "begins", "ends", "to", "begins", "ends", "to"]


def test_a_part_takes_what_was_sent_before_its_step_begins_and_the_runner_never_sees_it(runner):
    part, _ = on_a_stage(runner, is_last_stage=True)
    incoming = SimpleNamespace(tensors={"hidden_states": "rows", "headgate_part": "signals"})

    runner.execute_model(step(["a"], [4], [0], new=[request("a", 4)]), incoming)
    runner.execute_model(step(["a"], [1], [4]), SimpleNamespace(tensors={"hidden_states": "rows"}))

    assert incoming.tensors == {"hidden_states": "rows"}
    assert [call[0] for call in part.calls] == ["added", "from", "begins", "ends", "begins"]


class Received(SimpleNamespace):
    """Tensors of the stage before, to which there can be weak references."""


@pytest.mark.parametrize("is_ours", [True, False])
def test_nothing_holds_what_was_sent_once_the_forward_was_launched(runner, is_ours):
    """Hidden states are large: those of a step of plain requests are let go, too."""
    part, _ = on_a_stage(runner, is_last_stage=True)
    incoming = Received(tensors={"hidden_states": "rows"})
    lives = weakref.ref(incoming)
    new = [request("a", 4)] if is_ours else [request("a", 4, wire=None)]

    runner.execute_model(step(["a"], [4], [0], new=new), incoming)
    del incoming

    assert lives() is None
    assert ("begins" in [call[0] for call in part.calls]) == is_ours


def test_steps_without_our_requests_are_not_told(runner, recorder):
    run(runner, step(["a"], [4], [0], new=[request("a", 4, wire=None)]))
    run(runner, step(["a"], [1], [4], finished=["unknown"]))

    assert recorder.calls == []


def test_after_the_last_of_our_requests_one_empty_step_is_told(runner, recorder):
    run(runner, step(["a", "x"], [4, 2], [0, 0], new=[request("a", 4), request("x", 2, wire=None)]))
    recorder.calls.clear()

    run(runner, step(["x"], [1], [2], finished=["a"], finals={"a": (4, [1, 2, 3, 4, 5], "length", {}, 0)}))
    run(runner, step(["x"], [1], [3]))

    assert recorder.calls == [("finished", "a", (4, "length")), ("begins", None)]


def test_a_request_whose_end_only_the_front_end_knows_is_finished_when_it_has_said_so(runner, recorder):
    run(runner, step(["a"], [4], [0], new=[request("a", 4)]))
    recorder.calls.clear()

    run(runner, step(finished=["a"], finals={"a": None}))
    assert recorder.calls == []

    run(runner, step(finals={"a": (4, [1, 2, 3, 4, 5, 6], "stop", {}, 0)}))
    assert recorder.calls == [("finished", "a", (5, "stop"))]


def test_a_request_that_begins_again_before_its_end_is_known_has_no_known_end(runner, recorder):
    run(runner, step(["a"], [4], [0], new=[request("a", 4)]))
    run(runner, step(finished=["a"], finals={"a": None}))
    recorder.calls.clear()

    run(runner, step(["a"], [2], [0], new=[request("a", 2)]))

    assert recorder.calls[:2] == [("finished", "a", None), ("added", "a", 2)]


def test_an_id_that_ends_and_begins_again_in_one_step_ends_first(runner, recorder):
    run(runner, step(["a"], [4], [0], new=[request("a", 4)]))
    recorder.calls.clear()

    run(runner, step(["a"], [2], [0], new=[request("a", 2)], finished=["a"]))

    assert [call[0] for call in recorder.calls] == ["finished", "added", "begins", "ends"]


def test_a_preempted_request_that_comes_back_as_new_keeps_its_state(runner, recorder):
    run(runner, step(["a"], [4], [0], new=[request("a", 4)]))
    recorder.calls.clear()

    run(runner, step(["a"], [3], [0], new=[request("a", 4)]))

    assert recorder.calls == [("begins", ("a",), [0], [3], [0]), ("ends",)]


def test_a_step_without_tokens_ends_nothing_twice(runner, recorder):
    run(runner, step(["a"], [4], [0], new=[request("a", 4)]))
    recorder.calls.clear()

    run(runner, step())

    assert recorder.calls == []


def test_dummy_runs_see_no_request(runner, recorder):
    run(runner, step(["a"], [4], [0], new=[request("a", 4)]))
    recorder.calls.clear()

    runner._dummy_run(8)

    assert recorder.calls == [("begins", None)]


def test_operations_know_forwards_of_requests_from_dummy_ones(runner):
    class Asking(WorkerHooks):
        def headgate_step_begins(self, view, token_ids):
            seen.append((view is None, running()))
            if token_ids == "broken":
                raise ValueError("broken")

    seen = []
    running = LaunchedStep(torch.device("cpu"))
    adapter = RunnerAdapter(runner, {"asking": Asking()}, running=running)
    run(runner, step(["a"], [4], [0], new=[request("a", 4)]))
    runner._dummy_run(8)
    adapter.run_dummy(8)
    run(runner, step(["a"], [1], [4]))
    assert not running()
    runner.tokens = "broken"
    with pytest.raises(ValueError, match="broken"):
        run(runner, step(["a"], [1], [5]))

    assert seen == [(False, True), (True, False), (False, True), (False, True)]
    assert not running()


def test_the_self_test_may_prepare_its_own_step(runner, recorder):
    run(runner, step(["a"], [4], [0], new=[request("a", 4)]))
    recorder.calls.clear()

    runner.adapter.run_dummy(8)

    assert recorder.calls == []


@pytest.mark.parametrize(("holder", "method"), [("drafter", "dummy_run"), ("speculator", "propose")])
def test_the_self_test_reads_what_the_model_returned_and_no_draft_model_overwrote(runner, holder, method):
    returned = torch.zeros(8)

    class Drafter:
        def overwrite(self, *_args, **_kwargs):
            returned.fill_(2)

    setattr(Drafter, method, Drafter.overwrite)
    setattr(runner, holder, Drafter())

    def _dummy_run(num_tokens):
        returned.fill_(1)
        getattr(getattr(runner, holder), method)(num_tokens)
        return returned, returned

    runner._dummy_run = _dummy_run

    (output,) = RunnerAdapter(runner, {}).run_dummy(8)

    assert output.tolist() == [1] * 8
    assert runner._dummy_run(8)[0].tolist() == [2] * 8


def test_rows_of_the_self_test_go_to_experts_in_both_generations_of_vllm(monkeypatch):
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu import input_batch

    buffers = input_batch.InputBuffers(max_num_reqs=4, max_num_tokens=8, device=torch.device("cpu"))
    first = V1Runner()
    first.is_padding = torch.zeros(8, dtype=torch.bool)
    monkeypatch.setattr(
        V1Runner, "_prepare_padding_mask", gpu_model_runner.GPUModelRunner._prepare_padding_mask, raising=False
    )

    def _dummy_run(self):
        """A method of vLLM's runner, which a runner for CPUs inherits."""

    _dummy_run.__module__ = input_batch.__name__
    second = type("CPURunner", (type("Runner", (), {"_dummy_run": _dummy_run}),), {})()

    def padding():
        return [
            first._prepare_padding_mask(0, 4).tolist(),
            input_batch.InputBatch.make_dummy(2, 4, buffers, is_padding=True).is_padding.tolist(),
        ]

    with dummy_rows_routed(first), dummy_rows_routed(second):
        inside = padding()

    assert inside == [[False] * 4] * 2
    assert padding() == [[True] * 4] * 2


def test_a_runner_without_the_expected_method_is_refused():
    class Other:
        def execute_model(self):
            """Not a runner that we know."""

    with pytest.raises(UnsupportedError, match=r"_dummy_run.*worker\.runner.*V1Layout.*works with vLLM"):
        RunnerAdapter(Other(), {})


def test_the_generation_is_told_by_the_module():
    assert batch_reader_of(V1Runner()).method == "_prepare_inputs"
    assert batch_reader_of(V2Runner()).method == "prepare_inputs"


class Follower(Recorder):
    """A part that also follows requests that ask for nothing, and may be concerned by them."""

    is_concerned = False

    def headgate_plain_request_added(self, req_id, num_prompt_tokens):
        self.calls.append(("plain", req_id, num_prompt_tokens))

    def headgate_request_stopped(self, req_id):
        self.calls.append(("stopped", req_id))

    def headgate_needs_plain_steps(self):
        return self.is_concerned


@pytest.fixture
def follower(runner):
    follower = Follower()
    runner.adapter = RunnerAdapter(runner, {"follower": follower})
    return follower


def test_plain_requests_are_told_to_who_follows_them_and_their_steps_when_they_concern_it(runner, follower):
    run(runner, step(["x"], [4], [0], new=[request("x", 4, wire=None)]))
    assert follower.calls == [("plain", "x", 4)]

    follower.is_concerned = True
    run(runner, step(["x"], [1], [4]))
    follower.is_concerned = False
    run(runner, step(["x"], [1], [5]))
    run(runner, step(finished=["x"]))

    assert follower.calls[1:] == [
        ("begins", ("x",), [0], [1], [4]),
        ("ends",),
        ("begins", None),
        ("stopped", "x"),
    ]


def test_a_preempted_plain_request_is_added_once(runner, follower):
    for _ in range(2):
        run(runner, step(["x"], [4], [0], new=[request("x", 4, wire=None)]))

    assert follower.calls == [("plain", "x", 4)]


def test_a_request_stops_at_once_also_where_its_end_is_not_known_yet(runner, follower):
    run(runner, step(["a"], [4], [0], new=[request("a", 4)]))
    follower.calls.clear()

    run(runner, step(finished=["a"], finals={"a": None}))
    assert follower.calls == [("stopped", "a")]

    run(runner, step(finals={"a": (4, [1, 2, 3, 4, 5, 6], "stop", {}, 0)}))
    assert follower.calls == [("stopped", "a"), ("finished", "a", (5, "stop"))]


def test_a_plain_request_may_come_as_embeddings(runner, follower):
    new = request("x", 0, wire=None)
    new.prompt_token_ids, new.prompt_embeds = None, np.zeros((7, 2))

    run(runner, step(["x"], [7], [0], new=[new]))

    assert follower.calls == [("plain", "x", 7)]


def test_hooks_are_called_in_turn_where_a_part_has_them():
    calls = []

    class Both(WorkerHooks):
        def headgate_step_begins(self, view, token_ids):
            calls.append(("both", view, token_ids))

    class Late(WorkerHooks):
        def headgate_step_begins(self, view, token_ids):
            calls.append(("late", view, token_ids))

    parts = {"both": Both(), "none": WorkerHooks(), "late": Late()}
    found = overrides(parts, "headgate_step_begins")
    in_turn(found.values())("view", "ids")

    assert list(found) == ["both", "late"]
    assert calls == [("both", "view", "ids"), ("late", "view", "ids")]
    assert overrides(parts, "headgate_step_ends") == {}


def test_a_hook_of_one_part_is_called_itself():
    part = Recorder()

    assert in_turn(overrides({"part": part}, "headgate_step_ends").values()) == part.headgate_step_ends


@pytest.fixture
def drafting(runner):
    recorder = Recorder()
    runner.adapter = RunnerAdapter(runner, {"recorder": recorder}, verifies_drafts=True)
    return recorder


def with_drafts(output, exact, drafted, tokens):
    """A step of which the device knows that so many tokens were computed, and which samples these."""
    output.exact, output.sampled = exact, (drafted, tokens)
    return output


def rows_of(view):
    return view.req_ids, view.starts.tolist(), view.num_scheduled.tolist(), view.num_computed.tolist()


def test_the_outcome_of_a_step_has_exact_positions_and_no_rows_of_rejected_drafts(runner, drafting):
    tokens = [[5, 6, 7, 8], [5, -1, -1, -1], [5, 6, -1, -1], [5, -1, -1, -1]]
    new = [request(req_id, 3) for req_id in "abcd"]
    output = step("abcd", [4, 4, 4, 2], [9, 12, 30, 0], new=new)

    run(runner, with_drafts(output, [7, 12, 25, 0], [3, 3, 3, 0], tokens))

    (view,) = drafting.views
    assert rows_of(view) == (tuple("abcd"), [0, 4, 8, 12], [4, 4, 4, 2], [9, 12, 30, 0])
    assert view.outcome.is_known()
    counted = view.outcome.view()
    assert rows_of(counted) == (tuple("abcd"), [0, 4, 8, 12], [4, 1, 2, 2], [7, 12, 25, 0])
    assert counted.outcome is None


def test_all_rows_of_a_step_without_drafts_count(runner, drafting):
    run(runner, with_drafts(step(["a"], [5], [0], new=[request("a", 9)]), [0], [0], [[5]]))

    assert rows_of(drafting.views[0].outcome.view()) == (("a",), [0], [5], [0])


def test_a_step_that_was_never_sampled_has_no_rows(runner, drafting):
    runner.execute_model(with_drafts(step(["a"], [4], [9], new=[request("a", 3)]), [9], [3], [[5, 6, 7, 8]]))

    assert drafting.views[0].outcome.view().num_scheduled.tolist() == [0]


def test_without_drafts_views_have_no_outcome(runner, recorder):
    run(runner, step(["a"], [1], [3], new=[request("a", 3)]))

    assert recorder.views[0].outcome is None
