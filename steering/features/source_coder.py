"""An SAE or transcoder as its producer's file has it: what every reader returns, before anything is folded; and the
tensors that most formats have, by the names that each gives them.

Some coders read the output of the MLP's norm before its gain, a value that the model never has by itself and
TransformerLens calls ``ln2.hook_normalized``. The MLP's input is this value times the gain, so with the gain of the
model the coder reads the MLP's input instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headgate.capture.files.reading import read_json as read_document
from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.features.hook_names import site_of
from headgate.steering.features.tensors import FeatureFileError, LazyTensor, TensorFile, open_tensors

Vector = npt.NDArray[np.float64]


class CoderKind(str, Enum):
    """How pre-activations become activations."""

    RELU = "relu"
    JUMPRELU = "jumprelu"
    GATED = "gated"
    TOPK = "topk"
    """The k largest of a row, where positive."""
    GROUPMAX = "groupmax"
    """The largest of each of k equal, contiguous groups of features, where positive."""

    @property
    def selects(self) -> bool:
        """Whether a feature is active depends on the other features of the row."""
        return self in (CoderKind.TOPK, CoderKind.GROUPMAX)


class Norm(str, Enum):
    """How a row is normalised before it is encoded; undone after decoding."""

    NONE = "none"
    LAYER_NORM = "layer_norm"
    """Minus its mean, by its standard deviation (unbiased) plus 1e-5."""
    CONSTANT_NORM_RESCALE = "constant_norm_rescale"
    """Scaled to the length sqrt(width)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceCoder:
    """A coder with F features that reads rows of D values and writes rows of O values at one or several sites.

    Its activations are those of ``p = norm(x) * scale``, minus the first decoder bias if `subtracts_bias`, times the
    encoder; its output is ``(activations . decoder + decoder bias) / scale``, with the norm undone, plus ``skip . x``.

    Attributes:
        format: Name of the format.
        paths: The files that it was read from.
        kind: Activation function.
        encoder: ``[F, D]``.
        decoders: ``[F, O]`` for each write site.
        bias: ``[F]``, added to pre-activations; of `CoderKind.GATED` the gate's.
        decoder_biases: ``[O]`` for each write site.
        threshold: ``[F]`` of `CoderKind.JUMPRELU`; of kinds that select, thresholds that stand for the selection.
        magnitude: Of `CoderKind.GATED`: factor ``[F]`` and bias ``[F]`` of the magnitude.
        k: Number of active features; of `CoderKind.TOPK` and `CoderKind.GROUPMAX`.
        norm: Normalisation of rows.
        subtracts_bias: Whether the decoder's bias is taken off the row before it is encoded.
        scale: Factor on rows.
        folds_decoder_norm: Whether activations are scaled by the lengths of their decoder rows.
        skip: ``[O, D]``, applied to the row as it is.
        gain: ``[D]``, by which rows are divided first: the coder reads a norm's output before its gain.
        read_site: Where it reads, if the source names it.
        write_sites: Where it writes; empty stands for the read site.
        model: The model's name, if the source gives it.
        declared: Figures that the source declares: ``l0``, ``fvu``.
        max_activations: ``[F]``: the largest activation of each feature that the source saw, if it gives them.
        name: The coder's name, if the source has one.
        sha256: Hash of the files that `paths` were made from, where they are not the source itself.
    """

    format: str
    paths: tuple[Path, ...]
    kind: CoderKind
    encoder: LazyTensor
    decoders: tuple[LazyTensor, ...]
    bias: Vector
    decoder_biases: tuple[Vector, ...]
    threshold: Vector | None = None
    magnitude: tuple[Vector, Vector] | None = None
    k: int | None = None
    norm: Norm = Norm.NONE
    subtracts_bias: bool = False
    scale: float = 1.0
    folds_decoder_norm: bool = False
    skip: LazyTensor | None = None
    gain: Vector | None = None
    read_site: Site | None = None
    write_sites: tuple[Site, ...] = ()
    model: str | None = None
    declared: Mapping[str, float] = field(default_factory=dict)
    max_activations: Vector | None = None
    name: str | None = None
    sha256: str | None = None

    def __post_init__(self) -> None:
        num_features, width = self.encoder.expect(self.encoder.shape[:2], "two axes").shape
        where = self.encoder.where
        for decoder, bias in zip(self.decoders, self.decoder_biases, strict=True):
            decoder.expect((num_features, len(bias)), "features of the encoder, width of the decoder's bias")
        self._check_columns(num_features)
        if (self.kind is CoderKind.JUMPRELU and self.threshold is None) or (self.kind is CoderKind.GATED) != bool(
            self.magnitude
        ):
            raise FeatureFileError(f"{where}: {self.kind.value}, but not with the tensors of that kind")
        if self.threshold is not None and self.kind in (CoderKind.RELU, CoderKind.GATED):
            raise FeatureFileError(f"{where}: {self.kind.value} has no thresholds, but the file has")
        if self.kind.selects:
            self._check_k(num_features)
        if self.is_transcoder and (self.norm is not Norm.NONE or self.subtracts_bias):
            raise FeatureFileError(f"{where}: a transcoder that normalises rows or subtracts a bias is not supported")
        if not self.is_transcoder and len(self.decoder_biases[0]) != width:
            raise FeatureFileError(f"{where}: an SAE reads width {width}, but writes {len(self.decoder_biases[0])}")
        if len(self.decoders) != max(1, len(self.write_sites)):
            raise FeatureFileError(f"{where}: {len(self.decoders)} decoders for {len(self.write_sites)} sites")
        if not np.isfinite(self.scale) or self.scale <= 0:
            raise FeatureFileError(f"{where}: expected a positive factor of rows, got {self.scale}")
        if self.gain is not None and (self.gain.shape != (width,) or self.skip is not None or self.norm != Norm.NONE):
            raise FeatureFileError(f"{where}: expected {width} gains, and neither a skip nor a norm beside them")
        if self.skip is not None:
            self.skip.expect((len(self.decoder_biases[0]), width), "output, input")

    def _check_columns(self, num_features: int) -> None:
        columns = {"bias": self.bias, "threshold": self.threshold, "max_activations": self.max_activations}
        columns |= dict(zip(("magnitude's factor", "magnitude's bias"), self.magnitude or (), strict=False))
        for name, column in columns.items():
            if column is not None and column.shape != (num_features,):
                raise FeatureFileError(
                    f"{self.encoder.where}: {num_features} features, but {name} has the shape {list(column.shape)}"
                )
        columns |= {f"decoder's bias {index}": bias for index, bias in enumerate(self.decoder_biases)}
        for name, column in columns.items():
            if column is not None and not np.isfinite(column).all():
                raise FeatureFileError(f"{self.encoder.where.partition(': ')[0]}: {name} holds NaN or infinity")

    @property
    def is_transcoder(self) -> bool:
        """Whether it writes elsewhere than it reads."""
        return bool(self.write_sites) and self.write_sites != (self.read_site,)

    def _check_k(self, num_features: int) -> None:
        if not self.k or not 0 < self.k <= num_features:
            raise FeatureFileError(f"{self.encoder.where}: expected k from 1 to {num_features}, got {self.k}")
        if self.kind is CoderKind.GROUPMAX and num_features % self.k:
            raise FeatureFileError(f"{self.encoder.where}: {num_features} features make no {self.k} equal groups")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hints:
    """Facts of a source that its files do not have, from the user.

    Attributes:
        site: Where it reads and, for an SAE, writes.
        layer: The layer, of a source with several.
        k: Number of active features of a top-k SAE.
        scale: Factor on rows, of a source that was trained on normalised ones.
        threshold: One for all features of a top-k SAE, in place of its selection where single features are read.
        model: Folder of the model, of a coder that reads a norm's output before its gain.
    """

    site: Site | None = None
    layer: int | None = None
    k: int | None = None
    scale: float | None = None
    threshold: float | None = None
    model: Path | None = None


