"""What attention does is read from vLLM's layers, for all ranks together; what it cannot say is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from headgate.capture.engine import vllm_names
from headgate.capture.engine.model import attention_facts as reading
from headgate.capture.engine.model.attention_facts import attention_facts
from headgate.capture.engine.model.inner_places import HookPlace
from headgate.capture.engine.site_action import SiteAction
from headgate.capture.schema.consumer import AttentionFacts, ModelInfo
from headgate.capture.schema.sites import HookPoint, Site, SiteShape

Q, K = Site(5, HookPoint.Q), Site(5, HookPoint.K)
SHAPES = {Q: SiteShape(4 * 8, "float32", "columns", 8), K: SiteShape(2 * 8, "float32", "columns", 8)}
MODEL = ModelInfo(name="m", num_layers=9, hidden_size=16, dtype="float32", sites=(Q, K), shapes=SHAPES)


class Attention(nn.Module):
    """As much of vLLM's as is read, on one of two ranks."""

    def __init__(self, impl: Mapping[str, Any], **attributes: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.impl = SimpleNamespace(**{"scale": 0.5, **impl})
        self.kv_cache_dtype, self.kv_cache_torch_dtype = "auto", torch.float32
        vars(self).update(attributes)


class Chunked(Attention):
    pass


def read(kernel: nn.Module, config: Mapping[str, Any] | None = None, **changes: Any) -> dict[int, Any]:
    """Read layer 5, whose other rank has ten more of each number."""
    layer = nn.Module()
    layer.attn = kernel
    hf_config = SimpleNamespace(**(config or {}))
    settings = SimpleNamespace(dtype=torch.float32, hf_config=hf_config, is_mm_prefix_lm=config is not None)
    given = {"actions": {}, "model": MODEL, "config": settings, **changes}
    return attention_facts([(4, nn.Module()), (5, layer)], gather=lambda each: torch.stack([each, each + 10]), **given)


@pytest.fixture(autouse=True)
def layers_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    structure = SimpleNamespace(inner={HookPoint.K: HookPlace(module="attn")})
    monkeypatch.setattr(reading, "analyse_layer", lambda *_: structure)
    monkeypatch.setattr(type(vllm_names.ATTENTION), "get", lambda _: Attention)


def test_the_facts_of_all_ranks_are_read() -> None:
    sinks = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    impl = {"logits_soft_cap": 30.0, "sinks": sinks, "alibi_slopes": [0.5, 0.25], "chunk_lookback": -1}

    assert read(Attention(impl, sliding_window=7, has_sink=True, use_alibi_sqrt=False)) == {
        5: AttentionFacts(
            num_heads=4, num_kv_heads=2, head_size=8, scale=0.5, window=7, soft_cap=30.0,
            sinks=(1.0, 2.0, 11.0, 12.0), slopes=(0.5, 0.25, 10.5, 10.25),
        )
    }  # fmt: skip


def test_what_is_absent_is_not_made_up() -> None:
    plain = AttentionFacts(num_heads=4, num_kv_heads=2, head_size=8, scale=0.5)

    assert read(Attention({"logits_soft_cap": 0, "sinks": None})) == {5: plain}
    assert (
        read(Attention({}), model=ModelInfo(name="m", num_layers=9, hidden_size=16, dtype="float32", sites=(Q,))) == {}
    )


def test_tokens_of_images_are_named_where_they_see_later_ones() -> None:
    facts = read(Attention({}), {"image_token_index": 9, "video_token_id": 3, "image_token_id": None})[5]

    assert facts.whole_tokens == (3, 9)
    assert "does not name them" in read(Attention({}), {})[5]
    assert read(Attention({}, use_mm_prefix=False), {})[5].whole_tokens == ()


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (Chunked({}), "its attention is vLLM's Chunked, which patterns are not defined for"),
        (
            Attention({}, kv_cache_dtype="fp8", kv_cache_torch_dtype=torch.uint8),
            "has the dtype fp8, .* leave --kv",
        ),
        (Attention({"chunk_lookback": 1}), "local to chunks"),
        (Attention({}, use_alibi_sqrt=True), "ALiBi of square roots"),
        (Attention({"sinks": None}, has_sink=True), "its sinks are not in SimpleNamespace"),
        (Attention({"sinks": torch.zeros(3)}), "it has 4 heads, and 6 numbers for them"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_attention_of_another_kind_is_refused_by_name(kernel: nn.Module, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(read(kernel)[5])


def test_a_backend_that_hides_its_scale_is_refused() -> None:
    kernel = Attention({})
    del kernel.impl.scale

    assert read(kernel) == {5: "SimpleNamespace does not show its scale"}


def test_steered_queries_are_refused() -> None:
    def run(module: nn.Module, hook: str, site: Any) -> torch.Tensor:
        raise AssertionError("no forward runs here")

    capture, add = SiteAction(run=run, order=0), SiteAction(run=run, order=20)

    assert isinstance(read(Attention({}), actions={Q: [capture], K: [capture]})[5], AttentionFacts)
    assert "steering is configured at its q or k" in read(Attention({}), actions={K: [capture, add]})[5]
