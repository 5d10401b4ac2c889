"""Engine settings that would make rows wrong are refused by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from headgate.capture.engine.setup.engine_settings import SERVED, Refusal, Served, applying, table
from headgate.capture.engine.setup.startup_checks import refuse_unsupported_settings
from headgate.capture.schema.errors import UnsupportedError

ROOT = Path(__file__).parents[5]


class Settings(SimpleNamespace):
    """A `VllmConfig`, to which references may be weak."""


def drafts(method="ngram", **changes):
    return SimpleNamespace(method=method, **changes)


def settings(**changes):
    parallel = SimpleNamespace(
        pipeline_parallel_size=1,
        use_ubatching=False,
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
        use_sequence_parallel_moe=False,
        use_ray=False,
        distributed_executor_backend="mp",
        nnodes=1,
        world_size=4,
        local_engines_only=False,
        data_parallel_backend="mp",
        data_parallel_size=2,
        data_parallel_size_local=2,
        data_parallel_rank_local=None,
    )
    config = Settings(
        parallel_config=parallel,
        additional_config={},
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace(enable_sp=False)),
        speculative_config=None,
        kv_transfer_config=None,
        model_config=SimpleNamespace(is_encoder_decoder=False, is_diffusion=False, runner_type="generate"),
    )
    for path, value in changes.items():
        *owners, name = path.split("__")
        owner = config
        for part in owners:
            owner = getattr(owner, part)
        setattr(owner, name, value)
    return config


def transfer(connector, **extra):
    return SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra)


def test_ordinary_settings_are_served():
    refuse_unsupported_settings(settings())
    refuse_unsupported_settings(settings(kv_transfer_config=transfer("OffloadingConnector", cpu_bytes_to_use=1 << 30)))


@pytest.mark.parametrize(
    ("change", "value", "text"),
    [
        ("parallel_config__use_ubatching", True, "--enable-dbo"),
        ("cache_config__kv_sharing_fast_prefill", True, "--kv-sharing-fast-prefill"),
        ("parallel_config__data_parallel_backend", "ray", "--data-parallel-backend ray"),
        ("parallel_config__distributed_executor_backend", "external_launcher", "external_launcher"),
        ("model_config__is_diffusion", True, "block-diffusion"),
        ("parallel_config__prefill_context_parallel_size", 2, "prefill context"),
        ("parallel_config__decode_context_parallel_size", 2, "decode context"),
        ("parallel_config__use_sequence_parallel_moe", True, "--enable-expert-parallel"),
        ("compilation_config__pass_config__enable_sp", True, "enable_sp"),
        ("speculative_config", drafts("medusa"), r"this method of speculative decoding.*\(ngram, ngram_gpu, draft_"),
        ("speculative_config", drafts("eagle", parallel_drafting=True), "parallel_drafting"),
        ("speculative_config", drafts(enable_adaptive_verification=True), "enable_adaptive_verification"),
        ("speculative_config", drafts(num_speculative_tokens_per_batch_size=[(1, 8, 3)]), "per_batch_size"),
        (
            "kv_transfer_config",
            transfer("ExampleConnector"),
            "look up tokens .*keys and values of others that were steer",
        ),
        (
            "kv_transfer_config",
            transfer("NixlConnector"),
            "prefill and decode on different engines .*kv_transfer_params",
        ),
        ("kv_transfer_config", transfer("MooncakeStoreConnector"), "other KV connectors than OffloadingConnector"),
        ("kv_transfer_config", transfer("OffloadingConnector", spec_name="TieringOffloadingSpec"), "spec_name"),
        ("model_config__is_encoder_decoder", True, "encoder-decoder"),
        ("model_config__runner_type", "pooling", "pooling"),
    ],
)
def test_each_is_refused_with_what_to_do_instead(change, value, text):
    with pytest.raises(UnsupportedError, match=text):
        refuse_unsupported_settings(settings(**{change: value}))


@pytest.mark.parametrize(
    "changes",
    [
        {"nnodes": 2},
        {"data_parallel_size_local": 1},
        {"use_ray": True},
        {"distributed_executor_backend": "external_launcher", "world_size": 1},
    ],
    ids=["nodes", "far engines", "ray", "one rank"],
)
def test_engines_on_several_hosts_and_launchers_of_one_rank_are_served(changes):
    refuse_unsupported_settings(settings(**{f"parallel_config__{name}": value for name, value in changes.items()}))


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "draft_model", "eagle", "eagle3", "mtp"])
def test_drafts_are_served_on_one_stage(method):
    refuse_unsupported_settings(settings(speculative_config=drafts(method)))
    with pytest.raises(UnsupportedError, match="speculative decoding with pipeline parallelism"):
        refuse_unsupported_settings(
            settings(speculative_config=drafts(method), parallel_config__pipeline_parallel_size=2)
        )


def test_all_are_named_at_once():
    config = settings(speculative_config=drafts("suffix"), kv_transfer_config=transfer("NixlConnector"))

    with pytest.raises(UnsupportedError, match=r"(?s)speculative.*prefill and decode"):
        refuse_unsupported_settings(config)


def test_releases_without_the_sequence_parallel_pass_are_served():
    config = settings()
    del config.compilation_config.pass_config.enable_sp

    refuse_unsupported_settings(config)


@pytest.mark.parametrize(
    ("steering", "text"),
    [
        ({"from_consumers": True, "op_sites": {"post_mlp": "all"}}, "controllers, and consumers that steer"),
        ({"saes": {"calm": "calm.npz"}, "sae_encode": ["calm"]}, "encoded SAEs .* --sae-encode"),
    ],
)
def test_what_remembers_or_counts_rows_is_refused_with_drafts(steering, text):
    plain = settings(additional_config={"headgate": {"steering": steering}})
    refuse_unsupported_settings(plain)
    plain.speculative_config = drafts()

    with pytest.raises(UnsupportedError, match=text):
        refuse_unsupported_settings(plain)


def test_the_reference_has_the_table_and_its_tests_exist():
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text()

    assert table() in page
    for each in SERVED:
        assert bool(each.tests) == bool(each.since) == bool(each.device), each.what
        assert all((ROOT / "tests" / test).is_file() for test in each.tests), each.what


def test_an_engine_has_the_settings_that_are_set_and_refused_ones_come_first():
    config = settings(
        parallel_config__use_ubatching=True,
        parallel_config__tensor_parallel_size=2,
        kv_transfer_config=transfer("NixlConnector"),
        cache_config__cache_dtype="fp8",
    )
    config.compilation_config.cudagraph_mode = None

    found = applying(config)

    assert [type(each) for each in found] == [Refusal, Refusal, Served, Served, Served]
    assert ["dual-batch" in found[0].what, "NixlConnector" in found[1].what] == [True, True]
    names = {each.what.partition(" (")[0] for each in found[2:]}
    assert names == {"tensor parallelism", "data parallelism", "type of the KV cache"}


def test_drafts_that_are_refused_are_not_listed_as_served():
    """The line of served methods would contradict the refusal."""
    served = applying(settings(speculative_config=drafts("eagle")))
    assert [each.what for each in served if "speculative" in each.what and isinstance(each, Served)]

    for refused in (drafts("medusa"), drafts(enable_adaptive_verification=True)):
        found = applying(settings(speculative_config=refused))
        assert [type(each) for each in found if "speculative" in each.what] == [Refusal]
