"""Hook points and sites: their names, their order, and how layers are chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import (
    ALIASES,
    FINAL_NORM_SITE,
    HookPoint,
    Site,
    parse_configured,
    parse_layers,
    parse_sites,
    site_map,
    sort_sites,
)
from tests.fakes.unread import Unread
from tests.strategies import SITES, site_sets


@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("12.post_mlp", Site(12, HookPoint.POST_MLP)),
        ("0.resid_pre", Site(0, HookPoint.PRE_ATTN)),
        ("final_norm", FINAL_NORM_SITE),
        ("last_hidden_state", FINAL_NORM_SITE),
    ],
)
def test_a_site_is_read_by_its_name_or_an_alias(name: str, site: Site) -> None:
    assert Site.parse(name) == site


@given(st.sampled_from(SITES))
def test_a_site_is_read_back_from_the_name_it_writes(site: Site) -> None:
    assert Site.parse(site.name) == site


@pytest.mark.parametrize("name", ["", "post_mlp", "12", "12.", ".post_mlp", "-1.post_mlp", "1.5.post_mlp", "a.post_mlp",
                                  "3.final_norm", ".final_norm", "12.POST_MLP", "12.mlp", 0, None])  # fmt: skip
def test_what_names_no_site_is_refused(name: object) -> None:
    with pytest.raises(ValueError, match="not a site"):
        Site.parse(name)


def test_sites_are_in_the_order_of_the_forward_pass() -> None:
    shuffled = [SITES[index] for index in np.random.default_rng(0).permutation(len(SITES))]

    names = [site.name for site in sort_sites(shuffled)]

    layer = ["pre_attn", "attn_in", "hook_z", "attn_out", "post_attn", "mlp_in", "mlp_out", "post_mlp"]
    assert names == [f"0.{hook}" for hook in layer] + [f"1.{hook}" for hook in layer] + ["final_norm"]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("all", (0, 1, 2, 3, 4)),
        (0, (0,)),
        (-1, (4,)),
        ([3, 1, 3, -2], (1, 3)),
        ((2,), (2,)),
        ([np.int64(3)], (3,)),
        ({"layers": [4]}, (4,)),
        ({"ranges": [[0, 2], [3, 4]]}, (0, 1, 3)),
        ({"layers": [0], "ranges": [[-2, 5]]}, (0, 3, 4)),
        ({"layers": [], "ranges": [(1, -3)]}, (1,)),
        ({"layers": None, "ranges": [[1, 2]]}, (1,)),
    ],
    ids=repr,
)
def test_layers_can_be_written_in_every_documented_way(layers: object, expected: tuple[int, ...]) -> None:
    chosen = parse_layers(layers, 5, "hooks.post_mlp")

    assert chosen == expected
    assert {type(layer) for layer in chosen} == {int}  # they go onto the wire


@pytest.mark.parametrize(
    ("layers", "field", "message"),
    [
        (5, "hooks", "layer 5 is not an integer from -5 to 4"),
        ([0, -6], "hooks", "layer -6 is not"),
        ([True], "hooks", "layer True is not"),
        (["0"], "hooks", "layer '0' is not"),
        ([1.0], "hooks", "layer 1.0 is not"),
        (True, "hooks", 'expected "all", a layer'),
        ([], "hooks", 'expected "all", a layer'),
        ("ALL", "hooks", 'expected "all", a layer'),
        (b"\x00", "hooks", 'expected "all", a layer'),
        (None, "hooks", 'expected "all", a layer'),
        ({}, "hooks", "expected the keys"),
        ({"layer": [1]}, "hooks", "expected the keys"),
        ({"layers": []}, "hooks", "selects no layer"),
        ({"layers": 0}, r"hooks\.layers", "expected a list, got 0"),
        ({"layers": "all"}, r"hooks\.layers", "expected a list, got 'all'"),
        ({"layers": [9]}, r"hooks\.layers", "layer 9 is not"),
        ({"ranges": 3}, r"hooks\.ranges", "expected a list, got 3"),
        ({"ranges": [[1]]}, r"hooks\.ranges\[0\]", r"expected \[start, stop\]"),
        ({"ranges": [[0, 1], "01"]}, r"hooks\.ranges\[1\]", r"expected \[start, stop\]"),
        ({"ranges": [[2, 2]]}, r"hooks\.ranges\[0\]", "start 2 is not below stop 2"),
        ({"ranges": [[0, 6]]}, r"hooks\.ranges\[0\]", "bound 6 is not an integer from -5 to 5"),
        ({"ranges": [[False, 2]]}, r"hooks\.ranges\[0\]", "bound False is not"),
    ],
    ids=repr,
)
def test_what_chooses_no_layers_is_refused_with_its_field(layers: object, field: str, message: str) -> None:
    with pytest.raises(RequestError, match=rf"^{field}: .*{message}"):
        parse_layers(layers, 5, "hooks")


@pytest.mark.parametrize("layers", [Unread(11), {"layers": Unread(11)}, {"ranges": Unread(11)}])
def test_longer_lists_than_a_model_has_layers_are_refused_unread(layers: Any) -> None:
    with pytest.raises(RequestError, match=r"^hooks.*: lists 11 entries, at most 10 can be"):
        parse_layers(layers, 5, "hooks")


def test_more_hook_points_than_there_are_are_refused_unread() -> None:
    hooks = {f"hook-{index}": [0] for index in range(10_000)}
    with pytest.raises(RequestError, match=r"^hooks: 10000 hook points; known: "):
        parse_sites(hooks, 5, "hooks")


def test_layers_given_as_an_array_are_refused_and_not_compared_elementwise() -> None:
    with pytest.raises(RequestError, match=r"^hooks: expected"):
        parse_layers(np.array([1, 2]), 5, "hooks")


@pytest.mark.parametrize("layers", ["all", True, None, [], ()], ids=repr)
def test_the_final_norm_is_chosen_without_layers(layers: object) -> None:
    assert parse_sites({"final_norm": layers}, 5, "hooks") == (FINAL_NORM_SITE,)


@pytest.mark.parametrize("layers", [1, 0, 1.0, [0], [-1], False, "none", {}], ids=repr)
def test_layers_of_the_final_norm_are_refused(layers: object) -> None:
    with pytest.raises(RequestError, match=r"^hooks\.final_norm: final_norm has no layers"):
        parse_sites({"final_norm": layers}, 5, "hooks")


@pytest.mark.parametrize(("alias", "hook"), ALIASES.items())
def test_an_alias_chooses_the_same_sites(alias: str, hook: HookPoint) -> None:
    assert parse_sites({alias: "all"}, 2, "hooks") == parse_sites({hook.value: "all"}, 2, "hooks")


@pytest.mark.parametrize(
    ("name", "hook"), [("pre-attn", "pre_attn"), ("post-mlp", "post_mlp"), ("resid-pre", "pre_attn")]
)
def test_hyphens_are_read_as_underscores(name: str, hook: str) -> None:
    assert parse_sites({name: [1]}, 2, "hooks") == parse_sites({hook: [1]}, 2, "hooks")
    assert Site.parse(f"1.{name}") == Site.parse(f"1.{hook}")


@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("blocks.5.hook_resid_pre", "5.pre_attn"),
        ("blocks.5.attn.hook_z", "5.hook_z"),
        ("5.attn.hook_v", "5.v"),
        ("5.hook_rot_q", "5.q"),
        ("blocks.5.mlp.hook_post", "5.mlp_act"),
        ("model.layers.5.self_attn.o_proj.input", "5.hook_z"),
        ("model.language_model.layers.5.mlp.down_proj.input", "5.mlp_act"),
        ("embed", "0.pre_attn"),
        ("hook_embed", "0.pre_attn"),
    ],
)
def test_a_site_may_have_the_name_that_another_tool_gives_it(name: str, site: str) -> None:
    assert Site.parse(name).name == site


def test_the_embedding_is_the_stream_in_front_of_the_first_layer() -> None:
    assert parse_sites({"embed": "all", "mlp.hook_post": [1]}, 2, "hooks") == (
        Site(0, HookPoint.PRE_ATTN),
        Site(1, HookPoint.MLP_ACT),
    )
    configured = (Site(0, HookPoint.PRE_ATTN), Site(1, HookPoint.PRE_ATTN))
    assert parse_configured({"embed": "all"}, "hooks", num_layers=2, sites=configured) == configured[:1]
    with pytest.raises(RequestError, match=r"^hooks\.embed: embed has no layers"):
        parse_sites({"embed": [0]}, 2, "hooks")


def test_a_hook_point_named_twice_gives_each_site_once() -> None:
    sites = parse_sites({"post_mlp": [0, 1], "resid_post": [1]}, 2, "hooks")

    assert sites == (Site(0, HookPoint.POST_MLP), Site(1, HookPoint.POST_MLP))


@pytest.mark.parametrize("hooks", [None, {}, [], "post_mlp", ["post_mlp"]], ids=repr)
def test_hooks_that_are_no_object_are_refused(hooks: object) -> None:
    with pytest.raises(RequestError, match=r"^hooks: expected a non-empty object"):
        parse_sites(hooks, 5, "hooks")


@pytest.mark.parametrize("name", ["mlp", "POST_MLP", 3], ids=repr)
def test_an_unknown_hook_point_is_answered_with_the_known_ones(name: Any) -> None:
    with pytest.raises(RequestError, match=r"^hooks\..*: unknown hook point .* known: .*post_mlp") as caught:
        parse_sites({name: "all"}, 5, "hooks")

    assert caught.value.field == f"hooks.{name}"


@given(site_sets())
def test_a_site_map_resolves_to_the_same_sites(sites: tuple[Site, ...]) -> None:
    assert parse_sites(site_map(sites), 2, "hooks") == sites
