"""Opens capture in a front end that is configured for it, or refuses to start.

When such a process ends, vLLM waits as long as consumers may take to close. Stock kills engine cores, and with them
workers whose consumers are writing, after 5 seconds; those of a server at once.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from functools import partial, wraps

from headgate.capture.engine.contracts.core_calls import end_waits_with_core
from headgate.capture.engine.contracts.parts import request_parts
from headgate.capture.engine.requests.capture_frontend import FrontEnd, front_end_of
from headgate.capture.engine.requests.request_reader import OpenPart
from headgate.capture.engine.setup.hosts import action_target, listening
from headgate.capture.engine.setup.settings import capture_config, model_info, section, sections
from headgate.capture.engine.setup.startup_checks import check_servable
from headgate.capture.engine.setup.vocabulary import ModelVocabulary
from headgate.capture.engine.vllm_names import versions
from headgate.capture.engine.vllm_types import Function, StartedEngine, VllmConfig
from headgate.capture.links.driver import open_drivers
from headgate.capture.monitoring.logs import speak_through_vllm
from headgate.capture.schema.config import MIB, CaptureConsumersConfig
from headgate.capture.schema.consumer import CaptureConsumer, ModelInfo
from headgate.capture.schema.registry import load_configured
from headgate.capture.schema.sites import site_map

logger = logging.getLogger(__name__)

TEARDOWN_S = 5
"""For all else that a process does when it ends."""

GRACE = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"
"""vLLM's own setting: what an engine core waits for its workers. Since vLLM 0.33 servers wait so long for it, too."""


class _Grace:
    """The time that this process has set.

    Attributes:
        is_given: An engine of this process captures, and `GRACE` holds for it.
        own: The value of `GRACE` that was set here; None if it is the user's.
    """

    is_given: bool = False
    own: str | None = None


_grace = _Grace()


def let_consumers_close(timeout_s: float) -> None:
    """Let the processes of an engine have `timeout_s` seconds for consumers when they end, and `TEARDOWN_S` more.

    A value that the user has set stays, with a warning if it is too short. Of several engines, the longest time holds.
    """
    given = os.environ.get(GRACE)
    _grace.is_given = True
    if given is None or given == _grace.own:
        _grace.own = os.environ[GRACE] = str(max(math.ceil(timeout_s + TEARDOWN_S), int(given or 0)))
    elif float(given) < timeout_s:
        text = "capture: %s=%s ends consumers before capture.close_timeout_s, which is %g"
        logger.warning(text, GRACE, given, timeout_s)


def open_manager(original: Function) -> Function:
    """Wrap ``CoreEngineProcManager.__init__``: its processes know how long they have.

    With several API servers it is in a process without a front end.
    """

    @wraps(original)
    def __init__(self: object, *args: object, vllm_config: VllmConfig, **kwargs: object) -> None:
        if (config := capture_config(vllm_config)) is not None:
            let_consumers_close(config.close_timeout_s)
        original(self, *args, vllm_config=vllm_config, **kwargs)

    return __init__


def shutdown(original: Function) -> Function:
    """Wrap ``vllm.v1.engine.utils.shutdown``, which asks engine cores to end and kills them `timeout` seconds later.

    Requests may run on for the time that vLLM gives them; consumers close after that.
    """

    @wraps(original)
    def wrapped(procs: Sequence[object], timeout: float | None = None) -> object:
        if _grace.is_given:
            timeout = (timeout or 0) + float(os.environ[GRACE])
        return original(procs, timeout=timeout)

    return wrapped


def open_front_end(vllm_config: VllmConfig, tokenizer: object = None) -> FrontEnd | None:
    """Capture's front end for an engine; None if it is not configured.

    Args:
        vllm_config: Of the engine.
        tokenizer: Of the model; None if it was started without one.

    Raises:
        ConfigError: If the configuration is wrong.
        UnsupportedError: If this vLLM or a setting cannot be served.
    """
    check_servable(vllm_config)
    config = capture_config(vllm_config)
    if config is None:
        return None
    speak_through_vllm()
    let_consumers_close(config.close_timeout_s)
    model = model_info(vllm_config)
    consumers = load_consumers(config)
    vocabulary = ModelVocabulary(tokenizer, vllm_config)
    logger.info("capture: %s; what can be captured: %s", _summary(config, consumers), _sites_text(model))
    return FrontEnd(
        config,
        model,
        consumers,
        num_stages=vllm_config.parallel_config.pipeline_parallel_size,
        open_drivers=partial(
            open_drivers,
            config=config,
            model=model,
            versions=versions(),
            actions=action_target(vllm_config),
            vocabulary=vocabulary,
        ),
        num_front_ends=vllm_config.parallel_config._api_process_count,
        listening=listening(vllm_config),
        vocabulary=vocabulary,
    )


def open_drivers_with_engine(original: Function) -> Function:
    """Wrap ``__init__`` of `AsyncLLM` and `LLMEngine`: open the consumers that are located here, or refuse to start.

    A caller that waits for the engine core of an `LLM` does so until it ends.

    A server does so before it has clients: opening a folder may take long, and the event loop would wait. No earlier,
    since engine cores are forked in the course of it, and nothing should have threads and sockets then.
    """

    @wraps(original)
    def __init__(self: StartedEngine, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        if sections(self.vllm_config):
            end_waits_with_core(self.engine_core)
        front = front_end_of(self)
        try:
            if front is not None:
                front.open()
        except BaseException:
            self.engine_core.shutdown()
            raise

    return __init__


def open_parts(vllm_config: VllmConfig, tokenizer: object = None) -> dict[str, OpenPart]:
    """The front-end halves of the parts that are configured beside capture, by section; see `open_front_end`.

    Raises:
        ConfigError: If a section is wrong.
    """
    configured = {name: part for name, part in request_parts().items() if name in sections(vllm_config)}
    if configured:
        speak_through_vllm()
    vocabulary = ModelVocabulary(tokenizer, vllm_config)
    return {
        name: OpenPart(name, part, part.open(section(vllm_config, name), model_info(vllm_config), vocabulary))
        for name, part in configured.items()
    }


def _summary(config: CaptureConsumersConfig, consumers: Mapping[str, type[CaptureConsumer]]) -> str:
    """The consumers, where they run, and the host memory that their queues may take."""
    return ", ".join(
        f"consumer {spec.instance} (in the {consumers[spec.instance].location}, {spec.overload} when its queue of "
        f"{spec.queue_bytes / MIB:.0f} MiB is full)"
        for spec in config.consumers
    )


def _sites_text(model: ModelInfo) -> str:
    return ", ".join(
        hook if not layers else f"{hook} of {len(layers)} layers" for hook, layers in site_map(model.sites).items()
    )


def load_consumers(config: CaptureConsumersConfig) -> dict[str, type[CaptureConsumer]]:
    """The class of each configured consumer, by instance name, its parameters checked.

    Raises:
        ConfigError: On an unknown consumer or wrong parameters.
    """
    consumers: dict[str, type[CaptureConsumer]] = {}
    for spec in config.consumers:
        consumer = consumers[spec.instance] = load_configured(spec)
        consumer.check_params(spec.params)
    return consumers
