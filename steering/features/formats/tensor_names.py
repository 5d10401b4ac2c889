"""The tensors that most formats have, by the names that each gives them.

Some coders read the output of the MLP's norm before its gain, a value that the model never has by itself and
TransformerLens calls ``ln2.hook_normalized``. The MLP's input is this value times the gain, so with the gain of the
model the coder reads the MLP's input instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.features.hook_names import site_of
from headgate.steering.features.source_coder import Hints, Vector, one_of, read_json
from headgate.steering.features.tensors import FeatureFileError, TensorFile, open_tensors

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


def read_weights(file: TensorFile, names: Names) -> dict[str, Any]:
    """Return encoder, decoders, bias and decoder_biases for `SourceCoder`; matrices are mapped, and not read.

    Raises:
        FeatureFileError: If one is missing, or of a shape that does not go with the biases.
    """
    bias, out = file[names.bias], file[names.decoder_bias]
    (num_features,) = bias.expect((bias.size,), "one axis").shape
    (out_width,) = out.expect((out.size,), "one axis").shape
    encoder, decoder = file[names.encoder], file[names.decoder]
    width = encoder.size // max(1, num_features)
    expected = (num_features, width) if names.encodes_by_rows else (width, num_features)
    encoder.expect(expected, f"features of {names.bias}, width")
    expected = (num_features, out_width) if names.decodes_by_rows else (out_width, num_features)
    decoder.expect(expected, f"features of {names.bias}, width of {names.decoder_bias}")
    return {
        "encoder": encoder if names.encodes_by_rows else encoder.transposed,
        "decoders": (decoder if names.decodes_by_rows else decoder.transposed,),
        "bias": bias.read(),
        "decoder_biases": (out.read(),),
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
