"""A worker with an encoded SAE at one site, whose module's rows it steers, on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from headgate.capture.engine.contracts.worker_hooks import WorkerFacts
from headgate.capture.engine.model import forward_wrappers
from headgate.capture.engine.site_action import SiteValue
from headgate.capture.schema.batch import BatchView, NewRequest
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.config import parse_config
from headgate.steering.core.saes import SaeRegistry, open_sae
from headgate.steering.documents.request import read_steering
from headgate.steering.spec import SteeringSpec, to_wire
from headgate.steering.worker.steering_part import SteeringPart
from tests.fakes.saes import TinySae

HIDDEN, SITE = 16, Site(1, HookPoint.POST_MLP)
PHASES = ("prefill", "decode")
SET = {"sae": "a", "feature": 2, "set": 1.5}


def facts(**changes: Any) -> WorkerFacts:
    info = ModelInfo(name="m", num_layers=2, hidden_size=HIDDEN, dtype="float32", sites=())
    known = {
        "model": info,
        "owned_layers": (0, 1),
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "max_tokens": 12,
        "max_num_seqs": 4,
        "is_compiled": False,
    }
    return WorkerFacts(**{**known, **changes})


class EncodedWorker:
    """A worker part with an encoded SAE at `SITE`, and a module there."""

    def __init__(self, folder: Path, sae: TinySae, **changes: Any) -> None:
        saes = {"a": f"{sae.save(folder / 'a')}@{SITE.name}"}
        self.config = parse_config({"saes": saes, "sae_encode": ["a"], "sites": {"post_mlp": [1]}})
        self.part, self.facts = SteeringPart(self.config), facts(**changes)
        self.num_bytes = self.part.headgate_allocate(self.facts)
        action = self.part.headgate_actions(self.facts)[SITE]
        self.module = nn.Identity()
        self.runs = forward_wrappers.attach(self.module, SITE.hook, [action])
        steerable = self.config.steerable(num_layers=2, hidden_size=HIDDEN, dtype="float32")
        self.steerable, self.saes = steerable, SaeRegistry("float32", 8)
        opened = open_sae("a", folder / "a", SITE, steerable)
        self.saes.put(replace(opened, is_encoded=True))

    def add(self, req_id: str, num_prompt: int, **fields: Any) -> None:
        spec, _ = read_steering(fields, self.steerable)
        if spec is None:
            self.part.headgate_plain_request_added(req_id, num_prompt)
            return
        wire = {"v": 1, "parts": {"steering": to_wire(self._lowered(spec))}}
        self.part.headgate_request_added(
            NewRequest(req_id=req_id, prompt_token_ids=np.zeros(num_prompt, np.int64), wire=wire)
        )

    def set_global(self, **fields: Any) -> None:
        """Set what a request with such fields brings for all requests."""
        spec, _ = read_steering(fields, self.steerable)
        args = {"spec": to_wire(self._lowered(spec or SteeringSpec()))}
        self.part.headgate_call("steering", "set_global", args)

    def _lowered(self, spec: SteeringSpec) -> SteeringSpec:
        programs = {f"{phase}_program": self.saes.program(getattr(spec, f"{phase}_features")) for phase in PHASES}
        return SteeringSpec(prefill=spec.prefill, decode=spec.decode, **programs)

    def step(self, *requests: tuple[str, int, int]) -> None:
        num = np.array([count for *_, count in requests], dtype=np.int64)
        computed = np.array([computed for _, computed, _ in requests], dtype=np.int64)
        self.part.headgate_step_begins(
            BatchView(tuple(one for one, *_ in requests), np.cumsum(num) - num, num, computed)
        )

    def run(self, stream: torch.Tensor) -> torch.Tensor:
        return forward_wrappers.chained(self.runs)(self.module, SITE.hook.value, SiteValue(stream, None, stream))

    @property
    def listed(self) -> list[int]:
        sae = self.part._allocated().tables.saes[0]
        return sae.tokens[: int(sae.num_tokens[0])].tolist()
