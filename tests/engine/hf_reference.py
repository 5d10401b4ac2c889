"""What every hook point holds, by Hugging Face's own code and forward hooks: the definition capture is tested against.

`Anatomy` says, per family, which of Hugging Face's modules holds what; nothing of headgate is asked. The rows are
checked against each other (the stream is the sum of its branches) and against ``output_hidden_states`` before they
are handed out, so a wrong entry in the table fails here and not in a comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headgate.capture.sites import FINAL_NORM_SITE, HookPoint, Site

IDENTITY_TOLERANCE = 1e-5
"""Of the checks within the reference, relative to the largest value: two fp32 sums in another order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Anatomy:
    """Where Hugging Face computes the hook points; paths are below the model and below the layer.

    Attributes:
        layers: The decoder layers.
        final_norm: The last norm.
        attn_out: Module whose output is the attention branch.
        mlp_in: Module whose input is the MLP's input.
        mlp_out: Module whose output is the MLP branch.
        mid: Module whose input is the stream after the attention branch; None with parallel attention.
        multiplier: Attribute of the layer that both branches are multiplied by.
    """

    layers: str = "model.layers"
    final_norm: str = "model.norm"
    attn_out: str = "self_attn"
    mlp_in: str = "mlp"
    mlp_out: str = "mlp"
    mid: str | None = "post_attention_layernorm"
    multiplier: str | None = None


PRE_NORM = Anatomy()
SANDWICH = Anatomy(
    attn_out="post_attention_layernorm", mlp_out="post_feedforward_layernorm", mid="pre_feedforward_layernorm"
)
NEOX = Anatomy(layers="gpt_neox.layers", final_norm="gpt_neox.final_layer_norm", attn_out="attention")

ANATOMIES: Mapping[str, Anatomy] = {
    "llama": PRE_NORM,
    "mistral": PRE_NORM,
    "qwen2": PRE_NORM,
    "qwen3": PRE_NORM,
    "gemma": PRE_NORM,
    "mixtral": PRE_NORM,
    "mixtral_all": PRE_NORM,
    "qwen3_moe": PRE_NORM,
    "qwen3_moe_all": PRE_NORM,
    "gemma2": SANDWICH,
    "gemma3": SANDWICH,
    "granite": Anatomy(multiplier="residual_multiplier"),
    "olmo2": Anatomy(attn_out="post_attention_layernorm", mlp_out="post_feedforward_layernorm", mid="mlp"),
    "gpt_neox": replace(NEOX, mid=None),
    "gpt_neox_sequential": NEOX,
    "phi": Anatomy(final_norm="model.final_layernorm", mid=None),
    "opt": Anatomy(
        layers="model.decoder.layers",
        final_norm="model.decoder.final_layer_norm",
        mlp_in="fc1",
        mlp_out="fc2",
        mid="final_layer_norm",
    ),
    "gpt2": Anatomy(layers="transformer.h", final_norm="transformer.ln_f", attn_out="attn", mid="ln_2"),
}


@dataclass(frozen=True, slots=True)
class Reference:
    """One teacher-forced pass.

    Attributes:
        rows: ``[num_tokens, hidden]`` per site, in the model's dtype.
        next_tokens: int64 ``[num_tokens]``: the most likely token after each position.
    """

    rows: dict[Site, Tensor]
    next_tokens: Tensor


