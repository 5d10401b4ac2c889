"""Patches: put in once, on top of others, taken out again, refused where the target differs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headgate.capture.engine.setup.patch_set import Patch, PatchSet
from headgate.capture.engine.vllm_names import Name, find_version
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
    target = Name(f"patched_here:{target}")
    return Patch(target=target, wrap=doubling, why="to see it", parameters=parameters)


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

    def fail(thing: type) -> None:
        raise UnsupportedError(f"{thing.__name__} is taken")

    patches.when_imported(fail, Name("patched_here:Thing"))

    assert patches.problems == ["patched_here.Thing: Thing is taken"]


def test_a_module_that_is_gone_is_refused(module: Any) -> None:
    gone = Patch(target=Name("patched_here.gone:f"), wrap=doubling, why="to see it", parameters=())
    patches = PatchSet([gone])
    patches.install()

    with pytest.raises(UnsupportedError, match=r"patched_here\.gone does not exist"):
        patches.require()


MOVED = Name("patched_later:Thing", "patched_here:Thing")


@pytest.fixture
def later(module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The file of a module ``patched_later``, which is empty and not imported yet."""
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "patched_later.py"
    path.touch()
    yield path
    sys.modules.pop("patched_later", None)


def test_a_target_that_has_moved_is_patched_where_the_release_has_it(later: Path, module: Any) -> None:
    patches = PatchSet(
        [Patch(target=MOVED.member("method"), wrap=doubling, why="moved", parameters=("self", "number"))]
    )

    patches.install()
    import_module("patched_later")

    assert module.Thing().method(3) == 6
    assert patches.problems == []
    patches.require()


def test_a_target_with_another_name_is_patched_where_the_release_has_that(module: Any) -> None:
    renamed = Name("patched_here:Thing").member("compute", "method")
    patch = Patch(target=renamed, wrap=doubling, why="renamed", parameters=("self", "number"))
    patches = PatchSet([patch])

    patches.install()

    assert module.Thing().method(3) == 6
    assert patch.name == "patched_here.Thing.method"
    patches.undo()
    assert module.Thing().method(3) == 3


def test_a_target_waits_for_the_module_that_has_it(later: Path, module: Any) -> None:
    del module.Thing
    later.write_text("class Thing:\n    def method(self, number): return number\n")
    patches = PatchSet([Patch(target=MOVED.member("method"), wrap=doubling, why="moved", parameters=("self",))])

    patches.install()
    assert patches.problems == []

    assert import_module("patched_later").Thing().method(3) == 6


def test_a_target_that_is_at_none_of_its_places_is_refused_with_all_of_them(later: Path, module: Any) -> None:
    del module.Thing
    patches = PatchSet([Patch(target=MOVED.member("method"), wrap=doubling, why="moved", parameters=("self",))])

    patches.install()
    import_module("patched_later")

    assert patches.problems == ["patched_later.Thing.method or patched_here.Thing.method does not exist"]
    with pytest.raises(UnsupportedError, match=r"differs .*\n- patched_later\.Thing") as caught:
        patches.require()
    assert f"this vLLM ({find_version()}) differs" in str(caught.value)


def test_a_name_that_is_used_and_gone_is_refused_as_soon_as_its_module_is_there(later: Path, module: Any) -> None:
    gone, found = Name("patched_later:f", "patched_here:f"), Name("patched_here:Thing")
    patches = PatchSet([], [gone, found])

    patches.install()
    assert patches.problems == []
    import_module("patched_later")

    assert patches.problems == ["patched_later.f or patched_here.f does not exist"]
    with pytest.raises(
        UnsupportedError, match=r"has no patched_later\.f or patched_here\.f\. headgate works with vLLM"
    ):
        gone.get()
    assert found.get() is module.Thing


def test_a_name_whose_modules_are_gone_is_refused(module: Any) -> None:
    patches = PatchSet([], [Name("patched_here.gone:f", "patched_here.gone_too:f")])
    patches.install()

    with pytest.raises(UnsupportedError, match=r"patched_here\.gone and patched_here\.gone_too does not exist"):
        patches.require()


def test_a_name_that_is_not_required_has_a_default(module: Any) -> None:
    assert Name("patched_here:gone", is_required=False).get(default=3) == 3
