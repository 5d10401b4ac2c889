"""Host time of a request that brings content of its own: ``python -m tests.benchmarks.bench_new_operations KIND``.

Gemma-3-4B's sizes; `IN_FLIGHT` requests, of whose content no worker has seen the like before: ``operations`` are the 4
of `operations.operations` at 8 sites, ``ablation`` the first of them alone, ``vectors`` one vector at one site,
``gates`` a gate with a probe and a vector of its own, ``features`` 16 features of an SAE. Whenever one ends, the next
begins. No engine and no GPU: the parts of headgate that each process runs, one after the other, on the CPU.
Microseconds of CPU time, but for the latencies, which are told by the clock: the 10th, 50th and 90th percentile over
the requests. Takes ten seconds. The first is the one to compare: a machine's speed changes within seconds.

*API server*: how long the body holds the GIL. `beside a busy loop` is the latency of the same work on a thread,
while the event loop has so much work of its own in each step of 5.8 ms: the thread has to wait for the GIL
whenever it has given it up.

*engine core, input thread*: from the message to what the scheduler gets.

*step thread*: `joins` is what a request adds to the step in which it begins, `leaves` to the one after its last, and
`steady` is a whole step in which nobody comes or goes. `launches` are the operations that PyTorch is asked for in one
step: each takes a GPU's host some 5 to 10 us, which is not in the times.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headgate.capture.engine.contracts.core_calls import lift
from headgate.capture.engine.contracts.worker_hooks import WorkerFacts
from headgate.capture.engine.server.bodies.parsing import extract_json
from headgate.capture.engine.server.loop_threads import in_turn, run_in_thread
from headgate.capture.schema.batch import BatchView
from headgate.capture.schema.consumer import ModelInfo
from headgate.steering.config import SteeringConfig
from headgate.steering.core.saes import Sae, open_sae
from headgate.steering.core.steering_core import GATHERED_BYTES, SteeringCore
from headgate.steering.documents.request import FIELD_DOCS, SteeringReader
from headgate.steering.features.sparse_coder import gathered
from headgate.steering.programs.feature_edits import sae_key
from headgate.steering.vectors.phase_vectors import Steerable
from headgate.steering.worker.rows.step_rows import RowResolver
from headgate.steering.worker.steering_part import EntryLimits, WorkerSteering
from tests.benchmarks.models import ModelSize
from tests.benchmarks.operations import encoded_gate, encoded_operations, encoded_vector, op_sites
from tests.benchmarks.saes import FEATURES_OF, SIZES, encoded_features, write_sae

SIZE = ModelSize(num_layers=34, hidden=2560, vocabulary=262208)
NUM_SETS, NUM_OPS, NUM_FEATURES, IN_FLIGHT, PROMPT = 400, 4, 16, 256, 256
STEP_S, MAX_TOKENS = 5.8e-3, 8192
STEADY_STEPS = 3
"""Behind each step in which a request joins."""

Given = TypeVar("Given")
Made = TypeVar("Made")


class Kind(NamedTuple):
    """What requests bring.

    Attributes:
        field: That it is in.
        value: By the number of the request.
        has_sae: Whether the server has an SAE.
    """

    field: str
    value: Callable[[int], msgspec.Raw]
    has_sae: bool = False


KINDS = {
    "operations": Kind("steering_ops", lambda number: encoded_operations(number, SIZE, NUM_OPS)),
    "ablation": Kind("steering_ops", lambda number: encoded_operations(number, SIZE, 1)),
    "vectors": Kind("steering_vectors", lambda number: encoded_vector(number, SIZE)),
    "gates": Kind("steering_gates", lambda number: encoded_gate(number, SIZE, is_loop=False)),
    "features": Kind("steering_features", lambda number: encoded_features(number, NUM_FEATURES), has_sae=True),
}


class Server(NamedTuple):
    """A configuration, and what is known of its model."""

    config: SteeringConfig
    steerable: Steerable
    saes: Sequence[Sae]

    @property
    def known(self) -> dict[str, Any]:
        """What front ends know of registered names."""
        return {sae_key(sae.name): sae.described() for sae in self.saes}


def server(kind: Kind, folder: Path) -> Server:
    """Return a server with 8 op sites, and an SAE if requests need one."""
    paths = {FEATURES_OF: write_sae(folder, SIZES[FEATURES_OF], SIZE, layer=17)} if kind.has_sae else {}
    config = SteeringConfig(op_sites=op_sites(SIZE), saes={name: str(path) for name, path in paths.items()})
    steerable = config.steerable(num_layers=SIZE.num_layers, hidden_size=SIZE.hidden, dtype="bfloat16")
    saes = [open_sae(name, path, None, steerable) for name, path in paths.items()]
    return Server(config, steerable, [replace(sae, coder=gathered(sae.coder, GATHERED_BYTES)[0]) for sae in saes])


def body(kind: Kind, number: int) -> bytes:
    prompt = list(range(1000, 1000 + PROMPT))
    return msgspec.json.encode({"prompt": prompt, kind.field: kind.value(number)})


def show(name: str, seconds: Iterable[float]) -> None:
    found = [1e6 * one for one in seconds]
    quiet, usual, late = np.percentile(found, (10, 50, 90))
    print(f"  {name:44}{quiet:9.1f}{usual:9.1f}{late:9.1f}", flush=True)


def clocked(call: Callable[[Given], Made], given: Given, times: list[float]) -> Made:
    start = time.thread_time()
    made = call(given)
    times.append(time.thread_time() - start)
    return made


def each(name: str, call: Callable[[Given], Made], given: Sequence[Given]) -> list[Made]:
    """Show the time of `call`, and return what it made of all that is `given`."""
    times: list[float] = []
    made = [clocked(call, one, times) for one in given]
    show(name, times)
    return made


def read(fields: Mapping[str, Any], reader: SteeringReader, known: Mapping[str, Any]) -> dict[str, Any]:
    wanted = reader.read(fields)
    assert wanted is not None
    reader.check(wanted, known)
    return lift(wanted.wire)


def extracted(given: bytes) -> Mapping[str, Any]:
    return extract_json(given, FIELD_DOCS)[1]


def steering_of(document: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in document.items() if name in FIELD_DOCS}


def in_server(served: Server, bodies: Sequence[bytes]) -> list[bytes]:
    """The front end's part; returns the messages to the engine core."""
    reading = partial(read, reader=SteeringReader(served.steerable), known=served.known)
    print(f"API server, bodies of {len(bodies[0]) / 1e3:.1f} kB")
    wires = each("read", reading, each("parsed on a thread", extracted, bodies))
    documents = each("parsed on the loop", msgspec.json.decode, bodies)
    each("read, when it was read before", reading, [steering_of(one) for one in documents])
    messages = each("encoded", msgspec.msgpack.encode, wires)
    for share in (0.0, 0.5, 0.9):
        afresh = partial(read, reader=SteeringReader(served.steerable), known=served.known)
        times = asyncio.run(beside_busy_loop(share, bodies[:64], afresh))
        show(f"latency on a thread beside a loop {share:.0%} busy", times)
    return messages


