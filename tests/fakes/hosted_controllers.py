"""Controllers that other processes find on a folder of ``sys.path``, and a worker that tells them scores."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headgate.steering.controllers.hosting.told_words import ToldPlace
from headgate.steering.controllers.loading import GROUP, ControllerSpec
from headgate.steering.gates.step_table import StepTable
from headgate.steering.programs.gate_codes import TOLD_COUNT_MASK, TOLD_ROWS
from headgate.steering.worker.gates.told_memory import ToldMemory

SOURCE = '''
import json, os, signal, time
import numpy as np
from headgate.capture.schema.sites import Site
from headgate.steering.controllers import Controller, Probe, SetSteering, SetSteeringEach, Stop, load_probe

class Telling(Controller):
    """Answers with all that it was told: as reasons of `Stop`."""

    def __init__(self, names, never_waits=False, needs_tokens=True, needs_prompts=False):
        self.names, self.events = names, []
        self.never_waits, self.needs_tokens, self.needs_prompts = never_waits, needs_tokens, needs_prompts

    def probes(self):
        return {name: Probe(site=Site.parse("0.post_mlp"), weight=np.ones((1, 8))) for name in self.names}

    def modules(self):
        return ["m"]

    def request_begins(self, request):
        self.events.append(["begins", request.request, request.num_prompt_tokens, list(request.token_ids)])

    def request_ends(self, request):
        self.events.append(["ends", request.request, list(request.token_ids) if self.needs_tokens else None])

    def step(self, readings):
        tokens = readings.token_ids.tolist() if self.needs_tokens else [None] * len(readings)
        scores = {name: values.tolist() for name, values in readings.scores.items()}
        told = [list(readings.requests), readings.positions.tolist(), readings.is_prompt.tolist(), tokens, scores]
        events, self.events = self.events, []
        yield Stop(readings.requests[0], json.dumps([events, told]))

class Setting(Telling):
    """Sets a scale of each request whose score is above 0, and for all others of several steps in turn."""

    def step(self, readings):
        scores = readings.scores[self.names[0]].astype(float)
        (at,) = np.nonzero(scores > 0)
        if len(at):
            at = None if len(at) == len(scores) else at
            yield SetSteeringEach(readings.requests, "m", scores if at is None else scores[at], at)
        if (scores > 9).any():
            yield Stop(readings.requests[0], "high")

class Acting(Controller):
    """Acts by chance, but alike for the same rows: by their scores, positions and tokens."""

    def __init__(self, probe):
        self.probe = probe

    def probes(self):
        return {"score": load_probe(self.probe)}

    def step(self, readings):
        for row in readings.rows():
            chance = hash((row.scores["score"], row.position, row.token_id)) % 97 if row.phase == "decode" else 96
            if chance < 60:
                yield SetSteering(row.request, module="calm", scale=chance / 30 - 1)
            elif chance < 63:
                yield SetSteering(row.request)
            elif chance == 63:
                yield Stop(row.request, "by chance")

class Failing(Telling):
    def __init__(self, how):
        super().__init__(["one"], never_waits=True)
        self.how = how

    def step(self, readings):
        if self.how == "hang":
            time.sleep(3600)
        elif self.how == "odd":
            return [Stop(readings.requests[0], lambda: None), Stop(readings.requests[0], "well")]
        elif self.how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("no more")
'''


def publish(folder: Path) -> None:
    """Put the controllers into a folder of ``sys.path``."""
    (folder / "hosted_controllers_package.py").write_text(SOURCE)
    info = folder / "hosted_controllers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hosted-controllers\nVersion: 1.0\n")
    entries = "\n".join(
        f"{each.lower()} = hosted_controllers_package:{each}" for each in ("Telling", "Setting", "Acting", "Failing")
    )
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{entries}\n")


def spec(name: str, instance: str, budget_ms: float = 1000, **params: Any) -> ControllerSpec:
    """A configured controller."""
    return ControllerSpec(name=name, instance_name=instance, budget_ms=budget_ms, params=params)


def told_of(actions: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """What controllers `Telling` were told, by their actions."""
    return [(name, json.loads(action.reason)) for name, action in actions]


@dataclass
class Running:
    """A request."""

    num_prompt: int
    slot: int
    acting: tuple[str, ...]
    tokens: list[int]
    done: int = 0
    """Rows of it that were computed."""


@dataclass
class Worker:
    """A worker's memory, and the steps of its requests as an engine core gets them.

    Attributes:
        numbers: The numbers of the scores of each controller.
    """

    numbers: dict[str, list[int]]
    num_slots: int = 16
    requests: dict[str, Running] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.size = 1 + max(number for each in self.numbers.values() for number in each)
        self.memory = ToldMemory(self.num_slots, self.size, torch.device("cpu"))
        self.counts = np.zeros((self.num_slots, self.size), np.int64)
        self.counts[:] = TOLD_COUNT_MASK - 5  # they begin anew soon
        self.rng = np.random.default_rng(5)
        self.last: tuple[str, ...] = ()

    @property
    def place(self) -> ToldPlace:
        return self.memory.place

    def step(self, rows: dict[str, int], *, may_be_quiet: bool = True) -> tuple[StepTable, bool]:
        """Compute so many rows of each request; returns the step, and whether the forward tells it alone.

        Signals are the scores, and behind them the counts.
        """
        ids = tuple(rows)
        firsts = np.array([self.requests[each].done for each in ids], np.int64)
        total = sum(rows.values())
        scores = self.rng.normal(size=(total, self.size)).astype(np.float32)
        counts = self.rng.integers(0, 99, (total, self.size)).astype(np.float32)  # of those who do not act
        words, at = self.memory.words.numpy(), 0
        for req_id, number in rows.items():
            request = self.requests[req_id]
            for k in (k for name in request.acting for k in self.numbers[name]):
                for row in range(number):
                    self.counts[request.slot, k] = now = (self.counts[request.slot, k] + 1) & TOLD_COUNT_MASK
                    counts[at + row, k] = now
                if number == 1:
                    words[request.slot, now % TOLD_ROWS, k] = now << 32 | int(scores[at, k].view(np.uint32))
            at += number
            request.done += number
        is_decoding = all(number == 1 for number in rows.values()) and all(
            first >= self.requests[each].num_prompt for each, first in zip(ids, firsts.tolist(), strict=True)
        )
        is_quiet = may_be_quiet and is_decoding and ids == self.last
        self.last = ids if is_decoding else ()
        slots = np.array([self.requests[each].slot for each in ids], np.int32) if is_decoding else None
        signals = np.concatenate([scores, counts], axis=1)
        table = StepTable(ids, firsts, np.array(list(rows.values()), np.int64), signals, total == len(ids), slots)
        return table, is_quiet

    def generate(self, ids: Collection[str]) -> None:
        """Sample the next token of each request whose rows are all computed."""
        for req_id in ids:
            request = self.requests[req_id]
            if request.done == len(request.tokens):
                request.tokens.append(int(self.rng.integers(0, 1000)))
