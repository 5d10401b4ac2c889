"""How parts join: by name, checked, and without harm to their neighbours."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import pluggy
import pytest

from headgate.capture import hookimpl
from headgate.capture.engine.contracts import parts
from headgate.capture.engine.contracts.parts import GROUP, Part, collect, load_part, part_names, worker_part
from headgate.capture.engine.contracts.worker_hooks import make_hooks
from headgate.capture.schema.errors import ConfigError
from headgate.steering.config import SteeringConfig
from headgate.steering.worker.steering_part import SteeringPart

Install = Callable[..., None]

WORKER = """
from headgate.capture import hookimpl

@hookimpl
def headgate_worker(section):
    return ("worker of", dict(section))
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs parts, each given as the source of its module by name."""

    def put(**sources: str) -> None:
        for name, source in sources.items():
            (tmp_path / f"headgate_part_{name}.py").write_text(source)
        about = tmp_path / "headgate_test_parts-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: headgate-test-parts\nVersion: 1.0\n")
        entries = "".join(f"{name} = headgate_part_{name}\n" for name in sources)
        (about / "entry_points.txt").write_text(f"[{GROUP}]\n{entries}")
        monkeypatch.syspath_prepend(str(tmp_path))

    parts._load.cache_clear()
    yield put
    parts._load.cache_clear()
    for name in [name for name in sys.modules if name.startswith("headgate_part_")]:
        del sys.modules[name]


def test_a_part_is_loaded_by_name_and_its_neighbours_are_not(install: Install) -> None:
    install(mine=WORKER, neighbour="raise RuntimeError('out of order')")

    worker = worker_part("mine").worker({"size": 3})

    assert worker == ("worker of", {"size": 3})
    assert "headgate_part_neighbour" not in sys.modules


def test_a_part_that_is_not_installed_is_answered_with_those_that_are(install: Install) -> None:
    install(mine=WORKER)

    with pytest.raises(ConfigError, match="no part 'mien' is installed; installed: capture, consumers, mine, steering"):
        load_part("mien")


def test_a_section_is_that_of_a_part_with_a_half_in_the_worker(install: Install) -> None:
    install(mine=WORKER)

    for name in ("captur", "consumers"):
        with pytest.raises(ConfigError, match=f"no section '{name}'; known: capture, mine, steering"):
            worker_part(name)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('out of order')", "RuntimeError: out of order"),
        (WORKER.replace("headgate_worker", "headgate_wroker"), "unknown hook 'headgate_wroker'"),
        (WORKER.replace("(section)", "(section, sites)"), r"Argument\(s\) {'sites'} are declared in the hookimpl"),
    ],
    ids=["cannot be imported", "unknown hook", "other arguments"],
)
def test_a_part_that_is_wrong_is_refused_where_it_is_named_and_left_out_elsewhere(
    install: Install, caplog: pytest.LogCaptureFixture, source: str, reason: str
) -> None:
    install(wrong=source, mine=WORKER)

    with pytest.raises(ConfigError, match=rf"(?s)part 'wrong' cannot be loaded from headgate_part_wrong: .*{reason}"):
        load_part("wrong")
    with pytest.raises(ConfigError, match="part 'wrong'"):
        collect(Part.commands, needed=("wrong",))
    with caplog.at_level(logging.ERROR, logger="headgate"):
        found = collect(lambda part: part.name, needed=("mine",))
    assert found == {name: name for name in ("capture", "consumers", "mine", "steering")}
    assert "part 'wrong' is left out" in caplog.text


def test_what_headgate_ships_joins_through_this_group_alone() -> None:
    hooks = [name for name, _ in inspect.getmembers(parts.PartSpecs, inspect.isfunction)]
    found = {name: {hook for hook in hooks if load_part(name).implements(hook)} for name in part_names()}

    assert found == {
        "capture": set(hooks) - {"headgate_captures", "headgate_core", "headgate_requests", "headgate_takes_actions"},
        "consumers": {"headgate_captures", "headgate_commands"},
        "steering": set(hooks) - {"headgate_captures"},
    }


def test_loading_every_part_imports_neither_torch_nor_vllm() -> None:
    program = (
        "import sys\n"
        "from headgate.capture.engine.contracts.parts import load_part, part_names\n"
        "commands = [name for part in part_names() for name in load_part(part).commands()]\n"
        "assert 'dump' in commands, commands\n"
        "sys.exit('torch' in sys.modules or 'vllm' in sys.modules)\n"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr or "torch or vllm was imported"


@pytest.fixture
def reading_pluggy(monkeypatch: pytest.MonkeyPatch) -> None:
    """pluggy as before 1.7, which reads every attribute of a plugin to find its hooks."""
    real = pluggy.PluginManager.parse_hookimpl_opts

    def parse(self: pluggy.PluginManager, plugin: object, name: str) -> object:
        return real(self, plugin, name) if inspect.isroutine(getattr(plugin, name)) else None

    monkeypatch.setattr(pluggy.PluginManager, "parse_hookimpl_opts", parse)


@pytest.mark.usefixtures("reading_pluggy")
def test_a_part_whose_attributes_cannot_be_read_yet_is_registered_with_any_pluggy() -> None:
    class NotOpen:
        @property
        def state(self) -> None:
            raise AssertionError("was read")

        @cached_property
        def later(self) -> None:
            raise AssertionError("was read")

        @hookimpl
        def headgate_needs_plain_steps(self) -> bool:
            return True

    assert make_hooks({"part": NotOpen()}).hook.headgate_needs_plain_steps() == [True]


def test_every_attribute_of_a_steering_part_can_be_read_before_its_tables_are_there() -> None:
    part = SteeringPart(SteeringConfig())

    for name in dir(part):
        getattr(part, name)

    assert make_hooks({"steering": part}).hook.headgate_graph_key.get_hookimpls() != []
