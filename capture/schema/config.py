"""Settings of capture and of the HTTP server, with their units and costs.

The operator's document is ``additional_config={"headgate": {"capture": {...}, "server": {...}}}`` (or vLLM's
``--additional-config``). The keys of each section are the fields of a class below; unknown keys are refused.
The section ``server`` concerns the API servers alone: an engine without capture and steering stays stock with it. So
does ``network``, which concerns engines on several hosts.

Constants bound the stages at which rows of several steps are put together before they go on. Every stage saves Python
calls in the process that also runs the engine's steps. The window of the first stage, ``linger_s``, decides how long a
row waits: it belongs to the consumers (`CaptureConsumer.linger_s`) or the operator (``capture.linger_s``). The
constants only end a wait early, except `END_LINGER_S`, which adds to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from threading import TIMEOUT_MAX
from typing import Any, Literal, TypeVar

import msgspec

from headgate.capture.schema.errors import ConfigError

Overload = Literal["block", "drop", "spill"]
Location = Literal["worker", "engine", "driver"]
_Section = TypeVar("_Section", bound=msgspec.Struct)

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

MAX_LINGER_S = 1.0
"""Rows may wait so long for those of the next steps, at most."""
MAX_PROCESSES = 16
"""Capture processes beside each worker."""
MAX_CONSUMERS = 63
"""A row's consumer mask is one int64."""

HIDDEN_STATES = "hidden_states"
"""Entry point of the consumer of ``return_hidden_states``; configuring it adds its site too."""


class CaptureConsumerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One configured consumer.

    Attributes:
        name: Its entry point's name in the group ``vllm.capture_consumers``.
        instance_name: The name that requests use; `name` if None. Needed to configure one consumer twice.
        params: Passed to the consumer, which checks them.
        location: ``driver`` runs a consumer of the worker in the process that owns the requests (the API server, or
            `LLM`'s), where rows of all pipeline stages arrive together; sending them there takes memory bandwidth.
            ``engine`` runs it on threads of the worker's own process. If None, the consumer's class decides.
        overload: What happens to rows while the consumer's queue is full: ``block`` makes the forward pass wait
            (nothing is lost), ``drop`` discards them (counted, and reported in the result), ``spill`` writes them to
            local disk and delivers them later, in order.
        queue_bytes: Host memory for rows that wait for this consumer.
        max_stall_s: Seconds that one delivery may take, or hold up the engine, before the consumer counts as hung:
            its requests then end with an error and the engine continues without it.
    """

    name: str
    instance_name: str | None = None
    params: dict[str, Any] = msgspec.field(default_factory=dict)
    location: Location | None = None
    overload: Overload = "block"
    queue_bytes: int = 256 * MIB
    max_stall_s: float = 30.0

    @property
    def instance(self) -> str:
        """The name that requests use."""
        return self.instance_name or self.name


class CaptureConsumersConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Capture as the operator configured it. Without consumers, capture is off.

    Attributes:
        consumers: The consumers to load.
        sites: ``{hook point: layers}`` that can be captured; requests choose any subset. Changes the compiled
            graph. Each site costs ``ring_rows * hidden_size`` elements of device memory. The consumer
            `HIDDEN_STATES` adds ``final_norm``, which is the default if it is the only consumer.
        ring_rows: Rows of the staging ring on the device, at least ``max_num_batched_tokens``. If None, twice that on
            a GPU, as far as the ring then takes a 24th of its memory at most; on a CPU the least.
        staging_bytes: Pinned host memory that the device copies rows into. If None, what four full steps of all sites
            need, rounded up to a power of two, within 256 MiB and 16 GiB and a tenth of the memory that is available.
        processes: Processes beside each worker in which consumers run, so that their work does not delay the engine's
            interpreter and a consumer that crashes does not end the engine. With more than one, consumers are assigned
            to them in turn, in the order of the configuration. 0 runs consumers on threads of the worker, where each
            call delays the engine's steps.
        linger_s: Seconds that captured rows may wait for rows of the next steps, so that the rows of several steps
            are copied and delivered together; 0 delivers each step's rows at once. If None, what the consumers of the
            running requests allow. The end of a request may wait as long, unless its client waits for its results.
            Waiting rows of unfinished requests are discarded when the worker shuts down.
        spill_dir: Folder for ``overload="spill"``; the system's temporary folder if None.
        self_test: Test every site with a dummy step at start-up, and do not serve if one does not respond.
        fire_counter: Count on the device how often each site ran (debugging; one more kernel for each site).
        result_wait_s: Seconds that a finished request waits for its results before they are ``pending``. It does not
            wait if rows may wait for longer and other requests capture as well. Requests with ``capture_wait`` wait up
            to `result_timeout_s`.
        result_timeout_s: Upper limit of that wait, and of `LLM`'s.
        close_timeout_s: Seconds for delivering queued rows at shutdown. vLLM ends its processes
            5 seconds later, or after ``VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS``, if the environment sets it.
        max_request_rows: Positions that one HTTP request may capture for one consumer, all its prompts and samples
            together (for `LLM`, one prompt). No limit if None. A request that could capture more, if it generated
            ``max_tokens`` tokens, is refused.
        max_request_bytes: The same for the rows of all sites and consumers, in bytes.
    """

    consumers: tuple[CaptureConsumerSpec, ...] = ()
    sites: dict[str, Any] = msgspec.field(default_factory=lambda: {"post_mlp": "all"})
    ring_rows: int | None = None
    staging_bytes: int | None = None
    processes: int = 1
    linger_s: float | None = None
    spill_dir: str | None = None
    self_test: bool = True
    fire_counter: bool = False
    result_wait_s: float = 0.01
    result_timeout_s: float = 60.0
    close_timeout_s: float = 10.0
    max_request_rows: int | None = None
    max_request_bytes: int | None = None

    @property
    def bits(self) -> dict[str, int]:
        """The bit of each consumer in a row's mask, by its instance: its place in `consumers`."""
        return {spec.instance: bit for bit, spec in enumerate(self.consumers)}


def parse_config(document: Mapping[str, Any] | None) -> CaptureConsumersConfig:
    """Read the value of ``additional_config["headgate"]["capture"]``.

    Raises:
        ConfigError: On an unknown key, a wrong type, a value out of range, or two consumers of one name.
    """
    config = _read_section("capture", document, CaptureConsumersConfig)
    config = _with_final_norm(config, is_default="sites" not in (document or {}))
    _check(config)
    return config


def _read_section(name: str, document: object, kind: type[_Section]) -> _Section:
    """Convert one section of ``additional_config["headgate"]``; None gives the defaults."""
    where = f"additional_config['headgate']['{name}']"
    if document is not None and not isinstance(document, Mapping):
        raise ConfigError(f"{where}: expected an object, got {document!r}")
    try:
        return msgspec.convert(dict(document or {}), kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error


def _with_final_norm(config: CaptureConsumersConfig, *, is_default: bool) -> CaptureConsumersConfig:
    """Add the site of the consumer `HIDDEN_STATES`, if that is configured."""
    names = {consumer.name for consumer in config.consumers}
    if HIDDEN_STATES not in names or not {"final_norm", "last_hidden_state"}.isdisjoint(config.sites):
        return config
    others = {} if is_default and names == {HIDDEN_STATES} else config.sites
    return msgspec.structs.replace(config, sites={**others, "final_norm": "all"})


def _check(config: CaptureConsumersConfig) -> None:
    instances = [consumer.instance for consumer in config.consumers]
    twice = {name for name in instances if instances.count(name) > 1}
    if twice:
        raise ConfigError(f"consumers: {sorted(twice)} configured more than once; give each its own instance_name")
    if len(instances) > MAX_CONSUMERS:
        raise ConfigError(f"consumers: {len(instances)} configured, at most {MAX_CONSUMERS} are supported")
    if not all(consumer.name for consumer in config.consumers):
        raise ConfigError("consumers: name is empty; expected the name of an entry point")
    if not config.sites:
        raise ConfigError("sites: name at least one hook point, such as {'post_mlp': 'all'}")
    sizes = {
        "ring_rows": config.ring_rows,
        "staging_bytes": config.staging_bytes,
        "max_request_rows": config.max_request_rows,
        "max_request_bytes": config.max_request_bytes,
        **{f"{c.instance}.queue_bytes": c.queue_bytes for c in config.consumers},
    }
    for name, size in sizes.items():
        if size is not None and size <= 0:
            raise ConfigError(f"{name}: must be above 0, got {size}")
    if not 0 <= config.processes <= MAX_PROCESSES:
        raise ConfigError(f"processes: {config.processes} given; expected 0 to {MAX_PROCESSES} for each worker")
    waits = {
        "result_timeout_s": config.result_timeout_s,
        "close_timeout_s": config.close_timeout_s,
        **{f"{c.instance}.max_stall_s": c.max_stall_s for c in config.consumers},
    }
    if not 0 <= config.result_wait_s <= TIMEOUT_MAX:
        raise ConfigError(f"result_wait_s: must be from 0 to {TIMEOUT_MAX:.0f} seconds, got {config.result_wait_s}")
    if config.linger_s is not None and not 0 <= config.linger_s <= MAX_LINGER_S:
        raise ConfigError(f"linger_s: must be from 0 to {MAX_LINGER_S:g} seconds, got {config.linger_s}")
    for name, seconds in waits.items():
        if not 0 < seconds <= TIMEOUT_MAX:
            raise ConfigError(f"{name}: must be above 0 and at most {TIMEOUT_MAX:.0f} seconds, got {seconds}")


def parse_shorthand(text: str) -> CaptureConsumerSpec:
    """Read ``name:key=val,key=val``; values are typed as JSON where they are JSON, else taken as text.

    ``True``, ``False`` and ``None`` are read as in Python. A text with a comma, a quote or a bracket in it is
    written as JSON: ``root="/data/a,b"``. The keys of `CaptureConsumerSpec` (``instance_name``, ``location``,
    ``overload``, ``queue_bytes``, ``max_stall_s``) set those; every other key is a parameter of the consumer.

    Raises:
        ConfigError: If it is not of that form; the message shows the form.
    """
    name, given = parse_pairs(text, "consumer")
    own: dict[str, Any] = {key: given.pop(key) for key in _OWN_KEYS if key in given}
    own |= {"name": name, "params": given}
    try:
        return msgspec.convert(own, CaptureConsumerSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(f"consumer {text!r}: {error}") from error


_OWN_KEYS = ("instance_name", "location", "overload", "queue_bytes", "max_stall_s")


def parse_pairs(text: str, who: str) -> tuple[str, dict[str, Any]]:
    """Return name and typed values of ``name:key=val,key=val``; see `parse_shorthand`.

    Args:
        text: To read.
        who: For errors, such as ``consumer``.

    Raises:
        ConfigError: If it is not of that form, or a key is given twice.
    """
    name, _, rest = text.partition(":")
    if not name.strip():
        raise ConfigError(f"{who} {text!r}: expected name:key=val,key=val")
    found: dict[str, Any] = {}
    for pair in _split_pairs(rest, f"{who} {text!r}"):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not key:
            raise ConfigError(f"{who} {text!r}: {pair!r} is not key=val")
        if key in found:
            raise ConfigError(f"{who} {text!r}: {key} is given twice")
        found[key] = _typed(value)
    return name.strip(), found


def _split_pairs(rest: str, where: str) -> list[str]:
    """Split at commas that are not inside brackets or quotes, so that values may be JSON lists and objects."""
    pairs, depth, start = [], 0, 0
    for match in _STRUCTURE.finditer(rest):
        mark = match[0]
        if mark in "[{":
            depth += 1
        elif mark in "]}":
            depth -= 1
        elif mark == "," and depth == 0:
            pairs.append(rest[start : match.start()])
            start = match.end()
        if depth < 0 or mark == '"':
            break
    else:
        if depth == 0:
            return [pair for pair in (*pairs, rest[start:]) if pair.strip()]
    raise ConfigError(
        f'{where}: quotes or brackets do not match; write such a text as JSON, for example name:key="a[b"'
    )


_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},"]')
"""A whole JSON string, or a character that matters outside of one; a quote of its own has no partner."""


def _typed(value: str) -> Any:
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError:
        return {"True": True, "False": False, "None": None}.get(value, value)


BUFFERED_BODIES = 8
"""Bodies of the longest kind for which a server has room at a time, unless it is configured."""


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the HTTP server.

    Attributes:
        max_body_bytes: Limit of one request's body; longer ones get status 413. Uploads to audio routes have vLLM's
            own limit, ``VLLM_MAX_AUDIO_CLIP_FILESIZE_MB``.
        max_buffered_bytes: Limit of all bodies that one API server receives and parses at a time; further ones get
            status 503 and ``Retry-After``. If None, eight times `max_body_bytes`.
        keys_file: JSON file of the clients' keys, with their roles and limits (`AccessKey`); read again when it
            changes. With it, everything that needs a role needs a key, also from the server's own machine.
        usage_file: SQLite file on a local disk that counts daily and concurrency limits, created if it does not exist.
            If None, they are counted in memory and start from zero when the server starts.
    """

    max_body_bytes: int = 128 * MIB
    max_buffered_bytes: int | None = None
    keys_file: str | None = None
    usage_file: str | None = None


class NetworkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How workers on other hosts reach the front ends of their engine; used only by engines that span hosts.

    Attributes:
        listen: Address of the front ends' host that the others connect to: ``IP``, ``IP:PORT`` or ``IP:FIRST-LAST``.
            Each API server takes a port for results and one for each consumer in the driver; without a range, any
            free ones. Hosts without a front end never listen.
        keys_file: File of the keys with which both ends authenticate, the same on each host; if None, the environment
            variable ``HEADGATE_NETWORK_KEYS`` has them.
    """

    listen: str | None = None
    keys_file: str | None = None


def parse_network(document: object) -> NetworkConfig:
    """Read the section; None gives the defaults.

    Raises:
        ConfigError: On an unknown key or a wrong type.
    """
    return _read_section("network", document, NetworkConfig)


def parse_server(document: object) -> ServerConfig:
    """Read the section; None gives the defaults.

    Raises:
        ConfigError: On an unknown key, a wrong type or a value out of range.
    """
    config = _read_section("server", document, ServerConfig)
    if config.max_body_bytes < 1:
        raise ConfigError(
            f"additional_config['headgate']['server']: max_body_bytes must be at least 1, got {config.max_body_bytes}"
        )
    if config.max_buffered_bytes is not None and config.max_buffered_bytes < config.max_body_bytes:
        raise ConfigError(
            "additional_config['headgate']['server']: max_buffered_bytes must be at least max_body_bytes, "
            f"{config.max_body_bytes}, got {config.max_buffered_bytes}"
        )
    return config


def server_config(additional_config: Any) -> ServerConfig:
    """The section of vLLM's ``additional_config``; see `parse_server`."""
    ours = additional_config.get("headgate") if isinstance(additional_config, Mapping) else None
    return parse_server(ours.get("server") if isinstance(ours, Mapping) else None)


class CompilerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of headgate's changes to torch's inductor.

    Attributes:
        rewrites: Move the loads of headgate's tables, and a prefetch of the norm's weights, before the loops of GPU
            kernels. This changes speed only, not answers: without it, each norm before attention takes 0.3 to 0.7
            microseconds longer (H200). Changes the compiled graph.
    """

    rewrites: bool = True


def parse_compiler(document: object) -> CompilerConfig:
    """Read the section; None gives the defaults.

    Raises:
        ConfigError: On an unknown key or a wrong type.
    """
    return _read_section("compiler", document, CompilerConfig)


RING_BYTES = 64 * MIB
"""Rows left in the ring on the device: with more in one device copy there is nothing to save."""
RING_SHARE = 1 / 4
"""Part of the ring's slots that may be left full: the next rows must not wait for the copies of the last."""

HELD_STEPS = 32
"""Device copies that the dispatch thread holds in the staging memory; more would save little."""
HELD_SHARE = 1 / 4
"""Part of the staging memory that held rows may take."""
HELD_BYTES = 512 * MIB
"""Bytes that held rows may take; more would save nothing, and memory for their copies is kept."""
END_LINGER_S = 0.004
"""Seconds that the end of a request may wait for rows of other requests, so that both are dispatched together: on
threads of the worker, and in no capture process.

With 64 requests in flight whose clients wait for results, dispatching each end at once costs the step thread 4 %.
"""
