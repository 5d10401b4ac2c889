"""Names mean content, at the moment a request is taken."""

from __future__ import annotations

from dataclasses import replace
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.positions import parse_positions
from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.core.admission import Demand, Load
from headgate.steering.core.resolved import Resolved, check_positions
from headgate.steering.core.state import GlobalKeys, GlobalTiers, SteeringState
from headgate.steering.programs.program import Program
from headgate.steering.spec import ModuleRef, SteeringSpec
from headgate.steering.vectors.phase_vectors import PhaseVectors, Steerable
from headgate.steering.vectors.sums import sum_of
from tests.deadlines import patience
from tests.fakes.steering_tables import CONFIGS, HIDDEN, SITES, vectors

TIMEOUT_S = patience(60.0)
STEERABLE = Steerable(num_layers=2, hidden_size=HIDDEN, dtype="float32", sites=SITES, max_vectors=4)


def registered(state: SteeringState, name: str, prefill: PhaseVectors | None, decode: PhaseVectors | None) -> None:
    state.register(state.read_module(name, SteeringSpec(prefill=prefill, decode=decode)))


def naming(*refs: tuple[str, float], own: PhaseVectors | None = None) -> SteeringSpec:
    return SteeringSpec(prefill=own, decode=own, modules=tuple(ModuleRef(name, scale) for name, scale in refs))


def taken(state: SteeringState, spec: SteeringSpec) -> Resolved:
    """Return the resolved steering of a request that ends at once."""
    resolved = state.resolve("passing", spec, 10)
    state.release("passing")
    return resolved


@pytest.fixture
def state() -> SteeringState:
    """A state with three modules."""
    state = SteeringState("bfloat16")
    registered(state, "both", CONFIGS[0], CONFIGS[0])
    registered(state, "answers", None, CONFIGS[4])
    registered(state, "phases", CONFIGS[1], CONFIGS[2])
    return state


def test_a_module_alone_is_the_same_as_its_vectors_inline(state: SteeringState) -> None:
    named, inline = taken(state, naming(("both", 1.0))), taken(state, naming(own=CONFIGS[0]))

    assert (named.prefill, named.decode, named.demand) == (inline.prefill, inline.decode, inline.demand)
    assert named.prefill_parts == ((CONFIGS[0].key, 1.0),)
    assert inline.prefill_parts == ()


def test_named_and_inline_vectors_add_up_in_any_order(state: SteeringState) -> None:
    one = taken(state, naming(("both", 2.0), ("phases", -1.0), own=CONFIGS[5]))
    other = taken(state, naming(("phases", -1.0), ("both", 2.0), own=CONFIGS[5]))

    assert (one.prefill, one.decode) == (other.prefill, other.decode)
    assert one.prefill != one.decode
    library = {config.key: config for config in CONFIGS}
    for key, parts in ((one.prefill, one.prefill_parts), (other.decode, other.decode_parts)):
        added = sum_of([*((library[part], scale) for part, scale in parts), (CONFIGS[5], 1.0)])
        assert added is not None
        assert added.key == key
    assert one.demand == Demand(Load(one.prefill or b"", 3), Load(one.decode or b"", 5))


def test_a_module_of_one_phase_leaves_the_other_alone(state: SteeringState) -> None:
    resolved = taken(state, naming(("answers", 1.0)))

    assert (resolved.prefill, resolved.decode) == (None, CONFIGS[4].key)
    assert resolved.demand == Demand(None, Load(CONFIGS[4].key, 6))


def test_scale_zero_is_plain_but_the_name_must_exist(state: SteeringState) -> None:
    resolved = taken(state, naming(("both", 0.0)))

    assert (resolved.prefill, resolved.decode, resolved.demand) == (None, None, Demand())
    beside = taken(state, naming(("phases", 0.0), ("both", 2.0)))
    assert beside == taken(state, naming(("both", 2.0)))
    with pytest.raises(RequestError, match="unknown steering module 'nobody'; registered: answers, both, phases"):
        taken(state, naming(("nobody", 0.0)))


def test_a_name_registered_anew_steers_later_requests_only(state: SteeringState) -> None:
    earlier = state.resolve("r", naming(("both", 2.0)), 10)

    registered(state, "both", CONFIGS[6], CONFIGS[6])

    later = taken(state, naming(("both", 2.0)))
    assert later.prefill != earlier.prefill
    assert state.take_unused() == ()
    state.release("r")
    assert state.take_unused() == (CONFIGS[0].key,)
    assert state.take_unused() == ()


