"""Attention patterns against Hugging Face's eager attention, and against a loop that is too simple to be wrong."""

from __future__ import annotations

import base64
import math
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load
from torch import Tensor

from headgate.capture.schema.consumer import (
    AttentionFacts,
    CapturedRequest,
    ConsumerContext,
    ModelInfo,
    RequestLengths,
    SpecContext,
)
from headgate.capture.schema.errors import CaptureFileError, ConfigError, ConsumerError, RequestError
from headgate.capture.schema.positions import Indices, Message, Named, PositionSelector, Several, Span, keys_before
from headgate.capture.schema.results import Origin
from headgate.capture.schema.results import whole_rows as stored_rows
from headgate.capture.schema.sites import HookPoint, Site, SiteShape
from headgate.consumers import attention
from headgate.consumers.attention import AttentionConsumer, fetch_patterns, pattern_blocks, top_keys, whole_rows
from headgate.consumers.datasets import open_dataset
from headgate.consumers.feed import ExampleRequest, Feed
from headgate.consumers.filesystem.consumer import LAYOUTS, FilesystemConsumer
from headgate.consumers.reader import open_captures
from headgate.consumers.testing import ConsumerContract

transformers = pytest.importorskip("transformers", reason="the oldest packages lack it", exc_type=ImportError)

TOLERANCE = 1e-4
NUM_TOKENS = 40
_TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
    "pad_token_id": 0,
}
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "granite": ("Granite", {"attention_multiplier": 0.3}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "gemma2": ("Gemma2", {**_WINDOWS, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 24}),
    "gemma3": ("Gemma3Text", {**_WINDOWS, "query_pre_attn_scalar": 24}),
    "gpt_oss": ("GptOss", {**_WINDOWS, "num_local_experts": 2, "num_experts_per_tok": 1}),
}


class Seen:
    """What Hugging Face's attention was called with, and what it made of that, layer by layer."""

    def __init__(self) -> None:
        self.calls: list[tuple[AttentionFacts, Tensor, Tensor, Tensor]] = []

    def note(self, module: Any, query: Tensor, key: Tensor, pattern: Tensor, scale: float, options: Any) -> None:
        sinks = getattr(module, "sinks", None)
        facts = AttentionFacts(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_size=query.shape[3],
            scale=scale,
            window=options.get("sliding_window"),
            soft_cap=options.get("softcap"),
            sinks=None if sinks is None else tuple(sinks.tolist()),
        )
        self.calls.append((facts, query[0].transpose(0, 1), key[0].transpose(0, 1), pattern[0]))


