"""Steering in a worker: what the forward would add to each batch row, against the vectors that were asked for."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from headgate.capture.engine.contracts.worker_hooks import WorkerFacts
from headgate.capture.engine.model import forward_wrappers
from headgate.capture.engine.site_action import SiteValue
from headgate.capture.monitoring.step_log import compact
from headgate.capture.schema.batch import BatchView, NewRequest
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.errors import ConfigError, SelfTestError
from headgate.capture.schema.sites import HookPoint, Site, SiteShape
from headgate.steering.config import parse_config
from headgate.steering.spec import SteeringSpec, to_wire
from headgate.steering.vectors.phase_vectors import PhaseVectors, weighted_sum
from headgate.steering.worker import site_action
from headgate.steering.worker.device_tables import DeviceTables
from headgate.steering.worker.program_action import WHOLE_POOL
from headgate.steering.worker.steering_part import SteeringPart, check_steering
from tests.fakes.transcoders import TinyTranscoder

HIDDEN = 16
SITES = (Site(0, HookPoint.POST_MLP), Site(1, HookPoint.POST_MLP))


def make_facts(**changes) -> WorkerFacts:
    info = ModelInfo(name="m", num_layers=2, hidden_size=HIDDEN, dtype="float32", sites=())
    known = {
        "model": info,
        "owned_layers": (0, 1),
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "max_tokens": 32,
        "max_num_seqs": 4,
        "is_compiled": False,
    }
    return WorkerFacts(**{**known, **changes})


class Worker:
    """The part behind its hooks, and one module that steers at each site."""

    def __init__(self, facts: WorkerFacts | None = None, **config) -> None:
        config = {"max_steering_slots": 9, "sites": {"post_mlp": "all"}, **config}
        self.part = SteeringPart(parse_config(config))
        self.hook = self.part
        facts = facts or make_facts()
        self.hook.headgate_allocate(facts=facts)
        self.actions = self.hook.headgate_actions(facts=facts)
        self.modules = {}
        for site, action in self.actions.items():
            module = nn.Identity()
            self.modules[site] = module, forward_wrappers.attach(module, site.hook, [action])

    def call(self, method: str, **args) -> object:
        return self.hook.headgate_call(part="steering", method=method, args=args)

    def add(self, req_id: str, num_prompt: int, spec: SteeringSpec | None = None, **resolved) -> None:
        wire = None if spec is None else {"v": 1, "parts": {"steering": {**to_wire(spec), **resolved}}}
        if wire is None:
            self.hook.headgate_plain_request_added(req_id=req_id, num_prompt_tokens=num_prompt)
        else:
            self.hook.headgate_request_added(
                new=NewRequest(req_id=req_id, prompt_token_ids=np.zeros(num_prompt, np.int64), wire=wire)
            )

    def stop(self, req_id: str) -> None:
        self.hook.headgate_request_stopped(req_id=req_id)

    def step(self, *requests: tuple[str, int, int]) -> BatchView:
        """A step of ``(request, computed, scheduled)``."""
        num = np.array([count for *_, count in requests], dtype=np.int64)
        view = BatchView(
            req_ids=tuple(req_id for req_id, *_ in requests),
            starts=np.cumsum(num) - num,
            num_scheduled=num,
            num_computed=np.array([computed for _, computed, _ in requests], dtype=np.int64),
        )
        self.hook.headgate_step_begins(view=view, token_ids=None)
        return view

    def added(self, site: Site, num_tokens: int) -> torch.Tensor:
        """Return the vectors that the forward adds to a stream of zeros at `site`."""
        module, runs = self.modules[site]
        carry = torch.zeros(num_tokens, HIDDEN)
        return forward_wrappers.chained(runs)(module, site.hook.value, SiteValue(carry, None, carry))


def vectors(seed: int, *sites: Site) -> PhaseVectors:
    rng = np.random.default_rng(seed)
    made = PhaseVectors.from_rows({site: rng.normal(size=HIDDEN).astype(np.float32) for site in sites or SITES})
    assert made is not None
    return made


def row(found: PhaseVectors | None, site: Site) -> torch.Tensor:
    if found is None or site not in found.sites:
        return torch.zeros(HIDDEN)
    return torch.from_numpy(found.float32()[found.sites.index(site)].copy())


@pytest.mark.parametrize("site", SITES, ids=str)
def test_each_token_gets_the_vector_of_its_request_and_phase(site):
    worker, prefill, decode = Worker(), vectors(1), vectors(2, SITES[1])
    worker.add("a", 3, SteeringSpec(prefill=prefill, decode=decode))
    worker.add("b", 2)

    worker.step(("a", 1, 4), ("b", 0, 2))

    expected = [row(prefill, site)] * 2 + [row(decode, site)] * 2 + [torch.zeros(HIDDEN)] * 26
    assert torch.equal(worker.added(site, 30), torch.stack(expected))


def test_a_described_step_has_the_slots_of_its_rows_as_the_device_has_them():
    worker, prefill, decode = Worker(), vectors(1), vectors(2, SITES[1])
    worker.add("a", 3, SteeringSpec(prefill=prefill, decode=decode))
    worker.add("b", 2)

    view = worker.step(("a", 1, 4), ("b", 0, 2))
    found = worker.hook.headgate_describe_step(view=view)

    tables = worker.part._allocated().tables
    slots = {site.name: tables.slots[index, :6].tolist() for index, site in enumerate(SITES)}
    assert found["steering"]["table_rows"] == compact(tables.rows[:6].tolist())
    assert found["steering"]["slots"] == {name: compact(values) for name, values in slots.items()}
    assert [bool(slot) for slot in slots[SITES[0].name]] == [True, True, False, False, False, False]
    assert [bool(slot) for slot in slots[SITES[1].name]] == [True, True, True, True, False, False]
    assert found["steering"]["entries"] == {}


def test_a_row_that_means_other_vectors_now_is_resolved_anew():
    """The rows of both steps are the same numbers, and what they stand for is not."""
    worker, own, shared = Worker(), vectors(1, SITES[0]), vectors(2, SITES[1])
    worker.add("a", 1, SteeringSpec(prefill=own, decode=own))
    worker.step(("a", 1, 1))
    rows = worker.part._allocated().tables.rows.clone()
    worker.call("set_global", spec=to_wire(SteeringSpec(prefill=shared, decode=shared)))

    worker.step(("a", 2, 1))

    assert torch.equal(worker.part._allocated().tables.rows, rows)
    for site, expected in zip(SITES, (own, shared), strict=True):
        assert torch.equal(worker.added(site, 1)[0], row(expected, site))


def test_global_vectors_act_on_bystanders_and_add_up_with_requests():
    worker, shared, own = Worker(), vectors(1), vectors(2)
    worker.add("a", 2, SteeringSpec(prefill=own))
    worker.add("b", 1)
    assert worker.hook.headgate_needs_plain_steps() is True
    worker.call("set_global", spec=to_wire(SteeringSpec(prefill=shared, decode=shared)))

    worker.step(("a", 0, 2), ("b", 1, 1))
    total = weighted_sum([(shared, 1), (own, 1)])
    expected = torch.stack([row(total, SITES[0])] * 2 + [row(shared, SITES[0])])
    torch.testing.assert_close(worker.added(SITES[0], 3), expected, rtol=0, atol=1e-6)

    worker.stop("a")
    worker.call("set_global", spec={})
    worker.step(("b", 2, 1))
    assert not worker.added(SITES[0], 3).any()
    assert worker.hook.headgate_needs_plain_steps() is False


def test_modules_are_added_by_content_and_outlive_their_name_while_a_request_uses_them():
    worker, module, own = Worker(), vectors(1), vectors(2)
    worker.call("keep_module", name="calm", spec=to_wire(SteeringSpec(prefill=module, decode=module)))
    named = {"prefill_parts": [[module.key, 2.0]], "decode_parts": [[module.key, 2.0]]}
    worker.add("a", 1, SteeringSpec(prefill=own), **named)
    worker.call("release_module", name="calm")

    worker.step(("a", 0, 3))

    both = weighted_sum([(module, 2.0), (own, 1.0)])
    expected = torch.stack([row(both, SITES[0])] + [row(module.scaled(2.0), SITES[0])] * 2)
    torch.testing.assert_close(worker.added(SITES[0], 3), expected, rtol=0, atol=1e-6)

    worker.stop("a")
    worker.call("forget", keys=[module.key])
    with pytest.raises(AssertionError, match="no module has the content"):
        worker.add("b", 1, SteeringSpec(), **named)


def test_registering_a_name_again_takes_the_place_of_what_it_was():
    worker = Worker()
    for seed in (1, 2, 3):
        spec = SteeringSpec(prefill=vectors(seed), decode=vectors(seed))
        worker.call("keep_module", name="calm", spec=to_wire(spec))
        worker.add("a", 1)
        worker.step(("a", 0, 1))
        worker.stop("a")

    stats = worker.hook.headgate_stats()
    assert stats["steering"]["slots_live"] == 2
    assert stats["steering"]["modules"] == 1


def test_a_dummy_step_steers_nothing():
    worker = Worker()
    worker.add("a", 1, SteeringSpec(prefill=vectors(1)))
    worker.step(("a", 0, 1))

    worker.hook.headgate_step_begins(view=None, token_ids=None)

    assert not worker.added(SITES[0], 32).any()


def test_a_pipeline_stage_takes_its_own_sites_only():
    worker = Worker(make_facts(owned_layers=(1,), pp_rank=0, pp_size=2))
    worker.add("a", 1, SteeringSpec(prefill=vectors(1)))

    worker.step(("a", 0, 1))

    assert list(worker.actions) == [SITES[1]]
    assert torch.equal(worker.added(SITES[1], 1)[0], row(vectors(1), SITES[1]))


def test_a_transcoder_across_pipeline_stages_is_refused(tmp_path):
    across = TinyTranscoder(layer=0, num_layers=2, width=HIDDEN).save(tmp_path / "across")
    within = TinyTranscoder(layer=1, width=HIDDEN).save(tmp_path / "within")

    for layers, rank in ((0,), 0), ((1,), 1):
        facts = make_facts(owned_layers=layers, pp_rank=rank, pp_size=2)
        with pytest.raises(
            ConfigError, match=r"saes.t \(--saes\): a transcoder that reads at 0.mlp_in and writes at 0.ml"
        ):
            Worker(facts, saes={"t": str(across)})
        worker = Worker(facts, saes={"t": str(within)})
        assert worker.call("op_sites") == (["1.mlp_in", "1.mlp_out"] if rank else [])
    Worker(saes={"t": str(across)})


def test_room_for_changes_is_made_for_transcoders_and_keys_the_graph(tmp_path):
    path = TinyTranscoder(layer=1, width=HIDDEN).save(tmp_path / "t")
    with_changes, without = Worker(saes={"t": str(path)}, max_sae_features=3), Worker(op_sites={"post_mlp": "all"})

    keys = [worker.part.headgate_graph_key()["steering"] for worker in (with_changes, without)]

    assert [key["changes"] for key in keys] == [3, 0]


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_adds_its_own_columns_and_runs_programs_on_rows_that_are_gathered(rank):
    """Four ranks of two heads; at one of two sites the rows are gathered."""
    heads = {Site(layer, HookPoint.HOOK_Z): SiteShape(8, "float32", "columns", 4) for layer in (0, 1)}
    model = ModelInfo(name="m", num_layers=2, hidden_size=HIDDEN, dtype="float32", sites=(), shapes=heads)
    facts = make_facts(model=model, tp_rank=rank, tp_size=4)
    worker = Worker(facts, sites={"hook_z": "all"}, op_sites={"hook_z": [0]}, gather_sites={"hook_z": [1]})

    pool = worker.part._allocated().tables.pool
    pool[1] = torch.arange(float(HIDDEN))
    apart, gathered = (worker.actions[Site(layer, HookPoint.HOOK_Z)].tensors for layer in (0, 1))

    first = 4 * (rank // 2)
    for tensors in (apart, gathered):
        assert tensors[site_action.POOL][1].tolist() == [first, first + 1, first + 2, first + 3]
    assert WHOLE_POOL not in apart
    assert gathered[WHOLE_POOL][1].tolist() == list(range(8))
    assert worker.part.headgate_graph_key()["steering"]["gathered"] == ["1.hook_z"]


def test_an_unknown_method_is_refused_and_other_parts_are_left_alone():
    worker = Worker()
    with pytest.raises(AssertionError, match="no method 'nonsense'"):
        worker.call("nonsense")
    assert worker.hook.headgate_call(part="capture", method="nonsense", args={}) is None


@pytest.mark.parametrize("gain", [0.25, 3.0])
def test_a_scaled_branch_gets_the_vector_that_its_scale_makes_whole(gain):
    worker = Worker()
    worker.add("a", 1, SteeringSpec(prefill=vectors(1)))
    worker.step(("a", 0, 1))
    module, _ = worker.modules[SITES[0]]
    branch = torch.randn(1, HIDDEN)

    steered = site_action.add_plain(module, "post_mlp", SiteValue(branch * gain, None, branch, gain))

    torch.testing.assert_close(steered * gain, branch * gain + row(vectors(1), SITES[0]))


class Dummy:
    """Two sites in a row, as a forward would run them.

    Args:
        tables: The worker's.
        deaf: The site that is left out.
        first: The stream at the beginning.
        is_noisy: Each site adds other values in each run, as a layer that hands on memory that nobody has written.
        normed: The site behind which a post-norm is, as in Gemma 3.
    """

    def __init__(
        self,
        tables: DeviceTables,
        deaf: int | None = None,
        first: float = 1.0,
        *,
        is_noisy: bool = False,
        normed: int | None = None,
    ) -> None:
        self._tables, self._deaf, self._first, self._normed = tables, deaf, first, normed
        self._noise = torch.Generator().manual_seed(0) if is_noisy else None

    def __call__(self, num_tokens: int) -> tuple[torch.Tensor]:
        stream = torch.full((num_tokens + 2, HIDDEN), self._first)
        for site in range(2):
            branch = torch.zeros_like(stream) if self._normed is None else torch.ones_like(stream)
            if self._noise is not None:
                branch = branch + 10 * torch.randn(stream.shape, generator=self._noise)
            if site != self._deaf:
                branch = branch + self._tables.pool[self._tables.slots[site, : len(stream)]]
            if site == self._normed:
                branch = torch.nn.functional.rms_norm(branch, (HIDDEN,))
            stream = stream + branch
        return (torch.nn.functional.rms_norm(stream, (HIDDEN,)),)


@pytest.fixture
def tables() -> DeviceTables:
    return DeviceTables(
        num_sites=2,
        num_slots=4,
        num_rows=5,
        max_tokens=8,
        hidden_size=HIDDEN,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("max_rows", [1, 2, 8])
def test_the_self_test_leaves_the_tables_as_new(tables, max_rows):
    check_steering(tables, SITES, max_rows, Dummy(tables))

    assert not tables.pool.any()
    assert not tables.slots.any()


@pytest.mark.parametrize("deaf", [0, 1])
def test_the_self_test_names_the_site_that_does_not_respond(tables, deaf):
    with pytest.raises(SelfTestError, match=SITES[deaf].name) as refusal:
        check_steering(tables, SITES, 2, Dummy(tables, deaf=deaf))

    assert SITES[1 - deaf].name not in str(refusal.value)


@pytest.mark.parametrize("deaf", [None, 0, 1])
def test_sites_of_steps_that_are_never_twice_the_same_are_tested_too(tables, deaf):
    with nullcontext() if deaf is None else pytest.raises(SelfTestError, match=SITES[deaf].name) as refusal:
        check_steering(tables, SITES, 2, Dummy(tables, deaf=deaf, is_noisy=True))

    if deaf is not None:
        assert SITES[1 - deaf].name not in str(refusal.value)


def test_the_self_test_says_that_dummy_attention_hides_its_input(tables, caplog):
    hidden = Site(1, HookPoint.ATTN_IN)

    with caplog.at_level("INFO", logger="headgate"):
        check_steering(tables, [SITES[0], hidden], 2, Dummy(tables, deaf=1))
    assert "1 sites in front of attention, of experts or of post-norms are not checked" in caplog.text
    assert "1 sites respond" in caplog.text
    with pytest.raises(SelfTestError, match=f"at {SITES[0].name} did"):
        check_steering(tables, [SITES[0], hidden], 2, Dummy(tables, deaf=0))


IN_FRONT_OF_NORM = (SITES[0], Site(1, HookPoint.MLP_OUT_PRE))


def test_noise_may_hide_what_is_in_front_of_a_post_norm(tables, caplog):
    """A vector of any length changes the stream there by the norm's gain, as unwritten memory does."""
    norms = {Site(1, HookPoint.MLP_OUT_PRE)}
    with caplog.at_level("INFO", logger="headgate"):
        check_steering(tables, IN_FRONT_OF_NORM, 2, Dummy(tables, is_noisy=True, normed=1), post_norms=norms)
    assert "1 sites in front of attention, of experts or of post-norms are not checked" in caplog.text
    assert "1 sites respond" in caplog.text
    with pytest.raises(SelfTestError, match=f"at {SITES[0].name} did"):
        check_steering(tables, IN_FRONT_OF_NORM, 2, Dummy(tables, deaf=0, is_noisy=True, normed=1), post_norms=norms)


