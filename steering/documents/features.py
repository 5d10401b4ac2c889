"""A request's edits of SAE features and reconstructions, read from its fields: lists, and specs as `SPECS_FORM`.

Lists come as a base field and one for each phase. Nothing here knows the server's SAEs: what depends on them is checked
by `headgate.steering.programs.feature_edits.check_edits`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from headgate.capture.schema.errors import RequestError, check_keys, read_flag, shown
from headgate.capture.schema.sites import Site, parse_hook
from headgate.steering.documents.operations import layer_site
from headgate.steering.documents.schema import Count
from headgate.steering.documents.vectors import check_scale
from headgate.steering.programs.codes import Edit
from headgate.steering.programs.feature_edits import FeatureEdit, reconstruction, sae_key
from headgate.steering.vectors.phase_vectors import MAX_NAME, Steerable, check_name


class FeatureFields(NamedTuple):
    """Names of the fields of features.

    Attributes:
        features: Lists of edits: base, prefill and decode.
        reconstructions: Lists of the SAEs that reconstruct rows, likewise.
        specs: Specs by SAE, of edits alone and of reconstructions with edits; None if there are no such fields.
    """

    features: tuple[str, str, str]
    reconstructions: tuple[str, str, str]
    specs: tuple[str, str] | None = None

    @property
    def all(self) -> tuple[str, ...]:
        """Every name."""
        return (*self.features, *self.reconstructions, *(self.specs or ()))


_RECONSTRUCTIONS = ("sae_reconstruction", "prefill_sae_reconstruction", "decode_sae_reconstruction")
REQUEST_FEATURES = FeatureFields(
    ("steering_features", "prefill_steering_features", "decode_steering_features"),
    _RECONSTRUCTIONS,
    ("sae_clamp_specs", "sae_full_reconstruction_specs"),
)
MODULE_FEATURES = FeatureFields(("features", "prefill_features", "decode_features"), _RECONSTRUCTIONS)
"""In the documents of modules and of the global state."""

SPECS_FORM = (
    '[{"module_name", "clamps": {hook: {layer: [{"feature_idx", "kind": "absolute" or "additive", "value", '
    '"only_if_active"}]}}, "phase": "both", "prefill" or "decode"}]'
)
"""Where rows are reconstructed, there may be no clamps."""

EDIT_KEYS: dict[str, Edit] = {
    "set": Edit.SET,
    "add": Edit.PLUS,
    "scale": Edit.TIMES,
    "min": Edit.AT_LEAST,
    "max": Edit.AT_MOST,
}
EDIT_ALIASES: dict[str, str] = {"pin": "set", "nudge": "add", "strength": "add", "mul": "scale"}
"""Names of other tools."""

_EDITS = {**EDIT_KEYS, **{alias: EDIT_KEYS[name] for alias, name in EDIT_ALIASES.items()}}


class EditDocument(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An edit of one feature: exactly one of set, add, scale, min and max. All edits act after all operations, at once.

    Attributes:
        sae: Name of an SAE of the server.
        unit: Of the value: the activation itself, or the largest activation that the SAE declares.
    """

    sae: str
    feature: Count
    set: float | None = None
    add: float | None = None
    scale: float | None = None
    min: float | None = None
    max: float | None = None
    unit: Literal["raw", "max_act"] = "raw"
    only_if_active: bool = False


Edits = list[EditDocument] | None
Reconstructions = Annotated[
    list[str] | None,
    msgspec.Meta(description="Names of SAEs of the server's --sae-encode; the reconstruction's error is dropped."),
]
_KEYS = EditDocument.__struct_fields__
_UNITS = {"raw": False, "max_act": True}
_KINDS = {"absolute": Edit.SET, "additive": Edit.PLUS}
_PHASES = {"both": 0, "prefill": 1, "decode": 2}
_SPEC_KEYS = {"module_name", "clamps", "phase"}
_ENTRY_KEYS = {"feature_idx", "kind", "value", "only_if_active"}
_MAX_FEATURE = 2**31


class PhaseFeatures(NamedTuple):
    """The edits of a request by phase, in the order of SAE and feature; one object for both phases if they are alike.

    Attributes:
        prefill: At prompt positions.
        decode: At generated positions.
    """

    prefill: tuple[FeatureEdit, ...] = ()
    decode: tuple[FeatureEdit, ...] = ()

    @property
    def names(self) -> dict[str, str]:
        """The keys of the SAEs that are named, each with the path that names it first."""
        found: dict[str, str] = {}
        for edit in (*self.prefill, *self.decode):
            found.setdefault(sae_key(edit.sae), edit.sae_at)
        return found


