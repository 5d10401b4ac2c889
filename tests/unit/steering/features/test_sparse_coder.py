"""`SparseCoder`: encoding, decoding and single features, against the formulas written out in float64."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from headgate.capture.schema.sites import Site
from headgate.steering.features.canonical import write_coder
from headgate.steering.features.importing import open_coder, read_source
from headgate.steering.features.source_coder import CoderKind, Hints, Norm
from headgate.steering.features.sparse_coder import SparseCoder, coder_of, gathered
from headgate.steering.features.tensors import FeatureFileError, LazyTensor
from tests.fakes.sparse_coders import FEATURES, SITE, WIDTH, Reference, rows, source, tensor, weights

EXACT = (CoderKind.RELU, CoderKind.JUMPRELU, CoderKind.GATED)


@pytest.fixture(params=["direct", "imported"])
def form(request: pytest.FixtureRequest) -> str:
    """As the source has it, or through headgate's file."""
    return str(request.param)


def coder(form: str, folder: Path, **fields: object) -> SparseCoder:
    """A coder of `source`, in either form, with float32 rows."""
    if form == "direct":
        return coder_of(source(**fields), folder)  # type: ignore[arg-type]
    write_coder(folder / "x.safetensors", source(**fields), name="x", path="test", row_dtype="float32")  # type: ignore[arg-type]
    return open_coder(folder / "x.safetensors")


