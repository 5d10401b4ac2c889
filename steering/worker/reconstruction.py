"""Rows that a sparse autoencoder encodes in full: their reconstruction, and edits of features that top-k selects.

This is the definition of both, and the SAE's weights in the memory of the forward pass.

Shape suffixes: T tokens of the step, N listed rows, F features, D hidden size. With ``p = norm(h) . E``::

    a = max(p * magnitude_scale + magnitude_bias, 0) where p + bias > threshold, else 0
    y = (a . W + decoder_bias) * gain, plus the mean of h with `InputNorm.LAYER_NORM`

Of a top-k SAE, all but the k largest of a row's activations are 0; of equal ones, features with smaller indices are
kept. Edits of its features need that selection, too (`FeatureActivation.SELECTED`), so the rows that have such edits
are encoded as well, and keep their error.

The gain is 1, the standard deviation of h (`InputNorm.LAYER_NORM`), or ``norm(h) / sqrt(D)``
(`InputNorm.CONSTANT_NORM`). Edits of features are entries of the row's program: they read the same h, and since
decoding is linear, what they add to the row adds to its reconstruction, too. So the row becomes the reconstruction plus
what features add: decode(edited encode(h)), plus the changes by edits of other SAEs.

How well it is reconstructed, without edits, is summed up in the forward: the squares of ``h - y``, and what gives the
squared distance of h to the mean row. Their ratio is the FVU of `headgate.steering.features.check.Figures`. As
there, rows that are not finite, zeros and very long ones are left out, and rows at position 0. A row is very long if it
is longer than `LARGEST_NORM` times the usual length: the geometric mean of all, since a median cannot be summed up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headgate.capture.engine.contracts.worker_hooks import WorkerFacts
from headgate.capture.schema.errors import ConfigError
from headgate.steering.features.check import LARGEST_NORM
from headgate.steering.features.source_coder import CoderKind
from headgate.steering.features.sparse_coder import SparseCoder
from headgate.steering.features.tensors import FeatureFileError
from headgate.steering.programs.codes import (
    LAYER_NORM_EPS,
    NUM_NUMBERS,
    NUM_SUMS,
    SUM_ERRORS,
    SUM_LENGTHS,
    SUM_LOGS,
    SUM_ROWS,
    SUM_SQUARES,
    InputNorm,
)
from headgate.steering.programs.feature_edits import INPUT_NORMS
from headgate.steering.worker.gates.reference import GateTensors
from headgate.steering.worker.program_reference import cut_change, program_deltas_reference

SaeTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Tables = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, GateTensors | None]


class EncodedSae(NamedTuple):
    """An SAE in the memory of the forward pass, and the rows of the step that it encodes.

    Attributes:
        tokens: int32 ``[max_tokens]``: the batch rows, each once; entries beyond their number mean nothing.
        num_tokens: int32 ``[3]``: how many there are; how many of these, the first, count towards `sums`; and how many,
            the first, become reconstructions.
        encoder: ``[F, D]``, bf16 or fp32.
        decoder: As the encoder.
        numbers: float32 ``[NUM_NUMBERS, F]``.
        bias: float32 ``[D]``: of the decoder.
        sums: float64 ``[NUM_SUMS + D]``: over all rows so far (`headgate.steering.programs.codes.NUM_SUMS`).
        norm: Normalisation of a row before it is encoded.
        name: The SAE's.
        k: Features that top-k selects of a row; 0 for other kinds.
    """

    tokens: Tensor
    num_tokens: Tensor
    encoder: Tensor
    decoder: Tensor
    numbers: Tensor
    bias: Tensor
    sums: Tensor
    norm: InputNorm
    name: str
    k: int = 0

    @property
    def tensors(self) -> SaeTensors:
        """The tensors, in the order in which `headgate.steering.worker.program_action` takes them."""
        return self[:7]

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory."""
        return sum(tensor.nbytes for tensor in self.tensors)


