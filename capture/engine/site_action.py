"""Code of a part that runs at a site in every forward, and the value that it gets there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn


class SiteValue(NamedTuple):
    """The value at a site and the tensor that carries it on, as the traced forward passes them to an action.

    Attributes:
        value: ``[num_tokens, hidden]`` or ``[1, num_tokens, hidden]``.
        addend: Second summand of the value, or None: the stream of fused layers is ``value + addend``.
        carry: The tensor that a vector is added to so that it acts on the site's value.
        gain: Multiplier between the carry and the value, None if they are alike: to add v to the value, add ``v /
            gain`` to the carry.
    """

    value: Tensor
    addend: Tensor | None
    carry: Tensor
    gain: float | None = None


SiteRun = Callable[[nn.Module, str, SiteValue], Tensor]
"""``run(module, hook, value) -> carry``: what an action does at a site."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteAction:
    """Code that runs at one site in every forward.

    Attributes:
        run: ``run(module, hook, value) -> carry``; traced, so plain tensor code without branches on data. `module` has
            `tensors` as attributes, each under ``f"_headgate_{name}_{hook}"``. Returns the carry, changed or not.
        tensors: Static tensors that `run` reads and writes. They become inputs of the compiled graph.
        order: Actions of one site run in ascending order: capture 0 (pristine), patch 10, add 20, project 30.
        reapply_to_residual: In layers that carry the stream alone, the mid norm reads a value that the stream does not
            pass through again. There `reapply_to_residual` does to the stream, where the layer hands it on, what `run`
            did to that value. None if `run` changes nothing.
        run_and_keep: Taken in place of `run` in those layers: it keeps what `reapply_to_residual` needs. None if that
            needs nothing.
        before_attention: Does to the residual of a layer that carries a pair what `run` does at the mid norm, where the
            layer's first norm hands that residual on: before attention, which does not read it. Taken if every action
            at the site has it, since none sees the value there; compiled, it spares the mid norm's kernel another
            read. The site of its :class:`SiteValue` has no branch in it. None if `run` must see the value.
        unfused: `run` by code that the compiler does not fuse with what is in front of it. Taken at the input of
            attention and of its output projection, and at the mid norm where `before_attention` could not be: in the
            model's first layer, which has no residual before attention, and beside actions that lack it. None if `run`
            itself may stay there.
    """

    run: SiteRun
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    order: int
    reapply_to_residual: SiteRun | None = None
    run_and_keep: SiteRun | None = None
    before_attention: SiteRun | None = None
    unfused: SiteRun | None = None
