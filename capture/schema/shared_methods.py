"""Methods of a blocking class and of its twin for event loops, with one implementation.

The implementation is a generator of what is to be sent. It is sent each answer, and returns the method's result; only
the classes' edges, `Blocking._run` and `Awaited._run`, know how things are sent::

    class Calls:
        @shared
        def status(self) -> Generator[Question, Any, Status]:
            return read((yield Question("status")))

    class Client(Calls, Blocking): ...  # client.status()

    class AsyncClient(Calls, Awaited): ...  # await client.status()
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from functools import wraps
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

P = ParamSpec("P")
T = TypeVar("T")


class Blocking:
    """A class whose `shared` methods return their results."""

    def _run(self, steps: Generator[Any, Any, T]) -> T:
        raise NotImplementedError


class Awaited:
    """A class whose `shared` methods are coroutine functions."""

    async def _run(self, steps: Generator[Any, Any, T]) -> T:
        raise NotImplementedError


class shared(Generic[P, T]):
    """Makes a method of a `Blocking` or `Awaited` class of one that returns a generator."""

    def __init__(self, steps: Callable[Concatenate[Any, P], Generator[Any, Any, T]]) -> None:
        self._steps = steps
        self.__doc__ = steps.__doc__

    @overload
    def __get__(self, owner: Blocking, kind: type) -> Callable[P, T]: ...

    @overload
    def __get__(self, owner: Awaited, kind: type) -> Callable[P, Coroutine[Any, Any, T]]: ...

    @overload
    def __get__(self, owner: None, kind: type) -> Callable[..., Any]: ...

    def __get__(self, owner: Any, kind: type) -> Callable[..., Any]:
        steps = self._steps

        @wraps(steps)
        def call(self: Blocking, *args: P.args, **kwargs: P.kwargs) -> T:
            return self._run(steps(self, *args, **kwargs))

        @wraps(steps)
        async def call_later(self: Awaited, *args: P.args, **kwargs: P.kwargs) -> T:
            return await self._run(steps(self, *args, **kwargs))

        function: Any = call_later if issubclass(kind, Awaited) else call
        return function if owner is None else MethodType(function, owner)