def read_features(
    fields: Mapping[str, Any], steerable: Steerable, names: FeatureFields = REQUEST_FEATURES
) -> PhaseFeatures:
    """Read the edits and reconstructions of a request or a module.

    Args:
        fields: Values by field; others than those of `names` are left alone, and None is the same as absent.
        steerable: The model and its limits.
        names: Names of the fields.

    Raises:
        RequestError: Naming the field that is wrong.
    """
    given = [name for name in names.all if fields.get(name) is not None]
    if not given:
        return PhaseFeatures()
    check_has_saes(steerable, given[0])
    tiers: list[list[FeatureEdit]] = [[], [], []]
    for read, fields_of_tiers in ((_listed, names.features), (_reconstructions, names.reconstructions)):
        for tier, name in zip(tiers, fields_of_tiers, strict=True):
            if fields.get(name) is not None:
                tier.extend(read(fields[name], steerable, name))
    for name, reconstructs in zip(names.specs or (), (False, True), strict=False):
        if fields.get(name) is not None:
            for tier_index, edit in _specs(fields[name], steerable, name, reconstructs=reconstructs):
                tiers[tier_index].append(edit)
    prefill = _phase([*tiers[0], *tiers[1]])
    return PhaseFeatures(prefill, prefill if not tiers[1] and not tiers[2] else _phase([*tiers[0], *tiers[2]]))


def read_global_features(document: Mapping[str, Any], steerable: Steerable) -> dict[str, PhaseFeatures]:
    """Read the edits and reconstructions of a global document, by field; fields that it does not mention are absent.

    An empty list says that the field has none from here on.

    Raises:
        RequestError: Naming the field that is wrong.
    """
    given = {name: document[name] for name in MODULE_FEATURES.all if document.get(name) is not None}
    acting = {name: value for name, value in given.items() if value not in ([], ())}
    read_features(acting, steerable, MODULE_FEATURES)  # all together: no feature is given twice
    return {
        name: read_features({name: acting[name]}, steerable, MODULE_FEATURES) if name in acting else PhaseFeatures()
        for name in given
    }


def read_edits(value: object, steerable: Steerable, field: str) -> tuple[FeatureEdit, ...]:
    """Read one list of edits.

    Raises:
        RequestError: Naming the field that is wrong.
    """
    check_has_saes(steerable, field)
    return _phase(list(_listed(value, steerable, field)))


def check_has_saes(steerable: Steerable, field: str) -> None:
    """Refuse `field` where there are no SAEs.

    Raises:
        RequestError: If there can be none.
    """
    if not steerable.max_sae_features:
        raise RequestError(field, "this server has no SAEs; the operator starts it with --saes or --sae-root")


def _phase(edits: Sequence[FeatureEdit]) -> tuple[FeatureEdit, ...]:
    """Order the edits of a phase, whose order means nothing: then equal content has equal keys."""
    found: dict[tuple[str, int], FeatureEdit] = {}
    for edit in edits:
        other = found.setdefault((edit.sae, edit.feature), edit)
        if other is not edit:
            what = "" if edit.is_reconstruction else f"feature {edit.feature} of "
            raise RequestError(edit.feature_at, f"{what}SAE {edit.sae!r} is given twice, also as {other.where}")
    return tuple(found[key] for key in sorted(found))


def _listed(value: object, steerable: Steerable, field: str) -> Iterator[FeatureEdit]:
    if not isinstance(value, list | tuple) or not value:
        raise RequestError(field, f"expected a non-empty list of edits of features, got {shown(value)}")
    _check_total(len(value), steerable, field)
    for index, document in enumerate(value):
        yield _edit(document, f"{field}[{index}]")


def _reconstructions(value: object, steerable: Steerable, field: str) -> Iterator[FeatureEdit]:
    if not isinstance(value, list | tuple) or not value:
        raise RequestError(field, f"expected a non-empty list of names of SAEs, got {shown(value)}")
    if len(value) > len(steerable.op_sites):
        sites = len(steerable.op_sites)
        raise RequestError(field, f"names {len(value)} SAEs, at most {sites} can be named: one for each site")
    for index, name in enumerate(value):
        where = f"{field}[{index}]"
        yield reconstruction(check_name(name, where, "an SAE"), where)


def _check_total(count: int, steerable: Steerable, field: str) -> None:
    limit = max(1, len(steerable.op_sites)) * steerable.max_sae_features
    if count > limit:
        raise RequestError(
            field,
            f"has {count} features, at most {limit} can be changed: {steerable.max_sae_features} at a site; the "
            "operator sets --max-sae-features",
        )


def _edit(document: object, where: str) -> FeatureEdit:
    if not isinstance(document, Mapping) or not 0 < len(document) <= 2 * len(_KEYS):
        raise RequestError(where, f'expected an edit, such as {{"sae", "feature", "set"}}; got {shown(document)}')
    check_keys(document, (*_KEYS, *EDIT_ALIASES), where, "an edit")
    given = {key: value for key, value in document.items() if value is not None}
    for key in ("sae", "feature"):
        if key not in given:
            raise RequestError(f"{where}.{key}", "is missing")
    edits = [key for key in given if key in _EDITS]
    if len(edits) != 1:
        got = f"got {' and '.join(edits)}" if edits else "got none of them"
        raise RequestError(
            f"{where}.{edits[1]}" if edits else where, f"expected exactly one of {', '.join(EDIT_KEYS)}; {got}"
        )
    edit = _EDITS[edits[0]]
    return FeatureEdit(
        sae=check_name(given["sae"], f"{where}.sae", "an SAE"),
        feature=read_feature(given["feature"], f"{where}.feature"),
        edit=edit,
        value=check_scale(given[edits[0]], f"{where}.{edits[0]}"),
        is_relative=_is_relative(given.get("unit", "raw"), edit, f"{where}.unit"),
        only_if_active=read_flag(given.get("only_if_active", False), f"{where}.only_if_active"),
        where=where,
        sae_at=f"{where}.sae",
        feature_at=f"{where}.feature",
    )


