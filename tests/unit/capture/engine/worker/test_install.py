"""When headgate allocates in a worker, as sleep mode frees what lies in its pools; and what it finds in layers."""

from __future__ import annotations

import inspect
from argparse import Namespace
from typing import Any

import pytest
import torch
from torch import nn

from headgate.capture.engine.model.forward_wrappers import attach
from headgate.capture.engine.site_action import SiteAction
from headgate.capture.engine.worker import install
from headgate.capture.schema.sites import HookPoint, Site


def test_memory_is_allocated_after_the_pool_of_the_weights_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    open_pools: list[str] = []
    seen: list[tuple[str, list[str]]] = []

    class Worker:
        vllm_config = Namespace(additional_config={"headgate": {"capture": {}}})

        def load_model(self) -> None:
            open_pools.append("weights")
            seen.append(("loaded", list(open_pools)))
            open_pools.pop()

    class WorkerWrapperBase:
        worker = Worker()

    monkeypatch.setattr(install, "install", lambda worker: seen.append(("installed", list(open_pools))))
    install.patch_worker(WorkerWrapperBase, Worker)
    WorkerWrapperBase().load_model()  # type: ignore[attr-defined]

    assert seen == [("loaded", ["weights"]), ("installed", [])]


def test_vllm_opens_that_pool_within_the_workers_own_load_model() -> None:
    gpu_worker: Any = pytest.importorskip("vllm.v1.worker.gpu_worker")

    assert 'pool_context(tag="weights")' in inspect.getsource(gpu_worker.Worker.load_model)


def test_what_a_site_needs_is_no_buffer_that_waking_up_or_new_weights_would_replace() -> None:
    module, slots = nn.Linear(2, 2), torch.zeros(3)
    before = {name for name, _ in (*module.named_buffers(), *module.named_parameters())}
    attach(module, HookPoint.POST_MLP, [SiteAction(run=lambda *_: slots, tensors={"slots": slots}, order=0)])

    assert module._headgate_slots_post_mlp is slots
    assert {name for name, _ in (*module.named_buffers(), *module.named_parameters())} == before


class PostNormed(nn.Module):
    """A layer whose MLP alone ends in a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp, self.post_feedforward_layernorm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = hidden_states + self.self_attn(hidden_states)
        return hidden_states + self.post_feedforward_layernorm(self.mlp(hidden_states))


def test_post_norms_are_those_of_layers_that_have_them() -> None:
    layers = [(4, PostNormed()), (5, nn.Linear(4, 4))]

    assert install.post_norms(layers) == {Site(4, HookPoint.MLP_OUT_PRE)}
