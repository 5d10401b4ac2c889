"""What every hook point holds, by Hugging Face's own code and forward hooks: the definition for capture and steering.

`Anatomy` says, per family, which of Hugging Face's modules holds what; nothing of headgate is asked. The rows are
checked against each other (the stream is the sum of its branches, and of the vectors that were added to it) and
against ``output_hidden_states`` before they are handed out, so a wrong entry in the table fails here and not in a
comparison.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headgate.capture.schema.sites import FINAL_NORM_SITE, INNER_HOOKS, HookPoint, Site
from tests.engine.tiny_models import has_vision
from tests.fakes.forks import ADDRESS, ForkedCalls
from tests.fakes.programs import apply

IDENTITY_TOLERANCE = 1e-5
"""Of the checks within the reference, relative to the largest value: two fp32 sums in another order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Anatomy:
    """Where Hugging Face computes the hook points; paths are below the model and below the layer.

    Attributes:
        layers: The decoder layers.
        final_norm: The last norm.
        attn: Module whose input is attention's input.
        out_proj: Module whose input is what the heads give; None where vLLM replaces the forward of Hugging Face's
            attention.
        attn_out: Module whose output is the attention branch.
        mlp_in: Module whose input is the MLP's input.
        mlp_out: Module whose output is the MLP branch.
        mid: Module whose input is the stream after the attention branch; None with parallel attention.
        multiplier: Attribute of the layer that both branches are multiplied by.
        mixer: Module in place of attention in layers that have none.
    """

    layers: str = "model.layers"
    final_norm: str = "model.norm"
    attn: str = "self_attn"
    out_proj: str | None = "self_attn.o_proj"
    attn_out: str = "self_attn"
    mlp_in: str = "mlp"
    mlp_out: str = "mlp"
    mid: str | None = "post_attention_layernorm"
    multiplier: str | None = None
    mixer: str | None = None

    @property
    def missing(self) -> set[HookPoint]:
        """Hook points that the family lacks."""
        places = {HookPoint.POST_ATTN: self.mid, HookPoint.HOOK_Z: self.out_proj}
        return {hook for hook, place in places.items() if place is None}


PRE_NORM = Anatomy()
SANDWICH = Anatomy(
    attn_out="post_attention_layernorm",
    mlp_out="post_feedforward_layernorm",
    mid="pre_feedforward_layernorm",
)
NEOX = Anatomy(
    layers="gpt_neox.layers",
    final_norm="gpt_neox.final_layer_norm",
    attn="attention",
    out_proj="attention.dense",
    attn_out="attention",
)

ANATOMIES: Mapping[str, Anatomy] = {
    "llama": PRE_NORM,
    "mistral": PRE_NORM,
    "qwen2": PRE_NORM,
    "qwen3": PRE_NORM,
    "qwen3_one_kv": PRE_NORM,
    "gemma": PRE_NORM,
    "mixtral": PRE_NORM,
    "mixtral_all": PRE_NORM,
    "qwen2_moe": PRE_NORM,
    "deepseek_v3": replace(PRE_NORM, out_proj=None),
    "deepseek_v3_all": replace(PRE_NORM, out_proj=None),
    "qwen3_moe": PRE_NORM,
    "qwen3_moe_all": PRE_NORM,
    "gemma2": SANDWICH,
    "gemma3": SANDWICH,
    "granite": Anatomy(multiplier="residual_multiplier"),
    "olmo2": Anatomy(
        out_proj=None, attn_out="post_attention_layernorm", mlp_out="post_feedforward_layernorm", mid="mlp"
    ),
    "gpt_neox": replace(NEOX, mid=None),
    "gpt_neox_sequential": NEOX,
    "phi": Anatomy(final_norm="model.final_layernorm", out_proj=None, mid=None),
    "opt": Anatomy(
        layers="model.decoder.layers",
        final_norm="model.decoder.final_layer_norm",
        out_proj="self_attn.out_proj",
        mlp_in="fc1",
        mlp_out="fc2",
        mid="final_layer_norm",
    ),
    "gpt_oss": PRE_NORM,
    "lfm2": Anatomy(
        final_norm="model.embedding_norm",
        out_proj=None,
        mlp_in="feed_forward",
        mlp_out="feed_forward",
        mid="ffn_norm",
        mixer="conv",
    ),
    "granitemoehybrid": Anatomy(
        out_proj=None, mlp_in="shared_mlp", mlp_out="shared_mlp", multiplier="residual_multiplier", mixer="mamba"
    ),
    "idefics3": Anatomy(layers="model.text_model.layers", final_norm="model.text_model.norm"),
    "gpt2": Anatomy(
        layers="transformer.h",
        final_norm="transformer.ln_f",
        attn="attn",
        out_proj="attn.c_proj",
        attn_out="attn",
        mid="ln_2",
    ),
}


