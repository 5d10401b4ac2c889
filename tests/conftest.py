"""Fixtures of every test: a clean environment, no leaked threads, the small chat model, one engine at a time."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from examples.model import ensure_model
from tests.deadlines import patience
from tests.environment import set_environment

if TYPE_CHECKING:
    from vllm import LLM

TESTS = Path(__file__).parent

ENGINE_DEFAULTS: Mapping[str, Any] = {
    "block_size": 32,
    "disable_log_stats": True,
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "seed": 0,
}
"""Small and quick to start; a test that needs other values passes them to `shared_llm`."""

NUM_EXAMPLES = int(os.environ.get("TESTS_EXAMPLES", "100"))
"""Of each property that names no number itself."""

# No deadline: on two shared cores time says nothing.
settings.register_profile("headgate", deadline=None, print_blob=True, max_examples=NUM_EXAMPLES)
settings.load_profile("headgate")


def pytest_configure(config: pytest.Config) -> None:
    """Fix the environment before any test module is imported."""
    set_environment()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark by folder: whatever lies in ``engine/`` or ``gpu/`` needs an engine or a GPU."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if folder in ("engine", "gpu"):
            item.add_marker(getattr(pytest.mark, folder))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let collections pass over what is imported: a million objects take 0.4 s, and each engine collects ten times.

    Where engines run, vLLM thaws everything when one ends in this process, and would freeze its own objects when one
    starts. Elsewhere it is headgate's capture process that freezes: a test that runs it here would collect all again.
    """
    gc.collect()
    gc.freeze()
    if any(item.get_closest_marker("engine") for item in session.items):
        gc.freeze = gc.unfreeze = lambda: None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let a test run for as long as it may on a quiet machine, in the time of this one."""
    marker = item.get_closest_marker("timeout")
    limit = marker.args[0] if marker is not None else item.config.getoption("timeout", None)
    if limit:
        item.add_marker(pytest.mark.timeout(patience(float(limit))), append=False)
    return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `gpu` where there is no CUDA device."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU")


@pytest.fixture(autouse=True)
def clean_environment(request: pytest.FixtureRequest) -> Iterator[None]:
    """Undo whatever a test did to ``os.environ``; an engine may outlive its test, so those are left alone."""
    before = dict(os.environ)
    yield
    if request.node.get_closest_marker("engine") is None:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def no_leaked_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread behind; threads of an engine are looked at when `one_engine` closes it."""
    before = set(threading.enumerate())
    yield
    if request.node.get_closest_marker("engine") is None:
        alive = still_running(thread for thread in threading.enumerate() if thread not in before)
        assert not alive, f"threads left running: {alive}"


def still_running(threads: Iterable[threading.Thread], grace_s: float = 5.0) -> list[str]:
    """Names of those of `threads` that do not end within `grace_s` seconds each."""
    threads = list(threads)
    for thread in threads:
        thread.join(grace_s)
    return sorted(thread.name for thread in threads if thread.is_alive())


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill every ``torch.empty`` of floats with NaN, so that a row which nobody wrote shows up in a comparison."""
    import torch

    original = torch.empty

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = original(*args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", empty)


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """SmolLM2-135M-Instruct (30 layers, hidden size 576, bf16), made on first use and then kept in the cache."""
    return ensure_model()


class OneEngine:
    """Keeps at most one `LLM` alive: starting one takes 10 s and more, and two do not fit on a small machine."""

    def __init__(self) -> None:
        self._settings: dict[str, Any] | None = None
        self._llm: LLM | None = None

    def get(self, **settings: Any) -> LLM:
        """The running engine if it was started with the same `settings`, else a new one in its place."""
        if self._llm is None or settings != self._settings:
            self.close()
            self._llm, self._settings = start_llm(**settings), settings
        return self._llm

    def close(self) -> None:
        """Shut the engine down and wait for its processes and threads."""
        llm, self._llm, self._settings = self._llm, None, None
        if llm is not None:
            stop_llm(llm)


def start_llm(*, in_process: bool = False, **settings: Any) -> LLM:
    """Start an `LLM` with `ENGINE_DEFAULTS` under `settings`.

    Args:
        in_process: Run the engine core in this process, so that a test can look into it.
        settings: Keywords of `LLM`; `model` is required.
    """
    from vllm import LLM

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    settings = {**ENGINE_DEFAULTS, **settings, "model": str(settings["model"])}
    # Else it is a GiB, which takes a second to fill.
    blocks = -(-settings["max_model_len"] // settings["block_size"])
    settings.setdefault("num_gpu_blocks_override", 2 * (settings["max_num_seqs"] + 1) * blocks)
    return LLM(**settings)


def stop_llm(llm: LLM) -> None:
    """Shut `llm` down; afterwards another engine can be started in this process."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    gc.collect()


@pytest.fixture(scope="session")
def one_engine() -> Iterator[OneEngine]:
    """The engine that `shared_llm` shares; closed when the tests end, with every thread of ours."""
    engine = OneEngine()
    yield engine
    engine.close()
    alive = still_running(thread for thread in threading.enumerate() if thread.name.startswith("headgate"))
    assert not alive, f"threads left running after the last engine: {alive}"


@pytest.fixture
def shared_llm(one_engine: OneEngine, model_dir: Path) -> Callable[..., LLM]:
    """``shared_llm(**settings)``: an `LLM`, shared with every test that asks for the same settings in a row.

    `model` defaults to `model_dir`; see `start_llm` for the other settings. Tests must leave it idle and must not
    shut it down: a test that does so starts its own with `start_llm`.
    """

    def get(**settings: Any) -> LLM:
        return one_engine.get(**{"model": str(model_dir), **settings})

    return get
