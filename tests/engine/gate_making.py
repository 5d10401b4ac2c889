"""What requests with gates are made of: prompts, names, and conditions that their own rows meet at times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headgate.capture.schema.sites import FINAL_NORM_SITE, HookPoint, Site
from tests.engine.gate_semantics import Effect, Names, additions, network_score, site_of
from tests.engine.hf_reference import Steering
from tests.engine.steering_cases import Case, vectors
from tests.engine.tiny_models import HIDDEN, VOCABULARY
from tests.fakes.saes import TinySae

PROMPTS = [
    [1, *((7 * i) % (VOCABULARY - 5) + 5 for i in range(38))],
    [1, *((11 * i) % (VOCABULARY - 5) + 5 for i in range(20))],
    [9],
]
LONG, SHORT, ONE = range(3)
NUM_OUTPUT = 8
SAE = TinySae(architecture="jumprelu", norm="layer_norm", width=HIDDEN, seed=3)
SAE_SITE = Site(1, HookPoint.POST_MLP)
MODULE = {
    "vectors": {"mlp_out": {1: vectors(["m"], 301, 0.4)["m"].tolist()}},
    "prefill_vectors": {"post_mlp": {2: vectors(["m"], 302, 0.4)["m"].tolist()}},
    "decode_vectors": {
        "post_mlp": {2: vectors(["m"], 303, 0.6)["m"].tolist(), 0: vectors(["m"], 304, 0.5)["m"].tolist()}
    },
}
EARLY, LATE = ("0.post_mlp", "1.pre_attn", "0.attn_in"), ("1.post_mlp", "2.mlp_in", "final_norm")
"""Before and behind `MIDDLE`."""
MIDDLE = "1.post_attn"


@dataclass(frozen=True, kw_only=True)
class GateCase:
    """A request by name.

    Attributes:
        name: For failures.
        gates: As ``steering_gates``; the reference is told these.
        prompt: Index of one of `PROMPTS`.
        static: What it steers with beside them.
        old: As ``steering``, the predecessor's form of `gates`, to be sent in their place.
        n: Samples.
    """

    name: str
    gates: Sequence[Mapping[str, Any]] = ()
    prompt: int = LONG
    static: Case = field(default_factory=lambda: Case("none"))
    old: Sequence[Mapping[str, Any]] | None = None
    n: int = 1

    def fields(self) -> dict[str, Any]:
        """The request's fields."""
        found = self.static.fields()
        if self.gates:
            found["return_steering_trace"] = True
            found |= {"steering_gates": list(self.gates)} if self.old is None else {"steering": list(self.old)}
        return found

    def steering(self) -> Steering:
        """What Hugging Face is told of its static steering."""
        return self.static.steering()


class Maker:
    """Makes conditions that fire on some rows of a prompt and of the answer that an engine gives without steering.

    Args:
        rows: Of each of `PROMPTS`: ``[num_tokens, hidden]`` per site.
    """

    def __init__(self, rows: Sequence[Mapping[Site, Tensor]]) -> None:
        self._rows = rows
        self._seeds = iter(range(1000, 100000))

    def vector(self, scale: float = 0.5) -> list[float]:
        """Another vector."""
        found: list[float] = (scale * torch.randn(HIDDEN, generator=self._generator())).tolist()
        return found

    def vectors(self, *names: str, scale: float = 0.4) -> dict[str, Any]:
        """Another vector at each of some sites, nested as clients write them."""
        found: dict[str, Any] = {}
        for site in map(site_of, names):
            if site == FINAL_NORM_SITE:
                found[site.hook.value] = self.vector(scale)
            else:
                found.setdefault(site.hook.value, {})[site.layer] = self.vector(scale)
        return found

    def when(
        self, at: str = MIDDLE, prompt: int = LONG, *, q: float = 0.7, in_decode: bool = False, **more: Any
    ) -> dict[str, Any]:
        """A comparison that fires on the part 1 - `q` of the rows; with `in_decode`, on generated rows first.

        Further keys are the comparison's; ``below=True`` mirrors it, ``hysteresis=True`` takes a usual one, and
        ``cosine=True`` reads the angle.
        """
        site, num_prompt = site_of(at), len(PROMPTS[prompt])
        while True:
            weight = torch.randn(HIDDEN, generator=self._generator()) / HIDDEN**0.5
            rows, bias = self._rows[prompt][site].double(), 0.0 if more.get("cosine") else 0.25
            scores = rows @ weight.double() + bias
            if more.get("cosine"):
                scores /= rows.norm(dim=1) * weight.double().norm()
            scores = -scores if more.get("below") else scores
            ordered = scores.sort().values
            index = int(q * (len(ordered) - 1))
            threshold = float(ordered[index] + ordered[index + 1]) / 2 if len(ordered) > 1 else float(ordered[0]) - 0.1
            if not in_decode:
                break
            inside, behind = scores[:num_prompt].max(), scores[num_prompt + 1 :].max()
            if behind - inside > 0.1 * scores.std():
                threshold = float(inside + behind) / 2
                break
        read = {"cosine": weight.tolist(), "at": at}
        if not more.pop("cosine", False):
            read = {"probe": {"at": at, "weight": weight.tolist(), "bias": bias}}
        found = {**read, "below": -threshold} if more.pop("below", False) else {**read, "above": threshold}
        if more.get("hysteresis") is True:
            more["hysteresis"] = float(scores.std()) / 2
        return {**found, **more}

    def network(self, name: str, prompt: int = LONG, q: float = 0.7) -> dict[str, Any]:
        """A comparison of a probe of `named_probes` that is a network, which fires on the part 1 - `q` of the rows."""
        document = named_probes()[name]
        rows = self._rows[prompt][site_of(document["at"])].double().numpy()
        scores = sorted(network_score(document, row) for row in rows)
        index = int(q * (len(scores) - 1))
        return {"probe": name, "above": (scores[index] + scores[index + 1]) / 2}

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(next(self._seeds))


def names() -> Names:
    """What names in the cases stand for."""
    base, decode = additions(MODULE["vectors"]), additions(MODULE["decode_vectors"])
    return Names(
        probes=named_probes(),
        modules={"calm": Effect(prefill=base + additions(MODULE["prefill_vectors"]), decode=base + decode)},
        saes={"sae": (SAE, SAE_SITE)},
    )


def named_probes() -> dict[str, dict[str, Any]]:
    """Probes that gates name."""
    first, second = (vectors(["p"], seed)["p"].tolist() for seed in (401, 402))
    return {
        "anger": {"at": "0.post_mlp", "weight": first, "bias": 0.5, "kind": "linear"},
        "angle": {"at": "2.pre_attn", "weight": second, "kind": "cosine"},
        **{name: _network(name, units) for name, units in (("relu", 5), ("gelu", 8), ("silu", 12))},
    }


def _network(activation: str, units: int) -> dict[str, Any]:
    """A small MLP, named after what its units do."""
    generator = torch.Generator().manual_seed(units)
    first, second, bias = (torch.randn(units, width, generator=generator) for width in (HIDDEN, 1, 1))
    hidden = {"weight": (first / 4).tolist(), "bias": (bias[:, 0] / 2).tolist(), "activation": activation}
    at = "1.post_attn" if activation == "silu" else "0.post_mlp"
    return {"at": at, "weight": second[:, 0].tolist(), "bias": 0.3, "kind": "mlp", "hidden": hidden}
