"""Our errors about requests, as errors that vLLM knows how to answer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from http import HTTPStatus
from importlib import import_module
from typing import TYPE_CHECKING, Any

from headgate.capture.schema.errors import ForbiddenError, OverloadedError, QuotaError, RequestError

if TYPE_CHECKING:
    from fastapi import Request
    from starlette.responses import JSONResponse


class _AsClientError:
    """A context manager as a class, not a generator: every request enters it several times."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RequestError) and not isinstance(error, _client_error()):
            raise _client_error()(error) from None
        if isinstance(error, ForbiddenError):
            raise _refused(error) from None


_AS_CLIENT_ERROR = _AsClientError()


def as_client_error() -> _AsClientError:
    """Turn our errors into those that vLLM's servers answer, naming the field as ``param``.

    A `RequestError` is answered with status 400, a `ForbiddenError` with its own: 401, 403, 429 or 503.
    """
    return _AS_CLIENT_ERROR


def is_without_field(error: Exception) -> bool:
    """Whether `error` is vLLM's refusal of a request without a field: vLLM 0.33 answers so for an engine core."""
    from vllm.exceptions import VLLMValidationError

    return isinstance(error, VLLMValidationError) and error.parameter is None


def overloaded(error: OverloadedError) -> OverloadedError:
    """Return `error` as one that vLLM's servers answer with HTTP 503, in an answer or within a stream."""
    return _server_error()(str(error))


@functools.cache
def _server_error() -> Callable[[str], OverloadedError]:
    """Make the class on first use; the base that it needs has moved, and newer releases have a closer one."""
    from vllm import exceptions

    base: Any = getattr(exceptions, "RetryableRequestError", None) or getattr(exceptions, "GenerationError", None)
    if base is None:
        base = import_module("vllm.entrypoints.openai.engine.protocol").GenerationError

    class ServerOverloadedError(base, OverloadedError):  # type: ignore[misc]
        """An `OverloadedError` for Python callers, a ``GenerationError`` for the server."""

        def __init__(self, message: str) -> None:
            super().__init__(message)
            self.status_code = HTTPStatus.SERVICE_UNAVAILABLE

    return ServerOverloadedError


@functools.cache
def _client_error() -> Any:
    """Make the class on first use: plugins are loaded before vLLM's own modules."""
    from vllm.exceptions import VLLMValidationError

    class RequestFieldError(VLLMValidationError, RequestError):  # type: ignore[misc]
        """A `RequestError` and `ValueError` for Python callers, a `VLLMValidationError` for the server."""

        def __init__(self, error: RequestError) -> None:
            # Both bases hand their arguments on to the next class, and do not take the same ones.
            Exception.__init__(self, str(error))
            self.field = self.parameter = error.field
            self.value = None

        def __str__(self) -> str:
            return str(self.args[0])

    return RequestFieldError


def _refused(error: ForbiddenError) -> Exception:
    make: Callable[[ForbiddenError], Exception] = refused_error()
    return make(error)


@functools.cache
def refused_error() -> Any:
    """Make the class of errors about what clients may do; `answer_refused` answers them."""
    from fastapi import HTTPException

    class RefusedError(HTTPException):
        """A `ForbiddenError` for the server."""

        def __init__(self, error: ForbiddenError) -> None:
            super().__init__(error.status, str(error))
            self.field = error.field
            if isinstance(error, QuotaError) and error.retry_after_s is not None:
                self.headers = {"Retry-After": str(error.retry_after_s)}

    return RefusedError


async def answer_refused(request: Request, error: Any) -> JSONResponse:
    """Answer a `refused_error` as vLLM answers others, with the field; FastAPI's handler of exceptions."""
    from starlette.responses import JSONResponse

    status = HTTPStatus(error.status_code)
    told = {"message": error.detail, "type": status.phrase, "param": error.field, "code": status.value}
    return JSONResponse({"error": told}, status.value, headers=error.headers)
