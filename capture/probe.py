"""`Probe`: a site, and the weights that turn its row into one score for each class. Immutable.

`Probe.scores` is the definition that kernels are compared with; `ProbeReadout` computes the scores of several probes of
one site on the worker's device.

On disk a probe is a safetensors file with its weights, and a document in JSON as metadata; nothing is executed.

Tensors, float32: ``weight`` ``[classes, hidden]`` and ``bias`` ``[classes]``; of an MLP ``weight``
``[classes, units]``, ``hidden.weight`` ``[units, hidden]`` and ``hidden.bias`` ``[units]`` beside. The metadata
``headgate.probe`` is the version of the format, and ``about`` a JSON document of `_ProbeHeader`.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save as to_bytes

from headgate.capture.files.reading import load_once
from headgate.capture.files.tensors import reading_safetensors
from headgate.capture.files.writing import replacing
from headgate.capture.monitoring.notebook import TextTable, norms, page
from headgate.capture.schema.consumer import ModelInfo, Readout
from headgate.capture.schema.errors import ConfigError, HeadgateError, finite, shown
from headgate.capture.schema.sites import Site

if TYPE_CHECKING:
    import torch
    from torch import Tensor


FloatArray = npt.NDArray[np.float32]
Scores = npt.NDArray[np.float64]

Pooling = Literal["token", "last_prompt", "prompt_mean"]
POOLINGS: tuple[Pooling, ...] = ("token", "last_prompt", "prompt_mean")
"""Rows that a probe was made for: each one, that of the prompt's last token, or the mean over the prompt."""

MAX_CLASSES = 256
MAX_UNITS = 256
MAX_CLASS_NAME = 256
"""Characters of the name of a class or model, at most."""


