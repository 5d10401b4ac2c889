"""Vectors, files of them, directions and probes as HTML in a notebook."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np
import pytest

from headgate.capture.schema.sites import FINAL_NORM_SITE, HookPoint, Site
from headgate.steering import VectorFile, between, probes
from headgate.steering.vectors.phase_vectors import PhaseVectors

HOSTILE = "<script>alert('x')</script>"
ROW = np.array([3.0, 4.0])


def vectors(layers: range, hook: HookPoint = HookPoint.POST_MLP) -> PhaseVectors:
    made = PhaseVectors.from_rows({Site(layer, hook): ROW * (layer + 1) for layer in layers})
    assert made is not None
    return made


def test_vectors_show_norms_by_hook_point_and_layer() -> None:
    rows = {Site(2, HookPoint.PRE_ATTN): ROW, Site(4, HookPoint.POST_MLP): 2 * ROW, FINAL_NORM_SITE: 3 * ROW}
    made = PhaseVectors.from_rows(rows)
    assert made is not None

    shown = made._repr_html_()

    for text in ("3 of 2 values", "2.pre_attn</td><td>5<", "4.post_mlp</td><td>10<", "final_norm</td><td>15<"):
        assert text in shown
    assert "layer 2 to 4" in shown
    assert shown.count("<td style=background") == 2  # one for each layer that has a vector


def test_a_number_that_no_float_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit float32"):
        PhaseVectors.from_rows({Site(2, HookPoint.POST_MLP): [10**400, 1]})  # type: ignore[dict-item]


def test_a_file_shows_its_tiers_and_notes() -> None:
    file = VectorFile(vectors=vectors(range(2)), decode_vectors=vectors(range(2)), metadata={HOSTILE: HOSTILE})

    shown = file._repr_html_()

    assert "decode_vectors post_mlp" in shown
    assert escape(HOSTILE) in shown
    assert "<script" not in shown


def test_directions_list_the_best_sites_first() -> None:
    generator = np.random.default_rng(0)
    noise = {name: generator.standard_normal((40, 8)).astype(np.float32) for name in ("pos", HOSTILE)}
    groups = {name: {"1.post_mlp": rows, "2.post_mlp": rows + 9 * (name == "pos")} for name, rows in noise.items()}

    shown = between(groups, f"pos - {HOSTILE}")._repr_html_()

    assert shown.index("2.post_mlp") < shown.index("1.post_mlp")
    assert "1.0000" in shown
    assert "group pos: 40, 10 held out" in shown
    assert "<script" not in shown


@pytest.mark.parametrize("hidden", [None, "relu"])
def test_a_probe_shows_its_classes(hidden: Any) -> None:
    layer = hidden and probes.HiddenLayer(weight=np.ones((2, 5)), bias=np.zeros(2), activation=hidden)
    probe = probes.Probe(
        site=Site(3, HookPoint.POST_MLP),
        kind="mlp" if hidden else "linear",  # type: ignore[arg-type]
        weight=ROW[None],
        bias=np.array([0.5]),
        classes=(HOSTILE,),
        threshold=1.25,
        hidden=layer,
        metadata={"held_out_auroc": "0.987", "site": HOSTILE},
    )

    shown = probe._repr_html_()

    width = 5 if hidden else 2
    for text in (f"3.post_mlp, rows of {width} values", "1.25", "0.987", f"{escape(HOSTILE)}</td><td>5<"):
        assert text in shown
    assert "<script" not in shown


def test_all_of_them_are_bounded() -> None:
    many = {f"{HOSTILE} {number}": HOSTILE * 100 for number in range(500)}
    file = VectorFile(
        vectors=vectors(range(4000)), prefill_vectors=vectors(range(4000), HookPoint.PRE_ATTN), metadata=many
    )
    classes = tuple(f"{number}{HOSTILE}" for number in range(200))
    probe = probes.Probe(site=Site(3, HookPoint.POST_MLP), weight=np.ones((200, 4)), classes=classes, metadata=many)

    for shown in (file._repr_html_(), vectors(range(4000))._repr_html_(), probe._repr_html_()):
        assert len(shown.encode()) < 20_000
        assert "<script" not in shown
