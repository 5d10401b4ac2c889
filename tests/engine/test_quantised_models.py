"""The judgement of `test_quantised_gpu`: rounding passes, rows of another position, layer or request do not."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headgate.capture.schema.sites import HookPoint, Site
from tests.engine.hf_reference import Reference, Steering
from tests.engine.quantised_models import HIDDEN, LAYERS, VOCABULARY, cosines, further, quantised_rows, write

HOOKS = (HookPoint.PRE_ATTN, HookPoint.Q, HookPoint.V, HookPoint.ATTN_OUT, HookPoint.MLP_ACT, HookPoint.MLP_OUT)
SITES = [Site(layer, hook) for layer in range(LAYERS) for hook in HOOKS]
DRAW = random.Random(2)
PROMPT = [DRAW.randrange(3, VOCABULARY) for _ in range(48)]


def rows_of(reference: Reference) -> dict[Site, Tensor]:
    return {site: reference.rows[site] for site in SITES}


def with_one_wrong(rows: Mapping[Site, Tensor], site: Site, row: Tensor) -> dict[Site, Tensor]:
    changed = rows[site].clone()
    changed[20] = row
    return {**rows, site: changed}


@pytest.mark.parametrize("method", ["fp8_block", "kv_fp8"])
def test_rows_that_rounding_moves_pass_and_one_wrong_row_does_not(method: str, tmp_path: Path) -> None:
    _, plain = write(method, tmp_path)
    added = {Site(0, HookPoint.POST_MLP): torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1)) / 2}
    requests = [(PROMPT, [5], Steering()), (PROMPT, [5], Steering(prefill=added, decode=added))]
    expected, steered = quantised_rows(plain, method, requests)
    (rounded,) = quantised_rows(plain, method, requests[:1], is_rounded=True)
    own, exact = rows_of(rounded), rows_of(expected)
    usual = cosines([("captured", own)], [expected])

    def judged(rows: Mapping[Site, Tensor]) -> dict[tuple[str, str], str]:
        return further(cosines([("captured", rows)], [expected]), usual)

    assert judged(exact) == judged(own) == {}
    for site in SITES:
        reason = judged(with_one_wrong(own, site, exact[site][19]))
        assert list(reason) == [("captured", site.hook.value)], f"{site.name}: the row before"
        other = Site((site.layer + 1) % LAYERS, site.hook)
        assert judged(with_one_wrong(own, site, exact[other][20])), f"{site.name}: the row of {other.name}"
        if site.layer:
            assert judged({**own, site: steered.rows[site]}), f"{site.name}: rows of a request that is steered"
