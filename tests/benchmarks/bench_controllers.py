"""Costs of controllers, gates and traces a step: ``python -m tests.benchmarks.bench_controllers [--profile MODE]``.

No engine and no GPU: the engine core's half and the worker's half of steering, with a scheduler that only counts. 64
requests decode a token each in `STEPS` steps; scores are random numbers. *core* is what the engine core does with the
readings of a step and for the next one, hand-over to controllers' threads included; *worker* is the step thread, whose
copies cost what they cost on a CPU; *output* makes the readings of the step's signals. Medians in microseconds, without
what the same steps take of requests on which nothing acts.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from headgate.capture.engine.contracts.core_part import CoreFacts
from headgate.capture.engine.contracts.wire_format import ORDERS_ATTRIBUTE, READINGS_ATTRIBUTE, WIRE_KEY
from headgate.capture.engine.contracts.worker_hooks import WorkerFacts
from headgate.capture.engine.core.engine_core import StepNotes, attach_orders
from headgate.capture.engine.core.part_services import PartServices
from headgate.capture.engine.core.steps_in_flight import StepsInFlight
from headgate.capture.schema.batch import BatchView, Int64Array, NewRequest
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering import PhaseVectors, probes
from headgate.steering.config import parse_config
from headgate.steering.core.controllers.controllers import open_controllers
from headgate.steering.core.steering_core import SteeringCore
from headgate.steering.gates.gate import AppliesTo, Gate, InlineProbe, Leaf, ModuleThen, Rule, Then
from headgate.steering.programs.codes import GateScope
from headgate.steering.spec import SteeringSpec, to_wire
from headgate.steering.worker.gates.reference import GateTensors
from headgate.steering.worker.steering_part import SteeringPart

IN_FLIGHT, PROMPT, STEPS, HIDDEN, LAYERS = 64, 16, 600, 64, 8
WARM_UP = 50
"""Steps at first that do not count."""
UPDATE_S = 1e-3
"""That the scheduler takes for the tokens of a step, meanwhile controllers in a process of their own decide."""
EVICTED_BYTES = 24 << 20
"""Touched before each part of a cold step: more than a core's own caches hold."""
MODEL = ModelInfo(name="m", num_layers=LAYERS, hidden_size=HIDDEN, dtype="float32", sites=())


class Mode(NamedTuple):
    """Whatever acts on every request.

    Attributes:
        selects: Controllers.
        scope: Of a gate of its own with a probe of its own; None if it has none.
        is_traced: Whether it wants its trace.
        has_rule: Whether a rule of the operator acts on all requests.
        is_apart: Whether controllers have a process of their own, as in a server.
    """

    selects: tuple[str, ...] = ()
    scope: GateScope | None = None
    is_traced: bool = False
    has_rule: bool = False
    is_apart: bool = True


MODES = {
    "none": Mode(),
    "threshold": Mode(("watch",)),
    "pid": Mode(("hold",)),
    "both": Mode(("watch", "hold")),
    "threshold, not apart": Mode(("watch",), is_apart=False),
    "pid, not apart": Mode(("hold",), is_apart=False),
    "pid, traced": Mode(("hold",), is_traced=True),
    "gate": Mode(scope=GateScope.THIS),
    "latch": Mode(scope=GateScope.REST),
    "next token": Mode(scope=GateScope.NEXT),
    "rule": Mode(has_rule=True),
    "gate, traced": Mode(scope=GateScope.THIS, is_traced=True),
}


class Request:
    """A request as vLLM's scheduler has it, as far as headgate looks at it."""

    def __init__(self, req_id: str) -> None:
        self.request_id = req_id
        self.all_token_ids = [1] * PROMPT
        self.num_prompt_tokens = PROMPT
        self.num_computed_tokens = 0
        self.block_hashes: list[bytes] = []
        self.status = 1
        self.num_stale_output_tokens, self.drop_stale_output = 0, False
        self.sampling_params = SimpleNamespace(extra_args={WIRE_KEY: {"v": 1, "notes": True}})

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def is_finished(self) -> bool:
        return False

    def update_block_hashes(self) -> None:
        pass


