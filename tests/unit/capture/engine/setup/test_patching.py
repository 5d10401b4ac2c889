"""Patches: put in once, on top of others, taken out again, refused where the target differs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from types import ModuleType
from typing import Any

import pytest

from headgate.capture.engine.setup.patch_set import Patch, PatchSet
from headgate.capture.schema.errors import UnsupportedError


class Base:
    def inherited(self, number: int) -> int:
        return number


@pytest.fixture
def module() -> Iterator[ModuleType]:
    """An imported module ``patched_here`` with a class ``Thing``."""

    class Thing(Base):
        def method(self, number: int, more: int = 0) -> int:
            return number + more

        @staticmethod
        def static(number: int) -> int:
            return number

        @classmethod
        def build(cls, number: int) -> tuple[type, int]:
            return cls, number

    module = ModuleType("patched_here")
    module.Thing = Thing  # type: ignore[attr-defined]
    sys.modules["patched_here"] = module
    yield module
    del sys.modules["patched_here"]


def doubling(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        return result * 2 if isinstance(result, int) else (result[0], result[1] * 2)

    return wrapped


def patch(target: str, *parameters: str) -> Patch:
    return Patch(module="patched_here", target=target, wrap=doubling, why="to see it", parameters=parameters)


METHOD = patch("Thing.method", "self", "number")


def test_a_method_is_wrapped_and_restored(module: Any) -> None:
    before = vars(module.Thing)["method"]
    patches = PatchSet([METHOD])

    patches.install()
    assert module.Thing().method(3) == 6
    assert patches.undo() == []

    assert vars(module.Thing)["method"] is before


@pytest.mark.parametrize("target", ["Thing.method", "Thing.inherited"])
def test_an_instance_made_before_sees_the_patch(module: Any, target: str) -> None:
    thing = module.Thing()
    patches = PatchSet([patch(target, "self", "number")])

    patches.install()

    assert getattr(thing, target.removeprefix("Thing."))(4) == 8


def test_an_inherited_method_is_patched_in_the_class_named_alone(module: Any) -> None:
    patches = PatchSet([patch("Thing.inherited", "self", "number")])

    patches.install()
    assert (module.Thing().inherited(1), Base().inherited(1)) == (2, 1)
    patches.undo()

    assert "inherited" not in vars(module.Thing)


def test_a_static_method_stays_static(module: Any) -> None:
    PatchSet([patch("Thing.static", "number")]).install()

    assert module.Thing.static(2) == module.Thing().static(2) == 4


def test_a_class_method_keeps_the_class_it_is_called_on(module: Any) -> None:
    PatchSet([patch("Thing.build", "cls", "number")]).install()

    class Special(module.Thing):  # type: ignore[misc]
        pass

    assert Special.build(2) == (Special, 4)


def test_installing_again_changes_nothing(module: Any) -> None:
    PatchSet([METHOD]).install()
    PatchSet([METHOD]).install()

    assert module.Thing().method(3) == 6


def test_a_patch_of_another_plugin_below_stays_in_force(module: Any) -> None:
    module.Thing.method = doubling(module.Thing.method)
    PatchSet([METHOD]).install()

    assert module.Thing().method(3) == 12


def test_a_patch_of_another_plugin_on_top_is_left_alone(module: Any) -> None:
    patches = PatchSet([METHOD])
    patches.install()
    module.Thing.method = theirs = doubling(module.Thing.method)

    stuck = patches.undo()

    assert stuck == ["patched_here.Thing.method"]
    assert module.Thing.method is theirs


PROBLEMS = {
    "a class that is gone": (patch("Gone.method", "self"), "patched_here.Gone.method does not exist"),
    "a method that is gone": (patch("Thing.gone", "self"), "patched_here.Thing.gone does not exist"),
    "another parameter": (
        patch("Thing.method", "self", "count"),
        "patched_here.Thing.method takes (self, number, more), expected (self, count, ...)",
    ),
    "a parameter that is gone": (
        patch("Thing.static", "number", "more"),
        "patched_here.Thing.static takes (number), expected (number, more, ...)",
    ),
}


@pytest.mark.parametrize(("wrong", "problem"), PROBLEMS.values(), ids=PROBLEMS.keys())
def test_what_differs_is_not_patched_and_refused(module: Any, wrong: Patch, problem: str) -> None:
    patches = PatchSet([wrong, METHOD])

    patches.install()

    assert patches.problems == [problem]
    assert module.Thing().method(3) == 6, "the other patches are in force"
    with pytest.raises(UnsupportedError, match=r"works with vLLM 0\.26 to 0\.33") as caught:
        patches.require()
    assert problem in str(caught.value)


def test_nothing_is_refused_when_everything_fits(module: Any) -> None:
    patches = PatchSet([METHOD])
    patches.install()

    patches.require()


def test_a_failing_callback_is_a_problem_and_no_import_error(module: Any) -> None:
    patches = PatchSet([])

    def fail(module: ModuleType) -> None:
        raise UnsupportedError("it is taken")

    patches.when_imported("patched_here", fail)

    assert patches.problems == ["patched_here: it is taken"]


def test_a_module_that_is_gone_is_refused(module: Any) -> None:
    gone = Patch(module="patched_here.gone", target="f", wrap=doubling, why="to see it", parameters=())
    patches = PatchSet([gone])
    patches.install()

    with pytest.raises(UnsupportedError, match=r"patched_here\.gone does not exist"):
        patches.require()
