"""Directions between groups that have names: their rows, counts, and separation on rows that were held out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headgate.capture.schema.sites import Site
from headgate.consumers.filesystem import FilesystemConsumer
from headgate.consumers.reader import open_captures
from headgate.steering import between, load, save
from headgate.steering.probes import ProbeError
from headgate.steering.probes.groups import Expression
from headgate.steering.vectors.directions import mean_difference
from tests.fakes.capturing import Capturing, spec_context
from tests.fakes.stored_probes import OUTPUT, PROMPT, SITE, WIDTH, ClassRequest, direction

OTHER = Site.parse("1.post_mlp")
PER_GROUP = 12


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Requests of three tags; those of ``pos_3`` have odd numbers, which lie at the other end of `direction`."""
    place = tmp_path_factory.mktemp("roles")
    files = Capturing(place)
    for number in range(PER_GROUP):
        for tag, odd in (("pos_3", 1), ("default_1", 0), ("default_2", 0)):
            wanted = {"hooks": {"post_mlp": [1, 3]}, "positions": "all", "tag": tag}
            name = f"{tag}-{2 * number + odd}"
            spec = FilesystemConsumer.validate_client_spec(wanted, spec_context(files.params, name))
            files.feed.whole(ClassRequest(spec, f"request-{tag}-{2 * number + odd}", prompt=PROMPT, output=OUTPUT))
    files.close()
    return place


def response_means(root: Path, tag: str, site: Site) -> Any:
    return np.stack(
        [
            capture.numpy(site)[capture.positions >= PROMPT].astype(np.float64).mean(axis=0)
            for capture in open_captures(root)
            if capture.tag == tag
        ]
    )


def test_a_role_is_told_from_the_default_at_the_site_where_they_differ(root: Path, tmp_path: Path) -> None:
    role = between(root, "pos_3 - default_1", normalize=True)

    assert role.vectors.sites == (OTHER, SITE)
    assert role.best == SITE
    assert role.separation[SITE] == 1.0
    assert role.separation[OTHER] < 1.0
    assert float(role.at("3.post_mlp").float32()[0] @ direction()) > 0.95
    assert {name: dict(found) for name, found in role.counts.items()} == {
        "default_1": {"requests": 12, "held_out": 3},
        "pos_3": {"requests": 12, "held_out": 3},
    }
    save(tmp_path / "role.safetensors", role)
    file = load(tmp_path / "role.safetensors")
    assert file.vectors == role.vectors
    assert file.metadata == role.metadata
    assert (file.metadata["expression"], file.metadata["pooling"]) == ("pos_3 - default_1", "response_mean")
    assert json.loads(file.metadata["auroc"])["3.post_mlp"] == 1.0
    assert json.loads(file.metadata["counts"])["pos_3"] == {"requests": 12, "held_out": 3}


def test_with_nothing_held_out_it_is_the_difference_of_all_means(root: Path) -> None:
    one = between(root, "pos_3 - default_1", sites="3.post_mlp", held_out=0)
    two = between(root, "pos_3 - default_1 + default_2", sites=SITE, held_out=0)

    plus = response_means(root, "pos_3", SITE)
    minus = [response_means(root, tag, SITE) for tag in ("default_1", "default_2")]
    for made, negative in ((one, minus[0]), (two, np.concatenate(minus))):
        expected = mean_difference({SITE: plus}, {SITE: negative})
        np.testing.assert_allclose(made.vectors.float32(), expected.float32(), rtol=1e-5, atol=1e-5)
        assert made.separation == {}
        assert "auroc" not in made.metadata
        with pytest.raises(ProbeError, match="no rows were held out"):
            _ = made.best


@pytest.mark.parametrize("pooling", ["last_prompt", "prompt_mean", "token"])
def test_poolings_of_probes_are_taken(root: Path, pooling: Any) -> None:
    role = between(root, "pos_3 - default_1", sites=[SITE], pooling=pooling)

    assert role.metadata["pooling"] == pooling
    if pooling != "prompt_mean":  # whose mean the sink at position 0 outweighs
        assert role.separation[SITE] > 0.9
    assert role.counts["pos_3"]["requests"] == PER_GROUP


@pytest.mark.parametrize("make", [np.asarray, torch.tensor, lambda rows: torch.tensor(rows).bfloat16()])
def test_groups_may_be_arrays(make: Any) -> None:
    generator = np.random.default_rng(2)
    rows = {name: generator.standard_normal((40, 8)).astype(np.float32) for name in ("pos", "neg", "unused")}
    rows["pos"] += 3
    groups = {name: {"2.post_mlp": make(array), OTHER: make(2 * array)} for name, array in rows.items()}

    trait = between(groups, "pos - neg", held_out=0.5)
    bare = between({name: make(array) for name, array in rows.items()}, "pos - neg", sites="2.post_mlp", held_out=0.5)

    assert [site.name for site in trait.vectors.sites] == ["1.post_mlp", "2.post_mlp"]
    assert bare.vectors == trait.at("2.post_mlp")
    assert min(trait.separation.values()) > 0.98
    assert trait.counts["pos"] == {"requests": 40, "held_out": 20}
    assert trait.metadata["pooling"] == "none"


