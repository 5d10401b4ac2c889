"""Our errors about requests, as errors that vLLM knows how to answer."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from headgate.capture.engine import vllm_names
from headgate.capture.schema.errors import ForbiddenError, OverloadedError, QuotaError, RequestError

if TYPE_CHECKING:
    from fastapi import Request
    from starlette.responses import JSONResponse


_refusals: Counter[str] = Counter({"capture": 0, "steering": 0, "other": 0})


class _AsClientError:
    """A context manager as a class, not a generator: every request enters it several times."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RequestError):
            from headgate.capture.engine.vllm_errors import RequestFieldError  # plugins load before vLLM

            if not isinstance(error, RequestFieldError):
                _count(error.field)
                raise RequestFieldError(error) from None
        if isinstance(error, ForbiddenError):
            raise _refused(error) from None


_AS_CLIENT_ERROR = _AsClientError()


def as_client_error() -> _AsClientError:
    """Turn our errors into errors that vLLM's servers answer, naming the field as ``param``.

    A `RequestError` is answered with status 400, a `ForbiddenError` with its own: 401, 403, 429 or 503.
    """
    return _AS_CLIENT_ERROR


def is_without_field(error: Exception) -> bool:
    """Whether `error` is vLLM's refusal of a request without a field: vLLM 0.33 answers so for an engine core."""
    VLLMValidationError = vllm_names.VALIDATION_ERROR.get()

    return isinstance(error, VLLMValidationError) and error.parameter is None


def overloaded(error: OverloadedError) -> OverloadedError:
    """Return `error` as one that vLLM's servers answer with HTTP 503, in an answer or within a stream."""
    from headgate.capture.engine.vllm_errors import ServerOverloadedError

    found: OverloadedError = ServerOverloadedError(str(error))
    return found


def refusals() -> Mapping[str, int]:
    """Count what this process has refused so far, by what it was about: ``capture``, ``steering`` or ``other``."""
    return dict(_refusals)


def _count(field: str) -> None:
    root = re.split(r"[.\[]", field, maxsplit=1)[0]
    about = "capture" if root.startswith(("capture", "return_hidden_states")) else "other"
    _refusals["steering" if "steering" in root or root.startswith("sae") else about] += 1


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
    reported = {"message": error.detail, "type": status.phrase, "param": error.field, "code": status.value}
    return JSONResponse({"error": reported}, status.value, headers=error.headers)
