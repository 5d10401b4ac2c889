"""What requests steer with in the tests on real engines, as a client says it and as Hugging Face is told it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headgate.capture.schema.sites import FINAL_NORM_SITE, INNER_HOOKS, HookPoint, Site
from tests.engine.hf_reference import ANATOMIES, Reference, Steering, relative_error
from tests.engine.tiny_models import HIDDEN, LAYERS, VOCABULARY
from tests.fakes.saes import KINDS, NORMS, TinySae
from tests.fakes.transcoders import TinyTranscoder

MAX_ERROR = 1e-4
Vectors = Mapping[Site, Tensor]


def vectors(sites: Iterable[Site], seed: int, scale: float = 1.0, hidden: int = HIDDEN) -> dict[Site, Tensor]:
    """Another random vector at each of `sites`, fp32 ``[hidden]``; a value is `scale` in size."""
    generator = torch.Generator().manual_seed(seed)
    return {site: scale * torch.randn(hidden, generator=generator) for site in sites}


def sites_of(*hooks: HookPoint, layers: Iterable[int] = range(LAYERS)) -> list[Site]:
    """The sites of `hooks` at every one of `layers`."""
    chosen = list(layers)
    inner = [Site(layer, hook) for hook in hooks for layer in chosen if hook is not HookPoint.FINAL_NORM]
    return inner + ([FINAL_NORM_SITE] if HookPoint.FINAL_NORM in hooks else [])


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiers:
    """What one request steers with.

    Attributes:
        base: At all positions.
        prefill: Added at the positions of the prompt.
        decode: Added at generated positions.
        scale: Of all of them.
    """

    base: Vectors = field(default_factory=dict)
    prefill: Vectors = field(default_factory=dict)
    decode: Vectors = field(default_factory=dict)
    scale: float = 1.0

    def fields(self) -> dict[str, Any]:
        """The request's fields, in a form of their own each: lists, arrays with a scale, tensors."""
        found: dict[str, Any] = {}
        if self.base:
            found["steering_vectors"] = _nested(
                {site: {"vector": vector.tolist(), "scale": self.scale} for site, vector in self.base.items()}
            )
        if self.prefill:
            found["prefill_steering_vectors"] = _nested(
                {site: {"vector": vector.numpy(), "scale": self.scale} for site, vector in self.prefill.items()}
            )
        if self.decode:
            found["decode_steering_vectors"] = _nested(
                {site: self.scale * vector for site, vector in self.decode.items()}
            )
        return found

    def steering(self) -> Steering:
        """What Hugging Face adds."""
        return Steering(
            prefill=added([(self.base, self.scale), (self.prefill, self.scale)]),
            decode=added([(self.base, self.scale), (self.decode, self.scale)]),
        )


def document(steers: Tiers | Case) -> dict[str, Any]:
    """`steers` as a module, or what acts on all, is written: ``vectors``, ``prefill_vectors``, ``decode_ops``, ..."""
    return {name.replace("steering_", ""): value for name, value in steers.fields().items()}


def added(parts: Iterable[tuple[Vectors, float]]) -> dict[Site, Tensor]:
    """The sum of scaled vectors, site by site."""
    total: dict[Site, Tensor] = {}
    for part, scale in parts:
        for site, vector in part.items():
            total[site] = total.get(site, torch.zeros_like(vector)) + scale * vector
    return total


def _nested(values: Mapping[Site, Any]) -> dict[str, Any]:
    hooks: dict[str, Any] = {}
    for (layer, hook), value in values.items():
        if hook is HookPoint.FINAL_NORM:
            hooks[hook.value] = value
        else:
            hooks.setdefault(hook.value, {})[layer] = value
    return hooks


Acting = tuple[str, Site, Mapping[str, Any]]
"""An operation: its phase (``prefill``, ``decode`` or ``both``), its site, and its document with arrays.

The method ``features`` stands for edits of features: its document has an SAE's ``name``, the ``sae`` and ``edits``, and
``reconstructs`` if the SAE's error is dropped. The method ``transcoder`` stands for those of a transcoder, at the site
that it reads: ``name``, ``coder`` and ``edits``.
"""

OP_LAYER = 1
"""The layer with op sites; in the others, vectors are added without them."""


