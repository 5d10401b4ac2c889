"""What gates of a request mean, row by row, in float64: written from the specification of gates alone.

A request's documents are read here as its client wrote them; nothing of ``headgate.steering.gates`` or of its worker is
asked. `tests.engine.gate_reference` runs them on Hugging Face's model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from headgate.capture.schema.sites import FINAL_NORM_SITE, HookPoint, Site

Row = Any
"""float64 ``[hidden]``."""

Acting = tuple[Site, Mapping[str, Any]]
"""An operation at a site, as `tests.fakes.programs.apply` takes it."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What a gate or a module turns on at full strength, by phase.

    Attributes:
        prefill: At prompt positions.
        decode: At generated positions.
    """

    prefill: tuple[Acting, ...] = ()
    decode: tuple[Acting, ...] = ()

    def at(self, is_prompt: bool) -> tuple[Acting, ...]:
        """Operations of a phase."""
        return self.prefill if is_prompt else self.decode


@dataclass(frozen=True, kw_only=True)
class Names:
    """What names in requests stand for.

    Attributes:
        probes: Documents with ``at``, ``weight``, ``bias`` and ``kind``.
        modules: With scale 1.
        saes: With the site of each.
    """

    probes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    modules: Mapping[str, Effect] = field(default_factory=dict)
    saes: Mapping[str, tuple[Any, Site]] = field(default_factory=dict)


def site_of(name: str) -> Site:
    """Return the site of ``1.post_mlp`` or ``final_norm``."""
    if name == FINAL_NORM_SITE.name:
        return FINAL_NORM_SITE
    layer, hook = name.split(".")
    return Site(int(layer), HookPoint(hook))


def additions(nested: Mapping[str, Any], scale: float = 1.0) -> tuple[Acting, ...]:
    """Return vectors ``{hook: {layer: vector}}`` as operations."""
    found: list[Acting] = []
    for hook, value in nested.items():
        layers = {None: value} if hook == FINAL_NORM_SITE.name else value
        for layer, vector in layers.items():
            site = FINAL_NORM_SITE if layer is None else Site(int(layer), HookPoint(hook))
            found.append((site, {"method": "additive", "vector": np.asarray(vector, np.float64), "scale": scale}))
    return tuple(found)


def network_score(document: Mapping[str, Any], row: Row) -> float:
    """Return the score that an MLP probe gives a row."""
    layer = document["hidden"]
    total = float(document["bias"])
    for weights, bias, out in zip(layer["weight"], layer["bias"], document["weight"], strict=True):
        value = float(np.asarray(weights, np.float32).astype(np.float64) @ row) + float(np.float32(bias))
        if layer["activation"] == "relu":
            value = max(value, 0.0)
        elif layer["activation"] == "gelu":
            value *= (1 + math.erf(value / math.sqrt(2))) / 2
        else:
            value /= 1 + math.exp(-value)
        total += float(np.float32(out)) * value
    return total


class _Leaf:
    """A comparison: reads, pools, and remembers whether it fired."""

    def __init__(self, document: Mapping[str, Any], strength: Any, names: Names) -> None:
        self.loop = _Loop(**strength["pid"]) if "pid" in strength else None
        self.direction = 1.0 if "above" in document else -1.0
        self.threshold = float(document.get("above", document.get("below", "nan")))
        self.hysteresis = float(document.get("hysteresis") or 0.0)
        self.pool: Any = document.get("pool") or "token"
        self.mode = strength
        self.named = document["probe"] if isinstance(document.get("probe"), str) else None
        self.site, self._score = _reading(document, names)
        self.fired = False
        self.pooled: float | None = None
        self.count = 0

    def read(self, row: Row, position: int, num_prompt: int) -> float:
        """Take a row's score in."""
        z = self._score(row)
        if self.pool == "token":
            self.pooled = z
        elif self.pool == "last_prompt":
            self.pooled = z if position == num_prompt - 1 else self.pooled
        elif self.pool == "prompt_mean":
            if position < num_prompt:
                self.count += 1
                self.pooled = z if self.pooled is None else self.pooled + (z - self.pooled) / self.count
        else:
            alpha = self.pool["ema"]
            self.pooled = z if self.pooled is None else (1 - alpha) * self.pooled + alpha * z
        return z

    @property
    def is_of_prompt(self) -> bool:
        return self.pool in ("last_prompt", "prompt_mean")

    def decide(self) -> tuple[float, bool]:
        """Return its strength, and whether it fires."""
        if self.pooled is None:
            return 0.0, False
        if self.loop is not None:
            return self.loop.next(self.pooled), True
        beyond = self.direction * (self.pooled - self.threshold)  # how far on the side that fires
        self.fired = beyond > 0 or (self.fired and not beyond < -self.hysteresis)
        if self.mode == "binary":
            return float(self.fired), self.fired
        if "sigmoid" in self.mode:
            return 1 / (1 + math.exp(-min(max(self.mode["sigmoid"] * beyond, -700), 700))), self.fired
        part = (beyond + self.hysteresis) / max(self.hysteresis, 1e-8)
        return self.mode["proportional"] * min(max(part, 0.0), 1.0), self.fired

    def margin(self) -> float:
        """How near a threshold the pooled score is, relative to its size."""
        if self.pooled is None or self.loop is not None:
            return math.inf
        beyond = self.direction * (self.pooled - self.threshold)
        edges = [beyond, beyond + self.hysteresis] if self.hysteresis else [beyond]
        return min(map(abs, edges)) / max(abs(self.pooled), abs(self.threshold), 1e-6)


