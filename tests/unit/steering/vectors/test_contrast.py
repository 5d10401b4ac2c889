"""Directions out of prompts, over an `LLM` that is played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headgate.capture.schema.errors import ConsumerError
from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.vectors.directions import captured_rows, contrast

SITE = Site(3, HookPoint.POST_MLP)
HOOKS = {"post_mlp": [3]}


class PlayedLLM:
    """Returns two rows for each prompt: the number in its text, and that plus 2, in the first of four values."""

    def __init__(self, **result: Any) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._result = result

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        return self._serve("generate", prompts, params)

    def chat(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        return self._serve("chat", [messages[0]["content"] for messages in prompts], params)

    def _serve(self, how: str, prompts: list[str], params: Any) -> list[Any]:
        self.calls.append((how, params.capture))
        return [self._output(float(prompt)) for prompt in prompts]

    def _output(self, value: float) -> Any:
        rows = torch.zeros(2, 4, dtype=torch.bfloat16)
        rows[0, 0], rows[1, 0] = value, value + 2
        result = {"status": "ok", "error": None, "payload": SimpleNamespace(rows={SITE: rows}), **self._result}
        return SimpleNamespace(request_id="7", capture_results={"memory": SimpleNamespace(**result)})


def test_a_row_for_each_prompt() -> None:
    llm = PlayedLLM()

    rows = captured_rows(llm, ["1", "5"], sites=HOOKS, positions="all_prompt")

    assert rows[SITE].tolist() == [[2, 0, 0, 0], [6, 0, 0, 0]]
    assert llm.calls == [("generate", {"memory": {"hooks": HOOKS, "positions": "all_prompt"}})]


def test_the_direction_leads_from_the_negative_to_the_positive() -> None:
    direction = contrast(PlayedLLM(), ["10", "14"], ["1", "3"], sites=HOOKS)

    assert direction.sites == (SITE,)
    assert direction.float32().tolist() == [[10, 0, 0, 0]]


def test_chats_are_served_as_chats() -> None:
    llm = PlayedLLM()
    chats = [[{"role": "user", "content": text}] for text in ("4", "1")]

    direction = contrast(llm, chats[:1], chats[1:], sites=HOOKS, normalize=True)

    assert llm.calls[0][0] == "chat"
    assert direction.float32().tolist() == [[1, 0, 0, 0]]


@pytest.mark.parametrize("method", ["pca_center", "pca_diff"])
def test_principal_components_of_pairs(method: Any) -> None:
    direction = contrast(PlayedLLM(), ["10", "14"], ["1", "3"], sites=HOOKS, method=method, normalize=True)

    np.testing.assert_allclose(direction.float32(), [[1, 0, 0, 0]])


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ({"status": "error", "error": "it broke", "payload": None}, "error, it broke"),
        ({"payload": {"path": "x"}}, "ok, dict; use one that does"),
    ],
)
def test_rows_that_did_not_arrive(result: Any, reason: str) -> None:
    with pytest.raises(ConsumerError, match=reason):
        captured_rows(PlayedLLM(**result), ["1"], sites=HOOKS)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="unknown method 'mean'"):
        contrast(PlayedLLM(), ["1"], ["2"], sites=HOOKS, method="mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one or more prompts"):
        contrast(PlayedLLM(), [], [], sites=HOOKS)
