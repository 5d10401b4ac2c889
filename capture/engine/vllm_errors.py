"""Our errors as classes of vLLM's, which its servers know how to answer. Importing this imports vLLM."""

from __future__ import annotations

from http import HTTPStatus

from headgate.capture.engine import vllm_names
from headgate.capture.schema.errors import OverloadedError, RequestError


class RequestFieldError(vllm_names.VALIDATION_ERROR.get(), RequestError):  # type: ignore[misc]
    """A `RequestError` and `ValueError` for Python callers, a `VLLMValidationError` for the server."""

    def __init__(self, error: RequestError) -> None:
        # Both bases hand their arguments on to the next class, and do not take the same ones.
        Exception.__init__(self, str(error))
        self.field = self.parameter = error.field
        self.value = None

    def __str__(self) -> str:
        return str(self.args[0])


class ServerOverloadedError(vllm_names.OVERLOAD_ERROR.get(), OverloadedError):  # type: ignore[misc]
    """An `OverloadedError` for Python callers, a ``GenerationError`` for the server."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.status_code = HTTPStatus.SERVICE_UNAVAILABLE