class HFReference:
    """Hugging Face's model of a folder, with hooks at every hook point its family has."""

    def __init__(self, folder: Path, family: str, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForCausalLM

        self.anatomy = ANATOMIES[family]
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
        self.num_layers = len(self.model.get_submodule(self.anatomy.layers))

    @property
    def hooks(self) -> frozenset[HookPoint]:
        """Hook points that this family has."""
        return frozenset(HookPoint) - ({HookPoint.POST_ATTN} if self.anatomy.mid is None else set())

    @torch.no_grad()
    def run(self, prompt: Sequence[int], output: Sequence[int]) -> Reference:
        """Rows of ``prompt + output[:-1]``: the last sampled token is never forwarded.

        Raises:
            AssertionError: If the rows contradict each other or ``output_hidden_states``.
        """
        token_ids = torch.tensor([[*prompt, *output[:-1]]])
        rows: dict[Site, Tensor] = {}
        with self._hooked(rows):
            result = self.model(token_ids, output_hidden_states=True, use_cache=False)
        self._check(rows, result.hidden_states)
        return Reference(rows, result.logits[0].argmax(-1))

    @contextmanager
    def _hooked(self, rows: dict[Site, Tensor]) -> Iterator[None]:
        anatomy = self.anatomy
        with ExitStack() as stack:
            for index, layer in enumerate(self.model.get_submodule(anatomy.layers)):
                scale = getattr(layer, anatomy.multiplier) if anatomy.multiplier else 1.0
                self._at_input(stack, layer, rows, Site(index, HookPoint.PRE_ATTN))
                self._at_output(stack, layer, rows, Site(index, HookPoint.POST_MLP))
                if anatomy.mid is not None:
                    self._at_input(stack, layer.get_submodule(anatomy.mid), rows, Site(index, HookPoint.POST_ATTN))
                for hook, path in ((HookPoint.ATTN_OUT, anatomy.attn_out), (HookPoint.MLP_OUT, anatomy.mlp_out)):
                    self._at_output(stack, layer.get_submodule(path), rows, Site(index, hook), scale)
                self._at_input(stack, layer.get_submodule(anatomy.mlp_in), rows, Site(index, HookPoint.MLP_IN))
            self._at_output(stack, self.model.get_submodule(anatomy.final_norm), rows, FINAL_NORM_SITE)
            yield

    @staticmethod
    def _at_input(stack: ExitStack, module: nn.Module, rows: dict[Site, Tensor], site: Site) -> None:
        def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            _put(rows, site, args[0] if args else kwargs["hidden_states"])

        stack.callback(module.register_forward_pre_hook(take, with_kwargs=True).remove)

    @staticmethod
    def _at_output(
        stack: ExitStack, module: nn.Module, rows: dict[Site, Tensor], site: Site, scale: float = 1.0
    ) -> None:
        def take(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            _put(rows, site, value if scale == 1.0 else value * scale)

        stack.callback(module.register_forward_hook(take).remove)

    def _check(self, rows: Mapping[Site, Tensor], hidden_states: Sequence[Tensor]) -> None:
        """The identities of the hook points."""
        tolerance = IDENTITY_TOLERANCE if self.model.dtype == torch.float32 else 4 * torch.finfo(self.model.dtype).eps
        for index in range(self.num_layers):
            row = {hook: rows[Site(index, hook)] for hook in self.hooks - {HookPoint.FINAL_NORM}}
            _assert_same(hidden_states[index][0], row[HookPoint.PRE_ATTN], 0.0, f"hidden_states[{index}]")
            mid = row[HookPoint.PRE_ATTN] + row[HookPoint.ATTN_OUT]
            if self.anatomy.mid is not None:
                _assert_same(mid, row[HookPoint.POST_ATTN], tolerance, f"{index}: stream + attention branch")
            _assert_same(
                mid + row[HookPoint.MLP_OUT], row[HookPoint.POST_MLP], tolerance, f"{index}: stream + MLP branch"
            )
            if index + 1 < self.num_layers:
                following = rows[Site(index + 1, HookPoint.PRE_ATTN)]
                _assert_same(row[HookPoint.POST_MLP], following, 0.0, f"{index}: layer output, next layer's input")
        _assert_same(hidden_states[-1][0], rows[FINAL_NORM_SITE], 0.0, "hidden_states[-1]")


def _put(rows: dict[Site, Tensor], site: Site, value: Tensor) -> None:
    assert site not in rows, f"{site.name} was computed twice in one pass"
    rows[site] = value.detach().reshape(-1, value.shape[-1]).clone()


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


def reference_rows(
    folder: Path, family: str, dtype: torch.dtype, requests: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[Reference]:
    """One reference for each ``(prompt, output)``; for a process of its own, see `own_process`."""
    model = HFReference(folder, family, dtype)
    return [model.run(prompt, output) for prompt, output in requests]


@contextmanager
def own_process() -> Iterator[ProcessPoolExecutor]:
    """A process for `reference_rows`: an engine in this one may have decorated Hugging Face's classes for vLLM."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as executor:
        yield executor
