"""Attention patterns of served requests are Hugging Face's: of every kind of attention, however the engine computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from headgate.capture.schema.errors import RequestError
from headgate.consumers.attention import Patterns, fetch_patterns
from tests.conftest import start_llm, stop_llm
from tests.engine.hf_reference import own_process
from tests.engine.tiny_models import LAYERS, tiny_model

TOLERANCE = 1e-4
BLOCKS = 14
"""Of 32 tokens: all of `LONG` at once need more, and some are preempted."""
LONG = [[3 + (step * i) % 500 for i in range(40)] for step in (7, 11, 13, 17, 19, 23)]
SHORT = [[9], [3 + (11 * i) % 500 for i in range(17)]]
NUM_OUTPUT = 60
EVERYTHING = {"layers": "all", "queries": "all"}
ALIKE = ("gemma3", "gpt_neox", "granite", "mistral_window")
"""Kinds of attention whose parts the others have."""
KINDS = [
    *("llama, two ranks", "gemma2", "gpt_oss", "bloom"),
    *(pytest.param(family, marks=pytest.mark.extended) for family in ALIKE),
]


class Answer(NamedTuple):
    """One sample: its tokens, its result, and Hugging Face's patterns, ``[heads, tokens, tokens]`` of each layer."""

    prompt: list[int]
    output: list[int]
    result: Any
    expected: list[Tensor]

    @property
    def patterns(self) -> Patterns:
        assert self.result.status == "ok", self.result.error
        return fetch_patterns(self.result.payload)


class Served(NamedTuple):
    """What one engine answered.

    Attributes:
        answers: By the name of what was tried.
        num_preemptions: Of its requests.
        frees_blocks: Its layers have windows, and give up the blocks of keys that are out of sight.
    """

    answers: Mapping[str, list[Answer]]
    num_preemptions: int
    frees_blocks: bool


def expected_patterns(folder: Path, sequences: Sequence[list[int]]) -> list[list[Tensor]]:
    """Hugging Face's eager attention; for a process of its own."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.inference_mode():
        return [
            [each[0] for each in model(torch.tensor([ids]), output_attentions=True).attentions] for ids in sequences
        ]


@pytest.fixture(scope="module")
def references() -> Iterator[Executor]:
    with own_process() as executor:
        yield executor


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, references: Executor) -> Served:
    family, _, ranks = request.param.partition(", ")
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # two workers on a machine with one NUMA node
        return serve(family, references, **(two if ranks else {"in_process": True}))


def serve(family: str, references: Executor, **settings: Any) -> Served:
    """Start an engine, ask it everything, stop it, and ask Hugging Face for the patterns of all tokens."""
    consumers = [{"name": "attention", "params": {"max_bytes": 1 << 22}}]
    llm = start_llm(
        model=tiny_model(family),
        additional_config={"headgate": {"capture": {"consumers": consumers, "sites": {"q": "all", "k": "all"}}}},
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=112,
        max_num_batched_tokens=32,
        num_gpu_blocks_override=BLOCKS,
        disable_log_stats=False,
        **settings,
    )
    try:
        tried = {name: generate(llm, *asked) for name, asked in requests().items()}
        with pytest.raises(
            RequestError, match=r"capture\.attention\.queries: 99 queries .* bytes of patterns; at most"
        ):
            generate(llm, [LONG[0]], EVERYTHING, n=40)
        metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    finally:
        stop_llm(llm)
    samples = [
        (name, prompt, sample)
        for name, (prompts, outputs) in tried.items()
        for prompt, output in zip(prompts, outputs, strict=True)
        for sample in output.outputs
    ]
    sequences = [[*prompt, *sample.token_ids[:-1]] for _, prompt, sample in samples]
    found = references.submit(expected_patterns, tiny_model(family), sequences).result()
    answers: dict[str, list[Answer]] = {}
    for (name, prompt, sample), expected in zip(samples, found, strict=True):
        answer = Answer(prompt, list(sample.token_ids), sample.capture_results["attention"], expected)
        answers.setdefault(name, []).append(answer)
    return Served(answers, metrics["vllm:num_preemptions"], family in ("gemma2", "gemma3", "gpt_oss", "mistral_window"))


def requests() -> dict[str, tuple[list[list[int]], dict[str, Any], int]]:
    """What is tried: prompts, what is asked of them, and how many samples."""
    top = {**EVERYTHING, "top": 5}
    return {
        "one at a time": (SHORT, EVERYTHING, 1),
        "crowded": (LONG, EVERYTHING, 1),
        "cached": (LONG[:1], {"layers": [1], "queries": "last_prompt"}, 1),
        "top": (LONG[:2], top, 1),
        "some": (LONG[:1], {"layers": [0, 2], "heads": [1], "queries": [[3, 39], {"start": 50, "step": 4}]}, 1),
        "samples": (LONG[:1], {"layers": [2], "queries": "all_generated", "dtype": "float16"}, 2),
    }


def generate(llm: Any, prompts: list[list[int]], asked: Any, n: int = 1) -> tuple[list[list[int]], list[Any]]:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0 if n == 1 else 2, ignore_eos=True, detokenize=False, max_tokens=NUM_OUTPUT, n=n
    )
    params.capture = {"attention": asked}
    return prompts, list(llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False))


def check(found: Tensor, expected_HTT: Tensor, queries: Sequence[int], tolerance: float = TOLERANCE) -> None:
    """Compare ``[queries, heads, keys]`` with Hugging Face's patterns of all tokens."""
    expected = expected_HTT[:, queries, : queries[-1] + 1].transpose(0, 1)
    assert found.shape == expected.shape
    assert float((found.float() - expected).abs().max()) <= tolerance


