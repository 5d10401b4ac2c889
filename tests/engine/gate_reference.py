"""Gates of a request by Hugging Face's own code and forward hooks, one row per forward: the definition for engines.

Written from the specification of gates alone; nothing of ``headgate.steering.gates`` or of its worker is asked. A
request is told as its client wrote it. Each token is one forward on top of the KV cache of those before it, so "the row
before", "sites after the probe's" and "the same forward" mean here what they say.

In doubt, this holds: operations of gates act behind the request's static ones, in the order of the gates; a gate with
a condition that is pooled over the prompt has the strength 0 before its last row; a gate that has
not latched yet shows the strength of its condition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headgate.capture.schema.sites import Site
from tests.engine.gate_semantics import GateState, Names, Row
from tests.engine.hf_reference import HFReference, Reference, Steering
from tests.fakes.programs import apply


@dataclass(frozen=True, kw_only=True)
class Gated:
    """A request that an engine has answered.

    Attributes:
        prompt: Tokens.
        output: Generated tokens.
        gates: As ``steering_gates``.
        static: What it steers with beside them.
        applied: Strengths by gate and row that are written in place of those that the conditions give: a replay.
    """

    prompt: Sequence[int]
    output: Sequence[int]
    gates: Sequence[Mapping[str, Any]]
    static: Steering = field(default_factory=Steering)
    applied: Mapping[str, Sequence[float]] | None = None


@dataclass
class Told:
    """What the reference found.

    Attributes:
        reference: Rows and logits.
        scores: By name in the trace.
        strength: By gate.
        applied: By gate.
        margins: By row: how far the score nearest to a threshold was from it, relative to its size.
    """

    reference: Reference
    scores: dict[str, list[float]]
    strength: dict[str, list[float]]
    applied: dict[str, list[float]]
    margins: list[float]


class _Pass:
    """The rows of one request, one after the other: takes the hooks' rows, and says what is added."""

    def __init__(self, request: Gated, names: Names, order: Sequence[Site]) -> None:
        self._request = request
        self._num_prompt = len(request.prompt)
        self._order = order
        self.gates = [GateState(document, index, names, order) for index, document in enumerate(request.gates)]
        self.position = -1
        self.rows: dict[Site, list[Tensor]] = {}
        self.scores: dict[str, list[float]] = {name: [] for gate in self.gates for name, _ in gate.scores()}
        self.strength: dict[str, list[float]] = {gate.name: [] for gate in self.gates}
        self.applied: dict[str, list[float]] = {gate.name: [] for gate in self.gates}
        self.margins: list[float] = []
        self._written: dict[str, list[float]] = {}
        static = request.static
        self._touched = {
            *static.prefill,
            *static.decode,
            *(site for _, site, _ in static.operations),
            *(leaf.site for gate in self.gates for leaf in gate.leaves),
            *(site for gate in self.gates for site, _ in (*gate.effect.prefill, *gate.effect.decode)),
        }
        """Sites that are read or written."""

    @property
    def is_prompt(self) -> bool:
        return self.position < self._num_prompt

    def begin(self) -> None:
        """Begin the next row."""
        self.position += 1
        self._written = {}
        for gate in self.gates:
            gate.next_row()
            if gate.decided_at < 0:
                gate.decide(self.position, self._num_prompt)

    def end(self) -> None:
        """Note what the row's trace has."""
        for gate in self.gates:
            self.strength[gate.name].append(gate.shown)
            self.applied[gate.name].append(max(self._written.get(gate.name, [0.0])))
        margins = [leaf.margin() for gate in self.gates for leaf in gate.leaves]
        self.margins.append(min(margins, default=math.inf))

    def visit(self, site: Site, value: Tensor) -> Tensor | None:
        """Take the pristine row of a site; return by how much it moves, or None."""
        self.rows.setdefault(site, []).append(value.detach().reshape(-1).clone())
        if site not in self._touched:
            return None
        row = value.detach().reshape(-1).double().numpy()
        index = self._order.index(site)
        for gate in self.gates:
            for name, leaf in gate.scores():
                if leaf.site == site:
                    score = leaf.read(row, self.position, self._num_prompt)
                    if len(self.scores[name]) == self.position:
                        self.scores[name].append(score)
            if gate.decided_at == index:
                gate.decide(self.position, self._num_prompt)
        moved = self._moved(site, index, row)
        return None if moved is row else torch.from_numpy(moved - row).to(value.dtype).view_as(value)

    def _moved(self, site: Site, index: int, row: Row) -> Row:
        static = self._request.static
        vectors = (static.prefill if self.is_prompt else static.decode).get(site)
        own = [
            document
            for phase, at, document in static.operations
            if at == site
            and phase in ("both", "prefill" if self.is_prompt else "decode")
            and self.position in document.get("positions", (self.position,))
        ]
        factor = self._factor(index) if own or vectors is not None else 1.0
        gated = [
            (strength, document)
            for gate in self.gates
            for at, document in gate.effect.at(self.is_prompt)
            if at == site
            for strength in [self._strength(gate, index)]
        ]
        moved = row
        for document in own:
            moved = _partly(document, moved, factor) if document["method"] == "replace" else moved
        if vectors is not None:
            moved = moved + factor * vectors.double().numpy()
        kinds = ("replace", "features")
        acting = [(factor, document) for document in own if document["method"] not in kinds]
        acting += [(strength, document) for strength, document in gated if document["method"] != "features"]
        for strength, document in acting:
            moved = _partly(document, moved, strength)
        features = [(factor, one) for one in own if one["method"] == "features"]
        features += [(strength, one) for strength, one in gated if one["method"] == "features"]
        return moved + sum(_partly(one, moved, strength) - moved for strength, one in features) if features else moved

    def _factor(self, index: int) -> float:
        """The factor of static steering at a site."""
        factor = 1.0
        for gate in self.gates:
            if isinstance(gate.then, Mapping) and "attenuate" in gate.then:
                factor *= 1 + self._strength(gate, index) * (gate.then["attenuate"] - 1)
        return factor

    def _strength(self, gate: GateState, index: int) -> float:
        """The strength of a gate at a site that it writes."""
        is_early = index < gate.decided_at
        if is_early and self.is_prompt:
            return 0.0
        strength = gate.strength_at(is_early=is_early, is_prompt=self.is_prompt)
        self._written.setdefault(gate.name, []).append(strength)
        return strength if self._request.applied is None else self._replayed(gate, is_early=is_early)

    def _replayed(self, gate: GateState, *, is_early: bool) -> float:
        """The strength at a site by the trace: where a latch engages, earlier sites have been passed already."""
        assert self._request.applied is not None
        applied, index = self._request.applied[gate.name], self.position
        sites = [site for site, _ in gate.effect.at(self.is_prompt)]
        if isinstance(gate.then, Mapping) and "attenuate" in gate.then:
            sites = self._static_sites(self.is_prompt)
        is_late_too = any(self._order.index(site) >= gate.decided_at for site in sites)
        return applied[index - 1 if is_early and is_late_too and gate.scope == "rest_of_request" else index]

    def _static_sites(self, is_prompt: bool) -> list[Site]:
        static = self._request.static
        phases = ("both", "prefill" if is_prompt else "decode")
        vectors = static.prefill if is_prompt else static.decode
        return [*vectors, *(site for phase, site, _ in static.operations if phase in phases)]


