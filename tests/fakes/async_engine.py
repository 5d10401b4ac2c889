"""An `AsyncLLM` for tests that are no coroutines."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

from tests.deadlines import patience

TIMEOUT_S = 60


class AsyncEngine:
    """An `AsyncLLM` and the event loop that it lives on.

    Args:
        model: Folder of the model.
        settings: Further ones of `AsyncEngineArgs`.
    """

    def __init__(self, model: Path, **settings: Any) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.loop = asyncio.new_event_loop()
        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(str(model), **settings))

    def run(self, coroutine: Any) -> Any:
        """Run a coroutine on its loop; return what it returns."""
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, patience(TIMEOUT_S)))

    def close(self) -> None:
        """Shut it down, end its tasks, and collect it, which has circles."""
        self.llm.shutdown()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        del self.llm
        gc.collect()
        self.loop.close()