@dataclass(frozen=True, slots=True)
class Case:
    """A request by name.

    Attributes:
        name: For failures.
        tiers: What it adds; nothing: a neighbour.
        scores_prompt: Whether it asks for the logprobs of its prompt too.
        operations: What it does beyond.
    """

    name: str
    tiers: Tiers = field(default_factory=Tiers)
    scores_prompt: bool = False
    operations: tuple[Acting, ...] = ()

    def fields(self) -> dict[str, Any]:
        """The request's fields."""
        found = self.tiers.fields()
        for phase, site, document in self.operations:
            prefix = "" if phase == "both" else f"{phase}_"
            if document["method"] in ("features", "transcoder"):
                edits = [{"sae": document["name"], **edit} for edit in document["edits"]]
                if edits:
                    found.setdefault(f"{prefix}steering_features", []).extend(edits)
                if document["reconstructs"]:
                    found.setdefault(f"{prefix}sae_reconstruction", []).append(document["name"])
                continue
            plain = {key: _plain(value) for key, value in document.items()}
            found.setdefault(f"{prefix}steering_ops", []).append({"at": site.name, **plain})
        return found

    def steering(self) -> Steering:
        """What Hugging Face is told."""
        return replace(self.tiers.steering(), operations=self.operations)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def op_cases_of(family: str) -> list[Case]:
    """A request for each hook point, whose operations are in turn of every method; some with vectors beside them."""
    cases, methods = [], every_method()
    for at, hook in enumerate(hooks_of(family)):
        (site,) = sites_of(hook, layers=[OP_LAYER])
        documents = [next(methods) for _ in range(3)]
        phases = ("both", "decode", "both") if at % 2 else ("both", "prefill", "both")
        tiers = Tiers(base=vectors([site], 70 + at, 0.5)) if at % 3 == 0 else Tiers()
        operations = tuple((phase, site, document) for phase, document in zip(phases, documents, strict=True))
        # base operations act before those of a phase
        ordered = sorted(operations, key=lambda one: one[0] != "both")
        cases.append(Case(f"operations at {hook.value}", tiers, operations=tuple(ordered)))
    return cases


class PlacedSae(NamedTuple):
    """An SAE that engines of these tests serve.

    Attributes:
        name: Its name in requests.
        site: Where it acts.
        sae: Its weights.
    """

    name: str
    site: Site
    sae: TinySae

    def features(self, phase: str, *edits: dict[str, Any], reconstructs: bool = False) -> Acting:
        """Edits of its features, for `Case.operations`; `reconstructs`: and its reconstruction."""
        document = {"name": self.name, "sae": self.sae, "edits": edits, "reconstructs": reconstructs}
        return phase, self.site, {"method": "features", **document}


class PlacedTranscoder(NamedTuple):
    """A transcoder that engines of these tests serve.

    Attributes:
        name: Its name in requests.
        coder: Its weights and sites.
    """

    name: str
    coder: TinyTranscoder

    def features(self, phase: str, *edits: dict[str, Any]) -> Acting:
        """Edits of its features, for `Case.operations`."""
        return (
            phase,
            self.coder.read_site,
            {"method": "transcoder", **self._asdict(), "edits": edits, "reconstructs": False},
        )


def saes_of(family: str) -> list[PlacedSae]:
    """An SAE of each kind and norm, at the hook points in turn: top-k first, so that `encoded_of` has them."""
    pairs = enumerate((kind, norm) for kind in sorted(KINDS, key="topk".__ne__) for norm in NORMS)
    hooks = hooks_of(family)
    return [
        PlacedSae(
            f"{kind} {norm}",
            sites_of(hooks[at % len(hooks)], layers=[OP_LAYER])[0],
            TinySae(architecture=kind, norm=norm, subtracts_bias=bool(at % 2), width=HIDDEN, seed=at),
        )
        for at, (kind, norm) in pairs
    ]


TRANSCODERS = [
    PlacedTranscoder("relu transcoder", TinyTranscoder(layer=OP_LAYER, width=HIDDEN)),
    PlacedTranscoder("jumprelu transcoder", TinyTranscoder(layer=OP_LAYER, has_threshold=True, width=HIDDEN)),
    PlacedTranscoder("relu of all layers", TinyTranscoder(layer=0, num_layers=LAYERS, width=HIDDEN)),
    PlacedTranscoder(
        "jumprelu of all layers", TinyTranscoder(layer=0, num_layers=LAYERS, has_threshold=True, width=HIDDEN)
    ),
    PlacedTranscoder("later layers", TinyTranscoder(layer=1, num_layers=LAYERS - 1, width=HIDDEN)),
]
"""Transcoders, most of them cross-layer, of every family: all have the MLP's input and output."""


