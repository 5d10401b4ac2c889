"""Small random SAEs and transcoders, and the formulas of their kinds written out in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from headgate.capture.schema.sites import Site
from headgate.steering.features.importing import read_source
from headgate.steering.features.source_coder import CoderKind, Hints, Norm, SourceCoder
from headgate.steering.features.sparse_coder import SparseCoder, coder_of
from headgate.steering.features.tensors import FeatureFileError, LazyTensor

WIDTH, FEATURES = 12, 40
SITE = Site.parse("3.post_mlp")
Array = npt.NDArray[Any]
MATRICES = ("W_enc", "W_dec", "b_enc", "b_dec")


def weights(seed: int = 0, width: int = WIDTH, features: int = FEATURES, out: int | None = None) -> dict[str, Array]:
    """Random float32 tensors in SAELens's layout, for every kind: W_enc ``[D, F]``, W_dec ``[F, O]`` and columns."""
    generator = np.random.default_rng(seed)
    shapes = {"W_enc": (width, features), "W_dec": (features, out or width), "b_enc": (features,)}
    shapes |= {"b_dec": (out or width,), "b_gate": (features,), "b_mag": (features,), "r_mag": (features,)}
    found: dict[str, Array] = {
        name: 0.4 * generator.standard_normal(shape, np.float32) for name, shape in shapes.items()
    }
    found["threshold"] = np.abs(generator.standard_normal(features, np.float32))
    return found


def rows(num: int = 7, width: int = WIDTH, seed: int = 1) -> Array:
    """Random rows, float64, not centred."""
    return 0.3 + np.random.default_rng(seed).standard_normal((num, width))


def tensor(values: Array) -> LazyTensor:
    """A tensor in no file."""
    return LazyTensor.of("test", values, FeatureFileError)


def source(kind: CoderKind = CoderKind.RELU, norm: Norm = Norm.NONE, **changes: Any) -> SourceCoder:
    """A coder of the tensors of `weights`."""
    found = {name: values.astype(np.float64) for name, values in weights().items()}
    fields: dict[str, Any] = {
        "format": "test",
        "paths": (),
        "kind": kind,
        "encoder": tensor(found["W_enc"]).transposed,
        "decoders": (tensor(found["W_dec"]),),
        "bias": found["b_gate"] if kind is CoderKind.GATED else found["b_enc"],
        "decoder_biases": (found["b_dec"],),
        "threshold": found["threshold"] if kind is CoderKind.JUMPRELU else None,
        "magnitude": (np.exp(found["r_mag"]), found["b_mag"]) if kind is CoderKind.GATED else None,
        "k": 5 if kind.selects else None,
        "norm": norm,
        "read_site": SITE,
        "sha256": "0" * 64,
    }
    return SourceCoder(**(fields | changes))


class Reference:
    """The published formulas, step by step on one row, from the tensors of `weights`; nothing is folded."""

    def __init__(self, kind: CoderKind, norm: Norm = Norm.NONE, *, subtracts: bool = False, k: int = 5) -> None:
        self.kind, self.norm, self.subtracts, self.k = kind, norm, subtracts, k
        self.w = {name: values.astype(np.float64) for name, values in weights().items()}

    def encode(self, x: Array) -> Array:
        """Activations ``[F]`` of a row ``[D]``."""
        x = self.normed(x)
        p = (x - self.w["b_dec"] if self.subtracts else x) @ self.w["W_enc"]
        if self.kind is CoderKind.GATED:
            magnitude = np.maximum(p * np.exp(self.w["r_mag"]) + self.w["b_mag"], 0)
            return magnitude * (p + self.w["b_gate"] > 0)
        q = p + self.w["b_enc"]
        if self.kind is CoderKind.JUMPRELU:
            return np.maximum(q, 0) * (q > self.w["threshold"])
        a = np.maximum(q, 0)
        if self.kind is CoderKind.TOPK:
            kept = sorted(range(len(a)), key=lambda i: -a[i])[: self.k]
            a = np.asarray([value if i in kept else 0 for i, value in enumerate(a)])
        if self.kind is CoderKind.GROUPMAX:
            size = len(a) // self.k
            a = np.concatenate([np.where(np.arange(size) == g.argmax(), g, 0) for g in a.reshape(self.k, size)])
        return a

    def decode(self, a: Array, x: Array) -> Array:
        """The row that activations ``[F]`` stand for, given the row that was encoded."""
        y = a @ self.w["W_dec"] + self.w["b_dec"]
        if self.norm is Norm.LAYER_NORM:
            return y * x.std(ddof=1) + x.mean()
        return y * (np.linalg.norm(x) / np.sqrt(len(x))) if self.norm is Norm.CONSTANT_NORM_RESCALE else y

    def normed(self, x: Array) -> Array:
        if self.norm is Norm.LAYER_NORM:
            return (x - x.mean()) / (x.std(ddof=1) + 1e-5)
        return x * (np.sqrt(len(x)) / np.linalg.norm(x)) if self.norm is Norm.CONSTANT_NORM_RESCALE else x


def save(path: Path, tensors: dict[str, Array]) -> Path:
    """Write a safetensors file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, path)
    return path


def put(path: Path, document: object) -> Path:
    """Write JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def only(*names: str, **renamed: str) -> dict[str, Array]:
    """Some tensors of `weights`, and others under new names, ``new="old"``."""
    found = weights()
    return {name: found[name] for name in names} | {new.replace("__", "."): found[old] for new, old in renamed.items()}


def transposed(tensors: dict[str, Array], *names: str) -> dict[str, Array]:
    """The same tensors, some of them the other way round."""
    return {name: values.T if name in names else values for name, values in tensors.items()}


def read(path: Path, **hints: Any) -> SparseCoder:
    """A coder of what is there."""
    return coder_of(read_source(path, Hints(**hints)), path)


def agrees(coder: SparseCoder, reference: Reference, scale: float = 1.0) -> None:
    """Activations and reconstruction are those of the formulas, of rows times `scale`."""
    x = rows()
    expected = np.stack([reference.encode(row) for row in x * scale])
    np.testing.assert_allclose(coder.encode(x, np.float64), expected, rtol=1e-6, atol=1e-6)
    decoded = np.stack([reference.decode(a, row) for a, row in zip(expected, x * scale, strict=True)]) / scale
    np.testing.assert_allclose(coder.decode(expected, x), decoded, rtol=1e-6, atol=1e-6)
    assert (expected > 0).any()
    assert (expected == 0).any()


def places(coder: SparseCoder) -> list[str | None]:
    """Where a coder reads, then where it writes."""
    return [site and site.name for site in (coder.read_site, *coder.write_sites)]
