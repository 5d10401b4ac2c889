"""Parameters of the stream consumer, and the spec of a request."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import msgspec

from headgate.capture.schema.consumer import SpecContext, parse_client_spec
from headgate.capture.schema.errors import ConfigError, RequestError
from headgate.capture.schema.selectors.parsing import parse_positions
from headgate.capture.schema.sites import parse_hook
from headgate.capture.schema.spec import CaptureSpec
from headgate.consumers.filesystem.storage.store import check_name
from headgate.consumers.stream.address import TOKEN_VARIABLE, Address, parse_address, read_token

DEFAULT_TAG = "default"
HOW_TO_INSTALL = "pip install 'headgate[stream]'"


class StreamParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the stream consumer.

    Attributes:
        address: Where the reader connects: ``tcp://HOST:PORT`` or ``unix:///PATH``.
        token_file: File with the token that the reader must prove to have; the environment's ``HEADGATE_STREAM_TOKEN``
            if None. Required for an address that other machines can reach.
        max_bytes: Bytes of batches that the reader has not acknowledged; one request may have half of it.
        running_bytes: Bytes of rows of running requests; they are sent when their request has ended.
        batch_rows: Largest number of rows in a batch; each batch has rows of one request.
        wait_s: Seconds that the rows of a request wait for room. Keep it below the consumer's ``max_stall_s``.
        max_away_s: Seconds without a reader after which all kept rows are discarded if there is no room for new ones.
        tag: Tag of requests that name none.
        hooks: ``{hook point: layers}`` to stream for every request.
        positions: Which positions to stream with `hooks`.
    """

    address: str
    token_file: str | None = None
    max_bytes: int = 256 << 20
    running_bytes: int = 1 << 30
    batch_rows: int = 4096
    wait_s: float = 20.0
    max_away_s: float = 300.0
    tag: str = DEFAULT_TAG
    hooks: dict[str, Any] | None = None
    positions: Any = "all"

    @property
    def place(self) -> Address:
        """The address, parsed."""
        return parse_address(self.address)


def parse_params(params: Mapping[str, Any]) -> StreamParams:
    """Read and check the parameters; the token is looked at, no socket is made.

    Raises:
        ConfigError: Naming the parameter; also if pyarrow is not installed.
    """
    plain = {key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in params.items()}
    try:
        parsed = msgspec.convert(plain, StreamParams)
        check_name(parsed.tag, "tag")
        parse_positions(parsed.positions, "positions")
        for hook in parsed.hooks or ():
            parse_hook(hook, f"hooks.{hook}")
        place = parsed.place
        token = read_token(parsed.token_file)
    except (msgspec.ValidationError, RequestError, ConfigError) as error:
        raise ConfigError(f"stream: {error}") from error
    if token is None and not place.is_local:
        raise ConfigError(
            f"stream: address {parsed.address} can be reached from other machines: name a token_file, or set "
            f"{TOKEN_VARIABLE}, on both sides"
        )
    for name in ("max_bytes", "running_bytes", "batch_rows"):
        if getattr(parsed, name) < 1:
            raise ConfigError(f"stream: {name} must be at least 1, got {getattr(parsed, name)}")
    for name in ("wait_s", "max_away_s"):
        if not 0 <= getattr(parsed, name) < 1e9:
            raise ConfigError(f"stream: {name} must be 0 or more seconds, got {getattr(parsed, name)}")
    if find_spec("pyarrow") is None:
        raise ConfigError(f"stream: pyarrow is not installed: {HOW_TO_INSTALL}")
    return parsed


def parse_request(raw: object, context: SpecContext) -> CaptureSpec:
    """Check ``{"hooks", "positions", "tag"}``; only ``hooks`` is required. The spec's option ``tag`` is always there.

    Raises:
        RequestError: Naming the field.
    """
    spec = parse_client_spec(raw, context, options=("tag",))
    tag = check_name(spec.options.get("tag", context.params.get("tag", DEFAULT_TAG)), f"{context.field}.tag")
    return CaptureSpec(sites=spec.sites, positions=spec.positions, options={"tag": tag})


def parse_global(context: SpecContext) -> CaptureSpec | None:
    """The spec of every request, if the parameters have ``hooks``."""
    hooks = context.params.get("hooks")
    if hooks is None:
        return None
    return parse_request({"hooks": hooks, "positions": context.params.get("positions", "all")}, context)
