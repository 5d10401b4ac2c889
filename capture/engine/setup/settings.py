"""headgate's sections of a `VllmConfig`: read once, kept with it.

The operator writes ``additional_config={"headgate": {"capture": {...}}}``. Each section belongs to one part of
headgate (an entry point of the group ``headgate.parts``). The worker later replaces the sections by a signature of
the graph, so that volatile values stay out of vLLM's compile-cache key: the sections as first read are kept as an
attribute of the config object and travel with it to other processes.
"""

from __future__ import annotations

from collections.abc import Mapping

from headgate.capture.engine.contracts.plain_values import Document
from headgate.capture.engine.contracts.vllm_engine import VllmConfig
from headgate.capture.schema.config import (
    CaptureConsumersConfig,
    CompilerConfig,
    parse_compiler,
    parse_config,
    parse_server,
)
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.sites import parse_sites

OUR_KEY = "headgate"
SERVER = "server"
"""The section of the HTTP server, which no part of an engine reads."""
COMPILER = "compiler"
"""The section of what headgate does to inductor, which no part reads."""
_READ = "_headgate_sections"
_COMPILER = "_headgate_compiler"
_MODEL = "_headgate_model"
_CAPTURE = "_headgate_capture"


def sections(vllm_config: VllmConfig) -> Mapping[str, Document]:
    """Return all sections that the operator configured, by name; empty when there are none.

    Raises:
        ConfigError: If ``additional_config["headgate"]`` is not an object.
    """
    if (read := vars(vllm_config).get(_READ)) is not None:
        return read  # type: ignore[no-any-return]
    extra = vllm_config.additional_config
    ours = extra.get(OUR_KEY) if isinstance(extra, Mapping) else None
    if ours is None:
        return {}
    if not isinstance(ours, Mapping):
        raise ConfigError(f"additional_config['headgate'] must be an object of sections, got {ours!r}")
    parse_server(ours.get(SERVER))
    object.__setattr__(vllm_config, _COMPILER, parse_compiler(ours.get(COMPILER)))
    parts = {name: document for name, document in ours.items() if name not in (SERVER, COMPILER)}
    object.__setattr__(vllm_config, _READ, parts)
    return sections(vllm_config)


def compiler_config(vllm_config: VllmConfig) -> CompilerConfig:
    """Return the section ``compiler``, or its defaults."""
    sections(vllm_config)
    return vars(vllm_config).get(_COMPILER) or CompilerConfig()


def section(vllm_config: VllmConfig, name: str) -> Document:
    """Return one section; `sections` says whether it is there."""
    return sections(vllm_config)[name]


def capture_config(vllm_config: VllmConfig) -> CaptureConsumersConfig | None:
    """Return the parsed ``capture`` section; None if capture is not configured or names no consumer.

    Raises:
        ConfigError: If it is wrong.
    """
    if "capture" not in sections(vllm_config):
        return None
    if (parsed := vars(vllm_config).get(_CAPTURE)) is None:
        parsed = parse_config(section(vllm_config, "capture"))
        object.__setattr__(vllm_config, _CAPTURE, parsed)
    return parsed if parsed.consumers else None


def model_info(vllm_config: VllmConfig) -> ModelInfo:
    """Return the model being served, with the sites that the configuration opens for capture.

    Raises:
        ConfigError: If ``capture.sites`` names an unknown hook point or a layer that the model lacks.
    """
    if (known := vars(vllm_config).get(_MODEL)) is not None:
        return known  # type: ignore[no-any-return]
    model = vllm_config.model_config
    config = capture_config(vllm_config)
    num_layers = model.hf_text_config.num_hidden_layers
    try:
        sites = parse_sites(config.sites, num_layers, "capture.sites") if config else ()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    info = ModelInfo(
        name=model.served_model_name[0] if isinstance(model.served_model_name, list) else model.served_model_name,
        num_layers=num_layers,
        hidden_size=model.get_hidden_size(),
        dtype=str(model.dtype).removeprefix("torch."),
        sites=sites,
        context_length=model.max_model_len,
    )
    object.__setattr__(vllm_config, _MODEL, info)
    return info
