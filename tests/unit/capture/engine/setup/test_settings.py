"""The sections of a config are read once, and leave no trace in it."""

from __future__ import annotations

import gc
from argparse import Namespace
from typing import Any

from headgate.capture.engine.setup import settings
from headgate.capture.schema.sites import HookPoint, Site, SiteShape

SECTION = {"consumers": [{"name": "memory"}]}


def config(num_ranks: int = 1, *, has_drafts: bool = False, **server: Any) -> Any:
    model = Namespace(
        hf_text_config=Namespace(num_hidden_layers=2),
        served_model_name="tiny",
        dtype="torch.float32",
        max_model_len=8,
        get_hidden_size=lambda: 4,
        get_head_size=lambda: 3,
        get_total_num_kv_heads=lambda: 1,
        use_mla=False,
        get_num_experts=lambda: 0,
        get_num_attention_heads=lambda parallel: 2 // parallel.tensor_parallel_size,
    )
    ours = {"capture": SECTION, "server": server, "compiler": {"rewrites": False}}
    parallel = Namespace(tensor_parallel_size=num_ranks, pipeline_parallel_size=1)
    return Namespace(
        additional_config={"headgate": ours},
        model_config=model,
        parallel_config=parallel,
        speculative_config=Namespace() if has_drafts else None,
    )


def test_a_config_keeps_the_fields_that_it_has() -> None:
    """vLLM copies configs field by field, and fails at what is no field."""
    made = config()
    before = set(vars(made))

    assert set(settings.sections(made)) == {"capture"}
    assert settings.capture_config(made) is settings.capture_config(made)
    assert settings.model_info(made) is settings.model_info(made)
    assert not settings.compiler_config(made).rewrites

    assert set(vars(made)) == before


def test_sites_have_the_shapes_of_the_models_configuration() -> None:
    site, stream = Site(1, HookPoint.HOOK_Z), Site(1, HookPoint.POST_MLP)
    alone, shared = settings.model_info(config()), settings.model_info(config(num_ranks=2))

    assert alone.shape(stream) == shared.shape(stream) == SiteShape(4, "float32")
    assert alone.shape(site) == SiteShape(6, "float32", "replicated", 3)
    assert shared.shape(site) == SiteShape(6, "float32", "columns", 3)
    for hook, width in {HookPoint.Q: 6, HookPoint.Q_PRE: 6, HookPoint.K: 3, HookPoint.K_PRE: 3, HookPoint.V: 3}.items():
        assert shared.shape(Site(1, hook)) == SiteShape(width, "float32", "columns", 3)
    assert shared.shape(Site(1, HookPoint.K)).part_width(2) == 3  # both ranks hold the one head
    assert alone.position_bytes((site, stream)) == 4 * (6 + 4)


def test_a_model_has_drafts_with_speculative_decoding() -> None:
    assert [settings.model_info(config(has_drafts=each)).has_drafts for each in (False, True)] == [False, True]


def test_sections_stay_when_their_place_in_the_config_is_taken() -> None:
    made = config()
    read = settings.sections(made)

    made.additional_config = {"headgate": {"graph": {}}}

    assert settings.sections(made) is read
    assert settings.capture_config(made) is not None


def test_nothing_is_kept_of_a_config_that_is_gone() -> None:
    before = len(settings._kept)
    made = config()
    settings.model_info(made)
    assert len(settings._kept) == before + 1

    del made
    gc.collect()

    assert len(settings._kept) == before


def test_the_last_stage_has_the_head() -> None:
    """vLLM gives the first of two stages the layer that is left over."""
    made = config()
    made.parallel_config.pipeline_parallel_size = 2
    made.model_config.hf_text_config.num_hidden_layers = 3

    assert settings.model_info(made).first_head_layer == 2
    assert settings.model_info(config()).first_head_layer == 0