def load_sae(coder: SparseCoder, facts: WorkerFacts) -> EncodedSae:
    """Bring the weights of an SAE to the device, rounded to bfloat16 for a model in bfloat16, and else in float32.

    Args:
        coder: An SAE that `headgate.steering.config.SteeringConfig.encoded_saes` returned.
        facts: The worker's.

    Raises:
        ConfigError: If the file cannot be read.
    """
    dtype, shape = _dtype(facts), (coder.num_features, coder.width)
    sae = EncodedSae(
        tokens=torch.zeros(facts.max_tokens, dtype=torch.int32, device=facts.device),
        num_tokens=torch.zeros(3, dtype=torch.int32, device=facts.device),
        encoder=torch.empty(shape, dtype=dtype, device=facts.device),
        decoder=torch.empty(shape, dtype=dtype, device=facts.device),
        numbers=torch.empty(NUM_NUMBERS, coder.num_features, device=facts.device),
        bias=torch.from_numpy(coder.weights.decoder_bias().astype(np.float32)).to(facts.device),
        sums=torch.zeros(NUM_SUMS + coder.width, dtype=torch.float64, device=facts.device),
        norm=INPUT_NORMS[coder.norm],
        name=coder.name,
        k=min(coder.k, coder.num_features) if coder.kind is CoderKind.TOPK and coder.k else 0,
    )
    try:
        for block in coder.weights.blocks():
            encoder, *numbers = coder.weights.encoding(block, np.float32)
            sae.encoder[block] = torch.from_numpy(encoder).to(facts.device)
            sae.decoder[block] = torch.from_numpy(coder.weights.decoder(block, 0, np.float32)).to(facts.device)
            sae.numbers[:, block] = torch.from_numpy(np.stack(numbers)).to(facts.device)
        if sae.k:
            sae.numbers[1] = 0.0  # a threshold stands for the selection, which is made here
    except (FeatureFileError, OSError) as error:
        raise ConfigError(f"--sae-encode: SAE {coder.name!r} cannot be read: {error}") from error
    return sae


def weight_bytes(coder: SparseCoder, facts: WorkerFacts) -> int:
    """Return the bytes of device memory that `load_sae` takes."""
    width, numbers = coder.width, 4 * NUM_NUMBERS
    of_rows = 4 * (width + facts.max_tokens + 3) + 8 * (NUM_SUMS + width)
    return coder.num_features * (2 * width * _dtype(facts).itemsize + numbers) + of_rows


class ReconstructionFigures:
    """How well encoded SAEs reconstruct the rows that they are used on. Step thread only.

    Args:
        saes: Whose sums are read.
    """

    def __init__(self, saes: Iterable[EncodedSae]) -> None:
        self._saes = tuple(saes)
        self._variances = dict.fromkeys((sae.name for sae in self._saes), 0.0)

    def read(self) -> dict[str, dict[str, float]]:
        """Return figures by SAE: ``rows`` that were counted, their squared ``error``, and their ``variance``.

        The last is the sum of their squared distances to their mean. None ever falls. Waits for the device.
        """
        found = {}
        for sae in self._saes:
            sums = sae.sums.cpu().numpy()
            num_rows, total = float(sums[SUM_ROWS]), sums[NUM_SUMS:]
            variance = float(sums[SUM_SQUARES] - total @ total / num_rows) if num_rows else 0.0
            self._variances[sae.name] = max(self._variances[sae.name], variance)  # rounding must not make it fall
            found[sae.name] = {
                "rows": num_rows,
                "error": float(sums[SUM_ERRORS]),
                "variance": self._variances[sae.name],
            }
        return found


def _dtype(facts: WorkerFacts) -> torch.dtype:
    return torch.bfloat16 if facts.dtype == torch.bfloat16 else torch.float32


