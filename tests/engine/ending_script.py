"""A user's script, for `test_script_end`: it captures with a consumer that takes long to close, and then ends or fails.

``python ending_script.py MODEL LOG ends|fails`` writes the monotonic time to LOG at its end. The entry point ``slow``
of the group ``vllm.capture_consumers`` is `Slow`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headgate.capture import BatchedConsumer, CapturedRequest

CLOSING_S = 6.5
"""More than the 5 seconds after which vLLM ends its processes, less than `close_timeout_s`."""
ERROR = "RuntimeError: the user's own error"


class Slow(BatchedConsumer):
    """Notes each request, and that it was closed, like one that sends all it has got to a slow store at the end."""

    @classmethod
    def check_params(cls, params: Mapping[str, Any]) -> None:
        assert set(params) == {"log"}

    def on_capture(self, captured: CapturedRequest) -> None:
        self._note(f"captured {len(captured.positions)}")

    def close(self, timeout_s: float) -> None:
        time.sleep(CLOSING_S)
        self._note("closed")

    def _note(self, line: str) -> None:
        with Path(self.params["log"]).open("a") as log:
            log.write(f"{line}\n")


def main(model: str, log: str, end: str) -> None:
    from vllm import LLM, SamplingParams

    capture: dict[str, Any] = {
        "consumers": [{"name": "slow", "params": {"log": log}}],
        "sites": {"post_mlp": [1]},
        "close_timeout_s": 60,  # enough on a busy machine
    }
    llm = LLM(
        model,
        block_size=32,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_batched_tokens=64,
        skip_tokenizer_init=True,
        additional_config={"headgate": {"capture": capture}},
    )
    params = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
    params.capture = {"slow": {"hooks": {"post_mlp": [1]}, "positions": "all"}}  # type: ignore[attr-defined,unused-ignore]
    llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 2, params, use_tqdm=False)
    with Path(log).open("a") as file:
        file.write(f"{time.monotonic()}\n")
    if end == "fails":
        raise RuntimeError("the user's own error")


if __name__ == "__main__":
    main(*sys.argv[1:])
