"""The places of the hook points in a decoder layer, read from its source, not from a list of models.

A layer's ``forward`` is walked with symbols (`symbolic_forward`). Its result must hold its input stream and branches. A
branch that was computed from the input stream alone is attention's; one that was computed from the stream with that
branch added is the MLP's; that sum is the *mid stream*. What follows from it is a `LayerStructure`.

Within attention, the argument through which it reads the stream is found; `inner_places` has what follows.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from headgate.capture.engine.model.inner_places import HookPlace, inner_places
from headgate.capture.engine.model.symbolic_forward import Path, walk_paths
from headgate.capture.engine.model.symbols import Atom, Items, Key, NotUnderstoodError, Sum, SymbolicCall, is_norm
from headgate.capture.schema.errors import UnsupportedError
from headgate.capture.schema.sites import HookPoint


def find_attention_input(
    branch: Atom, stream: frozenset[int], calls: Mapping[int, SymbolicCall]
) -> tuple[str, Key] | None:
    """Find the one argument through which `branch` reads the stream or its norm; None if there are several.

    Args:
        branch: What attention adds to the stream.
        stream: Numbers of the atoms that are the stream as it enters the layer.
        calls: Of the layer, by the number of their output.

    Returns:
        The module that has the argument, below the layer, and the argument.
    """
    entrances = _entrances(branch, stream, calls)
    if len(entrances) != 1:
        return None
    number, key = entrances.pop()
    call = calls.get(number)
    return None if call is None or is_norm(call.module) else (call.module, key)


def _entrances(atom: Atom, stream: frozenset[int], calls: Mapping[int, SymbolicCall]) -> set[tuple[int, Key]]:
    """Return the arguments that are the stream or its norm, on all ways to `atom`: each with its call's output."""
    call = calls.get(atom.number)
    if call is None:
        return {(atom.number, "")}  # a module's second result: the way to it is not known
    found: set[tuple[int, Key]] = set()
    for key, value in call.inputs.items():
        for source, _ in value.terms:
            if source.number in stream or _is_input_norm(calls.get(source.number), stream):
                found.add((call.output.number, key))
            elif source.reads:
                found |= _entrances(source, stream, calls)
    return found


def _is_input_norm(call: SymbolicCall | None, stream: frozenset[int]) -> bool:
    """Whether `call` is a norm of the stream as it enters the layer."""
    if call is None or not is_norm(call.module):
        return False
    return any(not value.numbers.isdisjoint(stream) for value in call.inputs.values())


HIDDEN_NAMES = ("hidden_states", "x", "hidden", "inputs", "h", "hidden_state")
RESIDUAL_NAMES = ("residual", "residuals")
ATTENTION_WORDS = ("attn", "attention", "mixer", "mamba", "conv")

BOUNDARIES = frozenset({HookPoint.PRE_ATTN, HookPoint.POST_MLP})


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerStructure:
    """The places of the hook points' values in a decoder layer. Modules are dotted paths below the layer.

    Attributes:
        style: ``pair``: the stream is ``hidden + residual``, carried as a pair, and the layer returns
            ``(hidden, residual)``; on the first layer `residual` is None and `hidden` is the stream. ``single``:
            `hidden` is the stream, and the layer returns it, alone or first of a tuple.
        hidden: Parameter of ``forward``.
        residual: Parameter of ``forward``; None for ``single``.
        mid: Module at whose input the mid stream is: the mid norm, or the MLP itself if it has no norm. None if there
            is no mid stream (parallel attention) or it could not be found.
        mid_input: Argument of `mid` that is the mid stream; of a fused add and norm, the attention branch.
        mid_residual: Argument of `mid` that is added to it, of a fused add and norm; else None.
        mid_norm: `mid` if it is a norm.
        first_norm: Module whose second result is `mid_residual`: the fused add and norm before attention, if nothing
            between the two reads that residual; pair only. On the first layer it is called without a residual.
        attn: Module that attention starts with.
        attn_input: Argument of `attn` that is attention's input.
        mlp: Module that the MLP starts with.
        mlp_input: Argument of `mlp` that is the MLP's input.
        mlp_in_is_norm_output: Whether the MLP's input is the (first) output of `mid_norm`, unchanged.
        attn_branch: Module whose (first) output, times `branch_scale`, is the attention branch; single only.
        mlp_branch: The same for the MLP branch; single only.
        branch_scale: Attribute that both branches are multiplied by before they are added; single only.
        inner: Where the hook points within attention and the MLP are, if the layer itself was looked at.
        absent: Why there is no such hook point, likewise.
        hooks: Hook points that can be taken.
    """

    style: Literal["pair", "single"]
    hidden: str
    residual: str | None = None
    mid: str | None = None
    mid_input: Key | None = None
    mid_residual: Key | None = None
    mid_norm: str | None = None
    first_norm: str | None = None
    attn: str | None = None
    attn_input: Key | None = None
    mlp: str | None = None
    mlp_input: Key | None = None
    mlp_in_is_norm_output: bool = False
    attn_branch: str | None = None
    mlp_branch: str | None = None
    branch_scale: str | None = None
    inner: Mapping[HookPoint, HookPlace] = field(default_factory=dict)
    absent: Mapping[HookPoint, str] = field(default_factory=dict)
    hooks: frozenset[HookPoint] = field(default=BOUNDARIES)


