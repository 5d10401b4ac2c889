"""Edits of features, and reconstructions, become entries of a program. Numpy only.

A feature's encoder and decoder row are stored like other rows: times a power of two so that the largest magnitude lies
between 1/2 and 1, and rounded to the model's dtype; the entry's scales undo the power.

A feature of an SAE is one entry. One of a transcoder is an entry where it reads, and one at each site that it writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import Site
from headgate.steering.features.source_coder import CoderKind, Norm
from headgate.steering.features.sparse_coder import FeatureRows, SparseCoder
from headgate.steering.programs.codes import (
    NUM_PARAMS,
    P0,
    P1,
    P2,
    P3,
    P4,
    P5,
    READ_SCALE,
    WRITE_SCALE,
    Code,
    Edit,
    FeatureActivation,
    Flag,
    InputNorm,
    with_change,
)
from headgate.steering.programs.feature_edits import FeatureEdit
from headgate.steering.programs.program import Entry
from headgate.steering.vectors.dtypes import STORAGE, Float32Rows, Rows, StoredType, widen
from headgate.steering.vectors.sums import BLOCK, LARGEST_NUMBER, LIMIT, round_to

_ACTIVATIONS: dict[CoderKind, FeatureActivation] = {
    CoderKind.RELU: FeatureActivation.RELU,
    CoderKind.JUMPRELU: FeatureActivation.JUMP_RELU,
    CoderKind.GATED: FeatureActivation.GATED,
    CoderKind.TOPK: FeatureActivation.JUMP_RELU,  # with a threshold in place of the selection
    CoderKind.GROUPMAX: FeatureActivation.JUMP_RELU,
}

INPUT_NORMS: dict[Norm, InputNorm] = {
    Norm.NONE: InputNorm.NONE,
    Norm.LAYER_NORM: InputNorm.LAYER_NORM,
    Norm.CONSTANT_NORM_RESCALE: InputNorm.CONSTANT_NORM,
}


def feature_entries(
    coder: SparseCoder, site: Site, edits: Sequence[FeatureEdit], dtype: StoredType, changes: Iterator[int]
) -> list[Entry]:
    """Return the entries of edits of features of one SAE or transcoder, and of its reconstruction, if there is one.

    Args:
        coder: Rows of the features are read from its file.
        site: Where it reads; an SAE writes there, too.
        edits: Checked with `headgate.steering.programs.feature_edits.check_edits`.
        dtype: The model's.
        changes: Gives indices of a row's changes, for features that are written elsewhere than they are read.

    Raises:
        RequestError: Naming the edit that changes a row by more than `dtype` holds.
        FeatureFileError: If a row of the file is not finite.
    """
    marks = [_mark(coder, site) for edit in edits if edit.is_reconstruction]
    of_features = [edit for edit in edits if not edit.is_reconstruction]
    return [*marks, *(_feature_entries(coder, site, of_features, dtype, changes) if of_features else ())]


_DIGEST_BYTES = 3
"""Bytes of a checksum that a float32 holds exactly, as an integer."""


def _mark(coder: SparseCoder, site: Site) -> Entry:
    """Return the entry of rows that the SAE of the site reconstructs. It writes zeros: a program has rows.

    Its numbers do nothing. They are the beginning of the SAE's checksum, so that programs of other SAEs have other
    keys, as those of features have by their rows.
    """
    digest = np.frombuffer(bytes.fromhex(coder.source_sha256)[: _DIGEST_BYTES * (NUM_PARAMS - P0)], np.uint8)
    numbers = digest.reshape(-1, _DIGEST_BYTES) @ [1 << 16, 1 << 8, 1]
    return Entry(site, Code.RECONSTRUCT, None, np.zeros(coder.width, np.float32), (0.0, 0.0, *numbers.tolist()))


def _feature_entries(
    coder: SparseCoder, site: Site, edits: Sequence[FeatureEdit], dtype: StoredType, changes: Iterator[int]
) -> list[Entry]:
    features = [edit.feature for edit in edits]
    rows = coder.rows(features)
    values = _values(coder, edits, features)
    _check_sizes(edits, values, _peaks(rows.decoders).max(axis=0), dtype)
    read, read_scales = _stored(rows.encoder, dtype)
    params = _params(rows, values, read_scales, widen(read, dtype))
    write_sites = coder.write_sites if coder.is_transcoder else (site,)
    written = [_stored(decoder, dtype) for decoder in rows.decoders]
    entries: list[Entry] = []
    for index, edit in enumerate(edits):
        writes = [
            _Write(at, stored[index], float(scales[index]))
            for at, (stored, scales) in zip(write_sites, written, strict=True)
        ]
        if not edit.reads:
            entries += _added(writes, INPUT_NORMS[coder.norm], float(params[index, P2]))
            continue
        flag = Flag.IF_ACTIVE if edit.only_if_active else 0
        code = INPUT_NORMS[coder.norm] | _ACTIVATIONS[coder.kind] | edit.edit | flag
        if coder.is_transcoder:
            entries += _halves(Entry(site, code, read[index], None, params[index].tolist()), writes, next(changes))
        else:
            params[index, WRITE_SCALE] = writes[0].scale
            entries.append(Entry(site, Code.FEATURE | code, read[index], writes[0].row, params[index].tolist()))
    return entries


def reading_entry(coder: SparseCoder, site: Site, feature: int, dtype: StoredType) -> Entry:
    """Return an entry that reads a feature's activation, without a code: its bits of activation and norm alone.

    Args:
        coder: The feature is read from its file.
        site: Where it reads.
        feature: Below `SparseCoder.num_features`.
        dtype: The model's.

    Raises:
        FeatureFileError: If a row of the file is not finite.
    """
    rows = coder.rows([feature])
    read, scales = _stored(rows.encoder, dtype)
    params = _params(rows, np.zeros(1), scales, widen(read, dtype))[0]
    params[WRITE_SCALE] = 0.0
    return Entry(site, INPUT_NORMS[coder.norm] | _ACTIVATIONS[coder.kind], read[0], None, params.tolist())


class _Write(NamedTuple):
    """A decoder row of a feature as it is stored, and the power of two that it must be multiplied by."""

    site: Site
    row: Rows
    scale: float


def _params(
    rows: FeatureRows, values: npt.NDArray[np.float64], read_scales: npt.NDArray[np.float64], read: Float32Rows
) -> Float32Rows:
    """Return the params of an entry for each feature, which writes its row as it is stored."""
    params = np.zeros((len(values), NUM_PARAMS), np.float32)
    params[:, READ_SCALE], params[:, WRITE_SCALE] = read_scales, 1.0
    params[:, P0], params[:, P2] = rows.bias, values
    params[:, P1] = np.maximum(np.nan_to_num(rows.threshold), 0)  # activations are relu(q) above the threshold
    params[:, P3], params[:, P4] = rows.magnitude_scale, rows.magnitude_bias
    params[:, P5] = read.sum(axis=1, dtype=np.float64)
    return params


def _added(writes: Sequence[_Write], norm: InputNorm, value: float) -> list[Entry]:
    """Return the entries of a value that is added to an activation, whatever that is: nothing is read."""
    code = Code.FEATURE | norm | FeatureActivation.RELU | Edit.PLUS
    return [Entry(one.site, code, None, one.row, [0.0, one.scale, 0.0, 0.0, value]) for one in writes]


def _halves(reads: Entry, writes: Sequence[_Write], change: int) -> list[Entry]:
    """Return the entry that reads a feature, and the entries that write it."""
    code = with_change(Code.WRITE_FEATURE, change)
    return [
        reads._replace(code=with_change(Code.READ_FEATURE | reads.code, change)),
        *(Entry(one.site, code, None, one.row, [0.0, one.scale]) for one in writes),
    ]


def _values(coder: SparseCoder, edits: Sequence[FeatureEdit], features: list[int]) -> npt.NDArray[np.float64]:
    values = np.array([edit.value for edit in edits])
    if not any(edit.is_relative for edit in edits):
        return values
    largest = coder.max_activations(features)
    if largest is None:
        raise AssertionError(f"{coder.name} has no largest activations, which were checked")
    for index, edit in enumerate(edits):
        if edit.is_relative and not 0 < largest[index] < np.inf:
            raise RequestError(
                f"{edit.where}.unit",
                f"the largest activation that SAE {edit.sae!r} declares of feature {edit.feature} is {largest[index]}",
            )
    return np.where([edit.is_relative for edit in edits], values * largest, values)


def _stored(rows: Float32Rows, dtype: StoredType) -> tuple[Rows, npt.NDArray[np.float64]]:
    """Return rows as they are stored, and the power of two for each that they must be multiplied by."""
    exponents = np.frexp(_peaks(rows))[1]
    stored = np.empty(rows.shape, STORAGE[dtype])
    step = max(BLOCK // rows.shape[1], 1)
    for part in (slice(start, start + step) for start in range(0, len(rows), step)):
        stored[part] = round_to(np.ldexp(rows[part], -exponents[part, None]), dtype)
    return stored, np.ldexp(1.0, exponents)


def _peaks(rows: Float32Rows) -> Float32Rows:
    """Return the largest magnitude of each row: without an array of all magnitudes."""
    peaks: Float32Rows = np.maximum(rows.max(axis=-1), -rows.min(axis=-1))
    return peaks


def _check_sizes(
    edits: Sequence[FeatureEdit],
    values: npt.NDArray[np.float64],
    peaks: npt.NDArray[np.float32],
    dtype: StoredType,
) -> None:
    """Refuse changes whose largest value is beyond `LIMIT`."""
    for edit, value, peak in zip(edits, values.tolist(), peaks.tolist(), strict=True):
        largest = abs(value) * peak
        if not (largest < LIMIT[dtype] and abs(value) < LARGEST_NUMBER):
            raise RequestError(
                edit.where,
                f"would change a row by up to {largest:.4g}; changes for a model in {dtype} must stay below "
                f"{LIMIT[dtype]:.4g}",
            )