@pytest.mark.parametrize("subtracts", [False, True])
@pytest.mark.parametrize("norm", Norm)
@pytest.mark.parametrize("kind", CoderKind)
def test_encode_and_decode_are_the_published_formulas(
    kind: CoderKind, norm: Norm, subtracts: bool, form: str, tmp_path: Path
) -> None:
    x, reference = rows(), Reference(kind, norm, subtracts=subtracts)
    found = coder(form, tmp_path, kind=kind, norm=norm, subtracts_bias=subtracts)

    activations = found.encode(x, np.float64)
    decoded = found.decode(activations, x)

    np.testing.assert_allclose(activations, [reference.encode(row) for row in x], rtol=1e-10, atol=1e-12)
    expected = [reference.decode(reference.encode(row), row) for row in x]
    np.testing.assert_allclose(decoded, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("subtracts", [False, True])
@pytest.mark.parametrize("norm", Norm)
@pytest.mark.parametrize("kind", CoderKind)
def test_delta_is_decode_of_edited_activations_plus_the_error(
    kind: CoderKind, norm: Norm, subtracts: bool, tmp_path: Path
) -> None:
    x, reference = rows(), Reference(kind, norm, subtracts=subtracts)
    found = coder("direct", tmp_path, kind=kind, norm=norm, subtracts_bias=subtracts)
    targets = {3: 2.5, 17: 0.0, 39: 0.25}

    (delta,) = found.delta(x, targets, np.float64)

    for row, change in zip(x, delta, strict=True):
        a = reference.encode(row)
        error = row - reference.decode(a, row)
        edited = np.asarray([targets.get(i, value) for i, value in enumerate(a)])
        np.testing.assert_allclose(row + change, reference.decode(edited, row) + error, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", Norm)
@pytest.mark.parametrize("kind", EXACT)
def test_rows_of_a_feature_alone_give_its_activations(kind: CoderKind, norm: Norm, form: str, tmp_path: Path) -> None:
    x, reference = rows(), Reference(kind, norm, subtracts=True)
    found = coder(form, tmp_path, kind=kind, norm=norm, subtracts_bias=True)
    features = [39, 0, 17]

    few = found.rows(features)

    normed = np.stack([reference.normed(row) for row in x])
    p = normed @ few.encoder.T
    a = np.where(p + few.bias > few.threshold, np.maximum(p * few.magnitude_scale + few.magnitude_bias, 0), 0)
    np.testing.assert_allclose(a, [reference.encode(row)[features] for row in x], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(few.decoder, weights()["W_dec"][features], rtol=1e-6)
    assert found.decision == "exact"
    assert {part.dtype for part in few} == {np.dtype(np.float32)}
    assert all(part.flags.c_contiguous for part in few)


def test_a_factor_on_rows_and_lengths_of_decoder_rows_are_folded(form: str, tmp_path: Path) -> None:
    x, s = rows(), 0.37
    w = {name: values.astype(np.float64) for name, values in weights().items()}
    found = coder(form, tmp_path, kind=CoderKind.TOPK, scale=s, folds_decoder_norm=True, subtracts_bias=True)

    lengths = np.linalg.norm(w["W_dec"], axis=1)
    a = np.maximum(((x * s - w["b_dec"]) @ w["W_enc"] + w["b_enc"]) * lengths, 0)
    a[np.argsort(np.argsort(-a, axis=1), axis=1) >= 5] = 0
    y = (a @ (w["W_dec"] / lengths[:, None]) + w["b_dec"]) / s

    tolerance = 1e-10 if form == "direct" else 1e-4  # (imported rows are float32)
    np.testing.assert_allclose(found.encode(x, np.float64), a, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(found.decode(a, x), y, rtol=tolerance, atol=tolerance)


def test_a_transcoder_writes_elsewhere_and_keeps_its_skip(form: str, tmp_path: Path) -> None:
    generator = np.random.default_rng(5)
    first, second = generator.standard_normal((2, FEATURES, 8))
    skip, biases = generator.standard_normal((8, WIDTH)).astype(np.float32), generator.standard_normal((2, 8))
    sites = (Site.parse("3.mlp_out"), Site.parse("4.mlp_out"))
    found = coder(
        form, tmp_path, decoders=(tensor(first), tensor(second)), decoder_biases=tuple(biases), skip=tensor(skip),
        read_site=Site.parse("3.mlp_in"), write_sites=sites,
    )  # fmt: skip
    x = rows()
    a = found.encode(x, np.float64)

    np.testing.assert_allclose(found.decode(a, x, 0), a @ first + biases[0] + x @ skip.T, atol=1e-5)
    np.testing.assert_allclose(found.decode(a, x, 1), a @ second + biases[1], atol=1e-5)
    np.testing.assert_allclose(found.rows([4, 2]).decoders, [first[[4, 2]], second[[4, 2]]], rtol=1e-6)
    assert (found.is_transcoder, found.write_width, found.write_sites) == (True, 8, sites)
    delta = found.delta(x, {2: 1.5}, np.float64)
    np.testing.assert_allclose(delta, [(1.5 - a[:, [2]]) * w[2] for w in (first, second)], atol=1e-5)


def test_top_k_says_which_threshold_it_has(form: str, tmp_path: Path) -> None:
    without = coder(form, tmp_path, kind=CoderKind.TOPK)
    assert without.decision == "none"
    assert np.isnan(without.rows([0]).threshold).all(), "no comparison with it is true"
    selected = without.encode(rows())

    given = coder(form, tmp_path, kind=CoderKind.TOPK, threshold=np.full(FEATURES, 0.8))
    assert given.decision == "threshold"
    assert given.rows([0, 1]).threshold == pytest.approx([0.8, 0.8])
    np.testing.assert_array_equal(given.encode(rows()), selected)


def test_figures_of_the_source_are_kept(form: str, tmp_path: Path) -> None:
    largest = np.arange(FEATURES, dtype=np.float64)
    found = coder(form, tmp_path, max_activations=largest, model="m", declared={"l0": 3.5})

    assert found.max_activations([7, 2]) == pytest.approx([7, 2])
    assert (found.model, found.declared, found.source_sha256) == ("m", {"l0": 3.5}, "0" * 64)
    assert (found.read_site, found.write_sites, found.width, found.num_features) == (SITE, (SITE,), WIDTH, FEATURES)
    assert coder(form, tmp_path).max_activations([0]) is None


def test_features_that_do_not_exist_are_named(form: str, tmp_path: Path) -> None:
    found = coder(form, tmp_path)

    for wrong in (FEATURES, -1):
        with pytest.raises(IndexError, match=f"feature {wrong}; it has the features 0 to {FEATURES - 1}"):
            found.rows([0, wrong])
    with pytest.raises(ValueError, match=f"expected rows of width {WIDTH}, got the shape"):
        found.encode(rows(2, WIDTH + 1))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rows_are_rounded_once_to_the_type_of_the_file(dtype: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    write_coder(tmp_path / "x.safetensors", source(), name="x", path="t", row_dtype=dtype)  # type: ignore[arg-type]

    read = open_coder(tmp_path / "x.safetensors").rows(range(FEATURES)).encoder

    expected = torch.from_numpy(weights()["W_enc"].T.copy()).to(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(read, expected)


def test_an_unreadable_weight_is_refused_and_no_file_is_left(tmp_path: Path) -> None:
    for number in (np.nan, np.inf):
        values = weights()["W_dec"].astype(np.float64)
        values[31, 3] = number
        broken = source(decoders=(tensor(values),))
        with pytest.raises(FeatureFileError, match="NaN or infinity"):
            write_coder(tmp_path / "x.safetensors", broken, name="x", path="test")
        with pytest.raises(FeatureFileError, match="NaN or infinity"):
            coder_of(broken, tmp_path).rows([31])
    large = source(encoder=tensor(np.full((FEATURES, WIDTH), 1e6)))
    with pytest.raises(FeatureFileError, match="too large for float16; import it with --dtype float32"):
        write_coder(tmp_path / "x.safetensors", large, name="x", path="test", row_dtype="float16")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_cut_off_or_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_coder(path, source(), name="x", path="test")
    whole = path.read_bytes()

    path.write_bytes(whole[:-1])
    with pytest.raises(FeatureFileError, match="cut off or damaged"):
        open_coder(path)
    path.write_bytes(whole.replace(b'sparse_coder":"1"', b'sparse_coder":"9"'))
    with pytest.raises(FeatureFileError, match="expected version 1"):
        open_coder(path)


def test_an_sae_can_be_moved_to_another_site_and_a_transcoder_cannot(tmp_path: Path) -> None:
    path, other = tmp_path / "x.safetensors", Site.parse("5.pre_attn")
    write_coder(path, source(), name="x", path="test")
    assert open_coder(path, name="y", site=other).write_sites == (other,)
    assert open_coder(path, name="y", site=other).name == "y"

    write_coder(path, source(write_sites=(Site.parse("4.mlp_out"),)), name="x", path="test")
    with pytest.raises(FeatureFileError, match="a transcoder, whose sites the source must tell"):
        open_coder(path, site=other)


def test_hints_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_coder(path, source(), name="x", path="test")
    with pytest.raises(FeatureFileError, match="relu takes no --threshold"):
        read_source(path, Hints(threshold=0.5))
    with pytest.raises(FeatureFileError, match="unknown 'sealens'; known: headgate, saelens"):
        read_source(path, Hints(), "sealens")


def test_the_hash_of_a_source_that_was_not_imported_is_that_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"2")
    (tmp_path / "a").write_bytes(b"1")
    found = coder_of(source(sha256=None, paths=(tmp_path / "b", tmp_path / "a")), tmp_path)

    assert found.source_sha256 == hashlib.sha256(b"12").hexdigest()


def test_rows_that_lie_apart_in_a_file_are_gathered_as_far_as_there_is_room(tmp_path: Path) -> None:
    found = coder_of(source(kind=CoderKind.JUMPRELU), tmp_path)
    encoder = found.weights.source.encoder
    assert encoder.is_scattered

    near, taken = gathered(found, encoder.nbytes)

    assert taken == encoder.nbytes
    assert not near.weights.source.encoder.is_scattered
    assert near.weights.source.decoders == found.weights.source.decoders
    for mine, theirs in zip(near.rows([3, 7]), found.rows([3, 7]), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert gathered(found, encoder.nbytes - 1) == (found, 0)
    assert gathered(near, encoder.nbytes) == (near, 0)


def test_gathered_rows_keep_the_hash_of_the_files_that_they_were_read_from(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"1")
    found = coder_of(source(kind=CoderKind.JUMPRELU, sha256=None, paths=(file,)), tmp_path)

    near, taken = gathered(found, 1 << 20)
    file.unlink()

    assert taken
    assert near.source_sha256 == hashlib.sha256(b"1").hexdigest()


def test_blocks_of_a_gathered_matrix_meet() -> None:
    values = np.arange(700 * 130, dtype=np.float32).reshape(130, 700)

    found = LazyTensor.of("test", values, FeatureFileError).transposed.gathered()

    np.testing.assert_array_equal(found.read(np.float32), values.T)
    assert not found.is_scattered