def analyse_layer(cls: type[nn.Module], layer: object | None = None) -> LayerStructure:
    """Find the hook points of a decoder layer.

    Args:
        cls: Its class.
        layer: The layer itself: its attributes then decide what the class alone leaves open.

    Raises:
        UnsupportedError: If the stream cannot be found in the source; names the class and why.
    """
    where = f"{cls.__module__}.{cls.__qualname__}"
    if isinstance(layer, nn.Module) and "forward" in vars(layer):
        raise UnsupportedError(f"{where}: the forward of this instance was replaced, so the source is not what runs")
    names = list(inspect.signature(inspect.unwrap(cls.forward)).parameters)
    hidden = next((name for name in HIDDEN_NAMES if name in names), None)
    residual = next((name for name in RESIDUAL_NAMES if name in names), None)
    if hidden is None:
        raise UnsupportedError(f"{where}: none of forward's parameters is known to be the stream: {names[1:]}")
    inputs = {hidden: True} | ({residual: True} if residual else {})
    try:
        structures = [_PathReader(path, hidden, residual, None).structure() for path in walk_paths(cls, layer, inputs)]
        if residual and {structure.style for structure in structures} == {"pair"}:
            first_layer = walk_paths(cls, layer, {hidden: True, residual: False})
            # without a residual, nothing is known of the norm that hands it on
            reported = structures[0].first_norm
            structures += [
                replace(_PathReader(path, hidden, residual, "pair").structure(), first_norm=reported)
                for path in first_layer
            ]
    except NotUnderstoodError as error:
        raise UnsupportedError(f"{where}: the residual stream cannot be followed: {error}") from error
    agreed = _agreed(structures, where)
    return _with_inner_places(agreed, layer) if isinstance(layer, nn.Module) else agreed


def _with_inner_places(structure: LayerStructure, layer: nn.Module) -> LayerStructure:
    """Add the places within the layer's attention and MLP, or why they can be no sites."""
    found = inner_places(layer, structure.attn, structure.attn_input)
    plain = {HookPoint.ATTN_OUT_PRE, HookPoint.MLP_OUT_PRE} - structure.inner.keys()
    return replace(
        structure,
        inner={**structure.inner, **found.places},
        absent={**found.absent, **dict.fromkeys(plain, "no norm is behind that branch")},
        hooks=structure.hooks | frozenset(found.places),
    )


