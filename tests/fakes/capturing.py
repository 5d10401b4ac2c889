"""An open filesystem consumer with requests of known rows: what the tests of files start from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from headgate.capture.schema.consumer import ConsumerContext, ModelInfo, SpecContext
from headgate.consumers.feed import EXAMPLE_MODEL, TIMEOUT_S, ExampleRequest, Feed
from headgate.consumers.filesystem import FilesystemConsumer

HOOKS = {"post_mlp": [1, 3], "final_norm": "all"}


class Capturing:
    """A filesystem consumer and requests that want something of it.

    Args:
        root: Where it writes.
        stage: Rank and number of pipeline stages.
        model: What it is told about the model.
        params: Further parameters of the consumer.
    """

    def __init__(
        self, root: Path | str, *, stage: tuple[int, int] = (0, 1), model: ModelInfo = EXAMPLE_MODEL, **params: Any
    ) -> None:
        self.root = Path(root)
        self.model = model
        self.params = {"root": str(root), **params}
        self.context = ConsumerContext(
            instance_name="files",
            model=model,
            pp_rank=stage[0],
            pp_size=stage[1],
            versions={"headgate": "0.0", "vllm": "0.32.0"},
        )
        self.feed = Feed(FilesystemConsumer(self.params, self.context))

    def request(
        self,
        raw: Mapping[str, Any] | None = None,
        *,
        client_id: str = "client-1",
        engine_id: str | None = None,
        sample: tuple[int, int] = (0, 1),
        owner: str | None = None,
        **shape: Any,
    ) -> ExampleRequest:
        """A request of `owner` that wrote `raw` besides its hooks; `shape` as for `ExampleRequest`."""
        context = replace(spec_context(self.params, client_id), owner=owner)
        spec = FilesystemConsumer.validate_client_spec({"hooks": HOOKS, **(raw or {})}, context)
        engine_id = engine_id or f"engine-{client_id}-{sample[0]}"
        request = ExampleRequest(spec, engine_id, model=self.model, **shape)
        request.info = replace(request.info, client_request_id=client_id, sample_index=sample[0], num_samples=sample[1])
        return request

    def close(self) -> None:
        """Close the consumer."""
        self.feed.consumer.close(TIMEOUT_S)

    def temporary(self) -> list[str]:
        """What lies under ``.tmp``, but for locks and the folders of processes."""
        return sorted(path.name for path in (self.root / ".tmp").glob("*/*") if path.name != "lock")


def spec_context(params: Mapping[str, Any], client_id: str = "client-1") -> SpecContext:
    """What the spec of a request of that id is checked against."""
    return SpecContext(
        instance_name="files", model=EXAMPLE_MODEL, params=params, client_request_id=client_id, takes_columns=True
    )


@contextmanager
def capturing(root: Path | str, **settings: Any) -> Iterator[Capturing]:
    """An open consumer, closed at the end."""
    opened = Capturing(root, **settings)
    try:
        yield opened
    finally:
        opened.close()