@dataclass(kw_only=True)
class _Loop:
    """A control loop, from the last row of the prompt on."""

    setpoint: float
    kp: float = 0.5
    ki: float = 0.1
    kd: float = 0.0
    min: float = -4.0
    max: float = 4.0
    total: float = 0.0
    before: float | None = None

    def next(self, value: float) -> float:
        """Return the strength of the next row."""
        error, fall = self.setpoint - value, 0.0 if self.before is None else self.before - value
        wanted = self.kp * error + self.ki * (self.total + error) + self.kd * fall
        found = sorted((self.min, wanted, self.max))[1]
        if not (wanted - found) * self.ki * error > 0:  # else the sum would be driven further beyond the limit
            self.total += error
        self.before = value
        return found


def _reading(document: Mapping[str, Any], names: Names) -> tuple[Site, Callable[[Row], float]]:
    if "sae" in document:
        sae, site = names.saes[document["sae"]]
        return site, lambda row: float(sae.encode(row[None])[0, document["feature"]])
    probe = document.get("probe")
    if isinstance(probe, str):
        probe = names.probes[probe]
    is_cosine = probe is None or probe.get("kind") == "cosine"
    read = {"at": document["at"], "weight": document["cosine"]} if probe is None else probe
    if "hidden" in read:
        return site_of(read["at"]), partial(network_score, read)
    weight = np.asarray(read["weight"], np.float64)
    bias = 0.0 if is_cosine else float(read.get("bias") or 0.0)

    def score(row: Row) -> float:
        product = float(weight @ row)
        return product / float(np.linalg.norm(weight) * np.linalg.norm(row)) if is_cosine else product + bias

    return site_of(read["at"]), score


