"""Steering vectors from captured rows: at each site, the direction that separates two sets of prompts.

`mean_difference` and `pca` work on rows ``[n, hidden]`` per site, as captured; torch tensors are accepted as well. All
arithmetic is in float64, and the result is `PhaseVectors` (float32), to be passed as ``steering_vectors``, saved, or
scaled. A positive scale leads from the negative set to the positive one.

`contrast` and `captured_rows` start from prompts, which the engine that is to be steered captures. They go through
``SamplingParams.capture`` and a consumer that returns rows, such as `memory`, which must be configured:
``LLM(model, capture_consumers=["memory"], capture_sites={"post_mlp": [12]}, steering=True)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from headgate.capture.schema.batch import Float64Array
from headgate.capture.schema.errors import ConsumerError
from headgate.capture.schema.sites import Site
from headgate.steering.vectors.phase_vectors import PhaseVectors

RowsBySite = Mapping[Site, Any]
"""An array or tensor ``[n, hidden]`` for each site."""


def mean_difference(positive: RowsBySite, negative: RowsBySite, *, normalize: bool = False) -> PhaseVectors:
    """Return the mean of the positive rows minus the mean of the negative ones, per site.

    Args:
        positive: Rows of the prompts that show the wanted behaviour.
        negative: Rows of the other prompts; the numbers of rows may differ.
        normalize: Scale every vector to length 1. Otherwise its length is the distance of the two means, so that
            scale 1 moves the one mean onto the other.

    Raises:
        ValueError: If the sites or widths differ, a set is empty, a value is not finite, or the means are equal.
    """
    directions = {}
    for site, (plus, minus) in _both(positive, negative).items():
        difference = plus.mean(axis=0) - minus.mean(axis=0)
        directions[site] = _unit(difference, site) if normalize else difference
    return _vectors(directions)


def pca(
    positive: RowsBySite,
    negative: RowsBySite,
    *,
    method: Literal["center", "diff"] = "center",
    normalize: bool = True,
) -> PhaseVectors:
    """Return the first principal component of contrast pairs, per site; row i of both sets is one pair.

    The sign is chosen so that more pairs have their positive member further along than the other way round; if as
    many, so that the mean of the positive rows is.

    Args:
        positive: One member of each pair.
        negative: The other, in the same order.
        method: ``"center"`` takes the component of the rows minus the mean of their pair: the direction in which the
            members of a pair lie apart. ``"diff"`` takes that of the differences minus their mean: the direction in
            which these differences vary from pair to pair; it needs two pairs. Both are as repeng computes
            ``pca_center`` and ``pca_diff``.
        normalize: Scale every vector to length 1. Otherwise its length is the distance of the two means along it.

    Raises:
        ValueError: As `mean_difference`; also if the sets are not of one length, or all differences are alike.
    """
    if method not in ("center", "diff"):
        raise ValueError(f"unknown method {method!r}; expected 'center' or 'diff'")
    directions = {}
    for site, (plus, minus) in _both(positive, negative).items():
        if len(plus) != len(minus):
            raise ValueError(f"{site.name}: {len(plus)} positive and {len(minus)} negative rows are not pairs")
        differences = plus - minus
        centred = differences - differences.mean(axis=0) if method == "diff" else differences
        direction = _oriented(_first_component(centred, differences, site), differences)
        gap = float(differences.mean(axis=0) @ direction)
        directions[site] = direction if normalize else direction * abs(gap)
    return _vectors(directions)


def _vectors(directions: Mapping[Site, Float64Array]) -> PhaseVectors:
    zero = [site.name for site, direction in directions.items() if not direction.any()]
    vectors = None if zero else PhaseVectors.from_rows(directions)
    if vectors is None or len(vectors.sites) != len(directions):
        raise ValueError(f"the two sets do not differ at {', '.join(zero) or 'some site, in float32'}")
    return vectors


def _both(positive: RowsBySite, negative: RowsBySite) -> dict[Site, tuple[Float64Array, Float64Array]]:
    if not positive or set(positive) != set(negative):
        apart = sorted(site.name for site in set(positive) ^ set(negative))
        raise ValueError(f"expected both sets at the same sites, at least one; only one of them has {apart}")
    pairs = {}
    for site in positive:
        plus, minus = _rows(positive[site], site, "positive"), _rows(negative[site], site, "negative")
        if plus.shape[1] != minus.shape[1]:
            raise ValueError(f"{site.name}: rows of {plus.shape[1]} and {minus.shape[1]} values")
        pairs[site] = plus, minus
    return pairs


def _rows(rows: Any, site: Site, which: str) -> Float64Array:
    if hasattr(rows, "detach"):  # a torch tensor, perhaps in bfloat16, which numpy does not know
        rows = rows.detach().cpu().double().numpy()
    array = np.asarray(rows, np.float64)
    if array.ndim != 2 or not array.size:
        raise ValueError(f"{which} rows at {site.name}: expected [n, hidden], not empty; got the shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(
            f"{which} rows at {site.name}: row {int(np.argwhere(~np.isfinite(array))[0][0])} is not finite"
        )
    return array


def _unit(direction: Float64Array, site: Site) -> Float64Array:
    length = np.linalg.norm(direction)
    if length == 0:
        raise ValueError(f"the two sets do not differ at {site.name}")
    return direction / length


def _first_component(centred: Float64Array, differences: Float64Array, site: Site) -> Float64Array:
    """Return the first right singular vector of ``[n, hidden]``, by the smaller of its two Gram matrices."""
    scale = np.abs(differences).max()
    if np.abs(centred).max() <= 1e-12 * scale:
        raise ValueError(f"the rows have no principal component at {site.name}: their differences are all alike")
    rows = centred / np.abs(centred).max()
    if len(rows) <= rows.shape[1]:
        component = np.linalg.eigh(rows @ rows.T)[1][:, -1] @ rows
    else:
        component = np.linalg.eigh(rows.T @ rows)[1][:, -1]
    return _unit(component, site)


def _oriented(direction: Float64Array, differences: Float64Array) -> Float64Array:
    along = differences @ direction
    votes = int((along > 0).sum()) - int((along < 0).sum())
    if votes == 0:
        votes = int(np.sign(along.mean())) or int(np.sign(direction[np.abs(direction).argmax()]))
    return -direction if votes < 0 else direction


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
    """Return the direction from one set of prompts to another, at each site.

    ::

        happy = contrast(llm, ["I love it", ...], ["I hate it", ...], sites={"post_mlp": [12]})
        llm.generate(prompt, SamplingParams(steering_vectors=happy.scaled(2.0)))

    Args:
        llm: An `LLM` that captures into `consumer`. Global vectors that are set act on what is captured.
        positive: Prompts that show the wanted behaviour: as `LLM.generate` takes them, or chats (lists of messages).
        negative: Prompts that show the opposite; pairs with `positive` for the methods that begin with ``pca``.
        sites: ``{hook point: layers}``; the sites must be open for capture.
        positions: The rows of a prompt that count; each prompt's rows are averaged first.
        method: The way to separate the two sets; see `mean_difference` and `pca`.
        normalize: Scale every vector to length 1.
        consumer: Name of the consumer.

    Raises:
        ConsumerError: If a prompt's rows did not arrive.
        ValueError: If the sets cannot be separated; see `mean_difference` and `pca`.
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
    """Capture one row for each prompt, ``[len(prompts), hidden]`` for each site: the mean of its rows at `positions`.

    Args:
        llm: As for `contrast`.
        prompts: Texts, tokens, or chats.
        sites: ``{hook point: layers}``.
        positions: The rows of a prompt that count.
        consumer: Name of the consumer.

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