async def beside_busy_loop(
    share: float, bodies: Sequence[bytes], reading: Callable[[Mapping[str, Any]], object]
) -> list[float]:
    """Return the seconds for each body, on a thread."""

    async def be_busy() -> None:
        while True:
            until = time.perf_counter() + share * STEP_S
            while time.perf_counter() < until:
                pass
            await asyncio.sleep((1 - share) * STEP_S)

    def work(given: bytes) -> object:
        return in_turn(lambda: reading(extracted(given)))

    busy, times = asyncio.create_task(be_busy()), []
    for given in bodies:
        await asyncio.sleep(STEP_S * 1.3)
        began = time.perf_counter()
        await run_in_thread(partial(work, given))
        times.append(time.perf_counter() - began)
    busy.cancel()
    return times


class NoWorkers:
    """`CoreServices` of a core that is asked for nothing but requests."""

    def call_workers(self, method: str, args: Mapping[str, Any]) -> list[Any]:
        raise AssertionError(method)

    def prepare_change(self, field: str) -> None:
        raise AssertionError(field)

    def rekey_running(self) -> dict[str, int]:
        return {}

    def restart_running(self) -> None:
        raise AssertionError

    def fail(self, reason: str) -> None:
        raise AssertionError(reason)


def in_core(served: Server, messages: Sequence[bytes]) -> list[Any]:
    """The engine core's part; returns what its workers get."""
    config = served.config
    capacity = config.num_slots(SIZE.num_layers) - 1
    core = SteeringCore("bfloat16", capacity, NoWorkers(), config, steerable=served.steerable)
    for sae in served.saes:
        core.state.saes.put(sae)
    numbers = count()

    def take(message: bytes) -> Any:
        req_id = f"request-{next(numbers)}"
        taken = core.accept(req_id, msgspec.msgpack.decode(message), PROMPT)
        core.block_keys(req_id)
        return taken

    print("engine core, input thread")
    taken = each("decoded and accepted", take, messages)
    each("decoded and accepted, when it was before", take, messages)
    return taken


