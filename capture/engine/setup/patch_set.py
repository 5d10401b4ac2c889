"""Patches: wrapping attributes of vLLM, each right after its module was imported, and taking the wrappers out again.

A replacement wraps whatever is there, so patches of other plugins stay in force below it. A patch whose target is
missing, or takes other parameters than expected, is not installed and is remembered: the code that needs it refuses.

Every vLLM process imports its own share of vLLM. `ImportHook` waits for a module instead of importing it: a patch must
neither load a module where it is not needed nor come too late where it is.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType

from headgate.capture.engine.vllm_names import WORKS_WITH, Located, Name, exists, find_version
from headgate.capture.engine.vllm_types import Function
from headgate.capture.schema.errors import UnsupportedError

logger = logging.getLogger("headgate")

Wrap = Callable[[Function], Function]
_MARK = "headgate_patch"


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """One attribute of vLLM that headgate wraps.

    Attributes:
        target: The attribute: a function of a module, or a method of a class.
        wrap: Makes the replacement from the original.
        why: The replacement's purpose, and the fault that it prevents.
        parameters: The original's first parameters, by name and order. More may follow: versions differ there,
            and replacements pass them on.
        only_refuses: It is of use in a vLLM that headgate was not made for, too.
    """

    target: Name
    wrap: Wrap
    why: str
    parameters: tuple[str, ...]
    only_refuses: bool = False

    @property
    def name(self) -> str:
        """The attribute as a dotted name, where it is in this process; all its places while it is in none of them."""
        found = self.target.find()
        return str(self.target) if found is None else found.place

    def problem(self) -> str | None:
        """Say what keeps the patch from being installed in the modules that are imported; None if nothing does."""
        found = self.target.find()
        if found is None:
            return f"{self.target} does not exist"
        takes = tuple(inspect.signature(_function(found.owner, found.attribute)).parameters)
        if takes[: len(self.parameters)] != self.parameters:
            return f"{found.place} takes ({', '.join(takes)}), expected ({', '.join(self.parameters)}, ...)"
        return None

    def install(self) -> Callable[[], bool]:
        """Put the replacement in, where there is no `problem`; return its undo, which says whether it could."""
        owner, attribute, place = self._found()
        inherited = attribute not in vars(owner)
        held = inspect.getattr_static(owner, attribute)
        replacement = self.wrap(_function(owner, attribute))
        setattr(replacement, _MARK, place)
        installed: object = staticmethod(replacement) if isinstance(held, staticmethod) else replacement
        installed = classmethod(replacement) if isinstance(held, classmethod) else installed
        setattr(owner, attribute, installed)

        def undo() -> bool:
            if inspect.getattr_static(owner, attribute) is not installed:
                return False
            if inherited:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, held)
            return True

        return undo

    def is_installed(self) -> bool:
        """Whether the attribute, or something it wraps, is already our replacement."""
        found = self.target.find()
        current = None if found is None else getattr(found.owner, found.attribute, None)
        while found is not None and current is not None:
            if getattr(current, _MARK, None) == found.place:
                return True
            current = getattr(current, "__wrapped__", None)
        return False

    def _found(self) -> Located:
        found = self.target.find()
        if found is None:
            raise AssertionError(f"{self.target} was to be patched before it was imported")
        return found


def _function(owner: object, attribute: str) -> Function:
    """Return the plain function: an inherited class method must not stay bound to the class it was found on."""
    held = inspect.getattr_static(owner, attribute)
    return held.__func__ if isinstance(held, staticmethod | classmethod) else held


class PatchSet:
    """A table of patches at work in this process.

    Args:
        patches: The patches.
        names: Attributes that headgate uses and does not wrap; each is looked for when its module is imported.

    Attributes:
        problems: A line for each patch that could not be installed so far, with the reason, and for each missing name.
    """

    def __init__(self, patches: Iterable[Patch], names: Iterable[Name] = ()) -> None:
        self._patches = tuple(patches)
        self._names = tuple(names)
        self._hook = ImportHook()
        self._undo: list[tuple[Patch, Callable[[], bool]]] = []
        self.problems: list[str] = []

    def install(self) -> None:
        """Patch what is imported, and the rest as soon as it is. Idempotent."""
        for patch in self._patches:
            self._when_imported(patch.target, partial(self._install, patch))
        for name in self._names:
            self._when_imported(name, partial(self._look_for, name))

    def when_imported(self, call: Callable[..., None], *names: Name) -> None:
        """Call `call` with attributes of one module when that is imported; its failure counts as a problem."""

        def guarded() -> None:
            try:
                call(*(name.get() for name in names))
            except Exception as error:  # noqa: BLE001  (an import of vLLM's must not fail by our doing)
                self._note(f"{names[0]}: {error}")

        self._when_imported(names[0], guarded)

    def _when_imported(self, name: Name, call: Callable[[], None]) -> None:
        """Call `call` when a module was imported that has `name`, or the last one that might have it."""

        def check(_: ModuleType) -> None:
            if name.find() is not None or not name.is_still_expected():
                call()

        for module in name.modules:
            self._hook.when_imported(module, check)

    def undo(self) -> list[str]:
        """Take the patches out, last first; return the ones that another patch lies on top of."""
        self._hook.forget()
        stuck = [patch.name for patch, undo in reversed(self._undo) if not undo()]
        self._undo.clear()
        return stuck

    def require(self) -> None:
        """Refuse if anything could not be patched.

        Raises:
            UnsupportedError: Naming what differs and the versions that work.
        """
        used = [*(patch.target for patch in self._patches), *self._names]
        absent = [" and ".join(name.modules) for name in used if not any(map(exists, name.modules))]
        problems = [*self.problems, *(f"{modules} does not exist" for modules in sorted(set(absent)))]
        if problems:
            lines = "\n".join(f"- {problem}" for problem in problems)
            raise UnsupportedError(
                f"this vLLM ({find_version()}) differs from those headgate was made for:\n{lines}\n{WORKS_WITH}"
            )

    def _install(self, patch: Patch) -> None:
        problem = patch.problem()
        if problem is not None:
            self._note(problem)
        elif not patch.is_installed():
            self._undo.append((patch, patch.install()))

    def _look_for(self, name: Name) -> None:
        if name.find() is None:
            self._note(f"{name} does not exist")

    def _note(self, problem: str) -> None:
        self.problems.append(problem)
        logger.warning("headgate: %s; capture is not available in this process. %s", problem, WORKS_WITH)


_of_this_process: PatchSet | None = None
"""Patches are made to classes, so they are a matter of the process and not of one engine."""


def process_patches() -> PatchSet | None:
    """Return the patches at work in this process; None if headgate is not installed in it."""
    return _of_this_process


def set_process_patches(patches: PatchSet | None) -> None:
    """Name the patches at work in this process; None when they were taken out."""
    global _of_this_process
    _of_this_process = patches


OnImport = Callable[[ModuleType], None]


class ImportHook(importlib.abc.MetaPathFinder):
    """Finder at the head of ``sys.meta_path`` that watches for the modules asked for.

    Modules are imported on any thread; `_lock` guards the table of callbacks and is never held while one runs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, list[OnImport]] = {}

    def when_imported(self, name: str, call: OnImport) -> None:
        """Call `call` with module `name`: now if it is imported, else as soon as it is."""
        module = sys.modules.get(name)
        if module is not None and not _is_initializing(module):
            call(module)
            return
        with self._lock:
            self._waiting.setdefault(name, []).append(call)
            if self not in sys.meta_path:
                sys.meta_path.insert(0, self)

    def forget(self) -> None:
        """Drop every callback that still waits, and leave ``sys.meta_path``."""
        with self._lock:
            self._waiting.clear()
            if self in sys.meta_path:
                sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Let the other finders find `name`; run the callbacks after it was executed."""
        with self._lock:
            if name not in self._waiting:
                return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _NotifyingLoader(spec.loader, self)
                return spec
        return None

    def _imported(self, module: ModuleType) -> None:
        with self._lock:
            calls = self._waiting.pop(module.__name__, [])
        for call in calls:
            call(module)


class _NotifyingLoader(importlib.abc.Loader):
    """A module's own loader, followed by the callbacks."""

    def __init__(self, loader: importlib.abc.Loader, hook: ImportHook) -> None:
        self._loader = loader
        self._hook = hook

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        # From here on the module is as if we had never been there: `inspect` and `pkgutil` look at these.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._hook._imported(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


def _is_initializing(module: ModuleType) -> bool:
    spec = getattr(module, "__spec__", None)
    return bool(getattr(spec, "_initializing", False))