class Engine:
    """Both halves of steering, joined by a scheduler that only counts."""

    def __init__(self, folder: Path, mode: Mode, *, is_cold: bool = False) -> None:
        self._evicted = np.zeros(EVICTED_BYTES // 8) if is_cold else np.zeros(0)
        rng = np.random.default_rng(3)
        site = Site(1, HookPoint.POST_MLP)
        probes.save(folder / "p.safetensors", probes.Probe(site=site, weight=rng.normal(size=(1, HIDDEN))))
        keys = {"probe": str(folder / "p.safetensors"), "module": "calm"}
        config = parse_config(
            {
                "op_sites": {"post_mlp": "all"},
                "controller_process": mode.is_apart,
                "controllers": [
                    {"name": name, "instance_name": instance, "applies_to": "opt_in", "params": {**keys, **params}}
                    for name, instance, params in (
                        ("threshold", "watch", {"threshold": 0.0, "gain": 0.0, "prime": False}),
                        ("pid", "hold", {"setpoint": 0.5, "max_scale": 1.0, "min_scale": -1.0}),
                    )
                ],
            }
        )
        self.requests = {f"cmpl-{index:032d}-0": Request(f"cmpl-{index:032d}-0") for index in range(IN_FLIGHT)}
        self.outputs = [SimpleNamespace(request_id=req_id, kv_transfer_params=None) for req_id in self.requests]
        self.columns, self.rng = config.num_columns, rng
        self.layouts: dict[int, tuple[tuple[str, ...], Int64Array, Int64Array]] = {}
        self._open_worker(config)
        self._open_core(config, mode)
        for req_id in self.requests:
            gates = () if mode.scope is None else (own_gate(mode.scope, rng),)
            wire = {**to_wire(SteeringSpec(rules=mode.selects, gates=gates)), "trace": mode.is_traced}
            parts = self.core.accept(req_id, wire, PROMPT)
            self.core.offer(req_id, priority=0, is_session=False, is_offline=False)
            told: Any = {"v": 1, "parts": {"steering": parts}}
            self.hooks.headgate_request_added(new=NewRequest(req_id=req_id, prompt_token_ids=(1,) * PROMPT, wire=told))

    def _open_worker(self, config: Any) -> None:
        self.part = SteeringPart(config)
        self.hooks = self.part
        facts = WorkerFacts(
            model=MODEL,
            owned_layers=tuple(range(LAYERS)),
            device=torch.device("cpu"),
            dtype=torch.float32,
            max_tokens=2048,
            max_num_seqs=256,
            is_compiled=False,
        )
        self.hooks.headgate_allocate(facts=facts)
        part = self.part
        self.begins, self.ends, self.ordered = part.headgate_step_begins, part.headgate_step_ends, part.headgate_ordered

    def _open_core(self, config: Any, mode: Mode) -> None:
        self.scheduler: Any = SimpleNamespace(requests={}, hash_block_size=16)
        call: Callable[..., Any] = lambda method, args: [  # noqa: E731
            self.hooks.headgate_call(part="steering", method=args[1], args=args[2])
        ]
        core: Any = SimpleNamespace(
            scheduler=self.scheduler,
            step_fn=None,
            batch_queue=None,
            model_executor=SimpleNamespace(collective_rpc=lambda method, args: call(method, args)),
        )
        services = PartServices(core, "steering", StepsInFlight(core), {})
        steerable = config.steerable(num_layers=LAYERS, hidden_size=HIDDEN, dtype="float32")
        self.core = SteeringCore("float32", config.num_slots(LAYERS) - 1, services, config, steerable=steerable)
        row = np.ones(HIDDEN, np.float32)
        self.core.operator.register(
            "calm", SteeringSpec(decode=PhaseVectors.from_rows({Site(6, HookPoint.POST_MLP): row}))
        )
        if mode.has_rule:
            gate = own_gate(GateScope.THIS, self.rng)
            self.core.operator.register_rule(Rule(gate=gate, applies_to=AppliesTo.ALL))
        facts, rules = CoreFacts(model=MODEL), self.core.operator.set_beside
        self.core.start(open_controllers(config, facts, self.core.state, self.core.reservations, rules, services))
        self.notes = StepNotes(self.scheduler, "steering", self.core)
        services.open(self.core)
        self.scheduler.requests = self.requests

    def _start(self) -> float:
        """Return the time at which a part begins; between two of them vLLM's own work fills the caches."""
        self._evicted += 1.0
        return time.perf_counter()

    def _forward(self, gates: GateTensors, num_rows: int) -> None:
        """Do as the forward does: scores of gates and of controllers."""
        scores = torch.from_numpy(self.rng.normal(size=(num_rows, 2)).astype(np.float32))
        for first in (0, 2, 128):
            gates.signals[:num_rows, first : first + 2] = scores

    def step(self, count: int, clocks: dict[str, list[float]]) -> None:
        """Run a step of `count` rows of each request."""
        output = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(self.requests, count))
        start = self._start()
        attach_orders("steering", self.core, output)  # type: ignore[arg-type]
        core_s = time.perf_counter() - start

        orders = getattr(output, ORDERS_ATTRIBUTE, None)
        if count not in self.layouts:  # steps of the same requests have the same arrays, as of a runner's adapter
            counts = np.full(IN_FLIGHT, count, np.int64)
            self.layouts[count] = tuple(self.requests), np.cumsum(counts) - counts, counts
        computed = np.array([each.num_computed_tokens for each in self.requests.values()], np.int64)
        view = BatchView(*self.layouts[count], computed)
        for request in self.requests.values():
            request.num_computed_tokens += count
        rows = IN_FLIGHT * count
        state: Any = self.part._allocated()
        start = self._start()
        if orders is not None:
            self.ordered("steering", orders["steering"])
        self.begins(view, None)
        worker_s = time.perf_counter() - start
        self._forward(state.gates.tensors, rows)
        start = self._start()
        self.ends()
        readings = self.part.headgate_step_readings()
        worker_s += time.perf_counter() - start

        start = self._start()
        found = None if readings is None else {"steering": readings.collect()}
        output_s = time.perf_counter() - start

        made = SimpleNamespace(**({} if found is None else {READINGS_ATTRIBUTE: found}))
        start = self._start()
        self.notes.update(self._update, output, made)  # type: ignore[arg-type]
        core_s += time.perf_counter() - start - self.own_s
        for name, seconds in (("core", core_s), ("worker", worker_s), ("output", output_s)):
            clocks[name].append(1e6 * seconds)

    def _update(self, scheduler: Any, output: Any, made: Any) -> dict[int, Any]:
        for request in self.requests.values():
            request.all_token_ids += [1] * (request.num_computed_tokens - len(request.all_token_ids) + 1)
        # Notes leave with these; without them they would pile up.
        for each in self.outputs:
            each.kv_transfer_params = None
        began = time.perf_counter()
        time.sleep(UPDATE_S)
        self.own_s = time.perf_counter() - began
        return {0: SimpleNamespace(outputs=self.outputs)}


