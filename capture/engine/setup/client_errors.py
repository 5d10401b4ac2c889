"""Our errors about requests, as errors that vLLM knows how to answer."""

from __future__ import annotations

import functools
from typing import Any

from headgate.capture.schema.errors import RequestError


class _AsClientError:
    """A context manager as a class, not a generator: every request enters it several times."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RequestError) and not isinstance(error, _client_error()):
            raise _client_error()(error) from None


_AS_CLIENT_ERROR = _AsClientError()


def as_client_error() -> _AsClientError:
    """Turn a `RequestError` into one that vLLM's servers answer with HTTP 400, naming the field as ``param``."""
    return _AS_CLIENT_ERROR


def is_without_field(error: Exception) -> bool:
    """Whether `error` is vLLM's refusal of a request without a field: vLLM 0.33 answers so for an engine core."""
    from vllm.exceptions import VLLMValidationError

    return isinstance(error, VLLMValidationError) and error.parameter is None


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
