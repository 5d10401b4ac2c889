"""Steering's part of the front end: fields, flags, and the handles ``LLM.steering`` and ``AsyncLLM.steering``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from headgate.capture.engine.contracts.request_part import AsyncEngineCores, EngineCores, FlagGroup, PartRequestReader
from headgate.capture.schema.consumer import ModelInfo
from headgate.steering.config import parse_config
from headgate.steering.control.handle import AsyncSteering, Steering
from headgate.steering.flags import add_flags, read_flags
from headgate.steering.requests.reader import ANSWER_FIELDS, FIELD_DOCS, NESTED_NAMES, SteeringReader, open_reader


class SteeringRequests:
    """Implements `RequestPart`, `AnsweringPart` and `NestingPart` of `capture.engine.contracts.request_part`."""

    fields = FIELD_DOCS
    answer_fields = ANSWER_FIELDS
    nested = NESTED_NAMES
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

    def async_handle(self, cores: AsyncEngineCores, reader: PartRequestReader) -> AsyncSteering:
        """Make ``AsyncLLM.steering``."""
        return AsyncSteering(cores, reader.steerable, reader.sae_root)  # type: ignore[attr-defined]

    def check_section(self, section: Mapping[str, Any]) -> None:
        """Check a ``steering`` section; raises `ConfigError` if it is wrong."""
        parse_config(section)

    def add_flags(self, group: FlagGroup) -> None:
        """Add ``--enable-steering`` and its like."""
        add_flags(group)

    def read_flags(self, args: Namespace, section: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Make a section of the flags; None if none was given."""
        return read_flags(args, section)
