"""Calls from a front end into its engine cores: ``EngineCore.headgate_call(part, method, args)``.

It answers with a `CoreAnswer`. Only plain values and bytes cross, long ones as `Frame`. With data
parallelism every engine core has a state of its own, so each of them gets every call.

vLLM leaves such a call open when its engine core is gone, and a server waits for its open requests before it ends. So
`end_calls_with_receiving` and `end_waits_with_core` let all calls fail then, vLLM's own included.

Each long piece of bytes travels in a frame of its own, uncopied (`Frame`). vLLM's encoder does so with arrays whose
place in a message has a type. It copies bytes into the message, which would be the event loop's work, and its decoder
copies them out again, which holds up the engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import compress
from pickle import PickleBuffer
from typing import Any, Generic, Protocol, SupportsIndex, TypeVar, cast

import msgspec
import numpy as np

from headgate.capture.engine import vllm_names
from headgate.capture.engine.client_errors import as_client_error
from headgate.capture.engine.contracts.core_part import CoreAnswer
from headgate.capture.engine.vllm_types import (
    AsyncEngineClient,
    EngineClient,
    Function,
    OpenCall,
    SyncEngineClient,
)
from headgate.capture.schema.batch import Document
from headgate.capture.schema.errors import EngineStateError, ForbiddenError, RequestError

LONG = 64 << 10
"""Shorter ones stay in the message: ZeroMQ's binding would copy a short frame, too."""
_EXTENSION = 0x68
"""Type of MessagePack extension that stands for a frame in a message: 4 bytes, its number. vLLM's own are 1 to 3."""


class _Coder(Protocol):
    """``MsgpackEncoder`` or ``MsgpackDecoder``: a message's frames."""

    aux_buffers: list[memoryview]