@pytest.mark.parametrize("hook", [HookPoint.HOOK_Z, HookPoint.MLP_ACT])
def test_noise_hides_no_site_of_a_layer_without_a_post_norm(tables, hook):
    norms = {Site(0, HookPoint.ATTN_OUT_PRE), Site(0, HookPoint.MLP_OUT_PRE)}
    sites = (SITES[0], Site(1, hook))

    check_steering(tables, sites, 2, Dummy(tables, is_noisy=True), post_norms=norms)
    with pytest.raises(SelfTestError, match=rf"at 1\.{hook} did"):
        check_steering(tables, sites, 2, Dummy(tables, deaf=1, is_noisy=True), post_norms=norms)


@pytest.mark.parametrize("deaf", [None, 1])
def test_without_noise_what_is_in_front_of_a_post_norm_is_tested(tables, deaf, caplog):
    expected = nullcontext() if deaf is None else pytest.raises(SelfTestError, match=r"at 1\.mlp_out_pre did")
    with caplog.at_level("INFO", logger="headgate"), expected:
        check_steering(tables, IN_FRONT_OF_NORM, 2, Dummy(tables, deaf=deaf, normed=1))
    assert ("2 sites respond" in caplog.text) == (deaf is None)


@pytest.mark.parametrize("run", [lambda count: (), None], ids=["no-output", "not-finite"])
def test_what_cannot_be_seen_is_said_and_not_claimed(tables, run, caplog):
    with caplog.at_level("INFO", logger="headgate"):
        check_steering(tables, SITES, 2, run or Dummy(tables, first=torch.nan))

    assert "not checked" in caplog.text
    assert "passed" not in caplog.text