def saved_saes(saes: Iterable[PlacedSae | PlacedTranscoder], folder: Path) -> dict[str, str]:
    """Write SAEs and transcoders, and return the setting ``saes`` of an engine that serves them."""
    return {
        placed.name: str(placed.coder.save(folder / placed.name))
        if isinstance(placed, PlacedTranscoder)
        else f"{placed.sae.save(folder / placed.name)}@{placed.site.name}"
        for placed in saes
    }


def transcoder_cases() -> list[Case]:
    """Requests that change features of each of `TRANSCODERS`, one of them behind others' work at the same sites."""
    edits = [{"feature": 0, "set": 2.0}, {"feature": 1, "add": -0.5}, {"feature": 2, "scale": 3.0}]
    more = [{"feature": 3, "min": 0.7, "only_if_active": True}, {"feature": 4, "max": 0.1}, {"feature": 5, "set": 4.0}]
    cases = []
    for at, placed in enumerate(TRANSCODERS):
        phases = ("both", ("prefill", "decode")[at % 2])
        operations = placed.features(phases[0], *edits), placed.features(phases[1], *more)
        cases.append(Case(f"features of {placed.name}", operations=operations))
    within, _, across, other, later = TRANSCODERS
    methods = every_method()
    behind = [("both", placed.coder.read_site, next(methods)) for placed in (within, across)]
    behind += [
        ("both", within.coder.write_sites[0], next(methods)),
        ("both", across.coder.write_sites[-1], next(methods)),
    ]
    features = [placed.features("both", *edits, *more) for placed in (within, across, later)]
    sites = [within.coder.read_site, *across.coder.write_sites]
    everything = Case(
        "transcoders behind others", Tiers(base=vectors(sites, 120, 0.5)), operations=(*behind, *features)
    )
    return [*cases, everything, Case("decode of all layers", operations=(other.features("decode", *edits),))]


def encoded_of(family: str) -> list[PlacedSae]:
    """Those of `saes_of` that engines encode in full: one at each hook point."""
    return list({placed.site: placed for placed in reversed(saes_of(family))}.values())[::-1]


def feature_cases_of(family: str) -> list[Case]:
    """Requests that change features of each SAE, some behind operations and vectors."""
    cases, methods = [], every_method()
    for at, placed in enumerate(saes_of(family)):
        edits = [{"feature": 0, "set": 2.0}, {"feature": 1, "add": -0.5}, {"feature": 2, "scale": 3.0}]
        more = [{"feature": 3, "min": 0.7, "only_if_active": True}, {"feature": 4, "max": 0.1}]
        phases = ("both", ("prefill", "decode")[at % 2])
        operations = [placed.features(phases[0], *edits), placed.features(phases[1], *more)]
        if at % 3 == 0:
            operations.insert(0, ("both", placed.site, next(methods)))
        tiers = Tiers(base=vectors([placed.site], 90 + at, 0.5)) if at % 4 == 0 else Tiers()
        cases.append(Case(f"features of {placed.name}", tiers, operations=tuple(operations)))
    return cases


def reconstruction_cases_of(family: str) -> list[Case]:
    """Requests whose rows each SAE reconstructs, in turn with and without edits, behind operations and vectors."""
    cases, methods = [], every_method()
    for at, placed in enumerate(encoded_of(family)):
        edits = [{"feature": 0, "set": 2.0}, {"feature": 1, "scale": 3.0, "only_if_active": True}] if at % 2 else []
        phases = ("both", "prefill", "decode")
        operations = [placed.features(phases[at % 3], *edits, reconstructs=True)]
        if at % 3 != 1:
            operations.insert(0, ("both", placed.site, next(methods)))
            operations.append(placed.features("both", {"feature": 5, "add": 0.4}))
        tiers = Tiers(base=vectors([placed.site], 110 + at, 0.5)) if at % 4 == 0 else Tiers()
        cases.append(
            Case(f"reconstruction by {placed.name} at {placed.site.name}", tiers, operations=tuple(operations))
        )
    every = tuple(placed.features("both", reconstructs=True) for placed in encoded_of(family)[:3])
    return [*cases, Case("reconstruction by three", operations=every)]


