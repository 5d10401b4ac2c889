"""The model-free worker with steering's real worker part, and a KV cache that remembers what acted on every token.

A cached token is a digest of everything its KV depends on: its own vectors, and those of all tokens before it. Each
step is checked against what the request would compute by itself, so a block that is shared between requests that are
steered otherwise is found at once, and so is one that outlives a global change.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from headgate.capture.engine.contracts.worker_hooks import WorkerFacts
from headgate.capture.engine.setup.settings import model_info, section
from headgate.capture.schema.batch import NewRequest
from headgate.steering.config import parse_config
from headgate.steering.gates.gate import AppliesTo
from headgate.steering.spec import from_wire
from headgate.steering.vectors.phase_vectors import PhaseVectors
from headgate.steering.vectors.sums import sum_of
from headgate.steering.worker.steering_part import SteeringPart
from tests.fakes.worker import FakeWorker

Phases = tuple[bytes | None, bytes | None]


class SteeringWorker(FakeWorker):
    """Attributes are read by tests that run the engine core in their own process.

    Attributes:
        computed: Number of tokens that were computed for each request, those computed again counted again.
        acted: For each request, ``(phase, global key, own key)`` of every token that was computed.
        calls: Methods that the engine core called.
        failing: Methods that raise when they are called next.
    """

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        config = self.vllm_config
        self._part = SteeringPart(parse_config(section(config, "steering")))
        facts = WorkerFacts(
            model=model_info(config),
            owned_layers=tuple(range(model_info(config).num_layers)),
            device=torch.device("cpu"),
            dtype=torch.bfloat16,
            max_tokens=config.scheduler_config.max_num_batched_tokens,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            is_compiled=False,
        )
        self._part.headgate_allocate(facts)
        self._contents: dict[bytes, PhaseVectors] = {}
        self._programs: set[bytes] = set()
        self._modules: dict[str, Phases] = {}
        self._shared: Phases = (None, None)
        self._rules: list[Mapping[str, Any]] = []
        self._selections: dict[str, Any] = {}
        self._own: dict[str, Phases] = {}
        self._blocks: dict[str, list[int]] = {}
        self._kv: dict[tuple[int, int], bytes] = {}
        self._chains: dict[str, tuple[Phases, list[bytes]]] = {}
        self.computed: dict[str, int] = defaultdict(int)
        self.acted: dict[str, set[tuple[str, bytes | None, bytes | None]]] = defaultdict(set)
        self.calls: list[str] = []
        self.failing: set[str] = set()

    def headgate_call(self, part: str, method: str, args: Mapping[str, Any]) -> Any:
        """Run a method that the engine core calls in every worker."""
        self.calls.append(method)
        if method in self.failing:
            self.failing.remove(method)
            raise RuntimeError(f"{method} fails as it was told to")
        if method in ("set_global", "keep_module"):
            spec = from_wire(args["spec"])
            keys = (spec.prefill.key if spec.prefill else None, spec.decode.key if spec.decode else None)
            if method == "set_global":
                self._shared = keys
            else:
                self._modules[args["name"]] = keys
                self._contents.update({found.key: found for found in (spec.prefill, spec.decode) if found})
                self._programs |= {program.key for _, program in spec.phases if program}
        elif method == "set_rules":
            self._rules = args["rules"]
        elif method == "release_module":
            del self._modules[args["name"]]
        elif method == "forget":
            for key in args["keys"]:
                if key in self._programs:
                    self._programs.remove(key)
                else:
                    del self._contents[key]
        return self._part.headgate_call(part, method, args)

    def leftovers(self) -> dict[str, Any]:
        """Return the state that is held for requests and modules."""
        stats = dict(self._part.headgate_stats()["steering"])
        stats.pop("reconstructions")  # counted, not held
        return {"requests": sorted(self._own), "contents": sorted([*self._contents, *self._programs]), **stats}

    def _follow_ends(self, scheduler_output: Any) -> None:
        for req_id in sorted(scheduler_output.finished_req_ids):
            if req_id in self._own:
                self._part.headgate_request_stopped(req_id)
                for known in (self._own, self._blocks, self._chains):
                    del known[req_id]
        super()._follow_ends(scheduler_output)

    def _follow_new(self, scheduler_output: Any) -> None:
        super()._follow_new(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            self._add(new)
        cached = scheduler_output.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            (blocks,) = cached.new_block_ids[index] or ([],)
            if req_id in cached.resumed_req_ids:
                self._blocks[req_id] = []
                self._chains.pop(req_id, None)
                # What it sampled in steps whose output was dropped does not count.
                request = self._requests[req_id]
                request.num_known = len(request.prompt) + cached.num_output_tokens[index]
            self._blocks[req_id] += blocks
        for req_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            self._compute(req_id, num_tokens)

    def _add(self, new: Any) -> None:
        wire = (new.sampling_params.extra_args or {}).get("headgate") or {}
        if "capture" not in wire:
            self._requests[new.req_id].wire = None  # nobody answers
        steering = wire.get("parts", {}).get("steering")
        prompt = np.asarray(new.prompt_token_ids)
        self._selections[new.req_id] = (steering or {}).get("rules")
        if steering is None:
            self._part.headgate_plain_request_added(new.req_id, len(prompt))
            self._own[new.req_id] = (None, None)
        else:
            self._part.headgate_request_added(NewRequest(req_id=new.req_id, prompt_token_ids=prompt, wire=wire))
            read = from_wire(steering)
            self._own[new.req_id] = (
                self._key(steering.get("prefill_parts", ()), read.prefill),
                self._key(steering.get("decode_parts", ()), read.decode),
            )
        (blocks,) = new.block_ids
        self._blocks[new.req_id] = list(blocks)

    def _key(self, parts: Any, own: PhaseVectors | None) -> bytes | None:
        found = sum_of([*((self._contents[key], scale) for key, scale in parts), (own, 1.0)])
        return None if found is None else found.key

    def _compute(self, req_id: str, num_tokens: int) -> None:
        request, block_size = self._requests[req_id], self.cache_config.block_size
        start, end = request.num_computed, request.num_computed + num_tokens
        chain = self._chain(req_id, end)
        places = [(self._blocks[req_id][position // block_size], position % block_size) for position in range(end)]
        for position in range(start):
            assert self._kv[places[position]] == chain[position], f"{req_id}: wrong KV at {position} of {start}"
        for position in range(start, end):
            self._kv[places[position]] = chain[position]
            phase = int(position >= len(request.prompt))
            self.acted[req_id].add(("pd"[phase], self._shared[phase], self._own[req_id][phase]))
        self.computed[req_id] += num_tokens

    def _chain(self, req_id: str, end: int) -> list[bytes]:
        """Return the KV that the first `end` tokens would have under the present vectors."""
        request, own = self._requests[req_id], self._own[req_id]
        shared, chain = self._chains.get(req_id, (self._shared, []))
        if shared != self._shared:
            chain = []
        for position in range(len(chain), end):
            generated = position - len(request.prompt)
            phase = int(generated >= 0)
            script = request.script
            token = request.prompt[position] if generated < 0 else script[min(generated, len(script) - 1)]
            # Vectors that act alone act alike, whoever set them.
            acting = repr(
                (token, [key for key in (self._shared[phase], own[phase]) if key], *self._acting(req_id))
            ).encode()
            chain.append(hashlib.blake2b(acting, key=chain[-1] if chain else b"", digest_size=16).digest())
        self._chains[req_id] = (self._shared, chain)
        return chain

    def _acting(self, req_id: str) -> list[str]:
        """The names of the rules that change the rows of a request; those of names like ``watch`` observe."""
        selection = self._selections[req_id]
        return [
            rule["name"]
            for rule in self._rules
            if AppliesTo(rule["applies_to"]).acts(rule["name"], selection) and "watch" not in rule["name"]
        ]
