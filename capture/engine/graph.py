"""Puts actions into the forward pass: per-instance subclasses of the modules around each site.

A module's class is replaced by a subclass whose `forward` calls the actions of its sites and the original `forward`.
That happens after the weights are loaded and before anything is traced, so torch.compile and CUDA graphs see plain
tensor code. Only the instances of the served model change, never a class that others share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor, nn

from headgate.capture.engine.discover import Key, LayerLayout
from headgate.capture.engine.seam import SiteAction, SiteValue
from headgate.capture.sites import HookPoint, Site

Run = Callable[[nn.Module, str, SiteValue], Tensor]
PREFIX = "Headgate"
Runs = Mapping[HookPoint, tuple[Run, ...]]
ForwardFactory = Callable[[type[nn.Module]], Callable[..., Any]]


def attach(module: nn.Module, hook: HookPoint, actions: Sequence[SiteAction]) -> tuple[Run, ...]:
    """Give `module` the static tensors of `actions`; return what to run there, in order.

    Plain attributes, not buffers: vLLM's sleep mode and weight reloading save and rebuild buffers.
    """
    ordered = sorted(actions, key=lambda action: action.order)
    for action in ordered:
        for name, tensor in action.tensors.items():
            object.__setattr__(module, tensor_attribute(name, hook.value), tensor)
    return tuple(action.run for action in ordered)


def tensor_attribute(name: str, hook: str) -> str:
    """Attribute under which an action finds its tensor `name` for the site at `hook` of its module."""
    return f"_headgate_{name}_{hook}"


def swap_class(module: nn.Module, factory: ForwardFactory) -> None:
    """Make `module` run ``factory(its class)`` as its forward.

    A forward of the instance's own (vLLM gives some to modules that it fuses or offloads) would hide the class's: it
    becomes the forward of a class in between.
    """
    base = type(module)
    if (own := vars(module).pop("forward", None)) is not None:
        base = _subclass(base, _as_method(own))
    module.__class__ = _subclass(base, factory(base))


def _subclass(base: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    name = base.__name__ if base.__name__.startswith(PREFIX) else f"{PREFIX}{base.__name__}"
    return type(name, (base,), {"forward": forward, "__module__": __name__})


def _as_method(own: Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(own, MethodType):
        return own.__func__

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    return forward


def run_all(runs: tuple[Run, ...], module: nn.Module, hook: HookPoint, site: SiteValue) -> Tensor:
    """Run a site's actions in order; each sees the pristine value and the carry as the previous one left it.

    This and what calls it is traced at every site: each call and each object costs start-up time.
    """
    carry = runs[0](module, hook.value, site) if runs else site.carry
    for run in runs[1:]:
        carry = run(module, hook.value, SiteValue(site.value, site.addend, carry, site.gain))
    return carry


def layer_forward(
    layout: LayerLayout, runs: Runs, params: Sequence[str], repays: tuple[Run, ...] = ()
) -> ForwardFactory:
    """Forward of a decoder layer with `pre_attn` at its input, and `mlp_out` and `post_mlp` at its output.

    What was done to the mid stream where only the MLP sees it is done to the stream by `repays`, before the output.
    """
    pre = runs.get(HookPoint.PRE_ATTN, ())
    leave = _leave_pair(runs, repays) if layout.style == "pair" else _leave_single(runs, repays)
    is_pair, hidden_name, residual_name = layout.style == "pair", layout.hidden, layout.residual
    hidden_at = params.index(hidden_name)
    residual_at = params.index(residual_name) if residual_name else -1

    def factory(base: type[nn.Module]) -> Callable[..., Any]:
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if pre:
                args, kwargs = enter(self, args, kwargs)
            return leave(self, base.forward(self, *args, **kwargs))

        return forward

    def enter(self: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        hidden = _argument(args, kwargs, hidden_at, hidden_name)
        residual = _argument(args, kwargs, residual_at, residual_name) if is_pair else None
        if residual is None:
            carry = run_all(pre, self, HookPoint.PRE_ATTN, SiteValue(hidden, None, hidden))
            return _replace(args, kwargs, hidden_at, hidden_name, carry)
        carry = run_all(pre, self, HookPoint.PRE_ATTN, SiteValue(hidden, residual, residual))
        return _replace(args, kwargs, residual_at, residual_name, carry)

    return factory


def _leave_pair(runs: Runs, repays: tuple[Run, ...]) -> Callable[[nn.Module, Any], Any]:
    """The exit of a layer that hands on ``(hidden, residual)``."""
    post, out_runs = runs.get(HookPoint.POST_MLP, ()), runs.get(HookPoint.MLP_OUT, ())

    def leave(self: nn.Module, out: Any) -> Any:
        hidden, residual = out
        residual = run_all(repays, self, HookPoint.POST_ATTN, SiteValue(residual, None, residual))
        residual = run_all(out_runs, self, HookPoint.MLP_OUT, SiteValue(hidden, None, residual))
        residual = run_all(post, self, HookPoint.POST_MLP, SiteValue(hidden, residual, residual))
        return hidden, residual

    return leave


def _leave_single(runs: Runs, repays: tuple[Run, ...]) -> Callable[[nn.Module, Any], Any]:
    """The exit of a layer that hands on the stream, alone or first of a tuple."""
    post = runs.get(HookPoint.POST_MLP, ())

    def leave(self: nn.Module, out: Any) -> Any:
        stream = out[0] if isinstance(out, tuple) else out
        stream = run_all(repays, self, HookPoint.POST_ATTN, SiteValue(stream, None, stream))
        stream = run_all(post, self, HookPoint.POST_MLP, SiteValue(stream, None, stream))
        return (stream, *out[1:]) if isinstance(out, tuple) else stream

    return leave


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where one hook point is taken at a submodule: an argument of its call, or its (first) result.

    Attributes:
        module: Dotted path of the submodule within the layer.
        value: Argument that holds the site's value; None: the result does.
        addend: Argument that is added to it, if the stream is carried as a pair.
        carry: Argument that a vector is added to; `value` if None.
        scale: Multiplier between the result and what is added to the stream.
    """

    module: str
    value: Key | None = None
    addend: Key | None = None
    carry: Key | None = None
    scale: float | None = None


