"""Services of vLLM's server to a part that brings HTTP routes of its own.

The hook ``headgate_routes`` of a part is called once in every API server process, before the engine exists, with a
`RouteServices`, and returns a `fastapi.APIRouter`. Routes lie under ``/v1/``: the server's API key covers them there.

An error that a route raises is answered with vLLM's own error bodies: a `RequestError` with status 400 and the field
as ``param``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from headgate.capture.engine.contracts.plain_values import Document
from headgate.capture.schema.results import KeptRequest

if TYPE_CHECKING:
    from fastapi import Request

    from headgate.capture.engine.contracts.vllm_frontend import AsyncLLM


class RouteClient(NamedTuple):
    """The client of a request.

    Attributes:
        key: Name of the key that it was let in with; None if it needed none.
        address: At the other end of its connection; None if it has none.
        is_bound: Whether its key has a name of its own and is no operator's: others' modules are not its to change.
        forwarded: The address that its request says it was forwarded for (``X-Forwarded-For``); anybody can write that.
    """

    key: str | None
    address: str | None
    is_bound: bool
    forwarded: str | None = None


class Vocabulary(Protocol):
    """The tokens of the model.

    Attributes:
        size: Number of tokens.
    """

    @property
    def size(self) -> int: ...

    def encode(self, text: str, *, is_prompt: bool) -> Sequence[int]:
        """Return the tokens of a text; of a prompt, with the special tokens that begin one."""
        ...

    def shown(self, token: int) -> str:
        """Return the text of a token, for people."""
        ...


class RouteServices(Protocol):
    """Services of the server to one part's routes. Event loop only."""

    def engine(self) -> AsyncLLM | None:
        """Return the server's `AsyncLLM`; None before it is there."""
        ...

    def handle(self) -> object:
        """Return the attribute of ``AsyncLLM`` under the part's name.

        Raises:
            fastapi.HTTPException: With status 404 and how to start the server with the part, if it runs without.
        """
        ...

    async def require_key(self, request: Request) -> None:
        """Check a request, as a FastAPI dependency.

        Raises:
            fastapi.HTTPException: With status 403, unless the request carries one of the part's keys.
        """
        ...

    def has_key(self, request: Request) -> bool:
        """Whether `require_key` would let a request pass."""
        ...

    async def require_admin(self, request: Request) -> None:
        """Check a request for a key with the role ``admin``, as a FastAPI dependency.

        Raises:
            fastapi.HTTPException: With status 403, if it has none.
        """
        ...

    def client(self, request: Request) -> RouteClient:
        """Return the client of a request that `require_key` has let pass."""
        ...

    async def read_object(self, request: Request) -> dict[str, object]:
        """Read the body of a request as an object: JSON, or msgpack with raw bytes.

        Raises:
            RequestError: If it cannot be decoded, or is no object.
            fastapi.HTTPException: With status 415, if it is of neither type.
        """
        ...

    def find_kept(self, name: str, sample_index: int, field: str) -> KeptRequest:
        """Find the rows that the client at hand has kept; see `headgate.capture.schema.results.FindKept`.

        Raises:
            RequestError: Naming ``request`` or ``sample`` below `field`.
            fastapi.HTTPException: With status 403, if the client may not capture.
        """
        ...

    async def vocabulary(self) -> Vocabulary:
        """Return the tokens of the model that is served.

        Raises:
            RequestError: If the server has no tokenizer.
        """
        ...

    async def score(self, prompt: Sequence[int], token_ids: Sequence[int], fields: Document) -> Sequence[float]:
        """Generate one token after `prompt` and return the logprobs that some tokens had there.

        The request is admitted and refused as any other. Cancelling the call ends it.

        Args:
            prompt: Tokens.
            token_ids: Tokens to score.
            fields: Of parts, as a request has them.

        Raises:
            RequestError: As a request with these fields; also if this server cannot score chosen tokens.
            OverloadedError: If too many others want the same.
        """
        ...

    def client_errors(self) -> AbstractContextManager[None]:
        """Make a context in which each `RequestError` becomes an answer with status 400."""
        ...
