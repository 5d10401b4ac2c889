"""Controllers that other processes find on a folder of ``sys.path``, and a worker that reads their scores."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from headgate.capture.engine.contracts.core_part import RequestProgress
from headgate.steering.controllers.actions import Stop
from headgate.steering.controllers.host import DecidedAction
from headgate.steering.controllers.loading import GROUP, ControllerSpec
from headgate.steering.gates.step_table import StepTable

SOURCE = '''
import json, os, signal, time
import numpy as np
from headgate.capture.schema.sites import Site
from headgate.steering.controllers import actions, Controller, Probe, SetSteering, SetSteeringEach, Stop, load_probe

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

class Late(Telling):
    """Decides by the rows of a position what a named pipe says; each such step lasts until the pipe was written to."""

    def __init__(self, pipe, at, never_waits=False):
        super().__init__(["one"], never_waits)
        self.pipe, self.at = pipe, at

    def step(self, readings):
        if self.at in readings.positions.tolist():
            with open(self.pipe) as pipe:
                decided = json.load(pipe)
            for name, fields in decided:
                yield getattr(actions, name)(**fields)

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
    classes = ("Telling", "Setting", "Acting", "Late", "Failing")
    entries = "\n".join(f"{each.lower()} = hosted_controllers_package:{each}" for each in classes)
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{entries}\n")


def spec(name: str, instance: str, budget_ms: float = 1000, **params: Any) -> ControllerSpec:
    """A configured controller."""
    return ControllerSpec(name=name, instance_name=instance, budget_ms=budget_ms, params=params)


def told_of(actions: Sequence[DecidedAction]) -> list[tuple[str, int, Any]]:
    """What controllers `Telling` were told in which step, by their actions."""
    return [(name, step, json.loads(cast(Stop, action).reason)) for name, action, step in actions]


@dataclass
class Running:
    """A request."""

    num_prompt: int
    acting: tuple[str, ...]
    tokens: list[int]
    done: int = 0
    """Rows of it that were computed."""


@dataclass
class Worker:
    """The steps of a worker's requests as an engine core gets them.

    Attributes:
        numbers: The numbers of the scores of each controller.
    """

    numbers: dict[str, list[int]]
    requests: dict[str, Running] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.size = 1 + max(number for each in self.numbers.values() for number in each)
        self.rng = np.random.default_rng(5)

    def step(self, rows: dict[str, int]) -> StepTable:
        """Compute so many rows of each request; signals are the scores, and behind them others."""
        ids, total = tuple(rows), sum(rows.values())
        firsts = np.array([self.requests[each].done for each in ids], np.int64)
        for req_id, number in rows.items():
            self.requests[req_id].done += number
        signals = self.rng.normal(size=(total, 2 * self.size)).astype(np.float32)
        return StepTable(ids, firsts, np.array(list(rows.values()), np.int64), signals, total == len(ids))

    def tokens_of(self, req_id: str) -> list[int] | None:
        """The tokens of a request; None if it has ended."""
        found = self.requests.get(req_id)
        return None if found is None else found.tokens

    def progress(self, req_id: str) -> RequestProgress | None:
        """How far a request is; None if it has ended."""
        found = self.requests.get(req_id)
        return None if found is None else RequestProgress(max(found.done, found.num_prompt), found.tokens)

    def generate(self, ids: Collection[str]) -> None:
        """Sample the next token of each request whose rows are all computed."""
        for req_id in ids:
            request = self.requests[req_id]
            if request.done == len(request.tokens):
                request.tokens.append(int(self.rng.integers(0, 1000)))
