"""Directions out of prompts: captured by the engine that is to be steered, and told apart.

This goes through ``SamplingParams.capture`` and a consumer that returns rows, such as `memory`, which must be
configured: ``LLM(model, capture_consumers=["memory"], capture_sites={"post_mlp": [12]}, steering=True)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from headgate.capture.errors import ConsumerError
from headgate.capture.sites import Site
from headgate.steering.directions import Float64Array, mean_difference, pca
from headgate.steering.vectors import PhaseVectors

Method = Literal["mean_difference", "pca_center", "pca_diff"]


def contrast(
    llm: Any,
    positive: Sequence[Any],
    negative: Sequence[Any],
    *,
    sites: Mapping[str, Any],
    positions: Any = "last_prompt",
    method: Method = "mean_difference",
    normalize: bool = False,
    consumer: str = "memory",
) -> PhaseVectors:
    """The direction from one set of prompts to another, at each site.

    ::

        happy = contrast(llm, ["I love it", ...], ["I hate it", ...], sites={"post_mlp": [12]})
        llm.generate(prompt, SamplingParams(steering_vectors=happy.scaled(2.0)))

    Args:
        llm: An `LLM` that captures into `consumer`. Global vectors that are set act on what is captured.
        positive: Prompts that show what is wanted: all that `LLM.generate` takes, or chats (lists of messages).
        negative: Prompts that show the opposite; pairs with `positive` for the methods that begin with ``pca``.
        sites: ``{hook point: layers}``, of those that can be captured.
        positions: Which rows of a prompt count; each prompt's rows are averaged first.
        method: How the two sets are told apart; see `headgate.steering.directions`.
        normalize: Scale every vector to length 1.
        consumer: What the consumer is called.

    Raises:
        ConsumerError: If a prompt's rows did not arrive.
        ValueError: If the sets cannot be told apart; see `mean_difference` and `pca`.
    """
    if method not in ("mean_difference", "pca_center", "pca_diff"):
        raise ValueError(f"unknown method {method!r}; expected 'mean_difference', 'pca_center' or 'pca_diff'")
    rows = captured_rows(llm, [*positive, *negative], sites=sites, positions=positions, consumer=consumer)
    plus = {site: array[: len(positive)] for site, array in rows.items()}
    minus = {site: array[len(positive) :] for site, array in rows.items()}
    if method == "mean_difference":
        return mean_difference(plus, minus, normalize=normalize)
    return pca(plus, minus, method="center" if method == "pca_center" else "diff", normalize=normalize)


def captured_rows(
    llm: Any,
    prompts: Sequence[Any],
    *,
    sites: Mapping[str, Any],
    positions: Any = "last_prompt",
    consumer: str = "memory",
) -> dict[Site, Float64Array]:
    """One row for each prompt, ``[len(prompts), hidden]`` for each site: the mean of its rows at `positions`.

    Args:
        llm: As for `contrast`.
        prompts: Texts, tokens, or chats.
        sites: ``{hook point: layers}``.
        positions: Which rows of a prompt.
        consumer: What the consumer is called.

    Raises:
        ConsumerError: If a prompt's rows did not arrive.
        ValueError: If there is no prompt.
    """
    from headgate.capture import SamplingParams  # which imports vLLM

    if not prompts:
        raise ValueError("expected one or more prompts, got none")
    params = SamplingParams(
        max_tokens=1, temperature=0.0, capture={consumer: {"hooks": dict(sites), "positions": positions}}
    )
    is_chat = all(isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping) for prompt in prompts)
    serve = llm.chat if is_chat else llm.generate
    means: dict[Site, list[Float64Array]] = {}
    for output in serve(list(prompts), params, use_tqdm=False):
        for site, rows in _rows_at_end(output, consumer).items():
            means.setdefault(site, []).append(rows.detach().cpu().double().numpy().mean(axis=0))
    return {site: np.stack(found) for site, found in means.items()}


def _rows_at_end(output: Any, consumer: str) -> Mapping[Site, Any]:
    result = output.capture_results[consumer]
    rows = getattr(result.payload, "rows", None)
    if result.status != "ok" or not rows:
        raise ConsumerError(
            f"consumer {consumer!r} returned no rows for request {output.request_id}: {result.status}, "
            f"{result.error or type(result.payload).__name__}; use one that does, such as memory"
        )
    return rows  # type: ignore[no-any-return]
