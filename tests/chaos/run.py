"""The chaos run: ``python -m tests.chaos.run [--minutes M] [--seed N]``, or ``make chaos``.

A real engine serves 64 clients, while consumers raise, hang and are slow, the disk is full, the clock jumps, clients go
away and processes are killed. Everything that was answered is compared with what Hugging Face and stock vLLM compute.
Ends with status 1 and everything that was wrong, the seed and what happened when. Deadlines allow for how busy the
machine is. Where other programs leave too little of it, what took too long ends the run with `TOO_SLOW` and the figures
instead; wrong tokens and rows never do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from tests.chaos.checks import Judge, References
from tests.chaos.clients import LONGEST_S, Crowd, Outcome
from tests.chaos.consumers import MAX_STALL_S
from tests.chaos.excuses import WRITTEN_S, Faults, Span, unexcused
from tests.chaos.fleet import END_S, Fleet
from tests.chaos.memory import Memory
from tests.chaos.model import chaos_model
from tests.chaos.notes import take_notes
from tests.chaos.workload import CALM, INSTANCES, ROUGH, Mix, Workload
from tests.deadlines import Neighbours, measure, patience
from tests.environment import ENVIRONMENT, add_plugins
from tests.fakes.server import kill_session

NUM_CLIENTS = 64
DAY_S = 86400.0
STOP_S = 3.0
"""Seconds that an API server is stopped (SIGSTOP)."""
LEFT_OVER = ("headgate", "vectors-")
FAULTS = ("rough", "disk", "clock", "pause")
SHORT_PHASES = 14
"""Phases of requests of the shortest run, behind the first warm-up."""
LONG_S, LONG_LIFE = 1200.0, 40
"""Faults of one server of a run that takes `LONG_S` or more, so that what grows slowly is seen."""
LOOK_EVERY = 4
"""After so many faults, everything comes to rest, and nothing may be held."""
TOO_SLOW = 77
"""Exit status of a run that cannot say whether what took too long is a fault."""
MOST_SLOWNESS, MOST_NEIGHBOURS = 2.0, 0.25
"""A machine is too slow to judge where, while nothing of ours runs, a fixed piece of work takes so many times longer
than on a quiet one, or where other programs take this share of the processors."""
LONGEST_SHARE = 10.0
"""A request takes no longer than so many times the longest one of the warm-up."""


class TooSlowError(Exception):
    """The run does not end in its time."""


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
        limit_s: Seconds that all may take.
    """

    def __init__(self, folder: Path, seed: int, size: int, start_method: str, limit_s: float = math.inf) -> None:
        self._rng = random.Random(seed)
        self._size = size
        self._model = chaos_model(folder / "model")
        self._workload = Workload(seed)
        self._folder = folder
        self.judge = Judge(References(self._model))
        self.fleet = Fleet(folder, self._model, start_method)
        self._outcomes: list[Outcome] = []
        self._faults = Faults()
        self._began = time.monotonic()
        self._limit_s = limit_s
        self._neighbours, self._cpu_before_s = Neighbours(), time.process_time()
        self._slowness: list[float] = []
        """What was measured while nothing of the run was at work."""
        self._cpu_s: dict[int, float] = {}
        """What each process of ours took, as far as it was seen."""
        self._longest_s = 0.0
        """What the longest request of a warm-up took."""
        self.timeline: list[str] = []
        self.num_requests = self.num_preempted = 0

    def say(self, text: str) -> None:
        """Note what happens, and the processor time that this process and the server took so far."""
        processes = self.fleet.processes()
        self._cpu_s |= {process.pid: process.cpu_s for process in processes}
        cpu_s = time.process_time(), sum(process.cpu_s for process in processes)
        times = f"{time.monotonic() - self._began:7.1f} s, {cpu_s[0]:4.0f} + {cpu_s[1]:4.0f} of CPU"
        self.timeline.append(f"{times}  {text}")
        print(self.timeline[-1], flush=True)

    def machine(self) -> tuple[bool, str]:
        """Whether the machine is too slow to judge what takes long, and the figures."""
        stock_s = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        own_s = time.process_time() - self._cpu_before_s + sum(self._cpu_s.values()) + stock_s
        neighbours, slowness = self._neighbours.share(own_s), max(self._slowness, default=0.0)
        text = (
            f"other programs took {neighbours:.0%} of the processors, a fixed piece of work {slowness:.1f} times as "
            f"long as on a quiet machine, and the longest request of a warm-up {self._longest_s:.1f} s"
        )
        return slowness >= MOST_SLOWNESS or neighbours >= MOST_NEIGHBOURS, text

    def prepare(self) -> None:
        """Let stock vLLM answer, and load the reference."""
        self._slowness.append(measure())
        prompts, out = self._folder / "prompts.json", self._folder / "stock.json"
        prompts.write_text(json.dumps([prompt.tokens for prompt in self._workload.prompts]))
        command = [sys.executable, "-m", "tests.chaos.stock", str(self._model), str(prompts), str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stock = json.loads(out.read_text())
        self.judge.stock = stock
        self.say(f"stock answered; {sum(map(len, stock))} tokens of {len(stock)} prompts are clear")

    def live(self, faults: list[str], end: str) -> None:
        """One server's life: `faults` one after the other, and how it ends: ``stop``, or whom to kill."""
        self._outcomes, self._faults = [], Faults()
        began = time.monotonic()
        server = self.fleet.start()
        self._start_s = time.monotonic() - began
        self.say(f"serving at {server.url}")
        slots = self.fleet.idle_state()["reserved"]
        asyncio.run(self._load(faults, end, slots))
        left = self.fleet.stop() if end == "stop" else self.fleet.close()
        if left:
            self.judge.late(f"processes that did not end: {left}")
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
        servers, began = self.fleet.pids("api"), time.monotonic()
        for server in servers:
            others = [other for other in servers if other != server]
            try:
                for other in others:
                    os.kill(other, signal.SIGSTOP)
                await self._crowd(CALM, self._every_consumer_served)
            finally:
                for other in others:
                    os.kill(other, signal.SIGCONT)
        self._longest_s = max(outcome.ended - outcome.began for outcome in self._outcomes)
        self.say(f"warm; the longest request took {self._longest_s:.1f} s")
        left_s = 2 * self._start_s + SHORT_PHASES * (time.monotonic() - began) / len(servers)
        if time.monotonic() - self._began + left_s > self._limit_s:
            raise TooSlowError(f"what is left would take {left_s:.0f} s, and all {self._limit_s:.0f} s")

    def _longest(self) -> float:
        """Seconds that a request may take."""
        return max(patience(LONGEST_S), LONGEST_SHARE * self._longest_s)

    async def _every_consumer_served(self, crowd: Crowd) -> None:
        """Wait until so many more requests are answered, some of each consumer among them."""
        begin = len(self._outcomes)
        await self._served(crowd)
        while not set(INSTANCES) <= {name for outcome in self._outcomes[begin:] for name in outcome.shot.jobs}:
            await asyncio.sleep(0.05)

    async def _crowd(self, mix: Mix, during: Callable[[Crowd], Awaitable[None]]) -> None:
        assert self.fleet.server is not None
        url, note = self.fleet.server.url, self._outcomes.append
        crowd = Crowd(url, self._workload, mix, NUM_CLIENTS, note, self._longest)
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
        until = time.monotonic() + patience(END_S)
        while True:
            state, holdings = self.fleet.idle_state(), self.fleet.holdings()
            state["reserved"] -= slots
            held = {name: value for name, value in state.items() if value}
            more = dict(holdings - before) if before else {}
            if not held and not more:
                break
            if time.monotonic() > until:
                self.judge.late(f"an idle server still has {held or more}")
                break
            time.sleep(0.2)
        self._slowness.append(measure())
        memory = [f"{process.name} {process.rss_mib:.0f}" for process in self.fleet.processes()]
        self.say(f"idle: {holdings.total()} threads and files, MiB: {memory}")
        return holdings

    def _verify(self) -> None:
        """Compare everything that this server did."""
        calls = take_notes(self.fleet.notes)
        for failure in unexcused(self._outcomes, self._faults, calls):
            (self.judge.late if failure.is_late else self.judge.wrong)(failure.text, failure.outcome)
        self._verify_answers()
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

    def _verify_answers(self) -> None:
        """Compare the tokens of all answers, and the rows in them."""
        for outcome in sorted(self._outcomes, key=lambda one: -one.shot.max_tokens):  # the long ones tell of the short
            self.judge.tokens(outcome)
            if outcome.end == "answered" and outcome.status == 200 and not outcome.error:
                self.judge.results(outcome)

    def give_up(self, reason: str) -> None:
        """End the server, whatever it does, and compare what was answered so far."""
        if self.fleet.server is not None:
            print("".join(self.fleet.server.log)[-10_000:])
            kill_session(self.fleet.server.pid)
            self.fleet.close()
        self.judge.late(reason)
        self._verify_answers()

    def left_over(self) -> None:
        """What is left when the last server has ended."""
        found = [str(path) for path in self.fleet.temp.iterdir() if path.name.startswith(LEFT_OVER)]
        found += [
            str(path) for root in self.fleet.files.values() for path in root.rglob(".tmp/*") if path.name != "lock"
        ]
        found += [str(path) for path in Path("/dev/shm").iterdir() if path.name.startswith(LEFT_OVER)]
        if found:
            self.judge.late(f"left over: {found}")
        shutil.rmtree(self.fleet.temp)


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="0: three servers, as in CI")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--size", type=int, default=300, help="requests of each phase")
    parser.add_argument("--start", choices=("spawn", "fork"), default="spawn", help="how vLLM starts its processes")
    parser.add_argument("--keep", type=Path, help="folder for everything that is written")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds that all may take; else it is given up")
    options = parser.parse_args(arguments)
    os.environ.update(ENVIRONMENT)
    add_plugins()
    torch.set_num_threads(1)  # threads that wait for each other spin, while servers need the cores
    folder = options.keep or Path(tempfile.mkdtemp(prefix="chaos-run-"))
    chaos = Chaos(folder, options.seed, options.size, options.start, options.limit)
    chaos.say(f"seed {options.seed}")
    try:
        with limited(options.limit):
            run(chaos, options.seed, options.minutes * 60)
    except TooSlowError as error:
        chaos.give_up(str(error))
    finally:
        if chaos.fleet.server is not None:  # something here failed, or the server did, by itself
            print("".join(chaos.fleet.server.log)[-100_000:])
            chaos.fleet.stop()
    if not options.keep:
        shutil.rmtree(folder)
    return report(chaos, options.seed)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `TooSlowError` in the block when it has taken so long."""

    def give_up(_number: int, _frame: object) -> None:
        raise TooSlowError(f"not done in {seconds:.0f} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds if seconds < math.inf else 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def report(chaos: Chaos, seed: int) -> int:
    """Print what was wrong; returns the exit status."""
    judge, (is_slow, figures) = chaos.judge, chaos.machine()
    for wrong in judge.wrongs[:50]:
        print(f"WRONG {wrong}")
    for late in judge.lates[:50]:
        print(f"LATE {late}")
    done = f"{chaos.num_requests} requests, {judge.num_rows} rows, {chaos.num_preempted} preemptions"
    print(f"{done}, {len(judge.wrongs)} wrong, {len(judge.lates)} late; seed {seed}; {figures}")
    if judge.lates and is_slow and not judge.wrongs:
        print(f"too slow to judge: {figures}; {judge.lates[0].splitlines()[0]}")
        return TOO_SLOW
    return bool(judge.wrongs or judge.lates)


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
        chaos.judge.late("no request was preempted")


if __name__ == "__main__":
    sys.exit(main())
