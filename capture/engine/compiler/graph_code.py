"""The code that ends up in vLLM's graphs, found from the actions, and its digest.

The digest is part of the key of vLLM's compile caches: a graph that was compiled from other code of headgate is never
loaded. It covers every module of headgate whose functions the traced code reaches, and all of `compiler`, which changes
what inductor makes of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

PACKAGE = "headgate."
ALWAYS = (
    "headgate.capture.engine.model.forward_wrappers",
    "headgate.capture.engine.compiler.graph_code",
    "headgate.capture.engine.compiler.inductor",
    "headgate.capture.engine.compiler.inductor_heuristics",
    "headgate.capture.engine.compiler.rewrites",
    "headgate.capture.engine.compiler.unfused_copy",
)
"""Modules that make or rewrite graphs without being called in them."""


def traced_modules(functions: Iterable[object]) -> tuple[str, ...]:
    """Names of headgate's modules whose code `functions` reach, sorted: by names, closures, partials and operators."""
    reached: set[str] = set(ALWAYS)
    seen: set[int] = set()
    waiting = list(functions)
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        function = _function(found)
        if function is not None and str(function.__module__).startswith(PACKAGE):
            reached.add(str(function.__module__))
            names = _names(function)
            reached |= {name for name in names if name.startswith(PACKAGE) and _path(name).is_file()}  # imported inside
            waiting += _named(function, names)
    return tuple(sorted(reached))


def digest_of(modules: Iterable[str]) -> str:
    """SHA-256 of the sources of headgate's modules of these names, 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for name in modules:
        digest.update(name.encode() + b"\0" + _path(name).read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _path(module: str) -> Path:
    """The file of one of headgate's modules, whether it was imported or not."""
    root = Path(__file__).parents[len(__name__.split(".")) - 2]
    return (root / Path(*module.split(".")[1:])).with_suffix(".py")


def _function(found: object) -> FunctionType | None:
    """The Python function of an object of traced code: itself, or what a wrapper of some kind holds."""
    if isinstance(found, partial):
        return _function(found.func)
    for attribute in ("__func__", "_init_fn", "fn", "__wrapped__"):  # methods, custom operators, Triton kernels
        inner = getattr(found, attribute, None) if not isinstance(found, FunctionType | ModuleType) else None
        if isinstance(inner, FunctionType):
            return inner
    if isinstance(found, FunctionType):
        return found
    call = vars(type(found)).get("__call__")
    return call if isinstance(call, FunctionType) else None


def _names(function: FunctionType) -> set[str]:
    """Names in a function's code and in that of functions inside it: globals, attributes, modules it imports."""
    codes, names = [function.__code__], set[str]()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return names


def _named(function: FunctionType, names: set[str]) -> Iterator[object]:
    """Objects that a function's code can reach: globals, attributes of modules, closure cells."""
    for name in names:
        found = function.__globals__.get(name)
        if isinstance(found, ModuleType) and found.__name__.startswith(PACKAGE):
            yield from (vars(found)[inner] for inner in names if inner in vars(found))
        elif found is not None:
            yield found
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue  # a cell that is still empty names nothing
