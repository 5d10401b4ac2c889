"""A sweep over a model that is played by a function: its cells, its metrics, what it refuses, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headgate.capture.schema.errors import OverloadedError, RequestError
from headgate.capture.schema.sites import Columns, HookPoint, Site
from headgate.steering.control.sweep_routes import (
    MAX_CELLS,
    MAX_IN_FLIGHT,
    Sweep,
    Value,
    align,
    measure,
    read_cells,
    read_sweep,
    run,
)
from headgate.steering.documents.operations import read_ops
from headgate.steering.vectors.phase_vectors import Steerable

HIDDEN = 4
SITES = tuple(Site(layer, HookPoint.POST_MLP) for layer in range(3))
STEERABLE = Steerable(
    num_layers=3, hidden_size=HIDDEN, dtype="float32", sites=SITES, max_vectors=64, op_sites=SITES[:2]
)
CLEAN, CORRUPT = [9, 1, 2, 3], [9, 1, 7, 3]
ANSWER, FOIL = 5, 6
BODY: dict[str, Any] = {
    "prompt": CORRUPT,
    "source": "clean",
    "at": {"hook": "post_mlp", "layers": [0, 1]},
    "answer": ANSWER,
}


class Words:
    """A vocabulary of words by their length."""

    size, has_texts, max_text = 10, True, 1000

    def encode(self, text: str, *, is_prompt: bool) -> list[int]:
        return [*([9] if is_prompt else []), *(len(word) for word in text.split())]

    def shown(self, token: int) -> str:
        return "x" * token


class Kept:
    """The clean run; each row says where it is from."""

    def __init__(self, prompt: Sequence[int] = CLEAN) -> None:
        self.prompt_token_ids = np.array(prompt)
        self.columns: dict[Site, Columns] = {}

    def find(self, name: str, sample: int, field: str) -> Kept:
        if (name, sample) != ("clean", 0):
            raise RequestError(f"{field}.request", "nothing is kept")
        return self

    def row(self, site: Site, position: int, field: str) -> Tensor:
        if site.layer > 1:
            raise RequestError(f"{field}.site", "was not captured")
        return torch.tensor([float(site.layer + 1), float(position), 1.0, 2.0])


def read(kept: Kept | None = None, **changes: Any) -> Sweep:
    body = {name: value for name, value in {**BODY, **changes}.items() if value is not None}
    return read_sweep(body, STEERABLE, (kept or Kept()).find, Words())


class Model:
    """Scores the clean prompt with -1, the corrupted one with -5; a patch adds a tenth of its row's first values."""

    def __init__(self) -> None:
        self.running = self.most = self.asked = 0
        self.fail_at: int | None = None

    async def score(self, prompt: Sequence[int], tokens: Sequence[int], fields: Mapping[str, Any]) -> Sequence[float]:
        self.asked += 1
        number = self.asked
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for _ in range(3):
                await asyncio.sleep(0)
            if self.fail_at == number:
                raise OverloadedError("too many")
            value = -1.0 if list(prompt) == CLEAN else -5.0
            if fields:
                (operation,) = fields["prefill_steering_ops"]
                value += float(operation["vector"][0] * 10 + operation["vector"][1]) / 10
            return [value, -2.0][: len(tokens)]
        finally:
            self.running -= 1


async def results(sweep: Sweep, model: Model, num: int | None = None) -> list[Value]:
    baselines = await measure(sweep, model.score)
    found = []
    async with aclosing(run(sweep, read_cells(sweep), baselines, model.score)) as values:
        async for value in values:
            found.append(value)
            if len(found) == num:
                break
    return found


@pytest.mark.parametrize(
    ("metric", "foil", "value"),
    [
        ("logprob", None, lambda raw: raw),
        ("logit_diff", FOIL, lambda raw: raw + 2),
        ("recovered", None, lambda raw: (raw + 5) / 4),
        ("recovered", FOIL, lambda raw: (raw + 5) / 4),
    ],
)
def test_every_cell_is_the_metric_of_the_prompt_with_that_row(metric: str, foil: int | None, value: Any) -> None:
    sweep, model = read(metric=metric, foil=foil), Model()

    found = asyncio.run(results(sweep, model))

    expected = {
        (site.name, position): value(-5.0 + (site.layer + 1) + position / 10)
        for site in SITES[:2]
        for position in range(4)
    }
    assert {(cell.site.name, cell.position): got for cell, got in found} == pytest.approx(expected)
    assert model.asked == len(expected) + 2


def test_a_cells_request_replaces_one_row_of_the_prompt() -> None:
    sweep = read(alpha=0.5, positions=[2])

    ops = read_ops(sweep.fields(read_cells(sweep)[1]), STEERABLE, SITES, 8)

    assert ops is not None
    assert ops.decode is None
    given = {"at": "1.post_mlp", "method": "replace", "vector": [2.0, 2.0, 1.0, 2.0], "alpha": 0.5, "positions": [2]}
    same = read_ops({"prefill_steering_ops": [given]}, STEERABLE, SITES, 8)
    assert same is not None
    assert ops.prefill.key == same.prefill.key  # type: ignore[union-attr]


def test_texts_are_encoded_as_prompts_and_tokens() -> None:
    sweep = read(prompt="a sevenxx ccc", answer="fives", positions=[-1])

    assert (sweep.prompt, sweep.scored) == ((9, 1, 7, 3), (5,))
    assert dict(sweep.positions) == {3: 3}