@contextmanager
def watched(model: Any) -> Iterator[Seen]:
    """Note the calls of eager attention of a model's module."""
    module = __import__(type(model).__module__, fromlist=["eager_attention_forward"])
    original: Callable[..., tuple[Tensor, Tensor]] = module.eager_attention_forward
    seen = Seen()

    def eager(layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        output, pattern = original(layer, query, key, value, mask, **options)
        seen.note(layer, query, key, pattern, options["scaling"], options)
        return output, pattern

    module.eager_attention_forward = eager
    try:
        yield seen
    finally:
        module.eager_attention_forward = original


@pytest.mark.parametrize("family", FAMILIES)
def test_patterns_equal_hugging_faces(family: str) -> None:

    name, settings = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        config = getattr(transformers, f"{name}Config")(**{**_TEXT, **settings})
        model = (
            getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")
            ._from_config(config, attn_implementation="eager")
            .eval()
        )
        for parameter in model.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
    ids = torch.arange(1, NUM_TOKENS + 1)[None] * 7 % 64

    with watched(model) as seen, torch.inference_mode():
        returned = model(ids, output_attentions=True).attentions

    assert len(seen.calls) == 2
    for (facts, q_QHD, k_KHD, pattern), expected in zip(seen.calls, returned, strict=True):
        blocks = pattern_blocks(q_QHD, k_KHD, np.arange(NUM_TOKENS), facts, range(facts.num_heads))
        found = whole_rows(blocks, (NUM_TOKENS, facts.num_heads, NUM_TOKENS), torch.float32)
        assert torch.equal(pattern, expected[0])
        assert (found.transpose(0, 1) - expected[0]).abs().max() <= TOLERANCE
    windows = [facts.window for facts, *_ in seen.calls]
    assert windows == ([8, None] if "layer_types" in settings else [settings.get("sliding_window")] * 2)
    assert all((facts.soft_cap is not None) == (family == "gemma2") for facts, *_ in seen.calls)
    assert all((facts.sinks is not None) == (family == "gpt_oss") for facts, *_ in seen.calls)


def slow_pattern(q: Tensor, k_KD: Tensor, position: int, head: int, facts: AttentionFacts) -> list[float]:
    """One head's pattern of one query, key by key."""
    scores = []
    for key in range(position + 1):
        score = float(q.double() @ k_KD[key].double()) * facts.scale
        if facts.soft_cap is not None:
            score = facts.soft_cap * math.tanh(score / facts.soft_cap)
        if facts.slopes is not None:
            score -= facts.slopes[head] * (position - key)
        scores.append(score)
    visible = range(position + 1) if facts.window is None else range(max(0, position + 1 - facts.window), position + 1)
    weights = [math.exp(score) if key in visible else 0.0 for key, score in enumerate(scores)]
    total = sum(weights) + (0.0 if facts.sinks is None else math.exp(facts.sinks[head]))
    return [weight / total for weight in weights]


numbers = st.floats(-2, 2, width=32)


@given(
    seed=st.integers(0, 99),
    groups=st.integers(1, 3),
    per_group=st.integers(1, 3),
    window=st.none() | st.integers(1, 9),
    soft_cap=st.none() | st.floats(0.5, 3),
    has_sinks=st.booleans(),
    has_slopes=st.booleans(),
    queries=st.sets(st.integers(0, 11), min_size=1),
    block=st.integers(1, 400),
    data=st.data(),
)
def test_patterns_of_any_attention_equal_a_slow_loop(
    seed: int, groups: int, per_group: int, window: int | None, soft_cap: float | None,
    has_sinks: bool, has_slopes: bool, queries: set[int], block: int, data: st.DataObject,
) -> None:  # fmt: skip
    random, num_heads = torch.Generator().manual_seed(seed), groups * per_group
    each = tuple(torch.randn(num_heads, generator=random).tolist())
    facts = AttentionFacts(
        num_heads=num_heads, num_kv_heads=groups, head_size=4, scale=0.7, window=window, soft_cap=soft_cap,
        sinks=each if has_sinks else None, slopes=each if has_slopes else None,
    )  # fmt: skip
    at = np.array(sorted(queries))
    q_QHD = torch.randn(len(at), num_heads, 4, generator=random)
    k_KHD = torch.randn(12, groups, 4, generator=random)
    heads = data.draw(st.permutations(range(num_heads)))[: data.draw(st.integers(1, num_heads))]
    top = data.draw(st.integers(1, 14))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "BLOCK_SCORES", block)

        found = whole_rows(pattern_blocks(q_QHD, k_KHD, at, facts, heads), (len(at), len(heads), 12), torch.float32)
        best = top_keys(pattern_blocks(q_QHD, k_KHD, at, facts, heads), (len(at), len(heads), top), torch.float32)

    for row, position in enumerate(at.tolist()):
        for place, head in enumerate(heads):
            expected = slow_pattern(q_QHD[row, head], k_KHD[:, head // per_group], position, head, facts)
            expected += [0.0] * (12 - len(expected))
            assert found[row, place].tolist() == pytest.approx(expected, abs=1e-5)
            check_top({name: tensor[row, place] for name, tensor in best.items()}, expected)


def check_top(best: Mapping[str, Tensor], expected: Sequence[float]) -> None:
    """Compare one query's largest keys with its whole row."""
    keys, values = best["keys"].tolist(), best["values"].tolist()
    visible = [value for value in expected if value > 0]
    count = min(len(keys), len(visible))
    assert keys[count:] == [-1] * (len(keys) - count)
    assert values[count:] == [0.0] * (len(keys) - count)
    assert len(set(keys[:count])) == count
    assert values[:count] == pytest.approx([expected[key] for key in keys[:count]], abs=1e-5)
    assert values[:count] == pytest.approx(sorted(visible, reverse=True)[:count], abs=1e-5)
    assert float(best["rest"]) == pytest.approx(sum(visible) - sum(values), abs=1e-5)


@given(
    queries=st.one_of(
        st.sampled_from(("last_prompt", "all_prompt", "all_generated", "all")).map(Named),
        st.builds(Span, st.integers(-9, 9), st.none() | st.integers(-9, 19), st.integers(1, 3)),
        st.sets(st.integers(-9, 19), min_size=1, max_size=4).map(lambda found: Indices.of(tuple(found))),
    )
)
def test_keys_are_at_every_position_up_to_the_last_query(queries: PositionSelector) -> None:
    for selector in (queries, Several((queries, Indices.of([2])))):
        try:
            chosen = positions_of(selector.resolve(9, "q"))
        except RequestError:
            continue

        keys = positions_of(keys_before(selector).resolve(9, "k"))

        assert keys == list(range(len(keys)))
        assert set(chosen) <= set(keys)
        assert not chosen or len(keys) - chosen[-1] <= 3  # a span's stop may lie beyond its last position


def positions_of(selector: PositionSelector) -> list[int]:
    positions = np.arange(30)
    return np.flatnonzero(selector.mask(positions, np.full(30, 9))).tolist()


def test_keys_of_a_message_are_those_of_the_prompt() -> None:
    assert keys_before(Message("user", -1)) == Named("all_prompt")
    assert keys_before(Message("user", -1, include_generated=True)) == Named("all")


FACTS = AttentionFacts(num_heads=4, num_kv_heads=2, head_size=8, scale=0.25, window=6)
WIDTHS = {HookPoint.Q: 4, HookPoint.K: 2}
SHAPES = {
    Site(layer, hook): SiteShape(heads * 8, "bfloat16", "replicated", 8)
    for layer in range(4)
    for hook, heads in WIDTHS.items()
}
SITES = (*(site for site in SHAPES if site.layer in (1, 2)), Site(3, HookPoint.Q))
MODEL = ModelInfo(
    name="m", num_layers=4, hidden_size=16, dtype="bfloat16", sites=SITES, context_length=64, shapes=SHAPES,
    attention={1: FACTS, 2: replace(FACTS, window=None), 3: "it has no keys"},
)  # fmt: skip


class TestContract(ConsumerContract):
    consumer_class = AttentionConsumer
    model = MODEL

    def client_spec(self) -> Any:
        return {"layers": [1, 2], "queries": "all"}

    def bad_specs(self) -> Mapping[str, Any]:
        return {"layers": {"layers": [0]}, "top": {"layers": [1], "top": -1}}

    def check_payload(self, payload: Any, expected: CapturedRequest) -> None:
        patterns = fetch_patterns(payload)
        assert np.array_equal(patterns.queries, expected.positions)
        for layer in (1, 2):
            facts = MODEL.attention[layer]
            assert isinstance(facts, AttentionFacts)
            q_QHD, k_KHD = (expected.rows[Site(layer, hook)].view(-1, heads, 8) for hook, heads in WIDTHS.items())
            rows = [
                [slow_pattern(q_QHD[row, head], k_KHD[:, head // 2], row, head, facts) for head in range(4)]
                for row in range(len(q_QHD))
            ]
            for found, row in zip(patterns[f"{layer}.attention"], rows, strict=True):
                for head in range(4):
                    assert found[head, : len(row[head])].tolist() == pytest.approx(row[head], abs=1e-5)
                    assert not found[head, len(row[head]) :].any()


def spec_context(**params: Any) -> SpecContext:
    return SpecContext(instance_name="attention", model=MODEL, params=params, client_request_id="r")


def consumer(**changes: Any) -> AttentionConsumer:
    return AttentionConsumer({}, ConsumerContext(instance_name="attention", model=replace(MODEL, **changes)))


def test_a_driver_of_several_stages_says_where_patterns_are_computed() -> None:
    context = ConsumerContext(instance_name="files", model=replace(MODEL, attention={}), pp_size=2)
    found = AttentionConsumer({}, context)

    with pytest.raises(ConsumerError, match=r"the driver does not know layer 1.*leave location out"):
        found.begin(request({"layers": [1]}).info)
    found.close(1)


def request(raw: Mapping[str, Any], **shape: Any) -> ExampleRequest:
    spec = AttentionConsumer.validate_client_spec(raw, spec_context())
    return ExampleRequest(spec, model=MODEL, **{"prompt": 9, "output": 5, **shape})


def answer(found: AttentionConsumer, asked: ExampleRequest, steps: Sequence[tuple[int, int]] = ((0, 99),)) -> Any:
    feed = Feed(found)
    try:
        feed.begin(asked)
        for start, stop in steps:
            feed.step({asked: (start, min(stop, asked.final.num_rows))})
        return feed.finish(asked)
    finally:
        found.close(10)


def expected_rows(asked: ExampleRequest, layer: int, queries: Sequence[int], heads: Sequence[int]) -> Tensor:
    facts = MODEL.attention[layer]
    assert isinstance(facts, AttentionFacts)
    q_QHD = asked.rows(Site(layer, HookPoint.Q), np.array(queries)).view(-1, 4, 8)
    k_KHD = asked.rows(Site(layer, HookPoint.K), np.arange(queries[-1] + 1)).view(-1, 2, 8)
    rows = [
        [slow_pattern(q_QHD[row, head], k_KHD[:, head // 2], position, head, facts) for head in heads]
        for row, position in enumerate(queries)
    ]
    return torch.tensor([[each + [0.0] * (queries[-1] + 1 - len(each)) for each in row] for row in rows])


@pytest.mark.parametrize(
    ("queries", "expected"),
    [
        ("last_prompt", [8]),
        ("all_generated", [9, 10, 11, 12]),
        ({"start": 2, "step": 3}, [2, 5, 8, 11]),
        ([0, -2], [0, 7]),
        (["last_prompt", "all_generated"], [8, 9, 10, 11, 12]),
    ],
    ids=str,
)
def test_an_answer_has_the_patterns_of_the_chosen_queries_and_heads(queries: Any, expected: list[int]) -> None:
    asked = request({"layers": [1, 2], "heads": [3, 0], "queries": queries})

    payload = answer(consumer(), asked, [(0, 4), (4, 10), (10, 13), (13, 15)])

    tensors = load(base64.b64decode(payload["data"], validate=True))
    assert (payload["format"], payload["num_bytes"]) == ("safetensors", len(base64.b64decode(payload["data"])))
    assert tensors.keys() == {"queries", "1.attention", "2.attention"}
    assert tensors["queries"].tolist() == expected
    for layer in (1, 2):
        torch.testing.assert_close(
            tensors[f"{layer}.attention"], expected_rows(asked, layer, expected, [3, 0]), atol=1e-5, rtol=0
        )
    assert msgspec.json.decode(msgspec.json.encode(payload)) == payload


def test_top_gives_the_largest_keys_and_the_rest() -> None:
    asked = request({"layers": 2, "queries": "all_prompt", "top": 3, "dtype": "float16"})

    patterns = fetch_patterns(answer(consumer(), asked))

    assert [*patterns] == ["2.attention.keys", "2.attention.rest", "2.attention.values"]
    assert (patterns.heads, patterns.queries.tolist()) == (None, list(range(9)))
    dtypes = {name: patterns[name].dtype for name in patterns}
    assert dtypes == dict(zip(patterns, (torch.int32, torch.float16, torch.float16), strict=True))
    whole = expected_rows(asked, 2, range(9), range(4))
    values, keys = whole.topk(3)
    is_there = values > 0
    assert torch.equal(patterns["2.attention.keys"], torch.where(is_there, keys, -1).int())
    assert (patterns["2.attention.values"].float() - values).abs().max() <= 1e-3
    assert (patterns["2.attention.rest"].float() - (whole.sum(-1) - values.sum(-1))).abs().max() <= 1e-3


@pytest.mark.parametrize("num_keys", [1, 5, 32, 63, 64, 100, 255, 256, 300, 1000, 1033])
@pytest.mark.parametrize("num_nonzero", [0, 3, 40, 2000])
@pytest.mark.parametrize("at_once", [1, 700, attention.RANKED_AT_ONCE])
def test_the_largest_weights_are_those_of_a_sort(
    num_keys: int, num_nonzero: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "RANKED_AT_ONCE", at_once)
    random = np.random.default_rng(num_keys)
    weights = np.exp(random.normal(0, 4, (3, 7, num_keys)).astype(np.float32))
    weights[0] = np.round(weights[0])  # many are equal, and many are 0
    weights[2, :3, num_nonzero:] = 0
    weights[2, 3:, : num_keys - num_nonzero] = 0
    weights[1, 4] = 1e-42  # subnormal
    for count in {1, min(32, num_keys), num_keys}:
        values, places = attention._largest(weights, count)

        order = np.argsort(-weights, axis=-1, kind="stable")[..., :count]
        expected = np.take_along_axis(weights, order, axis=-1)
        np.testing.assert_array_equal(values, expected)
        np.testing.assert_array_equal(places[values > 0], order[values > 0])


@pytest.mark.parametrize("top", [None, 3, 40])
def test_a_row_that_is_not_finite_has_no_numbers_and_leaves_others_alone(top: int | None) -> None:
    sound = request({"layers": [1], "queries": "all", "top": top}, output=300)

    class Broken(ExampleRequest):
        def rows(self, site: Any, positions: Any) -> Tensor:
            rows = super().rows(site, positions)
            if site.hook is HookPoint.Q:
                rows[positions == 290] = torch.nan
            return rows

    whole = fetch_patterns(answer(consumer(), sound, [(0, 999)]))
    found = fetch_patterns(answer(consumer(), Broken(sound.info.spec, model=MODEL, prompt=9, output=300), [(0, 999)]))

    names = ["1.attention"] if top is None else ["1.attention.values", "1.attention.rest"]
    for name in names:
        at = found.queries.tolist().index(290)
        assert found[name][at].isnan().any(dim=-1).all()
        others = torch.arange(len(found.queries)) != at
        torch.testing.assert_close(found[name][others], whole[name][others], atol=1e-6, rtol=0)
    if top is not None:
        assert (found["1.attention.keys"][at] == -1).all()


def test_parts_are_cut_to_the_queries_that_every_layer_has() -> None:
    parts = [(np.array(at), {".rest": torch.tensor(at)}) for at in ([], [1, 3, 5], [6, 7], [8, 9])]

    for queries in ([1, 3, 5, 6, 7, 8, 9], [1, 3, 6], [1, 7, 8, 9], [3, 5], []):
        assert attention._joined(parts, np.array(queries, np.int64))[".rest"].tolist() == queries


def test_work_for_ended_requests_is_done_first_and_each_requests_in_order() -> None:
    work, begin, done = attention._Work(1), Event(), list[str]()
    blocking = work.submit("x", begin.wait, 10)
    owners = {name: object() for name in "abc"}
    asked = {name: work.submit(owners[name[0]], done.append, name) for name in ("a1", "b1", "c1", "a2", "b2", "c2")}
    while not blocking.running():
        pass
    work.hurry(owners["c"])
    work.hurry(owners["b"])
    asked["a1"].cancel()
    begin.set()
    for name in ("b2", "a2"):
        asked[name].result(10)

    assert done == ["c1", "c2", "b1", "b2", "a2"]
    assert isinstance(work.submit("a", int, "no").exception(10), ValueError)
    begin.clear()
    blocked, left = work.submit("a", begin.wait, 10), work.submit("a", int)
    while not blocked.running():
        pass
    work.close()
    assert left.cancelled()
    begin.set()
    assert blocking.result() is blocked.result(10) is True


def test_only_the_chosen_queries_and_the_keys_before_them_are_captured() -> None:
    spec = request({"layers": [1], "queries": [3, 5]}).info.spec

    assert spec.sites == (Site(1, HookPoint.Q), Site(1, HookPoint.K))
    assert positions_of(spec.positions_at(Site(1, HookPoint.Q))) == [3, 5]
    assert positions_of(spec.positions_at(Site(1, HookPoint.K))) == [0, 1, 2, 3, 4, 5]


def test_queries_whose_keys_were_lost_have_no_pattern() -> None:
    asked = request({"layers": [1], "queries": "all"})

    patterns = fetch_patterns(answer(consumer(), asked, [(0, 6), (7, 13)]))

    assert patterns.queries.tolist() == [0, 1, 2, 3, 4, 5]
    torch.testing.assert_close(patterns["1.attention"], expected_rows(asked, 1, range(6), range(4)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("top", [None, 3])
def test_patterns_are_computed_while_the_request_runs(top: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a few queries, in whatever order their keys come, make the answer that one part would be."""
    asked = request({"layers": [1, 2], "heads": [3, 0], "queries": "all_generated", "top": top}, output=9)
    whole = answer(consumer(), asked)
    monkeypatch.setattr(attention, "QUERIES_AT_ONCE", 2)
    computed: list[list[int]] = []
    found = consumer()
    original = found._patterns

    def noting(number: int, wanted: Any, queries: Any, *rows: Any) -> Any:
        computed.append(queries.tolist())
        return original(number, wanted, queries, *rows)

    monkeypatch.setattr(found, "_patterns", noting)

    parts = answer(found, asked, [(0, 9), (9, 10), (10, 12), (12, 13), (13, 16), (16, 99)])

    assert sorted(map(tuple, computed)) == [
        *((9, 10), (9, 10), (11, 12), (11, 12), (13, 14), (13, 14), (15, 16), (15, 16)),
    ]
    expected = fetch_patterns(whole)
    for name in expected:
        torch.testing.assert_close(fetch_patterns(parts)[name], expected[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("top", [None, 3])
def test_bits_do_not_depend_on_how_rows_arrive(top: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two consumers of one request have the same numbers, such as one that answers and one that writes files."""
    monkeypatch.setattr(attention, "QUERIES_AT_ONCE", 3)
    monkeypatch.setattr(attention, "PROMPT_QUERIES_AT_ONCE", 4)
    asked = request({"layers": [1, 2], "queries": ["all"], "top": top}, prompt=11, output=12)

    whole, chunked, single = (
        answer(consumer(), asked, steps)
        for steps in ([(0, 99)], [(0, 5), (5, 6), (6, 13), (13, 99)], [(n, n + 1) for n in range(22)])
    )

    assert whole["data"] == chunked["data"] == single["data"]


@pytest.mark.parametrize("top", [None, 3])
def test_chunks_of_a_stream_get_each_query_once_and_together_the_answer(top: int | None) -> None:
    asked = request({"layers": [1, 2], "queries": "all", "top": top}, output=9)
    asked.info = replace(asked.info, origin=Origin("ipc://hub", "key", is_streamed=True))
    found = consumer()
    feed = Feed(found)
    sent: queue.Queue[tuple[Any, int]] = queue.Queue()
    found.send_part = lambda _, payload, num_rows: sent.put((payload, num_rows))
    feed.begin(asked)
    feed.step({asked: (0, 4)})
    chunks = []
    for start, stop in ((4, 9), (9, 10), (10, 13), (13, 17)):
        feed.step({asked: (start, stop)})
        chunks.append(sent.get(timeout=10))
    whole = fetch_patterns(feed.finish(asked))
    found.close(10)

    assert sent.empty()
    assert [num_rows for _, num_rows in chunks] == [9, 10, 13, 17]
    queries = [fetch_patterns(payload).queries.tolist() for payload, _ in chunks]
    assert queries == [list(range(9)), [9], [10, 11, 12], [13, 14, 15, 16]]
    together = fetch_patterns([payload for payload, _ in reversed(chunks)])
    assert [*together] == [*whole]
    assert together.queries.tolist() == list(range(17))
    for name in whole:
        assert torch.equal(together[name], whole[name])
    with pytest.raises(CaptureFileError, match="a query is there twice"):
        fetch_patterns([payload for payload, _ in (*chunks, chunks[0])])


def test_parts_that_a_shutdown_cancels_are_no_failures(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = request({"layers": [1], "queries": "all"})
    asked.info = replace(asked.info, origin=Origin("ipc://hub", "key", is_streamed=True))
    begin, found = Event(), consumer()
    monkeypatch.setattr(found, "_patterns", lambda *_: begin.wait(10))
    feed = Feed(found)
    feed.begin(asked)
    feed.step({asked: (0, 9)})
    found.close(0)
    begin.set()

    assert caplog.text == ""


def test_parts_of_a_request_that_ended_early_are_no_failures(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = request({"layers": [1], "queries": "all"})
    asked.info = replace(asked.info, origin=Origin("ipc://hub", "key", is_streamed=True))
    begin, tried, found = Event(), Event(), consumer()
    monkeypatch.setattr(found._work, "_threads", ThreadPoolExecutor(1))
    blocking = found._work.submit("another request", begin.wait, 10)
    send = found._send

    def sending(*arguments: Any) -> None:
        try:
            send(*arguments)
        finally:
            tried.set()

    monkeypatch.setattr(found, "_send", sending)
    feed = Feed(found)
    feed.begin(asked)
    feed.step({asked: (0, 9)})
    feed.abandon(asked)
    begin.set()

    assert blocking.result(10)
    assert tried.wait(10)
    found._work._threads.shutdown()
    assert caplog.text == ""


def test_a_prompt_goes_out_in_parts_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a part are as long as its last query's: queries 0 to 3 have four keys each, the next two six."""
    asked = request({"layers": [1, 2], "queries": "all", "heads": [0, 3]}, output=2)
    asked.info = replace(asked.info, origin=Origin("ipc://hub", "key", is_streamed=True))
    monkeypatch.setattr(attention, "PART_BYTES", 2 * 2 * 4 * 4 * 4)  # layers, heads, queries, keys, bytes
    found = consumer()
    feed = Feed(found)
    sent: queue.Queue[tuple[Any, int]] = queue.Queue()
    found.send_part = lambda _, payload, num_rows: sent.put((payload, num_rows))
    feed.begin(asked)
    feed.step({asked: (0, 9)})
    chunks = [sent.get(timeout=10) for _ in range(4)]
    whole = fetch_patterns(feed.finish(asked))
    found.close(10)

    assert sent.empty()
    assert [num_rows for _, num_rows in chunks] == [4, 6, 8, 9]
    parts = [fetch_patterns(payload) for payload, _ in chunks]
    assert [tuple(part["1.attention"].shape) for part in parts] == [(4, 2, 4), (2, 2, 6), (2, 2, 8), (1, 2, 9)]
    together = fetch_patterns([payload for payload, _ in chunks])
    assert torch.equal(together["2.attention"], whole["2.attention"][:9, :, :9])


def test_a_request_that_is_not_streamed_sends_no_parts() -> None:
    found = consumer()
    found.send_part = lambda *_: pytest.fail("no stream takes it")

    answer(found, request({"layers": [1], "queries": "all"}), [(0, 9), (9, 13)])


def test_rows_of_queries_are_given_up_when_their_keys_are_there() -> None:
    rows = attention._Rows(0, 2, torch.float32)
    rows.add(np.arange(3), torch.arange(6.0).view(3, 2))
    rows.add(np.array([3, 5]), torch.full((2, 2), 9.0))

    taken, left = rows.take(4), rows.take(1)

    assert rows.num_whole == 4
    assert (taken[0].tolist(), taken[1][:, 0].tolist()) == ([0, 1, 2, 3], [0, 2, 4, 9])
    assert (left[0].tolist(), len(rows)) == ([5], 0)


def test_tokens_that_were_taken_back_have_no_pattern() -> None:
    parts = [(np.arange(start, start + 2), {attention.WHOLE: torch.ones(2, 1, start + 2)}) for start in (0, 2)]

    queries = attention._common_queries([parts])[:3]

    assert queries.tolist() == [0, 1, 2]
    assert attention._joined(parts, queries)[attention.WHOLE].tolist() == [[[1, 1, 0]], [[1, 1, 0]], [[1, 1, 1]]]


def test_stages_answers_are_read_as_one() -> None:
    first, second = (answer(consumer(), request({"layers": [layer]})) for layer in (1, 2))

    patterns = fetch_patterns([first, second])

    assert [*patterns] == ["1.attention", "2.attention"]
    with pytest.raises(KeyError, match=r"3\.attention: not among these patterns; there are 1\.attention, 2"):
        patterns["3.attention"]


def test_what_is_no_payload_is_refused() -> None:
    for payload in (None, [], {"data": "%"}, {"data": "AAAA", "heads": "all"}):
        with pytest.raises(CaptureFileError, match="expected a payload of the consumer 'attention'"):
            fetch_patterns(payload)


def test_prompts_with_images_are_refused_where_their_tokens_see_later_ones() -> None:
    facts = replace(FACTS, whole_tokens=(7, 8))
    asked = request({"layers": [1]})
    found = consumer(attention={1: facts, 2: FACTS})
    token = int(asked.info.prompt_token_ids[3])

    with pytest.raises(ConsumerError, match=f"tokens of an image \\(id {token}\\) see later ones"):
        Feed(consumer(attention={1: replace(facts, whole_tokens=(token,)), 2: FACTS})).begin(asked)
    assert fetch_patterns(answer(found, asked)).queries.tolist() == [8]


@pytest.mark.parametrize(
    ("raw", "field", "message"),
    [
        ("all", "", "expected an object such as"),
        ({"layers": [1], "hooks": {}}, ".hooks", "has layers, heads, queries, top, dtype"),
        ({}, ".layers", r"required: a layer, a list of layers or \"all\"; there are \[1, 2\]"),
        ({"layers": [1, 3]}, ".layers", r"layer 3: .*needs? both|layer 3: attention patterns need both"),
        ({"layers": [9]}, ".layers", "layer 9 is not an integer from -4 to 3"),
        ({"layers": [1], "heads": [4]}, ".heads", "different heads from 0 to 3, got"),
        ({"layers": [1], "heads": [1, 1]}, ".heads", "different heads from 0 to 3, got"),
        ({"layers": [1], "heads": []}, ".heads", "different heads from 0 to 3, got"),
        ({"layers": [1], "queries": "some"}, ".queries", "unknown selector 'some'"),
        ({"layers": [1], "top": 0}, ".top", "expected a number of keys from 1 to 4096, or null for all, got 0"),
        ({"layers": [1], "top": True}, ".top", "expected a number of keys"),
        ({"layers": [1], "dtype": "bfloat16"}, ".dtype", "expected one of float32, float16, got 'bfloat16'"),
    ],
    ids=str,
)
def test_a_wrong_request_is_refused_with_its_field(raw: Any, field: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        AttentionConsumer.validate_client_spec(raw, spec_context())

    assert caught.value.field == f"capture.attention{field}"


@pytest.mark.parametrize(
    ("raw", "params", "message"),
    [
        ({"layers": [1, 2]}, {"max_bytes": 2 * 2 * 4 * 9 * 4}, None),
        ({"layers": [1, 2]}, {"max_bytes": 2 * 2 * 4 * 9 * 4 - 1}, '576 bytes of patterns; at most 575.*Set "top" to'),
        ({"layers": [1], "dtype": "float16"}, {"max_bytes": 2 * 4 * 9 * 2}, None),
        ({"layers": [1], "top": 2}, {"max_bytes": 2 * 4 * (2 * 8 + 4)}, None),
        ({"layers": [1], "top": 2}, {"max_bytes": 2 * 4 * (2 * 8 + 4) - 1}, "1 queries at up to 9 keys, 4 heads of"),
        ({"layers": [1], "queries": "all", "heads": [1]}, {"max_scores": 2 * 13 * 13}, None),
        ({"layers": [1], "queries": "all", "heads": [1]}, {"max_scores": 2 * 13 * 13 - 1}, "338 scores; at most 337"),
    ],
    ids=str,
)
def test_a_request_that_could_be_too_much_is_refused(raw: Any, params: Any, message: str | None) -> None:
    context = spec_context(**params)
    spec = AttentionConsumer.validate_client_spec(raw, context).with_positions(lambda one: one.resolve(9, "q"))
    lengths = RequestLengths(num_prompt=9, max_tokens=5, num_samples=2)

    if message is None:
        AttentionConsumer.check_lengths(spec, context, lengths)
    else:
        with pytest.raises(RequestError, match=rf"^capture\.attention\.queries: .*{message}"):
            AttentionConsumer.check_lengths(spec, context, lengths)


def test_a_request_that_could_hold_too_much_memory_by_itself_is_refused() -> None:
    lengths = RequestLengths(num_prompt=9, max_tokens=5, num_samples=2)
    queries = MODEL.shape(Site(1, HookPoint.Q)).row_bytes
    held = 2 * (9 * MODEL.shape(Site(1, HookPoint.K)).row_bytes + queries)  # the last query is of position 8
    spec = AttentionConsumer.validate_client_spec({"layers": [1]}, spec_context())

    AttentionConsumer.check_lengths(spec, spec_context(memory_bytes=held), lengths)
    with pytest.raises(
        RequestError,
        match=rf"^capture\.attention\.layers: rows of 9 keys, 1 layers and 2 samples come to {held} bytes; all "
        rf"requests together may hold {held - 1} here \(parameter memory_bytes\)",
    ):
        AttentionConsumer.check_lengths(spec, spec_context(memory_bytes=held - 1), lengths)


def test_a_request_that_finds_no_room_beside_others_says_so_and_leaves_them_alone() -> None:
    """There is room for the rows of one prompt, and not for those of two."""
    first, second, third = (request({"layers": [1]}, request_id=name) for name in "abc")
    num_bytes = 9 * MODEL.shape(Site(1, HookPoint.K)).row_bytes + MODEL.shape(Site(1, HookPoint.Q)).row_bytes
    found = AttentionConsumer({"memory_bytes": 2 * num_bytes - 1}, consumer().context)
    feed = Feed(found)

    feed.begin(first, second)
    feed.step({first: (0, 9), second: (0, 9)})
    with pytest.raises(ConsumerError, match=rf"other requests hold {num_bytes}, and all may hold {2 * num_bytes - 1} "):
        feed.finish(second)
    patterns = fetch_patterns(feed.finish(first))
    feed.begin(first)
    feed.abandon(first)

    torch.testing.assert_close(patterns["1.attention"], expected_rows(first, 1, [8], range(4)), atol=1e-5, rtol=0)
    assert found._in_use.num_bytes == 0
    assert fetch_patterns(answer(found, third)).queries.tolist() == [8]


def test_memory_follows_from_the_machine_unless_it_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_share_of_memory", lambda: 7)

    assert (attention.parse_params({}).memory, attention.parse_params({"memory_bytes": 9}).memory) == (7, 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sites": (Site(1, HookPoint.Q),)}, "needs the hook points q and k of a layer among capture.sites"),
        ({"attention": {}}, "computes patterns beside the worker.*leave location out"),
        (
            {"sites": (Site(3, HookPoint.Q), Site(3, HookPoint.K))},
            "no patterns of layer 3: it has no keys; take its q or k out of capture.sites",
        ),
    ],
)
def test_a_consumer_that_could_not_answer_does_not_open(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        consumer(**changes)


def test_parameters_are_checked() -> None:
    for params in ({"max_bytes": 0}, {"max_scores": 0}, {"memory_bytes": 0}, {"max_bytes": "1"}, {"bytes": 1}):
        with pytest.raises(ConfigError, match=r"^attention: .*(must be at least 1, got 0|bytes)"):
            AttentionConsumer.check_params(params)


def files_params(root: Path, **params: Any) -> dict[str, Any]:
    return {"root": str(root), "reads": {"consumer": "attention", "params": params}}


def stored_request(params: dict[str, Any], raw: Mapping[str, Any], name: str, **shape: Any) -> ExampleRequest:
    context = replace(spec_context(), instance_name="files", params=params, client_request_id=name)
    spec = FilesystemConsumer.validate_client_spec(raw, context)
    return ExampleRequest(spec, name, model=MODEL, **{"prompt": 9, "output": 5, **shape})


FILED: list[dict[str, Any]] = [
    {"layers": [1, 2], "queries": "all"},
    {"layers": [2], "heads": [3, 0], "queries": "all_generated", "top": 3},
    {"layers": [1], "queries": [12], "top": 64},
    {"layers": [1], "queries": {"start": 12, "stop": 40}, "top": 2},
    {"layers": [1, 2], "queries": {"start": 13, "stop": 40}, "top": 2},
    {"layers": [1], "queries": {"start": 13, "stop": 40}},
]
"""What requests ask to have in files."""


def file_patterns(folder: Path, layout: str) -> list[dict[str, Any]]:
    """Run `FILED` as requests ``r0``, ... with tags ``t0``, ..., and return their payloads."""
    params = {**files_params(folder), "layout": layout}
    files = FilesystemConsumer(params, ConsumerContext(instance_name="files", model=MODEL))
    feed = Feed(files)
    stored = [stored_request(params, {**raw, "tag": f"t{n}"}, f"r{n}") for n, raw in enumerate(FILED)]
    feed.begin(*stored)
    for start, stop in ((0, 4), (4, 9), (9, 11), (11, 13)):
        feed.step(dict.fromkeys(stored, (start, stop)))
    payloads = [feed.finish(one) for one in stored]
    files.close(60)
    return payloads


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_hold_what_answers_have(tmp_path: Path, layout: str) -> None:
    payloads = file_patterns(tmp_path, layout)

    captures = {capture.tag: capture for capture in open_captures(tmp_path)}
    for number, raw in enumerate(FILED):
        patterns = fetch_patterns(answer(consumer(), request(raw, request_id=f"r{number}")))
        capture = captures[f"t{number}"]
        assert payloads[number]["num_rows"] == len(patterns.queries)
        assert capture.positions.tolist() == patterns.queries.tolist()
        assert [site.name for site in capture.sites] == [f"{layer}.q" for layer in raw["layers"]]
        found = {
            f"{site.layer}.attention" + ("" if name == "pattern" else f".{name}"): rows
            for site in capture
            for name, rows in capture.outputs(site).items()
        }
        assert {*found} == {*patterns}
        for name, rows in found.items():
            assert rows.dtype == (np.int64 if name.endswith("keys") else np.float32)
            assert rows.shape == patterns[name].shape
            assert np.array_equal(rows, patterns[name].numpy())
        with pytest.raises(CaptureFileError, match="has what 'attention' read of rows, not the rows"):
            stored_rows(capture, next(iter(capture)))


def test_a_data_set_names_the_patterns_of_files(tmp_path: Path) -> None:
    file_patterns(tmp_path, LAYOUTS[0])

    data = open_dataset(tmp_path, tags="t1")
    readout = data.readout("2.q")
    assert readout is not None
    [batch] = data.batches("2.q")
    named = readout.named(batch.numpy())
    assert {name: rows.shape for name, rows in named.items()} == {
        "keys": (4, 2, 3),
        "values": (4, 2, 3),
        "rest": (4, 2),
    }


def test_a_request_for_files_that_fails_leaves_nothing(tmp_path: Path) -> None:
    params = files_params(tmp_path, memory_bytes=1)
    files = FilesystemConsumer(params, ConsumerContext(instance_name="files", model=MODEL))
    feed = Feed(files)
    failed, abandoned = (stored_request(params, {"layers": [1]}, name) for name in "ab")
    feed.begin(failed, abandoned)
    feed.step({failed: (0, 9), abandoned: (0, 4)})
    feed.abandon(abandoned)
    with pytest.raises(ConsumerError, match="all may hold 1 "):
        feed.finish(failed)
    files.close(60)

    assert list(open_captures(tmp_path)) == []


@pytest.mark.parametrize(
    ("raw", "field", "why"),
    [
        ({"layers": [1], "dtype": "float16"}, "dtype", "files hold float32"),
        ({"layers": [0]}, "layers", "need both hook points"),
        ({"layers": [1], "hooks": {}}, "hooks", "has layers, heads, queries, top, dtype"),
        ({"layers": [1], "tag": "a/b"}, "tag", "a/b"),
    ],
)
def test_requests_for_files_are_refused_by_field(tmp_path: Path, raw: Any, field: str, why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        stored_request(files_params(tmp_path), raw, "r")

    assert caught.value.field == f"capture.files.{field}"


def test_files_have_the_limits_of_answers(tmp_path: Path) -> None:
    params = files_params(tmp_path, max_bytes=100)
    context = replace(spec_context(), instance_name="files", params=params)
    spec = FilesystemConsumer.validate_client_spec({"layers": [1], "queries": "all"}, context)
    spec = spec.with_positions(lambda one: one.resolve(9, "q"))

    with pytest.raises(RequestError, match=r"^capture\.files\.queries: .*at most 100 are allowed here"):
        FilesystemConsumer.check_lengths(spec, context, RequestLengths(num_prompt=9, max_tokens=5, num_samples=1))
