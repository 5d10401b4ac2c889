"""Steering where requests are made: its fields are read and checked here."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any, cast

from headgate.capture.engine.contracts.request_part import EngineCores, FlagGroup, Known, PartRequest, PartRequestReader
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.errors import RequestError
from headgate.steering.config import add_flags, parse_config, read_flags
from headgate.steering.control.handle import AsyncSteering, Steering
from headgate.steering.requests.identity_cache import IdentityCache
from headgate.steering.requests.request_fields import (
    BASE,
    DECODE,
    MODULE_REF,
    NAME,
    PREFILL,
    read_modules,
    read_steering,
)
from headgate.steering.requests.wire import to_wire
from headgate.steering.vectors.dtypes import StoredType
from headgate.steering.vectors.phase_vectors import ModuleRef, Steerable, SteeringSpec
from headgate.steering.vectors.sums import LIMIT, peak

FIELD_DOCS = {
    BASE: "Vectors to add at prompt and generated positions: {hook: {layer: vector}}.",
    PREFILL: "Vectors to add at prompt positions in addition.",
    DECODE: "Vectors to add at generated positions in addition.",
    NAME: "Registered modules to add, by name: a text, or a list of texts.",
    MODULE_REF: "Registered modules to add, scaled: (name, scale), or a list of these.",
}


class SteeringReader:
    """Implements `headgate.capture.engine.contracts.request_part.PartRequestReader`.

    Args:
        steerable: The model and its limits.
    """

    def __init__(self, steerable: Steerable) -> None:
        self.steerable = steerable
        self._memo: IdentityCache[PartRequest | None] = IdentityCache()

    def read(self, values: Mapping[str, Any]) -> PartRequest | None:
        """Read the fields; vectors that are the same objects with the same content are read once."""
        if not any(field in values for field in (BASE, PREFILL, DECODE)):
            return self._read(values)
        if (found := self._memo.find(values)) is not None:
            return found.result
        wanted = self._read(values)
        self._memo.keep(values, wanted)
        return wanted

    def _read(self, values: Mapping[str, Any]) -> PartRequest | None:
        spec = read_steering(values, self.steerable)
        if spec is None:
            return None
        return PartRequest(
            wire=to_wire(spec), field=next(iter(values)), names=_names(values, spec.modules), content=spec
        )

    def names(self, values: Mapping[str, Any]) -> dict[str, str]:
        """The modules that are named, each with the field that names it."""
        if NAME not in values and MODULE_REF not in values:
            return {}
        return _names(values, read_modules(values.get(NAME), values.get(MODULE_REF)))

    def check(self, wanted: PartRequest, known: Known) -> None:
        """Whether the modules exist, and the sums with them stay within the model's dtype."""
        for name, field in wanted.names.items():
            if name not in known:
                registered = ", ".join(sorted(known)) or "none"
                raise RequestError(field, f"unknown steering module {name!r}; registered: {registered}")
        if isinstance(wanted.content, SteeringSpec):
            self._check_sum(wanted.content, wanted.names, known)

    def _check_sum(self, spec: SteeringSpec, fields: Mapping[str, str], known: Known) -> None:
        limit = LIMIT[cast("StoredType", self.steerable.dtype)]
        largest = max(peak(spec.prefill), peak(spec.decode))
        for ref in spec.modules:
            largest += abs(ref.scale) * known[ref.name]["peak"]
            if not largest < limit:
                raise RequestError(
                    fields[ref.name],
                    f"with module {ref.name!r}, the vectors times their scales reach {largest:.4g}; sums for a model "
                    f"in {self.steerable.dtype} stay finite below {limit:.4g}: use smaller vectors or scales",
                )


def _names(values: Mapping[str, Any], refs: Sequence[ModuleRef]) -> dict[str, str]:
    num_plain = len(read_modules(values.get(NAME), None)) if values.get(MODULE_REF) is not None else len(refs)
    return {ref.name: NAME if index < num_plain else MODULE_REF for index, ref in enumerate(refs)}


def open_reader(section: Mapping[str, Any], model: ModelInfo) -> SteeringReader:
    """The reader for an engine whose configuration has a ``steering`` section.

    Raises:
        ConfigError: If the section is wrong.
    """
    config = parse_config(section)
    return SteeringReader(
        config.steerable(num_layers=model.num_layers, hidden_size=model.hidden_size, dtype=model.dtype)
    )


class SteeringRequests:
    """Implements `headgate.capture.engine.contracts.request_part.RequestPart`."""

    fields = FIELD_DOCS
    how_to_start = (
        "Start it with --enable-steering, with headgate.steering.LLM(..., steering=True), or with "
        "additional_config={'headgate': {'steering': {}}}"
    )
    names_method = "names"
    check_method = "check"

    def open(self, section: Mapping[str, Any], model: ModelInfo) -> SteeringReader:
        """Make the reader for an engine whose configuration has a ``steering`` section."""
        return open_reader(section, model)

    def handle(self, cores: EngineCores, reader: PartRequestReader) -> Steering:
        """Make ``LLM.steering``."""
        return Steering(cores, reader.steerable)  # type: ignore[attr-defined]

    def async_handle(self, cores: EngineCores, reader: PartRequestReader) -> AsyncSteering:
        """Make ``AsyncLLM.steering``."""
        return AsyncSteering(cores, reader.steerable)  # type: ignore[attr-defined]

    def check_section(self, section: Mapping[str, Any]) -> None:
        """Check a ``steering`` section; raises `ConfigError` if it is wrong."""
        parse_config(section)

    def add_flags(self, group: FlagGroup) -> None:
        """Add ``--enable-steering`` and its like."""
        add_flags(group)

    def read_flags(self, args: Namespace, section: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Make a section of the flags; None if none was given."""
        return read_flags(args, section)