def test_the_same_content_registered_anew_has_the_same_keys(state: SteeringState) -> None:
    earlier = taken(state, naming(("both", 2.0)))

    registered(state, "both", vectors({0: 1.0}), vectors({0: 1.0}))

    assert taken(state, naming(("both", 2.0))) == earlier
    assert state.take_unused() == ()


def test_content_is_dropped_once_neither_a_name_nor_a_request_refers_to_it(state: SteeringState) -> None:
    registered(state, "alias", CONFIGS[1], CONFIGS[1])
    state.resolve("r", naming(("alias", 1.0)), 10)

    state.unregister("phases")
    assert state.take_unused() == (CONFIGS[2].key,)
    state.unregister("alias")
    assert state.take_unused() == ()
    state.release("r")
    state.release("never held")
    assert state.take_unused() == (CONFIGS[1].key,)


def test_an_unregistered_name_is_unknown(state: SteeringState) -> None:
    state.unregister("both")

    assert [module.name for module in state.modules()] == ["answers", "phases"]
    with pytest.raises(RequestError, match="unknown steering module 'both'"):
        taken(state, naming(("both", 1.0)))
    with pytest.raises(RequestError, match="name: unknown steering module 'both'"):
        state.unregister("both")


def test_a_module_holds_vectors_and_no_names(state: SteeringState) -> None:
    with pytest.raises(RequestError, match="refers to other modules"):
        state.read_module("a", naming(("both", 1.0)))
    with pytest.raises(RequestError, match="no vector other than zero"):
        state.read_module("a", SteeringSpec())


def test_modules_are_described_by_hashes_and_sites(state: SteeringState) -> None:
    described = state.modules()[2].described()

    assert described == {
        "name": "phases",
        "version": 3,
        "hash": {"prefill": CONFIGS[1].key.hex(), "decode": CONFIGS[2].key.hex()},
        "sites": {"prefill": ["0.pre_attn", "1.pre_attn"], "decode": ["0.post_attn", "0.post_mlp", "1.pre_attn"]},
        "norms": {phase: norms_of(CONFIGS[number]) for phase, number in (("prefill", 1), ("decode", 2))},
    }


def norms_of(vectors: PhaseVectors) -> dict[str, Any]:
    norms = np.sqrt((vectors.float32().astype(np.float64) ** 2).sum(axis=1))
    return {site.name: pytest.approx(norm) for site, norm in zip(vectors.sites, norms, strict=True)}


def test_global_tiers_add_up_phase_by_phase() -> None:
    state = SteeringState("bfloat16")

    state.set_global(GlobalTiers(base=CONFIGS[0], decode=CONFIGS[1]))

    assert state.shared.prefill is CONFIGS[0]
    assert state.shared.decode is not None
    assert state.shared.decode.sites == CONFIGS[1].sites
    assert (state.shared.decode.float32()[0] == CONFIGS[0].float32()[0] + CONFIGS[1].float32()[0]).all()


def test_without_replace_the_sites_given_change_and_with_it_only_they_are_left() -> None:
    tiers = GlobalTiers(base=vectors({0: 1.0, 1: 2.0}), decode=CONFIGS[4])
    update = GlobalTiers(base=vectors({1: 7.0}))

    merged, replaced = (tiers.updated(update, {}, replace=replace) for replace in (False, True))

    assert merged.base is not None
    assert merged.base.key == vectors({0: 1.0, 1: 7.0}).key
    assert merged.decode is CONFIGS[4]
    assert replaced == update


def test_sites_that_are_taken_back_are_gone_from_their_tier_alone() -> None:
    tiers = GlobalTiers(base=vectors({0: 1.0, 1: 2.0}), decode=vectors({0: 3.0}))
    first, other = Site(0, HookPoint.PRE_ATTN), Site(1, HookPoint.PRE_ATTN)

    partly = tiers.updated(GlobalTiers(prefill=vectors({0: 5.0})), {"base": [first, other]}, replace=False)
    wholly = partly.updated(GlobalTiers(), {"decode": [first]}, replace=False)

    assert partly == GlobalTiers(base=vectors({1: 2.0}), prefill=vectors({0: 5.0}), decode=vectors({0: 3.0}))
    assert wholly.decode is None


