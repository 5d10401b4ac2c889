"""Checks of SAEs on captured rows: figures, and what is found where site, factor or threshold are wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headgate.capture.engine.contracts.parts import stored_requests
from headgate.capture.schema.errors import CaptureFileError
from headgate.capture.schema.sites import Site
from headgate.steering.features.check import CoderReport, check, measure, sample, with_figures
from headgate.steering.features.source_coder import CoderKind, SourceCoder
from headgate.steering.features.sparse_coder import coder_of
from headgate.steering.features.tensors import FeatureFileError
from tests.fakes.sparse_coders import tensor
from tests.fakes.stored_features import L0, OTHER, SITE, WIDTH, activations, dictionary, mean, store, trained


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("captures")
    store(root)
    return str(root)


def checked(source: SourceCoder, captures: str) -> CoderReport:
    return check(coder_of(source, Path("x")), captures)


def test_a_right_sae_has_the_figures_it_declares(captures: str) -> None:
    report = checked(trained(), captures)

    assert report.problems == report.findings == []
    assert report.l0 == L0
    assert report.fvu is not None
    assert 0 < report.fvu < 0.02
    assert (report.site, report.num_rows, report.num_left_out) == ("3.post_mlp", 6 * 38, 6)
    assert (report.num_dead, report.threshold) == (0, None)


def test_fvu_and_l0_are_their_definitions(captures: str) -> None:
    coder = coder_of(trained(least=1.5), Path("x"))
    x = sample(captures, SITE, 100_000).rows[SITE].astype(np.float64)
    p = (x - mean(SITE)) @ dictionary(SITE).T
    a = p * (p > 1.5)

    figures = measure(coder, x, x)

    assert figures.l0 == pytest.approx((a > 0).sum(axis=1).mean())
    error, total = ((x - a @ dictionary(SITE) - mean(SITE)) ** 2).sum(), ((x - x.mean(axis=0)) ** 2).sum()
    assert figures.fvu == pytest.approx(error / total, rel=1e-5)
    np.testing.assert_allclose(figures.largest, a.max(axis=0), rtol=1e-5)


def test_a_wrong_site_is_found(captures: str) -> None:
    report = checked(trained(read_site=OTHER), captures)

    assert any("FVU is" in problem for problem in report.problems)
    assert report.findings[0].startswith("at the site 3.post_mlp: L0 3, FVU 0.0")


@pytest.mark.parametrize("scale", [0.05, 1 / 3, 7.0])
def test_a_wrong_factor_on_rows_is_found(scale: float, captures: str) -> None:
    # What trains on rows times `scale` has thresholds and biases of that size: without the factor it is off.
    report = checked(trained(scale), captures)

    assert report.problems
    found = [re.match(r"with rows times (\S+) ", finding) for finding in report.findings]
    factors = [float(match[1]) for match in found if match]
    assert factors
    assert scale / 1.5 <= factors[0] <= scale * 1.5
    assert checked(trained(scale, scale=scale), captures).problems == []


def test_a_wrong_threshold_is_found(captures: str) -> None:
    for factor in (0.001, 4.0):
        report = checked(trained(least=0.5 * factor), captures)

        assert report.problems
        found = [re.match(r"with thresholds times (\S+):", finding) for finding in report.findings]
        (match,) = [match for match in found if match]
        assert 0.2 <= 0.5 * factor * float(match[1]) <= 1.0
        assert "L0 3" in match.string


def test_a_sae_of_something_else_has_problems_and_no_findings(captures: str) -> None:
    rows = np.linalg.qr(np.random.default_rng(1).standard_normal((WIDTH, WIDTH)))[0]

    report = checked(trained(encoder=tensor(rows), least=2.0, declared={"fvu": 0.05}), captures)

    assert any("but 0.05 is declared" in problem for problem in report.problems)
    assert all("site" not in finding for finding in report.findings)


def test_transcoders_are_judged_by_the_rows_they_should_write(captures: str) -> None:
    # Rows of both sites are made of the same activations, so a transcoder from one to the other exists.
    source = trained(write_sites=(OTHER,), decoders=(tensor(dictionary(OTHER)),), decoder_biases=(mean(OTHER),))
    assert checked(source, captures).problems == []
    report = checked(replace(source, decoders=(tensor(dictionary(SITE)),)), captures)
    assert any("FVU" in problem for problem in report.problems)

    elsewhere = checked(replace(source, write_sites=(Site.parse("2.mlp_out"),)), captures)
    assert (elsewhere.fvu, elsewhere.problems) == (None, [])
    both = checked(replace(source, write_sites=(OTHER, SITE), decoders=source.decoders * 2,
                           decoder_biases=source.decoder_biases * 2), captures)  # fmt: skip
    assert both.fvu is None, "others write these sites, too"


def test_a_threshold_stands_for_top_k(captures: str) -> None:
    source = trained(kind=CoderKind.TOPK, k=3, threshold=None)
    coder = coder_of(source, Path("x"))
    report = check(coder, captures)
    assert report.problems == []
    assert report.threshold is not None
    assert 1.0 < report.threshold < 1.6, "the mean of the least of three numbers between 1 and 3"

    rows = sample(captures, SITE, 1000).rows[SITE]
    measured = coder_of(with_figures(source, measure(coder, rows, None)), Path("x"))
    assert measured.decision == "threshold"
    largest = measured.max_activations([5])
    assert largest is not None
    assert largest[0] == pytest.approx(max(coder.encode(rows)[:, 5]))


def test_rows_that_begin_prompts_and_those_that_are_not_finite_are_left_out(captures: str) -> None:
    found = sample(captures, SITE, 100_000)
    assert len(found.rows[SITE]) == 6 * 38
    assert np.linalg.norm(found.rows[SITE], axis=1).max() < 20
    few = sample(captures, SITE, 12, None)
    assert {site: len(rows) for site, rows in few.rows.items()} == {SITE: 12, OTHER: 12}
    positions = [int(request.positions[-1]) for request in stored_requests(captures)]
    last = mean(SITE) + activations("request-0", positions[0]) @ dictionary(SITE)
    assert np.abs(few.rows[SITE] - last).max(axis=1).min() < 0.3, "rows are spread up to the last"


def test_requests_that_lack_the_site_are_left_aside(tmp_path: Path) -> None:
    store(tmp_path, 2)
    store(tmp_path / "more", 3, hooks={"post_mlp": [1]})
    (tmp_path / "more/default").rename(tmp_path / "other")

    found = sample(str(tmp_path), SITE, 1000, None)
    assert {site: len(rows) for site, rows in found.rows.items()} == {SITE: 76, OTHER: 76}
    found = sample(str(tmp_path), OTHER, 1000, None)
    assert {site: len(rows) for site, rows in found.rows.items()} == {OTHER: 5 * 38}


def test_rows_of_some_columns_are_neither_checked_nor_compared(captures: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: Any = list(stored_requests(captures))
    requests[0].metadata["columns"] = {SITE.name: ((0, 4),)}
    monkeypatch.setattr("headgate.steering.features.check.stored_requests", lambda root: requests)

    assert list(sample(captures, OTHER, 12, None).rows) == [OTHER]
    with pytest.raises(CaptureFileError, match=f"has the columns .* of {SITE.name} alone; capture whole rows"):
        sample(captures, SITE, 12)


def test_what_cannot_be_checked_is_said(captures: str, tmp_path: Path) -> None:
    with pytest.raises(FeatureFileError, match=r"0.mlp_in was not captured; sites that were: 1.post_mlp, 3"):
        checked(trained(read_site=Site.parse("0.mlp_in")), captures)
    with pytest.raises(FeatureFileError, match="x has no site; name it: --site"):
        checked(trained(read_site=None), captures)
    wide = trained(
        encoder=tensor(np.eye(WIDTH, 12)), decoders=(tensor(np.eye(WIDTH, 12)),), decoder_biases=(np.zeros(12),)
    )
    with pytest.raises(FeatureFileError, match="reads rows of width 12, but those captured at 3"):
        checked(wide, captures)
    with pytest.raises(FeatureFileError, match=r"3.post_mlp was not captured; sites that were: none"):
        checked(trained(), str(tmp_path))
    with pytest.raises(CaptureFileError, match="no such folder"):
        checked(trained(), str(tmp_path / "missing"))
