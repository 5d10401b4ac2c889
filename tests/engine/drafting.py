"""Requests under speculative decoding, what must be captured of them, and drafts that a test dictates.

Dictated drafts are accepted, rejected, or some of each, with both generations of the model runner. vLLM verifies them
as any others, so a test knows which rows a step computes in vain.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headgate.capture.schema.sites import INNER_HOOKS, HookPoint
from tests.conftest import start_llm, stop_llm
from tests.engine.hf_reference import HFReference, Steering, relative_error
from tests.engine.one_run import force_v2_runner
from tests.engine.tiny_models import tiny_model

CONSUMERS = [{"name": "memory", "params": {"max_bytes": 1 << 30}}]
SITES = {hook.value: "all" for hook in HookPoint if hook not in INNER_HOOKS}
MAX_ERROR = 1e-4
NUM_OUTPUT = 30
NUM_DRAFTS = 3
CONFIG = {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_min": 2, "prompt_lookup_max": 4}


class Asked(NamedTuple):
    """A request: its prompt, which of its drafts are right, and how it is cut short."""

    prompt: tuple[int, ...]
    rights: str
    positions: Any = "all"
    max_tokens: int = NUM_OUTPUT
    stop_at: int | None = None
    """Index in the answer of a token at which it is to stop."""

    def answer(self, greedy: Sequence[int]) -> list[int]:
        """What the request gets of its greedy answer."""
        stop = self.max_tokens if self.stop_at is None else greedy.index(greedy[self.stop_at]) + 1
        return list(greedy[:stop])

    def wanted(self, num_rows: int) -> list[int]:
        """The positions to capture of so many."""
        if isinstance(self.positions, dict):
            return list(range(self.positions["start"], min(self.positions["stop"], num_rows), self.positions["step"]))
        if isinstance(self.positions, list):
            return [position for position in self.positions if position < num_rows]
        num_prompt = len(self.prompt)
        start, stop = {"last_prompt": (num_prompt - 1, num_prompt), "all_generated": (num_prompt, num_rows)}.get(
            self.positions, (0, num_rows)
        )
        return list(range(start, stop))

    def params(self, greedy: Sequence[int], **fields: Any) -> Any:
        """Its ``SamplingParams``, with `fields` of headgate."""
        from vllm import SamplingParams

        stop = [] if self.stop_at is None else [greedy[self.stop_at]]
        made = SamplingParams(
            temperature=0, ignore_eos=True, detokenize=False, max_tokens=self.max_tokens, stop_token_ids=stop
        )
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    def capture(self, sites: Mapping[str, Any] = SITES) -> dict[str, Any]:
        """Its field ``capture``."""
        return {"memory": {"hooks": sites, "positions": self.positions}}


def requests() -> list[Asked]:
    """Prompts of one chunk and of several, with a prefix in common, and answers that end within drafts."""
    rng = random.Random(3)

    def prompt(length: int, begin: tuple[int, ...] = ()) -> tuple[int, ...]:
        return begin + tuple(rng.randrange(3, 500) for _ in range(length))

    shared, where = prompt(64), ("last_prompt", "all_generated", [0, 3, 71, 76, 90])
    return [
        *(Asked(prompt(rng.randrange(1, 90)), rights) for rights in ("all", "none", "some") for _ in range(4)),
        *(Asked(prompt(5, shared), rights) for rights in ("all", "none")),
        *(Asked(prompt(5, shared), rights, positions="all_generated") for rights in ("all", "some")),
        *(Asked(prompt(9), "all", max_tokens=number) for number in (1, 2, 3, 4, 5, 6)),
        *(Asked(prompt(11), "all", stop_at=number) for number in (4, 5, 6, 7)),
        *(Asked(prompt(70), "some", positions=each) for each in where),
        Asked(prompt(33), "some", positions={"start": 30, "stop": 60, "step": 3}),
    ]


def greedy(reference: HFReference, prompt: Sequence[int], steering: Steering | None = None) -> list[int]:
    """The greedy answer of Hugging Face's model. Tiny ones are slower in several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _greedy(reference, prompt, steering)
    finally:
        torch.set_num_threads(threads)


def _greedy(reference: HFReference, prompt: Sequence[int], steering: Steering | None) -> list[int]:
    tokens: list[int] = []
    if steering is not None:
        while len(tokens) < NUM_OUTPUT:
            tokens.append(int(reference.run(prompt, [*tokens, 0], steering).next_tokens[-1]))
        return tokens
    given, cache = torch.tensor([list(prompt)]), None
    with torch.no_grad():
        while len(tokens) < NUM_OUTPUT:
            found = reference.model(given, past_key_values=cache, use_cache=True)
            tokens.append(int(found.logits[0, -1].argmax()))
            given, cache = torch.tensor([tokens[-1:]]), found.past_key_values
    return tokens


