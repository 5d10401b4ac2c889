"""Probes on disk: a safetensors file with weights, and a document in JSON as its metadata; nothing is executed.

Tensors, float32: ``weight`` ``[classes, hidden]`` and ``bias`` ``[classes]``; of an MLP ``weight``
``[classes, units]``, ``hidden.weight`` ``[units, hidden]`` and ``hidden.bias`` ``[units]`` beside. The metadata
``headgate.probe`` is the version of the format, and ``about`` a JSON document of `_About`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import save as to_bytes

from headgate.capture.files.reading import refusing
from headgate.capture.files.tensors import open_safetensors
from headgate.capture.probes.probe import Activation, FloatArray, HiddenLayer, Pooling, Probe, ProbeError, ProbeKind
from headgate.capture.schema.sites import Site

VERSION_KEY, VERSION = "headgate.probe", "1"
_WEIGHT, _BIAS, _HIDDEN_WEIGHT, _HIDDEN_BIAS = "weight", "bias", "hidden.weight", "hidden.bias"


class _About(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
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
    about = _About(
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
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        temporary.write_bytes(content)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def load(path: str | os.PathLike[str]) -> Probe:
    """Read a file that `save` wrote.

    Raises:
        ProbeError: If it is not there, damaged, cut off or of another format; the message names it.
    """
    place = Path(path)
    if not place.is_file():
        raise ProbeError(f"{place}: no such file")
    try:
        file = open_safetensors(place, ProbeError)
    except OSError as error:
        raise ProbeError(f"{place}: cannot be read: {error}") from error
    with refusing(place, ProbeError, "not a file of a probe, or damaged"):
        about = _about(file.texts)
        names = [_WEIGHT, _BIAS] + ([] if about.activation is None else [_HIDDEN_WEIGHT, _HIDDEN_BIAS])
        return _probe(about, {name: file[name].read(np.float32) for name in names})


def _about(texts: Mapping[str, str]) -> _About:
    version = texts.get(VERSION_KEY)
    if version != VERSION:
        found = "no probe of headgate" if version is None else f"a probe of the format {version!r}"
        raise ProbeError(f"{found}; expected the metadata {VERSION_KEY} = {VERSION!r}, as headgate probe fit writes it")
    try:
        return msgspec.json.decode(texts.get("about", ""), type=_About)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProbeError(f"the metadata 'about' is damaged: {error}") from error


def _probe(about: _About, tensors: Mapping[str, FloatArray]) -> Probe:
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
