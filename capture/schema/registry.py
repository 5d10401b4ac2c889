"""Consumers by name: entry points of the group ``vllm.capture_consumers``, loaded only when they are asked for."""

from __future__ import annotations

import logging
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import get_args

from headgate.capture.schema.config import MAX_LINGER_S, CaptureConsumersConfig, CaptureConsumerSpec, Location
from headgate.capture.schema.consumer import (
    MAX_ARGUMENTS,
    MAX_OUTPUTS,
    BatchedConsumer,
    CaptureConsumer,
    ConsumerContext,
    MakeSink,
    ModelInfo,
    NoActions,
    Readout,
    ReadoutFacts,
    ReadoutSite,
    StreamingConsumer,
)
from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.sites import Site, sort_sites
from headgate.capture.schema.vocabulary import Vocabulary

logger = logging.getLogger("headgate")

GROUP = "vllm.capture_consumers"


@dataclass(frozen=True, slots=True)
class OpenConsumer:
    """A consumer at work.

    Attributes:
        bit: Its index in ``config.consumers``: the bit of a row's mask that stands for it, everywhere.
        spec: As configured.
        consumer: The instance; in a worker, a driver-located consumer is stood in for.
    """

    bit: int
    spec: CaptureConsumerSpec
    consumer: BatchedConsumer | StreamingConsumer = field(repr=False)


def load_consumer(name: str) -> type[BatchedConsumer] | type[StreamingConsumer]:
    """Import the consumer that is published under `name`.

    Raises:
        ConfigError: If there is none (the message lists those there are), if two packages publish it, if it cannot
            be imported, or if it does not fulfil the contract; the message says what is missing.
    """
    found = entry_points(group=GROUP)
    places = {point.value: point for point in found if point.name == name}
    if not places:
        known = ", ".join(sorted(found.names)) or "none"
        raise ConfigError(f"consumer {name!r} is not installed; installed: {known} (entry-point group {GROUP!r})")
    if len(places) > 1:
        sources = ", ".join(f"{value} of {_source(point)}" for value, point in sorted(places.items()))
        raise ConfigError(f"consumer {name!r} is published more than once: {sources}; uninstall all but one")
    (point,) = places.values()
    where = f"consumer {name!r} ({point.value} of {_source(point)})"
    try:
        loaded = point.load()
    except Exception as error:
        raise ConfigError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
    return _check_contract(loaded, where)


def load_configured(spec: CaptureConsumerSpec) -> type[BatchedConsumer] | type[StreamingConsumer]:
    """Import a configured consumer; its `location` is the one that was configured.

    Raises:
        ConfigError: See `load_consumer`; also if it can only run in the driver and was configured for the worker.
    """
    loaded = load_consumer(spec.name)
    if spec.location in (None, loaded.location):
        return loaded
    if loaded.location == "driver":
        raise ConfigError(
            f"consumer {spec.instance!r}: location is {spec.location!r}, but {spec.name} needs what only the process "
            "that owns the requests has; leave location out"
        )
    moved: type[BatchedConsumer] | type[StreamingConsumer]
    moved = type(loaded.__name__, (loaded,), {"location": spec.location, "__module__": loaded.__module__})
    return moved


def open_consumers(
    config: CaptureConsumersConfig,
    *,
    model: ModelInfo,
    location: Location,
    pp_rank: int = 0,
    pp_size: int = 1,
    versions: Mapping[str, str] | None = None,
    make_sink: MakeSink = lambda _: NoActions(),
    only: Collection[int] | None = None,
    vocabulary: Vocabulary | None = None,
) -> tuple[OpenConsumer, ...]:
    """Open the configured consumers of one location. Parameters of all are checked before any is opened.

    Args:
        config: Which consumers.
        model: The model being served.
        location: ``worker``, which includes those of ``engine``, or ``driver``; others are left out, and not even
            loaded if their settings say where they are.
        pp_rank: See `ConsumerContext`, like the rest.
        pp_size: Likewise.
        versions: Likewise.
        make_sink: Makes what each takes its actions to.
        only: Bits of the consumers to open here, if not all of the location.
        vocabulary: See `ConsumerContext`.

    Raises:
        ConfigError: See `load_configured`; also if parameters are wrong or a consumer cannot be opened. Consumers
            opened before it are closed.
    """
    loaded = _loaded(config, location, only)
    opened: list[OpenConsumer] = []
    for bit, spec, consumer_class in loaded:
        if ("driver" if consumer_class.location == "driver" else "worker") != location:
            continue
        context = ConsumerContext(
            instance_name=spec.instance,
            model=model,
            pp_rank=pp_rank,
            pp_size=pp_size,
            versions=dict(versions or {}),
            steering=make_sink(spec.instance),
            vocabulary=vocabulary,
        )
        try:
            opened.append(OpenConsumer(bit, spec, consumer_class(spec.params, context)))
        except Exception as error:
            close_consumers(opened, config.close_timeout_s)
            raise ConfigError(f"consumer {spec.instance!r} cannot be opened: {error}") from error
    return tuple(opened)