def reconstructed_deltas_reference(
    value_TD: Tensor,
    addend_TD: Tensor | None,
    tables: Tables,
    sae: SaeTensors,
    input_norm: InputNorm,
    k: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Compute by how much programs and reconstructions move each row, in `dtype`, ``[T, D]``; rows of neither are zero.

    Args:
        value_TD: As `headgate.steering.worker.program_reference.program_deltas_reference` takes it.
        addend_TD: Likewise.
        tables: Likewise: pool, table rows, counts, codes, params, groups, changes and gates.
        sae: `EncodedSae.tensors`; the first of the listed rows have an entry `Code.RECONSTRUCT`. The sums are added to.
        input_norm: The SAE's.
        k: The SAE's.
    """
    delta_TD = program_deltas_reference(value_TD, addend_TD, *tables, dtype=dtype)
    tokens, num_tokens, encoder_FD, _, numbers_4F, *_ = sae
    num_listed, _, num_made = num_tokens.tolist()
    listed, made = tokens[:num_listed].long(), tokens[:num_made].long()
    if not num_listed:
        return delta_TD
    shift_TD = program_deltas_reference(value_TD, addend_TD, *tables, dtype=dtype, has_features=False)
    made_TD = reconstruction_deltas_reference(value_TD, addend_TD, shift_TD, *sae, input_norm, k, dtype=dtype)
    delta_TD[made] = cut_change(delta_TD[made] + made_TD[made] - shift_TD[made], value_TD.dtype)
    if k:
        h_TD = _stream(value_TD, addend_TD).to(dtype) + shift_TD
        selected_TF = h_TD.new_zeros(len(h_TD), len(encoder_FD))
        selected_TF[listed] = _activations(_normed(h_TD[listed], input_norm)[0], encoder_FD, numbers_4F, k)
        edits_TD = program_deltas_reference(h_TD, None, *tables, dtype=dtype, selected_TF=selected_TF)
        delta_TD[listed] = cut_change(delta_TD[listed] + edits_TD[listed], value_TD.dtype)
    return delta_TD


def _stream(value_TD: Tensor, addend_TD: Tensor | None) -> Tensor:
    return value_TD if addend_TD is None else (value_TD.float() + addend_TD.float()).to(value_TD.dtype)


def _activations(normed_ND: Tensor, encoder_FD: Tensor, numbers_4F: Tensor, k: int) -> Tensor:
    """Return the activations of rows as they are encoded, after the selection of top-k if `k` is not 0."""
    bias, threshold, scale, magnitude_bias = numbers_4F.to(normed_ND.dtype)
    p_NF = normed_ND @ encoder_FD.to(normed_ND.dtype).T
    a_NF = torch.where(p_NF + bias > threshold, (p_NF * scale + magnitude_bias).clamp(min=0), 0)
    if not k:
        return a_NF
    order = a_NF.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return torch.zeros_like(a_NF).scatter(1, order, a_NF.gather(1, order))


def reconstruction_deltas_reference(
    value_TD: Tensor,
    addend_TD: Tensor | None,
    shift_TD: Tensor | None,
    token_N: Tensor,
    count_3: Tensor,
    encoder_FD: Tensor,
    decoder_FD: Tensor,
    numbers_4F: Tensor,
    bias_D: Tensor,
    sums_S: Tensor,
    input_norm: InputNorm,
    k: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Compute the result of `headgate.steering.kernels.reconstruct_rows.reconstruction_deltas` in `dtype`, ``[T, D]``.

    Rows that do not become reconstructions are zero. The sums are added to. Waits for the device.
    """
    _, num_counted, num_made = count_3.tolist()
    listed = token_N[:num_made].long()
    delta_TD = torch.zeros(value_TD.shape, dtype=dtype, device=value_TD.device)
    if not len(listed):
        return delta_TD
    x_ND = _stream(value_TD, addend_TD)[listed].to(dtype)
    h_ND = x_ND if shift_TD is None else x_ND + shift_TD[listed].to(dtype)
    normed_ND, gain_N1, mean_N1 = _normed(h_ND, input_norm)
    a_NF = _activations(normed_ND, encoder_FD, numbers_4F, k)
    y_ND = (a_NF @ decoder_FD.to(dtype) + bias_D.to(dtype)) * gain_N1 + mean_N1
    delta_TD[listed] = cut_change(y_ND - x_ND, value_TD.dtype)
    _add_figures(sums_S, h_ND[:num_counted].double(), y_ND[:num_counted].double())
    return delta_TD


def _add_figures(sums_S: Tensor, h_ND: Tensor, y_ND: Tensor) -> None:
    """Add rows and their reconstructions, float64, to the sums."""
    lengths_N, error_N = h_ND.norm(dim=-1), (h_ND - y_ND).square().sum(-1)
    is_row = lengths_N.isfinite() & (lengths_N > 0)
    sums_S[SUM_LOGS] += lengths_N[is_row].log().sum()
    sums_S[SUM_LENGTHS] += is_row.sum()
    usual = (sums_S[SUM_LOGS] / sums_S[SUM_LENGTHS]).exp()
    is_counted = is_row & (lengths_N <= LARGEST_NORM * usual) & error_N.isfinite()
    sums_S[SUM_ROWS] += is_counted.sum()
    sums_S[SUM_ERRORS] += error_N[is_counted].sum()
    sums_S[SUM_SQUARES] += h_ND[is_counted].square().sum()
    sums_S[NUM_SUMS:] += h_ND[is_counted].sum(0)


def _normed(h: Tensor, norm: InputNorm) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows as an encoder reads them, and what its decoder's output is multiplied by and added to."""
    none = torch.zeros_like(h[:, :1])
    if norm == InputNorm.LAYER_NORM:
        mean, std = h.mean(-1, keepdim=True), h.std(-1, keepdim=True)
        return (h - mean) / (std + LAYER_NORM_EPS), std, mean
    if norm == InputNorm.CONSTANT_NORM:
        gain = h.square().sum(-1, keepdim=True).sqrt() / h.shape[-1] ** 0.5
        return torch.where(gain > 0, h / gain, 0), gain, none
    return h, torch.ones_like(none), none