@pytest.mark.parametrize("name", ["one at a time", "crowded"])
def test_patterns_of_all_tokens_equal_hugging_faces(served: Served, name: str) -> None:
    for answer in served.answers[name]:
        patterns, num_rows = answer.patterns, len(answer.prompt) + NUM_OUTPUT - 1

        assert [*patterns] == [f"{layer}.attention" for layer in range(LAYERS)]
        assert patterns.queries.tolist() == list(range(num_rows))
        for layer in range(LAYERS):
            check(patterns[f"{layer}.attention"], answer.expected[layer], range(num_rows))


def test_requests_were_preempted(served: Served) -> None:
    assert served.num_preemptions > 0 or served.frees_blocks


def test_keys_of_a_cached_prefix_are_there(served: Served) -> None:
    [answer] = served.answers["cached"]
    last = len(answer.prompt) - 1

    assert answer.patterns.queries.tolist() == [last]
    check(answer.patterns["1.attention"], answer.expected[1], [last])


def test_the_largest_keys_are_hugging_faces(served: Served) -> None:
    for answer in served.answers["top"]:
        for layer in range(LAYERS):
            keys, values, rest = (answer.patterns[f"{layer}.attention.{name}"] for name in ("keys", "values", "rest"))
            expected = answer.expected[layer].transpose(0, 1)

            assert torch.allclose(values, expected.topk(5).values, atol=TOLERANCE)
            is_there = keys >= 0
            found = torch.where(is_there, expected.gather(2, keys.clamp(min=0).long()), 0.0)
            assert torch.allclose(found, values, atol=TOLERANCE)
            assert torch.allclose(rest, expected.sum(-1) - values.sum(-1), atol=TOLERANCE)


def test_some_queries_of_some_heads_are_those_of_all(served: Served) -> None:
    [answer] = served.answers["some"]
    queries = [3, 39, *range(50, len(answer.prompt) + NUM_OUTPUT - 1, 4)]

    assert (answer.patterns.queries.tolist(), answer.patterns.heads) == (queries, [1])
    assert [*answer.patterns] == ["0.attention", "2.attention"]
    for layer in (0, 2):
        check(answer.patterns[f"{layer}.attention"], answer.expected[layer][1:2], queries)


def test_each_sample_has_its_own_patterns(served: Served) -> None:
    first, second = served.answers["samples"]

    assert first.output != second.output
    for answer in (first, second):
        num_prompt, num_rows = len(answer.prompt), len(answer.prompt) + NUM_OUTPUT - 1
        assert answer.patterns.queries.tolist() == list(range(num_prompt, num_rows))
        check(answer.patterns["2.attention"], answer.expected[2], range(num_prompt, num_rows), tolerance=1e-3)
