"""Moments told over HTTP, printed and drawn."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from headgate.capture.schema.consumer import ConsumerContext, ModelInfo, SpecContext
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.results import ReportContext, StateReporter
from headgate.capture.schema.sites import HookPoint
from headgate.consumers.feed import EXAMPLE_MODEL, TIMEOUT_S, ExampleRequest, Feed
from headgate.consumers.moments import MomentsConsumer, open_moments
from headgate.consumers.moments.commands import app

HOOKS = {"post_mlp": [1, 2], "final_norm": "all"}


def fill(root: Path, **params: Any) -> None:
    """Moments of three requests under two tags."""
    params = {"root": str(root), "tags": ["other"], **params}
    feed = Feed(MomentsConsumer(params, ConsumerContext(instance_name="moments", model=EXAMPLE_MODEL)))
    for name, tag in (("a", "default"), ("b", "other"), ("c", "default")):
        context = SpecContext(instance_name="moments", model=EXAMPLE_MODEL, params=params, client_request_id=name)
        spec = MomentsConsumer.validate_client_spec({"hooks": HOOKS, "tag": tag}, context)
        feed.whole(ExampleRequest(spec, name, prompt=8, output=20 if name == "a" else 1))
    feed.consumer.close(TIMEOUT_S)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    fill(tmp_path / "moments")
    return tmp_path / "moments"


def ask(root: Path, query: dict[str, str], **allows: Any) -> dict[str, Any]:
    allowed = {"allows_site": lambda site: True, "allows_tag": lambda tag: True, **allows}
    return MomentsConsumer.report(ReportContext(params={"root": str(root)}, query=query, **allowed))


def array(packed: dict[str, Any]) -> Any:
    return np.frombuffer(base64.b64decode(packed["data"]), packed["dtype"]).reshape(packed["shape"])


def test_the_class_tells_of_its_state() -> None:
    assert isinstance(MomentsConsumer, StateReporter)
    assert not isinstance(ExampleRequest, StateReporter)


def test_everything_is_told_in_json(root: Path) -> None:
    found = ask(root, {})

    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["count"] == 9
    assert [(entry["tag"], entry["site"], entry["phase"]) for entry in found["entries"][:3]] == [
        ("default", "1.post_mlp", "prefill"),
        ("default", "1.post_mlp", "decode"),
        ("default", "2.post_mlp", "prefill"),
    ]
    first, moments = found["entries"][0], open_moments(root)
    site = moments.select("1.post_mlp", tag="default", phase="prefill")
    assert first["num_rows"] == 16
    assert first["mean_norm"] == site.mean_norm
    assert first["norm_quantiles"]["0.5"] == site.norm_quantile(0.5)
    assert first["total_variance"] == pytest.approx(site.variance.sum())
    assert [outlier["index"] for outlier in first["outliers"]] == site.outliers(5)
    assert found["written_at"] == moments.written_at


def test_the_query_chooses_and_includes_arrays(root: Path) -> None:
    query = {"site": "1.resid_post", "phase": "prefill", "tag": "other", "include": "mean,variance,covariance"}
    (entry,) = ask(root, query)["entries"]

    site = open_moments(root).select("1.post_mlp", tag="other", phase="prefill")
    assert np.array_equal(array(entry["mean"]), site.mean)
    assert np.array_equal(array(entry["variance"]), site.variance)
    assert np.array_equal(array(entry["covariance"]), site.covariance())
    assert (entry["covariance"]["kind"], entry["covariance"]["error"]) == ("full", 0.0)


def test_a_sketch_is_told_as_its_rows(tmp_path: Path) -> None:
    fill(tmp_path, covariance="sketch", rank=3)

    (entry,) = ask(tmp_path, {"site": "final_norm", "phase": "decode", "include": "covariance"})["entries"]

    site = open_moments(tmp_path).select("final_norm", phase="decode")
    rows = array(entry["covariance"])
    assert rows.shape == (3, 16)
    assert np.allclose(rows.T @ rows, site.covariance())
    assert entry["covariance"]["error"] == site.covariance_error > 0


def test_a_key_sees_its_own_tags_and_sites_alone(root: Path) -> None:
    found = ask(root, {}, allows_tag="other".__eq__, allows_site=lambda site: site.hook is HookPoint.FINAL_NORM)

    assert [(entry["tag"], entry["site"]) for entry in found["entries"]] == [("other", "final_norm")]


def test_before_the_first_write_there_is_nothing(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "missing"):
        assert ask(root, {}) == {"written_at": None, "settings": None, "entries": [], "count": 0}


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"colour": "red"}, "colour"),
        ({"phase": "late"}, "phase"),
        ({"site": "12.nowhere"}, "site"),
        ({"include": "everything"}, "include"),
        ({"include": "covariance"}, "include"),
    ],
    ids=str,
)
def test_wrong_queries_are_refused_by_field(root: Path, query: dict[str, str], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        ask(root, query)

    assert caught.value.field == field


def test_show_prints_a_table_and_draws_a_picture(root: Path, tmp_path: Path) -> None:
    picture = tmp_path / "moments.png"

    shown = CliRunner().invoke(app, ["show", str(root), "--picture", str(picture)], env={"COLUMNS": "160"})

    assert shown.exit_code == 0, shown.output
    assert "1.post_mlp" in shown.output
    assert "example-model, hidden size 16; covariance: full; norms within 1.00%" in shown.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_moments_without_covariance_can_be_drawn(tmp_path: Path) -> None:
    fill(tmp_path / "moments", covariance="none")
    picture = tmp_path / "moments.png"

    shown = CliRunner().invoke(app, ["show", str(tmp_path / "moments"), "--tag", "other", "--picture", str(picture)])

    assert shown.exit_code == 0, shown.output
    assert picture.stat().st_size > 1000


def test_show_prints_json(root: Path) -> None:
    shown = CliRunner().invoke(app, ["show", str(root), "--tag", "other", "--json"])

    document = json.loads(shown.output)
    assert {entry["tag"] for entry in document["entries"]} == {"other"}
    assert document["settings"]["hidden_size"] == EXAMPLE_MODEL.hidden_size


@pytest.mark.parametrize("arguments", [["nowhere"], ["moments", "--tag", "nobody"]], ids=" ".join)
def test_show_says_what_is_missing(root: Path, arguments: list[str]) -> None:
    shown = CliRunner().invoke(app, ["show", str(root.parent / arguments[0]), *arguments[1:]])

    assert shown.exit_code == 1
    assert "moments" in shown.stderr


def test_whitening_makes_the_covariance_the_identity(tmp_path: Path) -> None:
    fill(tmp_path)
    site = open_moments(tmp_path)["1.post_mlp"]

    whitened = site.whitening() @ site.covariance() @ site.whitening()

    assert np.allclose(whitened, np.eye(EXAMPLE_MODEL.hidden_size), atol=1e-8)


def test_models_of_any_width_are_kept_by_the_right_kind(tmp_path: Path) -> None:
    from headgate.consumers.moments.consumer import parse_params

    params = parse_params({"root": "x"})
    widths = {
        width: ModelInfo(name="m", num_layers=1, hidden_size=width, dtype="float32", sites=()) for width in (1024, 1025)
    }

    assert {width: params.settings(model, "m").covariance for width, model in widths.items()} == {
        1024: "full",
        1025: "sketch",
    }


def test_show_cuts_no_number_off_in_a_narrow_terminal_or_a_pipe(root: Path) -> None:
    narrow, wide = (CliRunner().invoke(app, ["show", str(root)], env={"COLUMNS": width}) for width in ("40", "300"))

    def cells(output: str) -> list[list[str]]:
        return [line.split() for line in output.splitlines() if "post_mlp" in line]

    assert "…" not in narrow.output
    assert cells(narrow.output) == cells(wide.output) != []