def read_feature(value: object, where: str) -> int:
    """Read the index of a feature.

    Raises:
        RequestError: If it is none.
    """
    if type(value) is not int or not 0 <= value < _MAX_FEATURE:
        raise RequestError(where, f"expected the index of a feature, from 0 on; got {shown(value)}")
    return value


def _is_relative(unit: object, edit: Edit, where: str) -> bool:
    if not isinstance(unit, str) or unit not in _UNITS:
        raise RequestError(where, f"expected raw or max_act, got {shown(unit)}")
    if _UNITS[unit] and edit is Edit.TIMES:
        raise RequestError(where, "a scale has no unit: it multiplies the activation")
    return _UNITS[unit]


def _specs(value: object, steerable: Steerable, field: str, *, reconstructs: bool) -> Iterator[tuple[int, FeatureEdit]]:
    """Yield the edits in specs by SAE, each with its tier; the SAE's reconstruction first, if that is asked for."""
    if not isinstance(value, list | tuple) or not value:
        raise RequestError(field, f"expected {SPECS_FORM}, got {shown(value)}")
    _check_total(len(value), steerable, field)
    required = {"module_name"} if reconstructs else {"module_name", "clamps"}
    count = 0
    for index, spec in enumerate(value):
        where = f"{field}[{index}]"
        if not isinstance(spec, Mapping) or not required <= set(spec) <= _SPEC_KEYS:
            raise RequestError(where, f"expected the keys {sorted(_SPEC_KEYS)}, got {shown(spec)}")
        name = check_name(spec["module_name"], f"{where}.module_name", "an SAE")
        phase = spec.get("phase", "both")
        if not isinstance(phase, str) or phase not in _PHASES:
            raise RequestError(f"{where}.phase", f"expected one of {', '.join(_PHASES)}, got {shown(phase)}")
        if reconstructs:
            yield _PHASES[phase], reconstruction(name, f"{where}.module_name")
            if spec.get("clamps") in (None, {}):
                continue
        for site, entry, place in _clamps(spec["clamps"], steerable, f"{where}.clamps"):
            count += 1
            _check_total(count, steerable, field)
            yield _PHASES[phase], _spec_edit(entry, name, site, place, f"{where}.module_name")


def _clamps(value: object, steerable: Steerable, where: str) -> Iterator[tuple[Site, object, str]]:
    if not isinstance(value, Mapping) or not value:
        raise RequestError(where, f"expected {{hook: {{layer: [clamp]}}}}, got {shown(value)}")
    for name, layers in value.items():
        if isinstance(name, str) and len(name) > MAX_NAME:
            raise RequestError(where, f"unknown hook point {shown(name)}")
        hook_at = f"{where}.{name}"
        hook = parse_hook(name, hook_at)
        if not isinstance(layers, Mapping) or not 0 < len(layers) <= steerable.num_layers:
            raise RequestError(hook_at, f"expected {{layer: [clamp]}}, got {shown(layers)}")
        for layer, entries in layers.items():
            place = f"{hook_at}.{layer}" if len(str(layer)) <= MAX_NAME else hook_at
            (site,) = layer_site(hook, layer, steerable, place)
            if not isinstance(entries, list | tuple) or not entries:
                raise RequestError(place, f"expected a non-empty list of clamps, got {shown(entries)}")
            for index, entry in enumerate(entries):
                yield site, entry, f"{place}[{index}]"


def _spec_edit(entry: object, name: str, site: Site, where: str, sae_at: str) -> FeatureEdit:
    if not isinstance(entry, Mapping) or not {"feature_idx", "kind", "value"} <= set(entry) <= _ENTRY_KEYS:
        raise RequestError(where, f"expected a clamp with the keys {sorted(_ENTRY_KEYS)}, got {shown(entry)}")
    kind = entry["kind"]
    if not isinstance(kind, str) or kind not in _KINDS:
        raise RequestError(f"{where}.kind", f"expected one of {', '.join(_KINDS)}, got {shown(kind)}")
    return FeatureEdit(
        sae=name,
        feature=read_feature(entry["feature_idx"], f"{where}.feature_idx"),
        edit=_KINDS[kind],
        value=check_scale(entry["value"], f"{where}.value"),
        only_if_active=read_flag(entry.get("only_if_active", False), f"{where}.only_if_active"),
        site=site,
        where=where,
        sae_at=sae_at,
        feature_at=f"{where}.feature_idx",
    )
