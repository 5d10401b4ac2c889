"""`Lens`: what brings rows of the stream after each layer to where the model's own head reads them. Immutable.

A lens reads ``head(norm(M_l h_l + b_l))`` of a row ``h_l`` after layer l (`post_mlp`), with the model's own final norm
and head. `LOGIT` names the lens whose ``M_l`` is the identity; it has no file. A Jacobian lens has the mean Jacobian of
the last layer's output after ``h_l``. A tuned lens has an affine map that is added to the row: ``M_l = 1 + W_l``.

On disk a lens is a safetensors file; nothing is executed, and a layer is read when it is needed. Tensors:
``matrix.L`` ``[hidden, hidden]``, in float16 or float32, and of tuned lenses ``bias.L`` ``[hidden]``. The metadata
``headgate.lens`` is the version of the format, and ``about`` a JSON document of `_About`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from headgate.capture.files.reading import load_once
from headgate.capture.files.tensors import LazyTensor, reading_safetensors
from headgate.capture.files.writing import replacing
from headgate.capture.schema.errors import HeadgateError

Matrix = npt.NDArray[Any]

LOGIT = "logit"
"""Name of the lens that reads rows as they are."""
VERSION_KEY, VERSION = "headgate.lens", "1"


class LensError(HeadgateError, ValueError):
    """A lens cannot be read, written or used; the message names its file and says why."""


class LensKind(str, Enum):
    """The kind of a lens' matrices."""

    JACOBIAN = "jacobian"
    TUNED = "tuned"

    def __str__(self) -> str:
        return self.value


class _About(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A lens but for its matrices; attributes as of `Lens`."""

    kind: LensKind
    hidden_size: int
    layers: tuple[int, ...]
    model: str | None
    source: str | None
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Lens:
    """A fitted lens, whose matrices are read from its file when they are asked for.

    Attributes:
        kind: What they are.
        hidden_size: Width of the stream.
        layers: Layers that it has a matrix for, ascending; it reads the stream after them.
        sha256: Of the matrices.
        model: The model that it was fitted on, if that is known.
        source: The file that it was made of.
        matrices: ``[hidden, hidden]``, by layer.
        biases: ``[hidden]``, by layer.
    """

    kind: LensKind
    hidden_size: int
    layers: tuple[int, ...]
    sha256: str
    model: str | None = None
    source: str | None = None
    matrices: Mapping[int, LazyTensor] = field(repr=False)
    biases: Mapping[int, LazyTensor] = field(default_factory=dict, repr=False)

    def matrix(self, layer: int) -> Matrix:
        """Read ``M_l`` without the identity that a tuned lens adds: float16 or float32 ``[hidden, hidden]``."""
        tensor = self.matrices[layer]
        return tensor.read(np.float16 if tensor.num_bits == 16 and not tensor.is_bfloat16 else np.float32)

    def bias(self, layer: int) -> npt.NDArray[np.float32] | None:
        """Read ``b_l``, float32 ``[hidden]``; None if the lens has none."""
        return self.biases[layer].read(np.float32) if layer in self.biases else None

    def direction(self, layer: int, unembedding: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Return the direction of a token after a layer: ``M_l^T`` of its row of the head, float64 ``[hidden]``."""
        row = np.asarray(unembedding, np.float64)
        found: npt.NDArray[np.float64] = self.matrix(layer).astype(np.float64).T @ row
        return found + row if self.kind is LensKind.TUNED else found

    def check(self, hidden_size: int, num_layers: int) -> None:
        """Refuse another model.

        Raises:
            LensError: Naming what differs.
        """
        if self.hidden_size != hidden_size:
            raise LensError(f"reads rows of {self.hidden_size} values; the model has {hidden_size}")
        if beyond := [layer for layer in self.layers if not 0 <= layer < num_layers]:
            raise LensError(f"has the layers {beyond}; the model has {num_layers}")


def save(
    path: str | os.PathLike[str],
    kind: LensKind,
    matrices: Mapping[int, Matrix],
    biases: Mapping[int, Matrix] | None = None,
    *,
    model: str | None = None,
    source: str | None = None,
) -> None:
    """Write a lens; an earlier file is replaced at once, never half.

    Args:
        path: The file; its name ends in ``.safetensors``.
        kind: What the matrices are.
        matrices: ``[hidden, hidden]``, by layer; float16 stays, others become float32.
        biases: ``[hidden]``, by layer.
        model: The model that it was fitted on.
        source: The file that it was made of.

    Raises:
        LensError: On another suffix, or if shapes differ or a value is not finite.
        OSError: If it cannot be written.
    """
    target, biases = Path(path), biases or {}
    if target.suffix != ".safetensors":
        raise LensError(f"{target}: expected a name that ends in .safetensors")
    if not matrices:
        raise LensError(f"{target}: a lens needs the matrix of one layer at least")
    width = next(iter(matrices.values())).shape[0]
    tensors = dict(_checked(matrices, biases, width))
    about = _About(
        kind=kind,
        hidden_size=width,
        layers=tuple(sorted(matrices)),
        model=model,
        source=source,
        sha256=_digest(kind, tensors),
    )
    metadata = {VERSION_KEY: VERSION, "about": msgspec.json.encode(about).decode()}
    with replacing(target) as new:
        save_file(tensors, new, metadata)


def _checked(
    matrices: Mapping[int, Matrix], biases: Mapping[int, Matrix], width: int
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    for layer in sorted(matrices):
        yield f"matrix.{layer}", _finite(matrices[layer], (width, width), f"the matrix of layer {layer}")
        if layer in biases:
            yield f"bias.{layer}", _finite(biases[layer], (width,), f"the bias of layer {layer}")


def _finite(values: Matrix, shape: tuple[int, ...], what: str) -> npt.NDArray[Any]:
    if values.shape != shape:
        raise LensError(f"{what} has the shape {list(values.shape)}; expected {list(shape)}")
    narrow = np.ascontiguousarray(values, np.float16 if values.dtype == np.float16 else np.float32)
    if not np.isfinite(narrow).all():
        raise LensError(f"{what} has values that are not finite, or too large for float32")
    return narrow


def _digest(kind: LensKind, tensors: Mapping[str, npt.NDArray[Any]]) -> str:
    digest = hashlib.sha256(kind.encode())
    for name, values in tensors.items():
        digest.update(f"{name} {values.dtype} {values.shape}".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()


def load(path: str | os.PathLike[str]) -> Lens:
    """Open a file that `save` wrote; matrices are not read yet.

    Raises:
        LensError: If it is not there, damaged, cut off or of another format; the message names it.
    """
    with reading_safetensors(path, LensError, "lens") as file:
        if (version := file.texts.get(VERSION_KEY)) != VERSION:
            found = "no lens of headgate" if version is None else f"a lens of the format {version!r}"
            raise LensError(f"{found}; make one of other files: headgate lens import {path} LENS.safetensors")
        about = msgspec.json.decode(file.texts.get("about", ""), type=_About)
        square = (about.hidden_size, about.hidden_size)
        matrices = {layer: file[f"matrix.{layer}"].expect(square, "its hidden size") for layer in about.layers}
        given = {layer: file.get(f"bias.{layer}") for layer in about.layers}
        biases = {
            layer: bias.expect(square[:1], "its hidden size") for layer, bias in given.items() if bias is not None
        }
        return Lens(
            kind=about.kind,
            hidden_size=about.hidden_size,
            layers=about.layers,
            sha256=about.sha256,
            model=about.model,
            source=about.source,
            matrices=matrices,
            biases=biases,
        )


load_current = load_once(load, 64)
"""Returns the lens in a file as it is now; see `load` and `load_once`."""
