"""Puts actions into the forward pass: per-instance subclasses of the modules around each site.

A module's class is replaced by a subclass whose `forward` calls the actions of its sites and the original `forward`.
That happens after the weights are loaded and before anything is traced, so torch.compile and CUDA graphs see plain
tensor code. Only the instances of the served model change, never a class that others share.

The tracer spends a millisecond or two on each Python call, at each site of each layer. What runs there therefore calls
little: names, positions and the order of actions are settled beforehand, in closures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

from torch import Tensor, nn

from headgate.capture.engine.model.inner_places import HookPlace
from headgate.capture.engine.model.layer_structure import LayerStructure
from headgate.capture.engine.model.symbols import Key
from headgate.capture.engine.site_action import SiteAction, SiteValue
from headgate.capture.schema.errors import UnsupportedError
from headgate.capture.schema.sites import HookPoint, Site

Run = Callable[[nn.Module, str, SiteValue], Tensor]
PREFIX = "Headgate"
Runs = Mapping[HookPoint, tuple[Run, ...]]
Forward = Callable[..., object]
ForwardFactory = Callable[[type[nn.Module]], Forward]
Args = tuple[Tensor, ...]
Kwargs = dict[str, Tensor]
"""Arguments of a forward: other values than tensors are handed on and not looked at."""
Output = Tensor | tuple[Tensor, ...]
Enter = Callable[[nn.Module, Args, Kwargs], tuple[Args, Kwargs]]
Leave = Callable[[nn.Module, Output], Output]


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


def tensor_prefix(name: str) -> str:
    """Return the part of `tensor_attribute` in front of the hook, for traced code."""
    return tensor_attribute(name, "")


def swap_class(module: nn.Module, factory: ForwardFactory) -> None:
    """Make `module` run ``factory(its class)`` as its forward.

    A forward of the instance's own (vLLM gives some to modules that it fuses or offloads) would hide the class's: it
    becomes the forward of a class in between.
    """
    base = type(module)
    if (own := vars(module).pop("forward", None)) is not None:
        base = _subclass(base, _as_method(own))
    module.__class__ = _subclass(base, factory(base))


def _subclass(base: type[nn.Module], forward: Forward) -> type[nn.Module]:
    name = base.__name__ if base.__name__.startswith(PREFIX) else f"{PREFIX}{base.__name__}"
    return type(name, (base,), {"forward": forward, "__module__": __name__})


def _as_method(own: Forward) -> Forward:
    if isinstance(own, MethodType):
        return own.__func__

    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        return own(*args, **kwargs)

    return forward


def chained(runs: Sequence[Run]) -> Run:
    """All of a site's actions as one; each sees the pristine value and the carry as the previous one left it."""
    if len(runs) == 1:
        return runs[0]

    def run(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
        for each in runs:
            site = SiteValue(site.value, site.addend, each(module, hook, site), site.gain)
        return site.carry

    return run


def layer_forward(
    structure: LayerStructure, runs: Runs, params: Sequence[str], repays: tuple[Run, ...] = ()
) -> ForwardFactory:
    """Forward of a decoder layer with `pre_attn` at its input, and `mlp_out` and `post_mlp` at its output.

    What was done to the mid stream where only the MLP sees it is done to the stream by `repays`, before the output.
    """
    pre = runs.get(HookPoint.PRE_ATTN)
    enter = _enter(structure, chained(pre), params) if pre else None
    leave = _leave_pair(runs, repays) if structure.style == "pair" else _leave_single(runs, repays)

    def factory(base: type[nn.Module]) -> Forward:
        def forward(self: nn.Module, *args: Tensor, **kwargs: Tensor) -> Output:
            if enter is not None:
                args, kwargs = enter(self, args, kwargs)
            return leave(self, base.forward(self, *args, **kwargs))

        return forward

    return factory


def _enter(structure: LayerStructure, run: Run, params: Sequence[str]) -> Enter:
    """The input of a layer. The first layer of a pair gets the stream alone, without a residual."""
    hook, hidden_name, residual_name = HookPoint.PRE_ATTN.value, structure.hidden, structure.residual or ""
    hidden_at, residual_at = (params.index(name) if name else -1 for name in (hidden_name, residual_name))

    def enter(self: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        hidden, residual = args[hidden_at] if hidden_at < len(args) else kwargs[hidden_name], None
        if residual_name:
            residual = args[residual_at] if residual_at < len(args) else kwargs.get(residual_name)
        at, name = (hidden_at, hidden_name) if residual is None else (residual_at, residual_name)
        carry = run(self, hook, SiteValue(hidden, residual, hidden if residual is None else residual))
        if at < len(args):
            return (*args[:at], carry, *args[at + 1 :]), kwargs
        return args, {**kwargs, name: carry}

    return enter


def _leave_pair(runs: Runs, repays: tuple[Run, ...]) -> Leave:
    """The exit of a layer that hands on ``(hidden, residual)``."""
    out_runs, post_runs = runs.get(HookPoint.MLP_OUT), runs.get(HookPoint.POST_MLP)
    repay, out_run, post = (chained(found) if found else None for found in (repays, out_runs, post_runs))

    def leave(self: nn.Module, out: Output) -> Output:
        hidden, residual = out
        if repay is not None:
            residual = repay(self, HookPoint.POST_ATTN.value, SiteValue(residual, None, residual))
        if out_run is not None:
            residual = out_run(self, HookPoint.MLP_OUT.value, SiteValue(hidden, None, residual))
        if post is not None:
            residual = post(self, HookPoint.POST_MLP.value, SiteValue(hidden, residual, residual))
        return hidden, residual

    return leave


def _leave_single(runs: Runs, repays: tuple[Run, ...]) -> Leave:
    """The exit of a layer that hands on the stream, alone or first of a tuple."""
    repay, post = (chained(found) if found else None for found in (repays, runs.get(HookPoint.POST_MLP)))

    def leave(self: nn.Module, out: Output) -> Output:
        stream = out[0] if isinstance(out, tuple) else out
        if repay is not None:
            stream = repay(self, HookPoint.POST_ATTN.value, SiteValue(stream, None, stream))
        if post is not None:
            stream = post(self, HookPoint.POST_MLP.value, SiteValue(stream, None, stream))
        return (stream, *out[1:]) if isinstance(out, tuple) else stream

    return leave


def module_forward(taken: Sequence[tuple[HookPoint, HookPlace, tuple[Run, ...]]]) -> ForwardFactory:
    """Forward of a submodule with hook points at its arguments and at its result, in the order given."""
    at_arguments = [
        (place.is_written, _at_entry(hook, place, place.value, runs))
        for hook, place, runs in taken
        if place.value is not None
    ]
    at_entry = tuple(enter for is_written, enter in at_arguments if not is_written)
    at_written = tuple(enter for is_written, enter in at_arguments if is_written)
    at_exit = tuple(_at_exit(*entry) for entry in taken if entry[1].value is None)

    def factory(base: type[nn.Module]) -> Forward:
        def forward(self: nn.Module, *args: Tensor, **kwargs: Tensor) -> Output:
            for enter in at_entry:
                args, kwargs = enter(self, args, kwargs)
            out: Output = base.forward(self, *args, **kwargs)
            for enter in at_written:
                enter(self, args, kwargs)
            for leave in at_exit:
                out = leave(self, out)
            return out

        return forward

    return factory


def watch_choices(experts: nn.Module, taken: Sequence[tuple[HookPoint, HookPlace, tuple[Run, ...]]]) -> None:
    """Let actions see what the router of `experts` chooses; they change nothing of it.

    The router is no module: its own function is put into it, in front of its class's.
    """
    router: Any = experts.router
    original, runs = router._compute_routing, [(hook.value, place.result, chained(each)) for hook, place, each in taken]

    def compute_routing(*args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        chosen: tuple[Tensor, Tensor] = original(*args, **kwargs)
        for name, result, run in runs:
            run(experts, name, SiteValue(chosen[result], None, chosen[result]))
        return chosen

    router._compute_routing = compute_routing


def _at_entry(hook: HookPoint, place: HookPlace, value_at: Key, runs: tuple[Run, ...]) -> Enter:
    run, name, addend_at = chained(runs), hook.value, place.addend
    carry_at = value_at if place.carry is None else place.carry
    if place.has_heads:
        return _at_heads(run, hook, place, value_at)

    def enter(module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        value = args[value_at] if isinstance(value_at, int) else kwargs[value_at]
        addend = None
        if addend_at is not None:
            addend = args[addend_at] if isinstance(addend_at, int) else kwargs[addend_at]
        carry = args[carry_at] if isinstance(carry_at, int) else kwargs[carry_at]
        carry = run(module, name, SiteValue(value, addend, carry))
        if isinstance(carry_at, int):
            return (*args[:carry_at], carry, *args[carry_at + 1 :]), kwargs
        return args, {**kwargs, carry_at: carry}

    return enter


def _at_heads(run: Run, hook: HookPoint, place: HookPlace, value_at: Key) -> Enter:
    """An argument with a row for each token, in which heads may be a dimension of their own.

    What the module has written there is changed in place, since its caller reads it from its own tensor.
    """
    name, keyword, width, is_written = hook.value, place.keyword, place.width, place.is_written
    position = value_at if isinstance(value_at, int) else -1

    def enter(module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        is_positional = 0 <= position < len(args)
        value = args[position] if is_positional else kwargs[keyword]
        rows = value.flatten(1)
        if width and rows.shape[1] != width:
            raise UnsupportedError(
                f"{place.module} gets rows of {rows.shape[1]} values for {name}, expected {width}: take {name} out of "
                "the configured sites and report the architecture"
            )
        carry = run(module, name, SiteValue(rows, None, rows))
        if is_written and carry is rows:
            return args, kwargs
        carry = carry.reshape(value.shape)
        if is_written:
            value.copy_(carry)
            return args, kwargs
        if is_positional:
            return (*args[:position], carry, *args[position + 1 :]), kwargs
        return args, {**kwargs, keyword: carry}

    return enter


def _at_exit(hook: HookPoint, place: HookPlace, runs: tuple[Run, ...]) -> Leave:
    run, name, scale, at = chained(runs), hook.value, place.scale, place.result

    def leave(module: nn.Module, out: Output) -> Output:
        if not isinstance(out, tuple) and at:
            raise UnsupportedError(f"{type(module).__name__} of {place.module} returned no result {at} for {name}")
        result = out[at] if isinstance(out, tuple) else out
        carry = run(module, name, SiteValue(result if scale is None else result * scale, None, result, scale))
        return (*out[:at], carry, *out[at + 1 :]) if isinstance(out, tuple) else carry

    return leave


def sites_by_hook(actions: Mapping[Site, Sequence[SiteAction]], layer: int) -> dict[HookPoint, list[SiteAction]]:
    """The actions of one layer, by hook point."""
    return {site.hook: list(found) for site, found in actions.items() if site.layer == layer}
