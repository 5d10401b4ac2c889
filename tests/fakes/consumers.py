"""Consumers as the front end sees them: what they accept. The fake worker answers in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from headgate.capture.schema.consumer import BatchedConsumer, CapturedRequest, SpecContext, parse_client_spec
from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.positions import Named
from headgate.capture.schema.sites import HookPoint, Site
from headgate.capture.schema.spec import CaptureSpec


class Rows(BatchedConsumer):
    """Takes any selection, and a tag, and keeps where messages are."""

    takes_messages = True
    takes_tag = True

    @classmethod
    def check_params(cls, params: Mapping[str, Any]) -> None:
        if set(params) - {"size"}:
            raise ConfigError(f"rows takes 'size' alone, got {sorted(params)}")

    @classmethod
    def validate_client_spec(cls, raw: object, context: SpecContext) -> CaptureSpec:
        return parse_client_spec(raw, context, options=("tag",))

    @classmethod
    def fetch_rows(cls, payload: Any) -> AnsweredRows:
        return AnsweredRows(payload)

    def on_capture(self, captured: CapturedRequest) -> Any:
        raise AssertionError("the fake worker answers")


class AnsweredRows:
    """Rows of two values, their position and their layer, for what the fake worker says that it computed."""

    def __init__(self, payload: dict[str, Any]) -> None:
        self.sites = [
            Site(layer, HookPoint(hook)) for hook, layers in payload["spec"]["sites"].items() for layer in layers
        ]
        self.positions = np.array(payload["rows"], dtype=np.int64)
        self.token_ids = np.array(payload["token_ids"], dtype=np.int64)[self.positions]

    def __getitem__(self, site: Site | str) -> torch.Tensor:
        layer = (site if isinstance(site, Site) else Site.parse(site)).layer
        return torch.tensor([[position, layer] for position in self.positions.tolist()], dtype=torch.bfloat16)


class Everything(Rows):
    """Looks at every request, asked or not."""

    reads_client_spec = False

    @classmethod
    def global_capture_spec(cls, context: SpecContext) -> CaptureSpec:
        return CaptureSpec(sites=context.model.sites[:1], positions=Named("last_prompt"))


class Broken(Rows):
    """Fails while it checks a request."""

    @classmethod
    def validate_client_spec(cls, raw: object, context: SpecContext) -> CaptureSpec:
        raise KeyError("oops")
