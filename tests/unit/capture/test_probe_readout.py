"""Probes as readouts: the scores of the definition, whatever probes share a site."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.probe import Activation, HiddenLayer, Probe, ProbeError, ProbeReadout
from headgate.capture.schema.sites import Site

WIDTH = 12
SITE = Site.parse("3.post_mlp")
CPU = torch.device("cpu")
KINDS = ("linear", "cosine", *Activation)


def made(kind: str, num_classes: int, seed: int) -> Probe:
    rng = np.random.default_rng(seed)
    classes = tuple(f"class-{number}" for number in range(num_classes))
    bias = rng.normal(size=num_classes)
    if kind in ("linear", "cosine"):
        weight = rng.normal(size=(num_classes, WIDTH))
        return Probe(site=SITE, kind=kind, weight=weight, bias=None if kind == "cosine" else bias, classes=classes)  # type: ignore[arg-type]
    hidden = HiddenLayer(weight=rng.normal(size=(5, WIDTH)), bias=rng.normal(size=5), activation=Activation(kind))  # type: ignore[arg-type]
    weight = rng.normal(size=(num_classes, 5))
    return Probe(site=SITE, kind="mlp", weight=weight, bias=bias, hidden=hidden, classes=classes)  # type: ignore[arg-type]


PROBES = st.lists(
    st.builds(made, st.sampled_from(KINDS), st.integers(1, 3), st.integers(0, 99)), min_size=1, max_size=6
)


@given(probes=PROBES, num_rows=st.integers(1, 5), scale=st.sampled_from([1e-20, 1.0, 1e4]), twice=st.booleans())
def test_outputs_are_the_scores_of_each_probe_in_order(
    probes: list[Probe], num_rows: int, scale: float, twice: bool
) -> None:
    probes = probes * 2 if twice else probes  # the same file, by two names
    rows = np.random.default_rng(num_rows).normal(size=(num_rows, WIDTH)) * scale
    rows[0] = 0.0  # of no direction
    readout = ProbeReadout(probes)

    found = readout.on(CPU)(torch.from_numpy(rows)).numpy()

    assert found.shape == (num_rows, readout.num_outputs)
    for probe, columns in zip(probes, readout.columns(), strict=True):
        np.testing.assert_allclose(found[:, columns], probe.scores(rows), rtol=1e-9, atol=1e-30)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_has_no_finite_score(kind: str, value: float) -> None:
    rows = np.ones((2, WIDTH))
    rows[1, 3] = value

    found = ProbeReadout([made(kind, 1, 0)]).on(CPU)(torch.from_numpy(rows))

    assert torch.isfinite(found[:, 0]).tolist() == [True, False]


def test_the_key_tells_weights_and_their_order_apart() -> None:
    one, other = made("linear", 1, 1), made("linear", 1, 2)

    keys = [ProbeReadout(probes).key for probes in ([one], [other], [one, other], [other, one], [made("linear", 1, 1)])]

    assert keys[0] == keys[4]
    assert len(set(keys)) == 4


def test_probes_of_several_sites_or_widths_are_no_readout() -> None:
    narrow = Probe(site=SITE, weight=[[1.0]])  # type: ignore[arg-type]
    elsewhere = Probe(site=Site.parse("2.post_mlp"), weight=made("linear", 1, 0).weight)

    for other in (narrow, elsewhere):
        with pytest.raises(ProbeError, match="one site and one width"):
            ProbeReadout([made("linear", 1, 0), other])
