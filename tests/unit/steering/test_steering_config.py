"""The operator's document of steering."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.sites import HookPoint, Site, SiteShape, sort_sites
from headgate.steering import probes
from headgate.steering.config import SteeringConfig, parse_config
from headgate.steering.features.canonical import write_coder
from headgate.steering.features.source_coder import CoderKind
from tests.fakes.saes import TinySae
from tests.fakes.sparse_coders import save, source
from tests.fakes.transcoders import TinyTranscoder


@pytest.mark.parametrize("document", [None, {}], ids=repr)
def test_by_default_every_stream_site_can_be_steered_in_both_phases(document: dict[str, Any] | None) -> None:
    steerable = parse_config(document).steerable(num_layers=2, hidden_size=8, dtype="bfloat16")

    stream = (HookPoint.PRE_ATTN, HookPoint.POST_ATTN, HookPoint.POST_MLP)
    assert steerable.sites == tuple(Site(layer, hook) for layer in range(2) for hook in stream)
    assert steerable.max_vectors == 12


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SteeringConfig(max_vectors_per_request=3), 3),
        (SteeringConfig(max_steering_slots=5), 4),
        (SteeringConfig(sites={"final_norm": "all"}), 2),
    ],
    ids=["configured", "as the slots reach", "every site"],
)
def test_a_request_may_bring_what_can_ever_fit(config: SteeringConfig, expected: int) -> None:
    assert config.steerable(num_layers=2, hidden_size=8, dtype="float32").max_vectors == expected


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "expected an object"),
        ({"max_slots": 3}, "max_slots"),
        ({"max_steering_slots": "many"}, "Expected `int`"),
        ({"max_steering_slots": 1}, "at least 2"),
        ({"max_steering_configs": 0}, "max_steering_configs must be at least 1"),
        ({"max_steering_configs": 2, "max_steering_slots": 9}, "give one of them"),
        ({"max_vectors_per_request": 0}, "from 1 to max_steering_slots - 1 = 8191, got 0"),
        ({"max_vectors_per_request": 9, "max_steering_slots": 9}, "= 8, got 9"),
        ({"sites": {}}, "name at least one hook point"),
        ({"modules": {"": "a.json"}}, "module's name"),
        ({"modules": {"calm": ""}}, "modules.calm: the path is empty"),
        ({"saes": {"calm": ""}}, "saes.calm: the path is empty"),
        ({"probes": {"calm": ""}}, "probes.calm: the path is empty"),
        ({"probes": {"": "x"}}, "probes: expected a probe's name"),
        ({"max_sae_features": 0}, "max_sae_features must be from 1 to 1024, got 0"),
        ({"sae_encode": "a"}, "Expected `array`"),
        (
            {"saes": {"a": "x"}, "sae_encode": ["b"]},
            "'b' is not among the SAEs of --saes: a",
        ),
        ({"saes": {"a": "x"}, "sae_encode": ["a", "a"]}, "sae_encode (--sae-encode): 'a' is named twice"),
    ],
    ids=str,
)
def test_a_wrong_document_is_refused_with_the_field_named(document: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=r"additional_config\['headgate'\]\['steering'\]") as refused:
        parse_config(document)

    assert message in str(refused.value)


@pytest.mark.parametrize("num_layers", [2, 64, 100])
def test_n_configurations_of_all_sites_fit_beside_global_vectors(num_layers: int) -> None:
    config = parse_config({"max_steering_configs": 3})

    num_sites = len(config.steerable(num_layers=num_layers, hidden_size=8, dtype="float32").sites)

    assert num_sites == 3 * num_layers
    assert config.num_slots(num_layers) - 1 == (3 + 1) * 2 * num_sites


def test_sites_that_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sites\.post_mlp: layer 2"):
        SteeringConfig(sites={"post_mlp": [2]}).steerable(num_layers=2, hidden_size=8, dtype="float32")


def test_the_site_of_an_sae_is_an_op_site_and_room_for_its_features_is_made(tmp_path: Path) -> None:
    """The site comes from the configuration, or else from the SAE's own files; an @ may be part of a path."""
    told = TinySae(width=8).save(tmp_path / "a@home")
    telling = TinySae(width=8).save(tmp_path / "b", Site(1, HookPoint.MLP_OUT))
    config = SteeringConfig(saes={"a": f"{told}@0.pre_attn", "b": str(telling)}, op_sites={"post_mlp": [1]})

    steerable = config.steerable(num_layers=2, hidden_size=8, dtype="float32")

    assert steerable.op_sites == sort_sites(map(Site.parse, ("0.pre_attn", "1.mlp_out", "1.post_mlp")))
    assert set(steerable.op_sites) <= set(steerable.sites)
    assert steerable.max_sae_features == 64
    assert config.max_entries == SteeringConfig().max_entries + 3 * 64  # of a request, of all, and of rules
    assert SteeringConfig(max_rules=0).num_columns == SteeringConfig().num_columns / 2
    assert SteeringConfig(sae_root="/x").max_entries == config.max_entries


