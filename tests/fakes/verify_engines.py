"""A toy model that serves the scenes of ``headgate verify``, rightly or with one thing wrong.

Its numbers depend on a request alone and never on the batch, as a batch-invariant engine's do: whatever differs between
two recordings comes from what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from headgate.capture.engine.commands.verify_engine import CaptureChecks
from headgate.capture.engine.commands.verify_stock import plain_requests
from headgate.capture.monitoring.verify_checks import (
    EAGER,
    IDLE,
    PLAIN,
    PLAIN_AGAIN,
    PLAIN_AT_THE_END,
    SERVED,
    STOCK,
    AnswerRows,
    CheckPart,
    Recording,
    RequestAnswer,
    Scene,
    SceneRequest,
    Stage,
    VerifyFacts,
)
from headgate.capture.schema.sites import FINAL_NORM_SITE, HookPoint, Site
from headgate.steering.verify import FIELDS, SteeringChecks

VOCABULARY, HIDDEN, LAYERS = 64, 16, 3
STEERABLE = tuple(
    Site(layer, hook)
    for layer in range(LAYERS)
    for hook in (HookPoint.PRE_ATTN, HookPoint.POST_ATTN, HookPoint.POST_MLP)
)
CAPTURED = (Site.parse("0.post_mlp"), Site.parse("1.pre_attn"), Site.parse("2.post_mlp"), FINAL_NORM_SITE)
STEPS = 20
PARTS: Mapping[str, CheckPart] = {"capture": CaptureChecks(), "steering": SteeringChecks()}
Steers = Callable[[str, Site, int, int], bool]
"""Whether a vector of a phase's field acts at a site on the token at a position, given the length of the prompt."""

_RNG = np.random.default_rng(7)
EMBEDDING = _RNG.normal(size=(VOCABULARY, HIDDEN))
MIXING = _RNG.normal(size=(2 * LAYERS, HIDDEN, HIDDEN)) / 4
UNEMBEDDING = _RNG.normal(size=(HIDDEN, VOCABULARY))


def steers(name: str, site: Site, position: int, num_prompt: int) -> bool:
    """As it should be."""
    is_prompt = position < num_prompt
    return name == FIELDS["both"] or (name == FIELDS["prefill"]) == is_prompt


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """One thing that is wrong with the engine that is verified; nothing by default.

    Attributes:
        steers: In place of `steers`.
        vectors_of: For each request of a batch, whose vectors it gets.
        rows_of: For each request of a batch, whose rows it is given.
        rows: Changes captured rows.
        answers: Changes the answers of a scene of a kind of engine.
        run_counts: Changes the counts of sites.
        recording: Changes anything else of a recording.
    """

    steers: Steers = steers
    vectors_of: Callable[[int, int], int] = lambda index, num: index
    rows_of: Callable[[int, int], int] = lambda index, num: index
    rows: Callable[[AnswerRows], AnswerRows] = lambda rows: rows
    answers: Callable[[str, str, list[RequestAnswer]], list[RequestAnswer]] = lambda kind, scene, answers: answers
    run_counts: Callable[[dict[str, int]], dict[str, int]] = lambda run_counts: run_counts
    recording: Callable[[Recording], dict[str, Any]] = lambda recording: {}


Run = tuple[list[int], list[dict[int, float]], dict[Site, list[np.ndarray]]]


def forward(request: SceneRequest, fields: Mapping[str, Any], acts: Steers, sites: Sequence[Site] = CAPTURED) -> Run:
    """Generate greedily; returns tokens, the five best logprobs of each, and rows by site."""
    tokens, logprobs = list(request.prompt), []
    states: list[np.ndarray] = []
    rows: dict[Site, list[np.ndarray]] = {site: [] for site in sites}
    while len(logprobs) < request.max_tokens:
        for position in range(len(states), len(tokens)):
            seen: dict[Site, np.ndarray] = {}
            states.append(_token(tokens[position], states, seen, _vectors(fields, acts, position, len(request.prompt))))
            for site in sites:
                rows[site].append(seen[site])
        logits = rows_of_last(states) @ UNEMBEDDING
        values = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        best = np.argsort(-values)[:5]
        logprobs.append({int(token): float(values[token]) for token in best})
        tokens.append(int(best[0]))
    return tokens[len(request.prompt) :], logprobs, rows


@cache
def unsteered(prompt: tuple[int, ...], max_tokens: int) -> Run:
    """`forward` of a request that nobody steers: most are, and the same ones in many scenes."""
    return forward(SceneRequest(label="", prompt=prompt, max_tokens=max_tokens), {}, steers)


def rows_of_last(states: Sequence[np.ndarray]) -> np.ndarray:
    """The last state, normed."""
    return states[-1] / np.sqrt((states[-1] ** 2).mean() + 1e-6)


