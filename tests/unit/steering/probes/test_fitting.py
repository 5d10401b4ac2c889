"""`fit`: what it finds, whom it holds out, and what it says is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.capture.engine.contracts.parts import stored_requests
from headgate.capture.schema.errors import CaptureFileError
from headgate.steering.probes import Probe, ProbeError, evaluate, fit
from headgate.steering.probes.examples import Examples, examples_of
from headgate.steering.probes.fitting import split
from tests.fakes.stored_probes import PROMPT, SITE, WIDTH, direction, store

NAMES = ("angry", "calm", "sad")


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    root = tmp_path_factory.mktemp("captures")
    return root, store(root)


def drawn(num_rows: int = 400, gap: float = 1.5, num_classes: int = 2) -> tuple[Any, list[int]]:
    """Rows of classes along axes, and their classes."""
    classes = np.arange(num_rows) % num_classes
    rows = np.random.default_rng(3).normal(size=(num_rows, 8))
    rows[np.arange(num_rows), classes] += gap * 2
    return rows.astype(np.float32), classes.tolist()


def test_mean_difference_is_the_unit_vector_between_the_means_and_zero_halfway() -> None:
    rows, labels = drawn()
    flags = np.array(labels, bool)

    probe = fit(rows, labels, at=SITE, held_out=0)

    plus, minus = rows[flags].mean(axis=0, dtype=float), rows[~flags].mean(axis=0, dtype=float)
    np.testing.assert_allclose(probe.weight[0], (plus - minus) / np.linalg.norm(plus - minus), rtol=1e-6)
    assert probe.scores([(plus + minus) / 2])[0, 0] == pytest.approx(0, abs=1e-6)
    assert probe.metadata["threshold_rows"] == "train"
    assert "held_out_auroc" not in probe.metadata


@pytest.mark.parametrize("method", ["mean_difference", "logistic"])
def test_figures_are_those_of_the_requests_that_were_held_out(method: Any) -> None:
    if method == "logistic":
        pytest.importorskip("sklearn", exc_type=ImportError)
    rows, labels = drawn()

    probe = fit(rows, labels, at=SITE, method=method, fpr=0.1, seed=4)

    names = np.array([str(label) for label in labels])
    train, test = split(Examples(rows=rows, labels=names, groups=np.arange(len(rows))), 0.25, 4)
    assert test is not None
    assert (len(train.rows), len(test.rows)) == (300, 100)
    flags, scores = test.labels == "1", probe.scores(test.rows)[:, 0]
    meta = probe.metadata
    assert float(meta["held_out_accuracy"]) == pytest.approx(((scores > 0) == flags).mean(), abs=1e-5)
    pairs = scores[flags][:, None] - scores[~flags]
    assert float(meta["held_out_auroc"]) == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean(), abs=1e-5)
    assert probe.threshold == np.sort(scores[~flags])[::-1][5]
    assert float(meta["held_out_fpr"]) == 0.1
    assert float(meta["held_out_auroc"]) > 0.95
    assert (meta["method"], meta["seed"], meta["held_out_rows"]) == (method, "4", "100")


def test_logistic_regression_tells_several_classes_apart() -> None:
    pytest.importorskip("sklearn", exc_type=ImportError)
    rows, labels = drawn(num_classes=3)
    names = [NAMES[label] for label in labels]

    probe = fit(rows, names, at=SITE, method="logistic")

    assert (probe.classes, probe.threshold) == (NAMES, None)
    assert float(probe.metadata["held_out_accuracy"]) > 0.9
    assert evaluate(probe, rows, names).accuracy == pytest.approx(
        (np.array(NAMES)[probe.scores(rows).argmax(axis=1)] == names).mean()
    )
    one = fit(rows, names, at=SITE, positive="sad")
    assert one.classes == ("sad",)
    with pytest.raises(ProbeError, match=r"mean_difference tells two classes apart; .* angry, calm, sad"):
        fit(rows, names, at=SITE)


def test_constant_values_of_rows_are_no_obstacle() -> None:
    pytest.importorskip("sklearn", exc_type=ImportError)
    rows, labels = drawn()
    rows[:, 5] = 7.0

    assert float(fit(rows, labels, at=SITE, method="logistic").metadata["held_out_auroc"]) > 0.95


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=8, max_size=30),
    share=st.floats(0.05, 0.9),
    seed=st.integers(0, 9),
)
def test_a_split_cuts_no_request_and_holds_out_a_share_of_each_class(sizes: list[int], share: float, seed: int) -> None:
    groups = np.repeat(np.arange(len(sizes)), sizes)
    labels = np.where(groups % 2, "a", "b")
    examples = Examples(rows=np.arange(len(groups), dtype=np.float32)[:, None], labels=labels, groups=groups)

    train, test = split(examples, share, seed)

    assert test is not None
    assert set(train.groups) | set(test.groups) == set(groups)
    assert not set(train.groups) & set(test.groups)
    for label in ("a", "b"):
        total = len(set(groups[labels == label]))
        held = len(set(test.groups[test.labels == label]))
        assert held == min(max(1, round(share * total)), total - 1)
    again = split(examples, share, seed)[1]
    assert again is not None
    assert again.rows.tolist() == test.rows.tolist()


def test_a_class_of_one_request_cannot_be_split() -> None:
    rows, _ = drawn(5)

    with pytest.raises(ProbeError, match=r"one request alone is labelled '1', .* --held-out 0"):
        fit(rows, [0, 0, 0, 0, 1], at=SITE)


@pytest.mark.parametrize("pooling", ["token", "last_prompt", "prompt_mean"])
def test_captured_rows_are_pooled(captured: tuple[Path, dict[str, int]], pooling: Any) -> None:
    root, labels = captured

    found = examples_of(str(root), labels, SITE, pooling)

    expected = []
    for request in stored_requests(str(root)):
        rows = request.numpy(SITE).astype(np.float64)
        prompt = rows[:PROMPT]
        pooled = {"token": rows[1:], "last_prompt": prompt[-1:], "prompt_mean": prompt.mean(axis=0, keepdims=True)}
        expected.append(pooled[pooling])
    np.testing.assert_allclose(found.rows, np.concatenate(expected), rtol=1e-6)
    assert len(set(found.groups)) == 40
    sizes = [len(rows) for rows in expected]
    assert (
        found.labels.tolist()
        == np.repeat([str(labels[r.request_id]) for r in stored_requests(str(root))], sizes).tolist()
    )


def test_a_probe_of_captures_finds_the_direction_and_its_figures_repeat(captured: tuple[Path, dict[str, int]]) -> None:
    root, labels = captured

    probe = fit(root, labels, at="3.post_mlp", pooling="token", fpr=0.05)

    assert float(probe.weight[0] @ direction()) > 0.98
    assert probe.model == "example-model"
    judged = evaluate(probe, root, labels, fpr=0.05)
    assert judged.auroc is not None
    assert judged.auroc > 0.99
    assert (judged.num_requests, judged.num_rows, judged.num_positive) == (40, 40 * 8, 20 * 8)
    assert judged.own is not None
    assert judged.own.threshold == probe.threshold


def test_samples_of_one_request_stay_together(tmp_path: Path) -> None:
    labels = store(tmp_path, 4, num_samples=3)

    found = examples_of(str(tmp_path), labels, SITE, "last_prompt")

    assert sorted(found.groups.tolist()) == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3


def test_requests_without_labels_and_labels_without_requests_are_named(captured: tuple[Path, dict[str, int]]) -> None:
    root, labels = captured
    some = {name: label for name, label in labels.items() if name not in ("client-3", "client-7")}

    with pytest.raises(
        ProbeError, match=r"2 captured requests have no label: default/client-3, default/client-7; label"
    ):
        fit(root, some, at=SITE)
    with pytest.raises(ProbeError, match=r"40 captured requests have no label: .* and 30 more; label them, or keep"):
        fit(root, {"nobody": 1}, at=SITE)
    with pytest.raises(ProbeError, match=r"1 labels are of no captured request: nobody"):
        fit(root, {**labels, "nobody": 1}, at=SITE)
    tagged = {f"default/{name}": label for name, label in labels.items()}
    assert fit(root, tagged, at=SITE).sha256 == fit(root, labels, at=SITE).sha256
    with pytest.raises(ProbeError, match="all are labelled x"):
        fit(root, {"default": "x"}, at=SITE)


def test_rows_that_were_not_captured_are_named(captured: tuple[Path, dict[str, int]], tmp_path: Path) -> None:
    root, labels = captured
    store(tmp_path / "last", 4, positions="last_prompt")
    store(tmp_path / "first", 4, positions=[0])
    few = {f"client-{number}": number % 2 for number in range(4)}

    with pytest.raises(ProbeError, match=r"default/client-0: 2.post_mlp was not captured; .* 1.post_mlp, 3.post_mlp"):
        fit(root, labels, at="2.post_mlp")
    with pytest.raises(ProbeError, match=r'1 of 6 rows are there that prompt_mean needs, .* "all_prompt"'):
        fit(tmp_path / "last", few, at=SITE, pooling="prompt_mean")
    with pytest.raises(ProbeError, match=r'0 of 1 rows are there that last_prompt needs, .* "last_prompt"'):
        fit(tmp_path / "first", few, at=SITE)
    with pytest.raises(ProbeError, match="no rows but that of position 0"):
        fit(tmp_path / "first", few, at=SITE, pooling="token")


def test_rows_of_which_some_columns_were_captured_are_refused(captured: tuple[Path, dict[str, int]]) -> None:
    root, labels = captured
    requests: Any = list(stored_requests(str(root)))
    requests[3].metadata["columns"] = {"1.post_mlp": ((0, WIDTH),)}
    fit(requests, labels, at=SITE)
    requests[3].metadata["columns"] = {SITE.name: ((0, 8), (8, WIDTH))}

    with pytest.raises(
        CaptureFileError, match=r"has the columns \[\[0, 8\], \[8, 16\]\] of 3.post_mlp alone; capture whole"
    ):
        fit(requests, labels, at=SITE)


ROWS, LABELS = drawn(8)
BAD: dict[str, tuple[tuple[Any, Any], dict[str, Any], str]] = {
    "no site": ((ROWS, LABELS), {"at": "x"}, "at: not a site"),
    "another method": ((ROWS, LABELS), {"method": "lda"}, "'mean_difference' or 'logistic'"),
    "another pooling": ((ROWS, LABELS), {"pooling": "max"}, "pooling: expected one of"),
    "all held out": ((ROWS, LABELS), {"held_out": 1.0}, "from 0 to below 1"),
    "no penalty": ((ROWS, LABELS), {"regularization": 0.0}, "above 0"),
    "a rate of 1": ((ROWS, LABELS), {"fpr": 1.0}, "false-positive rate"),
    "labels of other rows": ((ROWS, LABELS[1:]), {}, "expected 8 labels, one for each row; got 7"),
    "labels by name": ((ROWS, {"a": 1}), {}, "got labels by request"),
    "a label of None": ((ROWS, [None, *LABELS[1:]]), {}, "label 0: expected a label"),
    "one class": ((ROWS, [1] * 8), {}, "two classes or more"),
    "nobody positive": ((ROWS, ["a", "b"] * 4), {}, "which label is positive, 'a' or 'b'"),
    "an unknown class": ((ROWS, LABELS), {"positive": "x"}, "no request has the label 'x'; labels: 0, 1"),
    "one row": ((ROWS[0], LABELS), {}, "the shape [8]"),
    "no captures": (([], {"a": 1}), {}, "no captured requests; expected the root"),
    "labels as a list": (([], [1]), {}, "labels by request"),
    "NaN": ((np.full((8, 2), np.nan), LABELS), {}, "row 0 is not finite"),
    "the same means": ((np.ones((8, 2)), LABELS), {}, "the same mean at 3.post_mlp"),
}


@pytest.mark.parametrize(("data", "options", "message"), BAD.values(), ids=BAD.keys())
def test_what_cannot_be_fitted_is_told(data: tuple[Any, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ProbeError) as caught:
        fit(*data, **{"at": SITE, **options})

    assert message in str(caught.value)


def test_tensors_are_rows_too() -> None:
    rows, labels = drawn()

    assert fit(torch.from_numpy(rows), labels, at=SITE).sha256 == fit(rows, labels, at=SITE).sha256


def test_a_cosine_probe_has_no_accuracy_and_labels_of_its_own_name() -> None:
    rows, labels = drawn()
    probe = Probe(site=SITE, kind="cosine", weight=[[-1.0, 1.0, *[0.0] * 6]], classes=("angry",))  # type: ignore[arg-type]

    judged = evaluate(probe, rows, ["angry" if label else "calm" for label in labels])

    assert judged.accuracy is None
    assert judged.own is None
    assert judged.auroc == evaluate(probe, rows, labels).auroc
    assert judged.auroc == evaluate(probe, rows, ["x" if label else "y" for label in labels], positive="x").auroc
    assert judged.auroc is not None
    assert judged.auroc > 0.95
    assert direction().size == WIDTH