class _PathReader:
    """One path through a layer, read as stream, branches and mid stream."""

    def __init__(self, path: Path, hidden: str, residual: str | None, style: str | None) -> None:
        self._hidden, self._residual = hidden, residual
        self._calls = path.tape.calls
        self._by_output = {call.output.number: call for call in self._calls}
        returned = path.result.values if isinstance(path.result, Items) else (path.result,)
        if len(returned) > 2:
            raise NotUnderstoodError(f"forward returns {len(returned)} values; the stream, or a pair, was expected")
        inputs = path.tape.inputs
        carried = inputs[residual].number if residual in inputs else None
        second = returned[1] if len(returned) == 2 and isinstance(returned[1], Sum) else None
        self._is_pair = style == "pair" or (second is not None and carried in second.numbers)
        if not isinstance(returned[0], Sum) or (self._is_pair and second is None):
            raise NotUnderstoodError("forward returns something other than tensors")
        self._out, self._carry = returned[0], second if self._is_pair else None
        self._total = self._out.plus(self._carry) if self._carry else self._out
        base = inputs.values() if self._is_pair else [inputs[hidden]]
        self._base = frozenset(atom.number for atom in base)
        if not self._is_pair and carried in self._total.numbers:
            raise NotUnderstoodError(f"{residual} is added to what forward returns, but is not carried on")

    def structure(self) -> LayerStructure:
        """Read the structure that this path shows.

        Raises:
            NotUnderstoodError: If what is returned is not the input stream plus branches.
        """
        structure = LayerStructure(
            style="pair" if self._is_pair else "single",
            hidden=self._hidden,
            residual=self._residual if self._is_pair else None,
        )
        last = self._total.atom
        if last is not None and is_norm(last.module) and not self._is_pair:
            return structure  # the norm comes after the addition: the stream itself is normed, and has no branches
        if self._total.has_repeats or not self._base <= self._total.numbers:
            texts = sorted({atom.text or atom.module for atom, _ in self._total.terms if atom.number not in self._base})
            raise NotUnderstoodError(f"forward returns {', '.join(texts)} without its input stream, or with it twice")
        mid = self._find_mid()
        if mid is None:
            return self._parallel(structure)
        return self._sequential(structure, *mid)

    def _find_mid(self) -> tuple[SymbolicCall, frozenset[int]] | None:
        """Return the first call that reads the stream with a branch added, and the atoms of that sum."""
        for call in self._calls:
            for reads in sorted(call.output.reads, key=len):
                if self._base < reads <= self._total.numbers:
                    return call, reads
        return None

    def _sequential(self, structure: LayerStructure, call: SymbolicCall, mid: frozenset[int]) -> LayerStructure:
        branches = [atom for atom, _ in self._total.terms if atom.number not in self._base]
        attention = [atom for atom in branches if atom.number in mid]
        rest = [atom for atom in branches if atom.number not in mid]
        mlp = [atom for atom in rest if atom.reads and max(atom.reads, key=len) == mid]
        if any(atom.reads != {self._base} for atom in attention) or not mlp:
            return structure
        if any(self._is_attention(atom) for atom in rest):
            return structure  # a second attention block: "the" mid stream would be a guess
        keys = _stream_keys(call, mid)
        if keys is None or not self._is_called_once(call.module):
            return structure
        norm = call.module if is_norm(call.module) else None
        structure = replace(structure, mid=call.module, mid_input=keys[0], mid_residual=keys[1], mid_norm=norm)
        structure = replace(structure, hooks=structure.hooks | {HookPoint.POST_ATTN})
        structure = self._with_mlp_input(self._with_attention_input(structure, attention), mlp[0])
        structure = self._with_post_norms(structure, attention, rest)
        is_whole = len(mlp) == len(rest) and (self._carry is None or self._carry.numbers == mid)
        if self._is_pair:
            structure = replace(structure, first_norm=self._first_norm(call, keys[1], mid))
            return self._pair_branches(structure, call, {atom.number for atom in attention}, is_whole)
        return self._single_branches(structure, attention, mlp if is_whole else [])

    def _first_norm(self, mid_call: SymbolicCall, mid_residual: Key | None, mid: frozenset[int]) -> str | None:
        """Return the fused norm that hands `mid_call` its residual, if all else reads the stream before or after."""
        first = next(
            (call for call in self._calls if call.added is not None and call.added.numbers == self._base), None
        )
        if first is None or mid_residual is None or mid_call.inputs[mid_residual] != first.added:
            return None
        later = self._calls[self._calls.index(first) + 1 :]
        read = [value for call in later if call is not mid_call for value in call.inputs.values()]
        read += [self._out] if self._carry is None else [self._out, self._carry]
        is_read = any(not value.numbers.isdisjoint(self._base) and not mid <= value.numbers for value in read)
        others = (value for key, value in mid_call.inputs.items() if key != mid_residual)
        is_read |= any(not value.numbers.isdisjoint(self._base) for value in others)
        return None if is_read or not self._is_called_once(first.module) else first.module

    def _parallel(self, structure: LayerStructure) -> LayerStructure:
        branches = [atom for atom, _ in self._total.terms if atom.number not in self._base]
        attention = [atom for atom in branches if self._is_attention(atom)]
        mlp = [atom for atom in branches if atom not in attention]
        if self._is_pair or len(attention) != 1 or len(mlp) != 1:
            return structure
        structure = self._with_mlp_input(self._with_attention_input(structure, attention), mlp[0])
        return self._single_branches(structure, attention, mlp)

    def _with_attention_input(self, structure: LayerStructure, branches: list[Atom]) -> LayerStructure:
        """Add the one argument through which the one attention branch reads the stream, if that is so."""
        found = find_attention_input(branches[0], self._base, self._by_output) if len(branches) == 1 else None
        if found is None or not self._is_called_once(found[0]):
            return structure
        return replace(structure, attn=found[0], attn_input=found[1], hooks=structure.hooks | {HookPoint.ATTN_IN})

    def _with_mlp_input(self, structure: LayerStructure, branch: Atom) -> LayerStructure:
        found = self._start(branch)
        if found is None or not self._is_called_once(found[0].module):
            return structure
        call, key = found
        source = call.inputs[key].atom
        is_output = bool(source and source.module and source.element == 0 and source.module == structure.mid_norm)
        structure = replace(structure, mlp=call.module, mlp_input=key, mlp_in_is_norm_output=is_output)
        return replace(structure, hooks=structure.hooks | {HookPoint.MLP_IN})

    def _with_post_norms(self, structure: LayerStructure, attention: list[Atom], mlp: list[Atom]) -> LayerStructure:
        """Add the inputs of the norms whose results are the branches."""
        found = {}
        for hook, branches in ((HookPoint.ATTN_OUT_PRE, attention), (HookPoint.MLP_OUT_PRE, mlp)):
            call = self._by_output.get(branches[0].number) if len(branches) == 1 else None
            if call is None or not is_norm(call.module) or not self._is_called_once(call.module):
                continue
            if len(call.inputs) == 1:
                found[hook] = HookPlace(module=call.module, value=next(iter(call.inputs)))
        return replace(structure, inner=found, hooks=structure.hooks | frozenset(found))

    def _pair_branches(
        self, structure: LayerStructure, call: SymbolicCall, attention: set[int], is_whole: bool
    ) -> LayerStructure:
        first = call.inputs[structure.mid_input] if structure.mid_input is not None else None
        hooks = set(structure.hooks)
        if structure.mid_residual is not None and first is not None and first.numbers == attention:
            hooks.add(HookPoint.ATTN_OUT)
        if is_whole:
            hooks.add(HookPoint.MLP_OUT)
        return replace(structure, hooks=frozenset(hooks))

    def _single_branches(self, structure: LayerStructure, attention: list[Atom], mlp: list[Atom]) -> LayerStructure:
        factors = {atom.number: factors for atom, factors in self._total.terms}
        sides = [side[0] if len(side) == 1 else None for side in (attention, mlp)]
        used = {factors[atom.number] for atom in sides if atom is not None}
        if len(used) != 1 or not _is_attribute(scale := used.pop()):
            return structure
        names = [atom.module if atom is not None and self._is_output(atom) else None for atom in sides]
        points = [HookPoint.ATTN_OUT, HookPoint.MLP_OUT]
        return replace(
            structure,
            attn_branch=names[0],
            mlp_branch=names[1],
            branch_scale=scale[0].removeprefix("self.") if scale else None,
            hooks=structure.hooks | {point for point, name in zip(points, names, strict=True) if name},
        )

    def _start(self, atom: Atom) -> tuple[SymbolicCall, Key] | None:
        """Return the first module but norms on the way to `atom`, and its argument that is the stream."""
        call = self._by_output.get(atom.number)
        if call is None:
            return None
        for key, value in call.inputs.items():
            source = value.atom
            before = self._by_output.get(source.number) if source else None
            if not value.numbers.isdisjoint(self._base) or (before is not None and is_norm(before.module)):
                return (call, key) if call.module else None
            if source is not None and source.reads:
                return self._start(source) or ((call, key) if call.module else None)
        return None

    def _modules(self, atom: Atom) -> set[str]:
        """Return the modules on the ways from the stream to `atom`."""
        call = self._by_output.get(atom.number)
        if call is None:
            return {atom.module}
        if call.added is not None:
            return {call.module}
        branches = (value for value in call.inputs.values() if value.numbers.isdisjoint(self._base))
        sources = (atom for value in branches for atom, _ in value.terms)
        return {call.module}.union(*(self._modules(source) for source in sources))

    def _is_attention(self, atom: Atom) -> bool:
        return any(
            word in name.lower() for name in self._modules(atom) if not is_norm(name) for word in ATTENTION_WORDS
        )

    def _is_output(self, atom: Atom) -> bool:
        return bool(atom.module) and atom.element == 0 and self._is_called_once(atom.module)

    def _is_called_once(self, module: str) -> bool:
        return bool(module) and sum(call.module == module for call in self._calls) == 1


