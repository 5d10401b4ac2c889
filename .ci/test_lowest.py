"""Tests with the oldest dependencies that pyproject.toml allows: ``test_lowest.py`` (``make test-lowest``).

Only our direct dependencies are replaced: two folders of them come before the packages of `make setup`. The first holds
the very lowest versions; the modules that use them are tested, without vLLM. The second holds the lowest versions that
the pinned vLLM lets in beside it; the front end and one engine are tested.

Left out is what no version of a dependency changes, and takes most of the time: processes that are killed, full disks,
bounded memory, late answers, the state machine of admission and the studio's sources are about Python's own library,
node and ours. So is S3, as s3fs goes with the fsspec of its own version alone. Formats, validation, arrays, sockets
and files that are read back stay; of properties, 20 examples are tried.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import run_tests
import setup_env
import tomllib
from run_tests import Job
from setup_env import HERE, ROOT, SetupError, say

UNITS = (
    *("capture/schema/test_config.py", "capture/schema/test_registry.py", "capture/planning/test_plan.py"),
    *("capture/delivery/test_request_assembler.py", "capture/test_cli.py", "capture/engine/contracts"),
    *("capture/engine/server", "capture/engine/setup", "capture/links"),
    *("consumers", "steering/client", "steering/core", "steering/features", "steering/files", "steering/documents"),
)
"""Modules that use a dependency, under tests/unit."""

WITH_VLLM = ("capture/engine/contracts/test_core_calls.py", "capture/engine/server/test_scoring.py")
"""Files among them that import vLLM, which the very lowest versions keep from starting."""

OF_NO_VERSION = (
    "capture/engine/server/test_studio_page.py",
    "capture/links/test_driver_lifetime.py",
    "capture/links/test_result_hub_processes.py",
    "capture/links/test_shared_memory.py",
    "consumers/datasets/test_dataset_index.py::test_a_hundred_gigabytes_are_gone_through_in_bounded_memory",
    "consumers/filesystem/test_filesystem_faults.py",
    "consumers/filesystem/test_object_store.py",
    "consumers/datasets/test_dataset_object_store.py",
    "consumers/harvest/test_harvest_remote.py::test_killed_processes_leave_no_gaps_and_no_doubles",
    "consumers/harvest/test_harvest_resume.py",
    "consumers/harvest/test_live_rows.py",
    "consumers/moments/test_moments_consumer.py::test_a_killed_process_loses_only_what_was_not_written",
    "steering/core/controllers/test_late_answers.py",
    "steering/core/test_admission.py",
)
"""Files among them, and tests of files, that are about none of their dependencies; see above."""

WITH_PYARROW = (
    "consumers/datasets/test_dataset_export.py::test_parquet_has_every_row",
    "consumers/harvest/test_harvest_prompts.py::test_a_column_of_parquet_is_read",
    "consumers/stream",
    "consumers/test_columns.py::test_batches_of_a_stream_have_the_columns_alone",
)
"""Tests among them with pyarrow: the pinned one, which is not replaced, takes no numpy as old as the lowest."""

FRONT_END = ("tests/frontend/test_steering_http.py",)


def main() -> int:
    """Install the oldest versions and run the tests; the exit status is 1 if any of this fails."""
    folder = Path(tempfile.mkdtemp(prefix="headgate-lowest-"))
    try:
        index = setup_env.pip_index(Path(sys.executable))
        lowest, beside = folder / "lowest", folder / "beside-vllm"
        install(lowest, requirements(), index)
        install(beside, pinned(folder, index), index)
        model = subprocess.run(
            [sys.executable, ROOT / "examples" / "model.py"], capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout.splitlines()[-1]
    except SetupError as error:
        print(f"\ntest-lowest failed: {error}", file=sys.stderr)
        return 1
    marker = ("-m", "not gpu and not extended")
    names = WITH_VLLM + OF_NO_VERSION + WITH_PYARROW
    left_out = (f"--{'deselect' if '::' in path else 'ignore'}=tests/unit/{path}" for path in names)
    units = (*(f"tests/unit/{path}" for path in UNITS), *left_out)
    engine = (str(HERE / "one_engine.py"), model, str(folder / "captures"))
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    quiet["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # vLLM's processes begin with what is imported already
    jobs = [
        Job("lowest, units", (*marker, *units), {**before(lowest), "TESTS_EXAMPLES": "20"}),
        Job("lowest beside vLLM, one engine", engine, {**before(beside), **quiet}),
        *(Job(f"lowest beside vLLM, {path}", (*marker, path), before(beside)) for path in FRONT_END),
    ]
    return run_tests.run_all(jobs, min(os.cpu_count() or 1, 2))


def requirements() -> list[str]:
    """What pyproject.toml requires, the extras of the client and of pictures included; each must have a lower bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["client"], *extras["plot"]]
    if unbound := [each for each in wanted if ">=" not in each]:
        raise SetupError(f"pyproject.toml: no lower bound for {', '.join(unbound)}; give each one that was tried")
    return wanted


def pinned(folder: Path, index: Mapping[str, str]) -> list[str]:
    """The lowest versions beside the pinned vLLM, whose own requirements count as well."""
    names = {name_of(each) for each in requirements()}
    rest = [line for line in (HERE / "requirements.lock").read_text().splitlines() if name_of(line) not in names]
    (folder / "wanted.in").write_text("\n".join([*requirements(), f"vllm-cpu=={setup_env.VLLM_VERSION}"]))
    (folder / "rest.lock").write_text("\n".join(rest))
    command = [*UV, "compile", "--quiet", "--python", sys.executable, "--resolution", "lowest-direct", "--no-header"]
    command += [
        "--no-annotate",
        "--overrides",
        HERE / "overrides.txt",
        "-c",
        folder / "rest.lock",
        folder / "wanted.in",
    ]
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env={**os.environ, **index}, check=False
    )
    if done.returncode:
        raise SetupError(f"uv finds no versions beside vLLM: {done.stderr}")
    return [line for line in done.stdout.splitlines() if name_of(line) in names]


UV: tuple[str | Path, ...] = (Path(sys.executable).parent / "uv", "pip")


def install(folder: Path, wanted: Sequence[str], index: Mapping[str, str]) -> None:
    """Install the lowest of `wanted`, and nothing that they need, into `folder`."""
    command = [*UV, "install", "--quiet", "--python", sys.executable, "--target", folder, "--no-deps", *wanted]
    # Building an old version from source says more about this machine's compiler than about headgate.
    command += ["--resolution", "lowest-direct", "--only-binary", ":all:"]
    setup_env.run(command, "the oldest versions could not be installed", env={**os.environ, **index})
    found = sorted(path.name.removesuffix(".dist-info") for path in folder.glob("*.dist-info"))
    say(f"{folder.name}: {', '.join(found)}")


def before(folder: Path) -> dict[str, str]:
    """The environment in which the packages of `folder` come first."""
    return {"PYTHONPATH": str(folder)}


def name_of(requirement: str) -> str:
    """The package that a line is about; empty if it is none."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return found[0].lower().replace("_", "-") if found else ""


if __name__ == "__main__":
    sys.exit(main())
