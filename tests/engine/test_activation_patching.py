"""A clean run's row in a corrupted run: the same as a Hugging Face hook that puts it there, and nobody else sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering import ops
from headgate.steering.lenses.commands import SKIPPED, fit_layer
from tests.conftest import start_llm, stop_llm
from tests.engine.tiny_models import tiny_model

CLEAN = [3 + (7 * i) % 500 for i in range(40)]
CORRUPT = [*CLEAN[:11], 77, 78, *CLEAN[13:]]
NUM_OUTPUT = 4
SITES = {"post_mlp": "all", "mlp_in": "all"}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "max_num_batched_tokens": 32,
    "enable_prefix_caching": True,
    "block_size": 32,
    "in_process": True,
}
HEADGATE = {
    "headgate": {"capture": {"consumers": [{"name": "memory"}], "sites": SITES}, "steering": {"op_sites": SITES}}
}
CASES = [(site, position) for site in ("0.post_mlp", "1.post_mlp", "1.mlp_in") for position in (11, 20, -1)]
MAX_ERROR = 1e-4


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    llm = start_llm(model=tiny_model("llama"), additional_config=HEADGATE, **ENGINE)
    yield llm
    stop_llm(llm)


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32).eval()


def generate(llm: Any, prompts: list[list[int]], *settings: dict[str, Any]) -> list[Any]:
    from vllm import SamplingParams

    params = []
    for fields in settings:
        one = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=NUM_OUTPUT, logprobs=5)
        for name, value in fields.items():
            setattr(one, name, value)
        params.append(one)
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def told(output: Any) -> tuple[list[int], list[dict[int, float]]]:
    """Tokens, and the logprobs of each step's best ones."""
    (sample,) = output.outputs
    return list(sample.token_ids), [{token: entry.logprob for token, entry in step.items()} for step in sample.logprobs]


@contextmanager
def at(model: Any, site: Site, change: Any) -> Iterator[None]:
    """Let ``change(rows)``, which are ``[tokens, hidden]``, look at a site and return what goes on."""
    layer = model.model.layers[site.layer]
    if site.hook is HookPoint.MLP_IN:
        handle = layer.mlp.register_forward_pre_hook(lambda _, args: (change(args[0][0])[None],))
    else:
        handle = layer.register_forward_hook(lambda _, __, output: change(output[0])[None])
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def expected(model: Any, site: Site, position: int, tokens: list[int]) -> torch.Tensor:
    """Logprobs ``[NUM_OUTPUT, vocabulary]`` of the corrupted run with the clean run's row."""
    rows = []
    with at(model, site, lambda value: rows.append(value.clone()) or value):
        model(torch.tensor([CLEAN]))

    def patch(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value[position % len(CORRUPT)] = rows[0][position % len(CLEAN)]
        return value

    with at(model, site, patch):
        logits = model(torch.tensor([[*CORRUPT, *tokens[:-1]]])).logits[0, len(CORRUPT) - 1 :]
    return logits.log_softmax(-1)


def test_a_clean_row_in_a_corrupted_run_is_what_a_hugging_face_hook_makes_of_it(llm: Any, reference: Any) -> None:
    keep = {"memory": {"hooks": {"post_mlp": "all", "mlp_in": "all"}, "positions": "all_prompt", "keep": "clean"}}
    clean, corrupt = generate(llm, [CLEAN, CORRUPT], {"capture": keep}, {})
    assert clean.capture_results["memory"].payload.kept_as == "clean"

    patched = generate(
        llm,
        [CORRUPT] * (len(CASES) + 1),
        {},
        *({"steering_ops": [ops.patch("clean", position, site)]} for site, position in CASES),
    )

    assert told(patched[0]) == told(corrupt)
    differences = []
    for (name, position), output in zip(CASES, patched[1:], strict=True):
        tokens, steps = told(output)
        logprobs = expected(reference, Site.parse(name), position, tokens)
        for step, wanted in zip(steps, logprobs, strict=True):
            assert max(abs(logprob - wanted[token].item()) for token, logprob in step.items()) <= MAX_ERROR
        differences.append(abs(steps[0][tokens[0]] - told(corrupt)[1][0].get(tokens[0], 0.0)))
    assert min(differences) > 10 * MAX_ERROR  # each patch is seen in the answer


def test_the_same_rows_given_as_vectors_find_the_blocks_of_the_patched_run(llm: Any) -> None:
    keep = {"memory": {"hooks": {"post_mlp": [1]}, "positions": [3], "keep": "other"}}
    (clean,) = generate(llm, [CLEAN], {"capture": keep})
    row = clean.capture_results["memory"].payload["1.post_mlp"][0]

    first, second = (
        generate(llm, [CORRUPT], {"steering_ops": [operation]})[0]
        for operation in (ops.patch("other", 3, "1.post_mlp"), ops.replace(row, "1.post_mlp", positions=[3]))
    )

    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    assert told(first) == told(second)


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ({"request": "nobody", "position": 1}, "request"),
        ({"request": "here", "position": 40}, "position"),
        ({"request": "here", "position": 1, "site": "0.post_mlp"}, "site"),
        ({"request": "here", "position": 1, "sample": 1}, "sample"),
    ],
)
def test_rows_that_are_not_there_are_refused_by_their_field(llm: Any, source: dict[str, Any], field: str) -> None:
    keep = {"memory": {"hooks": {"post_mlp": [1]}, "positions": "all_prompt", "keep": "here"}}
    generate(llm, [CLEAN], {"capture": keep})

    with pytest.raises(RequestError) as refusal:
        generate(llm, [CORRUPT], {"steering_ops": [{"at": "1.post_mlp", "method": "replace", "source": source}]})

    assert refusal.value.field == f"steering_ops[0].source.{field}"


@pytest.mark.parametrize("layer", [0, 1])
def test_a_lens_fitted_by_steered_requests_is_the_jacobian(llm, reference, layer):
    """Each prompt has each direction once, so the mean over prompts is that of autograd, but for curvature."""
    prompts = [CLEAN[:24], CORRUPT[5:29]]

    fitted = torch.from_numpy(fit_layer(llm, prompts, layer, rounds=len(prompts)))

    expected = sum(jacobian(reference, prompt, layer) for prompt in prompts) / len(prompts)
    assert torch.cosine_similarity(fitted.flatten(), expected.flatten(), dim=0) > 0.999
    assert (fitted - expected).norm() < 0.03 * expected.norm()
    assert (expected - torch.eye(len(expected))).norm() > 0.1 * expected.norm()  # the identity would not pass


def jacobian(model: Any, prompt: list[int], layer: int) -> torch.Tensor:
    """The derivative of the sum of the last layer's rows by what is added to each row after `layer`, by row."""
    valid = slice(SKIPPED, len(prompt) - 1)

    def last_rows(added: torch.Tensor) -> torch.Tensor:
        def change(rows: torch.Tensor) -> torch.Tensor:
            return torch.cat([rows[:SKIPPED], rows[valid] + added, rows[valid.stop :]])

        kept = []
        with at(model, Site(layer, HookPoint.POST_MLP), change):
            handle = model.model.norm.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
            model(torch.tensor([prompt]))
            handle.remove()
        return kept[0][0, valid].mean(dim=0)

    width = model.config.hidden_size
    return torch.autograd.functional.jacobian(last_rows, torch.zeros(width)).double()