def own_gate(scope: GateScope, rng: np.random.Generator) -> Gate:
    """Return a gate with a probe that no other request has."""
    weight = rng.normal(size=HIDDEN).astype(np.float32)
    probe = InlineProbe(site=Site(1, HookPoint.POST_MLP), weight=weight, bias=0.0, is_cosine=False, where="own")
    return Gate(name="own", when=Leaf(reading=probe, threshold=0.0), then=Then(module=ModuleThen("calm")), scope=scope)


def measure(mode: Mode, profile: cProfile.Profile | None = None, *, is_cold: bool = False) -> dict[str, float]:
    """Return medians of a mode's parts, in microseconds; with cold caches if that is asked for."""
    clocks: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():  # as vLLM runs its steps
        engine = Engine(Path(folder), mode, is_cold=is_cold)
        engine.step(PROMPT, clocks)
        for number in range(STEPS):
            if profile is not None and number == WARM_UP:
                profile.enable()
            engine.step(1, clocks)
    if profile is not None:
        profile.disable()
    return {name: float(np.median(values[WARM_UP:])) for name, values in clocks.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="What controllers cost the host in a step.")
    parser.add_argument("--profile", choices=MODES, help="show where the time of a mode goes")
    parser.add_argument(
        "--cold", action="store_true", help="empty the caches before each part, as vLLM's own work does"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.profile:
        profile = cProfile.Profile()
        measure(MODES[args.profile], profile, is_cold=args.cold)
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        return
    idle = measure(Mode(), is_cold=args.cold)
    print(f"{'':22}{'core':>8}{'worker':>8}{'output':>8}{'sum':>8}   us a step, {IN_FLIGHT} requests")
    for name, mode in MODES.items():
        found = idle if mode == Mode() else {k: v - idle[k] for k, v in measure(mode, is_cold=args.cold).items()}
        print(f"{name:22}" + "".join(f"{v:8.0f}" for v in (*found.values(), sum(found.values()))))


if __name__ == "__main__":
    main()