class GateState:
    """One gate: conditions, latch, and what it writes."""

    def __init__(self, document: Mapping[str, Any], index: int, names: Names, order: Sequence[Site]) -> None:
        self.name = document.get("name") or f"gate{index}"
        self.scope = document.get("scope") or "this_token"
        self.when = document["when"]
        self.leaves: list[_Leaf] = []
        self._is_prompt = True
        self._tree = self._parse(self.when, document.get("strength") or "binary", names)
        reads = [order.index(leaf.site) for leaf in self.leaves]
        self.decided_at = max(reads) if reads else -1
        self.site = order[self.decided_at] if reads else None
        self.then = document["then"]
        self.effect = _effect(self.then, names)
        self.latched: float | None = None
        self.now = self.before = 0.0
        """Strengths by this row's condition, and by that of the row before."""
        self.held: float | None = None
        """The latch as the row before left it."""

    def scores(self) -> Iterator[tuple[str, _Leaf]]:
        """Each leaf with the name of its score."""
        inline = 0
        for leaf in self.leaves:
            if leaf.named is not None:
                yield leaf.named, leaf
                continue
            yield (f"{self.name}.{inline}" if inline else self.name), leaf
            inline += 1

    def decide(self, position: int, num_prompt: int) -> None:
        """Take the row's condition in."""
        self._is_prompt = position < num_prompt
        if any(leaf.loop is not None for leaf in self.leaves) and position < num_prompt - 1:
            return
        strength, fires = self._tree()
        if any(leaf.is_of_prompt for leaf in self.leaves) and position < num_prompt - 1:
            strength, fires = 0.0, False
        self.now = strength
        if self.scope == "rest_of_request" and self.latched is None and fires:
            self.latched = strength

    def next_row(self) -> None:
        """Go on to the next row."""
        self.before, self.held = self.now, self.latched

    def strength_at(self, *, is_early: bool, is_prompt: bool) -> float:
        """The strength that acts on this row at sites before the probe's, or at others."""
        if is_early and is_prompt:
            return 0.0
        if self.scope == "this_token":
            return 0.0 if is_early else self.now
        if self.scope == "next_token":
            return self.before
        found = self.held if is_early else self.latched
        return 0.0 if found is None else found

    @property
    def shown(self) -> float:
        if self.scope == "rest_of_request":
            return self.now if self.latched is None else self.latched
        return self.now

    def _parse(self, when: Any, strength: Any, names: Names) -> Callable[[], tuple[float, bool]]:
        if when == "always":
            return lambda: (1.0, True)
        if when in _PHASES:
            return lambda: (float(self._is_prompt == (when == "prompt")), self._is_prompt == (when == "prompt"))
        if "not" in when:
            inner = self._parse(when["not"], strength, names)

            def negated() -> tuple[float, bool]:
                found, fires = inner()
                return 1 - found, not fires

            return negated
        for key, pick, fired in (("any", max, any), ("all", min, all)):
            if key in when:
                parts = [self._parse(each, strength, names) for each in when[key]]

                of_phases = [key == "all" and _is_phase(each) for each in when[key]]

                def grouped(
                    parts: Any = parts, pick: Any = pick, fired: Any = fired, of_phases: Any = of_phases
                ) -> tuple[float, bool]:
                    found = [part() for part in parts]
                    bounding = [
                        one for (one, _), is_phase in zip(found, of_phases, strict=True) if not is_phase or not one
                    ]
                    return pick(bounding or [1.0]), fired([fires for _, fires in found])

                return grouped
        self.leaves.append(_Leaf(when, strength, names))
        return self.leaves[-1].decide


_PHASES = ("prompt", "generated")


def _is_phase(when: Any) -> bool:
    """Whether a condition is a phase, or not one: such a one within ``all`` has no strength of its own if it holds."""
    return when in _PHASES or (isinstance(when, Mapping) and when.get("not") in _PHASES)


def _effect(then: Any, names: Names) -> Effect:
    if then == "observe" or "attenuate" in then:
        return Effect()
    if "module" in then:
        scale, module = then.get("scale", 1.0), names.modules[then["module"]]
        phases = ([(site, _scaled(one, scale)) for site, one in part] for part in (module.prefill, module.decode))
        prefill, decode = map(tuple, phases)
        return Effect(prefill=prefill, decode=decode)
    if "vectors" in then:
        both = additions(then["vectors"])
    elif "ops" in then:
        both = tuple((site_of(one["at"]), {key: _array(value) for key, value in one.items()}) for one in then["ops"])
    else:
        by_sae: dict[str, list[Any]] = {}
        for edit in then["features"]:
            by_sae.setdefault(edit["sae"], []).append(edit)
        both = tuple(
            (names.saes[name][1], {"method": "features", "sae": names.saes[name][0], "edits": edits})
            for name, edits in by_sae.items()
        )
    return Effect(prefill=both, decode=both)


def _scaled(document: Mapping[str, Any], scale: float) -> Mapping[str, Any]:
    assert document["method"] == "additive", "modules of this reference have vectors alone"
    return {**document, "scale": document["scale"] * scale}


def _array(value: Any) -> Any:
    return np.asarray(value, np.float64) if isinstance(value, list) else value