class Frame(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """Bytes, ``[n]`` of uint8, that travel in a frame of their own; and that came in one. Read-only."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        # On the way to worker processes: numpy itself copies the data of its subclasses once more.
        return frame_of, (PickleBuffer(self.data) if int(protocol) >= 5 else self.tobytes(),)


def frame_of(data: bytes | bytearray | memoryview) -> Frame:
    """Make a read-only view of a buffer."""
    view = np.frombuffer(data, np.uint8).view(Frame)
    view.flags.writeable = False
    return view


def lift(document: Document) -> dict[str, object]:
    """Copy nested dicts; long bytes become frames."""
    return {name: _lift(value) for name, value in document.items()}


def _lift(value: object) -> object:
    if isinstance(value, bytes):
        return frame_of(value) if len(value) >= LONG else value
    return lift(value) if isinstance(value, Mapping) else value


def enc_hook(original: Function) -> Function:
    """Wrap ``MsgpackEncoder.enc_hook``, which is asked about what MessagePack does not know: send frames as such."""

    @wraps(original)
    def wrapped(self: _Coder, obj: object) -> object:
        if not isinstance(obj, Frame):
            return original(self, obj)
        self.aux_buffers.append(obj.data)
        return msgspec.msgpack.Ext(_EXTENSION, (len(self.aux_buffers) - 1).to_bytes(4, "little"))

    return wrapped


def ext_hook(original: Function) -> Function:
    """Wrap ``MsgpackDecoder.ext_hook``: receive them."""

    @wraps(original)
    def wrapped(self: _Coder, code: int, data: memoryview) -> object:
        number = int.from_bytes(data, "little") if code == _EXTENSION else 0
        # A message of another sender may say anything; what is no frame of it is the original's to refuse.
        return frame_of(self.aux_buffers[number]) if 0 < number < len(self.aux_buffers) else original(self, code, data)

    return wrapped


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreCall:
    """One call of a part's method in every engine core of a front end; they answer in one order.

    Attributes:
        method: Of the part's half in the engine core.
        args: Plain values and bytes.
        undo: Method and arguments that take it back, for those engine cores that did it when another refused.
    """

    method: str
    args: Document
    undo: tuple[str, Document] | None = None


Result = TypeVar("Result")
Operation = Generator[CoreCall, Sequence[Any], Result]
"""A user's call as a generator: it yields calls, is sent each engine core's answer, and returns the result."""


METHOD = "headgate_call"


class CoreClient:
    """The engine core of an `LLM`.

    Args:
        client: The `LLMEngine`'s: of a core in this process or in one of its own.
        part: Whose methods are called.
    """

    num_engines = 1

    def __init__(self, client: EngineClient, part: str) -> None:
        self._client = client
        self._part = part

    def call(self, method: str, args: Document) -> list[object]:
        """Call the engine core; return its answer as a list of one.

        Raises:
            RequestError: As it refused.
        """
        core = getattr(self._client, "engine_core", None)  # in this process
        if core is not None:
            return [_read(core.headgate_call(self._part, method, dict(args)))]
        return [_read(self._client.call_utility(METHOD, self._part, method, lift(args)))]

    def run(self, operation: Operation[Result]) -> Result:
        """Carry the operation out and return its result.

        Raises:
            RequestError: As the engine cores refused it; then none of them has done it.
            EngineStateError: If only some could do it, and it could not be taken back.
        """
        with as_client_error():
            step = _advance(operation, None)
            while isinstance(step, CoreCall):
                step = _advance(operation, self.call(step.method, step.args))
            return step.result


def run_each(operations: Iterable[tuple[str, Operation[None]]], client: EngineClient) -> None:
    """Carry out operations of parts, each with its part's name, in the engine core of an `LLM`."""
    for part, operation in operations:
        CoreClient(client, part).run(operation)


class AsyncCoreClient:
    """The engine cores of an `AsyncLLM`; see `CoreClient`. Event loop only.

    Args:
        client: The `AsyncLLM`'s.
        part: Whose methods are called.
        call_lock: One for each `AsyncLLM` and part: what operations do before their first call is done on a thread, and
            they reach the engine cores in the order in which they were begun all the same.
    """

    def __init__(self, client: AsyncEngineClient, part: str, call_lock: asyncio.Lock | None = None) -> None:
        self._client = client
        self._part = part
        self._call_lock = call_lock or asyncio.Lock()

    @property
    def num_engines(self) -> int:
        return len(self._client.core_engines)

    async def call(self, method: str, args: Document, undo: tuple[str, Document] | None = None) -> list[object]:
        """Call every engine core; return their answers.

        Raises:
            RequestError: As one of them refused; the other cores took it back with `undo`.
            EngineStateError: If they could not.
        """
        engines = list(self._client.core_engines)
        answers = await asyncio.gather(*(self._ask(engine, method, args) for engine in engines), return_exceptions=True)
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if not failures:
            return answers
        succeeded = [not isinstance(answer, BaseException) for answer in answers]
        done = list(compress(engines, succeeded))
        if undo is not None and done:
            await self._take_back(done, method, undo)
        raise failures[0]

    async def run(self, operation: Operation[Result]) -> Result:
        """See `CoreClient.run`."""
        with as_client_error():
            async with self._call_lock:
                step = await asyncio.to_thread(_advance, operation, None)  # reads vectors, perhaps from a file
            # The first messages are sent before the waiter for the lock is back from a thread.
            while isinstance(step, CoreCall):
                step = _advance(operation, await self.call(step.method, step.args, step.undo))
            return step.result

    async def _ask(self, engine: object, method: str, args: Document) -> object:
        return _read(await self._client._call_utility_async(METHOD, self._part, method, lift(args), engine=engine))

    async def _take_back(self, engines: Sequence[object], method: str, undo: tuple[str, Document]) -> None:
        answers = await asyncio.gather(*(self._ask(engine, *undo) for engine in engines), return_exceptions=True)
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if failures:
            raise EngineStateError(
                f"{self._part}: {method} succeeded on {len(engines)} of {self.num_engines} engine cores and could not "
                f"be taken back on {len(failures)} of them ({failures[0]}); they differ until it succeeds in all"
            ) from failures[0]


async def run_each_async(operations: Iterable[tuple[str, Operation[None]]], client: AsyncEngineClient) -> None:
    """Do as `run_each` in the engine cores of an `AsyncLLM`."""
    for part, operation in operations:
        await AsyncCoreClient(client, part).run(operation)


def end_calls_with_receiving(original: Function) -> Function:
    """Wrap ``AsyncMPClient._ensure_output_queue_task``: the task receives answers; when it ends, open calls fail."""

    @wraps(original)
    def wrapped(self: AsyncEngineClient) -> None:
        original(self)
        receiving, calls = self.resources.output_queue_task, self.utility_results
        if receiving.done():  # a call was begun since
            _fail(calls)
        elif vars(self).get(_RECEIVING) is not receiving:
            setattr(self, _RECEIVING, receiving)
            receiving.add_done_callback(lambda _: _fail(calls))

    return wrapped


_RECEIVING = "_headgate_receiving"


def end_waits_with_core(client: object) -> None:
    """Let callers that wait for the engine core of an `LLM` get vLLM's ``EngineDeadError`` when it ends.

    A thread waits for the end of vLLM's own, which receives what the engine core sends. It does not keep the client
    alive. The client of an `AsyncLLM`, or of an engine core in this process, has no such thread.
    """
    receiving: threading.Thread | None = vars(client).get("output_queue_thread")
    if receiving is None:
        return
    there = cast("SyncEngineClient", client)
    calls, outputs = there.utility_results, there.outputs_queue

    def end_waits() -> None:
        receiving.join()
        _fail(calls)
        outputs.put_nowait(_engine_dead())

    threading.Thread(target=end_waits, name="headgate-engine-core-end", daemon=True).start()


def _fail(calls: Mapping[int, OpenCall]) -> None:
    for call in list(calls.values()):
        if not call.done():
            call.set_exception(_engine_dead())


def _engine_dead() -> Exception:
    EngineDeadError = vllm_names.ENGINE_DEAD_ERROR.get()

    error: Exception = EngineDeadError()
    return error


@dataclass(frozen=True, slots=True)
class _DoneCall(Generic[Result]):
    result: Result


def _advance(operation: Operation[Result], answers: Sequence[object] | None) -> CoreCall | _DoneCall[Result]:
    """Advance the operation to its next call, or to its end: `StopIteration` cannot leave a thread."""
    try:
        return next(operation) if answers is None else operation.send(answers)
    except StopIteration as stop:
        return _DoneCall(stop.value)


def _read(answer: object) -> object:
    read = cast("CoreAnswer", answer)
    if (error := read.get("error")) is not None:
        field = error["field"]
        if field is None or error["is_forbidden"]:
            raise ForbiddenError(error["message"], field)
        raise request_error(field, error["message"])
    return read["ok"]


def request_error(field: str, message: str) -> RequestError:
    """Make a `RequestError` as another process wrote it down: its text begins with the field, or does not."""
    return RequestError(field, message.removeprefix(f"{field}: "))