@pytest.mark.parametrize(
    ("clean", "corrupt", "expected"),
    [
        ([1, 2, 3], [1, 5, 3], {0: 0, 1: 1, 2: 2}),
        ([1, 2, 2, 3], [1, 5, 3], {0: 0, 2: 3}),
        ([1, 3], [1, 5, 6, 3], {0: 0, 3: 1}),
        ([1, 1, 1], [1, 1], {0: 0, 1: 1}),
        ([1, 1], [1, 1, 1], {0: 0, 1: 1}),
        ([4], [5, 6], {}),
    ],
)
def test_prompts_of_other_lengths_are_aligned_at_both_ends(
    clean: list[int], corrupt: list[int], expected: dict[int, int]
) -> None:
    assert align(clean, corrupt) == expected


def test_positions_without_a_partner_are_skipped_and_told() -> None:
    sweep = read(Kept([9, 1, 2, 2, 3]), positions=[0, 2, 3])

    assert (dict(sweep.positions), sweep.skipped) == ({0: 0, 3: 4}, (2,))
    assert [cell.row[1] for cell in read_cells(sweep)] == [0, 0, 4, 4]


@pytest.mark.parametrize(
    ("changes", "field", "told"),
    [
        ({"stream": True}, "stream", "no field of this route"),
        ({"prompt": None}, "prompt", "expected a text"),
        ({"prompt": []}, "prompt", "expected a text"),
        ({"prompt": [1, 10]}, "prompt", "expected a text"),
        ({"source": None}, "source.request", "expected the name"),
        ({"source": "other"}, "source.request", "nothing is kept"),
        ({"source": {"request": "clean", "sample": 1}}, "source.request", "nothing is kept"),
        ({"at": None}, "at", "is missing"),
        ({"at": "2.post_mlp"}, "at", "takes no operations"),
        ({"at": "9.post_mlp"}, "at", "takes no operations"),
        ({"positions": [4]}, "positions", "it has 4"),
        ({"positions": "all"}, "positions", "it has 4"),
        ({"positions": "all_generated"}, "positions", "it has 4"),
        ({"positions": [-5]}, "positions", "lies before the prompt"),
        ({"positions": {"role": "user"}}, "positions", "needs a chat"),
        ({"metric": "kl"}, "metric", "expected one of"),
        ({"metric": ["logprob"]}, "metric", "expected one of"),
        ({"answer": None}, "answer", "is missing"),
        ({"answer": "two words"}, "answer", "is 2 tokens"),
        ({"answer": ""}, "answer", "is 0 tokens"),
        ({"answer": 10}, "answer", "below 10"),
        ({"answer": True}, "answer", "expected a token"),
        ({"foil": 3}, "foil", "logprob is that of the answer alone"),
        ({"metric": "logit_diff"}, "foil", "is missing"),
        ({"metric": "logit_diff", "foil": ANSWER}, "foil", "the answer's own"),
        ({"alpha": 0}, "alpha", "above 0"),
        ({"alpha": 1.5}, "alpha", "above 0"),
        ({"prompt": [8, 8, 8]}, "positions", "none of them has a partner"),
    ],
)
def test_wrong_bodies_are_refused_by_their_field(changes: dict[str, Any], field: str, told: str) -> None:
    with pytest.raises(RequestError, match=told) as refusal:
        read(**changes)

    assert refusal.value.field == field


def test_sites_that_were_not_captured_are_refused_before_anything_runs() -> None:
    everywhere = Steerable(
        num_layers=3, hidden_size=HIDDEN, dtype="float32", sites=SITES, max_vectors=64, op_sites=SITES
    )

    with pytest.raises(RequestError, match="was not captured") as refusal:
        read_cells(read_sweep({**BODY, "at": "2.post_mlp"}, everywhere, Kept().find, Words()))

    assert refusal.value.field == "source.site"


def test_a_clean_run_that_kept_columns_alone_is_refused() -> None:
    kept = Kept()
    kept.columns = {SITES[0]: ((0, 2),)}

    with pytest.raises(RequestError, match=r"source: keeps some columns of 0.post_mlp alone"):
        read(kept)


def test_a_sweep_has_no_more_cells_than_the_limit() -> None:
    prompt = [1] * (MAX_CELLS // 2)
    assert len(read_cells(read(Kept(prompt), prompt=prompt))) == MAX_CELLS

    with pytest.raises(RequestError, match=f"more than {MAX_CELLS} cells") as refusal:
        read(Kept([*prompt, 1]), prompt=[*prompt, 1])

    assert refusal.value.field == "positions"


def test_prompts_that_score_alike_have_nothing_to_recover() -> None:
    with pytest.raises(RequestError, match="score alike") as refusal:
        asyncio.run(measure(read(metric="recovered", prompt=CLEAN), Model().score))

    assert refusal.value.field == "metric"


def test_few_run_at_a_time_and_none_when_the_client_is_gone() -> None:
    prompt = [1] * 100
    sweep, model = read(Kept(prompt), prompt=prompt), Model()

    found = asyncio.run(results(sweep, model, num=40))

    assert len(found) == 40
    assert model.most == MAX_IN_FLIGHT
    assert model.running == 0
    assert model.asked <= 2 + 40 + MAX_IN_FLIGHT


def test_what_a_cell_raises_ends_the_sweep() -> None:
    sweep, model = read(), Model()
    model.fail_at = 6

    with pytest.raises(OverloadedError, match="too many"):
        asyncio.run(results(sweep, model))

    assert model.running == 0