def module_forward(taken: Sequence[tuple[HookPoint, Place, tuple[Run, ...]]]) -> ForwardFactory:
    """Forward of a submodule with hook points at its arguments and at its result, in the order given."""
    at_entry = tuple(_at_entry(*entry) for entry in taken if entry[1].value is not None)
    at_exit = tuple(_at_exit(*entry) for entry in taken if entry[1].value is None)

    def factory(base: type[nn.Module]) -> Callable[..., Any]:
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            for enter in at_entry:
                args, kwargs = enter(self, args, kwargs)
            out = base.forward(self, *args, **kwargs)
            for leave in at_exit:
                out = leave(self, out)
            return out

        return forward

    return factory


def _at_entry(hook: HookPoint, place: Place, runs: tuple[Run, ...]) -> Callable[..., tuple[Any, Any]]:
    value_at, addend_at = place.value, place.addend
    carry_at = place.value if place.carry is None else place.carry

    def enter(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        value = _at(args, kwargs, value_at)
        addend = None if addend_at is None else _at(args, kwargs, addend_at)
        carry = run_all(runs, module, hook, SiteValue(value, addend, _at(args, kwargs, carry_at)))
        if isinstance(carry_at, int):
            return (*args[:carry_at], carry, *args[carry_at + 1 :]), kwargs
        return args, {**kwargs, carry_at: carry}

    return enter


def _at_exit(hook: HookPoint, place: Place, runs: tuple[Run, ...]) -> Callable[[nn.Module, Any], Any]:
    scale = place.scale

    def leave(module: nn.Module, out: Any) -> Any:
        result = out[0] if isinstance(out, tuple) else out
        value = result if scale is None else result * scale
        carry = run_all(runs, module, hook, SiteValue(value, None, result, scale))
        return (carry, *out[1:]) if isinstance(out, tuple) else carry

    return leave


def _at(args: Any, kwargs: Any, key: Key | None) -> Any:
    return args[key] if isinstance(key, int) else kwargs[key]


def sites_by_hook(actions: Mapping[Site, Sequence[SiteAction]], layer: int) -> dict[HookPoint, list[SiteAction]]:
    """The actions of one layer, by hook point."""
    return {site.hook: list(found) for site, found in actions.items() if site.layer == layer}


def _argument(args: Any, kwargs: Any, at: int, name: str | None) -> Any:
    if 0 <= at < len(args):
        return args[at]
    return kwargs.get(name)


def _replace(args: Any, kwargs: Any, at: int, name: str | None, value: Any) -> tuple[Any, Any]:
    if at < len(args):
        return (*args[:at], value, *args[at + 1 :]), kwargs
    return args, {**kwargs, name: value}