def test_a_decode_only_change_keeps_the_key_of_the_prefill_phase() -> None:
    state = SteeringState("bfloat16")
    state.set_global(GlobalTiers(base=CONFIGS[0]))
    before = state.shared

    state.set_global(state.tiers.updated(GlobalTiers(decode=CONFIGS[1]), {}, replace=False))

    assert before.prefill is not None
    assert state.shared.prefill is not None
    assert state.shared.decode is not None
    assert state.shared.decode != before.decode
    assert state.global_keys == GlobalKeys(2, before.prefill.key, state.shared.decode.key)


def test_versions_tell_global_changes_from_changes_of_modules(state: SteeringState) -> None:
    assert (state.version, state.global_keys.version) == (3, 0)
    state.set_global(GlobalTiers(base=CONFIGS[0]))
    state.unregister("both")
    assert (state.version, state.global_keys.version) == (5, 4)
    state.set_global(GlobalTiers())
    assert state.global_status() == {
        "version": 6,
        "tiers": {},
        "hash": {"prefill": None, "decode": None},
        "sites": {"prefill": [], "decode": []},
        "norms": {"prefill": {}, "decode": {}},
    }


@pytest.mark.parametrize("scale", [1e30, -1e30, 1e39, np.inf, np.nan])
def test_sums_that_might_not_be_finite_in_the_models_dtype_are_refused(scale: float) -> None:
    state = SteeringState("float16")
    registered(state, "both", CONFIGS[5], CONFIGS[5])

    with pytest.raises(RequestError, match="use smaller vectors or scales") as error:
        state.resolve("r", naming(("both", scale)), 10, "steering_module_ref")

    assert error.value.field == "steering_module_ref"


def test_vectors_that_leave_no_room_for_a_sum_are_refused_in_modules_and_global_vectors() -> None:
    large = PhaseVectors.from_rows({SITES[0]: np.full(HIDDEN, 40000.0)})
    state = SteeringState("float16")

    with pytest.raises(RequestError, match=r"below 3\.276e\+04"):
        state.read_module("large", SteeringSpec(prefill=large))
    with pytest.raises(RequestError, match="global: the vectors"):
        state.set_global(GlobalTiers(base=large))
    assert (state.tiers, state.version) == (GlobalTiers(), 0)
    registered(SteeringState("bfloat16"), "large", large, None)


def test_a_refused_request_refers_to_nothing(state: SteeringState) -> None:
    with pytest.raises(RequestError):
        state.resolve("r", naming(("both", 1.0), ("nobody", 1.0)), 10)

    state.unregister("both")

    assert state.take_unused() == (CONFIGS[0].key,)


def test_names_may_change_while_requests_are_taken_in(state: SteeringState) -> None:
    """Whatever a request was resolved to is there until it is let go, however the threads interleave."""
    contents = {config.key for config in CONFIGS[:2]}

    def change() -> None:
        for round_ in range(2000):
            registered(state, "both", CONFIGS[round_ % 2], CONFIGS[round_ % 2])

    thread = Thread(target=change)
    thread.start()
    for number in range(2000):
        resolved = state.resolve(f"r{number}", naming(("both", 1.0)), 10)
        assert resolved.prefill in contents
        assert resolved.prefill not in state.take_unused()
        state.release(f"r{number}")
    thread.join(TIMEOUT_S)

    assert not thread.is_alive()
    state.unregister("both")
    state.unregister("phases")
    assert set(state.take_unused()) >= {CONFIGS[1].key, CONFIGS[2].key}
    assert not state._registry._users.keys() & contents


@pytest.mark.parametrize("given", ["all_prompt", "last_prompt", "all_generated", [0, 3], {"start": 4}, [-1]], ids=repr)
def test_with_drafts_operations_act_on_the_prompt_or_on_the_whole_answer(given: Any) -> None:
    program = cast("Program", SimpleNamespace(groups=(parse_positions(given, "positions"),)))

    check_positions((program, None), 5, replace(STEERABLE, knows_positions=False))


@pytest.mark.parametrize("given", [[0, 5], {"start": 6}, {"start": 0, "stop": 6}, {"start": 4, "step": 2}], ids=repr)
def test_with_drafts_operations_cannot_be_limited_to_some_positions_of_the_answer(given: Any) -> None:
    program = cast("Program", SimpleNamespace(groups=(parse_positions(given, "positions"),)))
    check_positions((None, program), 5, STEERABLE)

    with pytest.raises(RequestError, match=r"^steering_ops.positions: name some positions of the answer, from 5 on"):
        check_positions((None, program), 5, replace(STEERABLE, knows_positions=False))
