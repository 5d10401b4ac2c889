"""`Probe`: its scores, its checks, its files and its wire form."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from headgate.capture.probe import MAX_UNITS, POOLINGS
from headgate.capture.schema.sites import Site
from headgate.steering.probes import Activation, HiddenLayer, Probe, ProbeError, ProbeKind, load, save
from headgate.steering.programs.wire import content_from_wire, content_to_wire

SITE = Site.parse("3.post_mlp")
RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(5, 4)).astype(np.float32)


def layer(units: int = 3, **changes: Any) -> HiddenLayer:
    fields = {"weight": RNG.normal(size=(units, 4)), "bias": RNG.normal(size=units), "activation": "relu"}
    return HiddenLayer(**{**fields, **changes})


@st.composite
def probes(draw: st.DrawFn) -> Probe:
    """Any probe, also of values at the ends of float32."""
    kind, classes, width = draw(st.sampled_from(ProbeKind)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    values = st.floats(width=32, allow_nan=False, allow_infinity=False)

    def array(*shape: int) -> Any:
        found = draw(st.lists(values, min_size=math.prod(shape), max_size=math.prod(shape)))
        return np.array(found, np.float32).reshape(shape)

    hidden = None
    if kind is ProbeKind.MLP:
        units = draw(st.integers(1, 3))
        weight = array(units, width)
        weight[0, 0] = 1.0
        hidden = HiddenLayer(weight=weight, bias=array(units), activation=draw(st.sampled_from(Activation)))
        width = units
    weight = array(classes, width)
    weight[:, 0] += ~weight.any(axis=1)
    names = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=9)
    return Probe(
        site=draw(st.sampled_from([SITE, Site.parse("final_norm")])),
        kind=kind,
        weight=weight,
        bias=None if kind is ProbeKind.COSINE else array(classes),
        classes=tuple(draw(st.lists(names, min_size=classes, max_size=classes, unique=True))),
        threshold=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)) if classes == 1 else None,
        pooling=draw(st.sampled_from(POOLINGS)),
        hidden=hidden,
        model=draw(st.none() | names),
        metadata=draw(st.dictionaries(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8")))),
    )


def plain(probe: Probe) -> dict[str, Any]:
    """All of a probe, comparable; -0.0 is not 0.0."""
    layers = [probe] if probe.hidden is None else [probe, probe.hidden]
    arrays = [(array.shape, array.tobytes()) for part in layers for array in (part.weight, part.bias)]
    names = ("site", "kind", "classes", "threshold", "pooling", "model", "sha256")
    others = {name: getattr(probe, name) for name in names}
    activation = probe.hidden and probe.hidden.activation
    return {**others, "arrays": arrays, "metadata": dict(probe.metadata), "activation": activation}


@given(probe=probes())
def test_a_file_holds_all_of_a_probe(probe: Probe, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"

    save(path, probe)

    assert plain(load(path)) == plain(probe)


@given(probe=probes())
def test_the_wire_holds_all_of_a_probe(probe: Probe) -> None:
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(content_to_wire(probe)))

    assert plain(content_from_wire(Probe, travelled)) == plain(probe)


def test_linear_scores_are_products_and_biases() -> None:
    weight, bias = RNG.normal(size=(2, 4)).astype(np.float32), np.array([0.5, -1.0], np.float32)
    probe = Probe(site=SITE, weight=weight, bias=bias, classes=("a", "b"))

    expected = [[sum(float(w) * float(x) for w, x in zip(row, given, strict=True)) + float(b)
                 for row, b in zip(weight, bias, strict=True)] for given in ROWS]  # fmt: skip

    assert probe.scores(ROWS).dtype == np.float64
    np.testing.assert_allclose(probe.scores(ROWS), expected, rtol=1e-12)


def test_cosine_scores_are_those_of_angles_and_zero_for_a_row_of_zeros() -> None:
    probe = Probe(site=SITE, kind=ProbeKind.COSINE, weight=[[3.0, 0.0, 0.0, 0.0]])  # type: ignore[arg-type]
    rows = [[5.0, 0.0, 0.0, 0.0], [-2.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]

    np.testing.assert_allclose(probe.scores(rows)[:, 0], [1.0, -1.0, math.sqrt(0.5), 0.0], rtol=1e-12)


@pytest.mark.parametrize("activation", Activation)
def test_an_mlp_is_torchs(activation: Activation) -> None:
    import torch

    hidden = layer(activation=activation)
    weight, bias = RNG.normal(size=(2, 3)).astype(np.float32), np.array([1.0, -1.0], np.float32)
    probe = Probe(site=SITE, kind=ProbeKind.MLP, weight=weight, bias=bias, hidden=hidden, classes=("a", "b"))

    x = torch.from_numpy(ROWS).double()
    units = x @ torch.tensor(hidden.weight.tolist()).double().T + torch.tensor(hidden.bias.tolist()).double()
    units = getattr(torch.nn.functional, activation.value)(units)
    expected = units @ torch.from_numpy(weight).double().T + torch.from_numpy(bias).double()

    np.testing.assert_allclose(probe.scores(ROWS), expected.numpy(), rtol=1e-12)
    assert probe.hidden_size == 4


def test_a_row_that_is_not_finite_scores_nan_and_no_other() -> None:
    rows = ROWS.copy()
    rows[1, 2] = np.inf
    scores = Probe(site=SITE, kind="cosine", weight=[[1.0, 0.0, 1.0, 0.0]]).scores(rows)  # type: ignore[arg-type]

    assert np.isnan(scores[:, 0]).tolist() == [False, True, False, False, False]


def test_a_probe_cannot_be_changed() -> None:
    weight = np.ones((1, 4), np.float32)
    probe = Probe(site=SITE, weight=weight, metadata={"a": "b"})
    weight[:] = 7.0

    assert probe.weight.tolist() == [[1.0] * 4]
    with pytest.raises(ValueError, match="read-only"):
        probe.weight[0, 0] = 2.0
    with pytest.raises(TypeError):
        probe.metadata["a"] = "c"  # type: ignore[index]
    with pytest.raises(AttributeError):
        probe.threshold = 1.0  # type: ignore[misc]


def test_the_checksum_is_of_all_but_model_and_metadata() -> None:
    base: dict[str, Any] = {"site": SITE, "weight": [[1.0, 2.0]], "bias": [0.5], "threshold": 1.0}
    changes: list[dict[str, Any]] = [
        {"site": Site.parse("2.post_mlp")},
        {"weight": [[1.0, 3.0]]},
        {"bias": [0.25]},
        {"bias": None, "kind": "cosine"},
        {"threshold": None},
        {"classes": ("anger",)},
        {"pooling": "last_prompt"},
    ]

    found = [Probe(**{**base, **change}).sha256 for change in [{}, *changes]]

    assert len(set(found)) == len(found)
    assert Probe(**base, model="m", metadata={"a": "b"}).sha256 == found[0]


TWO = [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "a site by name": ({"site": "3.post_mlp"}, "at", "Site.parse"),
    "one vector": ({"weight": [1.0, 2.0]}, "weight", "the shape [2]"),
    "nothing": ({"weight": np.zeros((1, 0))}, "weight", "the shape [1, 0]"),
    "rows of two lengths": ({"weight": [[1.0], [1.0, 2.0]]}, "weight", "of one length"),
    "text": ({"weight": [["x"]]}, "weight", "expected numbers"),
    "NaN": ({"weight": [[1.0, math.nan]]}, "weight", "[0, 1] is not finite"),
    "too large for float32": ({"weight": [[1e39]]}, "weight", "not finite in float32"),
    "zeros": ({"weight": [[0.0, 0.0]]}, "weight", "reads nothing"),
    "zeros of a cosine": (
        {"weight": [TWO[0], [0.0] * 4], "kind": "cosine", "classes": ("a", "b")},
        "weight",
        "zero for the class 'b'",
    ),
    "a bias too many": ({"bias": [1.0, 2.0]}, "bias", "expected 1 numbers"),
    "a cosine's bias": ({"kind": "cosine", "bias": [1.0]}, "bias", "put it into the threshold"),
    "another kind": ({"kind": "tree"}, "kind", "linear, cosine, mlp"),
    "a name missing": ({"weight": TWO}, "classes", "expected 2 names"),
    "names as one text": ({"classes": "a"}, "classes", "printable names"),
    "a threshold of NaN": ({"threshold": math.nan}, "threshold", "finite"),
    "a threshold that no float holds": ({"threshold": 10**400}, "threshold", "finite"),
    "a threshold of two": ({"weight": TWO, "classes": ("a", "b"), "threshold": 1.0}, "threshold", "2 classes"),
    "another pooling": ({"pooling": "max"}, "pooling", "last_prompt"),
    "numbers as metadata": ({"metadata": {"a": 1}}, "metadata", "texts by name"),
    "no hidden layer": ({"kind": "mlp"}, "hidden", "has one"),
    "a hidden layer of a linear one": ({"hidden": layer()}, "hidden", "has none"),
    "units that do not fit": ({"kind": "mlp", "hidden": layer(2)}, "weight", "rows of 2 values"),
    "dead units": ({"kind": "mlp", "hidden": layer(4, weight=np.zeros((4, 4)))}, "hidden.weight", "reads nothing"),
}


@pytest.mark.parametrize(("change", "field", "message"), BAD.values(), ids=BAD.keys())
def test_a_probe_that_cannot_be_is_refused(change: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ProbeError) as caught:
        Probe(**{"site": SITE, "weight": [[1.0, 0.0, 0.0, 0.0]], **change})

    assert caught.value.field == field
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"weight": np.ones((MAX_UNITS + 1, 4)), "bias": np.zeros(MAX_UNITS + 1)}, "hidden.weight"),
        ({"bias": [1.0]}, "hidden.bias"),
        ({"activation": "tanh"}, "hidden.activation"),
    ],
)
def test_a_hidden_layer_that_cannot_be_is_refused(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ProbeError) as caught:
        layer(**change)

    assert caught.value.field == field


def test_rows_of_another_width_are_refused() -> None:
    with pytest.raises(ProbeError, match=r"expected rows \[n, 2\], got the shape \[5, 4\]"):
        Probe(site=SITE, weight=[[1.0, 2.0]]).scores(ROWS)  # type: ignore[arg-type]


def written(folder: Path) -> Path:
    path = folder / "p.safetensors"
    save(path, Probe(site=SITE, weight=[[1.0, 2.0, 3.0]], bias=[0.5]))  # type: ignore[arg-type]
    return path


def test_a_file_that_is_none_of_a_probe_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file({"weight": ROWS}, other)

    with pytest.raises(ProbeError, match=r"other.safetensors: no probe of headgate"):
        load(other)
    with pytest.raises(ProbeError, match=r"none.safetensors: no such file"):
        load(tmp_path / "none.safetensors")
    with pytest.raises(ProbeError, match=r"p.pt: expected a name that ends in .safetensors"):
        save(tmp_path / "p.pt", load(written(tmp_path)))


@pytest.mark.parametrize("length", [0, 4, 40, -1])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, length: int) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:length])

    with pytest.raises(ProbeError, match=r"p.safetensors: "):
        load(path)


def test_a_file_that_was_changed_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content.replace(np.float32(3.0).tobytes(), np.float32(4.0).tobytes()))

    with pytest.raises(ProbeError, match="it was changed"):
        load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"headgate.probe": "2"}, "a probe of the format '2'"),
        ({"about": "{"}, "'about' is damaged"),
        ({"about": "{}"}, "'about' is damaged"),
        ({"about": None}, "'about' is damaged"),
    ],
)
def test_metadata_that_are_damaged_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    from safetensors import safe_open

    path = written(tmp_path)
    with safe_open(path, "np") as file:
        texts = {**file.metadata(), **change}
    save_file(load_file(path), path, {name: text for name, text in texts.items() if text is not None})

    with pytest.raises(ProbeError, match=message):
        load(path)


def test_a_file_that_cannot_be_written_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        save(path, Probe(site=SITE, weight=[[9.0]]))  # type: ignore[arg-type]

    assert load(path).hidden_size == 3
    assert [found.name for found in tmp_path.iterdir()] == ["p.safetensors"]


def test_a_probe_that_was_pickled_is_the_same():
    made = Probe(
        site=SITE, kind=ProbeKind.MLP, weight=np.ones((1, 3)), hidden=layer(activation="silu"), metadata={"by": "me"}
    )

    found = pickle.loads(pickle.dumps(made))

    assert (found.sha256, dict(found.metadata), found.site) == (made.sha256, {"by": "me"}, made.site)