def check(
    asked: Asked,
    tokens: list[int],
    captured: Any,
    reference: HFReference,
    steering: Steering | None = None,
    max_error: float = MAX_ERROR,
) -> None:
    """Assert that captured rows are those of a forward over the request's final tokens, each once, and no others."""
    positions = asked.wanted(len(asked.prompt) + len(tokens) - 1)
    assert captured.positions.tolist() == positions, asked
    assert captured.token_ids.tolist() == [(*asked.prompt, *tokens)[position] for position in positions]
    expected = reference.run(asked.prompt, tokens, steering)
    for site in expected.rows:
        error = relative_error(captured.rows[site], expected.rows[site][positions])
        assert error <= max_error, (asked, site, error)


@dataclass
class Drafter:
    """Drafts the tokens that it knows will follow, with as many of them wrong as a test wants.

    Attributes:
        answers: Prompts and their greedy answers; of several with one prompt, the first that a request has so far.
        rights: Of each prompt, which of the drafts are right: ``all``, ``none`` or ``some``. A draft is right or wrong
            whenever it is made, so that two engines answer alike.
    """

    answers: Sequence[tuple[tuple[int, ...], Sequence[int]]]
    rights: Mapping[tuple[int, ...], str]

    def draft(self, known: Sequence[int]) -> list[int]:
        """The drafts after the tokens of a request so far."""
        for prompt, answer in self.answers:
            given = len(known) - len(prompt)
            if tuple(known[: len(prompt)]) == prompt and list(answer[:given]) == list(known[len(prompt) :]):
                rest = [*answer[given:], *[0] * NUM_DRAFTS][:NUM_DRAFTS]
                chance = {"all": 256, "none": 0, "some": 150}[self.rights[prompt]]
                lots = hashlib.sha256(repr((prompt, len(known))).encode()).digest()
                return [token if lot < chance else (token + 1) % 500 for token, lot in zip(rest, lots, strict=False)]
        return [1] * NUM_DRAFTS

    def install(self, runner: Any) -> None:
        """Draft for a model runner that was started with `CONFIG`."""
        if hasattr(runner, "speculator"):
            runner.speculator.propose = self._for_v2(runner)
        elif runner.speculative_config.method == "ngram":
            runner.drafter.propose = self._for_v1
        else:
            runner.propose_draft_token_ids = self._after_model(runner, runner.propose_draft_token_ids)

    def _after_model(self, runner: Any, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Let the draft model run, and take other drafts than its own."""

        def propose(step: Any, sampled: torch.Tensor, *args: Any) -> torch.Tensor:
            found, batch = original(step, sampled, *args), runner.input_batch
            known = [batch.token_ids_cpu[i, : batch.num_tokens_no_spec[i]].tolist() for i in range(len(found))]
            new = [[token for token in tokens if 0 <= token < batch.vocab_size] for tokens in sampled.tolist()]
            drafts = [self.draft(before + after) for before, after in zip(known, new, strict=True)]
            return torch.tensor(drafts, dtype=found.dtype, device=found.device)[:, : found.shape[1]]

        return propose

    def _for_v1(
        self, num_drafts: int, sampled: Sequence[Sequence[int]], num_tokens: Any, token_ids: Any, **_: Any
    ) -> list[list[int]]:
        known = [token_ids[i, : num_tokens[i]].tolist() for i in range(len(sampled))]
        return [self.draft(tokens)[:num_drafts] if new else [] for tokens, new in zip(known, sampled, strict=True)]

    def _for_v2(self, runner: Any) -> Callable[..., torch.Tensor]:
        def propose(input_batch: Any, *_: Any, dummy_run: bool = False, **__: Any) -> torch.Tensor:
            states = runner.req_states
            device = states.total_len.gpu.device
            if dummy_run:
                return torch.zeros(input_batch.num_reqs, NUM_DRAFTS, dtype=torch.int64, device=device)
            slots = input_batch.idx_mapping.tolist()
            known = [states.all_token_ids.gpu[slot, : int(states.total_len.gpu[slot])].tolist() for slot in slots]
            return torch.tensor([self.draft(tokens) for tokens in known], dtype=torch.int64, device=device)

        return propose


def eagle_folder(method: str, model: Path) -> Path:
    """A draft model with random weights for a tiny Llama, in the form of published ones: ``eagle`` or ``eagle3``."""
    from safetensors.torch import load_file, save_file

    folder = model.with_name(f"{model.name}-{method}")
    if (folder / "config.json").exists():
        return folder
    config = json.loads((model / "config.json").read_text())
    hidden, weights = config["hidden_size"], load_file(model / "model.safetensors")
    name, inputs = ("midlayer", 3) if method == "eagle3" else ("layers.0", 2)
    drawn = torch.Generator().manual_seed(0)
    found = {"fc.weight": torch.randn(hidden, inputs * hidden, generator=drawn) * 0.1}
    for key, value in weights.items():
        if key.startswith("model.layers.0."):
            part = key.removeprefix("model.layers.0.")
            if method == "eagle" and part.startswith("input_layernorm"):
                continue
            doubles = method == "eagle3" and part.split(".")[1] in ("q_proj", "k_proj", "v_proj")
            shape = (value.shape[0], 2 * hidden) if doubles else value.shape
            found[f"{name}.{part}"] = value if "norm" in part else torch.randn(shape, generator=drawn) * 0.1
    if method == "eagle3":
        found |= {"norm.weight": torch.ones(hidden), "midlayer.hidden_norm.weight": torch.ones(hidden)}
        found["lm_head.weight"] = torch.randn(config["vocab_size"], hidden, generator=drawn) * 0.1
    folder.mkdir(exist_ok=True)
    save_file({key: value.contiguous() for key, value in found.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    return folder


def mtp_folder(model: Path) -> Path:
    """A tiny DeepSeek with a layer of random weights that predicts the token after the next."""
    from safetensors.torch import load_file, save_file

    folder = model.with_name(f"{model.name}-mtp")
    if (folder / "config.json").exists():
        return folder
    config, weights = json.loads((model / "config.json").read_text()), load_file(model / "model.safetensors")
    hidden, number, drawn = config["hidden_size"], config["num_hidden_layers"], torch.Generator().manual_seed(0)
    last, name = f"model.layers.{number - 1}.", f"model.layers.{number}."
    for key in [each for each in weights if each.startswith(last)]:
        weights[name + key.removeprefix(last)] = weights[key].clone()
    weights |= {f"{name}{norm}.weight": torch.ones(hidden) for norm in ("enorm", "hnorm", "shared_head.norm")}
    weights[f"{name}eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=drawn) * 0.1
    weights[f"{name}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{name}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    return folder


def start(**settings: Any) -> Any:
    """Start an engine with few KV blocks, so that requests are preempted, and steps of few tokens."""
    return start_llm(
        **{
            "model": tiny_model("llama"),
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "max_model_len": 160,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 8,
            "num_gpu_blocks_override": 8,
            "enable_prefix_caching": True,
            "in_process": True,
            "disable_log_stats": False,
            "speculative_config": CONFIG,
            **settings,
        }
    )


def draft(llm: Any, answers: Mapping[tuple[int, ...], Sequence[int]], asked: Sequence[Asked]) -> Any:
    """Dictate the drafts of an engine in this process; returns its model runner."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    Drafter(list(answers.items()), {each.prompt: each.rights for each in asked}).install(runner)
    return runner


def generate(llm: Any, asked: Sequence[Asked], params: Sequence[Any]) -> list[tuple[list[int], Any]]:
    """The tokens of each request, and its captured rows."""
    prompts = [{"prompt_token_ids": list(each.prompt)} for each in asked]
    found = []
    for output in llm.generate(prompts, list(params), use_tqdm=False):
        result = output.capture_results["memory"]
        assert result.status == "ok", result.error
        found.append((list(output.outputs[0].token_ids), result.payload))
    return found


def counts(llm: Any) -> dict[str, int]:
    """The engine's counters, without vLLM's prefix."""
    return {metric.name.removeprefix("vllm:"): metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}


def main() -> None:
    """Serve some requests by the V2 runner, whose kernels Triton interprets, and check their rows."""
    force_v2_runner()
    reference = HFReference(tiny_model("llama"), "llama")
    asked = [each for each in requests() if len(each.prompt) < 40][:6]
    answers = {each.prompt: greedy(reference, each.prompt) for each in asked}
    llm = start(additional_config={"headgate": {"capture": {"consumers": CONSUMERS, "sites": SITES}}}, max_num_seqs=4)
    runner = draft(llm, answers, asked)
    params = [each.params(answers[each.prompt], capture=each.capture()) for each in asked]
    for each, (tokens, captured) in zip(asked, generate(llm, asked, params), strict=True):
        assert tokens == each.answer(answers[each.prompt]), each
        check(each, tokens, captured, reference)
    print(f"RAN {type(runner).__module__}")
    stop_llm(llm)


if __name__ == "__main__":
    main()