@dataclass(frozen=True, slots=True)
class Steering:
    """Vectors to add, ``[hidden]`` per site, to the value of their hook point.

    A vector at ``pre_attn``, ``post_attn`` and ``post_mlp`` is added to the stream, one at ``attn_out`` and ``mlp_out``
    to the branch that is added to the stream, one at ``attn_in``, ``hook_z`` and ``mlp_in`` to what attention, its
    output projection or the MLP alone reads, and one at ``final_norm`` to what the LM head reads.

    Attributes:
        prefill: At the positions of the prompt.
        decode: At the positions after it.
        operations: In their order, each at a site and for ``"prefill"``, ``"decode"`` or ``"both"``: a document as
            `tests.fakes.programs.apply` takes it, with ``positions`` if it acts on some alone. Replacements act on the
            pristine row, others behind the vectors.
    """

    prefill: Mapping[Site, Tensor] = field(default_factory=dict)
    decode: Mapping[Site, Tensor] = field(default_factory=dict)
    operations: Sequence[tuple[str, Site, Mapping[str, Any]]] = ()

    def by_position(self, num_prompt: int, num_tokens: int, dtype: torch.dtype) -> dict[Site, Tensor]:
        """``[num_tokens, hidden]`` per site, rounded to `dtype`: zeros where nothing is added."""
        found: dict[Site, Tensor] = {}
        for vectors, positions in ((self.prefill, slice(num_prompt)), (self.decode, slice(num_prompt, None))):
            for site, vector in vectors.items():
                found.setdefault(site, torch.zeros(num_tokens, len(vector), dtype=dtype))[positions] = vector.to(dtype)
        return found


@dataclass(frozen=True, slots=True)
class Reference:
    """One teacher-forced pass.

    Attributes:
        rows: ``[num_tokens, hidden]`` per site, in the model's dtype: before a vector is added there, and after those
            of earlier sites were.
        logits: ``[num_tokens, vocabulary]``: what follows each position.
    """

    rows: dict[Site, Tensor]
    logits: Tensor

    @property
    def next_tokens(self) -> Tensor:
        """int64 ``[num_tokens]``: the most likely token after each position."""
        return self.logits.argmax(-1)


