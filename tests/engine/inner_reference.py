"""Rows within attention and the MLP as Hugging Face's own functions and modules compute them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from headgate.capture.schema.sites import HookPoint, Site
from tests.engine.hf_reference import HFReference, Reference, Request, _Taps


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
            functions = sys.modules[type(layers[0].get_submodule(self.anatomy.attn)).__module__]
            kernel = self._watched(taps, running, functions.eager_attention_forward, [*"qkv"], first=1)
            stack.enter_context(patch.object(functions, "eager_attention_forward", kernel))
            if hasattr(functions, "apply_rotary_pos_emb"):
                rotate = self._watched(taps, running, functions.apply_rotary_pos_emb, ["q_pre", "k_pre"], first=0)
                stack.enter_context(patch.object(functions, "apply_rotary_pos_emb", rotate))
            yield

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
        rows = heads.transpose(1, 2).flatten(2)
        taps._take(site, rows)
        if site not in taps.vectors:
            return heads
        rows = rows + taps.vectors[site].view_as(rows)
        return rows.unflatten(2, (heads.shape[1], heads.shape[3])).transpose(1, 2)


def inner_rows(folder: Path, family: str, dtype: torch.dtype, requests: Sequence[Request]) -> list[Reference]:
    """As `hf_reference.reference_rows`, with the rows within attention."""
    model = InnerReference(folder, family, dtype)
    return [model.run(*request) for request in requests]