def _partly(document: Mapping[str, Any], row: Row, strength: float) -> Row:
    """An operation with a strength: that part of what it changes."""
    return row + strength * (apply(document, row) - row) if strength else row


class _RowTaps:
    """Hooks that hand each row to the pass that runs; for `HFReference`."""

    def __init__(self, visit: Callable[[Site, Tensor], Tensor | None]) -> None:
        self._visit = visit

    def at_input(self, stack: ExitStack, module: nn.Module, site: Site, *, is_stream: bool = False) -> None:
        """See `tests.engine.hf_reference`."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            value = args[0] if args else kwargs["hidden_states"]
            moved = self._visit(site, value)
            if moved is None:
                return None
            if is_stream:  # the layer keeps the tensor itself, and adds the MLP's branch to it
                value.add_(moved)
                return None
            return ((value + moved, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": value + moved})

        stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def at_output(self, stack: ExitStack, module: nn.Module, site: Site, scale: float = 1.0) -> None:
        """See `tests.engine.hf_reference`."""
        assert scale == 1.0, "families with a multiplier of branches are not told here"

        def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
            value = output[0] if isinstance(output, tuple) else output
            moved = self._visit(site, value)
            if moved is None:
                return None
            return (value + moved, *output[1:]) if isinstance(output, tuple) else value + moved

        stack.callback(module.register_forward_hook(hook).remove)


class GateReference(HFReference):
    """Hugging Face's model of a folder, row by row."""

    def __init__(self, folder: Path, family: str) -> None:
        super().__init__(folder, family)
        order: list[Site] = []
        self._forwards([1], lambda site, _: order.append(site))
        self.order = order
        """Sites in the order in which a forward comes to them."""

    def tell(self, request: Gated, names: Names) -> Told:
        """Run a request, with the tokens that were generated; the last one is never forwarded."""
        found = _Pass(request, names, self.order)
        tokens = [*request.prompt, *request.output[:-1]]
        logits = self._forwards(tokens, found.visit, found.begin, found.end)
        rows = {site: torch.stack(each) for site, each in found.rows.items()}
        return Told(Reference(rows, logits), found.scores, found.strength, found.applied, found.margins)

    @torch.no_grad()
    def _forwards(
        self,
        tokens: Sequence[int],
        visit: Callable[[Site, Tensor], Any],
        begin: Callable[[], None] = lambda: None,
        end: Callable[[], None] = lambda: None,
    ) -> Tensor:
        from transformers import DynamicCache

        cache, logits = DynamicCache(), []
        with self._hooked(_RowTaps(visit)):  # type: ignore[arg-type]
            for token in tokens:
                begin()
                result = self.model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
                logits.append(result.logits[0, -1])
                end()
        return torch.stack(logits)


def told(folder: Path, family: str, requests: Sequence[Gated], names: Names) -> list[Told]:
    """What the reference says of each request; for `tests.engine.hf_reference.own_process`."""
    torch.set_num_threads(1)
    model = GateReference(folder, family)
    return [model.tell(request, names) for request in requests]


def plain_rows(
    folder: Path, family: str, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[dict[Site, Tensor]]:
    """Rows of each prompt, and of `num_tokens` greedy tokens behind it, without steering; likewise."""
    torch.set_num_threads(1)
    model, found = HFReference(folder, family), []
    for prompt in prompts:
        output = [0]
        for _ in range(num_tokens):
            reference = model.run(prompt, output)
            output[-1:] = [int(reference.next_tokens[-1]), 0]
        found.append(model.run(prompt, output[:-1]).rows)
    return found