class Launches(TorchDispatchMode):
    """Counts operations that would be launched on a device: all but those that only look at memory another way."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def view(joined: Sequence[int], *, is_new: bool) -> BatchView:
    """A step of requests that decode; the last one's whole prompt if it `is_new`."""
    num_scheduled = np.ones(len(joined), np.int64)
    num_computed = np.full(len(joined), PROMPT + 7, np.int64)
    if is_new:
        num_scheduled[-1], num_computed[-1] = PROMPT, 0
    starts = np.cumsum(num_scheduled) - num_scheduled
    return BatchView(tuple(f"request-{one}" for one in joined), starts, num_scheduled, num_computed)


def opened_worker(served: Server) -> WorkerSteering:
    model = ModelInfo(name="m", num_layers=SIZE.num_layers, hidden_size=SIZE.hidden, dtype="bfloat16", sites=())
    facts = WorkerFacts(
        model=model,
        owned_layers=tuple(range(SIZE.num_layers)),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        max_tokens=MAX_TOKENS,
        max_num_seqs=IN_FLIGHT,
        is_compiled=False,
    )
    config, steerable = served.config, served.steerable
    limits = EntryLimits(config.max_entries, config.num_changes, config.num_columns)
    num_slots = config.num_slots(SIZE.num_layers)
    return WorkerSteering(num_slots, steerable.sites, facts, steerable.op_sites, limits)


class Steps:
    """Steps as of `WorkerSteering.step_begins`, with the clock stopped while PyTorch does what a GPU would do."""

    def __init__(self, worker: WorkerSteering) -> None:
        self._worker = worker
        self._resolver = RowResolver(worker.table, MAX_TOKENS)
        self.launches: list[int] = []

    def step(self, running: Sequence[int], times: list[float], *, is_new: bool = False) -> None:
        laid_out = view(running, is_new=is_new)
        rows, writes, gates = clocked(self._begin, laid_out, times)
        with Launches() as counter:
            self._worker.tables.update(writes, rows, gates)
        self.launches.append(counter.count)
        self._worker.step_ends()

    def _begin(self, laid_out: BatchView) -> tuple[Any, Any, Any]:
        gates = self._worker.gates
        begun = None if gates is None else gates.step_begins(laid_out)
        return self._resolver.resolve(laid_out), self._worker.table.take_writes(), begun


def in_worker(served: Server, wires: Sequence[Any]) -> None:
    """The step thread's part: with content that is new, and then with the same once more."""
    worker, running = opened_worker(served), deque[int]()
    for begin, name in ((0, "joins"), (len(wires), "joins, when its content did before")):
        join(worker, dict(enumerate(wires, begin)), running, name)


def join(worker: WorkerSteering, wires: Mapping[int, Any], running: deque[int], name: str) -> None:
    """Let requests with these numbers begin one after the other, beside those that run."""
    steps, num_before = Steps(worker), len(running)
    added, leaves, first, steady = ([] for _ in range(4))  # type: tuple[list[float], ...]
    for number, wire in wires.items():
        if len(running) == IN_FLIGHT:
            clocked(worker.remove, f"request-{running.popleft()}", leaves)
        clocked(partial(worker.add, f"request-{number}", PROMPT), wire, added)
        running.append(number)
        steps.step(running, first, is_new=True)
        steps.step(running, [])
        for _ in range(STEADY_STEPS):
            steps.step(running, steady)
    print(f"step thread, {IN_FLIGHT} requests in flight")
    usual, warm = statistics.median(steady[-1000:]), IN_FLIGHT - num_before
    show(f"{name}: it is added", added[warm:])
    show(f"{name}: more of its first step", [one - usual for one in first[warm:]])
    print(f"  {f'{name}: launches':44}{max(steps.launches):9.0f}")
    show("leaves", leaves)
    show("steady", steady[STEADY_STEPS * warm :])
    print(f"  {'steady: launches':44}{steps.launches[-1]:9.0f}")


def run(kind: Kind, folder: Path) -> None:
    served = server(kind, folder)
    in_worker(served, in_core(served, in_server(served, [body(kind, number) for number in range(NUM_SETS)])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS, nargs="?", default="operations")
    kind = KINDS[parser.parse_args().kind]
    torch.set_num_threads(1)
    print(
        f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}, torch {torch.__version__}"
    )
    with tempfile.TemporaryDirectory() as folder:
        run(kind, Path(folder) / "sae")


if __name__ == "__main__":
    main()
