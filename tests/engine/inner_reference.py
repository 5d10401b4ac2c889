"""Rows within attention and the MLP as Hugging Face's own functions and modules compute them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

from headgate.capture.schema.sites import HookPoint, Site
from tests.engine.hf_reference import HFReference, Reference, Request, _Taps

DOWN_PROJECTIONS = ("down_proj", "w2", "output_linear")


class InnerReference(HFReference):
    """Hugging Face's model, with its attention and rotary functions watched as well as its modules."""

    @contextmanager
    def _hooked(self, taps: _Taps) -> Iterator[None]:
        with super()._hooked(taps), ExitStack() as stack:
            layers = self.model.get_submodule(self.anatomy.layers)
            running: list[int] = []
            for index, layer in enumerate(layers):
                attention = layer.get_submodule(self.anatomy.attn)
                stack.callback(attention.register_forward_pre_hook(lambda *_, at=index: running.append(at)).remove)
                if hasattr(attention, "kv_a_layernorm"):
                    taps.at_output(stack, attention.kv_a_layernorm, Site(index, HookPoint.KV_LATENT))
                for hook, path in (
                    (HookPoint.ATTN_OUT_PRE, self.anatomy.attn_out),
                    (HookPoint.MLP_OUT_PRE, self.anatomy.mlp_out),
                ):
                    if path.endswith("norm"):
                        taps.at_input(stack, layer.get_submodule(path), Site(index, hook))
                self._watch_mlp(stack, taps, layer.get_submodule(self.anatomy.mlp_in), index)
            functions = sys.modules[type(layers[0].get_submodule(self.anatomy.attn)).__module__]
            kernel = self._watched(taps, running, functions.eager_attention_forward, [*"qkv"], first=1)
            stack.enter_context(patch.object(functions, "eager_attention_forward", kernel))
            if hasattr(functions, "apply_rotary_pos_emb") and not self._is_latent:
                rotate = self._watched(taps, running, functions.apply_rotary_pos_emb, ["q_pre", "k_pre"], first=0)
                stack.enter_context(patch.object(functions, "apply_rotary_pos_emb", rotate))
            yield

    @property
    def _is_latent(self) -> bool:
        return getattr(self.model.config, "kv_lora_rank", None) is not None

    def _watch_mlp(self, stack: ExitStack, taps: _Taps, mlp: nn.Module, index: int) -> None:
        """Take the neurons, of a layer with experts those of the shared one, and what its router computes."""
        neurons = next((getattr(mlp, name) for name in ("shared_expert", "shared_experts") if hasattr(mlp, name)), mlp)
        down = next((getattr(neurons, name) for name in DOWN_PROJECTIONS if hasattr(neurons, name)), None)
        if down is not None:
            taps.at_input(stack, down, Site(index, HookPoint.MLP_ACT))
        if not hasattr(mlp, "gate"):
            return
        site, linear, route = Site(index, HookPoint.ROUTER_LOGITS), functional.linear, mlp.gate.forward

        def scored(*args: Any) -> Tensor:
            logits = linear(*args)
            taps._take(site, logits)
            return logits + taps.vectors[site].view_as(logits) if site in taps.vectors else logits

        def routed(*args: Any, **kwargs: Any) -> Any:
            with patch.object(functional, "linear", scored):
                found = route(*args, **kwargs)
            if isinstance(found, tuple):
                taps._take(Site(index, HookPoint.EXPERT_WEIGHTS), found[1])
                taps._take(Site(index, HookPoint.EXPERTS), found[2])
            return found

        stack.enter_context(patch.object(mlp.gate, "forward", routed))

    def _watched(
        self, taps: _Taps, running: Sequence[int], function: Callable[..., Any], names: Sequence[str], first: int
    ) -> Callable[..., Any]:
        """`function`, of whose arguments from `first` on each is ``[batch, heads, tokens, head_size]``."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            taken = list(args)
            for at, name in enumerate(names, start=first):
                taken[at] = self._seen(taps, Site(running[-1], HookPoint(name)), args[at])
            return function(*taken, **kwargs)

        return watched

    def _seen(self, taps: _Taps, site: Site, heads: Tensor) -> Tensor:
        """Take the rows of `heads`; return them with what is added there."""
        rows = self._as_rotated(heads.transpose(1, 2), site.hook).flatten(2)
        taps._take(site, rows)
        if site not in taps.vectors:
            return heads
        rows = rows + taps.vectors[site].view_as(rows)
        return rows.unflatten(2, (heads.shape[1], heads.shape[3])).transpose(1, 2)

    def _as_rotated(self, heads: Tensor, hook: HookPoint) -> Tensor:
        """`heads` in the order of vLLM's kernel: of latent attention pairs are beside each other, not in two halves."""
        if hook is not HookPoint.Q or not self._is_latent:
            return heads
        nope = self.model.config.qk_nope_head_dim
        pairs = heads[..., nope:].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return torch.cat([heads[..., :nope], pairs], dim=-1)


def inner_rows(folder: Path, family: str, dtype: torch.dtype, requests: Sequence[Request]) -> list[Reference]:
    """As `hf_reference.reference_rows`, with the rows within attention."""
    model = InnerReference(folder, family, dtype)
    return [model.run(*request) for request in requests]
