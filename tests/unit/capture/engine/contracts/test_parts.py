"""How the packages of headgate join: by one interface, loaded by name."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import tomllib

from headgate.capture.engine.contracts.parts import PARTS, Part, collect, load_part, worker_part
from headgate.capture.schema.errors import ConfigError
from headgate.steering.config import SteeringConfig
from headgate.steering.worker.steering_part import SteeringPart
from tests.source_tree import ROOT

METHODS = {name for name, _ in inspect.getmembers(Part, inspect.isfunction)} - {"__init__", "brings"}


def test_capture_steering_and_the_consumers_are_the_parts_and_each_says_what_it_brings() -> None:
    found = {name: {method for method in METHODS if load_part(name).brings(method)} for name in PARTS}

    assert found == {
        "capture": {"worker", "routes", "metrics", "commands", "checks"},
        "consumers": {"commands", "captures", "checks"},
        "steering": METHODS - {"captures"},
    }
    assert list(PARTS) == sorted(PARTS)


def test_packages_of_others_join_by_consumers_and_controllers_alone() -> None:
    published = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]

    assert {group for group in published if group.startswith("headgate.")} == {"headgate.controllers"}
    assert "vllm.capture_consumers" in published


def test_one_part_alone_has_a_half_in_the_engine_core() -> None:
    assert [name for name in PARTS if load_part(name).brings("core")] == ["steering"]


def test_a_part_is_loaded_by_name_and_its_neighbours_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(Part):
        def worker(self, section: Any) -> Any:
            return self.name, dict(section)

    module = ModuleType("headgate_part_mine")
    module.Mine = Mine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "headgate_part_mine", module)
    monkeypatch.setitem(PARTS, "mine", "headgate_part_mine:Mine")
    monkeypatch.setitem(PARTS, "neighbour", "headgate_no_such_module:Part")

    assert worker_part("mine").worker({"size": 3}) == ("mine", {"size": 3})


def test_a_section_is_that_of_a_part_with_a_half_in_the_worker() -> None:
    for name in ("captur", "consumers"):
        with pytest.raises(ConfigError, match=f"no section '{name}'; known: capture, steering"):
            worker_part(name)


def test_parts_that_bring_nothing_are_left_out() -> None:
    assert list(collect(lambda part: part.metrics())) == ["capture", "steering"]


def test_loading_every_part_imports_neither_torch_nor_vllm() -> None:
    program = (
        "import sys\n"
        "from headgate.capture.engine.contracts.parts import PARTS, load_part\n"
        "commands = [name for part in PARTS for name in load_part(part).commands()]\n"
        "assert 'dump' in commands, commands\n"
        "sys.exit('torch' in sys.modules or 'vllm' in sys.modules)\n"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr or "torch or vllm was imported"


def test_every_attribute_of_a_steering_part_can_be_read_before_its_tables_are_there() -> None:
    part = SteeringPart(SteeringConfig())

    for name in dir(part):
        getattr(part, name)