def every_method(hidden: int = HIDDEN) -> Iterator[dict[str, Any]]:
    """One document of each method after the other, for ever, with other vectors each time."""
    random = np.random.default_rng(17)

    def vector() -> Any:
        return random.standard_normal(hidden).astype(np.float32)

    while True:
        yield {"method": "ablate", "vector": vector(), "scale": 1.0}
        yield {"method": "clamp", "vector": vector(), "min": -0.1, "max": 0.2, "strength": 0.8}
        yield {"method": "replace", "vector": vector(), "alpha": 0.5, "positions": [3, 4, 21]}
        yield {"method": "rotate", "plane": [vector(), vector()], "degrees": 60.0, "only_if_positive": True}
        yield {"method": "orthogonal", "vector": vector(), "scale": 1.7}
        yield {"method": "set", "vector": vector(), "value": 0.7, "strength": 1.0, "preserve_norm": True}
        yield {"method": "swap", "vector": vector(), "target": vector()}
        yield {"method": "affine", "vector": vector(), "reference": vector(), "alpha": 0.3}
        yield {"method": "mean_ablate", "vector": vector(), "mean": vector()}
        yield {"method": "norm_scaled_add", "vector": vector(), "scale": 0.4, "max_ratio": 0.25}
        yield {"method": "additive", "vector": vector(), "scale": 0.5, "preserve_norm": True}


WIDE_HEADS = ("qwen3", "gemma", "mixtral", "mixtral_all", "qwen3_moe", "qwen3_moe_all", "gemma2", "gemma3")
"""Families whose heads are wider than the stream together: no operations act there, and `test_widths` compares rows
and vectors."""


def hooks_of(family: str) -> list[HookPoint]:
    """Hook points of a family of tiny models, in the order of their names."""
    missing = INNER_HOOKS | ANATOMIES[family].missing | ({HookPoint.HOOK_Z} if family in WIDE_HEADS else set())
    return sorted(set(HookPoint) - missing)


def cases_of(family: str) -> list[Case]:
    """One request for each hook point and each kind of steering, unsteered neighbours among them."""
    hooks = hooks_of(family)
    cases = [
        Case(
            hook.value,
            Tiers(prefill=vectors(sites_of(hook), 10 + at), decode=vectors(sites_of(hook), 30 + at)),
            scores_prompt=hook is HookPoint.FINAL_NORM,
        )
        for at, hook in enumerate(hooks)
    ]
    stream, everywhere = sites_of(HookPoint.PRE_ATTN, HookPoint.POST_MLP), sites_of(*hooks)
    usual = Tiers(base=vectors(stream, 50))
    everything = Tiers(
        base=vectors(everywhere, 51, 0.5),
        prefill=vectors(everywhere, 52, 0.5),
        decode=vectors(everywhere, 53, 0.5),
    )
    return [
        *cases,
        Case("neighbour"),
        Case("everything", everything),
        Case("prefill only", Tiers(prefill=vectors(stream, 54))),
        Case("decode only", Tiers(decode=vectors(stream, 55)), scores_prompt=True),
        Case("negative", replace(usual, scale=-1.0)),
        Case("scale 0", replace(usual, scale=0.0)),
        Case("large", replace(usual, scale=300.0)),
        *op_cases_of(family),
        *feature_cases_of(family),
        *transcoder_cases(),
        *reconstruction_cases_of(family),
        Case("last neighbour"),
    ]


def logprobs_of(steps: Sequence[Any], vocabulary: int = VOCABULARY) -> Tensor:
    """``[len(steps), vocabulary]`` of a request that asked for all; nan where there is none."""
    found = torch.full((len(steps), vocabulary), torch.nan)
    for row, step in zip(found, steps, strict=True):
        row[list(step)] = torch.tensor([entry.logprob for entry in step.values()])
    return found


def check_logprobs(output: Any, reference: Reference) -> None:
    """Tokens exactly, and the logprobs of every token of the vocabulary, against Hugging Face's logits.

    Args:
        output: A finished greedy request with ``logprobs=-1``.
        reference: Hugging Face on its tokens, with the same vectors.
    """
    tokens, num_prompt = list(output.outputs[0].token_ids), len(output.prompt_token_ids)
    expected = reference.logits.float().log_softmax(-1)
    assert reference.next_tokens[num_prompt - 1 :].tolist() == tokens
    error = relative_error(logprobs_of(output.outputs[0].logprobs), expected[num_prompt - 1 :])
    assert error <= MAX_ERROR, f"logprobs of the answer: relative error {error:.2g}"
    if output.prompt_logprobs and num_prompt > 1:
        error = relative_error(logprobs_of(output.prompt_logprobs[1:]), expected[: num_prompt - 1])
        assert error <= MAX_ERROR, f"logprobs of the prompt: relative error {error:.2g}"