def _token(token: int, earlier: Sequence[np.ndarray], seen: dict[Site, np.ndarray], vectors: Any) -> np.ndarray:
    """The stream of one token through all layers; `seen` takes what each site holds before it is steered."""
    past = np.mean(earlier, axis=0) if len(earlier) else np.zeros(HIDDEN)
    stream = EMBEDDING[token]

    def at(layer: int, hook: HookPoint, value: np.ndarray) -> np.ndarray:
        site = Site(layer, hook)
        seen[site] = value
        return value + vectors(site)

    for layer in range(LAYERS):
        stream = at(layer, HookPoint.PRE_ATTN, stream)
        stream = at(layer, HookPoint.POST_ATTN, stream + np.tanh((stream + past) @ MIXING[2 * layer]))
        stream = at(layer, HookPoint.POST_MLP, stream + np.tanh(stream @ MIXING[2 * layer + 1]))
    seen[FINAL_NORM_SITE] = rows_of_last([stream])
    return stream


def _vectors(fields: Mapping[str, Any], acts: Steers, position: int, num_prompt: int) -> Callable[[Site], Any]:
    def at(site: Site) -> Any:
        total: Any = 0.0
        for name, hooks in fields.items():
            entry = hooks.get(site.hook.value, {}).get(site.layer)
            if entry is None or not acts(name, site, position, num_prompt):
                continue
            is_scaled = isinstance(entry, dict)
            total = total + (entry["vector"] * entry["scale"] if is_scaled else entry).astype(np.float64)
        return total

    return at


@dataclass
class ToyEngine:
    """Records what the child process of one engine would."""

    kind: str
    wrong: Wrong = field(default_factory=Wrong)
    earlier: Recording | None = None
    dtype: str = "float32"

    def record(self) -> Recording:
        """Every scene of this kind of engine."""
        scenes = {scene.name: self._serve(scene) for scene in self._scenes()}
        counts = {f"{layer}.post_mlp": STEPS for layer in range(LAYERS)}
        worker = {"capture": self.wrong.run_counts(dict(counts)), "steering": dict(counts)}
        recording = Recording(
            kind=self.kind,
            facts=VerifyFacts(
                architecture="Toy", dtype=self.dtype, num_layers=LAYERS, hidden_size=HIDDEN, graph_mode="FULL"
            ),
            scenes=scenes,
            run_counts={name: [worker] for name in scenes} if self.kind == SERVED else {},
            replays={name: [STEPS] for name in scenes},
            step_ms={1: [1.0, 1.1], 8: [2.0, 2.1]} if self.kind in (STOCK, IDLE) else {},
        )
        changed = {name: getattr(recording, name) for name in recording.__struct_fields__}
        return Recording(**{**changed, **self.wrong.recording(recording)})

    def _scenes(self) -> Iterator[Scene]:
        plain = plain_requests(VOCABULARY, 48)
        if self.kind != EAGER:
            yield Scene(name=PLAIN, requests=plain)
            yield Scene(name=PLAIN_AGAIN, requests=plain)
        if self.kind in (SERVED, EAGER):
            llm = SimpleNamespace(steering=SimpleNamespace(steerable=SimpleNamespace(sites=STEERABLE)))
            stage = Stage(
                kind=self.kind, llm=llm, plain=plain, sites=CAPTURED, width=lambda site: HIDDEN, earlier=self.earlier
            )
            for part in PARTS.values():
                yield from part.scenes(stage)
        if self.kind == SERVED:
            yield Scene(name=PLAIN_AT_THE_END, requests=plain)

    def _serve(self, scene: Scene) -> list[RequestAnswer]:
        requests, num = scene.requests, len(scene.requests)
        runs = [
            forward(request, fields, self.wrong.steers)
            if (fields := requests[self.wrong.vectors_of(index, num)].fields)
            else unsteered(tuple(request.prompt), request.max_tokens)
            for index, request in enumerate(requests)
        ]
        answers = [
            RequestAnswer(
                label=request.label,
                prompt=list(request.prompt),
                tokens=runs[index][0],
                logprobs=runs[index][1],
                rows=self._rows(request, runs[index], runs[self.wrong.rows_of(index, num)]),
            )
            for index, request in enumerate(requests)
        ]
        return self.wrong.answers(self.kind, scene.name, answers)

    def _rows(self, request: SceneRequest, own: Run, given: Run) -> AnswerRows | None:
        if not request.captures:
            return None
        tokens = [*request.prompt, *own[0]][:-1]
        rows = AnswerRows(
            status="ok",
            positions=list(range(len(tokens))),
            token_ids=tokens,
            hidden_size=HIDDEN,
            values={
                site.name: np.resize(np.array(values, np.float32), (len(tokens), HIDDEN)).tobytes()
                for site, values in given[2].items()
            },
        )
        return self.wrong.rows(rows)


def make_runs(wrong: Wrong | None = None, **changed: Any) -> dict[str, list[Recording]]:
    """The recordings of a whole verification in which the engine in use does `wrong`; `changed` are the others'."""
    wrong = wrong or Wrong()
    served = ToyEngine(SERVED, wrong, **changed).record()
    return {
        STOCK: [ToyEngine(STOCK, **changed).record(), ToyEngine(STOCK, **changed).record()],
        IDLE: [ToyEngine(IDLE, **changed).record()],
        SERVED: [served],
        EAGER: [ToyEngine(EAGER, earlier=served, **changed).record()],
    }