def test_the_site_of_a_probe_is_an_op_site(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    probes.save(path, probes.from_direction([1.0] * 8, at="1.mlp_out"))
    config = SteeringConfig(probes={"p": str(path)}, op_sites={"post_mlp": [1]})

    steerable = config.steerable(num_layers=2, hidden_size=8, dtype="float32")

    assert [site.name for site in steerable.op_sites] == ["1.mlp_out", "1.post_mlp"]
    with pytest.raises(ConfigError, match=r"probes\.p \(--probes\): 1\.mlp_out: the model has 1 layers"):
        SteeringConfig(probes={"p": str(path)}).steerable(num_layers=1, hidden_size=8, dtype="float32")
    with pytest.raises(ConfigError, match=r"probes\.q \(--probes\): .*no such file"):
        SteeringConfig(probes={"q": str(tmp_path / "q.safetensors")}).steerable(
            num_layers=2, hidden_size=8, dtype="float32"
        )


def test_an_sae_without_a_site_is_refused(tmp_path: Path) -> None:
    config = SteeringConfig(saes={"a": str(TinySae(width=8).save(tmp_path / "a@home"))})

    with pytest.raises(ConfigError, match=r"saes\.a \(--saes\): .*has no site; name it"):
        config.steerable(num_layers=2, hidden_size=8, dtype="float32")


def test_all_sites_of_a_transcoder_are_op_sites_and_room_for_its_changes_is_made(tmp_path: Path) -> None:
    across, within = TinyTranscoder(layer=0, num_layers=3, width=8), TinyTranscoder(layer=1, width=8)
    sae = f"{TinySae(width=8).save(tmp_path / 'sae')}@0.pre_attn"
    saes = {"sae": sae, "across": str(across.save(tmp_path / "a")), "within": str(within.save(tmp_path / "b"))}
    config = SteeringConfig(saes=saes, max_sae_features=5)

    found = config.steerable(num_layers=3, hidden_size=8, dtype="float32")

    names = ("0.pre_attn", "0.mlp_in", "0.mlp_out", "1.mlp_in", "1.mlp_out", "2.mlp_out")
    assert found.op_sites == sort_sites(map(Site.parse, names))
    assert found.max_changes == 5
    assert set(config.transcoders()) == {"across", "within"}
    assert SteeringConfig(saes={"sae": sae}).num_changes == 0
    assert SteeringConfig(sae_root="/x").num_changes == 64
    with pytest.raises(ConfigError, match=r"saes.across \(--saes\): 2.mlp_out: the model has 2 layers"):
        config.steerable(num_layers=2, hidden_size=8, dtype="float32")
    with pytest.raises(ConfigError, match=r"saes.x \(--saes\): .*whose sites the source must tell"):
        SteeringConfig(saes={"x": f"{saes['within']}@1.mlp_out"}).num_changes  # noqa: B018


def encoded(folder: Path, *saes: TinySae, site: str = "1.post_mlp") -> SteeringConfig:
    """A configuration that has `saes` encoded, all of them at one site."""
    paths = {f"sae{at}": f"{sae.save(folder / str(at))}@{site}" for at, sae in enumerate(saes)}
    return parse_config({"saes": paths, "sae_encode": list(paths)})


def test_an_encoded_sae_takes_two_entries_of_each_program(tmp_path: Path) -> None:
    config = encoded(tmp_path, TinySae(architecture="gated", width=8))

    steerable = config.steerable(num_layers=2, hidden_size=8, dtype="float32")

    assert steerable.op_sites == (Site(1, HookPoint.POST_MLP),)
    assert config.max_entries == SteeringConfig(saes=config.saes).max_entries + 2


@pytest.mark.parametrize(
    ("saes", "message"),
    [
        ([TinySae(width=16)], "SAE 'sae0' has the width 16; rows of the model have 8 values"),
        ([TinySae(width=8), TinySae(width=8)], "SAE 'sae1' acts at 1.post_mlp, and so does 'sae0'"),
    ],
    ids=["width", "site"],
)
def test_an_sae_that_cannot_reconstruct_rows_exactly_is_refused(
    tmp_path: Path, saes: list[TinySae], message: str
) -> None:
    config = encoded(tmp_path, *saes)

    with pytest.raises(ConfigError, match=r"\.sae_encode \(--sae-encode\): ") as refused:
        config.steerable(num_layers=2, hidden_size=8, dtype="float32")
    assert message in str(refused.value)


def test_a_transcoder_and_missing_files_are_not_encoded(tmp_path: Path) -> None:
    folder = tmp_path / "transcoder" / "transcoder" / "layer_1_width_16_l0_small"
    tensors = {"w_enc": (8, 16), "w_dec": (16, 8), "b_enc": (16,), "b_dec": (8,), "threshold": (16,)}
    save(folder / "params.safetensors", {name: np.ones(shape, np.float32) for name, shape in tensors.items()})
    for path, message in ((folder, "SAE 'a' is a transcoder"), (tmp_path / "b@1.post_mlp", "no such file")):
        config = parse_config({"saes": {"a": str(path)}, "sae_encode": ["a"]})

        with pytest.raises(ConfigError, match=message):
            config.steerable(num_layers=2, hidden_size=8, dtype="float32")


def test_operations_act_at_sites_of_any_width_and_saes_are_encoded_at_those_of_the_stream(tmp_path: Path) -> None:
    site, facts = Site(1, HookPoint.HOOK_Z), {"num_layers": 2, "hidden_size": 8, "dtype": "float32"}
    wide, split = SiteShape(12, "float32"), SiteShape(8, "float32", "columns", 2)

    for shape, rank_width in ((wide, 0), (split, 2)):
        found = SteeringConfig(op_sites={"hook_z": [1]}).steerable(**facts, shapes={site: shape})
        assert (found.width(site), found.row_size, found.rank_width(site)) == (shape.width, shape.width, rank_width)
        assert (found.why_unread(site) is None) == (shape is wide)
    config = encoded(tmp_path, TinySae(width=8), site=site.name)
    with pytest.raises(ConfigError, match=r"sae_encode .*1.hook_z has rows of 12 values; .* 8 values, the hidden size"):
        config.steerable(**facts, shapes={site: wide})


def test_rows_are_gathered_at_sites_that_are_declared_or_read(tmp_path: Path) -> None:
    heads, neurons, keys, stream = (Site.parse(name) for name in ("1.hook_z", "1.mlp_act", "0.k", "0.post_mlp"))
    shapes = {heads: SiteShape(8, "float32", "columns", 2), neurons: SiteShape(8, "float32", "columns")}
    shapes[keys] = SiteShape(4, "float32", "columns", 2)
    probes.save(path := tmp_path / "probe.safetensors", probes.Probe(site=neurons, weight=np.ones((1, 8))))
    sae = f"{TinySae(width=8).save(tmp_path / 'sae')}@{heads.name}"
    files = {"probes": {"probe": str(path)}, "saes": {"sae": sae}, "sae_encode": ["sae"]}
    sites = {"op_sites": {"k": [0], "hook_z": [0]}, "gather_sites": {"k": [0], "post_mlp": [0]}}
    config = parse_config({**files, **sites})

    found = config.steerable(num_layers=2, hidden_size=8, dtype="float32", shapes=shapes)

    assert found.op_sites == (keys, Site(0, HookPoint.HOOK_Z), stream, heads, neurons)
    assert found.gathered == {heads, neurons, keys}
    assert {found.rank_width(site) for site in found.op_sites} == {0}
    assert {found.why_unread(site) for site in found.op_sites} == {None}
    alone = SteeringConfig(op_sites={"k": [0]}).steerable(num_layers=2, hidden_size=8, dtype="float32", shapes=shapes)
    assert (alone.gathered, alone.rank_width(keys)) == (frozenset(), 2)
    assert "--steering-gather-sites" in str(alone.why_unread(keys))


def test_an_sae_that_selects_within_groups_is_not_encoded(tmp_path: Path) -> None:
    write_coder(tmp_path / "a.safetensors", source(CoderKind.GROUPMAX), name="a", path="test")
    config = parse_config({"saes": {"a": str(tmp_path / "a.safetensors")}, "sae_encode": ["a"]})

    with pytest.raises(ConfigError, match=r"SAE 'a' is of the kind groupmax: .*gated and top-k SAEs can be encoded"):
        config.encoded_saes(12)


def test_the_choice_of_experts_cannot_be_steered_and_its_scores_can() -> None:
    facts = {"num_layers": 2, "hidden_size": 4, "dtype": "float32"}

    with pytest.raises(ConfigError, match=r"sites: 1\.experts: .*steer router_logits"):
        SteeringConfig(sites={"experts": [1], "post_mlp": "all"}).steerable(**facts)
    shapes = {Site(1, HookPoint.ROUTER_LOGITS): SiteShape(8, "float32")}
    assert SteeringConfig(sites={"router_logits": [1]}).steerable(**facts, shapes=shapes).row_size == 8
