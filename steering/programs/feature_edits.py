"""Edits of SAE features, and reconstructions by SAEs, in canonical form: parsed, checked, not lowered yet. Standard
library only.

A request names an SAE of the server and a feature of it; the engine core, which has the SAEs, reads the feature's rows
when it lowers (`headgate.steering.programs.feature_lowering`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.programs.codes import Edit

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


FeatureEditsWire = list[list[Any]]
"""Edits as plain values: one list of values for each, in the order of `FeatureEdit`."""


def reconstruction(sae: str, where: str) -> FeatureEdit:
    """Return the reconstruction by an SAE.

    Args:
        sae: Name of the SAE.
        where: Path of the name in the client's document.
    """
    return FeatureEdit(sae, NO_FEATURE, Edit.PLUS, 0.0, where=where, sae_at=where, feature_at=where)


def edits_to_wire(edits: Iterable[FeatureEdit]) -> FeatureEditsWire:
    """Return plain values that `edits_from_wire` reads back."""
    return [
        [
            *(edit.sae, edit.feature, int(edit.edit), edit.value, edit.is_relative, edit.only_if_active),
            None if edit.site is None else [edit.site.layer, edit.site.hook.value],
            *(edit.where, edit.sae_at, edit.feature_at),
        ]
        for edit in edits
    ]


def edits_from_wire(wire: FeatureEditsWire) -> tuple[FeatureEdit, ...]:
    """Return the edits that `edits_to_wire` wrote."""
    return tuple(
        FeatureEdit(
            sae=sae,
            feature=feature,
            edit=Edit(edit),
            value=value,
            is_relative=is_relative,
            only_if_active=only_if_active,
            site=None if site is None else Site(site[0], HookPoint(site[1])),
            where=where,
            sae_at=sae_at,
            feature_at=feature_at,
        )
        for sae, feature, edit, value, is_relative, only_if_active, site, where, sae_at, feature_at in wire
    )


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
    if edit.reads and facts.decision == "none":
        raise RequestError(
            edit.sae_at,
            f"SAE {edit.sae!r} selects the largest activations of a row (top-k) and has no threshold, so one feature's "
            "activation is not known without all others: 'add' works, or import it with --threshold",
        )