def _loaded(
    config: CaptureConsumersConfig, location: Location, only: Collection[int] | None
) -> list[tuple[int, CaptureConsumerSpec, type[BatchedConsumer] | type[StreamingConsumer]]]:
    """Load the classes of consumers that may be of that location, by bit, and check their parameters."""
    loaded = [
        (bit, spec, load_configured(spec))
        for bit, spec in enumerate(config.consumers)
        if (only is None or bit in only) and not (location == "worker" and spec.location == "driver")
    ]
    for _, spec, consumer_class in loaded:
        try:
            consumer_class.check_params(spec.params)
        except ConfigError as error:
            raise ConfigError(f"consumer {spec.instance!r}: {error}") from error
    return loaded


def load_readouts(
    config: CaptureConsumersConfig,
    classes: Sequence[type[CaptureConsumer]],
    model: ModelInfo,
    owned: Container[Site],
) -> list[tuple[ReadoutSite, Readout]]:
    """Make the readouts of all configured consumers, in the order of their bits and of the forward pass.

    Args:
        config: Which consumers.
        classes: Of each of them.
        model: The model being served.
        owned: Sites of this worker; readouts of others are left out.

    Raises:
        ConfigError: If parameters are wrong, or a readout cannot be made or reads a site that cannot be captured.
    """
    found = []
    for bit, (spec, loaded) in enumerate(zip(config.consumers, classes, strict=True)):
        for site, readout in _declared(spec, loaded, model).items():
            if site in owned:
                facts = ReadoutFacts(readout.num_outputs, readout.key, readout.num_arguments)
                found.append((ReadoutSite(bit, site, facts), readout))
    return found


def _declared(spec: CaptureConsumerSpec, loaded: type[CaptureConsumer], model: ModelInfo) -> dict[Site, Readout]:
    where = f"consumer {spec.instance!r}"
    try:
        loaded.check_params(spec.params)
        declared = loaded.readouts(spec.params, model)
    except Exception as error:
        raise ConfigError(f"{where}: {error}") from error
    for site, readout in declared.items():
        if site not in model.sites:
            raise ConfigError(f"{where}: reads {site.name}, which is not captured here; add it to capture.sites")
        if not 1 <= readout.num_outputs <= MAX_OUTPUTS:
            raise ConfigError(
                f"{where}: the readout of {site.name} has {readout.num_outputs} outputs; expected 1 to {MAX_OUTPUTS}"
            )
        if not 0 <= readout.num_arguments <= MAX_ARGUMENTS:
            raise ConfigError(
                f"{where}: the readout of {site.name} has {readout.num_arguments} arguments; expected 0 to "
                f"{MAX_ARGUMENTS}"
            )
    return {site: declared[site] for site in sort_sites(declared)}


def close_consumers(consumers: Sequence[OpenConsumer], timeout_s: float) -> None:
    """Close consumers that were never put to work; a failure of one is logged and spares the others."""
    for consumer in consumers:
        try:
            consumer.consumer.close(timeout_s)
        except Exception:
            logger.exception("capture consumer %s could not be closed", consumer.spec.instance)


def _source(point: EntryPoint) -> str:
    return "an unknown package" if point.dist is None else f"{point.dist.name} {point.dist.version}"


def _check_contract(loaded: object, where: str) -> type[BatchedConsumer] | type[StreamingConsumer]:
    """Return `loaded` if it can be a consumer."""
    if not isinstance(loaded, type) or not issubclass(loaded, CaptureConsumer):
        raise ConfigError(f"{where} is {loaded!r}; expected a subclass of BatchedConsumer or StreamingConsumer")
    if not issubclass(loaded, BatchedConsumer | StreamingConsumer):
        raise ConfigError(f"{where} subclasses CaptureConsumer alone; expected BatchedConsumer or StreamingConsumer")
    missing = sorted(getattr(loaded, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(f"{where} does not define {', '.join(missing)}")
    if loaded.location not in get_args(Location):
        raise ConfigError(f"{where}: location is {loaded.location!r}; expected 'worker', 'engine' or 'driver'")
    for name in ("reads_client_spec", "is_awaited"):
        if not isinstance(value := getattr(loaded, name), bool):
            raise ConfigError(f"{where}: {name} is {value!r}; expected True or False")
    if not isinstance(loaded.linger_s, int | float) or not 0 <= loaded.linger_s <= MAX_LINGER_S:
        raise ConfigError(f"{where}: linger_s is {loaded.linger_s!r}; expected seconds, from 0 to {MAX_LINGER_S:g}")
    return loaded