def read_json(path: Path) -> dict[str, Any]:
    """Read an object of JSON.

    Raises:
        FeatureFileError: If it is not there or no object.
    """
    try:
        document: dict[str, Any] = read_document(path, FeatureFileError)
    except OSError as error:
        raise FeatureFileError(f"{path}: expected an object of JSON: {error}") from error
    return document


def one_of(document: Mapping[str, Any], key: str, path: Path, kind: type) -> Any:
    """Return the value of a key that must be there.

    Raises:
        FeatureFileError: If it is missing or of another type.
    """
    value = document.get(key)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise FeatureFileError(f"{path}: {key}: expected {kind.__name__}, got {value!r}")
    return value


BEFORE_GAIN = "ln2.hook_normalized"

_NAMES = ("pre_feedforward_layernorm", "post_attention_layernorm")
_FROM_ONE = ("gemma", "gemma2", "gemma3", "gemma3_text")
_AS_IT_IS = ("llama", "mistral", "qwen2", "qwen3")
_LEAST_GAIN = 1e-6


def place_of_reads(layer: int, hook: str, hints: Hints, where: str) -> tuple[Site, Vector | None]:
    """Return the site of a hook of TransformerLens, and the gain that rows there are divided by.

    Raises:
        FeatureFileError: If there is no such site, or the gain is needed and not to be had.
    """
    if hook != BEFORE_GAIN or hints.model is None:
        return site_of(f"blocks.{layer}.{hook}", where), None
    return Site(layer, HookPoint.MLP_IN), _gain(hints.model, layer)


