"""What traces say of controllers, as gates of the reference whose strengths are given: a replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np

from tests.engine.gate_making import GateCase, names
from tests.engine.gate_reference import Gated, told
from tests.engine.gate_runs import FAMILY
from tests.engine.hf_reference import relative_error
from tests.engine.steering_cases import MAX_ERROR, logprobs_of
from tests.engine.tiny_models import tiny_model

KINDS = ("module", "vectors", "ops", "features")
STATIC = "(static)"


class Replay:
    """The coefficients that the actions of a trace give, row by row.

    Args:
        num_prompt: Tokens of the prompt.
        num_rows: Rows that were forwarded.
    """

    def __init__(self, num_prompt: int, num_rows: int) -> None:
        self._num_rows = num_rows
        self._num_prompt = num_prompt
        self._set: dict[tuple[str, ...], dict[str, float]] = {}
        """Coefficients by whose they are, and by content."""
        self.applied: dict[str, Any] = {}

    def act(self, note: Mapping[str, Any]) -> None:
        """Follow an action that was applied."""
        action, position, whose = note["action"], note["position"], note["controller"]
        assert note["outcome"] == "applied", note
        assert position >= self._num_prompt
        if "set_scale" in action:
            self._put((whose, "scale"), {STATIC: 1.0 - action["scale"]}, position)
            return
        steering = action.get("set_steering", action.get("set_global"))
        content = {kind: steering["scale"] for kind in KINDS if kind in steering}
        if action.get("compose") is False:
            content[STATIC] = 1.0
        self._put((whose, "all" if "set_global" in action else "one"), content, position)

    def _put(self, whose: tuple[str, ...], content: dict[str, float], position: int) -> None:
        self._set[whose] = content
        for name in {*self.applied, *content}:
            column = self.applied.setdefault(name, np.zeros(self._num_rows))
            column[position:] = sum(each.get(name, 0.0) for each in self._set.values())


def named_gates(case: GateCase) -> list[dict[str, Any]]:
    """Gates with the names that traces give them."""
    return [{"name": f"gate{at}", **gate} for at, gate in enumerate(case.gates)]


Known = dict[tuple[str, tuple[int, ...]], list[float]]
"""By case and the tokens up to a row of a prompt: what was applied of each gate there."""


def told_of_prompts(cases: Sequence[GateCase], outputs: Sequence[Any]) -> Known:
    """What traces tell of the rows of prompts: who finds those rows in the prefix cache is not told again."""
    found: Known = {}
    for case, output in zip(cases, outputs, strict=True):
        trace, prompt = output.outputs[0].steering_trace, output.prompt_token_ids
        if not trace["gates"]:
            continue  # it has no gates, or was ended before its first row
        columns = [trace["gates"][gate["name"]]["applied"] for gate in named_gates(case)]
        for position, *applied in zip(trace["positions"], *columns, strict=True):
            if position < len(prompt):
                found[case.name, tuple(prompt[: position + 1])] = [value or 0.0 for value in applied]
    return found


def replayed(
    case: GateCase, prompt: Sequence[int], sample: Any, contents: Mapping[str, Any], known: Known | None = None
) -> Gated:
    """A request for the reference, with its gates' strengths, and what controllers did, from its trace.

    Args:
        case: With its gates and static steering.
        prompt: Tokens.
        sample: The engine's, with its trace.
        contents: By kind: what the controllers turn on.
        known: Of rows that were read from the prefix cache, if any could be; of others nobody is told.
    """
    num_rows = len(prompt) + len(sample.token_ids) - 1
    trace = sample.steering_trace
    replay = Replay(len(prompt), num_rows)
    for note in trace["actions"]:
        if note["outcome"] == "applied" and "stop" not in note["action"]:
            replay.act(note)
    own = named_gates(case)
    gates, applied = [*own], {}
    cached = sorted(set(range(len(prompt))) - set(trace["positions"])) if known is not None and own else []
    for at, name in enumerate(gate["name"] for gate in own):
        column = np.zeros(num_rows)
        rows = [(known or {}).get((case.name, tuple(prompt[: position + 1]))) for position in cached]
        column[cached] = [0.0 if applied is None else applied[at] for applied in rows]
        column[trace["positions"]] = [value or 0.0 for value in trace["gates"][name]["applied"]]
        applied[name] = column.tolist()
    for kind, column in replay.applied.items():
        then = {"attenuate": 0.0} if kind == STATIC else contents[kind]
        gates.append({"name": f"driven {kind}", "when": "always", "then": then, "scope": "this_token"})
        applied[f"driven {kind}"] = column.tolist()
    return Gated(
        prompt=list(prompt), output=list(sample.token_ids), gates=gates, static=case.steering(), applied=applied
    )


def check_replays(requests: Sequence[Gated], samples: Sequence[Any], references: Executor) -> None:
    """Adding what traces say was added gives the logprobs that the engine gave."""
    found = references.submit(told, tiny_model(FAMILY), FAMILY, list(requests), names()).result()
    wrong = []
    for at, (request, sample, expected) in enumerate(zip(requests, samples, found, strict=True)):
        logits = expected.reference.logits[len(request.prompt) - 1 :].float().log_softmax(-1)
        error = relative_error(logprobs_of(sample.logprobs), logits)
        if not error <= MAX_ERROR:
            wrong.append(f"{at}: relative error {error:.2g}: {request.gates}, {sample.steering_trace['actions']}")
    assert not wrong, wrong
