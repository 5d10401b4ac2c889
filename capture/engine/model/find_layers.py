"""Modules of a model that have hook points: its decoder layers, each with its `layer_structure`, and the last norm."""

from __future__ import annotations

import ast
import inspect

from torch import nn

from headgate.capture.engine import vllm_names
from headgate.capture.engine.model.layer_structure import HIDDEN_NAMES, LayerStructure, analyse_layer
from headgate.capture.engine.model.symbolic_forward import parse_function
from headgate.capture.engine.model.symbols import Key, is_norm
from headgate.capture.schema.errors import UnsupportedError

__all__ = ["Key", "LayerStructure", "analyse_layer", "find_decoder_stack", "find_final_norm"]


def find_decoder_stack(model: nn.Module) -> tuple[nn.Module, str, list[tuple[int, nn.Module]]]:
    """Find the decoder layers of a language model, or of the language model within a multimodal one.

    Returns:
        The module that owns the list of layers, the list's attribute there, and ``(global index, layer)`` of the
        layers on this pipeline stage.

    Raises:
        UnsupportedError: If there is no such list, more than one that could be it, or if its layers run more than
            once in a forward.
    """
    PPMissingLayer = vllm_names.LAYER_OF_OTHER_STAGE.get()

    parent, name, layers = _outermost_list(_language_model(model))
    where = f"{type(parent).__name__}.{name}"
    owned = [(index, layer) for index, layer in enumerate(layers) if not isinstance(layer, PPMissingLayer)]
    if len({id(layer) for _, layer in owned}) < len(owned):
        raise UnsupportedError(f"{where}: one layer object stands for several layers, so they cannot be told apart")
    if _runs_in_a_loop(parent, name):
        raise UnsupportedError(f"{where}: the layers run more than once in a forward, so a site has many values")
    return parent, name, owned


def find_final_norm(parent: nn.Module) -> tuple[str, bool] | None:
    """Find the norm that `parent` applies after its decoder layers.

    Args:
        parent: Owner of the list of layers.

    Returns:
        Its attribute, and whether it is called with ``(hidden, residual)``; None if this stage has none.
    """
    PPMissingLayer = vllm_names.LAYER_OF_OTHER_STAGE.get()

    lists = [name for name, child in parent.named_children() if isinstance(child, nn.ModuleList)]
    node = _forward_over(parent, lists)
    if node is None:
        return None
    after = max(loop.end_lineno or 0 for loop in _loops_over(node, lists))
    found = None
    for call in ast.walk(node):
        if not isinstance(call, ast.Call) or call.lineno <= after:
            continue
        name = ast.unparse(call.func).removeprefix("self.")
        module = getattr(parent, name, None)
        if isinstance(module, nn.Module) and is_norm(name, module) and not isinstance(module, PPMissingLayer):
            num_inputs = len(call.args) + sum(keyword.arg == "residual" for keyword in call.keywords)
            found = name, num_inputs > 1
    return found


def _language_model(model: nn.Module) -> nn.Module:
    find = getattr(model, "get_language_model", None)
    found = find() if callable(find) else model
    return found if isinstance(found, nn.Module) else model


def _outermost_list(model: nn.Module) -> tuple[nn.Module, str, nn.ModuleList]:
    """Return the longest of the outermost lists of decoder layers; experts and the like lie within."""
    depths: dict[int, list[tuple[nn.Module, str, nn.ModuleList]]] = {}
    for path, parent in model.named_modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.ModuleList) and any(map(_is_decoder_layer, child)):
                depths.setdefault(path.count(".") + bool(path), []).append((parent, name, child))
    if not depths:
        raise UnsupportedError(f"{type(model).__name__}: no list of decoder layers was found in it")
    outermost = depths[min(depths)]
    longest = max(len(layers) for *_, layers in outermost)
    found = [candidate for candidate in outermost if len(candidate[2]) == longest]
    if len(found) > 1:
        names = ", ".join(f"{type(parent).__name__}.{name}" for parent, name, _ in found)
        raise UnsupportedError(f"{type(model).__name__}: which of these lists holds the decoder's layers? {names}")
    return found[0]


def _is_decoder_layer(layer: nn.Module) -> bool:
    parameters = inspect.signature(inspect.unwrap(type(layer).forward)).parameters
    return any(name in parameters for name in HIDDEN_NAMES) and any(True for _ in layer.children())


def _forward_over(parent: nn.Module, lists: list[str]) -> ast.FunctionDef | None:
    """Return the forward that loops over one of `lists`: of the class of `parent`, or one that it calls of a base."""
    for owner in type(parent).__mro__:
        function = vars(owner).get("forward")
        if function is not None and owner is not nn.Module:
            node = parse_function(inspect.unwrap(function))
            if _loops_over(node, lists):
                return node
            if not any(isinstance(part, ast.Attribute) and part.attr == "forward" for part in ast.walk(node)):
                return None
    return None


def _loops_over(node: ast.AST, lists: list[str]) -> list[ast.For]:
    """Return the loops within `node` over one of `lists`, attributes of its object: over its items or by index."""
    attributes = {f"self.{name}" for name in lists}
    loops = [loop for loop in ast.walk(node) if isinstance(loop, ast.For)]
    return [loop for loop in loops if _attributes(loop.iter) & attributes or _indices(loop, attributes)]


def _indices(loop: ast.For, attributes: set[str]) -> set[str]:
    """Return the indices into one of `attributes` that `loop` computes from its target."""
    targets = {part.id for part in ast.walk(loop.target) if isinstance(part, ast.Name)}
    found = [
        part.slice
        for part in ast.walk(loop)
        if isinstance(part, ast.Subscript) and ast.unparse(part.value) in attributes
    ]
    named = {ast.unparse(index): {part.id for part in ast.walk(index) if isinstance(part, ast.Name)} for index in found}
    return {index for index, names in named.items() if names & targets}


def _may_repeat(loop: ast.For, attributes: set[str]) -> bool:
    """Whether `loop` may meet a layer twice: by an index that is not just the next of a range."""
    indices = _indices(loop, attributes)
    return bool(indices) and (indices != {ast.unparse(loop.target)} or not ast.unparse(loop.iter).startswith("range("))


def _runs_in_a_loop(parent: nn.Module, name: str) -> bool:
    """Whether the loop over the layers is itself repeated, or may take a layer twice."""
    node = _forward_over(parent, [name])
    if node is None:
        return False
    outer = [loop for loop in ast.walk(node) if isinstance(loop, ast.For | ast.While)]
    is_nested = any(inner is not loop for loop in outer for inner in _loops_over(loop, [name]))
    return is_nested or any(_may_repeat(loop, {f"self.{name}"}) for loop in _loops_over(node, [name]))


def _attributes(node: ast.AST) -> set[str]:
    return {ast.unparse(part) for part in ast.walk(node) if isinstance(part, ast.Attribute)}