def _stream_keys(call: SymbolicCall, stream: frozenset[int]) -> tuple[Key, Key | None] | None:
    """Return the arguments of `call` that are `stream`: one alone, or the two that a fused add and norm adds."""
    if call.added is not None and call.added.numbers == stream:
        return 0, 1 if 1 in call.inputs else "residual"
    for key, value in call.inputs.items():
        if value.numbers == stream and not value.has_repeats:
            return key, None
    return None


def _is_attribute(factors: tuple[str, ...]) -> bool:
    return not factors or (len(factors) == 1 and factors[0].startswith("self.") and factors[0][5:].isidentifier())


def _agreed(structures: Sequence[LayerStructure], where: str) -> LayerStructure:
    """Join the structures of all paths; a hook point that is elsewhere on another path cannot be taken."""
    if not structures:
        raise UnsupportedError(f"{where}: no path through forward returns")
    agreed = structures[0]
    if any((structure.style, structure.residual) != (agreed.style, agreed.residual) for structure in structures):
        raise UnsupportedError(f"{where}: forward carries the stream in one way on one path, otherwise on another")
    hooks = frozenset.intersection(*(structure.hooks for structure in structures))
    is_output = all(structure.mlp_in_is_norm_output for structure in structures)
    if _differ(structures, "mid", "mid_input", "mid_residual", "mid_norm"):
        agreed = replace(agreed, mid=None, mid_input=None, mid_residual=None, mid_norm=None)
        hooks -= {HookPoint.POST_ATTN} | ({HookPoint.ATTN_OUT} if agreed.style == "pair" else set())
        is_output = False
    if agreed.mid is None or _differ(structures, "first_norm"):
        agreed = replace(agreed, first_norm=None)
    if _differ(structures, "attn", "attn_input"):
        agreed = replace(agreed, attn=None, attn_input=None)
        hooks -= {HookPoint.ATTN_IN}
    if _differ(structures, "mlp", "mlp_input"):
        agreed = replace(agreed, mlp=None, mlp_input=None)
        hooks -= set() if is_output else {HookPoint.MLP_IN}
    if _differ(structures, "attn_branch", "mlp_branch", "branch_scale"):
        agreed = replace(agreed, attn_branch=None, mlp_branch=None, branch_scale=None)
        hooks -= {HookPoint.ATTN_OUT, HookPoint.MLP_OUT}
    inner = dict(agreed.inner)
    for hook, place in agreed.inner.items():
        if any(structure.inner.get(hook) != place for structure in structures):
            del inner[hook]
    hooks -= agreed.inner.keys() - inner.keys()
    return replace(agreed, mlp_in_is_norm_output=is_output, inner=inner, hooks=hooks)


def _differ(structures: Sequence[LayerStructure], *names: str) -> bool:
    return len({tuple(getattr(structure, name) for name in names) for structure in structures}) > 1
