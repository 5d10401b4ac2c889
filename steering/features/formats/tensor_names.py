"""The tensors that most formats have, by the names that each gives them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from headgate.steering.features.tensors import FeatureFileError, TensorFile


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
"""Of PyTorch's ``nn.Linear``, which keeps matrices as output times input."""

MATRICES = Names("W_enc", "W_dec", "b_enc", "b_dec", False, True)
"""Of SAELens, Gemma Scope and others, that multiply rows by the encoder from the right."""


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
    """Check that a file has no tensors but those that its producer's own loader takes.

    What a tensor of another name does is not known here, and the loader refuses it.

    Raises:
        FeatureFileError: If it has others.
    """
    if others := sorted(set(file.tensors) - set(names)):
        raise FeatureFileError(
            f"{file.path}: {loader} does not load it with this configuration: it has the tensors "
            f"{', '.join(others[:8])} beside; configuration and weights are not of one SAE"
        )
