"""Where there is no whole head, a lens is refused at the start, by what stands in its way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from headgate.capture.engine.worker.model_head import find_head
from headgate.capture.schema.errors import UnsupportedError


@pytest.mark.parametrize(
    ("tensor", "pipeline", "lora", "message"),
    [
        (2, 1, None, "--tensor-parallel-size 1 and --pipeline-parallel-size 1, not 2 and 1"),
        (1, 2, None, "not 1 and 2"),
        (1, 1, object(), "start the server without LoRA"),
        (1, 1, None, r"no final norm was found in Linear\.forward"),
    ],
    ids=["tensor", "pipeline", "lora", "norm"],
)
def test_a_worker_without_a_whole_head_says_why(tensor: int, pipeline: int, lora: object, message: str) -> None:
    parallel = SimpleNamespace(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    config: Any = SimpleNamespace(parallel_config=parallel, lora_config=lora)

    with pytest.raises(UnsupportedError, match=message):
        find_head(config, nn.Linear(2, 2), nn.Linear(2, 2), torch.device("cpu"))