class ProbeError(HeadgateError, ValueError):
    """A probe cannot be made, read or used; the message says why.

    Attributes:
        field: The attribute of `Probe` that is wrong, such as ``weight``; None if it is none of them.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        self.field = field
        super().__init__(message if field is None else f"{field}: {message}")
        self.message = message


class ProbeKind(str, Enum):
    """How a probe scores a row."""

    LINEAR = "linear"
    """weight . row + bias"""
    COSINE = "cosine"
    """weight . row / (length of weight * length of row); 0 where either is zero. There is no bias."""
    MLP = "mlp"
    """weight . activation(hidden weight . row + hidden bias) + bias"""

    def __str__(self) -> str:
        return self.value


class Activation(str, Enum):
    """The function between the two layers of an MLP probe."""

    RELU = "relu"
    GELU = "gelu"
    """x * Phi(x) with the error function, not its approximation by tanh."""
    SILU = "silu"
    """x / (1 + exp(-x))."""

    def __str__(self) -> str:
        return self.value

    def apply(self, values: Scores) -> Scores:
        """Return the activations of float64 values of any shape."""
        if self is Activation.RELU:
            return np.maximum(values, 0.0)
        if self is Activation.SILU:
            return values / (1.0 + np.exp(-values))
        erf = np.array([math.erf(value) for value in (values / math.sqrt(2.0)).ravel()], np.float64)
        return values * 0.5 * (1.0 + erf.reshape(values.shape))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HiddenLayer:
    """The first layer of an MLP probe. Arrays are copied, and cannot be written.

    Attributes:
        weight: float32 ``[units, hidden]``, at most `MAX_UNITS` units.
        bias: float32 ``[units]``.
        activation: Applied to the units.

    Raises:
        ProbeError: If a shape or a value is wrong.
    """

    weight: FloatArray = field(repr=False)
    bias: FloatArray = field(repr=False)
    activation: Activation

    def __post_init__(self) -> None:
        weight = _frozen(self.weight, 2, "hidden.weight")
        if len(weight) > MAX_UNITS:
            raise ProbeError(f"expected at most {MAX_UNITS} units, got {len(weight)}", "hidden.weight")
        bias = _frozen(self.bias, 1, "hidden.bias")
        if bias.shape != weight.shape[:1]:
            raise ProbeError(f"expected {len(weight)} numbers, one for each unit; got {len(bias)}", "hidden.bias")
        object.__setattr__(self, "weight", weight)
        object.__setattr__(self, "bias", bias)
        object.__setattr__(self, "activation", _member(Activation, self.activation, "hidden.activation"))

    def units(self, rows: Scores) -> Scores:
        """Return the activations ``[n, units]`` of float64 rows ``[n, hidden]``."""
        return self.activation.apply(rows @ self.weight.T.astype(np.float64) + self.bias)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Probe:
    """A probe. Arrays are copied, and cannot be written.

    Attributes:
        site: The site whose rows are read.
        kind: How a row is scored.
        weight: float32 ``[classes, hidden]``; of an MLP the second layer, ``[classes, units]``.
        bias: float32 ``[classes]``; zeros if None was given. A cosine probe's are zero.
        classes: A name for each class. A probe of two classes has one: that of high scores.
        threshold: A score above it says that the row is of the class; None if none was chosen. Of probes of one class.
        pooling: The rows that it was made for.
        hidden: The first layer of an MLP; None for other kinds.
        model: Name of the model whose rows it reads; None if unknown.
        metadata: About how it was made, such as the accuracy; texts.
        sha256: Hex; equal if and only if everything but `model` and `metadata` is.

    Raises:
        ProbeError: If a shape or a value is wrong; ``error.field`` names it.
    """

    site: Site
    kind: ProbeKind = ProbeKind.LINEAR
    weight: FloatArray = field(repr=False)
    bias: FloatArray | None = field(default=None, repr=False)
    classes: tuple[str, ...] = ("positive",)
    threshold: float | None = None
    pooling: Pooling = "token"
    hidden: HiddenLayer | None = None
    model: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    sha256: str = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.site, Site):
            raise ProbeError(f"expected a Site, got {shown(self.site)}; Site.parse reads its name", "at")
        put = object.__setattr__
        put(self, "kind", _member(ProbeKind, self.kind, "kind"))
        put(self, "weight", _frozen(self.weight, 2, "weight"))
        put(self, "bias", _frozen(np.zeros(len(self.weight)) if self.bias is None else self.bias, 1, "bias"))
        put(self, "classes", _classes(self.classes))
        put(self, "threshold", _threshold(self.threshold))
        put(self, "metadata", _texts(self.metadata))
        if self.pooling not in POOLINGS:
            raise ProbeError(f"expected one of {', '.join(POOLINGS)}; got {shown(self.pooling)}", "pooling")
        if self.model is not None and not (isinstance(self.model, str) and _is_name(self.model)):
            raise ProbeError(f"expected a printable name or None, got {shown(self.model)}", "model")
        _check_shapes(self)
        _check_kind(self)
        put(self, "sha256", _digest(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what it was made of: its metadata cannot be written, nor pickled as they are."""
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        return partial(Probe, **{**given, "metadata": dict(self.metadata)}), ()

    @property
    def hidden_size(self) -> int:
        """Values of a row that it reads."""
        return int((self.weight if self.hidden is None else self.hidden.weight).shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return self.weight.nbytes + (0 if self.hidden is None else self.hidden.weight.nbytes)

    def _repr_html_(self) -> str:
        """Return it as HTML for a notebook: site, kind, metadata, and the weights' norms by class."""
        facts = {
            "site": f"{self.site.name}, rows of {self.hidden_size} values, pooling {self.pooling}",
            "kind": self.kind.value if self.hidden is None else f"{self.kind.value} of {len(self.hidden.weight)} units",
            "threshold": "none" if self.threshold is None else f"{self.threshold:.5g}",
            "model": self.model or "not known",
            **{f"metadata {name}": text for name, text in self.metadata.items()},
        }
        weights = zip(self.classes, norms(self.weight), self.biases.tolist(), strict=True)
        lines = [(name, f"{length:.5g}", f"{bias:.5g}") for name, length, bias in weights]
        return page("Probe", facts, TextTable(("class", "norm of its weights", "bias"), lines, len(lines)))

    @property
    def biases(self) -> FloatArray:
        """float32 ``[classes]``: `bias`, which is never None once the probe is made."""
        assert self.bias is not None  # noqa: S101  (set by __post_init__)
        return self.bias

    def scores(self, rows: Any) -> Scores:
        """Score rows, in float64: the definition.

        Args:
            rows: ``[n, hidden]``; bfloat16 widened to float32.

        Returns:
            float64 ``[n, classes]``; NaN where a row is not finite.

        Raises:
            ProbeError: If the rows have another width.
        """
        wide = np.asarray(rows, np.float64)
        if wide.ndim != 2 or wide.shape[1] != self.hidden_size:
            raise ProbeError(f"expected rows [n, {self.hidden_size}], got the shape {list(wide.shape)}")
        weight = self.weight.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            if self.hidden is not None:
                wide = self.hidden.units(wide)
            if self.kind is not ProbeKind.COSINE:
                sums: Scores = wide @ weight.T + self.biases
                return sums
            lengths = np.linalg.norm(wide, axis=1)[:, None] * np.linalg.norm(weight, axis=1)
            products: Scores = wide @ weight.T
            found: Scores = np.divide(products, lengths, out=np.zeros_like(products), where=lengths != 0)
            return found


def _frozen(values: Any, ndim: int, name: str) -> FloatArray:
    """Copy an array or nested lists to float32."""
    try:
        with np.errstate(over="ignore"):
            array = np.array(values, np.float32, order="C")
    except (TypeError, ValueError, OverflowError) as error:
        raise ProbeError(f"expected numbers, all rows of one length; got {shown(values)}", name) from error
    if array.ndim != ndim or not array.size:
        expected = "one list of rows, not empty" if ndim == 2 else "one list of numbers, not empty"
        raise ProbeError(f"expected {expected}; got the shape {list(array.shape)}", name)
    if not np.isfinite(array).all():
        wrong = [int(index) for index in np.argwhere(~np.isfinite(array))[0]]
        raise ProbeError(f"the value at {wrong} is not finite in float32", name)
    array.flags.writeable = False
    return array


def _member(members: type[Enum], value: object, name: str) -> Enum:
    try:
        return members(value)
    except ValueError:
        known = ", ".join(str(member) for member in members)
        raise ProbeError(f"expected one of {known}; got {shown(value)}", name) from None


def _classes(names: Any) -> tuple[str, ...]:
    if isinstance(names, str) or not all(isinstance(name, str) and _is_name(name) for name in names):
        raise ProbeError(f"expected printable names of 1 to {MAX_CLASS_NAME} characters, got {shown(names)}", "classes")
    if len(set(names)) != len(names):
        raise ProbeError(f"expected a name of its own for each class, got {shown(list(names))}", "classes")
    return tuple(names)


def _is_name(text: str) -> bool:
    return 0 < len(text) <= MAX_CLASS_NAME and text.isprintable()


def _threshold(value: object) -> float | None:
    if value is None or (found := finite(value)) is not None:
        return None if value is None else found
    raise ProbeError(f"expected a finite number or None, got {shown(value)}", "threshold")


def _texts(metadata: Any) -> Mapping[str, str]:
    if not isinstance(metadata, Mapping) or not all(
        isinstance(key, str) and isinstance(value, str) for key, value in metadata.items()
    ):
        raise ProbeError(f"expected texts by name, got {shown(metadata)}", "metadata")
    return MappingProxyType(dict(metadata))


def _check_shapes(probe: Probe) -> None:
    num_classes, width = probe.weight.shape
    if num_classes > MAX_CLASSES:
        raise ProbeError(f"expected at most {MAX_CLASSES} classes, got {num_classes}", "weight")
    if probe.biases.shape != (num_classes,):
        raise ProbeError(f"expected {num_classes} numbers, one for each class; got {len(probe.biases)}", "bias")
    if len(probe.classes) != num_classes:
        raise ProbeError(
            f"expected {num_classes} names, one for each row of weight; got {list(probe.classes)}", "classes"
        )
    if probe.threshold is not None and num_classes > 1:
        raise ProbeError(f"a probe of {num_classes} classes has none: the largest score tells", "threshold")
    if (probe.kind is ProbeKind.MLP) != (probe.hidden is not None):
        raise ProbeError(f"a probe of the kind {probe.kind} has {'one' if probe.hidden is None else 'none'}", "hidden")
    if probe.hidden is not None and len(probe.hidden.weight) != width:
        raise ProbeError(
            f"expected rows of {len(probe.hidden.weight)} values, one for each unit; got {width}", "weight"
        )


def _check_kind(probe: Probe) -> None:
    is_zero = ~probe.weight.any(axis=1)
    if is_zero.all() or (probe.kind is ProbeKind.COSINE and is_zero.any()):
        raise ProbeError(
            f"is zero for the class {probe.classes[int(is_zero.argmax())]!r}, so it reads nothing", "weight"
        )
    if probe.hidden is not None and not probe.hidden.weight.any():
        raise ProbeError("is zero, so the probe reads nothing", "hidden.weight")
    if probe.kind is ProbeKind.COSINE and probe.biases.any():
        raise ProbeError("a cosine probe has none; put it into the threshold", "bias")


def _digest(probe: Probe) -> str:
    about = [probe.site.name, probe.kind.value, probe.classes, probe.threshold, probe.pooling, probe.weight.shape]
    arrays = [probe.weight, probe.biases]
    if probe.hidden is not None:
        about += [probe.hidden.activation.value, probe.hidden.weight.shape]
        arrays += [probe.hidden.weight, probe.hidden.bias]
    digest = hashlib.sha256(msgspec.json.encode(about))
    for array in arrays:
        digest.update(array.astype("<f4", copy=False).tobytes())
    return digest.hexdigest()


VERSION_KEY, VERSION = "headgate.probe", "1"
_WEIGHT, _BIAS, _HIDDEN_WEIGHT, _HIDDEN_BIAS = "weight", "bias", "hidden.weight", "hidden.bias"


class _ProbeHeader(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A probe but for its weights; attributes as of `Probe`, `site` by name."""

    site: str
    kind: ProbeKind
    classes: tuple[str, ...]
    threshold: float | None
    pooling: Pooling
    activation: Activation | None
    model: str | None
    metadata: dict[str, str]
    sha256: str


def save(path: str | os.PathLike[str], probe: Probe) -> None:
    """Write a probe; an earlier file is replaced at once, never half.

    Args:
        path: The file; its name ends in ``.safetensors``.
        probe: The probe.

    Raises:
        ProbeError: On another suffix.
        OSError: If it cannot be written.
    """
    target = Path(path)
    if target.suffix != ".safetensors":
        raise ProbeError(f"{target}: expected a name that ends in .safetensors")
    about = _ProbeHeader(
        site=probe.site.name,
        kind=probe.kind,
        classes=probe.classes,
        threshold=probe.threshold,
        pooling=probe.pooling,
        activation=probe.hidden.activation if probe.hidden else None,
        model=probe.model,
        metadata=dict(probe.metadata),
        sha256=probe.sha256,
    )
    tensors = {_WEIGHT: probe.weight, _BIAS: probe.biases}
    if probe.hidden is not None:
        tensors |= {_HIDDEN_WEIGHT: probe.hidden.weight, _HIDDEN_BIAS: probe.hidden.bias}
    content = to_bytes(tensors, {VERSION_KEY: VERSION, "about": msgspec.json.encode(about).decode()})
    with replacing(target) as new:
        new.write_bytes(content)


def load(path: str | os.PathLike[str]) -> Probe:
    """Read a file that `save` wrote.

    Raises:
        ProbeError: If it is not there, damaged, cut off or of another format; the message names it.
    """
    with reading_safetensors(path, ProbeError, "probe") as file:
        about = _about(file.texts)
        names = [_WEIGHT, _BIAS] + ([] if about.activation is None else [_HIDDEN_WEIGHT, _HIDDEN_BIAS])
        return _probe(about, {name: file[name].read(np.float32) for name in names})


load_current = load_once(load, 256)
"""Returns the probe in a file as it is now; see `load` and `load_once`."""


def load_configured(paths: Mapping[str, str], consumer: str) -> dict[str, Probe]:
    """Return the probes in a consumer's parameter ``probes``, by name.

    A file is read again only if it has changed, so a call costs one look at each file's time.

    Args:
        paths: Files by name.
        consumer: Its name, for errors.

    Raises:
        ConfigError: If one of them cannot be read.
    """
    found = {}
    for name, path in paths.items():
        try:
            found[name] = load_current(path)
        except (OSError, ProbeError) as error:
            raise ConfigError(f"{consumer}: probes.{name}: {error}") from error
    return found


def check_fits(probe: Probe, model: ModelInfo, what: str) -> None:
    """Refuse a probe that cannot read rows of a model.

    Args:
        probe: The probe.
        model: The model being served.
        what: Names the probe, for the error.

    Raises:
        ConfigError: If its site is not captured, or has rows of another width.
    """
    if probe.hidden_size != (width := model.shape(probe.site).width):
        raise ConfigError(
            f"{what}: reads rows of {probe.hidden_size} values; the model has {width} at {probe.site.name}"
        )
    model.check_captured(probe.site, what)


def _about(texts: Mapping[str, str]) -> _ProbeHeader:
    version = texts.get(VERSION_KEY)
    if version != VERSION:
        found = "no probe of headgate" if version is None else f"a probe of the format {version!r}"
        raise ProbeError(f"{found}; expected the metadata {VERSION_KEY} = {VERSION!r}, as headgate probe fit writes it")
    try:
        return msgspec.json.decode(texts.get("about", ""), type=_ProbeHeader)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProbeError(f"the metadata 'about' is damaged: {error}") from error


def _probe(about: _ProbeHeader, tensors: Mapping[str, FloatArray]) -> Probe:
    try:
        site = Site.parse(about.site)
    except ValueError as error:
        raise ProbeError(str(error), "at") from error
    hidden = None
    if about.activation is not None:
        hidden = HiddenLayer(weight=tensors[_HIDDEN_WEIGHT], bias=tensors[_HIDDEN_BIAS], activation=about.activation)
    probe = Probe(
        site=site,
        kind=about.kind,
        weight=tensors[_WEIGHT],
        bias=tensors[_BIAS],
        classes=about.classes,
        threshold=about.threshold,
        pooling=about.pooling,
        hidden=hidden,
        model=about.model,
        metadata=about.metadata,
    )
    if probe.sha256 != about.sha256:
        raise ProbeError(f"the content has the checksum {probe.sha256}, and {about.sha256} was written: it was changed")
    return probe


Function = Callable[["Tensor"], "Tensor"]


class ProbeReadout(Readout):
    """The scores of probes: one column for each class, probe after probe.

    They are `Probe.scores`, computed in float64 and rounded to float32; not finite where a row is not.

    Args:
        probes: At least one, all of one site and one width.

    Raises:
        ProbeError: If they are not.
    """

    def __init__(self, probes: Sequence[Probe]) -> None:
        if len({(probe.site, probe.hidden_size) for probe in probes}) != 1:
            raise ProbeError("expected probes of one site and one width")
        self._probes = tuple(probes)

    @property
    def num_outputs(self) -> int:
        """Classes of all probes."""
        return sum(len(probe.classes) for probe in self._probes)

    @property
    def key(self) -> str:
        """The checksums of the probes, in their order, with spaces between; see `keys_of`."""
        return " ".join(probe.sha256 for probe in self._probes)

    def columns(self) -> list[slice]:
        """Where the scores of each probe are among the outputs."""
        stops = np.cumsum([len(probe.classes) for probe in self._probes]).tolist()
        return [slice(stop - len(probe.classes), stop) for stop, probe in zip(stops, self._probes, strict=True)]

    def on(self, device: torch.device) -> Function:
        """See `Readout.on`. Linear and cosine probes share one product of matrices."""
        import torch

        flat = [probe for probe in self._probes if probe.hidden is None]
        functions = [_products(flat, device)] if flat else []
        functions += [_network(probe, probe.hidden, device) for probe in self._probes if probe.hidden is not None]
        if len(functions) == 1:
            return functions[0]
        made = sorted(zip(self._probes, self.columns(), strict=True), key=lambda each: each[0].hidden is not None)
        places = np.concatenate([np.arange(columns.start, columns.stop) for _, columns in made])
        order = torch.from_numpy(np.argsort(places)).to(device)
        return lambda rows: torch.cat([function(rows) for function in functions], dim=1).index_select(1, order)


def keys_of(key: str) -> list[str]:
    """The checksums of the probes whose scores a `ProbeReadout` of that key computes, in their order."""
    return key.split()


def _products(probes: Sequence[Probe], device: torch.device) -> Function:
    """The scores of linear and cosine probes."""
    import torch

    weights = _wide(np.concatenate([probe.weight for probe in probes]), device)
    bias = _wide(np.concatenate([probe.biases for probe in probes]), device)
    kinds = [probe.kind is ProbeKind.COSINE for probe in probes for _ in probe.classes]
    if not any(kinds):
        return lambda rows: rows @ weights.T + bias
    is_cosine = torch.tensor(kinds, device=device)
    weight_lengths = torch.linalg.vector_norm(weights, dim=1)

    def scores(rows: Tensor) -> Tensor:
        products = rows @ weights.T
        lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True) * weight_lengths
        cosines = torch.where(lengths == 0, 0.0, products / lengths)
        return torch.where(is_cosine, cosines, products + bias)

    return scores


def _network(probe: Probe, hidden: HiddenLayer, device: torch.device) -> Function:
    """The scores of an MLP."""
    from torch.nn import functional

    activations: dict[Activation, Function] = {
        Activation.RELU: functional.relu,
        Activation.GELU: functional.gelu,
        Activation.SILU: functional.silu,
    }
    activate = activations[hidden.activation]
    first, shift = _wide(hidden.weight, device), _wide(hidden.bias, device)
    second, bias = _wide(probe.weight, device), _wide(probe.biases, device)

    def scores(rows: Tensor) -> Tensor:
        units = rows @ first.T + shift
        # A unit at minus infinity would be cut off to 0: the score of such a row must not be finite.
        return activate(units) @ second.T + bias + 0.0 * units.sum(dim=1, keepdim=True)

    return scores


def _wide(values: np.ndarray, device: torch.device) -> Tensor:
    """Float64 on the device."""
    import torch

    return torch.from_numpy(values.astype(np.float64)).to(device)