def _gain(folder: Path, layer: int) -> Vector:
    config_path = folder / "config.json"
    kind = one_of(read_json(config_path), "model_type", config_path, str)
    if kind not in (*_FROM_ONE, *_AS_IT_IS):
        known = ", ".join((*_FROM_ONE, *_AS_IT_IS))
        raise FeatureFileError(f"{config_path}: the gain of norms is not known of {kind!r}; known: {known}")
    files = [open_tensors(path) for path in sorted(folder.glob("*.safetensors"))]
    for name in _NAMES:  # Gemma 2 and 3 have both, and the first is the MLP's
        ending = f"layers.{layer}.{name}.weight"
        found = next((tensor for file in files for key, tensor in file.tensors.items() if key.endswith(ending)), None)
        if found is not None:
            gain: Vector = found.read() + (kind in _FROM_ONE)
            if not (np.isfinite(gain) & (np.abs(gain) > _LEAST_GAIN)).all():
                raise FeatureFileError(f"{found.where}: a gain of 0 or NaN, by which rows cannot be divided")
            return gain
    raise FeatureFileError(f"{folder}: no safetensors file has the norm of layer {layer}'s MLP ({', '.join(_NAMES)})")


class Names(NamedTuple):
    """Names of an SAE's tensors, and how its matrices lie.

    Attributes:
        encoder: ``[F, D]``, or ``[D, F]`` unless `encodes_by_rows`.
        decoder: ``[F, O]``, or ``[O, F]`` unless `decodes_by_rows`.
        bias: ``[F]``.
        decoder_bias: ``[O]``.
        encodes_by_rows: Whether each row of the encoder's matrix is a feature.
        decodes_by_rows: Whether each row of the decoder's matrix is a feature.
    """

    encoder: str
    decoder: str
    bias: str
    decoder_bias: str
    encodes_by_rows: bool
    decodes_by_rows: bool

    @property
    def tensors(self) -> tuple[str, ...]:
        """All names."""
        return self[:4]


LINEAR = Names("encoder.weight", "decoder.weight", "encoder.bias", "decoder.bias", True, False)
"""Names of PyTorch's ``nn.Linear``, which keeps matrices as output times input."""

MATRICES = Names("W_enc", "W_dec", "b_enc", "b_dec", False, True)
"""Names of SAELens, Gemma Scope and others, which multiply rows by the encoder from the right."""


def read_weights(file: TensorFile, names: Names, *, has_decoder_bias: bool = True) -> dict[str, Any]:
    """Return encoder, decoders, bias and decoder_biases for `SourceCoder`; matrices are mapped, and not read.

    Args:
        file: The tensors.
        names: Their names.
        has_decoder_bias: If not, the coder has none: it is zero, as wide as the encoder's rows.

    Raises:
        FeatureFileError: If one is missing, or of a shape that does not go with the biases.
    """
    bias, encoder, decoder = file[names.bias], file[names.encoder], file[names.decoder]
    (num_features,) = bias.expect((bias.size,), "one axis").shape
    width = encoder.size // max(1, num_features)
    decoder_bias = np.zeros(width)
    if has_decoder_bias:
        out = file[names.decoder_bias]
        decoder_bias = out.expect((out.size,), "one axis").read()
    out_width = len(decoder_bias)
    expected = (num_features, width) if names.encodes_by_rows else (width, num_features)
    encoder.expect(expected, f"features of {names.bias}, width")
    expected = (num_features, out_width) if names.decodes_by_rows else (out_width, num_features)
    decoder.expect(expected, f"features of {names.bias}, width of {names.decoder_bias}")
    return {
        "encoder": encoder if names.encodes_by_rows else encoder.transposed,
        "decoders": (decoder if names.decodes_by_rows else decoder.transposed,),
        "bias": bias.read(),
        "decoder_biases": (decoder_bias,),
    }


def expect_only(file: TensorFile, names: Iterable[str], loader: str) -> None:
    """Check that a file has no tensors but the ones that its producer's own loader takes.

    What a tensor of another name does is not known here, and the loader refuses it.

    Raises:
        FeatureFileError: If it has others.
    """
    if others := sorted(set(file.tensors) - set(names)):
        raise FeatureFileError(
            f"{file.path}: {loader} does not load it with this configuration: it has the tensors "
            f"{', '.join(others[:8])} beside; configuration and weights are not of one SAE"
        )
