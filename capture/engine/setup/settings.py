"""headgate's sections of a `VllmConfig`: read once, kept with it.

The operator writes ``additional_config={"headgate": {"capture": {...}}}``. Each section belongs to one part of
headgate (`headgate.capture.engine.contracts.parts`). The worker later replaces the sections by a signature of
the graph, so that volatile values stay out of vLLM's compile-cache key: the sections as first read are kept here, for
as long as the config object lives. Not in the object itself, since vLLM copies configs field by field (of a model with
images, for its language model) and fails at an attribute that is no field. Other processes get the operator's own form.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass

from headgate.capture.engine import vllm_names
from headgate.capture.engine.setup.site_shapes import declared_shapes
from headgate.capture.engine.vllm_types import VllmConfig
from headgate.capture.schema.batch import Document
from headgate.capture.schema.config import (
    CaptureConsumersConfig,
    CompilerConfig,
    NetworkConfig,
    parse_compiler,
    parse_config,
    parse_network,
    parse_server,
)
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.sites import SiteShape, parse_sites

OUR_KEY = "headgate"
SERVER = "server"
"""The section of the HTTP server, which no part of an engine reads."""
COMPILER = "compiler"
"""The section of what headgate does to inductor, which no part reads."""
NETWORK = "network"
"""The section of engines that span hosts, which no part reads; hosts may differ in it."""


@dataclass(slots=True)
class _KeptFindings:
    """The findings in one config; None until they are read."""

    sections: Mapping[str, Document] | None = None
    compiler: CompilerConfig | None = None
    network: NetworkConfig | None = None
    model: ModelInfo | None = None
    capture: CaptureConsumersConfig | None = None


_kept: dict[int, _KeptFindings] = {}
"""By the identity of a config that lives."""


def _kept_of(vllm_config: VllmConfig) -> _KeptFindings:
    key = id(vllm_config)
    if (found := _kept.get(key)) is None:
        found = _kept[key] = _KeptFindings()
        weakref.finalize(vllm_config, _kept.pop, key, None).atexit = False
    return found


def sections(vllm_config: VllmConfig) -> Mapping[str, Document]:
    """Return all sections that the operator configured, by name; empty when there are none.

    Raises:
        ConfigError: If ``additional_config["headgate"]`` is not an object.
    """
    if (known := _kept.get(id(vllm_config))) is not None and known.sections is not None:
        return known.sections
    extra = vllm_config.additional_config
    ours = extra.get(OUR_KEY) if isinstance(extra, Mapping) else None
    if ours is None:
        return {}
    if not isinstance(ours, Mapping):
        raise ConfigError(f"additional_config['headgate'] must be an object of sections, got {ours!r}")
    parse_server(ours.get(SERVER))
    kept = _kept_of(vllm_config)
    kept.compiler = parse_compiler(ours.get(COMPILER))
    kept.network = parse_network(ours.get(NETWORK))
    kept.sections = {name: document for name, document in ours.items() if name not in (SERVER, COMPILER, NETWORK)}
    return kept.sections


def compiler_config(vllm_config: VllmConfig) -> CompilerConfig:
    """Return the section ``compiler``, or its defaults."""
    sections(vllm_config)
    known = _kept.get(id(vllm_config))
    return CompilerConfig() if known is None or known.compiler is None else known.compiler


def network_config(vllm_config: VllmConfig) -> NetworkConfig:
    """Return the section ``network``, or its defaults."""
    sections(vllm_config)
    known = _kept.get(id(vllm_config))
    return NetworkConfig() if known is None or known.network is None else known.network


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
    kept = _kept_of(vllm_config)
    if kept.capture is None:
        kept.capture = parse_config(section(vllm_config, "capture"))
    return kept.capture if kept.capture.consumers else None


def model_info(vllm_config: VllmConfig) -> ModelInfo:
    """Return the model being served, with the sites that the configuration opens for capture.

    Raises:
        ConfigError: If ``capture.sites`` names an unknown hook point or a layer that the model lacks.
    """
    kept = _kept_of(vllm_config)
    if kept.model is not None:
        return kept.model
    model = vllm_config.model_config
    config = capture_config(vllm_config)
    num_layers = model.hf_text_config.num_hidden_layers
    try:
        sites = parse_sites(config.sites, num_layers, "capture.sites") if config else ()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    stream = SiteShape(model.get_hidden_size(), str(model.dtype).removeprefix("torch."))
    kept.model = ModelInfo(
        name=model.served_model_name[0] if isinstance(model.served_model_name, list) else model.served_model_name,
        num_layers=num_layers,
        hidden_size=stream.width,
        dtype=stream.dtype,
        sites=sites,
        context_length=model.max_model_len,
        shapes=declared_shapes(vllm_config, num_layers, stream),
        has_drafts=vllm_config.speculative_config is not None,
        first_head_layer=_first_head_layer(vllm_config, num_layers),
    )
    return kept.model


def _first_head_layer(vllm_config: VllmConfig, num_layers: int) -> int:
    """Return the first layer of the last pipeline stage, which has the model's final norm and head."""
    num_stages = vllm_config.parallel_config.pipeline_parallel_size
    return vllm_names.PIPELINE_LAYERS.get()(num_layers, num_stages - 1, num_stages)[0] if num_stages > 1 else 0
