"""Edits of SAE features, and reconstructions by SAEs: parsed, checked, and lowered to entries of a program. Numpy only.

A request names an SAE of the server and a feature of it; the engine core, which has the SAEs, reads the feature's rows
when it lowers (`feature_entries`). A feature's encoder and decoder row are stored like other rows: times a power of two
so that the largest magnitude lies between 1/2 and 1, and rounded to the model's dtype; the entry's scales undo the
power.

A feature of an SAE is one entry. One of a transcoder is an entry where it reads, and one at each site that it writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
from headgate.steering.programs.program import Entry
from headgate.steering.vectors.dtypes import STORAGE, Float32Rows, Rows, StoredType, widen
from headgate.steering.vectors.sums import BLOCK, LARGEST_NUMBER, LIMIT, round_to

NO_FEATURE = -1
"""In place of a feature's index: the SAE's error is dropped, and no feature changed."""


class FeatureEdit(NamedTuple):
    """One change of one feature's activation; or a reconstruction, which drops the error of the SAE.

    Attributes:
        sae: Name of the SAE.
        feature: Index of the feature; `NO_FEATURE` of a reconstruction.
        edit: How the target follows from the activation.
        value: Value of the edit, finite in float32.
        is_relative: The value is in units of the largest activation that the SAE declares of the feature.
        only_if_active: Rows where the feature is not active stay.
        site: Where the client says the SAE acts; None if it does not say.
        where: Path in the client's document, for errors; likewise of the SAE's name and of the feature's index.
        sae_at: See `where`.
        feature_at: See `where`.
    """

    sae: str
    feature: int
    edit: Edit
    value: float
    is_relative: bool = False
    only_if_active: bool = False
    site: Site | None = None
    where: str = "steering_features"
    sae_at: str = "steering_features"
    feature_at: str = "steering_features"

    @property
    def is_reconstruction(self) -> bool:
        """Whether the row becomes what the SAE decodes of it, with the changes of its features."""
        return self.feature == NO_FEATURE

    @property
    def reads(self) -> bool:
        """Whether the change depends on the feature's activation."""
        return self.edit is not Edit.PLUS or self.only_if_active

    @property
    def content(self) -> tuple[Any, ...]:
        """Everything that decides what it does, without paths."""
        return self.sae, self.feature, int(self.edit), self.value, self.is_relative, self.only_if_active


def reconstruction(sae: str, where: str) -> FeatureEdit:
    """Return the reconstruction by an SAE.

    Args:
        sae: Name of the SAE.
        where: Path of the name in the client's document.
    """
    return FeatureEdit(sae, NO_FEATURE, Edit.PLUS, 0.0, where=where, sae_at=where, feature_at=where)


class SaeFacts(NamedTuple):
    """An SAE of the server as requests are checked against it.

    Attributes:
        sites: Where an SAE reads and writes; of a transcoder, where it reads, and then all sites that it writes.
        num_features: Its features are 0 to ``num_features - 1``.
        decision: How a feature's own row decides whether it is active: ``exact``; by a ``threshold`` in place of a
            selection among all features, an approximation; or ``none``, not at all.
        has_max_act: Whether it declares the largest activation of each feature.
        is_encoded: Whether rows can become its reconstructions.
    """

    sites: tuple[Site, ...]
    num_features: int
    decision: str
    has_max_act: bool
    is_encoded: bool = False

    @property
    def site(self) -> Site:
        """Where it reads."""
        return self.sites[0]

    @property
    def is_transcoder(self) -> bool:
        """Whether it writes elsewhere than it reads."""
        return len(self.sites) > 1

    @classmethod
    def from_plain(cls, described: Mapping[str, Any]) -> SaeFacts:
        """Read them from the engine core's description of an SAE."""
        site, write_sites = described["site"], described["write_sites"]
        names = [site] if write_sites == [site] else [site, *write_sites]
        keys = ("num_features", "decision", "has_max_act", "is_encoded")
        return cls(sites=tuple(Site.parse(name) for name in names), **{key: described[key] for key in keys})


def sae_key(name: str) -> str:
    """Return the key of an SAE among the registered names of an engine core, which no module can have."""
    return f"sae\n{name}"


def check_edits(edits: Sequence[FeatureEdit], facts_of: Callable[[FeatureEdit], SaeFacts], max_per_site: int) -> None:
    """Check the edits of one phase against the SAEs that they name.

    Args:
        edits: Edits of one phase.
        facts_of: Finds an edit's SAE; raises `RequestError` if there is none.
        max_per_site: Features at one site, at most.

    Raises:
        RequestError: Naming the field that is wrong.
    """
    counts: Counter[Site] = Counter()
    num_changes = 0
    for edit in edits:
        facts = facts_of(edit)
        if edit.is_reconstruction:
            _check_reconstruction(edit, facts)
            continue
        _check_edit(edit, facts)
        acting = facts.sites if edit.reads or not facts.is_transcoder else facts.sites[1:]
        counts.update(acting)
        crowded = next((site for site in acting if counts[site] > max_per_site), None)
        if crowded is not None:
            raise RequestError(
                edit.where,
                f"is one feature too many at {crowded.name}: {max_per_site} of one phase can be changed at a site; "
                "the operator sets --max-sae-features",
            )
        num_changes += edit.reads and facts.is_transcoder
        if num_changes > max_per_site:
            raise RequestError(edit.where, f"is one transcoder's feature too many: {too_many_changes(max_per_site)}")


def too_many_changes(limit: int) -> str:
    """Return the rule about features of transcoders, for errors."""
    return f"{limit} can be changed in one phase, at all sites together; the operator sets --max-sae-features"