def test_rows_that_are_held_out_make_no_difference_to_the_direction() -> None:
    generator = np.random.default_rng(2)
    noise = {name: generator.standard_normal((200, 64)).astype(np.float32) for name in ("pos", "neg")}

    fair = between(noise, "pos - neg", sites="0.post_mlp", held_out=0.5)

    assert 0.3 < fair.separation[Site.parse("0.post_mlp")] < 0.7  # on its own rows it would be above 0.9
    assert between(noise, "pos - neg", sites="0.post_mlp", held_out=0.5).vectors == fair.vectors
    assert between(noise, "pos - neg", sites="0.post_mlp", held_out=0.5, seed=1).vectors != fair.vectors


def test_expressions_are_read() -> None:
    assert Expression.parse("pos_3 - default_1") == Expression(("pos_3",), ("default_1",))
    assert Expression.parse("a-b + c  -  d e") == Expression(("a-b", "c"), ("d e",))
    for text in ("pos", "pos-neg", "a - b - c", "a - ", " - b", "a +  - b", "", 3):
        with pytest.raises(ProbeError, match="expected a difference of two groups"):
            Expression.parse(text)  # type: ignore[arg-type]
    with pytest.raises(ProbeError, match="a group is named twice"):
        Expression.parse("a + b - a")


ROWS = np.ones((4, 3), np.float32)
WRONG = {
    "an unknown group": ({"a": ROWS}, {}, "no group is called 'b'; there are a"),
    "no site": ({"a": ROWS, "b": ROWS}, {"sites": None}, "one array is of one site; name it"),
    "no sites": ({"a": ROWS, "b": ROWS}, {"sites": []}, "expected one or more sites, got none"),
    "no such site": ({"a": {"1.post_mlp": ROWS}, "b": {"2.post_mlp": ROWS}}, {}, "b: has no rows at 1.post_mlp; there"),
    "no common site": (
        *({"a": {"1.post_mlp": ROWS}, "b": {"2.post_mlp": ROWS}}, {"sites": None}),
        "the groups have no site in common",
    ),
    "equal means": ({"a": ROWS, "b": ROWS}, {}, "a - b: the two sets do not differ at 1.post_mlp"),
    "one row": ({"a": ROWS[:1], "b": ROWS}, {}, "one request alone is labelled 'a'"),
    "other widths": ({"a": ROWS, "b": ROWS[:, :2]}, {}, "1.post_mlp: expected rows of one width, got {'a': 3, 'b': 2}"),
    "one axis": ({"a": ROWS[0], "b": ROWS}, {}, r"a at 1.post_mlp: expected rows \[n, hidden\]"),
    "not finite": ({"a": ROWS, "b": ROWS * np.inf}, {}, "row 4 is not finite"),
    "other counts": (
        {"a": {"1.post_mlp": ROWS, "2.post_mlp": ROWS[:2]}, "b": {"1.post_mlp": ROWS, "2.post_mlp": ROWS}},
        {"sites": None},
        "2.post_mlp: has .* rows, other than 1.post_mlp",
    ),
    "a share of 1": ({"a": ROWS, "b": ROWS}, {"held_out": 1.0}, "expected a share held_out from 0 to below 1"),
    "a pooling": ({"a": ROWS, "b": ROWS}, {"pooling": "max"}, "pooling: expected one of token, .*response_mean"),
}


@pytest.mark.parametrize(("groups", "options", "message"), WRONG.values(), ids=WRONG)
def test_groups_that_do_not_fit_are_refused(groups: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ProbeError, match=message):
        between(groups, "a - b", **{"sites": "1.post_mlp", **options})


def test_captures_that_do_not_fit_are_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match="no tag of the captures is called 'pos_9'; there are default_1, default"):
        between(root, "pos_9 - default_1")
    with pytest.raises(ProbeError, match=r"/.*: 7\.post_mlp was not captured; sites that were: 1\.post_mlp"):
        between(root, "pos_3 - default_1", sites="7.post_mlp")
    files = Capturing(tmp_path)
    for tag in ("a", "b"):
        wanted = {"hooks": {"post_mlp": [3]}, "positions": "last_prompt", "tag": tag}
        spec = FilesystemConsumer.validate_client_spec(wanted, spec_context(files.params, f"{tag}-1"))
        files.feed.whole(ClassRequest(spec, f"request-{tag}-1", prompt=PROMPT, output=OUTPUT))
    files.close()
    with pytest.raises(ProbeError, match=r'0 of 3 rows are there that response_mean needs.*"all_generated"'):
        between(tmp_path, "a - b")
    with pytest.raises(ProbeError, match=r"no direction at 2\.post_mlp; there are 3\.post_mlp"):
        between(root, "pos_3 - default_1", sites=SITE).at("2.post_mlp")
    assert between(root, "pos_3 - default_1").vectors.hidden_size == WIDTH
