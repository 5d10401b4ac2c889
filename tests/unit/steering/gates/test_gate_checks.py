"""The sites that a gate may read and write."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import FINAL_NORM_SITE, Site
from headgate.steering.gates.gate import Always, Gate, Then, check_reads, check_this_token, is_reached
from headgate.steering.programs.codes import GateScope

GATE = Gate(name="g", when=Always(), then=Then(observes=True), where="steering_gates[2]")


def sites(*names: str) -> list[Site]:
    return [Site.parse(name) for name in names]


@pytest.mark.parametrize(
    ("read", "write", "expected"),
    [
        ("1.post_mlp", "1.post_mlp", True),
        ("1.post_mlp", "2.pre_attn", True),
        ("1.post_mlp", "1.post_attn", False),
        ("1.post_mlp", "0.post_mlp", False),
        ("1.attn_out", "1.post_attn", True),
        ("1.attn_in", "1.attn_out", True),
        ("1.mlp_in", "1.mlp_out", True),
        ("1.attn_out", "1.mlp_in", False),
        ("1.hook_z", "1.mlp_out", False),
        ("1.attn_out", "2.mlp_in", True),
        ("1.attn_in", "1.mixer_in", True),
        ("1.mixer_in", "1.mixer_out", True),
        ("1.mixer_out", "1.attn_out", True),
        ("1.mixer_out", "1.mlp_in", False),
        ("1.q", "1.mixer_in", False),
        ("1.mixer_in", "1.hook_z", False),
        ("1.mlp_out", "1.attn_out", False),
        ("1.post_mlp", "final_norm", True),
        ("final_norm", "3.post_mlp", False),
        ("final_norm", "final_norm", True),
    ],
)
def test_a_site_is_reached_from_those_before(read: str, write: str, *, expected: bool) -> None:
    assert is_reached(*sites(write, read)) is expected


def test_this_token_writes_behind_all_that_it_reads() -> None:
    check_this_token(GATE, sites("0.post_mlp", "1.attn_out"), [*sites("1.post_attn"), FINAL_NORM_SITE])
    check_this_token(GATE, [], sites("0.pre_attn"))
    check_this_token(GATE, sites("1.post_mlp"), [])
    with pytest.raises(RequestError, match=r"reads at 2\.pre_attn and writes at 1\.post_mlp") as refused:
        check_this_token(GATE, sites("2.pre_attn", "0.post_mlp"), sites("1.post_mlp", "3.post_mlp"))

    assert refused.value.field == "steering_gates[2].scope"


@pytest.mark.parametrize("scope", [GateScope.NEXT, GateScope.REST])
def test_other_scopes_write_anywhere(scope: GateScope) -> None:
    check_this_token(replace(GATE, scope=scope), sites("2.pre_attn"), sites("1.post_mlp"))


@pytest.mark.parametrize("scope", GateScope)
def test_scores_come_in_one_order(scope: GateScope) -> None:
    gate = replace(GATE, scope=scope)

    check_reads(gate, sites("1.attn_out", "2.mlp_in", "2.post_attn"))
    check_reads(gate, sites("1.mlp_in", "1.mlp_out", "1.post_mlp"))
    with pytest.raises(RequestError, match=r"1\.k and at 1\.mixer_out"):
        check_reads(gate, sites("1.mixer_out", "1.k"))
    with pytest.raises(RequestError, match=r"1\.attn_out and at 1\.mlp_in") as refused:
        check_reads(gate, sites("1.mlp_in", "1.attn_out"))

    assert refused.value.field == "steering_gates[2].when"