def _check_reconstruction(edit: FeatureEdit, facts: SaeFacts) -> None:
    if not facts.is_encoded:
        raise RequestError(
            edit.where,
            f"SAE {edit.sae!r} is not encoded in full on this server, so it reconstructs no row; the operator names "
            "those that are with --sae-encode",
        )


def _check_edit(edit: FeatureEdit, facts: SaeFacts) -> None:
    if edit.feature >= facts.num_features:
        raise RequestError(
            edit.feature_at, f"SAE {edit.sae!r} has the features 0 to {facts.num_features - 1}, got {edit.feature}"
        )
    if edit.site is not None and edit.site != facts.site:
        does = "reads" if facts.is_transcoder else "acts"
        raise RequestError(edit.where, f"SAE {edit.sae!r} {does} at {facts.site.name}, not at {edit.site.name}")
    if edit.is_relative and not facts.has_max_act:
        raise RequestError(
            f"{edit.where}.unit", f"SAE {edit.sae!r} does not declare the largest activations of its features; use raw"
        )
    if edit.reads and facts.decision == "none" and not facts.is_encoded:
        raise RequestError(
            edit.sae_at,
            f"SAE {edit.sae!r} selects the largest activations of a row (top-k) and has no threshold, so one feature's "
            "activation is not known without all others: 'add' works; the operator can let it be encoded in full "
            "(--sae-encode), or import it with --threshold",
        )


_ACTIVATIONS: dict[CoderKind, FeatureActivation] = {
    CoderKind.RELU: FeatureActivation.RELU,
    CoderKind.JUMPRELU: FeatureActivation.JUMP_RELU,
    CoderKind.GATED: FeatureActivation.GATED,
    CoderKind.TOPK: FeatureActivation.JUMP_RELU,  # with a threshold in place of the selection, unless encoded
    CoderKind.GROUPMAX: FeatureActivation.JUMP_RELU,
}

INPUT_NORMS: dict[Norm, InputNorm] = {
    Norm.NONE: InputNorm.NONE,
    Norm.LAYER_NORM: InputNorm.LAYER_NORM,
    Norm.CONSTANT_NORM_RESCALE: InputNorm.CONSTANT_NORM,
}


def feature_entries(
    coder: SparseCoder,
    site: Site,
    edits: Sequence[FeatureEdit],
    dtype: StoredType,
    changes: Iterator[int],
    *,
    is_encoded: bool = False,
) -> list[Entry]:
    """Return the entries of edits of features of one SAE or transcoder, and of its reconstruction, if there is one.

    Args:
        coder: Rows of the features are read from its file.
        site: Where it reads; an SAE writes there, too.
        edits: Checked with `headgate.steering.programs.feature_edits.check_edits`.
        dtype: The model's.
        changes: Gives indices of a row's changes, for features that are written elsewhere than they are read.
        is_encoded: Whether workers encode rows in full: activations of top-k are then those of the selection.

    Raises:
        RequestError: Naming the edit that changes a row by more than `dtype` holds.
        FeatureFileError: If a row of the file is not finite.
    """
    marks = [_mark(coder, site) for edit in edits if edit.is_reconstruction]
    of_features = [edit for edit in edits if not edit.is_reconstruction]
    if not of_features:
        return marks
    if is_encoded and coder.kind is CoderKind.TOPK:
        return [*marks, *_selected_entries(coder, site, of_features, dtype)]
    return [*marks, *_feature_entries(coder, site, of_features, dtype, changes)]


_DIGEST_BYTES = 3
"""Bytes of a checksum that a float32 holds exactly, as an integer."""


def _mark(coder: SparseCoder, site: Site) -> Entry:
    """Return the entry of rows that the SAE of the site reconstructs. It writes zeros: a program has rows.

    Its numbers do nothing. They are the beginning of the SAE's checksum, so that programs of other SAEs have other
    keys, as those of features have by their rows.
    """
    numbers = _digest_numbers(coder, NUM_PARAMS - P0)
    return Entry(site, Code.RECONSTRUCT, None, np.zeros(coder.width, np.float32), (0.0, 0.0, *numbers))


def _digest_numbers(coder: SparseCoder, count: int) -> list[int]:
    digest = np.frombuffer(bytes.fromhex(coder.source_sha256)[: _DIGEST_BYTES * count], np.uint8)
    numbers: list[int] = (digest.reshape(-1, _DIGEST_BYTES) @ [1 << 16, 1 << 8, 1]).tolist()
    return numbers


def _selected_entries(coder: SparseCoder, site: Site, edits: Sequence[FeatureEdit], dtype: StoredType) -> list[Entry]:
    """Return the entries of features of an encoded top-k SAE, whose activations come from its selection.

    They read no row, and name the feature; numbers that they do not need are the beginning of the SAE's checksum, for
    the keys of programs.
    """
    features = [edit.feature for edit in edits]
    decoders, values = coder.rows(features).decoder, _values(coder, edits, features)
    _check_sizes(edits, values, _peaks(decoders), dtype)
    stored, scales = _stored(decoders, dtype)
    entries: list[Entry] = []
    for index, edit in enumerate(edits):
        write = _Write(site, stored[index], float(scales[index]))
        if not edit.reads:
            entries += _added([write], INPUT_NORMS[coder.norm], float(values[index]))
            continue
        flag = Flag.IF_ACTIVE if edit.only_if_active else 0
        code = Code.FEATURE | INPUT_NORMS[coder.norm] | FeatureActivation.SELECTED | edit.edit | flag
        numbers = _digest_numbers(coder, NUM_PARAMS - P3)
        entries.append(
            Entry(site, code, None, write.row, [0.0, write.scale, 0.0, edit.feature, float(values[index]), *numbers])
        )
    return entries


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
