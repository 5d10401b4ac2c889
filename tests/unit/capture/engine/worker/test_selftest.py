"""The start-up self-test: it passes a worker whose sites respond and names the sites that do not."""

from __future__ import annotations

import pytest
import torch

from headgate.capture.engine.contracts.worker_hooks import WorkerFacts
from headgate.capture.engine.worker.capture_part import check_capture
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.errors import SelfTestError
from headgate.capture.schema.sites import INNER_HOOKS, HookPoint, Site, sort_sites
from headgate.capture.staging.ring import StagingRing

HIDDEN = 8
SITES = sort_sites(
    Site(layer, hook) for layer in (0, 1) for hook in set(HookPoint) - INNER_HOOKS - {HookPoint.FINAL_NORM}
)

APART = (HookPoint.ATTN_IN, HookPoint.HOOK_Z, HookPoint.MLP_IN)
"""Hook points whose values follow from no neighbour's."""


class Model:
    """Writes what a well-hooked model writes: a stream to which each layer adds two branches."""

    def __init__(self, ring: StagingRing) -> None:
        self.ring = ring
        self.silent: set[Site] = set()
        self.shifted: set[Site] = set()
        self.steps: list[int] = []

    def run(self, num_tokens: int) -> None:
        self.steps.append(num_tokens)
        torch.manual_seed(num_tokens)
        stream = torch.randn(num_tokens, HIDDEN)
        for layer in (0, 1):
            attn, mlp = torch.randn(num_tokens, HIDDEN), torch.randn(num_tokens, HIDDEN)
            self.write(Site(layer, HookPoint.PRE_ATTN), stream)
            self.write(Site(layer, HookPoint.ATTN_IN), torch.nn.functional.normalize(stream))
            self.write(Site(layer, HookPoint.HOOK_Z), torch.randn(num_tokens, HIDDEN))
            self.write(Site(layer, HookPoint.ATTN_OUT), attn)
            self.write(Site(layer, HookPoint.POST_ATTN), stream + attn)
            self.write(Site(layer, HookPoint.MLP_IN), torch.nn.functional.normalize(stream + attn))
            self.write(Site(layer, HookPoint.MLP_OUT), mlp)
            stream = stream + attn + mlp
            self.write(Site(layer, HookPoint.POST_MLP), stream)

    def write(self, site: Site, value: torch.Tensor) -> None:
        if site not in self.silent:
            slots = self.ring.slots[: value.shape[0]]
            self.ring.site_rows[SITES.index(site)].index_put_((slots,), value + (1.0 if site in self.shifted else 0.0))


@pytest.fixture
def ring() -> StagingRing:
    return StagingRing(
        sites=SITES,
        num_rows=16,
        max_tokens=16,
        hidden_size=HIDDEN,
        dtype=torch.float32,
        device=torch.device("cpu"),
        staging_bytes=1 << 20,
    )


@pytest.fixture
def model(ring) -> Model:
    return Model(ring)


@pytest.fixture
def facts() -> WorkerFacts:
    info = ModelInfo(name="m", num_layers=2, hidden_size=HIDDEN, dtype="float32", sites=SITES)
    return WorkerFacts(
        model=info,
        owned_layers=(0, 1),
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_tokens=16,
        max_num_seqs=4,
        is_compiled=False,
    )


def test_a_worker_whose_sites_respond_passes_and_is_left_as_new(ring, model, facts):
    check_capture(ring, SITES, facts, model.run)

    assert model.steps == [4, 1]
    assert bool((ring.slots >= 16).all())
    assert not any(rows.any() for rows in ring.site_rows)


@pytest.mark.parametrize("site", [Site(1, HookPoint.POST_ATTN), Site(0, HookPoint.MLP_IN)], ids=lambda site: site.name)
def test_a_site_that_does_not_respond_is_named(ring, model, facts, site):
    model.silent.add(site)

    with pytest.raises(SelfTestError, match=site.name):
        check_capture(ring, SITES, facts, model.run)


@pytest.mark.parametrize("site", [site for site in SITES if site.hook not in APART], ids=lambda site: site.name)
def test_a_hook_at_the_wrong_place_contradicts_its_neighbours(ring, model, facts, site):
    model.shifted.add(site)

    with pytest.raises(SelfTestError, match="is not"):
        check_capture(ring, SITES, facts, model.run)


def test_what_a_dummy_step_leaves_uninitialised_proves_nothing_either_way(ring, model, facts):
    original = model.write

    def write(site, value):
        original(site, value if site.layer == 0 and site.hook is HookPoint.PRE_ATTN else value * torch.nan)

    model.write = write

    check_capture(ring, SITES, facts, model.run)


def test_a_value_that_is_not_finite_at_one_site_alone_contradicts_its_neighbours(ring, model, facts):
    original = model.write

    def write(site, value):
        original(site, value * torch.inf if site == Site(1, HookPoint.POST_ATTN) else value)

    model.write = write

    with pytest.raises(SelfTestError, match=r"1\.post_attn"):
        check_capture(ring, SITES, facts, model.run)


def test_a_rank_without_a_ring_runs_the_steps_with_the_others(facts):
    steps: list[int] = []

    check_capture(None, (), facts, steps.append)

    assert steps == [4, 1]