class HFReference:
    """Hugging Face's model of a folder, with hooks at every hook point its family has."""

    def __init__(self, folder: Path, family: str, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        self.anatomy = ANATOMIES[family]
        auto = AutoModelForImageTextToText if has_vision(AutoConfig.from_pretrained(folder)) else AutoModelForCausalLM
        self.model = auto.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
        self.num_layers = len(self.model.get_submodule(self.anatomy.layers))

    @property
    def hooks(self) -> frozenset[HookPoint]:
        """Hook points that this family has."""
        return frozenset(HookPoint) - INNER_HOOKS - self.anatomy.missing

    @torch.no_grad()
    def run(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        steering: Steering | None = None,
        images: Mapping[str, Tensor] | None = None,
    ) -> Reference:
        """Rows and logits of ``prompt + output[:-1]``: the last sampled token is never forwarded.

        Args:
            prompt: Tokens, placeholders of images among them.
            output: Generated tokens.
            steering: What is added.
            images: Further arguments of the model, with the pixels of the images in the prompt.

        Raises:
            AssertionError: If the rows contradict each other or ``output_hidden_states``.
        """
        token_ids = torch.tensor([[*prompt, *output[:-1]]], device=self.model.device)
        steering = steering or Steering()
        vectors = steering.by_position(len(prompt), token_ids.shape[1], self.model.dtype)
        taps = _Taps(vectors, steering.operations, len(prompt))
        with self._hooked(taps):
            result = self.model(token_ids, output_hidden_states=True, use_cache=False, **(images or {}))
        assert set(taps.vectors) <= set(taps.rows), f"no such sites: {set(taps.vectors) - set(taps.rows)}"
        self._check(taps)
        if not taps.vectors:
            self._check_hidden_states(taps.rows, result.hidden_states)
        return Reference(taps.rows, result.logits[0])

    @torch.no_grad()
    def read(self, rows: Tensor, token_ids: Sequence[int]) -> Tensor:
        """The model's logits ``[n, vocabulary]`` if the last layer gave `rows` ``[n, hidden]`` at those tokens."""

        def replaced(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
            value = output[0] if isinstance(output, tuple) else output
            found = rows.to(value.dtype).view_as(value)
            return (found, *output[1:]) if isinstance(output, tuple) else found

        last = self.model.get_submodule(self.anatomy.layers)[self.num_layers - 1]
        handle = last.register_forward_hook(replaced)
        try:
            logits: Tensor = self.model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        finally:
            handle.remove()
        return logits

    @contextmanager
    def _hooked(self, taps: _Taps) -> Iterator[None]:
        anatomy = self.anatomy
        with ExitStack() as stack:
            for index, layer in enumerate(self.model.get_submodule(anatomy.layers)):
                scale = getattr(layer, anatomy.multiplier) if anatomy.multiplier else 1.0
                mixer = getattr(layer, anatomy.mixer or "", None)
                if mixer is not None:
                    setattr(layer, anatomy.attn, mixer)
                    taps.at_input(stack, mixer, Site(index, HookPoint.MIXER_IN))
                    taps.at_output(stack, mixer, Site(index, HookPoint.MIXER_OUT))
                taps.at_input(stack, layer, Site(index, HookPoint.PRE_ATTN))
                taps.at_output(stack, layer, Site(index, HookPoint.POST_MLP))
                if anatomy.mid is not None:
                    mid = layer.get_submodule(anatomy.mid)
                    taps.at_input(stack, mid, Site(index, HookPoint.POST_ATTN), is_stream=True)
                for hook, path in ((HookPoint.ATTN_OUT, anatomy.attn_out), (HookPoint.MLP_OUT, anatomy.mlp_out)):
                    taps.at_output(stack, layer.get_submodule(path), Site(index, hook), scale)
                read = {
                    HookPoint.ATTN_IN: anatomy.attn,
                    HookPoint.HOOK_Z: anatomy.out_proj,
                    HookPoint.MLP_IN: anatomy.mlp_in,
                }
                for hook, module in read.items():
                    if module is not None:
                        taps.at_input(stack, layer.get_submodule(module), Site(index, hook))
            taps.at_output(stack, self.model.get_submodule(anatomy.final_norm), FINAL_NORM_SITE)
            yield

    def _check(self, taps: _Taps) -> None:
        """The identities of the hook points: the stream is the sum of its branches and of what was added."""
        tolerance = IDENTITY_TOLERANCE if self.model.dtype == torch.float32 else 4 * torch.finfo(self.model.dtype).eps
        for index in range(self.num_layers):
            row = {hook: taps.steered(Site(index, hook)) for hook in self.hooks - {HookPoint.FINAL_NORM}}
            mid = row[HookPoint.PRE_ATTN] + row[HookPoint.ATTN_OUT]
            if self.anatomy.mid is not None:
                pristine = taps.rows[Site(index, HookPoint.POST_ATTN)]
                _assert_same(mid, pristine, tolerance, f"{index}: stream + attention branch")
                mid = row[HookPoint.POST_ATTN]
            pristine = taps.rows[Site(index, HookPoint.POST_MLP)]
            _assert_same(mid + row[HookPoint.MLP_OUT], pristine, tolerance, f"{index}: stream + MLP branch")
            if index + 1 < self.num_layers:
                following = taps.rows[Site(index + 1, HookPoint.PRE_ATTN)]
                _assert_same(row[HookPoint.POST_MLP], following, 0.0, f"{index}: layer output, next layer's input")

    def _check_hidden_states(self, rows: Mapping[Site, Tensor], hidden_states: Sequence[Tensor]) -> None:
        for index in range(self.num_layers):
            _assert_same(hidden_states[index][0], rows[Site(index, HookPoint.PRE_ATTN)], 0.0, f"hidden_states[{index}]")
        _assert_same(hidden_states[-1][0], rows[FINAL_NORM_SITE], 0.0, "hidden_states[-1]")


class _Taps:
    """Hooks of one pass: they take the row of each site as it comes, then add the site's vectors.

    Attributes:
        rows: ``[num_tokens, hidden]`` per site, before the addition.
        vectors: What is added, of the same shape; at sites with operations, from when their rows are known.
    """

    def __init__(
        self,
        vectors: Mapping[Site, Tensor],
        operations: Sequence[tuple[str, Site, Mapping[str, Any]]],
        num_prompt: int,
    ) -> None:
        self.vectors = dict(vectors)
        self.rows: dict[Site, Tensor] = {}
        self._operations = operations
        self._num_prompt = num_prompt
        self._written: dict[Site, Tensor] = {}
        """By how much transcoders that have read their rows move those of later sites."""

    def steered(self, site: Site) -> Tensor:
        """A site's row after the addition."""
        return self.rows[site] + self.vectors[site] if site in self.vectors else self.rows[site]

    def at_input(self, stack: ExitStack, module: nn.Module, site: Site, *, is_stream: bool = False) -> None:
        """Take the input of `module`; with `is_stream`, whoever else holds this tensor sees the vectors too."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            value = args[0] if args else kwargs["hidden_states"]
            self._take(site, value)
            if site not in self.vectors:
                return None
            if is_stream:  # the layer keeps the tensor itself, and adds the MLP's branch to it
                value.add_(self.vectors[site].view_as(value))
                return None
            steered = value + self.vectors[site].view_as(value)
            return ((steered, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": steered})

        stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def at_output(self, stack: ExitStack, module: nn.Module, site: Site, scale: float = 1.0) -> None:
        """Take the output of `module`, which the layer multiplies by `scale`."""

        def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
            value = output[0] if isinstance(output, tuple) else output
            self._take(site, value if scale == 1.0 else value * scale)
            if site not in self.vectors:
                return None
            steered = value + self.vectors[site].view_as(value) / scale
            return (steered, *output[1:]) if isinstance(output, tuple) else steered

        stack.callback(module.register_forward_hook(hook).remove)

    def _take(self, site: Site, value: Tensor) -> None:
        assert site not in self.rows, f"{site.name} was computed twice in one pass"
        self.rows[site] = value.detach().reshape(-1, value.shape[-1]).clone()
        here = [(phase, document) for phase, at, document in self._operations if at == site]
        acting = [(phase, document) for phase, document in here if document["method"] != "transcoder"]
        if acting:
            self.vectors[site] = self._moved(self.rows[site], acting, self.vectors.get(site))
        for phase, document in here:
            if document["method"] == "transcoder":
                self._transcode(self.steered(site), phase, document)
        if site in self._written:
            self.vectors[site] = self._written[site] + self.vectors.get(site, torch.zeros_like(self.rows[site]))

    def _transcode(self, rows: Tensor, phase: str, document: Mapping[str, Any]) -> None:
        """Note what changed activations of a transcoder, on rows that it reads, write at its later sites."""
        in_prompt = np.arange(len(rows)) < self._num_prompt
        acts = {"prefill": in_prompt, "decode": ~in_prompt, "both": np.ones_like(in_prompt)}[phase]
        for site, moved in document["coder"].written(rows.double().numpy(), document["edits"]).items():
            written = torch.from_numpy(moved * acts[:, None]).to(rows.dtype)
            self._written[site] = self._written[site] + written if site in self._written else written

    def _moved(self, rows: Tensor, acting: Sequence[tuple[str, Mapping[str, Any]]], vectors: Tensor | None) -> Tensor:
        """By how much operations and vectors move each row."""
        moved = rows.double().numpy().copy()
        acting = sorted(acting, key=lambda one: (one[1]["method"] != "replace", one[1]["method"] == "features"))
        num_replacements = sum(document["method"] == "replace" for _, document in acting)
        for position, row in enumerate(moved):
            phase = "prefill" if position < self._num_prompt else "decode"
            edits = np.zeros_like(row)  # features act at once, on the row as the operations left it
            for index, (when, document) in enumerate([*acting, ("both", {})]):
                if index == num_replacements and vectors is not None:
                    row = row + vectors[position].double().numpy()
                if document and when in (phase, "both") and position in document.get("positions", (position,)):
                    after = apply(document, row)
                    if document["method"] == "features":
                        edits += after - row
                    else:
                        row = after
            moved[position] = row + edits
        return torch.from_numpy(moved - rows.double().numpy()).to(rows.dtype)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """``max |got - expected| / max |expected|``, in fp64."""
    got, expected = got.double(), expected.double()
    return float((got - expected).abs().max() / expected.abs().max())


def row_cosines(got: Tensor, expected: Tensor) -> Tensor:
    """Cosine between rows of ``[num_rows, hidden]``, fp64 ``[num_rows]``."""
    return torch.nn.functional.cosine_similarity(got.double(), expected.double(), dim=-1)


def _assert_same(got: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    error = relative_error(got, expected)
    assert error <= tolerance, f"{what}: relative error {error:.2g}, at most {tolerance:.2g} expected"


Request = tuple[Sequence[int], Sequence[int], Steering]
"""A prompt, what an engine generated, and what it was steered with."""


def reference_rows(folder: Path, family: str, dtype: torch.dtype, requests: Sequence[Request]) -> list[Reference]:
    """One reference for each of `requests`; for a process of its own, see `own_process`."""
    model = HFReference(folder, family, dtype)
    return [model.run(*request) for request in requests]


def reference_logits(
    folder: Path, family: str, dtype: torch.dtype, requests: Sequence[tuple[Sequence[int], Sequence[Tensor]]]
) -> list[list[Tensor]]:
    """What `HFReference.read` makes of several rows of each request, which come with its tokens."""
    model = HFReference(folder, family, dtype)
    return [[model.read(rows, tokens) for rows in several] for tokens, several in requests]


LENS_ERROR = 1e-4


def check_lens(read: Mapping[str, Any], logits: Tensor, top: int, named: list[int]) -> None:
    """Compare what a lens read in rows of one layer with logits ``[rows, vocabulary]``."""
    expected = logits.log_softmax(-1)
    ids, logprobs = torch.tensor(read["ids"]), torch.tensor(read["logprobs"])
    best = expected.topk(top)
    assert torch.allclose(logprobs, best.values, rtol=0, atol=LENS_ERROR)
    assert torch.allclose(expected.gather(1, ids), best.values, rtol=0, atol=LENS_ERROR), "ties alone may differ"
    given = expected[:, named]
    assert torch.allclose(torch.tensor(read["token_logprobs"]).view_as(given), given, rtol=0, atol=LENS_ERROR)
    for column, token in enumerate(named):
        ranks = torch.tensor(read["token_ranks"])[:, column]
        least = (expected > expected[:, token, None] + LENS_ERROR).sum(1)
        most = (expected > expected[:, token, None] - LENS_ERROR).sum(1)
        assert ((least <= ranks) & (ranks <= most)).all()


@contextmanager
def own_process() -> Iterator[Executor]:
    """A process for `reference_rows`: an engine in this one may have decorated Hugging Face's classes for vLLM."""
    if ADDRESS in os.environ:
        with ForkedCalls() as forked:
            yield forked
        return
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as executor:
        yield executor
