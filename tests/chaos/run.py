"""The chaos run: ``python -m tests.chaos.run [--minutes M] [--seed N]``, or ``make chaos``.

A real engine serves 64 clients, while consumers raise, hang and are slow, the disk is full, the clock jumps, clients go
away and processes are killed. Everything that was answered is compared with what Hugging Face and stock vLLM compute.
Ends with status 1 and everything that was wrong, the seed and what happened when.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import torch

from tests.chaos.checks import Judge, References
from tests.chaos.clients import Crowd, Outcome
from tests.chaos.consumers import MAX_STALL_S
from tests.chaos.excuses import WRITTEN_S, Faults, Span, unexcused
from tests.chaos.fleet import END_S, Fleet
from tests.chaos.memory import Memory
from tests.chaos.model import chaos_model
from tests.chaos.notes import take_notes
from tests.chaos.workload import CALM, INSTANCES, ROUGH, Mix, Workload
from tests.environment import ENVIRONMENT

NUM_CLIENTS = 64
DAY_S = 86400.0
STOP_S = 3.0
"""Seconds that an API server is stopped (SIGSTOP)."""
LEFT_OVER = ("headgate", "vectors-")
FAULTS = ("rough", "disk", "clock", "pause")
LONG_S, LONG_LIFE = 1200.0, 40
"""Faults of one server of a run that takes `LONG_S` or more, so that what grows slowly is seen."""
LOOK_EVERY = 4
"""After so many faults, everything comes to rest, and nothing may be held."""


class Chaos:
    """One run.

    Attributes:
        judge: Knows what was wrong.
        timeline: What happened when, in seconds since the beginning.

    Args:
        folder: For everything that is written.
        seed: Of requests and faults.
        size: Requests of each phase.
        start_method: How vLLM starts its processes: ``spawn``, as in production, or ``fork``, in half the time.
    """

    def __init__(self, folder: Path, seed: int, size: int, start_method: str) -> None:
        self._rng = random.Random(seed)
        self._size = size
        self._model = chaos_model(folder / "model")
        self._workload = Workload(seed)
        self._folder = folder
        self.fleet = Fleet(folder, self._model, start_method)
        self._outcomes: list[Outcome] = []
        self._faults = Faults()
        self._began = time.monotonic()
        self.timeline: list[str] = []
        self.num_requests = self.num_preempted = 0

    def say(self, text: str) -> None:
        """Note what happens, and the processor time that this process and the server took so far."""
        cpu_s = time.process_time(), sum(process.cpu_s for process in self.fleet.processes())
        times = f"{time.monotonic() - self._began:7.1f} s, {cpu_s[0]:4.0f} + {cpu_s[1]:4.0f} of CPU"
        self.timeline.append(f"{times}  {text}")
        print(self.timeline[-1], flush=True)

    def prepare(self) -> None:
        """Let stock vLLM answer, and load the reference."""
        prompts, out = self._folder / "prompts.json", self._folder / "stock.json"
        prompts.write_text(json.dumps([prompt.tokens for prompt in self._workload.prompts]))
        command = [sys.executable, "-m", "tests.chaos.stock", str(self._model), str(prompts), str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stock = json.loads(out.read_text())
        self.judge = Judge(References(self._model), stock)
        self.say(f"stock answered; {sum(map(len, stock))} tokens of {len(stock)} prompts are clear")

    def live(self, faults: list[str], end: str) -> None:
        """One server's life: `faults` one after the other, and how it ends: ``stop``, or whom to kill."""
        self._outcomes, self._faults = [], Faults()
        server = self.fleet.start()
        self.say(f"serving at {server.url}")
        slots = self.fleet.idle_state()["reserved"]
        asyncio.run(self._load(faults, end, slots))
        left = self.fleet.stop() if end == "stop" else self.fleet.close()
        if left:
            self.judge.wrong(f"processes that did not end: {left}")
        self.say("the server has ended")
        self._verify()

    async def _load(self, faults: list[str], end: str, slots: float) -> None:
        await self._warm_up()
        before = self._idle(slots, None)
        memory = Memory()
        for index, fault in enumerate(faults):
            if index and index % LOOK_EVERY == 0:
                self._idle(slots, before)
                memory.look(len(self._outcomes), self.fleet.processes())
            self.say(fault)
            mix = ROUGH if fault == "rough" else CALM
            await self._crowd(mix, getattr(self, f"_{fault}"))
        if faults:
            self.say("calm again")
            await self._crowd(CALM, self._served)
            self._idle(slots, before)
            memory.look(len(self._outcomes), self.fleet.processes())
        for text in memory.growth():
            self.judge.wrong(text)
        self.say(f"memory {memory}")
        preempted = self.fleet.num_preempted()
        self.num_preempted += preempted
        self.say(f"preempted {preempted} times")
        if end != "stop":
            await self._crowd(ROUGH, partial(self._kill, end))

    async def _warm_up(self) -> None:
        """Let each API server alone answer requests to every consumer, so that all that waits for first use is there.

        They share one listening socket, and on a busy machine one of them may take every client.
        """
        servers = self.fleet.pids("api")
        for server in servers:
            others = [other for other in servers if other != server]
            try:
                for other in others:
                    os.kill(other, signal.SIGSTOP)
                await self._crowd(CALM, self._every_consumer_served)
            finally:
                for other in others:
                    os.kill(other, signal.SIGCONT)

    async def _every_consumer_served(self, crowd: Crowd) -> None:
        """Wait until so many more requests are answered, some of each consumer among them."""
        begin = len(self._outcomes)
        await self._served(crowd)
        while not set(INSTANCES) <= {name for outcome in self._outcomes[begin:] for name in outcome.shot.jobs}:
            await asyncio.sleep(0.05)

    async def _crowd(self, mix: Mix, during: Callable[[Crowd], Awaitable[None]]) -> None:
        assert self.fleet.server is not None
        crowd = Crowd(self.fleet.server.url, self._workload, mix, NUM_CLIENTS, self._outcomes.append)
        try:
            await during(crowd)
        finally:
            await crowd.stop()

    async def _served(self, crowd: Crowd) -> None:
        """Wait until so many more requests are answered."""
        wanted = len(self._outcomes) + self._size
        while len(self._outcomes) < wanted:
            await asyncio.sleep(0.05)

    async def _rough(self, crowd: Crowd) -> None:
        await self._served(crowd)

    async def _disk(self, crowd: Crowd) -> None:
        self.fleet.set(disk="full")
        self._faults.full.append(span := Span(time.monotonic()))
        await self._served(crowd)
        self.fleet.set()
        span.ended = time.monotonic() + 0.5  # until every process has noticed

    async def _clock(self, crowd: Crowd) -> None:
        for jump in (DAY_S, -DAY_S, 400 * DAY_S):
            self.fleet.set(clock=jump)
            await self._served(crowd)
        self.fleet.set()

    async def _pause(self, crowd: Crowd) -> None:
        """An API server stands still for a while, and goes on."""
        pid = self._rng.choice(self.fleet.pids("api"))
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(STOP_S)
        os.kill(pid, signal.SIGCONT)
        await self._served(crowd)

    async def _kill(self, role: str, crowd: Crowd) -> None:
        await self._served(crowd)
        pid = self._rng.choice(self.fleet.pids(role))
        self.say(f"kill -9 of {role} {pid}")
        self._faults.killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        while not any(outcome.end == "broken" for outcome in self._outcomes):
            await asyncio.sleep(0.05)

    def _idle(self, slots: float, before: Counter[str] | None) -> Counter[str]:
        """Wait until nothing is held any more, and no more threads and files than `before`; returns what there is."""
        until = time.monotonic() + END_S
        while True:
            state, holdings = self.fleet.idle_state(), self.fleet.holdings()
            state["reserved"] -= slots
            held = {name: value for name, value in state.items() if value}
            more = dict(holdings - before) if before else {}
            if not held and not more:
                break
            if time.monotonic() > until:
                self.judge.wrong(f"an idle server still has {held or more}")
                break
            time.sleep(0.2)
        memory = [f"{process.name} {process.rss_mib:.0f}" for process in self.fleet.processes()]
        self.say(f"idle: {holdings.total()} threads and files, MiB: {memory}")
        return holdings

    def _verify(self) -> None:
        """Compare everything that this server did."""
        calls = take_notes(self.fleet.notes)
        for text, outcome in unexcused(self._outcomes, self._faults, calls):
            self.judge.wrong(text, outcome)
        for outcome in sorted(self._outcomes, key=lambda one: -one.shot.max_tokens):  # the long ones tell of the short
            self.judge.tokens(outcome)
            if outcome.end == "answered" and outcome.status == 200 and not outcome.error:
                self.judge.results(outcome)
        shots = {outcome.shot.key: outcome for outcome in self._outcomes}
        failed = {key for key, outcome in shots.items() if outcome.ended >= self._faults.killed - END_S}
        for span in self._faults.full:
            failed |= {key for key, outcome in shots.items() if span.meets(outcome, after_s=WRITTEN_S)}
        count = {name: self.judge.files(name, root, shots, failed) for name, root in self.fleet.files.items()}
        self.num_requests += len(shots)
        ends = Counter(outcome.end for outcome in self._outcomes)
        statuses = Counter(
            result["status"] for outcome in self._outcomes for result in (outcome.results or {}).values()
        )
        rows = f"{self.judge.num_rows} rows in all, {len(self.judge.wrongs)} wrong"
        hung = [f"{one.instance} {one.ended - one.began:.1f}" for one in calls if one.ended - one.began > MAX_STALL_S]
        self.say(f"compared: {dict(ends)}, {dict(statuses)}, files {count}, seconds that calls hung {hung}, {rows}")
        self.judge.forget()
        for root in self.fleet.files.values():
            for path in root.iterdir():
                if not path.name.startswith("."):
                    shutil.rmtree(path)

    def left_over(self) -> None:
        """What is left when the last server has ended."""
        found = [str(path) for path in self.fleet.temp.iterdir() if path.name.startswith(LEFT_OVER)]
        found += [
            str(path) for root in self.fleet.files.values() for path in root.rglob(".tmp/*") if path.name != "lock"
        ]
        found += [str(path) for path in Path("/dev/shm").iterdir() if path.name.startswith(LEFT_OVER)]
        if found:
            self.judge.wrong(f"left over: {found}")
        shutil.rmtree(self.fleet.temp)


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="0: three servers, as in CI")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--size", type=int, default=300, help="requests of each phase")
    parser.add_argument("--start", choices=("spawn", "fork"), default="spawn", help="how vLLM starts its processes")
    parser.add_argument("--keep", type=Path, help="folder for everything that is written")
    options = parser.parse_args(arguments)
    os.environ.update(ENVIRONMENT)
    torch.set_num_threads(1)  # threads that wait for each other spin, while servers need the cores
    folder = options.keep or Path(tempfile.mkdtemp(prefix="chaos-run-"))
    chaos = Chaos(folder, options.seed, options.size, options.start)
    chaos.say(f"seed {options.seed}")
    try:
        run(chaos, options.seed, options.minutes * 60)
    finally:
        if chaos.fleet.server is not None:  # something here failed, or the server did, by itself
            print("".join(chaos.fleet.server.log)[-100_000:])
            chaos.fleet.stop()
    for wrong in chaos.judge.wrongs[:50]:
        print(f"WRONG {wrong}")
    done = f"{chaos.num_requests} requests, {chaos.judge.num_rows} rows, {chaos.num_preempted} preemptions"
    print(f"{done}, {len(chaos.judge.wrongs)} wrong; seed {options.seed}")
    if not options.keep:
        shutil.rmtree(folder)
    return bool(chaos.judge.wrongs)


def run(chaos: Chaos, seed: int, seconds: float) -> None:
    """Servers one after the other until the time is over; the last one is stopped as its operator does."""
    rng, until = random.Random(seed + 2), time.monotonic() + seconds
    chaos.prepare()
    chaos.live(list(FAULTS), rng.choice(["engine", "worker"]))
    chaos.live([], "api")
    if seconds >= LONG_S:
        chaos.live([rng.choice(FAULTS) for _ in range(LONG_LIFE)], "stop")
    while time.monotonic() < until:
        faults = [rng.choice(FAULTS) for _ in range(rng.randint(2, 8))]
        chaos.live(faults, rng.choice(["engine", "worker", "api", "stop"]))
    chaos.live(["rough"], "stop")
    chaos.left_over()
    if not chaos.num_preempted:
        chaos.judge.wrong("no request was preempted")


if __name__ == "__main__":
    sys.exit(main())
